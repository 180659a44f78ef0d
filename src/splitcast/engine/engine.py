"""What the round loop asks of an engine; `Simulator` runs everything here, `Federation` has its clients elsewhere."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from splitcast.engine.mixed import AnyState
from splitcast.model.split import Params, SplitModel
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Scheme
from splitcast.training.defence import Defence
from splitcast.training.placement import Placed
from splitcast.training.pooling import FastPooling
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task, measures_of


@dataclass(frozen=True)
class Measured:
    """A round that really travelled."""

    seconds: dict[str, float]
    """wall-clock seconds of its parts: upload, server, download, client"""
    failures: dict[str, str]
    """sites that failed in it, each with its last reason"""


@dataclass(frozen=True)
class Waited:
    """A round whose engine keeps the time: seconds, for whom the server waited, and with which of its parts."""

    seconds: float
    client: int
    part: str


@dataclass(frozen=True)
class RoundReport:
    """What a round did."""

    loss: float
    """Training loss, sum_n rho^n F^n, averaged over the local steps."""
    clients: list[int]
    """Who took part."""
    ledger: Ledger
    measured: Measured | None = None
    """Where sites are elsewhere: what really happened on the way."""
    waited: Waited | None = None
    """Where the server does not wait for all (`engine.asynchronous`)"""


class Engine(Protocol):
    """Rounds of a scheme."""

    model: SplitModel
    task: Task

    @property
    def state(self) -> AnyState:
        """Who holds what, and all weights as far as they are known here."""
        ...

    def place(self, placement: Placed, ledger: Ledger, *, charge: bool = True) -> None:
        """Move blocks before a round, counting what travels unless ``charge`` is off."""
        ...

    def send_as(self, uplink: str) -> None:
        """Smashed data travel in this format from now on, one of those that the configuration lets choose from."""
        ...

    def round(self, t: int, ledger: Ledger | None = None, who: Any = None) -> RoundReport:
        """Run round ``t``, counted from 1, with these clients; by default with those that the configuration draws."""
        ...

    def averaged(self) -> Params:
        """The whole model with the averaged client half, frozen parameters and buffers included."""
        ...

    def evaluate(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """The measures of the averaged model."""
        ...

    def drift(self) -> float | None:
        """Mean distance of the client halves from their average; None where that is not known."""
        ...

    def snapshot(self, t: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a checkpoint after round ``t`` holds: tensors, and what is needed to read them."""
        ...

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], t: int) -> None:
        """Go on after round ``t``."""
        ...


TEST_BATCH = 100
"""Samples that are tested together: few enough that a convolution's input stays in the cache."""
KEPT = "scheme/"
"""Names of what a scheme keeps begin so in a checkpoint."""


def kept_tensors(scheme: Scheme) -> dict[str, Tensor]:
    """What a scheme keeps between rounds, for a checkpoint."""
    return {KEPT + name: value for name, value in scheme.kept().items()}


def restore_kept(scheme: Scheme, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `kept_tensors`."""
    scheme.restore({name.removeprefix(KEPT): value for name, value in tensors.items() if name.startswith(KEPT)})


OUTPUT_VALUES = 2**24
"""Of a batch of a test, at most: a vocabulary at every position is large."""


@torch.no_grad()
def evaluate(
    model: SplitModel,
    params: Params,
    task: Task,
    x: Tensor,
    y: Tensor,
    runtime: Runtime,
    *,
    guard: tuple[int, Defence] | None = None,
) -> dict[str, float]:
    """The task's measures of a whole model, behind a cut with a defence where there is one."""

    def run(xs: Tensor) -> Tensor:
        if guard is None:
            return model.forward(params, xs, 0, model.depth)
        cut, defence = guard
        return model.forward(params, defence.guard(model.forward(params, xs, 0, cut)[None])[0], cut, model.depth)

    batch = max(1, min(TEST_BATCH, OUTPUT_VALUES // math.prod(model.smashed_shape(model.depth))))
    sums: Counter[str] = Counter()  # of numbers or tensors
    with model.evaluating():
        for xs, ys in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
            with runtime.arithmetic(), FastPooling():
                output = run(xs)
            sums.update(task.metrics(output.to(runtime.dtype), ys))
    return measures_of(task, sums, len(y))
