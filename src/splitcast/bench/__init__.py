"""Benchmarks: rows of {name, value, unit} whose names stay stable."""

from collections.abc import Callable
from importlib import import_module

from splitcast.bench.rows import Row

__all__ = ["BENCHES", "Row"]


def _bench(module: str, function: str) -> Callable[[int], list[Row]]:
    """A benchmark whose module is imported when it runs."""

    def run(repeats: int) -> list[Row]:
        rows: list[Row] = getattr(import_module(f"splitcast.bench.{module}"), function)(repeats)
        return rows

    return run


BENCHES: dict[str, Callable[[int], list[Row]]] = {
    "engine": _bench("engine", "engine"),
    "allocate": _bench("allocate", "bench_allocate"),
    "gb": _bench("gb", "gb"),
    "codecs": _bench("codecs", "codecs"),
    "ccc": _bench("ccc", "ccc"),
    "flare": _bench("flare", "flare"),
    "peers": _bench("peers", "peers"),
    "assign": _bench("assign", "bench_assign"),
    "models": _bench("models", "models"),
    "text": _bench("text", "text"),
}
