"""Where the factor of SFL-GB comes from: codecs, rank and rhythm of averaging, one at a time."""

from typing import Any

from splitcast.reproduce.basis import reach_row, target_of, traffic
from splitcast.reproduce.draw import Drawn, final_accuracy, panels
from splitcast.reproduce.study import Study

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
    **{f"sfl-gb, sync every {k}": {"scheme": "sfl-gb", "sync_every": k} for k in (1, 20)},
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
    figure, (axis,) = panels(1, height=5.2)
    reached = [row for row in rows if row["MB"]]
    axis.barh([str(row["variant"]) for row in reached], [float(str(row["MB"])) for row in reached], color="#0072B2")
    for k, row in enumerate(reached):
        axis.text(float(str(row["MB"])), k, f" {float(str(row['MB'])):.0f}", va="center", fontsize=9)
    axis.invert_yaxis()
    if reached:
        axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.set_xlabel(f"MB on the air to {100 * target:.1f} %")
    axis.set_title(f"{study.base.data.dataset}, IID, cut 1, seed {study.seeds[0]}: what each part is worth")
    caption = (
        "Not in the paper. One seed. `packed` is int2 smashed data and int8 gradients, what sfl-gb uses. Variants that "
        "do not reach the target in the rounds run are in the CSV only; there too: MB per round of every direction "
        "and kind."
    )
    return Drawn(caption, rows, figure)
