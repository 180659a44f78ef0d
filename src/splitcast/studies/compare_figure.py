"""The figure of a comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator

from splitcast.studies.curves import COLOURS, DASHES, MARKERS, Band, Look, Runs, band, looks
from splitcast.training.measure import ACCURACY, Measure

AXES = {
    "rounds": "communication rounds",
    "MB": "data on the air (MB, both directions)",
    "seconds": "simulated time (s)",
}


def plot_comparison(
    runs: Mapping[str, Runs], path: Path, title: str, judged: Measure = ACCURACY, schemes: Sequence[str] = ()
) -> None:
    """What runs are judged by against rounds, MB and simulated seconds, side by side, one line per scheme; PNG and SVG.

    Of several seeds the line is the mean, and the band goes from the lowest to the highest.
    """
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, AXES.items(), strict=True):
        bands = {name: band(each, key, judged) for name, each in runs.items()}
        for (name, drawn), look in zip(bands.items(), looks(schemes or list(runs)), strict=True):
            n = len(runs[name])
            draw_band(axis, drawn, look, f"{name}, mean of {n}" if n > 1 else name)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        reach = [max(drawn.x, default=1.0) for drawn in bands.values()]
        if max(reach) > 8 * min(reach):
            log_scale(axis)
    axes[0].set_ylabel(f"test {judged.label}")
    axes[0].legend(loc="upper right" if judged.lower else "lower right")
    figure.suptitle(title)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def log_scale(axis: Axes) -> None:
    """A logarithmic x-axis with plain numbers: 1, 2, 5, 10 up to three decades, powers of ten beyond."""

    def near(x: float, _: object) -> str:
        low, high = axis.get_xlim()
        return f"{x:g}" if high < 1000 * low else ""

    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.10g}"))
    axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.xaxis.set_minor_formatter(FuncFormatter(near))


def draw_band(axis: Axes, drawn: Band, look: Look, label: str) -> None:
    """A line with markers, and the band around it."""
    draw_line(axis, drawn.x, drawn.mean, look, label, every=max(1, len(drawn.x) // 8))
    if drawn.low != drawn.high:
        axis.fill_between(drawn.x, drawn.low, drawn.high, color=COLOURS[look.colour], alpha=0.15, linewidth=0)


def draw_line(axis: Axes, x: Sequence[float], y: Sequence[float], look: Look, label: str, *, every: int = 1) -> None:
    """A line that is told apart by colour, dashes and marker."""
    axis.plot(
        x,
        y,
        label=label,
        color=COLOURS[look.colour],
        linestyle=DASHES[look.mark],
        marker=MARKERS[look.mark],
        markevery=every,
        markersize=5,
        linewidth=1.6,
    )
