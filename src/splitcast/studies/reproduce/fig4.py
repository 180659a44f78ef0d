"""Fig. 4: test accuracy against bytes on the air, SFL-GA, SFL and PSL; and our SFL-GB."""

import numpy as np

from splitcast.studies.compare_figure import log_scale
from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy, accuracy_rows, costs_to, panels, reached
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import all_of, larger, larger_by, spread

SIGNIFICANT = 0.9
"""Less than this share is significantly less, more than it marginally."""
SCHEMES = {"SFL-GA": "sfl-ga", "SFL": "sfl", "PSL": "psl", "SFL-GB (ours)": "sfl-gb"}


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds if study.target else study.base.train.rounds  # without a goal, all reach some accuracy
    series = {name: study.runs(scheme=scheme, rounds=rounds) for name, scheme in SCHEMES.items()}
    figure, (axis,) = panels(1)
    accuracy(axis, series, "MB")
    log_scale(axis)
    axis.set_title(f"{study.name}, cut 1: accuracy against traffic")

    common = reached(series.values())
    target = min(study.target or common, common)
    ga, sfl, psl, gb = (costs_to(runs, target, "megabytes") for runs in series.values())
    ratio = [a / b for a, b in zip(sfl, ga, strict=True)]
    goal = f"to {100 * target:.0f} %"
    claims = [
        Claim(
            "SFL-GA needs significantly less traffic than SFL and PSL for comparable accuracy",
            f"{spread(ga, 0)} MB {goal}, SFL {spread(sfl, 0)}, PSL {spread(psl, 0)} (SFL-GB {spread(gb)}); "
            "significant is a tenth less",
            all_of(larger_by(other, ga, SIGNIFICANT) for other in (sfl, psl)),
        ),
        Claim(
            "PSL needs marginally less than SFL",
            f"{spread(psl)} MB and {spread(sfl)} MB {goal}",
            larger(sfl, psl, size=larger(psl, SIGNIFICANT * np.array(sfl)) == "holds"),
        ),
    ]
    if study.of_digits:
        claims.append(
            Claim(
                "below 20 MB for SFL-GA, above 40 MB for SFL, at 94 % (MNIST)",
                f"{spread(ga, 0)} and {spread(sfl, 0)} MB {goal}: a ratio of {spread(ratio, 2)}, above 2 in the paper",
                larger(sfl, ga, size=max(ga) < 20 and min(sfl) > 40),
            )
        )
    caption = (
        "The paper draws accuracy against communication overhead in MB: SFL-GA left of SFL and PSL, which nearly "
        "coincide. Here: all bytes of both directions and of all clients, broadcasts once; the axis is logarithmic to "
        "show SFL-GB."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
