"""One figure of a benchmark, and how figures are measured."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measured figure."""

    name: str
    value: float
    unit: str


def interleaved_medians(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds per call; the functions take turns, so that a disturbance hits all of them alike."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
