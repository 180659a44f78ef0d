"""What every figure is made of: rows for the CSV file, a drawing, a caption, and claims beside what came out."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from splitcast.run.records import write_atomically
from splitcast.studies.compare_figure import AXES, draw_band, draw_line
from splitcast.studies.curves import band, curves_of, looks
from splitcast.studies.reproduce.study import Runs
from splitcast.studies.reproduce.verdicts import Verdict
from splitcast.studies.target import all_reach, to_reach

Row = Mapping[str, object]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper's section V, and what came of it."""

    paper: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Drawn:
    """A figure that is ready to be saved."""

    caption: str
    """What the paper's figure shows, and what this one does differently"""
    rows: Sequence[Row]
    figure: Figure
    claims: Sequence[Claim] = ()

    def save(self, path: Path) -> None:
        """CSV, PNG and SVG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(key for row in self.rows for key in row)), lineterminator="\n")
        table.writeheader()
        table.writerows({key: _short(value) for key, value in row.items()} for row in self.rows)
        write_atomically(path.with_suffix(".csv"), text.getvalue().encode())
        for kind in ("png", "svg"):
            picture = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else None
            self.figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
            write_atomically(path.with_suffix(f".{kind}"), picture.getvalue())
        plt.close(self.figure)


def panels(count: int, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """So many axes side by side."""
    figure, axes = plt.subplots(1, count, figsize=(6.4 * count if count < 3 else 4.7 * count, height), squeeze=False)
    figure.set_layout_engine("constrained")
    return figure, list(axes[0])


def line(axis: Axes, k: int, x: Sequence[float], y: Sequence[float], label: str, *, every: int = 1) -> None:
    """The k-th line of a panel."""
    draw_line(axis, x, y, looks([label] * (k + 1))[k], label, every=every)


def accuracy(axis: Axes, series: Mapping[str, Runs], against: str) -> None:
    """Test accuracy against rounds, MB or seconds: the mean over seeds, and a band from the worst to the best."""
    for (name, runs), look in zip(series.items(), looks([name.lower() for name in series]), strict=True):
        draw_band(axis, band(runs, against), look, name)
    label_accuracy(axis, against)
    axis.legend(loc="best", fontsize=9)


def label_accuracy(axis: Axes, against: str) -> None:
    """Names of the axes, and a grid, of accuracy against rounds, MB or seconds."""
    axis.set_xlabel(AXES[against])
    axis.set_ylabel("test accuracy (%)")
    axis.grid(alpha=0.3)


def accuracy_rows(series: Mapping[str, Runs], seeds: Sequence[int]) -> list[Row]:
    """Every point of such a panel."""
    rows: list[Row] = []
    for name, runs in series.items():
        for seed, records in zip(seeds, runs, strict=True):
            curves = curves_of(records)
            for k, percent in enumerate(curves["rounds"][1]):
                point = {key: curve[0][k] for key, curve in curves.items()}
                rows.append({"series": name, "seed": seed, **point, "accuracy_percent": percent})
    return rows


def finals(runs: Runs) -> list[float]:
    """Test accuracy of every seed after the last round, in per cent."""
    return [100 * (records[-1].test_accuracy or 0.0) for records in runs]


def final_accuracy(runs: Runs) -> float:
    """Test accuracy after the last round in per cent, mean over seeds."""
    return float(np.mean(finals(runs)))


def reached(series: Iterable[Runs]) -> float:
    """The highest whole per cent that all of these trainings reach, as a fraction."""
    return all_reach(records for runs in series for records in runs)


@dataclass(frozen=True)
class Reach:
    """What it took to get to an accuracy: means over seeds."""

    rounds: float
    megabytes: float
    seconds: float


def to_target(runs: Runs, target: float) -> Reach | None:
    """The first evaluation at or above ``target``; None if some seed never gets there."""
    found = [spent for records in runs if (spent := to_reach(records, target))]
    return Reach(*np.mean([astuple(spent) for spent in found], axis=0).tolist()) if len(found) == len(runs) else None


def costs_to(runs: Runs, target: float, cost: str) -> list[float]:
    """Rounds, megabytes or seconds of every seed to the first test at or above ``target``; infinite without one."""
    return [getattr(found, cost) if (found := to_reach(records, target)) else np.inf for records in runs]


def ranged(name: str, each: Sequence[float]) -> dict[str, object]:
    """Mean, least and most of seeds as columns of a table, empty where there are none.

    >>> ranged("MB", [1, 2, 6]), ranged("MB", [])
    ({'MB': 3.0, 'MB_least': 1, 'MB_most': 6}, {'MB': '', 'MB_least': '', 'MB_most': ''})
    """
    numbers = (float(np.mean(each)), min(each), max(each)) if each else ("", "", "")
    return dict(zip((name, f"{name}_least", f"{name}_most"), numbers, strict=True))


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
