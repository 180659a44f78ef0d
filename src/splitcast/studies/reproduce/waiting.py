"""Unequal clients: wait for all of them, leave out who would be late, or go on with the first."""

from typing import Any

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
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import larger, spread

FLEET: dict[str, Any] = {
    "scheme": "sfl",
    "client_flops_per_s_range": (0.05e9, 1e9),
    "partition": "shards",
    "classes_per_client": 2,
    "lr": 0.05,
}
LATE = "leaves out who is late"
SHARE = 0.5
"""Of the clients that the server waits for, and of a round's seconds that the deadline leaves"""


def draw(study: Study) -> Drawn:
    rounds, clients = study.base.train.rounds, study.base.data.clients
    few = max(1, round(SHARE * clients))
    series: dict[str, Runs] = {"waits for all": [], LATE: [], f"goes on with {few}": []}
    for seed in study.seeds:
        here: dict[str, Any] = FLEET | {"seed": seed, "rounds": rounds}
        waits = study.run(**here)
        limit = round(SHARE * sum(r.latency_s for r in waits) / rounds, 3)
        longer = {"rounds": round(rounds / SHARE)}  # in which everybody sends as often
        series["waits for all"].append(waits)
        series[LATE].append(study.run(**here | longer, deadline_s=limit))
        series[f"goes on with {few}"].append(study.run(**here | longer, wait_for=few))
    target = reached(runs for name, runs in series.items() if name != LATE)
    times = {name: costs_to(runs, target, "seconds") for name, runs in series.items()}
    ends = {name: [final_accuracy([records]) for records in runs] for name, runs in series.items()}
    of_waiting, of_late, of_going_on = times.values()
    figure, axes = panels(2)
    for axis, against in zip(axes, ("seconds", "rounds"), strict=True):
        accuracy(axis, series, against)
    figure.suptitle(f"{study.base.data.dataset}, two classes per client, {clients} clients of 0.05 to 1 GFLOP/s")
    said = "; ".join(f"{name} {spread(each, 0)} s, ends at {spread(ends[name], 1)} %" for name, each in times.items())
    claims = [
        Claim(
            f"ours: going on with the first reaches {100 * target:.0f} % in fewer seconds than waiting for all",
            said,
            larger(of_waiting, of_going_on),
        ),
        Claim("ours: and in fewer seconds than leaving out who is late", said, larger(of_late, of_going_on)),
    ]
    caption = (
        f"Not in the paper. `sfl` at cut 1. The deadline is {SHARE:g} of the mean round of waiting for all; the server "
        f"that goes on does so with {few} of {clients} clients (`--wait-for {few}`), who have equal shares of all."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
