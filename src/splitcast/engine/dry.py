"""Parties without values: what a program would send and compute, from shapes alone.

The planner runs rounds with them; on a site they stand in for the server, on a server for the client's side of things.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.engine.links import CountingLink
from splitcast.engine.values import Known
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import JointWork, Ledger, Phase, Work
from splitcast.schemes.program import Batch, Scheme, Values
from splitcast.schemes.staleness import Memory
from splitcast.training.differences import difference_work, row_shape
from splitcast.training.optimiser import Optimiser
from splitcast.training.placement import Placed, Placement, among
from splitcast.training.task import Task, target_shape
from splitcast.training.weights import Weights


def shape_only(*shape: int) -> Tensor:
    """A tensor that has a shape and nothing else."""
    return torch.empty(shape, device="meta")


@dataclass
class DrySent:
    """What a segment would put out."""

    number: int
    out: Known


class DryParty:
    """Does nothing but note that it would."""

    def __init__(
        self, model: SplitModel, task: Task, placement: Placement, ids: Sequence[int], batch: int, ledger: Ledger
    ) -> None:
        self.model, self.task, self.placement, self.batch, self.ledger = model, task, placement, batch, ledger
        self.ids = list(ids)
        self.rows: Sequence[int] | None = None
        self.helped: Mapping[int, Sequence[int]] = {}

    @property
    def rho(self) -> Tensor:
        return shape_only(len(self.ids))

    def forward(self, segment: int, x: Values | Tensor) -> DrySent:
        self.did(segment, "forward")
        return DrySent(segment, Known(self._values(self.placement.segments[segment].stop)))

    def backward(self, sent: DrySent, received: Tensor) -> Tensor:
        self.did(sent.number, "backward")
        return self._entering(sent.number)

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        self.did(segment, "both")
        return shape_only(len(self.ids)), self._entering(segment)

    def train(self, segment: int, x: Tensor, y: Tensor, *, back: bool = False) -> Tensor:
        place = self.placement.segments[segment]
        flops = sum(self.model.flops(place.start, place.stop))
        self.ledger.add(JointWork(float(len(x) * flops), tuple(self.ids)))
        return shape_only(len(x), *self.model.entering(place.start))

    def aggregate(self, segment: int, x: Values | Tensor, y: Values | Tensor, rows: int) -> tuple[Tensor, Tensor]:
        self.did(segment, "forward")
        self.did(segment, "backward", 1 - rows / self.batch)
        place, found = self.placement.segments[segment], self._entering(segment)
        if rows:
            flops = sum(self.model.flops(place.start, place.stop))
            self.ledger.add(JointWork(float(rows * flops), tuple(self.ids)))
        return found[:1, :rows], found[:, rows:]

    def estimate(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> Tensor:
        self.did(segment, "both")
        return self._entering(segment)

    def align(self, segment: int, x: Values | Tensor, y: Values | Tensor, grads: Tensor) -> None:
        self.did(segment, "both")
        self.did(segment, "both")

    def step(self) -> None:
        """Nothing was gathered."""

    def look(self, segment: int, x: Values | Tensor) -> Tensor:
        self.did(segment, "forward")
        return self._values(self.placement.segments[segment].stop)

    def recall(self, memory: Memory, most: int) -> Tensor:
        return shape_only(len(self.ids), most)

    def did(self, segment: int, phase: Phase, share: float = 1.0) -> None:
        """Note work."""
        if self.rows is not None and not any(self.rows):
            return
        each = share if self.rows is None else tuple(n / self.batch for n in self.rows)
        self.ledger.add(Work(segment, phase, tuple(self.ids), each, tuple(self.helped.get(segment, ()))))

    def samples(self, places: Tensor) -> Iterator[Batch]:
        yield Batch(Known(self._values(0)), Known(self._targets()))

    def _values(self, block: int) -> Tensor:
        return shape_only(len(self.ids), self.batch, *self.model.smashed_shape(block))

    def _targets(self) -> Tensor:
        shape = target_shape(self.task, self.model.smashed_shape(self.model.depth))
        return shape_only(len(self.ids), self.batch, *shape)

    def _entering(self, segment: int) -> Tensor:
        shape = self.model.entering(self.placement.segments[segment].start)
        return shape_only(len(self.ids), self.batch, *shape)


class DryClients(DryParty):
    """Clients that would take part."""

    def __init__(self, cohort: "DryCohort", placement: Placement, ids: Sequence[int]) -> None:
        super().__init__(cohort.model, cohort.task, placement, ids, cohort.batch, cohort.ledger)
        self.cohort = cohort
        self.place = (cohort.t, 0)

    def batches(self) -> Iterator[Batch]:
        batch = Batch(Known(self._values(0)), Known(self._targets()))
        for _ in range(self.cohort.steps):
            yield batch

    def receive(self, link: CountingLink) -> None:
        link.models("down", self.cohort.values[self.placement], self.ids)

    def hand_in(self, link: CountingLink) -> None:
        link.models("up", self.cohort.values[self.placement], self.ids)


@dataclass
class DryCohort:
    """The clients of round ``t``, if it were."""

    t: int
    model: SplitModel
    task: Task
    placement: Placed
    ids: Sequence[int]
    everyone: Sequence[int]
    batch: int
    steps: int
    values: Mapping[Placement, int]
    """of a client half, with the state of the optimiser if it is sent"""
    ledger: Ledger

    def in_parallel(
        self, server: None, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[DryClients, DryParty]]:
        start = len(self.ledger.events)
        for k, (placement, ids) in enumerate(among(self.placement, self.ids)):
            if k:
                self.ledger.alongside(start, further=True)
            yield self._pair(placement, ids)
        self.ledger.alongside(None)

    def part(self, ids: Sequence[int]) -> "DryCohort":
        return replace(self, ids=list(ids), everyone=())

    def receive(self, link: CountingLink) -> None:
        link.models("down", self._held(self.values, self.ids), self.ids, broadcast=True)

    def in_turn(self, server: None) -> Iterator[tuple[DryClients, DryParty]]:
        for n in self.ids:
            yield self._pair(self.placement.of(n), [n])

    def central(self, server: None) -> DryParty:
        return self._pair(self.placement.of(0), self.ids)[1]

    def average(self, link: CountingLink, codec: Codec = FP32) -> None:
        codec = codec.at(self.t)
        held = {place: codec.nbytes((n,) if codec.exact else row_shape(n)) for place, n in self.values.items()}
        coding = (0.0, 0.0) if codec.exact else difference_work(self.values[self.placement.of(0)], codec)
        link.count("up", "model", self._held(held, self.ids), self.ids, coding=coding)
        link.count("down", "model", self._held(held, self.everyone), self.everyone, broadcast=True, coding=coding)

    def _held(self, sizes: Mapping[Placement, int], who: Sequence[int]) -> int | list[int]:
        """Of each of them, or one number for all."""
        one = isinstance(self.placement, Placement)
        return sizes[self.placement.of(0)] if one else [sizes[self.placement.of(n)] for n in who]

    def _pair(self, placement: Placement, ids: Sequence[int]) -> tuple[DryClients, DryParty]:
        server = DryParty(self.model, self.task, placement, ids, self.batch, self.ledger)
        return DryClients(self, placement, ids), server


def dry_round(
    scheme: Scheme,
    model: SplitModel,
    task: Task,
    placement: Placed,
    optimiser: Optimiser,
    t: int,
    clients: Sequence[int],
    *,
    batch: int,
    steps: int,
    everyone: Sequence[int] | None = None,
) -> Ledger:
    """What round ``t`` of a scheme would send and compute. ``everyone``, if they are more than ``clients``, hears the
    averaged half."""
    ledger = Ledger()
    values = {place: client_values(model, place, optimiser) for place in placement.kinds}
    everyone = clients if everyone is None else everyone
    cohort = DryCohort(t, model, task, placement, list(clients), everyone, batch, steps, values, ledger)
    scheme.round(t, cohort, None, CountingLink(ledger))
    return ledger


def client_values(model: SplitModel, placement: Placement, optimiser: Optimiser) -> int:
    """Values of a client's weights that travel when they are exchanged."""
    return client_half(model, placement, optimiser).travelling()


def client_half(model: SplitModel, placement: Placement, optimiser: Optimiser) -> Weights:
    """The shapes of a client's weights, without what is frozen."""
    params, buffers = (
        {k: shape_only(*v.shape) for k, v in part.items() if placement.on_client(k)}
        for part in (model.initial(), model.buffers())
    )
    return Weights.start(params, optimiser, buffers)
