"""Recorded channel gains: to keep what a model drew, or to put measurements in its place.

The file is CSV with the columns ``round,client,gain``: rounds from 1, clients from 0, linear gains, rows in any order.
"""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitcast.base.errors import SplitcastError, shown
from splitcast.cost.cell import Array

COLUMNS = ["round", "client", "gain"]
FILE_BYTES = 2**28
"""Largest file that is read: about eight million gains."""
_PLACE = re.compile(r" *[0-9]{1,9} *")


@dataclass(frozen=True)
class Trace:
    """Gains of N clients over T rounds.

    >>> Trace(np.array([[1e-9, 2e-9], [3e-9, 4e-9]])).at(2).tolist()
    [3e-09, 4e-09]
    >>> Trace(np.array([[1e-9, 0.0]]))
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: trace: gain 0 in round 1, client 1; must be finite and > 0
    """

    gains: Array
    """(T, N)"""
    distance_m: Array | None = None
    """(N,), if known; not stored"""

    def __post_init__(self) -> None:
        if self.gains.dtype.kind not in "fiu":
            raise SplitcastError(f"trace: gains are of type {self.gains.dtype}; must be numbers")
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
            size = path.stat().st_size
            if not path.is_file():  # a pipe would keep us waiting
                raise SplitcastError(f"trace: {path} is not a file")
            if size > FILE_BYTES:
                raise SplitcastError(f"trace: {path} has {size:,} bytes; at most {FILE_BYTES:,} are allowed")
            with path.open(encoding="utf-8", newline="") as file:
                rows = _rows(csv.reader(file, strict=True), path)
        except (OSError, ValueError, csv.Error) as error:  # ValueError: not UTF-8, or no name of a file
            said = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise SplitcastError(f"trace: cannot read {path}: {said}") from None
        if not rows:
            raise SplitcastError(f"trace: {path} has no rows")
        shape = max(t for t, _ in rows), max(n for _, n in rows) + 1
        if clients is not None and shape[1] != clients:
            raise SplitcastError(f"trace: {path} has {shape[1]} clients, not {clients}")
        if len(rows) < shape[0] * shape[1]:  # then one of the first places is empty: nothing of that shape is made
            places = ((t, n) for t in range(1, shape[0] + 1) for n in range(shape[1]))
            t, n = next(place for place in places if place not in rows)
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
                raise SplitcastError(f"trace: {path} line 1 is {shown(','.join(row))}; must be {','.join(COLUMNS)!r}")
            continue
        if not row:
            continue
        try:
            if len(row) != len(COLUMNS) or not all(_PLACE.fullmatch(word) for word in row[:2]):
                raise ValueError
            t, n, gain = int(row[0]), int(row[1]), float(row[2])
        except ValueError:
            raise SplitcastError(
                f"trace: {path} line {line} is {shown(','.join(row))}; must be two integers of at most 9 digits and "
                "a gain"
            ) from None
        if t < 1:
            raise SplitcastError(f"trace: {path} line {line}: round {t}, client {n}; rounds start at 1, clients at 0")
        if not (np.isfinite(gain) and gain > 0):
            raise SplitcastError(
                f"trace: {path} line {line}: gain {gain:g} in round {t}, client {n}; must be finite and > 0"
            )
        if (t, n) in rows:
            raise SplitcastError(f"trace: {path} line {line}: round {t}, client {n} is there twice")
        rows[t, n] = gain
    return rows
