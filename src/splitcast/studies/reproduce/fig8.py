"""Fig. 8: latency of a round against the bandwidth of the cell, for every scheme."""

import numpy as np

from splitcast.studies.reproduce.draw import Claim, Drawn, line, panels, verdict
from splitcast.studies.reproduce.study import Study, round_seconds

MEGAHERTZ = (1, 2, 5, 10, 15, 20, 30, 40)
CUTS = (1, 2)
SCHEMES = {"SFL-GA": "sfl-ga", "SFL": "sfl", "PSL": "psl", "FL": "fl", "SFL-GB (ours)": "sfl-gb"}


def draw(study: Study) -> Drawn:
    figure, axes = panels(len(CUTS))
    rows = []
    table = np.zeros((len(CUTS), len(SCHEMES), len(MEGAHERTZ)))
    for c, (cut, axis) in enumerate(zip(CUTS, axes, strict=True)):
        for k, (name, scheme) in enumerate(SCHEMES.items()):
            for b, mhz in enumerate(MEGAHERTZ):
                per_seed = []
                for seed in study.seeds:
                    config = study.config(scheme=scheme, cut=cut, bandwidth_hz=mhz * 1e6, seed=seed)
                    per_seed.append(float(round_seconds(config, [cut] * study.base.train.rounds).mean()))
                    rows.append({"series": name, "cut": cut, "seed": seed, "MHz": mhz, "seconds": per_seed[-1]})
                table[c, k, b] = np.mean(per_seed)
            line(axis, k, MEGAHERTZ, table[c, k].tolist(), name)
        axis.set_yscale("log")
        axis.set_xlabel("bandwidth (MHz)")
        axis.set_ylabel("mean latency of a round (s)")
        axis.set_title(f"cut {cut}")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=9)
    paper = table[:, :4]
    at20 = paper[0, :, MEGAHERTZ.index(20)]
    listed = ", ".join(f"{name} {value:.2f} s" for name, value in zip(list(SCHEMES)[:4], at20, strict=True))
    ga, sfl, psl, fl = (paper[:, k] for k in range(4))
    claims = [
        Claim("latency falls as bandwidth grows, for all schemes", listed, verdict(bool((np.diff(paper) < 0).all()))),
        Claim(
            "SFL-GA has the lowest latency of the four",
            f"at 20 MHz, cut 1: {listed}",
            verdict(bool((ga <= np.minimum(np.minimum(sfl, psl), fl)).all())),
        ),
        Claim(
            "SFL is slightly above PSL",
            f"SFL / PSL = {(sfl / psl).min():.4f} to {(sfl / psl).max():.3f}",
            verdict(bool((sfl > psl).all()), bool((sfl < 1.1 * psl).all())),
        ),
    ]
    caption = (
        "The paper draws latency against bandwidth on MNIST: all fall, SFL-GA is lowest, SFL slightly above PSL. Here: "
        "the mean over the rounds of a training, optimal allocation, cuts 1 and 2."
    )
    return Drawn(caption, rows, figure, claims)
