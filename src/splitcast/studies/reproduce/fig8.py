"""Fig. 8: latency of a round against the bandwidth of the cell, for every scheme."""

from itertools import pairwise

import numpy as np

from splitcast.studies.reproduce.draw import Claim, Drawn, line, panels
from splitcast.studies.reproduce.study import Study, round_seconds
from splitcast.studies.reproduce.verdicts import all_of, larger, spread

MEGAHERTZ = (1, 2, 5, 10, 15, 20, 30, 40)
CUTS = (1, 2)
CELLS = range(6)
"""Seeds of cells: nothing is trained here"""
SCHEMES = {"SFL-GA": "sfl-ga", "SFL": "sfl", "PSL": "psl", "FL": "fl", "SFL-GB (ours)": "sfl-gb"}


def draw(study: Study) -> Drawn:
    figure, axes = panels(len(CUTS))
    rows = []
    table = np.zeros((len(CUTS), len(SCHEMES), len(MEGAHERTZ), len(CELLS)))
    for c, (cut, axis) in enumerate(zip(CUTS, axes, strict=True)):
        for k, (name, scheme) in enumerate(SCHEMES.items()):
            for b, mhz in enumerate(MEGAHERTZ):
                per_seed = []
                for seed in CELLS:
                    config = study.config(scheme=scheme, cut=cut, bandwidth_hz=mhz * 1e6, seed=seed)
                    seconds = round_seconds(config, [cut] * study.base.train.rounds)
                    per_seed.append(float(np.median(seconds)))
                    row = {"series": name, "cut": cut, "seed": seed, "MHz": mhz, "median_s": per_seed[-1]}
                    rows.append(row | {"mean_s": seconds.mean(), "p95_s": float(np.quantile(seconds, 0.95))})
                table[c, k, b] = per_seed
            line(axis, k, MEGAHERTZ, table[c, k].mean(-1).tolist(), name)
        axis.set_yscale("log")
        axis.set_xlabel("bandwidth (MHz)")
        axis.set_ylabel("median latency of a round (s)")
        axis.set_title(f"cut {cut}")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=9)
    paper = table[:, :4]
    at20 = paper[0, :, MEGAHERTZ.index(20)]
    listed = ", ".join(f"{name} {spread(value, 2)} s" for name, value in zip(list(SCHEMES)[:4], at20, strict=True))
    ga, sfl, psl, fl = (paper[:, k] for k in range(4))
    falls = all_of(larger(a, b) for scheme in paper.reshape(-1, *paper.shape[2:]) for a, b in pairwise(scheme))
    beaten = [(other[c, b], ga[c, b]) for other in (sfl, psl, fl) for c, b in np.ndindex(ga.shape[:2])]
    dearer = all_of(larger(sfl[at], psl[at], size=bool((sfl < 1.1 * psl).all())) for at in np.ndindex(sfl.shape[:2]))
    claims = [
        Claim("latency falls as bandwidth grows, for all schemes", f"at 20 MHz, cut 1: {listed}", falls),
        Claim(
            "SFL-GA has the lowest latency of the four",
            f"at 20 MHz, cut 1: {listed}",
            all_of(larger(other, ours) for other, ours in beaten),
        ),
        Claim(
            "SFL-GA's latency is significantly lower than that of SFL and PSL",
            f"SFL / SFL-GA = {(sfl / ga).min():.2f} to {(sfl / ga).max():.2f}, "
            f"PSL / SFL-GA = {(psl / ga).min():.2f} to {(psl / ga).max():.2f}; significant is a tenth less",
            all_of(larger(0.9 * other[at], ga[at]) for other in (sfl, psl) for at in np.ndindex(ga.shape[:2])),
        ),
        Claim(
            "SFL is slightly above PSL",
            f"SFL / PSL = {(sfl / psl).min():.4f} to {(sfl / psl).max():.3f}",
            dearer,
        ),
    ]
    caption = (
        "The paper draws latency against bandwidth on MNIST: all fall, SFL-GA is lowest, SFL slightly above PSL. Here: "
        "the median over the rounds of a training (the mean, carried by a few deep fades, is in the CSV), optimal "
        "allocation, six cells, cuts 1 and 2."
    )
    return Drawn(caption, rows, figure, claims)
