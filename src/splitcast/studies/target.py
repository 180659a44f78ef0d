"""What it takes to reach an accuracy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitcast.run.records import RoundRecord


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


def to_reach(records: Sequence[RoundRecord], target: float) -> Spent | None:
    """What it took until the first test at or above ``target``; None if no test is."""
    there = (k for k, r in enumerate(records, 1) if r.test_accuracy is not None and r.test_accuracy >= target)
    first = next(there, None)
    return None if first is None else spent(records[:first])


def all_reach(runs: Iterable[Sequence[RoundRecord]]) -> float:
    """The highest whole per cent that all of these runs reach, as a fraction."""
    best = [max(r.test_accuracy or 0.0 for r in records) for records in runs]
    return int(100 * min(best) + 1e-9) / 100  # 0.29 is a little less than that
