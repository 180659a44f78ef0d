"""Figures of runs: readable in print and by the colour-blind (Okabe-Ito colours, markers and line styles differ)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from splitcast.run.records import RoundRecord

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))

Curve = tuple[list[float], list[float]]


def accuracy_curves(records: Sequence[RoundRecord]) -> dict[str, Curve]:
    """Test accuracy in % against rounds, cumulative MB (10^6 bytes) and simulated seconds."""
    costs = {
        "rounds": [float(r.round) for r in records],
        "MB": list(accumulate(r.bytes / 1e6 for r in records)),
        "seconds": list(accumulate(r.latency_s for r in records)),
    }
    tested = [k for k, r in enumerate(records) if r.test_accuracy is not None]
    accuracy = [100 * (records[k].test_accuracy or 0.0) for k in tested]
    return {name: ([cost[k] for k in tested], accuracy) for name, cost in costs.items()}


def plot_comparison(runs: Mapping[str, Sequence[RoundRecord]], path: Path, title: str) -> None:
    """Accuracy against rounds, MB and simulated seconds, side by side, one line per run; PNG and SVG."""
    curves = {name: accuracy_curves(records) for name, records in runs.items()}
    labels = {
        "rounds": "communication rounds",
        "MB": "data on the air (MB, both directions)",
        "seconds": "simulated time (s)",
    }
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        _lines(axis, {name: curve[key] for name, curve in curves.items()}, label)
        reach = [max(curve[key][0]) for curve in curves.values()]
        if max(reach) > 8 * min(reach):
            axis.set_xscale("log")
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].legend(loc="lower right")
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
