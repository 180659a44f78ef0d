"""SFL-GB against SFL and SFL-GA: bytes to the same accuracy, IID and with two classes per client.

All train for the same rounds. Where a seed of SFL-GB is not at the target by then it goes on, half as long again at
most, and its bytes count. Others do not: what they sent until then is less than they need.
"""

from typing import Any

import numpy as np

from splitcast.run.records import RoundRecord
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, accuracy, final_accuracy, panels, to_target
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import verdict

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
        going_on = {"scheme": "sfl-gb", "rounds": rounds * 3 // 2, **values}
        reaching = series | {
            "sfl-gb": [
                records if to_target([records], target) else study.run(seed=seed, **going_on)
                for seed, records in zip(study.seeds, series["sfl-gb"], strict=True)
            ]
        }
        for scheme, runs in series.items():
            rows.append(
                {"partition": spread, "scheme": scheme, "target_percent": 100 * target, "seeds": len(runs)}
                | reach_row(reaching[scheme], target)
                | {"accuracy_after": final_accuracy(runs), "rounds_run": rounds}
                | traffic(runs[0])
            )
        claims.append(_claim(spread, reaching, target))
    caption = (
        f"Not in the paper. Accuracy against all bytes on the air in {rounds} rounds. For the table (CSV), seeds of "
        "sfl-gb that are not at the target go on, half as long again at most."
    )
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


def _claim(spread: str, series: dict[str, Runs], target: float) -> Claim:
    wanted = f"ours, {spread}: at least 20x fewer bytes than SFL and 10x fewer than SFL-GA to {100 * target:.1f} %"
    ours = to_target(series["sfl-gb"], target)
    if ours is None:
        last = max(records[-1].round for records in series["sfl-gb"])
        return Claim(wanted, f"sfl-gb does not get there in {last} rounds", verdict(False))
    less = {name: _bytes(series[name], target) / ours.megabytes for name in ("sfl", "sfl-ga")}
    there = {name: to_target(series[name], target) is not None for name in less}
    said = [f"{name} {'' if there[name] else 'never there, over '}{ratio:.1f}x" for name, ratio in less.items()]
    return Claim(wanted, ", ".join(said), verdict(min(less.values()) > 1, less["sfl"] >= 20 and less["sfl-ga"] >= 10))


def _bytes(runs: Runs, target: float) -> float:
    """MB to the target, mean over seeds; one that never gets there counts with all it sent."""
    spent = []
    for records in runs:
        reach = to_target([records], target)
        spent.append(reach.megabytes if reach else sum(r.bytes for r in records) / 1e6)
    return float(np.mean(spent))
