"""What a run is judged by: a measure with its name, its unit and the direction in which it is better."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from splitcast.base.errors import SplitcastError

Sums = Mapping[str, float | Tensor]
"""What a test adds up over batches and clients."""


@dataclass(frozen=True)
class Measure:
    """A measure of a tested model.

    >>> accuracy, perplexity = measure("accuracy"), measure("perplexity")
    >>> accuracy.text(0.9417), perplexity.text(2.9134)
    ('94.17 %', '2.913')
    >>> accuracy.goal(0.94), perplexity.goal(2.9)
    ('94 %', '2.9 perplexity')
    >>> accuracy.best([0.5, 0.9]), perplexity.best([3.0, 2.5])
    (0.9, 2.5)
    >>> accuracy.reached(0.95, 0.94), perplexity.reached(3.0, 2.9)
    (True, False)
    """

    name: str
    unit: str = ""
    """"%" for shares, which are shown times 100"""
    lower: bool = False
    """whether less is better"""

    @property
    def scale(self) -> float:
        """What values are shown times."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def label(self) -> str:
        """Name and unit, for a table or an axis."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float) -> str:
        """A value with its unit."""
        if self.unit == "%":
            return f"{100 * value:.2f} %"
        return f"{value:.4g} {self.unit}".rstrip()

    def goal(self, target: float) -> str:
        """A target, as in "to 94 %" and "to 2.9 perplexity"."""
        return f"{100 * target:g} %" if self.unit == "%" else f"{target:g} {self.unit or self.name}"

    def best(self, values: Iterable[float]) -> float | None:
        """The best of several; None of none."""
        return min(values, default=None) if self.lower else max(values, default=None)

    def check(self, field: str, target: float) -> None:
        """Refuse, by the name of its field, a target that the measure can never be."""
        if self.unit == "%" and not 0 < target <= 1:
            raise SplitcastError(f"{field}: {target:g}; give an {self.name} between 0 and 1, such as 0.9")
        if not math.isfinite(target):
            raise SplitcastError(f"{field}: {target:g}; give a finite {self.name}")

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target."""
        return value <= target if self.lower else value >= target


ACCURACY = Measure("accuracy", "%")
_SHARES = ("accuracy", "f1", "f1_macro", "label_accuracy", "mean_iou")
_ERRORS = ("loss", "mae", "mse", "rmse", "perplexity")


def measure(name: str) -> Measure:
    """The measure of a name; one that is not known has no unit, and more of it is better."""
    return Measure(name, "%" if name in _SHARES else "", lower=name in _ERRORS)


def ratio(part: float | Tensor, whole: float | Tensor) -> float:
    """0 of nothing."""
    return float(part) / float(whole) if float(whole) else 0.0


def mean_ratio(parts: Tensor, wholes: Tensor) -> float:
    """The mean of those ratios that there are."""
    there = wholes > 0
    return float((parts[there] / wholes[there]).mean()) if bool(there.any()) else 0.0
