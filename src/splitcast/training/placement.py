"""Who holds which blocks: a sequence of segments, in the order in which a sample passes them.

Split learning has two, clients then server; FedAvg has one; with labels at home there are three, and the last is the
clients' again. Clients of equal placements form a cohort and run together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from splitcast.base.errors import SplitcastError
from splitcast.model.split import SplitModel, block_of

Side = Literal["client", "server"]
SIDES: tuple[Side, Side] = ("client", "server")


@dataclass(frozen=True)
class Segment:
    """Blocks start+1..stop on one side."""

    side: Side
    start: int
    stop: int
    head: bool = False
    """an auxiliary head, beside the way of a sample: it reads what leaves the first segment"""

    def holds(self, name: str) -> bool:
        """Whether a parameter belongs to these blocks."""
        return self.start <= block_of(name) < self.stop


@dataclass(frozen=True)
class Placement:
    """Segments that cover all V blocks.

    >>> placed = Placement.split(2, depth=5)
    >>> placed.cut, placed.depth, placed.side("1.weight"), placed.side("2.weight")
    (2, 5, 'client', 'server')
    """

    segments: tuple[Segment, ...]
    chosen: int = 0
    """The user's cut that it stands for, where that is not the end of the first segment"""

    def __post_init__(self) -> None:
        at = 0
        for segment in self.way:
            if segment.start != at or segment.stop < segment.start:
                raise SplitcastError(f"placement: segments must follow each other, got {self.segments}")
            at = segment.stop

    @staticmethod
    def split(cut: int, depth: int) -> "Placement":
        """Blocks 1..v on the clients, v+1..V on the server."""
        if not 1 <= cut < depth:
            raise SplitcastError(f"cut: {cut} is not legal; choose 1..{depth - 1}")
        return Placement((Segment("client", 0, cut), Segment("server", cut, depth)))

    @staticmethod
    def at_home(cut: int, depth: int) -> "Placement":
        """The U-shape: blocks 1..v and the last one on the clients, who keep their targets; the others on the server.

        >>> [(segment.side, segment.start, segment.stop) for segment in Placement.at_home(2, depth=5).segments]
        [('client', 0, 2), ('server', 2, 4), ('client', 4, 5)]
        """
        if not 1 <= cut < depth - 1:
            raise SplitcastError(f"cut: {cut} is not legal with labels at home; choose 1..{depth - 2}")
        last = depth - 1
        return Placement((Segment("client", 0, cut), Segment("server", cut, last), Segment("client", last, depth)))

    @staticmethod
    def whole(depth: int) -> "Placement":
        """All blocks on the clients."""
        return Placement((Segment("client", 0, depth),))

    def with_head(self) -> "Placement":
        """The same with the auxiliary head of the cut (`SplitModel.with_heads`) on the clients, as the last segment."""
        at = self.depth + self.segments[0].stop - 1
        return replace(self, segments=(*self.segments, Segment("client", at, at + 1, head=True)))

    @property
    def way(self) -> list[Segment]:
        """The segments that a sample passes on its way to the output."""
        return [segment for segment in self.segments if not segment.head]

    @property
    def depth(self) -> int:
        """V"""
        return self.way[-1].stop

    @property
    def cut(self) -> int:
        """v: where a sample first leaves the client (V if it never does), or what stands for it."""
        return self.chosen or self.segments[0].stop

    def keeps_ties(self, model: SplitModel) -> bool:
        """Whether parameters that are one tensor are in one segment."""
        return not self._torn(model)

    def check(self, model: SplitModel) -> "Placement":
        """Refuse a cut between the uses of a tied parameter."""
        if torn := self._torn(model):
            owner = model.tied[torn[0]]
            fits = [cut for cut in model.cuts if Placement.split(cut, model.depth).keeps_ties(model)]
            remedy = (
                f"choose one of {fits}" if fits else "untie or freeze them, or keep both with the clients (U-shape)"
            )
            raise SplitcastError(f"cut: {self.cut} separates {torn[0]} from {owner}, which are one tensor; {remedy}")
        return self

    def _torn(self, model: SplitModel) -> list[str]:
        return [name for name, owner in model.tied.items() if self.side(name) != self.side(owner)]

    def of(self, client: int) -> "Placement":
        """Of a client: for all the same."""
        return self

    @property
    def kinds(self) -> tuple["Placement", ...]:
        """The placements that there are."""
        return (self,)

    @property
    def blocks(self) -> frozenset[int]:
        """The clients', from 0."""
        mine = (segment for segment in self.segments if segment.side == "client")
        return frozenset(block for segment in mine for block in range(segment.start, segment.stop))

    def on_client(self, name: str) -> bool:
        """Whether clients hold a parameter or buffer."""
        return self.side(name) == "client"

    def side(self, name: str) -> Side | None:
        """Who holds a parameter; nobody those of other cuts' heads."""
        return next((segment.side for segment in self.segments if segment.holds(name)), None)


