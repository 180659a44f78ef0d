"""Who holds which blocks: a sequence of segments, in the order in which a sample passes them.

Split learning has two, clients then server; FedAvg has one; with labels at home there are three, and the last is the
clients' again. Clients of equal placements form a cohort and run together.
"""

from dataclasses import dataclass, replace
from typing import Literal

from splitcast.base.errors import SplitcastError
from splitcast.model.split import SplitModel, block_of

Side = Literal["client", "server"]


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
        return not model.torn([(segment.start, segment.stop) for segment in self.segments])

    def check(self, model: SplitModel) -> "Placement":
        """Refuse a cut between the uses of a tied parameter."""
        torn = model.torn([(segment.start, segment.stop) for segment in self.segments])
        if torn:
            owner = model.tied[torn[0]]
            fits = [cut for cut in model.cuts if Placement.split(cut, model.depth).keeps_ties(model)]
            remedy = f"choose one of {fits}" if fits else "untie them, freeze them, or keep the whole model on one side"
            raise SplitcastError(f"cut: {self.cut} separates {torn[0]} from {owner}, which are one tensor; {remedy}")
        return self

    def on_client(self, name: str) -> bool:
        """Whether clients hold a parameter or buffer."""
        return self.side(name) == "client"

    def side(self, name: str) -> Side | None:
        """Who holds a parameter; nobody those of other cuts' heads."""
        return next((segment.side for segment in self.segments if segment.holds(name)), None)
