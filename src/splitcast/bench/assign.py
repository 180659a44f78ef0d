"""A cut for every client: how far from its bound the plan is, how long it takes, and where it pays.

Fleets in the paper's cell with the paper's CNN, one round of fading each; speeds are uniform in a range.
"""

import statistics
import time

import numpy as np

from splitcast.base.config import Config, with_values
from splitcast.bench.rows import Row, tell
from splitcast.cost.scenario import Scenario
from splitcast.cutting.assign import Menu, assign
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.training.task import Classification

SCHEMES = ("sfl", "psl", "sfl-ga")
BANDS_MHZ = (1, 5, 20, 100)
SPEEDS_GHZ = ((0.1, 1), (1, 10), (0.1, 10))
FLEETS = 5


def bench_assign(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench assign`: ``repeats`` fleets for each gap, FLEETS for each gain."""
    model, rows = build("cnn", (1, 28, 28), 10, seed=0), list[Row]()
    for n in (10, 100):
        for scheme in SCHEMES:
            gaps, seconds = [], []
            for seed in range(repeats):
                menu = fleet(model, scheme, n, seed, BANDS_MHZ[seed % 3], SPEEDS_GHZ[1 + seed % 2])
                start = time.process_time()
                gaps.append(assign(menu).gap)
                seconds.append(time.process_time() - start)
                tell(f"gaps of {scheme}, {n} clients", seed + 1, repeats)
            case = f"assign.{scheme}_n{n}"
            rows += [Row(f"{case}.gap", 100 * statistics.median(gaps), "%"), Row(f"{case}.worst", 100 * max(gaps), "%")]
            rows.append(Row(f"{case}.time", 1e3 * statistics.median(seconds), "ms of CPU"))
    for scheme in SCHEMES:
        for low, high in SPEEDS_GHZ:
            for band in BANDS_MHZ:
                menus = (fleet(model, scheme, 10, seed, band, (low, high)) for seed in range(FLEETS))
                gain = statistics.median(assign(menu).gain for menu in menus)
                rows.append(Row(f"assign.gain.{scheme}_{low:g}-{high:g}GHz_{band}MHz", gain, "x"))
    return rows


def fleet(model: SplitModel, scheme: str, n: int, seed: int, band_mhz: float, speeds_ghz: tuple[float, float]) -> Menu:
    """What the clients of a fleet may choose from."""
    speeds = tuple(1e9 * speed for speed in speeds_ghz)
    settings = {"clients": n, "seed": seed, "bandwidth_hz": 1e6 * band_mhz, "client_flops_per_s_range": speeds}
    scenario = Scenario.of(with_values(Config(), scheme=scheme, **settings), model, Classification(10))
    rounds = [scenario.stages(place, 1) for place in scenario.placements()]
    return Menu.of(scenario.cell, rounds, scenario.conditions([1]), np.ones((n, len(rounds)), dtype=bool))
