"""How much a round costs beyond one centralised SGD step on the same samples (paper CNN, random images).

The naive figure is what a per-client loop over plain modules takes for the same SFL-GA round.
"""

import copy
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitcast.base.config import Config, with_values
from splitcast.bench.apart import apart
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.training.task import Classification

SHAPE, CLASSES, LR = (1, 28, 28), 10, 0.01
CASES: list[tuple[int, int, tuple[int, ...]]] = [
    (10, 32, (1, 2, 3, 4)),
    (100, 4, (1, 2, 3, 4)),
    (1000, 1, (1, 2, 3, 4)),
]
"""Clients, batch, cuts."""


def engine(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench engine`."""
    rows: list[Row] = []
    for clients, batch, cuts in CASES:
        rows += _ratios(clients, batch, cuts, repeats)
    large = apart(crowd)
    rows.append(Row("engine.n10000_b4.sfl-ga.cut1.peak_memory", large["gib"], "GiB"))
    rows.append(Row("engine.n10000_b4.sfl-ga.cut1.round", large["round"], "s"))
    return rows


def _ratios(clients: int, batch: int, cuts: tuple[int, ...], repeats: int) -> list[Row]:
    model = build("cnn", SHAPE, CLASSES, seed=0)
    x, y = samples(2 * clients * batch)
    turns: dict[str, Callable[[], object]] = {"central": _central(model, x[: clients * batch], y[: clients * batch])}
    for name in ("sfl-ga", "sfl"):
        for cut in cuts:
            turns[f"{name}.cut{cut}"] = _round(_simulator(model, name, cut, clients, batch, x, y))
    turns["naive-sfl-ga.cut1"] = _naive(model, 1, x.view(clients, 2 * batch, *SHAPE), y.view(clients, -1), batch)
    seconds = interleaved_medians(turns, repeats, f"{clients} clients, batch {batch}")
    case = f"engine.n{clients}_b{batch}"
    central = seconds.pop("central")
    return [
        Row(f"{case}.central", 1e3 * central, "ms"),
        *(Row(f"{case}.{name}", value / central, "x central") for name, value in seconds.items()),
    ]


def samples(count: int) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *SHAPE, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def _simulator(model: SplitModel, name: str, cut: int, clients: int, batch: int, x: Tensor, y: Tensor) -> Simulator:
    parts = np.split(np.arange(len(y)), clients)
    config = with_values(Config(), scheme=name, cut=cut, clients=clients, batch=batch, lr=LR)
    return Simulator(config, model, Classification(CLASSES), x, y, parts)


def _round(simulator: Simulator) -> Callable[[], object]:
    """A whole round: draw, train, ledger, drift."""
    return lambda: (simulator.round(1), simulator.drift())


def _central(model: SplitModel, x: Tensor, y: Tensor) -> Callable[[], object]:
    module = nn.Sequential(*copy.deepcopy(model.blocks))
    sgd = torch.optim.SGD(module.parameters(), lr=LR)

    def step() -> None:
        sgd.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()

    return step


def _naive(model: SplitModel, cut: int, x: Tensor, y: Tensor, batch: int) -> Callable[[], object]:
    """SFL-GA as a loop over clients; x (N, rows, ...), y (N, rows)."""
    halves = [nn.Sequential(*copy.deepcopy(model.blocks[:cut])) for _ in x]
    server = nn.Sequential(*copy.deepcopy(model.blocks[cut:]))
    optimisers = [torch.optim.SGD(half.parameters(), lr=LR) for half in (*halves, server)]

    def step() -> None:
        for optimiser in optimisers:
            optimiser.zero_grad()
        smashed = [half(rows[:batch]) for half, rows in zip(halves, x, strict=True)]
        seen = [s.detach().requires_grad_() for s in smashed]
        for s, labels in zip(seen, y, strict=True):
            (F.cross_entropy(server(s), labels[:batch]) / len(seen)).backward()  # type: ignore[no-untyped-call]
        mean = torch.stack([s.grad for s in seen if s.grad is not None]).sum(0)
        for s in smashed:
            s.backward(mean)
        for optimiser in optimisers:
            optimiser.step()

    return step


def crowd() -> dict[str, float]:
    """Seconds of a round of ten thousand clients."""
    large = _simulator(build("cnn", SHAPE, CLASSES, seed=0), "sfl-ga", 1, 10_000, 4, *samples(80_000))
    start = time.perf_counter()
    large.round(1)
    large.drift()
    return {"round": time.perf_counter() - start}
