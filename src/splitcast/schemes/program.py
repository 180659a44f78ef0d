"""A scheme is a short program over parties and a link.

Nothing in a program says where the parties are. The simulator runs it with all of them in one process; a deployed
server runs it with clients that are elsewhere, and every site runs it with a server that is elsewhere; the planner runs
it with tensors that have shapes but no values. So a scheme is written once, and counted, timed, planned and deployed.

    in a program                                    means
    sent = clients.forward(0, batch.x)              run segment 0 and keep the graph
    seen = link.up("smashed", sent.out, ...)        what the server decodes of it; counted
    losses, s = server.descend(1, seen, y)          segment 1, loss, backward, step; s^n = dF^n/dS^n
    link.unicast(...), link.broadcast(...)          what clients decode of what the server sends; counted
    clients.backward(sent, received)                pull back through their own activations, and step

Values are (K, b, *d) for the K clients of a cohort. What `forward` puts out is lazy, so that many clients never are in
memory at once; `link.up`, `forward` and `descend` take it as it is, and `whole()` makes a tensor of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.model.split import SplitModel
from splitcast.training.placement import Placed, Placement
from splitcast.training.task import Task


class Values(ABC):
    """Numbers of all clients of a cohort, (K, b, *d), in chunks of some clients, worked out when they are needed."""

    def __init__(self, spans: Sequence[slice], shape: Sequence[int]) -> None:
        self.spans, self.shape = spans, tuple(shape)

    @abstractmethod
    def chunk(self, k: int) -> Tensor:
        """The values of the clients in span k; asked again, the same."""

    def whole(self) -> Tensor:
        """All of them."""
        parts = [self.chunk(k) for k in range(len(self.spans))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Batch(NamedTuple):
    """The samples of one local step."""

    x: Values
    y: Values


class Activations(Protocol):
    """What a segment put out, and the way back."""

    @property
    def out(self) -> Values:
        """The values."""
        ...


class Party(Protocol):
    """The clients of a cohort, or the server for them."""

    task: Task

    def forward(self, segment: int, x: Values | Tensor) -> Activations:
        """Run a segment."""
        ...

    def backward(self, sent: Any, received: Tensor) -> Tensor:
        """Pull gradients (K or 1, b, *d) back and step; returns those at the input, if there was somebody before."""
        ...

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        """The last segment, or a head: losses F^n (K,), gradients at the input (K, b, *d), and a step."""
        ...

    def estimate(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> Tensor:
        """The gradients that `descend` would give, without a step."""
        ...

    def train(self, segment: int, x: Tensor, y: Tensor, *, back: bool = False) -> Tensor:
        """A step along the mean gradient of samples of anybody's, x (B, *d) (`Scheme.one_server`); if it is to come
        ``back``, returns the gradient at x."""
        ...

    def aggregate(self, segment: int, x: Values | Tensor, y: Values | Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The last segment, with gradients at its output averaged over the clients for the first ``rows``: gradients
        at the input, of these (1, rows, *d) and of the others (K, b - rows, *d), and a step."""
        ...

    def step(self) -> None:
        """Step along what was gathered so far; by itself this happens at the end of a local step."""
        ...


