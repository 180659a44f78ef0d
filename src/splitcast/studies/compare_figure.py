"""Figures of runs: readable in print and by the colour-blind (Okabe-Ito colours, markers and line styles differ)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from splitcast.run.records import RoundRecord
from splitcast.training.measure import ACCURACY, Measure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))

Curve = tuple[list[float], list[float]]


def curves_of(records: Sequence[RoundRecord], judged: Measure = ACCURACY) -> dict[str, Curve]:
    """What tests found, accuracy in %, against rounds, cumulative MB (10^6 bytes) and simulated seconds."""
    costs = {
        "rounds": [float(r.round) for r in records],
        "MB": list(accumulate(r.bytes / 1e6 for r in records)),
        "seconds": list(accumulate(r.latency_s for r in records)),
    }
    tested = {k: value for k, r in enumerate(records) if (value := r.test(judged.name)) is not None}
    values = [judged.scale * value for value in tested.values()]
    return {name: ([cost[k] for k in tested], values) for name, cost in costs.items()}


def plot_comparison(
    runs: Mapping[str, Sequence[RoundRecord]], path: Path, title: str, judged: Measure = ACCURACY
) -> None:
    """What runs are judged by against rounds, MB and simulated seconds, side by side, one line per run; PNG and SVG."""
    curves = {name: curves_of(records, judged) for name, records in runs.items()}
    labels = {
        "rounds": "communication rounds",
        "MB": "data on the air (MB, both directions)",
        "seconds": "simulated time (s)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        _lines(axis, {name: curve[key] for name, curve in curves.items()}, label)
        reach = [max(curve[key][0], default=1.0) for curve in curves.values()]
        if max(reach) > 8 * min(reach):
            axis.set_xscale("log")
    axes[0].set_ylabel(f"test {judged.label}")
    axes[0].legend(loc="upper right" if judged.lower else "lower right")
    figure.suptitle(title)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def _lines(axes: Axes, curves: Mapping[str, Curve], xlabel: str) -> None:
    for k, (name, (x, y)) in enumerate(curves.items()):
        axes.plot(
            x,
            y,
            label=name,
            color=COLOURS[k % len(COLOURS)],
            linestyle=DASHES[k % len(DASHES)],
            marker=MARKERS[k % len(MARKERS)],
            markevery=max(1, len(x) // 8),
            markersize=5,
            linewidth=1.6,
        )
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3)
