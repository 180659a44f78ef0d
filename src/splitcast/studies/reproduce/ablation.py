"""Where the factor of SFL-GB comes from: codecs, rank and rhythm of averaging, one at a time."""

from typing import Any

import numpy as np

from splitcast.studies.compare_figure import log_scale
from splitcast.studies.curves import COLOURS
from splitcast.studies.reproduce.basis import reach_row, target_of, traffic
from splitcast.studies.reproduce.draw import Drawn, final_accuracy, panels
from splitcast.studies.reproduce.study import Study

KINDS = {
    "up.smashed": "smashed data, up",
    "down.gradient": "gradients, down",
    "down.basis": "basis, down",
    "down.coefficients": "coefficients, down",
    "up.model": "client halves, up",
    "down.model": "averaged half, down",
    "up.labels": "labels, up",
}
PACKED = {"uplink_codec": "int2", "downlink_codec": "int8"}
PLAIN = {"uplink_codec": "fp32", "downlink_codec": "fp32"}
VARIANTS: dict[str, dict[str, Any]] = {
    "sfl": {"scheme": "sfl"},
    "sfl-ga": {"scheme": "sfl-ga"},
    "psl": {"scheme": "psl"},
    "sfl, packed": {"scheme": "sfl", **PACKED},
    "sfl-ga, packed": {"scheme": "sfl-ga", **PACKED},
    "psl, packed": {"scheme": "psl", **PACKED},
    "sfl-gb": {"scheme": "sfl-gb"},
    "sfl-gb, fp32": {"scheme": "sfl-gb", **PLAIN},
    **{f"sfl-gb, rank {rank}": {"scheme": "sfl-gb", "rank": rank} for rank in (1, 4, 32)},
    **{f"sfl-gb, sync every {k}": {"scheme": "sfl-gb", "sync_every": k} for k in (5, 20)},
}


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    runs = {name: [study.run(seed=study.seeds[0], rounds=rounds, **values)] for name, values in VARIANTS.items()}
    target = study.target or target_of(runs["sfl"])
    rows = [
        {"variant": name, "target_percent": 100 * target}
        | reach_row(run, target)
        | {"accuracy_after": final_accuracy(run)}
        | traffic(run[0])
        for name, run in runs.items()
    ]
    figure, (total, shares) = panels(2, height=5.2)
    names = [str(row["variant"]) for row in rows]
    for k, row in enumerate(rows):
        if row["MB"]:
            total.plot(float(str(row["MB"])), k, "o", color=COLOURS[0])
            total.text(float(str(row["MB"])), k, f"   {float(str(row['MB'])):.0f}", va="center", fontsize=9)
    log_scale(total)
    total.margins(x=0.15)
    total.set_xlabel(f"MB on the air to {100 * target:.1f} %")
    for y in (total, shares):
        y.set_yticks(range(len(names)), names if y is total else [])
        y.set_ylim(len(names) - 0.5, -0.5)
    total.grid(alpha=0.3)

    sent = np.array([[float(str(row.get(f"{kind}_MB", 0.0))) for kind in KINDS] for row in rows])
    percent = 100 * sent / sent.sum(1, keepdims=True)
    for j, label in enumerate(KINDS.values()):
        if percent[:, j].max() > 0.05:
            left = percent[:, :j].sum(1)
            shares.barh(range(len(names)), percent[:, j], 0.7, left, color=COLOURS[j], label=label)
    shares.set_xlim(0, 100)
    shares.set_xlabel("share of a round's bytes (%)")
    shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=9)
    figure.suptitle(f"{study.base.data.dataset}, IID, cut 1, seed {study.seeds[0]}: what each part is worth")
    caption = (
        "Not in the paper. One seed. `packed` is int2 smashed data and int8 gradients, what sfl-gb uses. Variants that "
        "do not reach the target in the rounds run have no dot. In the CSV: MB per round of every direction and kind."
    )
    return Drawn(caption, rows, figure)