class Clients(Party, Protocol):
    """Clients that move through a round together."""

    rows: Sequence[int] | None
    """Of each, so many of its b samples count, the first; None: all"""
    helped: Mapping[int, Sequence[int]]
    """Segments that others run for them, and who"""

    @property
    def ids(self) -> Sequence[int]:
        """Their numbers; who fails on the way is no longer among them."""
        ...

    @property
    def rho(self) -> Tensor:
        """rho^n = D^n / D over them (K,)."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """Round and local step: where random numbers are drawn."""
        ...

    def batches(self) -> Iterator[Batch]:
        """The tau local steps of the round."""
        ...

    def samples(self, places: Tensor) -> Iterator[Batch]:
        """A step of its own with the samples of each client at these places (b,), or (K, b) for places of each, of an
        order that each has."""
        ...

    def align(self, segment: int, x: Values | Tensor, y: Values | Tensor, grads: Tensor) -> None:
        """Let a head learn to have the gradients that it is told."""
        ...

    def look(self, segment: int, x: Values | Tensor) -> Tensor:
        """What a segment puts out (K, b, *d), without a way back; buffers stay."""
        ...

    def recall(self, memory: Any, most: int) -> Tensor:
        """Places (K, ``most``) that each has to send by its `schemes.staleness.Memory`; -1 behind the last."""
        ...

    def receive(self, link: Any) -> None:
        """Take the client half over from the server (unicast)."""
        ...

    def hand_in(self, link: Any) -> None:
        """Send the client half to the server, which keeps it."""
        ...


class Cohort(Protocol):
    """The clients of a round."""

    def in_parallel(
        self, server: Any, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[Clients, Party]]:
        """Side by side, each with a copy of the server half; the copies are averaged at the end.

        They come in groups that fit into memory; with ``mixes`` all together, because a reply depends on all of them.
        ``averaged``: their halves are averaged right after, so that copies need not last; ``still``: they do not step.
        """
        ...

    def in_turn(self, server: Any) -> Iterator[tuple[Clients, Party]]:
        """One after the other, with one server half and one client half."""
        ...

    def central(self, server: Any) -> Party:
        """The one server half, to train on what the server has (`Party.train`)."""
        ...

    def average(self, link: Any, codec: Codec = FP32) -> None:
        """Upload the client halves, average them, and broadcast the average to everybody; with a codec that is not
        exact, as differences (`training.differences`)."""
        ...


class KnownCohort(Cohort, Protocol):
    """The clients of a round, all of whom are here (`Scheme.sites` is off)."""

    ids: Any
    """Their numbers"""

    def part(self, ids: Sequence[int]) -> Any:
        """Some of them, as a cohort; only they are given its average."""
        ...

    def receive(self, link: Any) -> None:
        """Take the client half over from the server, which broadcasts it."""
        ...


class Link(Protocol):
    """Every byte passes here, once."""

    def up(self, kind: str, x: Values | Tensor, codec: Codec, who: Clients) -> Values:
        """A message from each client, as the server decodes it."""
        ...

    def unicast(self, kind: str, x: Tensor, codec: Codec, who: Clients) -> Tensor:
        """A message to each client, x (K, b, *d), as it decodes it."""
        ...

    def broadcast(self, kind: str, x: Tensor, codec: Codec, who: Clients, *, rows: int = 0) -> Tensor:
        """One message x (1, b, *d) to all, as they decode it; with ``rows`` the sender chooses b, up to so many."""
        ...

    def echo(self, arrived: Values) -> Tensor:
        """What `up` has delivered, as its sender knows it: by decoding its own message."""
        ...

    def sent(self, kind: str) -> int:
        """Bytes of the last messages of a kind, of all clients together; 0 on a site, which knows its own only."""
        ...

    def compute(self, flops: float, who: Clients) -> None:
        """The server works on what it has of all of them."""
        ...

    def note(self, name: str, value: float) -> None:
        """A number of this step for the record of the round."""
        ...


class Scheme:
    """How a round runs. A scheme of your own is a subclass with a `step`."""

    name = "own"
    sync_every = 0
    """Rounds between averagings of the client halves; 0 is never."""
    mixes = True
    """Whether what one client receives may depend on the others'; without, groups of clients run one after another."""
    clients_keep_halves = True
    """Whether clients hold weights between rounds; else they are given some when it is their turn."""
    many_steps = False
    """Whether clients step more than once in a local step, so that one copy of a half cannot stand for all."""
    fixed_cut = False
    """Whether it keeps things that belong to one cut, so that no policy may move it."""
    one_server = False
    """Whether clients work with one server half, which steps whenever it is told to; else each has a copy of it."""
    by_side = False
    """Whether blocks that some clients hold and others do not are averaged on each side apart"""
    corrects: bool = False
    """Whether clients can correct what they receive (`gradient_correction`)"""
    u_shape: bool = False
    """Whether labels can stay at home, with the last block on the clients"""
    sites: bool = True
    """Whether it can be deployed, or needs all in one process"""
    personal: bool = False
    """Whether clients have models of their own, and each is tested by its own"""
    rates: tuple[float, float] = (1.0, 1.0)
    """Learning rates of clients and server, as parts of the one that is given"""
    uplink: Codec = FP32
    downlink: Codec = FP32
    sync: Codec = FP32
    """Format of client halves when they are averaged."""

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        """One local step."""
        raise TypeError(f"{type(self).__name__} has no step")

    def round(self, t: int, clients: Cohort, server: Any, link: Link) -> None:
        """Round ``t``: local steps side by side; client halves are averaged when it is time."""
        averaged = self.syncs(t)
        alike = averaged and self.sync.exact  # else the server sees each of them rounded
        for some, copies in clients.in_parallel(server, mixes=self.mixes, averaged=alike):
            for batch in some.batches():
                self.step(some, copies, link, batch)
        if averaged:
            clients.average(link, self.sync)

    def syncs(self, t: int) -> bool:
        """Whether the client halves are averaged at the end of round ``t``, counted from 1."""
        return self.sync_every > 0 and t % self.sync_every == 0

    def shares(self, sizes: np.ndarray) -> np.ndarray:
        """rho^n of all clients (N,), which have so many samples."""
        return np.asarray(sizes / sizes.sum())

    def place(self, cut: int, depth: int) -> Placement:
        """Who holds which of the V blocks, for the cut that the user chose."""
        return Placement.split(cut, depth)

    def cuts(self, depth: int) -> range:
        """The cuts that a user may choose."""
        return range(1, depth)

    def fitted(self, model: SplitModel) -> SplitModel:
        """The model with what the scheme adds to it, such as auxiliary heads."""
        return model

    def kind(self, t: int) -> int:
        """Rounds of the same kind send and compute the same, as far as can be known beforehand."""
        return int(self.syncs(t))

    def pattern(self, t: int) -> tuple[int, ...]:
        """The kind of a round, and of every format how far its rate has gone."""
        return (self.kind(t), *(one.phase(t) for one in self.formats()))

    def formats(self) -> tuple[Codec, ...]:
        """Of all that it sends."""
        return self.uplink, self.downlink, self.sync

    def kept(self) -> dict[str, Tensor]:
        """What the server keeps for the scheme between rounds, for a checkpoint."""
        return {}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """The inverse of `kept`; without anything kept, as at the start."""

    def at(self, placement: Placed) -> "Scheme":
        """The scheme as it runs at a placement."""
        return self

    def equal_after(self, t: int) -> bool:
        """Whether all client halves are equal, and so known to the server, after round ``t``."""
        return t == 0 or self.syncs(t)

    def moved(self, link: Any, down: int | Sequence[int], up: int, everyone: Sequence[int]) -> None:
        """Count blocks that changed sides before a round: values to everyone, or to each up to its number of them, and
        values from each."""
        sizes = FP32.nbytes((down,)) if isinstance(down, int) else [FP32.nbytes((n,)) for n in down]
        link.count("down", "migration", sizes, everyone, broadcast=True)
        link.count("up", "migration", FP32.nbytes((up,)), everyone)

    def settings(self) -> dict[str, Any]:
        """What `at` chose by itself, as configuration values: a record of a run does not lean on defaults."""
        return {}


def codec_of(field: str, name: str, own: Codec) -> Codec:
    """The codec that a configuration names; auto is the scheme's own."""
    return own if name == "auto" else codec(name, field)


def refuse_sync(config: Config, name: str) -> None:
    """For schemes whose client halves have a rhythm of their own."""
    split = config.split
    if split.sync_every >= 0:
        raise SplitcastError(f"sync_every: {split.sync_every} needs a parallel split scheme, not {name}")
    if split.client_update == "identical":
        raise SplitcastError(f"client_update: 'identical' needs a parallel split scheme, not {name}")
