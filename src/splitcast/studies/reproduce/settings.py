"""What the paper leaves unsaid (learning rate, batch, local steps): which values come nearest to its Fig. 3?"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from splitcast.base.errors import SplitcastError
from splitcast.studies.curves import COLOURS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import larger, spread
from splitcast.studies.results import estimate

Setting = tuple[float, int, int]
"""Learning rate, batch, local steps."""
Accuracies = Mapping[int, list[float]]
"""By cut, per cent after all rounds, one per seed."""

QUICK: tuple[Setting, ...] = ((0.01, 16, 1), (0.03, 16, 1), (0.05, 16, 1))
FULL: tuple[Setting, ...] = (
    (0.01, 32, 1),
    (0.02, 32, 1),
    (0.03, 32, 1),
    (0.05, 32, 1),
    (0.03, 16, 1),
    (0.05, 16, 1),
    (0.01, 32, 2),
    (0.02, 32, 2),
)
PAPER = {1: 95.0, 4: 82.0}
"""Cut: test accuracy on MNIST after 100 rounds"""


def draw(study: Study) -> Drawn:
    first, others = study.seeds[:1], study.seeds[1:]
    found = {setting: _trained(study, setting, first) for setting in (FULL if study.full else QUICK)}
    best = min(found, key=lambda setting: points_off(found[setting]))
    further = _trained(study, best, others)
    found[best] = {cut: ends + further[cut] for cut, ends in found[best].items()}
    rows: list[Row] = [
        dict(zip(("lr", "batch", "local_steps"), setting, strict=True))
        | {"seed": seed}
        | {f"accuracy_cut{cut}": every[k] for cut, every in ends.items()}
        for setting, ends in found.items()
        for k, seed in enumerate(study.seeds[: len(ends[1])])
    ]
    caption = (
        "Not in the paper: it states neither learning rate, batch nor local steps. All settings with the first seed, "
        "the nearest with all: mean and range."
    )
    return Drawn(caption, rows, _figure(study, found), [judged(best, found[best])])


def points_off(ends: Accuracies) -> float:
    """How far the means over seeds are from the paper's figures, in points, summed over the cuts.

    >>> points_off({1: [94.0, 95.0], 4: [82.0, 84.0]})
    1.5
    """
    return sum(abs(statistics.fmean(ends[cut]) - there) for cut, there in PAPER.items())


def judged(best: Setting, ends: Accuracies) -> Claim:
    """The setting nearest to the paper: its order of the cuts, and whether its figures are within the intervals."""
    lr, batch, steps = best
    within = []
    for cut, there in PAPER.items():
        mean, half, _ = estimate(ends[cut])
        within.append(abs(mean - there) <= half)
    return Claim(
        "95 % at v=1 and 82 % at v=4 under some unstated settings",
        f"nearest: lr {lr:g}, batch {batch}, τ = {steps}, with "
        + " and ".join(f"{spread(ends[cut])} %" for cut in PAPER),
        larger(ends[1], ends[4], size=all(within)),
    )


def _trained(study: Study, setting: Setting, seeds: Sequence[int]) -> Accuracies:
    lr, batch, steps = setting
    values = {"scheme": "sfl-ga", "lr": lr, "batch": batch, "local_steps": steps, "eval_every": 100}
    return {cut: [_end(study, cut=cut, seed=seed, **values) for seed in seeds] for cut in PAPER}


def _end(study: Study, **values: Any) -> float:
    """Accuracy after the last round in per cent, 0 where the loss is no longer a number."""
    try:
        return 100 * (study.run(**values)[-1].test_accuracy or 0.0)
    except SplitcastError:
        return 0.0


def _figure(study: Study, found: Mapping[Setting, Accuracies]) -> Figure:
    figure, (axis,) = panels(1)
    for k, (cut, there) in enumerate(PAPER.items()):
        means = [statistics.fmean(ends[cut]) for ends in found.values()]
        below = [mean - min(ends[cut]) for mean, ends in zip(means, found.values(), strict=True)]
        above = [max(ends[cut]) - mean for mean, ends in zip(means, found.values(), strict=True)]
        at = [i + 0.4 * k for i in range(len(found))]
        axis.barh(at, means, 0.38, xerr=(below, above), capsize=2, color=COLOURS[k], label=f"v={cut}")
        axis.axvline(there, color=COLOURS[k], linestyle="--", label=f"paper, v={cut}: {there:.0f} %")
    axis.set_yticks([i + 0.2 for i in range(len(found))], [f"lr {lr:g}, b {b}, τ {tau}" for lr, b, tau in found])
    axis.invert_yaxis()
    axis.set_xlabel(f"test accuracy after {study.base.train.rounds} rounds (%)")
    axis.set_title(f"{study.base.data.dataset}, SFL-GA: unstated settings")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure
