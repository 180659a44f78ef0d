"""SFL-GB against SFL and SFL-GA: bytes to the same accuracy, IID and with two classes per client."""

from typing import Any

import numpy as np

from splitcast.records import RoundRecord
from splitcast.reproduce.draw import Claim, Drawn, Reach, Row, accuracy, final_accuracy, panels, to_target, verdict
from splitcast.reproduce.study import Runs, Study

SCHEMES = ("sfl", "sfl-ga", "sfl-gb")
PARTITIONS: dict[str, dict[str, Any]] = {
    "IID": {"partition": "iid"},
    "two classes per client": {"partition": "shards", "classes_per_client": 2},
}


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    figure, axes = panels(len(PARTITIONS))
    rows: list[Row] = []
    claims = []
    for axis, (spread, values) in zip(axes, PARTITIONS.items(), strict=True):
        series = {scheme: study.runs(scheme=scheme, rounds=rounds, **values) for scheme in SCHEMES}
        accuracy(axis, series, "MB")
        axis.set_xscale("log")
        axis.set_title(f"{study.base.data.dataset}, {spread}")
        target = study.target or target_of(series["sfl"])
        spent = {scheme: to_target(runs, target) for scheme, runs in series.items()}
        for scheme, runs in series.items():
            rows.append(
                {"partition": spread, "scheme": scheme, "target_percent": 100 * target, "seeds": len(runs)}
                | reach_row(runs, target)
                | {"accuracy_after": final_accuracy(runs), "rounds_run": rounds}
                | traffic(runs[0])
            )
        less = {name: _times_fewer(spent[name], spent["sfl-gb"]) for name in ("sfl", "sfl-ga")}
        end = final_accuracy(series["sfl-gb"])
        claims.append(
            Claim(
                f"ours, {spread}: at least 20x fewer bytes than SFL and 10x fewer than SFL-GA to {100 * target:.1f} %",
                ", ".join(f"{name} {_times(ratio)}" for name, ratio in less.items())
                if spent["sfl-gb"]
                else f"sfl-gb does not get there in {rounds} rounds: it ends at {end:.1f} %",
                verdict(
                    spent["sfl-gb"] is not None and all(ratio is None or ratio > 1 for ratio in less.values()),
                    all(ratio is None or ratio >= least for ratio, least in zip(less.values(), (20, 10), strict=True)),
                ),
            )
        )
    caption = "Not in the paper. Accuracy against all bytes on the air; the table is the CSV file."
    return Drawn(caption, rows, figure, claims)


def target_of(sfl: Runs) -> float:
    """The accuracy that SFL ends with, mean over seeds, less half a point."""
    return final_accuracy(sfl) / 100 - 0.005


def reach_row(runs: Runs, target: float) -> dict[str, object]:
    """Rounds, MB and seconds to the target; empty where some seed never gets there."""
    reach = to_target(runs, target)
    if reach is None:
        return {"rounds": "never", "MB": "", "seconds": ""}
    return {"rounds": reach.rounds, "MB": reach.megabytes, "seconds": reach.seconds}


def traffic(records: list[RoundRecord]) -> dict[str, object]:
    """MB per round of every direction and kind, mean over the training."""
    kinds = sorted({kind for record in records for kind in record.kinds})
    return {f"{kind}_MB": float(np.mean([r.kinds.get(kind, 0) for r in records])) / 1e6 for kind in kinds}


def _times_fewer(theirs: Reach | None, ours: Reach | None) -> float | None:
    return theirs.megabytes / ours.megabytes if theirs and ours else None


def _times(ratio: float | None) -> str:
    return "never gets there" if ratio is None else f"{ratio:.1f}x"
