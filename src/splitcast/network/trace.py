"""Recorded channel gains: to keep what a model drew, or to put measurements in its place.

The file is CSV with the columns ``round,client,gain``: rounds from 1, clients from 0, linear gains, rows in any order.
"""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitcast.errors import SplitcastError
from splitcast.network.cell import Array

COLUMNS = ["round", "client", "gain"]


@dataclass(frozen=True)
class Trace:
    """Gains of N clients over T rounds.

    >>> Trace(np.array([[1e-9, 2e-9], [3e-9, 4e-9]])).at(2).tolist()
    [3e-09, 4e-09]
    >>> Trace(np.array([[1e-9, 0.0]]))
    Traceback (most recent call last):
    splitcast.errors.SplitcastError: trace: gain 0 in round 1, client 1; must be finite and > 0
    """

    gains: Array
    """(T, N)"""
    distance_m: Array | None = None
    """(N,), if known; not stored"""

    def __post_init__(self) -> None:
        if self.gains.ndim != 2 or 0 in self.gains.shape:
            raise SplitcastError(f"trace: gains have shape {self.gains.shape}; must be (rounds, clients)")
        for t, n in np.argwhere(~(np.isfinite(self.gains) & (self.gains > 0)))[:1]:
            raise SplitcastError(
                f"trace: gain {self.gains[t, n]:g} in round {t + 1}, client {n}; must be finite and > 0"
            )

    def at(self, round_: int) -> Array:
        if not 1 <= round_ <= len(self.gains):
            raise SplitcastError(f"trace: has rounds 1..{len(self.gains)}, not round {round_}")
        row: Array = self.gains[round_ - 1]
        return row

    def save(self, path: Path) -> None:
        """Write a file that `load` reads back bit by bit."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (t, n), gain in np.ndenumerate(self.gains):
            writer.writerow([t + 1, n, repr(float(gain))])
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text.getvalue(), encoding="utf-8")
        temporary.replace(path)

    @staticmethod
    def load(path: Path, clients: int | None = None) -> "Trace":
        """Read and check a file; with ``clients``, it must hold exactly so many."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = _rows(csv.reader(file), path)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise SplitcastError(f"trace: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        if not rows:
            raise SplitcastError(f"trace: {path} has no rows")
        shape = max(t for t, _ in rows), max(n for _, n in rows) + 1
        if clients is not None and shape[1] != clients:
            raise SplitcastError(f"trace: {path} has {shape[1]} clients, not {clients}")
        if len(rows) < shape[0] * shape[1]:
            t, n = next((t + 1, n) for t, n in np.ndindex(shape) if (t + 1, n) not in rows)
            raise SplitcastError(f"trace: {path} has no gain for round {t}, client {n}")
        gains = np.empty(shape)
        for (t, n), gain in rows.items():
            gains[t - 1, n] = gain
        return Trace(gains)


def _rows(reader: Iterable[list[str]], path: Path) -> dict[tuple[int, int], float]:
    """Gains by round and client; every fault names its line."""
    rows: dict[tuple[int, int], float] = {}
    for line, row in enumerate(reader, start=1):
        if line == 1:
            if [name.strip() for name in row] != COLUMNS:
                raise SplitcastError(f"trace: {path} line 1 is {','.join(row)!r}; must be {','.join(COLUMNS)!r}")
            continue
        if not row:
            continue
        try:
            t, n, gain = int(row[0]), int(row[1]), float(row[2])
        except (ValueError, IndexError):
            raise SplitcastError(
                f"trace: {path} line {line} is {','.join(row)!r}; must be two integers and a gain"
            ) from None
        if t < 1 or n < 0:
            raise SplitcastError(f"trace: {path} line {line}: round {t}, client {n}; rounds start at 1, clients at 0")
        if not (np.isfinite(gain) and gain > 0):
            raise SplitcastError(
                f"trace: {path} line {line}: gain {gain:g} in round {t}, client {n}; must be finite and > 0"
            )
        if (t, n) in rows:
            raise SplitcastError(f"trace: {path} line {line}: round {t}, client {n} is there twice")
        rows[t, n] = gain
    return rows
