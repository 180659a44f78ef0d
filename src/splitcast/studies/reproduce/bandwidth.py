"""SFL-GB in the cell: a round against its compute-only floor, and seconds to an accuracy for three bandwidths."""

import numpy as np

from splitcast.studies.reproduce.basis import target_of
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, line, panels
from splitcast.studies.reproduce.study import Study, round_seconds
from splitcast.studies.reproduce.verdicts import all_of, larger, spread, verdict
from splitcast.studies.target import to_reach

SCHEMES = ("sfl-gb", "sfl-ga", "psl", "sfl")
MEGAHERTZ = (1, 5, 20)


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    runs = {scheme: study.runs(scheme=scheme, rounds=rounds) for scheme in SCHEMES}
    target = study.target or target_of(runs["sfl"])
    rows: list[Row] = []
    ratio = np.zeros((len(SCHEMES), len(MEGAHERTZ)))
    total = np.full((len(SCHEMES), len(MEGAHERTZ), len(study.seeds)), np.inf)
    for k, scheme in enumerate(SCHEMES):
        for b, mhz in enumerate(MEGAHERTZ):
            times, floors = [], []
            for s, (seed, records) in enumerate(zip(study.seeds, runs[scheme], strict=True)):
                config = study.config(scheme=scheme, seed=seed, bandwidth_hz=mhz * 1e6)
                seconds = round_seconds(config, [1] * rounds)
                times.append(seconds.mean())
                floors.append(round_seconds(config, [1] * rounds, computing_only=True).mean())
                if needed := to_reach(records, target):
                    total[k, b, s] = seconds[: needed.rounds].sum()
            ratio[k, b] = np.mean(times) / np.mean(floors)
            mean = float(total[k, b].mean())
            rows.append(
                {"scheme": scheme, "MHz": mhz, "seconds_per_round": float(np.mean(times))}
                | {"compute_floor_s": float(np.mean(floors)), "over_floor": float(ratio[k, b])}
                | {"target_percent": 100 * target, "seconds_to_target": mean if np.isfinite(mean) else "never"}
            )
    figure, axes = panels(2)
    for axis, table, label in zip(
        axes, (ratio, total.mean(-1)), ("round ÷ compute-only round", f"seconds to {100 * target:.1f} %"), strict=True
    ):
        for k, scheme in enumerate(SCHEMES):
            line(axis, k, MEGAHERTZ, np.where(np.isfinite(table[k]), table[k], np.nan).tolist(), scheme)
        axis.set_xscale("log")
        if np.isfinite(table).any():
            axis.set_yscale("log")
        axis.set_xticks(MEGAHERTZ, [str(mhz) for mhz in MEGAHERTZ])
        axis.set_xlabel("bandwidth (MHz)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.suptitle(f"{study.base.data.dataset}, IID, cut 1, optimal allocation")
    at20 = dict(zip(SCHEMES, ratio[:, -1], strict=True))
    claims = [
        Claim(
            "ours: a round at 20 MHz takes at most 1.1x its compute-only floor",
            ", ".join(f"{scheme} {value:.3f}" for scheme, value in at20.items()),
            verdict(at20["sfl-gb"] < min(at20["sfl"], at20["psl"], at20["sfl-ga"]), at20["sfl-gb"] <= 1.1),
        ),
        Claim(
            f"ours: fewest seconds to {100 * target:.1f} % at 1, 5 and 20 MHz",
            "; ".join(
                f"{mhz} MHz: "
                + ", ".join(f"{scheme} {spread(total[k, b].tolist(), 0)}" for k, scheme in enumerate(SCHEMES))
                for b, mhz in enumerate(MEGAHERTZ)
            ),
            all_of(larger(other[b], total[0, b]) for other in total[1:] for b in range(len(MEGAHERTZ))),
        ),
    ]
    caption = "Not in the paper. The paper's cell; the floor is the same round if nothing took time on the air."
    return Drawn(caption, rows, figure, claims)
