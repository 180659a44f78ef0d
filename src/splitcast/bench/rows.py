"""One figure of a benchmark, and how figures are measured."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Told = Callable[[str, int, int], None]
"""What is measured, how many steps of it are done, and of how many."""
_heard: ContextVar[Told] = ContextVar("heard", default=lambda what, done, total: None)


@dataclass(frozen=True)
class Row:
    """A measured figure."""

    name: str
    value: float
    unit: str


@contextmanager
def heard_by(told: Told) -> Iterator[None]:
    """Within, someone is told how far measurements are."""
    token = _heard.set(told)
    try:
        yield
    finally:
        _heard.reset(token)


def tell(what: str, done: int, total: int) -> None:
    """Say how far a measurement is."""
    _heard.get()(what, done, total)


def interleaved_medians(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    what: str = "measuring",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds per call; the functions take turns, so that a disturbance hits all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    total = (repeats + 1) * len(functions)
    for turn in range(repeats + 1):  # the first warms up
        for k, (name, function) in enumerate(functions.items()):
            tell(what, turn * len(functions) + k, total)
            start = clock()
            function()
            if turn:
                times[name].append(clock() - start)
    tell(what, total, total)
    return {name: statistics.median(values) for name, values in times.items()}
