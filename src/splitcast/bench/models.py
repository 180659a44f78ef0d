"""What other models and optimisers cost (random images).

- A round of `sfl` with ResNet-18 and BatchNorm against one centralised step on the same samples, whose BatchNorm sees
  the same batches: one client's at a time.
- A round with AdamW against one with SGD where every client steps copies of its own (paper CNN, two local steps), and
  where SGD needs one copy of the server half only (one local step).
- A test against the forward pass of a round on as many samples.

Seconds are those of the processor, which other work on the machine disturbs less.
"""

import copy
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitcast.base.config import Config, with_values
from splitcast.bench import rows
from splitcast.bench.rows import Row
from splitcast.engine.engine import evaluate
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.training.passes import Pass
from splitcast.training.placement import Placement
from splitcast.training.task import Classification

interleaved_medians = partial(rows.interleaved_medians, clock=time.process_time)
CLASSES, LR = 10, 0.01
COLOUR, GREY = (3, 32, 32), (1, 28, 28)
CLIENTS, BATCH = 10, 8
COPIES = [(10, 32), (100, 32)]
"""Clients and batch of rounds with copies for each."""
TESTED = [("cnn", GREY, 2000), ("resnet18", COLOUR, 100)]
"""Model, samples, and how many of them are tested."""


def models(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench models`."""
    found = _resnet(repeats)
    for clients, batch in COPIES:
        for steps in (2, 1):
            found += _adamw(clients, batch, steps, repeats)
    for arch, shape, count in TESTED:
        found += _test(arch, shape, count, repeats)
    return found


def _samples(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def _round(model: SplitModel, x: Tensor, y: Tensor, **values: object) -> Callable[[], object]:
    """A whole round of a simulator with samples of its own."""
    config = with_values(Config(), **{"lr": LR} | values)
    parts = np.split(np.arange(len(y)), config.data.clients)
    return partial(Simulator(config, model, Classification(CLASSES), x, y, parts).round, 1)


def _resnet(repeats: int) -> list[Row]:
    model = build("resnet18", COLOUR, CLASSES, seed=0)
    x, y = _samples(COLOUR, 2 * CLIENTS * BATCH)
    turns: dict[str, Callable[[], object]] = {"central": _central(model, x[::2], y[::2])}
    for cut in range(1, model.depth):
        turns[f"cut{cut}"] = _round(model, x, y, scheme="sfl", cut=cut, clients=CLIENTS, batch=BATCH)
    seconds = interleaved_medians(turns, repeats, "ResNet-18")
    case, central = f"models.resnet18.n{CLIENTS}_b{BATCH}", seconds.pop("central")
    return [
        Row(f"{case}.central", 1e3 * central, "ms"),
        *(Row(f"{case}.sfl.{name}", value / central, "x central") for name, value in seconds.items()),
    ]


def _central(model: SplitModel, x: Tensor, y: Tensor) -> Callable[[], object]:
    """A step along the mean gradient of batches, each with statistics of its own."""
    module = nn.Sequential(*copy.deepcopy(model.blocks)).train()
    sgd = torch.optim.SGD(module.parameters(), lr=LR)

    def step() -> None:
        sgd.zero_grad()
        for xs, ys in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True):
            (F.cross_entropy(module(xs), ys) / CLIENTS).backward()  # type: ignore[no-untyped-call]
        sgd.step()

    return step


def _adamw(clients: int, batch: int, steps: int, repeats: int) -> list[Row]:
    model = build("cnn", GREY, CLASSES, seed=0)
    x, y = _samples(GREY, 2 * clients * batch)
    usual = {"scheme": "sfl-ga", "clients": clients, "batch": batch, "local_steps": steps}
    turns = {
        f"{name}.cut{cut}": _round(model, x, y, optimizer=name, cut=cut, **usual)
        for cut in (1, 4)
        for name in ("sgd", "adamw")
    }
    seconds = interleaved_medians(turns, repeats, f"AdamW, {clients} clients, {steps} steps")
    case = f"models.adamw.n{clients}_b{batch}_tau{steps}"
    return [Row(f"{case}.cut{cut}", seconds[f"adamw.cut{cut}"] / seconds[f"sgd.cut{cut}"], "x sgd") for cut in (1, 4)]


def _test(arch: str, shape: tuple[int, ...], count: int, repeats: int) -> list[Row]:
    """Against the passes of a round that keep their graphs, CLIENTS x BATCH samples at a time."""
    model, task = build(arch, shape, CLASSES, seed=0), Classification(CLASSES)
    x, y = _samples(shape, count)
    config = with_values(Config(), scheme="fl", clients=1)
    sim = Simulator(config, model, task, x, y, [np.arange(count)])
    whole, params = Placement.whole(model.depth).segments[0], sim.averaged()

    def forward() -> None:
        weights = sim.initial()
        for xs in torch.split(x, CLIENTS * BATCH):
            Pass(model, whole, weights, slice(0, 1), xs[None], sim.runtime)

    turns: dict[str, Callable[[], object]] = {
        "forward": forward,
        "test": partial(evaluate, model, params, task, x, y, sim.runtime),
    }
    seconds = interleaved_medians(turns, repeats, f"a test of {arch}")
    return [Row(f"models.test.{arch}", seconds["test"] / seconds["forward"], "x forward of training")]