@dataclass(frozen=True)
class Fleet:
    """A placement for every client, of which some differ; clients of equal ones form a cohort.

    >>> fleet = Fleet.of_clients([Placement.split(cut, 5) for cut in (1, 3, 1)])
    >>> [(place.cut, ids) for place, ids in fleet.cohorts.items()]
    [(1, [0, 2]), (3, [1])]
    """

    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len({tuple(segment.side for segment in place.segments) for place in self.kinds}) > 1:
            raise SplitcastError("placement: clients of one training pass the same sides in the same order")

    @staticmethod
    def of_clients(placements: Sequence[Placement]) -> "Placed":
        """One for each client; equal ones are one for all."""
        return Fleet(tuple(placements)) if len(set(placements)) > 1 else placements[0]

    @property
    def kinds(self) -> tuple[Placement, ...]:
        """The placements that there are."""
        return tuple(dict.fromkeys(self.placements))

    @cached_property
    def cohorts(self) -> dict[Placement, list[int]]:
        """Who has which."""
        return {place: [n for n, mine in enumerate(self.placements) if mine == place] for place in self.kinds}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of the first client; sides and order are those of all."""
        return self.placements[0].segments

    @property
    def cut(self) -> int:
        """The least of all."""
        return min(place.cut for place in self.kinds)

    def of(self, client: int) -> Placement:
        """Of a client."""
        return self.placements[client]

    def check(self, model: SplitModel) -> "Fleet":
        """Refuse a cut between the uses of a tied parameter."""
        for place in self.kinds:
            place.check(model)
        return self


Placed = Placement | Fleet
"""One placement for all, or one for each."""


def among(placed: Placed, clients: Iterable[int]) -> list[tuple[Placement, list[int]]]:
    """Those of some clients that have equal placements, cohort by cohort."""
    if isinstance(placed, Placement):
        return [(placed, list(clients))]
    there = set(clients)
    found = [(place, [n for n in ids if n in there]) for place, ids in placed.cohorts.items()]
    return [(place, ids) for place, ids in found if ids]


def heard(now: Placed, then: Placed, values: Mapping[int, int], clients: int) -> dict[int, int]:
    """Values that each client listens to that gets blocks, if all of these are broadcast one after the other, each of
    so many ``values``, and everybody stops listening after its last.

    >>> now, then = (Fleet.of_clients([Placement.split(cut, 4) for cut in cuts]) for cuts in ((1, 2, 2), (3, 3, 1)))
    >>> heard(now, then, {0: 1, 1: 10, 2: 100, 3: 1000}, clients=3)
    {0: 110, 1: 110}
    """
    gets = {n: {b for b in then.of(n).blocks - now.of(n).blocks if values.get(b)} for n in range(clients)}
    sent = sorted(set().union(*gets.values()))
    return {n: sum(values[b] for b in sent if b <= max(mine)) for n, mine in gets.items() if mine}
