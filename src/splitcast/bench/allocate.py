"""How fast P2.1 and P1 with energy are solved: in batches, against a general convex solver (extra `verify`), and
for many clients.

Instances are uplink stages of the paper's setting: its cell, Rayleigh draws, the CNN cut after its first block, batch
32. The general solver is compiled once and solves each instance once more, which is the least it can do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from splitcast.allocate.allocate import allocate
from splitcast.allocate.energy import allocate_energy
from splitcast.allocate.energy_reference import solve_cvxpy_energy
from splitcast.allocate.rate import ShannonRate
from splitcast.allocate.reference import solve_cvxpy
from splitcast.base.config import NetworkConfig
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.cost.cell import Array, cell
from splitcast.cost.channel import channel
from splitcast.cost.channel import record as draw

CLIENTS, BATCH, RESOLVED = 10, 1000, 20
MANY = (10_000, 100_000)


def bench_allocate(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench allocate`."""
    batch = instances(CLIENTS, BATCH)
    few = [_pick(batch, k) for k in range(RESOLVED)]
    priced = with_energy(batch)
    many = {count: instances(count, 1) for count in MANY}
    turns: dict[str, Callable[[], object]] = {
        "batch": partial(allocate, **batch),
        "single": partial(_each, allocate, few),
        "cvxpy": partial(_each, partial(solve_cvxpy, passes=1), few),
        **{f"n{count}": partial(allocate, **given) for count, given in many.items()},
        "energy": partial(allocate_energy, **priced),
        "energy_cvxpy": partial(_each, solve_cvxpy_energy, [_pick(priced, k) for k in range(RESOLVED)]),
    }
    seconds = interleaved_medians(turns, repeats)
    ours, single, theirs = seconds["batch"] / BATCH, seconds["single"] / RESOLVED, seconds["cvxpy"] / RESOLVED
    energy, general = seconds["energy"] / BATCH, seconds["energy_cvxpy"] / RESOLVED
    small, large = (seconds[f"n{count}"] for count in MANY)
    return [
        Row(f"allocate.n{CLIENTS}.batch{BATCH}", 1e6 * ours, "us per instance"),
        Row(f"allocate.n{CLIENTS}.single", 1e3 * single, "ms"),
        Row(f"allocate.n{CLIENTS}.cvxpy", 1e3 * theirs, "ms"),
        Row(f"allocate.n{CLIENTS}.cvxpy_by_batch{BATCH}", theirs / ours, "x"),
        Row(f"allocate.n{CLIENTS}.cvxpy_by_single", theirs / single, "x"),
        Row(f"allocate.n{CLIENTS}.batch{BATCH}.worst_gap", float(allocate(**batch).gap.max()), "relative"),
        Row(f"allocate.energy.n{CLIENTS}.batch{BATCH}", 1e6 * energy, "us per instance"),
        Row(f"allocate.energy.n{CLIENTS}.cvxpy", 1e3 * general, "ms"),
        Row(f"allocate.energy.n{CLIENTS}.cvxpy_by_batch{BATCH}", general / energy, "x"),
        Row(f"allocate.energy.n{CLIENTS}.batch{BATCH}.worst_gap", _worst(allocate_energy(**priced).gap), "relative"),
        Row(f"allocate.n{MANY[0]}", 1e3 * small, "ms"),
        Row(f"allocate.n{MANY[1]}", 1e3 * large, "ms"),
        Row(f"allocate.n{MANY[1]}.growth", large / small, f"x n{MANY[0]}"),
        Row(f"allocate.n{MANY[1]}.gap", float(allocate(**many[MANY[1]]).gap[0]), "relative"),
    ]


def instances(clients: int, count: int) -> dict[str, Any]:
    """Arguments of `allocate`; gains (count, clients)."""
    config = NetworkConfig()
    here = cell(config, clients, seed=0)
    gains = draw(channel(config, clients, seed=0), count).gains
    return {
        "fixed_s": 32 * 1.2544e6 / here.client_flops_per_s,  # forward FLOPs of the first block
        "uplink_bits": 8 * 32 * (4 * 6272 + 1),  # smashed data and labels
        "server_flops": 32 * 70.245888e6,  # forward and backward of the rest
        "rate": ShannonRate(here.client_power_w * gains, here.noise_w_per_hz),
        "bandwidth_hz": here.bandwidth_hz,
        "cpu_flops": here.server_flops_per_s,
    }


def with_energy(stage: dict[str, Any], seconds_per_j: float = 1.0) -> dict[str, Any]:
    """The same stages with clients of 1 GFLOP/s whose speed and power are to choose."""
    here = cell(NetworkConfig(), CLIENTS, seed=0)
    flops, speed = 32 * 1.2544e6, 1e9
    own = {"fixed_s": 0.0, "compute_s": flops / speed, "compute_j": here.kappa * flops * speed**2}
    return stage | own | {"power_w": here.client_power_w, "seconds_per_j": seconds_per_j}


def _worst(gap: Array) -> float:
    return float(gap.max())


def _pick(batch: dict[str, Any], k: int) -> dict[str, Any]:
    rate = batch["rate"]
    return batch | {"rate": ShannonRate(np.asarray(rate.received_power_w)[k], rate.noise_w_per_hz)}


def _each(solve: Callable[..., object], given: Sequence[dict[str, Any]]) -> None:
    for instance in given:
        solve(**instance)
