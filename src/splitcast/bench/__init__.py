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


def _gb(repeats: int) -> list[Row]:
    from splitcast.bench.gb import gb

    return gb(repeats)


def _codecs(repeats: int) -> list[Row]:
    from splitcast.bench.codecs import codecs

    return codecs(repeats)


def _ccc(repeats: int) -> list[Row]:
    from splitcast.bench.ccc import ccc

    return ccc(repeats)


def _flare(repeats: int) -> list[Row]:
    from splitcast.bench.flare import flare

    return flare(repeats)


def _peers(repeats: int) -> list[Row]:
    from splitcast.bench.peers import peers

    return peers(repeats)


def _assign(repeats: int) -> list[Row]:
    from splitcast.bench.assign import bench_assign

    return bench_assign(repeats)


def _models(repeats: int) -> list[Row]:
    from splitcast.bench.models import models

    return models(repeats)


def _text(repeats: int) -> list[Row]:
    from splitcast.bench.text import text

    return text(repeats)


BENCHES: dict[str, Callable[[int], list[Row]]] = {
    "engine": _engine,
    "allocate": _allocate,
    "gb": _gb,
    "codecs": _codecs,
    "ccc": _ccc,
    "flare": _flare,
    "peers": _peers,
    "assign": _assign,
    "models": _models,
    "text": _text,
}
