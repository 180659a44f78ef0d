"""The time line of a round, client by client."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from splitcast.cost.latency import PARTS, RoundTime
from splitcast.studies.curves import COLOURS

LABELS = {
    "compute": "client, before sending",
    "uplink": "uplink",
    "server": "server",
    "downlink": "downlink",
    "backward": "client, after receiving",
}
PART_COLOURS = {part: COLOURS[k] for part, k in zip(PARTS, (0, 4, 2, 3, 5), strict=True)}
HATCHES = {"uplink": "////", "downlink": "\\\\\\\\"}
MOST_CLIENTS = 20
HEIGHT = 0.72


def plot_gantt(panels: Mapping[str, RoundTime], names: Sequence[str], path: Path, title: str) -> None:
    """One panel per way of sharing, on the same time axis; ``names[n]`` labels client n. PNG and SVG.

    A black frame marks the client that holds up its stage. Of more than 20 clients, those are shown whose time
    weighs most.
    """
    shown = _shown(next(iter(panels.values())), len(names))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(6.2 * len(panels), 2.1 + 0.3 * len(shown)),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    end = max(float(timed.seconds) for timed in panels.values())
    for axis, (name, timed) in zip(axes[0], panels.items(), strict=True):
        _timeline(axis, timed, shown, end)
        axis.set_title(f"{name}: {float(timed.seconds):.3g} s", pad=22)
        axis.set_xlabel("time in the round (s)")
    axes[0, 0].set_yticks(range(len(shown)), [names[n] for n in shown])
    axes[0, 0].set_ylim(len(shown) - 0.4, -0.6)
    used = [p for p in PARTS if any((stage.part(p) > 0).any() for t in panels.values() for stage in t.stages)]
    handles = [Patch(facecolor=PART_COLOURS[p], hatch=HATCHES.get(p), edgecolor="white", label=LABELS[p]) for p in used]
    if any(len(stage.stage.clients) > 1 for timed in panels.values() for stage in timed.stages):
        handles.append(Patch(facecolor="none", edgecolor="black", linewidth=1.6, label="holds up the stage"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def _shown(timed: RoundTime, clients: int) -> list[int]:
    weight = np.zeros(clients)
    for stage in timed.stages:
        weight[list(stage.stage.clients)] += stage.weight * stage.seconds
    return sorted(np.argsort(-weight, kind="stable")[:MOST_CLIENTS].tolist())


def _timeline(axis: Axes, timed: RoundTime, shown: Sequence[int], end: float) -> None:
    rows = {client: row for row, client in enumerate(shown)}
    start, ends = 0.0, list[float]()
    for stage in timed.stages:
        seconds = float(stage.seconds)
        for at, client in enumerate(stage.stage.clients):
            if client in rows:
                _bars(axis, rows[client], start, [float(stage.part(part)[at]) for part in PARTS], end)
        slowest = stage.stage.clients[int(stage.slowest)]
        if slowest in rows and len(stage.stage.clients) > 1:
            corner = (start, rows[slowest] - HEIGHT / 2)
            axis.add_patch(Rectangle(corner, seconds, HEIGHT, fill=False, edgecolor="black", linewidth=1.6, zorder=3))
        start += seconds
        if seconds > 0.02 * end:
            ends.append(start)
            axis.axvline(start, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    for place in _spaced(ends, 0.1 * end):
        axis.annotate(
            f"{place:.3g} s", (place, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom", size=8
        )
    axis.set_xlim(0, 1.04 * end)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _spaced(places: Sequence[float], gap: float) -> list[float]:
    """As many places as fit with a gap between them, the last one first of all."""
    kept: list[float] = []
    for place in reversed(places):
        if not kept or kept[-1] - place > gap:
            kept.append(place)
    return kept


def _bars(axis: Axes, row: int, start: float, parts: Sequence[float], end: float) -> None:
    for part, seconds in zip(PARTS, parts, strict=True):
        if seconds <= 0:
            continue
        axis.barh(
            row,
            seconds,
            left=start,
            height=HEIGHT,
            color=PART_COLOURS[part],
            hatch=HATCHES.get(part),
            edgecolor="white",
            linewidth=0.4,
        )
        if seconds > 0.075 * end:
            axis.text(
                start + seconds / 2,
                row,
                f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}",
                ha="center",
                va="center",
                size=7.5,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            )
        start += seconds
