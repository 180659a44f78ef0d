"""Where a moving cut pays, in training: persistent blockage; and where it does not: fading that is new in every round.

SFL that averages in every round learns the same at every cut, to rounding, so that one training serves all fixed cuts
with other bytes and seconds; a policy is trained in each world. It sees the channel of the round and whether it is
blocked, and knows how long blockages last in the mean. Moves are charged.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from splitcast.studies.compare_figure import log_scale
from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy, accuracy_rows, costs_to, panels, reached
from splitcast.studies.reproduce.study import Runs, Study, priced
from splitcast.studies.reproduce.verdicts import larger, spread

CELL: dict[str, Any] = {
    "scheme": "sfl",
    "arch": "cnn-small",
    "lr": 0.01,  # slowly: blockages come every ten rounds, and few of them tell little
    "local_steps": 4,
    "client_flops_per_s": 2e7,  # of a microcontroller: deep cuts are dear to compute, as shallow ones are to send
    "gamma_weight": 0.0,
    "eval_every": 4,
}
BLOCKED: dict[str, Any] = {"fading": "none", "blockage": "common", "blockage_db": 35.0, "clear_rounds": 8.0}
WORLDS: dict[str, dict[str, Any]] = {
    "all clients blocked at times": BLOCKED | {"blocked_rounds": 2.0},
    "fading alone": {},
}
CUTS = (1, 2, 3, 4)
POLICIES = ("lookahead", "myopic")
SOONER = 1.5


def draw(study: Study) -> Drawn:
    figure, axes = panels(len(WORLDS))
    rows, claims = [], []
    for axis, (name, world) in zip(axes, WORLDS.items(), strict=True):
        values = CELL | world | {"rounds": study.long_rounds}
        series: dict[str, Runs] = {f"fixed cut {cut}": _fixed(study, values, cut) for cut in CUTS}
        series |= {policy: study.runs(**values, policy=policy) for policy in POLICIES}
        accuracy(axis, series, "seconds")
        log_scale(axis)
        axis.set_title(f"{study.base.data.dataset}, SFL: {name}")
        rows += [{"world": name, **row} for row in accuracy_rows(series, study.seeds)]
        target = reached(series.values())
        seconds = {label: costs_to(runs, target, "seconds") for label, runs in series.items()}
        best = min((label for label in seconds if label.startswith("fixed")), key=lambda label: np.mean(seconds[label]))
        sooner = [fixed / moving for fixed, moving in zip(seconds[best], seconds["lookahead"], strict=True)]
        listed = ", ".join(f"{label} {spread(found, 0)} s" for label, found in seconds.items())
        said = f"to {100 * target:.0f} %: {listed}; {spread(sooner, 2)} times as fast as {best}"
        if world:
            wanted = (
                f"ours, {name}: lookahead reaches an accuracy {SOONER} times as fast as the best fixed cut, or more"
            )
            claims.append(Claim(wanted, said, larger(sooner, [SOONER] * len(sooner))))
        else:
            wanted = f"ours, {name}: lookahead reaches an accuracy sooner than the best fixed cut"
            claims.append(Claim(wanted, said, larger(sooner, [1.0] * len(sooner))))
    caption = (
        "Not in the paper. A small CNN, clients of 20 MFLOP/s, four local steps. Left: all clients lose 35 dB for 2 "
        "rounds on average, after 8 without. Right: the paper's Rayleigh fading. Policies see the channel of a round, "
        "not of the next; moves of the cut cost their bytes and seconds."
    )
    return Drawn(caption, rows, figure, claims)


def _fixed(study: Study, values: dict[str, Any], cut: int) -> Runs:
    """Trainings at a fixed cut: those at the first, with the bytes and seconds of this one."""
    found = []
    for seed in study.seeds:
        records = study.run(**CELL, rounds=values["rounds"], seed=seed)
        found.append(priced([replace(r, cut=cut) for r in records], study.config(**values, cut=cut, seed=seed)))
    return found
