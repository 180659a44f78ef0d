"""A cut for every client: how far from its bound the plan is, and how long it takes.

Fleets in the paper's cell, one round of fading each; speeds are uniform in a range. Gaps are of the paper's CNN (4
cuts), times of one with a further block (5 cuts). Where joules have a price, it is a second each.
"""

import statistics
import time
from dataclasses import replace

from torch import nn

from splitcast.base.config import Config, with_values
from splitcast.bench.rows import Row, tell
from splitcast.cutting.assign import assign
from splitcast.cutting.fleet import FleetPlanner
from splitcast.cutting.menu import Menu
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.studies.plan import scenario_of

SCHEMES = ("sfl", "psl", "sfl-ga", "epsl-cut", "local-loss", "psl-personal", "sglr", "cpsl", "sl")
"""All that take a cut for every client and have settings for it; those of `sfl-gb` come from one cut"""
CELLS = [(band, speeds) for band in (1, 5, 20) for speeds in ((1, 10), (0.1, 10))]
"""MHz and GFLOP/s, one after the other"""


def bench_assign(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench assign`, each of ``repeats`` fleets."""
    models, rows = {4: build("cnn", (1, 28, 28), 10, seed=0), 5: deeper()}, list[Row]()
    for n in (10, 100):
        for scheme in SCHEMES:
            gaps, joules, seconds = list[float](), list[float](), list[float]()
            for seed in range(repeats):
                menu = fleet(models[4], scheme, n, seed)
                gaps.append(assign(menu).gap)
                if n == 10:
                    joules.append(assign(replace(menu, seconds_per_j=1.0)).gap)
                menu = fleet(models[5], scheme, n, seed)
                start = time.process_time()
                assign(menu)
                seconds.append(time.process_time() - start)
                tell(f"plans of {scheme}, {n} clients", seed + 1, repeats)
            case = f"assign.{scheme}_n{n}"
            for name, found in (("", gaps), ("joules_", joules)):
                if found:
                    rows.append(Row(f"{case}.{name}gap", 100 * statistics.median(found), "%"))
                    rows.append(Row(f"{case}.{name}worst", 100 * max(found), "%"))
            rows.append(Row(f"{case}.time", 1e3 * statistics.median(seconds), "ms of CPU"))
    return rows


def fleet(model: SplitModel, scheme: str, n: int, seed: int) -> Menu:
    """What the clients of a fleet may choose from."""
    band, speeds = CELLS[seed % len(CELLS)]
    cell = {"bandwidth_hz": 1e6 * band, "client_flops_per_s_range": tuple(1e9 * speed for speed in speeds)}
    scenario = scenario_of(with_values(Config(), scheme=scheme, clients=n, seed=seed, **cell), model)
    return FleetPlanner(scenario).menu(scenario.conditions([1]))


def deeper() -> SplitModel:
    """Six blocks."""
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()),
        nn.Sequential(nn.Linear(512, 128), nn.ReLU()),
        nn.Linear(128, 10),
    ]
    return SplitModel(blocks, (1, 28, 28))
