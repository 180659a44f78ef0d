"""What a client must hold in memory to train its part of a model, and devices that hold so much.

weights       all parameters of its segments, 4 bytes each, 2 if they are halved; one that is tied counts once
optimiser     for what is trained: the optimiser's state and a gradient
activations   what is kept of a batch for the way back, and the batch of hidden states that leaves each segment; of
              clients that recompute, what enters each block, and what one of them keeps
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError, one_of
from splitcast.cost.cell import per_client
from splitcast.engine.dry import client_half
from splitcast.model.split import SplitModel
from splitcast.training.optimiser import Optimiser
from splitcast.training.passes import saved_bytes
from splitcast.training.placement import Placed, Placement

GB = 10**9


@dataclass(frozen=True)
class ClientMemory:
    """Bytes."""

    weights: int
    optimiser: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.optimiser + self.activations


def client_memory(
    model: SplitModel, placement: Placement, optimiser: Optimiser, batch: int, *, recompute: bool = False
) -> ClientMemory:
    """Of a client that trains on ``batch`` samples at a time."""
    mine = [segment for segment in placement.segments if segment.side == "client"]
    sizes = {name: p.numel() for name, p in model.shapes().items() if placement.on_client(name)}
    held = sum((2 if name in model.halved else 4) * size for name, size in sizes.items())
    trained = sum(p.numel() for name, p in model.initial().items() if placement.on_client(name))
    state = client_half(model, placement, optimiser).held() - trained
    leaving = sum(math.prod(model.smashed_shape(segment.stop)) for segment in mine)
    if recompute:
        blocks = [k for segment in mine for k in range(segment.start, segment.stop)]
        kept = 4 * sum(math.prod(model.entering(k)) for k in blocks)
        kept += max(saved_bytes(model, k, k + 1) for k in blocks)
    else:
        kept = sum(saved_bytes(model, segment.start, segment.stop) for segment in mine)
    return ClientMemory(held, 4 * (state + trained), batch * (kept + 4 * leaving))


def least_room(given: Sequence[float]) -> float:
    """GB of the client that has least, 0 being no limit.

    >>> least_room((0, 4, 2)), least_room(())
    (2, 0.0)
    """
    return min((each for each in given if each), default=0.0)


def fitting(
    placements: Sequence[Placement], needs: Sequence[ClientMemory], allowed: Sequence[bool], most_gb: float
) -> list[bool]:
    """Which of the placements that are allowed fit into ``most_gb`` of memory, 0 being no limit; one at least must."""
    fits = [ok and (not most_gb or need.total <= most_gb * GB) for ok, need in zip(allowed, needs, strict=True)]
    if not any(fits):
        least, cut = min((n.total, p.cut) for p, n, ok in zip(placements, needs, allowed, strict=True) if ok)
        raise SplitcastError(
            f"client_memory_gb: {most_gb:g} is too little for any cut; at cut {cut} a client needs {least / GB:.3g} GB"
        )
    return fits


def refuse_large(config: Config, model: SplitModel, optimiser: Optimiser, places: Sequence[Placed]) -> None:
    """Refuse a training in which a client would need more memory than it has, wherever blocks may be placed."""
    train, given = config.train, config.network.client_memory_gb
    if not given:
        return
    room = per_client("client_memory_gb", given, config.data.clients)
    for placed in places:
        needs = {
            place: client_memory(model, place, optimiser, train.batch, recompute=train.recompute).total / GB
            for place in placed.kinds
        }
        for n, most in enumerate(room):
            if 0 < most < needs[placed.of(n)]:
                raise SplitcastError(
                    f"client_memory_gb: client {n} has {most:g}, but at cut {placed.of(n).cut} it needs "
                    f"{needs[placed.of(n)]:.3g} GB"
                )


@dataclass(frozen=True)
class Device:
    """Round numbers of what a training process gets there, not those of data sheets."""

    memory_gb: float
    flops_per_s: float


DEVICES = {
    "phone": Device(4, 0.2e12),
    "jetson": Device(7, 0.6e12),
    "laptop": Device(16, 1e12),
}


def device(name: str) -> Device:
    """A device by its name.

    >>> device("phone").memory_gb
    4
    """
    return DEVICES[one_of("client_device", name, DEVICES)]
