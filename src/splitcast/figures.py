"""Figures of runs: readable in print and by the colour-blind (Okabe-Ito colours, markers and line styles differ)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from splitcast.records import RoundRecord

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))

Curve = tuple[list[float], list[float]]


def accuracy_curves(records: Sequence[RoundRecord]) -> dict[str, Curve]:
    """Test accuracy in % against rounds and against cumulative MB (10^6 bytes)."""
    megabytes = list(accumulate((r.up_bytes + r.down_bytes) / 1e6 for r in records))
    tested = [(r, mb) for r, mb in zip(records, megabytes, strict=True) if r.test_accuracy is not None]
    accuracy = [100 * (r.test_accuracy or 0.0) for r, _ in tested]
    return {
        "rounds": ([float(r.round) for r, _ in tested], accuracy),
        "MB": ([mb for _, mb in tested], accuracy),
    }


def plot_comparison(runs: Mapping[str, Sequence[RoundRecord]], path: Path, title: str) -> None:
    """Accuracy against rounds and against MB, side by side, one line per run; PNG and SVG."""
    curves = {name: accuracy_curves(records) for name, records in runs.items()}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    _lines(axes[0], {name: curve["rounds"] for name, curve in curves.items()}, "communication rounds")
    _lines(
        axes[1],
        {name: curve["MB"] for name, curve in curves.items()},
        "data on the air (MB, both directions)",
    )
    spread = [max(curve["MB"][0]) for curve in curves.values()]
    if max(spread) > 8 * min(spread):
        axes[1].set_xscale("log")
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
