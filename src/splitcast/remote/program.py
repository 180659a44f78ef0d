"""The scheme's program as one site runs it: itself as the clients, with the server and all other clients elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.rounding import Draw, RoundingNoise
from splitcast.base.seeds import stream, torch_seed
from splitcast.data.augment import augmented
from splitcast.data.batches import draw_batch, in_turn, own_order
from splitcast.engine.dry import DryParty, DrySent, shape_only
from splitcast.engine.party import Group, LocalParty
from splitcast.engine.values import Known, whole
from splitcast.remote.dialogue import Dialogue
from splitcast.remote.wire import pack, pack_change, pack_weights, unpack, unpack_change
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Batch, Clients, Values
from splitcast.training.passes import Pass
from splitcast.training.placement import Segment

if TYPE_CHECKING:
    from splitcast.remote.site import Site


class SiteClients(LocalParty):
    """The site itself, as the clients of the program."""

    def __init__(self, site: "Site", group: Group) -> None:
        super().__init__(site.kit, site.placement, site.weights, group, Ledger())
        self.site = site
        self.labels = self.smashed = torch.empty(0, device="cpu")
        """what was sent last"""

    @property
    def rho(self) -> Tensor:
        """Known to the server only."""
        return shape_only(1)

    @property
    def place(self) -> tuple[int, int]:
        return self.group.round, self.group.step

    def batches(self) -> Iterator[Batch]:
        train = self.site.config.train
        for self.group.step in range(train.local_steps):
            rng = stream(train.seed, "batch", self.group.round, self.group.step)
            rows = torch.from_numpy(draw_batch(len(self.site.y), train.batch, rng, self.site.client))
            x = self.site.x[rows][None]
            if self.site.augment:
                place = (self.group.round, self.group.step, [self.site.client])
                x = augmented(self.site.augment, x, train.seed, *place)
            yield from self._one(x, rows)

    def samples(self, places: Tensor) -> Iterator[Batch]:
        order = own_order(self.site.config.train.seed, self.site.client, len(self.site.y))
        rows = torch.from_numpy(in_turn(order, places.flatten().numpy()))
        yield from self._one(self.site.x[rows][None], rows)

    def _one(self, x: Tensor, rows: Tensor) -> Iterator[Batch]:
        self.labels = self.site.y[rows]
        yield Batch(Known(x), Known(self.labels[None]))
        self.step()

    def run(self, segment: Segment, k: int, values: Tensor, *, again: bool = False, plain: bool = False) -> Pass:
        place = (self.group.round, self.group.step, self.site.client, segment.start)
        known = self.site.config.train.seed
        if self.site.config.defence.noise:  # of which the server must not know the numbers
            known = self.site.secret
        seed = torch_seed(known, "layers", *place)
        with self.kit.runtime.fork_rng():
            torch.manual_seed(seed)
            return super().run(segment, k, values, again=again, plain=plain)

    def receive(self, link: "SiteLink") -> None:
        """The server has given the weights before the round began."""

    def hand_in(self, link: "SiteLink") -> None:
        link.send_weights(self.site)


class SiteServer(DryParty):
    """The server, elsewhere. Where it needs what was sent, the site waits until it has it, as the server does."""

    def forward(self, segment: int, x: Values | Tensor) -> DrySent:
        return super().forward(segment, whole(x))

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        return super().descend(segment, whole(x), y)

    def estimate(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> Tensor:
        return super().estimate(segment, whole(x), y)


class SiteCohort:
    """All clients of a round, as one of them sees it."""

    def __init__(self, site: "Site", group: Group) -> None:
        self.site, self.group = site, group
        self.clients = SiteClients(site, group)

    @property
    def loss(self) -> float:
        """Mean over what this site descended so far."""
        return self.clients.total / max(1, self.clients.descents)

    def in_parallel(
        self, server: None, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[SiteClients, SiteServer]]:
        yield self._pair()

    def in_turn(self, server: None) -> Iterator[tuple[SiteClients, SiteServer]]:
        yield self._pair()

    def average(self, link: "SiteLink", codec: Codec = FP32) -> None:
        """The server gives the average to everybody, whether they took part or not (`Site.adopt`)."""
        differences = self.site.differences
        if codec.exact or differences.last is None:
            link.send_weights(self.site)
            return
        sent = differences.from_client(0, self.site.weights.flat())
        message = pack_change(sent, codec.at(self.group.round))
        differences.kept(0, sent, unpack_change(message, len(differences.last), codec))
        link.dialogue.send(message)

    def _pair(self) -> tuple[SiteClients, SiteServer]:
        site = self.site
        train = site.config.train
        server = SiteServer(site.model, site.kit.task, site.placement, [site.client], train.batch, Ledger())
        return self.clients, server

    def central(self, server: None) -> SiteServer:
        return self._pair()[1]


class Posted(Values):
    """What was sent up; who needs it waits until it has arrived."""

    def __init__(self, dialogue: Dialogue, shape: Sequence[int], echo: Callable[[], Tensor]) -> None:
        super().__init__([slice(0, None)], shape)
        self.dialogue, self.turn, self.echo = dialogue, dialogue.turns, echo

    def chunk(self, k: int) -> Tensor:
        if self.dialogue.turns == self.turn:
            self.dialogue.wait()
        return shape_only(*self.shape)


def _draw(kind: str, codec: Codec, who: Clients) -> Draw | None:
    """For formats that choose at random what they send: as the simulator's twin of this site does."""
    assert isinstance(who, SiteClients)
    seed = who.site.config.train.seed if codec.draws else None
    return RoundingNoise(seed, *who.place).of(kind, [who.site.client], always=True)


class SiteLink:
    """The site's end of the line."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue

    def up(self, kind: str, x: Values | Tensor, codec: Codec, who: Clients) -> Posted:
        values = whole(x)
        if isinstance(who, SiteClients) and who.site.scrutiny and kind == "smashed":
            who.smashed = values[0]
        sent = values[0] if who.rows is None else values[0, : who.rows[0]]
        if not codec.bound(sent.shape):
            return Posted(self.dialogue, values.shape, lambda: values)
        message = pack(kind, sent, codec.at(who.place[0]), _draw(kind, codec, who))
        self.dialogue.send(message)
        return Posted(self.dialogue, values.shape, lambda: unpack(message, kind, codec, sent.shape)[None].to(values))

    def unicast(self, kind: str, x: Tensor, codec: Codec, who: Clients) -> Tensor:
        received = self._received(kind, x.shape[1:], codec)
        if isinstance(who, SiteClients) and who.site.scrutiny:
            who.site.scrutiny.look(received[0], who.smashed, who.labels)
        return received

    def broadcast(self, kind: str, x: Tensor, codec: Codec, who: Clients, *, rows: int = 0) -> Tensor:
        return self._received(kind, x.shape[1:], codec, rows)

    def echo(self, arrived: Values) -> Tensor:
        assert isinstance(arrived, Posted)
        return arrived.echo()

    def sent(self, kind: str) -> int:
        return 0

    def compute(self, flops: float, who: Clients) -> None:
        """Elsewhere."""

    def note(self, name: str, value: float) -> None:
        """Elsewhere."""

    def send_weights(self, site: "Site") -> None:
        """The whole client half."""
        self.dialogue.send(pack_weights(site.weights))

    def _received(self, kind: str, shape: Sequence[int], codec: Codec, rows: int = 0) -> Tensor:
        if not codec.bound(shape):
            return torch.empty(1, *shape, device="cpu")
        return unpack(self.dialogue.receive(), kind, codec, shape, rows=rows)[None]
