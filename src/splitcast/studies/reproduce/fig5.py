"""Fig. 5: test accuracy against simulated latency, SFL-GA, SFL, PSL and FL."""

from splitcast.studies.reproduce.draw import (
    Claim,
    Drawn,
    accuracy,
    accuracy_rows,
    final_accuracy,
    panels,
    reached,
    to_target,
    verdict,
)
from splitcast.studies.reproduce.study import Study

SCHEMES = {"SFL-GA": "sfl-ga", "SFL": "sfl", "PSL": "psl", "FL": "fl"}


def draw(study: Study) -> Drawn:
    series = {name: study.runs(scheme=scheme) for name, scheme in SCHEMES.items()}
    figure, (axis,) = panels(1)
    accuracy(axis, series, "seconds")
    axis.set_xscale("log")
    axis.set_title(f"{study.base.data.dataset}, cut 1: accuracy against latency")

    target = reached(series.values())
    ga, sfl, psl, fl = (reach.seconds if (reach := to_target(r, target)) else float("inf") for r in series.values())
    ends = {name: final_accuracy(runs) for name, runs in series.items()}
    claims = [
        Claim(
            "FL takes longest to converge",
            f"to {100 * target:.0f} %: FL {fl:.0f} s, SFL {sfl:.0f}, PSL {psl:.0f}, SFL-GA {ga:.0f}",
            verdict(fl > max(ga, sfl, psl)),
        ),
        Claim(
            "SFL-GA reaches an accuracy similar to SFL and PSL",
            ", ".join(f"{name} {end:.2f} %" for name, end in ends.items()) + f" after {study.base.train.rounds} rounds",
            verdict(max(ends["SFL"], ends["PSL"]) - ends["SFL-GA"] < 1.5),
        ),
    ]
    caption = (
        "The paper draws accuracy against latency: FL far right, the three split schemes close together on the left. "
        "Here: seconds of the simulated cell with optimal allocation and profiled workloads; the axis is logarithmic."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
