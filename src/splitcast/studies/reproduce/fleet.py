"""Training a fleet of unequal clients: a cut for each, the best common cut, averaging by side, and FedAvg."""

from typing import Any

from splitcast.schemes.schemes import Sfl
from splitcast.studies.per_client import plan_per_client
from splitcast.studies.reproduce.draw import (
    Claim,
    Drawn,
    accuracy,
    accuracy_rows,
    costs_to,
    final_accuracy,
    panels,
    reached,
)
from splitcast.studies.reproduce.study import Runs, Study, model_of
from splitcast.studies.reproduce.verdicts import larger, spread

SYNC = 5
"""Rounds between averagings of the client halves, and local steps of FedAvg"""
SLOW = 5
"""One client in so many is slow"""
FLEET: dict[str, Any] = {"arch": "cnn-small", "bandwidth_hz": 5e6, "lr": 0.1, "eval_samples": 2000, "eval_every": 2}
BY_SIDE = "splitcast.studies.reproduce.fleet:BySide"


class BySide(Sfl):
    """As `sfl`, but of blocks that some clients hold and others do not, clients and server average their copies apart,
    as is usual with unequal cuts (for instance Lin et al., HSFL, 2024): they become different blocks."""

    name = "by-side"
    by_side = True


def draw(study: Study) -> Drawn:
    rounds, clients = study.long_rounds, study.base.data.clients
    speeds = tuple(0.12e9 if n < clients // SLOW else 2e9 for n in range(clients))
    series: dict[str, Runs] = {"cut for every client": [], "best common cut": [], "averaged by side": [], "FedAvg": []}
    held = list[str]()
    for seed in study.seeds:
        here: dict[str, Any] = {"seed": seed, "rounds": rounds, "client_flops_per_s": speeds, **FLEET}
        split = here | {"sync_every": SYNC}
        fleet = study.config(scheme="sfl", **split)
        found = plan_per_client(fleet, draws=4, model=model_of(fleet))
        held.append(f"seed {seed}: cuts {','.join(map(str, found.cuts))}, {found.gain:.2f} times as fast")
        series["cut for every client"].append(study.run(scheme="sfl", cut=tuple(found.cuts), **split))
        series["best common cut"].append(study.run(scheme="sfl", cut=found.common_cut, **split))
        series["averaged by side"].append(study.run(scheme=BY_SIDE, cut=tuple(found.cuts), **split))
        steps = {"local_steps": SYNC, "rounds": max(1, rounds // SYNC), "eval_every": 1}
        series["FedAvg"].append(study.run(scheme="fl", **here | steps))
    target = reached(series[name] for name in ("cut for every client", "best common cut"))
    times = {name: costs_to(runs, target, "seconds") for name, runs in series.items()}
    ends = {name: [final_accuracy([records]) for records in runs] for name, runs in series.items()}
    figure, axes = panels(2)
    for axis, against in zip(axes, ("seconds", "rounds"), strict=True):
        accuracy(axis, series, against)
    figure.suptitle(f"{study.base.data.dataset}, 5 MHz, one client in {SLOW} with 0.12 GFLOP/s, the others with 2")
    ratio = [a / b for a, b in zip(times["best common cut"], times["cut for every client"], strict=True)]
    claims = [
        Claim(
            f"ours: a cut for every client reaches {100 * target:.0f} % in fewer seconds than the best common cut",
            "; ".join([*(f"{name} {spread(each, 0)} s" for name, each in times.items()), *held]),
            larger(times["best common cut"], times["cut for every client"]),
        ),
        Claim(
            "ours: 1.5 times as fast, seed by seed",
            f"{spread(ratio, 2)} times",
            larger(ratio, [1.5] * len(ratio)),
        ),
        Claim(
            "ours: and in fewer seconds than FedAvg",
            f"{spread(times['FedAvg'], 0)} s against {spread(times['cut for every client'], 0)} s",
            larger(times["FedAvg"], times["cut for every client"]),
        ),
        Claim(
            "ours: unequal cuts cost no accuracy if blocks are averaged over all copies, within 0.5 points",
            ", ".join(f"{name} {spread(each, 2)} %" for name, each in ends.items()),
            larger([end + 0.5 for end in ends["cut for every client"]], ends["best common cut"]),
        ),
        Claim(
            "ours: averaging by side loses accuracy",
            f"{spread(ends['averaged by side'], 2)} % against {spread(ends['cut for every client'], 2)} %",
            larger(ends["cut for every client"], ends["averaged by side"]),
        ),
    ]
    caption = (
        f"Not in the paper. `sfl` with client halves averaged every {SYNC} rounds, cuts from `splitcast plan "
        f"--per-client`; FedAvg makes {SYNC} local steps a round. A small CNN, data divided evenly; seeds draw other "
        "places and fading."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
