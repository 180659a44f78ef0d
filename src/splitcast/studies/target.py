"""What it takes to reach a value of the measure that runs are judged by."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitcast.run.records import RoundRecord
from splitcast.training.measure import ACCURACY, Measure


@dataclass(frozen=True)
class Spent:
    """What rounds took."""

    rounds: int
    megabytes: float
    """bytes on the air / 10^6"""
    seconds: float
    """simulated"""


def spent(records: Sequence[RoundRecord]) -> Spent:
    """What all these rounds took."""
    return Spent(records[-1].round, sum(r.bytes / 1e6 for r in records), sum(r.latency_s for r in records))


def to_reach(records: Sequence[RoundRecord], target: float, judged: Measure = ACCURACY) -> Spent | None:
    """What it took until the first test as good as ``target``; None if no test is."""
    values = ((k, r.test(judged.name)) for k, r in enumerate(records, 1))
    first = next((k for k, value in values if value is not None and judged.reached(value, target)), None)
    return None if first is None else spent(records[:first])


def all_reach(runs: Iterable[Sequence[RoundRecord]], judged: Measure = ACCURACY) -> float:
    """The best round number that all of these runs reach: a whole per cent, as a fraction, or one of two digits.

    Of accuracies it is 0 where a run has no test; of errors, infinity.
    """
    never = math.inf if judged.lower else 0.0
    bests = [judged.best(_tested(records, judged.name)) for records in runs]
    known = [never if best is None else best for best in bests]
    return _rounded(max(known) if judged.lower else min(known), judged)


def _tested(records: Sequence[RoundRecord], name: str) -> list[float]:
    return [value for r in records if (value := r.test(name)) is not None]


def _rounded(value: float, judged: Measure) -> float:
    """To the worse side.

    >>> _rounded(0.299999999999, ACCURACY), _rounded(2.8341, Measure("mae", lower=True)), _rounded(128.0, Measure("s"))
    (0.3, 2.9, 120.0)
    """
    if not value or not math.isfinite(value):
        return value
    digits = 2 if judged.unit == "%" else 1 - math.floor(math.log10(abs(value)))
    steps = value * 10.0**digits
    whole = math.ceil(steps - 1e-9) if judged.lower else math.floor(steps + 1e-9)
    return float(f"{whole / 10.0**digits:.12g}")
