"""Fig. 5: test accuracy against simulated latency, SFL-GA, SFL, PSL and FL."""

from splitcast.studies.compare_figure import log_scale
from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy, accuracy_rows, costs_to, finals, panels, reached
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread

SCHEMES = {"SFL-GA": "sfl-ga", "SFL": "sfl", "PSL": "psl"}


def draw(study: Study) -> Drawn:
    series = {name: study.runs(scheme=scheme) for name, scheme in SCHEMES.items()} | {"FL": study.averaged()}
    figure, (axis,) = panels(1)
    accuracy(axis, series, "seconds")
    log_scale(axis)
    axis.set_title(f"{study.name}, cut 1: accuracy against latency")

    target = reached(series.values())
    ga, sfl, psl, fl = (costs_to(runs, target, "seconds") for runs in series.values())
    ends = {name: finals(runs) for name, runs in series.items()}
    behind = [max(a, b) - c for a, b, c in zip(ends["SFL"], ends["PSL"], ends["SFL-GA"], strict=True)]
    claims = [
        Claim(
            "FL takes longest to converge",
            f"to {100 * target:.0f} %: FL {spread(fl, 0)} s, SFL {spread(sfl, 0)}, PSL {spread(psl, 0)}, "
            f"SFL-GA {spread(ga, 0)}",
            all_of(larger(fl, other) for other in (ga, sfl, psl)),
        ),
        Claim(
            "SFL-GA takes the least time to converge",
            f"to {100 * target:.0f} %: SFL-GA {spread(ga, 0)} s, SFL {spread(sfl, 0)}, PSL {spread(psl, 0)}",
            all_of(larger(other, ga) for other in (sfl, psl, fl)),
        ),
        Claim(
            "SFL-GA reaches an accuracy similar to SFL and PSL",
            ", ".join(f"{name} {spread(end, 2)} %" for name, end in ends.items())
            + f" after {study.base.train.rounds} rounds; similar is within 1.5 points",
            larger([1.5] * len(behind), behind),
        ),
    ]
    caption = (
        "The paper draws accuracy against latency: FL far right, the three split schemes close together on the left. "
        "Here: seconds of the simulated cell with optimal allocation and profiled workloads; the axis is logarithmic. "
        "FL learns what SFL learns, to rounding: the same trainings, with FL's seconds."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
