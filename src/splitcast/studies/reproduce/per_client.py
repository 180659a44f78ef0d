"""A cut for every client: where it pays, by scheme, bandwidth and spread of speeds."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps

from splitcast.base.config import Config, with_values
from splitcast.cost.cell import Array
from splitcast.cutting.assign import assign
from splitcast.cutting.fleet import FleetPlanner
from splitcast.studies.plan import scenario_of
from splitcast.studies.reproduce.draw import Claim, Drawn, Row
from splitcast.studies.reproduce.study import Study, model_of
from splitcast.studies.reproduce.verdicts import verdict

SCHEMES = ("sfl", "psl", "sfl-ga")
BANDS_MHZ = (1, 2, 5, 10, 20, 50, 100)
SPEEDS_GHZ = ((0.1, 1), (0.3, 3), (1, 10), (0.1, 10))
CLIENTS = 10
LIMITS = ("no limits", "every other client has memory for cut 1 only")


def draw(study: Study) -> Drawn:
    fleets, every = (5, 1) if study.full else (1, 3)
    bands, ranges = BANDS_MHZ[::every], SPEEDS_GHZ[::every]
    figure, grid = plt.subplots(len(LIMITS), len(SCHEMES), figsize=(14, 6), sharex=True, sharey=True, squeeze=False)
    figure.set_layout_engine("constrained")
    rows, free = list[Row](), dict[str, Array]()
    for k, limit in enumerate(LIMITS):
        for axis, scheme in zip(grid[k], SCHEMES, strict=True):
            gains = np.zeros((len(ranges), len(bands)))
            for i, speeds in enumerate(ranges):
                for j, band in enumerate(bands):
                    each = [gain(study.base, scheme, seed, band, speeds, limited=k > 0) for seed in range(fleets)]
                    gains[i, j] = np.median(each)
                    row = {"scheme": scheme, "limits": limit, "GHz": _range(speeds), "MHz": band}
                    rows.append(row | {"gain": float(gains[i, j]), "fleets": fleets})
            free.setdefault(scheme, gains)
            shown = axis.imshow(gains, cmap=colormaps["viridis"], vmin=1, vmax=2, aspect="auto", origin="lower")
            for (i, j), value in np.ndenumerate(gains):
                axis.text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if value > 1.5 else "white")
            axis.set_xticks(range(len(bands)), [str(band) for band in bands])
            axis.set_yticks(range(len(ranges)), [_range(speeds) for speeds in ranges])
            axis.set_title(f"{scheme}, {limit}", fontsize=10)
    for axis in grid[-1]:
        axis.set_xlabel("bandwidth (MHz)")
    for axis in grid[:, 0]:
        axis.set_ylabel("speeds of clients (GFLOP/s)")
    figure.colorbar(shown, ax=grid, label="round at the best common cut ÷ round with a cut for every client")
    most = {scheme: float(gains.max()) for scheme, gains in free.items()}
    least = {scheme: float(gains[0, [band >= 10 for band in bands]].max()) for scheme, gains in free.items()}
    claims = [
        Claim(
            "ours: somewhere a cut for every client makes a round 1.5 times as fast",
            ", ".join(f"{scheme} {value:.2f}" for scheme, value in most.items()),
            verdict(max(most.values()) >= 1.5),
        ),
        Claim(
            "ours: nothing to gain at 0.1–1 GFLOP/s from 10 MHz on",
            ", ".join(f"{scheme} {value:.2f}" for scheme, value in least.items()),
            verdict(max(least.values()) < 1.05),
        ),
    ]
    caption = (
        f"Not in the paper. Its CNN and cell, {CLIENTS} clients with speeds uniform in a range; median of {fleets} "
        "fleets, each in a round of fading."
    )
    return Drawn(caption, rows, figure, claims)


def gain(
    base: Config, scheme: str, seed: int, band_mhz: float, speeds_ghz: Sequence[float], *, limited: bool = False
) -> float:
    """How many times longer a round takes at the best common cut, in a fleet drawn from ``seed``."""
    scenario = scenario_of(fleet(base, scheme, CLIENTS, seed, band_mhz, speeds_ghz), model_of(base))
    allowed = np.ones((CLIENTS, len(scenario.placements())), dtype=bool)
    if limited:
        allowed[::2, 1:] = False
    return assign(FleetPlanner(scenario).menu(scenario.conditions([1]), allowed)).gain


def fleet(base: Config, scheme: str, clients: int, seed: int, band_mhz: float, speeds_ghz: Sequence[float]) -> Config:
    """Clients of unequal speeds."""
    speeds = tuple(1e9 * speed for speed in speeds_ghz)
    cell = {"bandwidth_hz": 1e6 * band_mhz, "client_flops_per_s_range": speeds}
    return with_values(base, scheme=scheme, clients=clients, seed=seed, **cell)


def _range(speeds: Sequence[float]) -> str:
    return f"{speeds[0]:g}–{speeds[1]:g}"
