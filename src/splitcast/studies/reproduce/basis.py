"""SFL-GB against SFL and SFL-GA: bytes to the same accuracy, IID and with two classes per client.

All train for the same rounds. Where a seed of SFL-GB is not at the target by then it goes on, half as long again at
most, and its bytes count. Others do not: what they sent until then is less than they need.
"""

from typing import Any

import numpy as np

from splitcast.run.records import RoundRecord
from splitcast.studies.compare_figure import log_scale
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, accuracy, costs_to, final_accuracy, panels, to_target
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread

SCHEMES = ("sfl", "sfl-ga", "sfl-gb")
TIMES = {"sfl": 20.0, "sfl-ga": 10.0}
"""So many times fewer bytes than these"""
PARTITIONS: dict[str, dict[str, Any]] = {
    "IID": {"partition": "iid"},
    "two classes per client": {"partition": "shards", "classes_per_client": 2},
}


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    figure, axes = panels(len(PARTITIONS))
    rows: list[Row] = []
    claims = []
    for axis, (partition, values) in zip(axes, PARTITIONS.items(), strict=True):
        series = {scheme: study.runs(scheme=scheme, rounds=rounds, **values) for scheme in SCHEMES}
        accuracy(axis, series, "MB")
        log_scale(axis)
        axis.set_title(f"{study.base.data.dataset}, {partition}")
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
                {"partition": partition, "scheme": scheme, "target_percent": 100 * target, "seeds": len(runs)}
                | reach_row(reaching[scheme], target)
                | {"accuracy_after": final_accuracy(runs), "rounds_run": rounds}
                | traffic(runs[0])
            )
        claims.append(_claim(partition, reaching, target))
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


def _claim(partition: str, series: dict[str, Runs], target: float) -> Claim:
    """Of the ratios of every seed; one that never gets there has sent infinitely much."""
    wanted = f"ours, {partition}: at least 20x fewer bytes than SFL and 10x fewer than SFL-GA to {100 * target:.1f} %"
    ours = costs_to(series["sfl-gb"], target, "megabytes")
    said, found = [], []
    for name, times in TIMES.items():
        less = [theirs / mine for theirs, mine in zip(_bytes(series[name], target), ours, strict=True)]
        there = to_target(series[name], target) is not None
        said.append(f"{name} {'' if there else 'never there, over '}{spread(less)}x")
        enough = larger(less, [times] * len(less)) == "holds"
        found.append(larger(less, [1.0] * len(less), size=enough))
    if not np.isfinite(ours).all():
        last, absent = max(records[-1].round for records in series["sfl-gb"]), np.isinf(ours).sum()
        said = [f"{absent} of {len(ours)} seeds of sfl-gb are not there in {last} rounds"]
    return Claim(wanted, ", ".join(said), all_of(found))


def _bytes(runs: Runs, target: float) -> list[float]:
    """MB of every seed to the target; one that never gets there counts with all it sent."""
    reached = costs_to(runs, target, "megabytes")
    return [min(mb, sum(r.bytes for r in records) / 1e6) for mb, records in zip(reached, runs, strict=True)]
