"""What each part of ours is worth: from `sfl` to `sfl-tc` and `sfl-replay`, one part after the other.

All train with the same settings and, but for `sfl`, end at the target, so that a part which saves bytes in a round and
needs more rounds for it shows as what it is.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from splitcast.studies.compare_figure import log_scale
from splitcast.studies.curves import COLOURS
from splitcast.studies.reproduce.basis import target_of, traffic
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, costs_to, panels, ranged
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread
from splitcast.studies.target import to_reach

TC: dict[str, Any] = {"scheme": "sfl-tc", "uplink_codec": "fp32", "downlink_codec": "fp32", "sync_codec": "fp32"}
PARTS: dict[str, dict[str, Any]] = {
    "+ basis of two directions": TC,
    "+ smashed data as int2": TC | {"uplink_codec": "int2"},
    "+ by transform instead": TC | {"uplink_codec": "auto"},
    "+ directions by transform": TC | {"uplink_codec": "auto", "downlink_codec": "auto"},
    "+ halves as differences: sfl-tc": {"scheme": "sfl-tc"},
    "every sample once: sfl-replay": {"scheme": "sfl-replay"},
}
ROOM = 25
"""Times the largest, for what is written beside it."""


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    plain = study.runs(scheme="sfl", rounds=rounds)
    target = study.target or target_of(plain)
    found = {"sfl": plain}
    found |= {name: study.runs(rounds=rounds, stop_at=target, **values) for name, values in PARTS.items()}
    rows: list[Row] = [{"part": name, **row(runs, target)} | traffic(runs[0]) for name, runs in found.items()]
    spent = {name: costs_to(runs, target, "megabytes") for name, runs in found.items()}
    figure, (axis,) = panels(1, height=3.6)
    for k, each in enumerate(spent.values()):
        reached = [mb for mb in each if np.isfinite(mb)]
        if reached:
            axis.plot(reached, [k] * len(reached), "o", color=COLOURS[0], alpha=0.6)
            axis.text(max(reached), k, f"   {spread(each, 1)}", va="center", fontsize=9)
    log_scale(axis)
    axis.set_xlim(right=axis.get_xlim()[1] * ROOM)
    axis.set_yticks(range(len(spent)), list(spent))
    axis.set_ylim(len(spent) - 0.5, -0.5)
    axis.set_xlabel(f"MB on the air to {100 * target:.1f} %")
    axis.set_title(f"{study.base.data.dataset}, IID, cut 1")
    axis.grid(alpha=0.3)
    caption = (
        "Not in the paper. What each part of ours is worth, one after the other; a dot a seed. All train with a "
        f"learning rate of {study.base.train.lr:g} without momentum and one local step, and all but sfl end at the "
        "target. In the CSV: MB per round of every direction and kind."
    )
    return Drawn(caption, rows, figure, [_claim(spent, target)])


def row(runs: Runs, target: float) -> dict[str, object]:
    """Rounds and MB to the target: mean, least and most of the seeds that are there."""
    there = [spent for records in runs if (spent := to_reach(records, target))]
    out: dict[str, object] = {"target_percent": 100 * target, "seeds": len(runs), "there": len(there)}
    return out | ranged("rounds", [s.rounds for s in there]) | ranged("MB", [s.megabytes for s in there])


def _claim(spent: dict[str, list[float]], target: float) -> Claim:
    """Every part but int2, which stands beside what replaces it, saves bytes."""
    chain = [each for name, each in spent.items() if "int2" not in name]
    less = [larger(before, after) for before, after in pairwise(chain)]
    said = ", ".join(f"{name} {spread(each, 1)}" for name, each in spent.items())
    return Claim(f"ours: every part saves bytes to {100 * target:.1f} %", f"MB: {said}", all_of(less))
