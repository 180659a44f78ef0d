"""Fig. 4: test accuracy against bytes on the air, SFL-GA, SFL and PSL; and our SFL-GB."""

from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy, accuracy_rows, panels, reached, to_target, verdict
from splitcast.studies.reproduce.study import Study

SCHEMES = {"SFL-GA": "sfl-ga", "SFL": "sfl", "PSL": "psl", "SFL-GB (ours)": "sfl-gb"}


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    series = {name: study.runs(scheme=scheme, rounds=rounds) for name, scheme in SCHEMES.items()}
    figure, (axis,) = panels(1)
    accuracy(axis, series, "MB")
    axis.set_xscale("log")
    axis.set_title(f"{study.base.data.dataset}, cut 1: accuracy against traffic")

    common = reached(series.values())
    target = min(study.target or common, common)
    spent = {name: to_target(runs, target) for name, runs in series.items()}
    ga, sfl, psl, gb = (reach.megabytes if reach else float("inf") for reach in spent.values())
    goal = f"to {100 * target:.0f} %"
    claims = [
        Claim(
            "SFL-GA needs less traffic than SFL and PSL for the same accuracy",
            f"{ga:.0f} MB {goal}, SFL {sfl:.0f}, PSL {psl:.0f} (SFL-GB {gb:.1f})",
            verdict(ga < min(sfl, psl)),
        ),
        Claim(
            "below 20 MB for SFL-GA, above 40 MB for SFL, at 94 % (MNIST)",
            f"{ga:.0f} MB and {sfl:.0f} MB {goal}: a ratio of {sfl / ga:.2f} where the paper has above 2",
            verdict(ga < sfl, ga < 20 and sfl > 40),
        ),
        Claim(
            "PSL needs marginally less than SFL",
            f"{psl:.1f} MB and {sfl:.1f} MB {goal}",
            verdict(psl < sfl, psl > 0.9 * sfl),
        ),
    ]
    caption = (
        "The paper draws accuracy against communication overhead in MB: SFL-GA left of SFL and PSL, which nearly "
        "coincide. Here: all bytes of both directions and of all clients, broadcasts once; the axis is logarithmic to "
        "show SFL-GB."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
