"""Benchmarks: rows of {name, value, unit} whose names stay stable."""

from collections.abc import Callable

from splitcast.bench.rows import Row

__all__ = ["BENCHES", "Row"]


def _engine(repeats: int) -> list[Row]:
    from splitcast.bench.engine import engine

    return engine(repeats)


def _allocate(repeats: int) -> list[Row]:
    from splitcast.bench.allocate import bench_allocate

    return bench_allocate(repeats)


BENCHES: dict[str, Callable[[int], list[Row]]] = {"engine": _engine, "allocate": _allocate}
