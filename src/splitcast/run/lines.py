"""`rounds.jsonl`: one JSON object per round, each chained to the one before it.

The last key of a line is ``chain``, the blake2b digest (16 bytes) of the chain before and of the line without that key.
The first chain is the digest of the run's identity. Folders of older versions have no `run.json`, and their lines no
chain; it is reckoned all the same, for the checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from splitcast.base.errors import SplitcastError
from splitcast.run.identity import read_identity
from splitcast.run.strict import (
    ENTRIES,
    LINE_BYTES,
    count,
    maybe_number,
    number,
    optional,
    parsed,
    row,
    shortened,
    table,
    text,
    whole,
)

OLD = ("rank", "dropped_energy", "gamma")
"""Columns of older versions, read as metrics."""
_SUFFIX = len(', "chain": ""}') + 32


@dataclass(frozen=True)
class RoundRecord:
    """One line of `rounds.jsonl`."""

    round: int
    cut: int
    clients: int
    """how many took part"""
    loss: float
    """training loss, sum_n rho^n F^n"""
    up_bytes: int
    down_bytes: int
    kinds: dict[str, int]
    """bytes on the air per direction and kind"""
    drift: float | None
    """mean distance of the client halves from their average; on real sites only known when halves are collected"""
    latency_s: float
    """simulated seconds of the round"""
    slowest_client: int
    """who held the round up longest, and with what: compute, uplink, server, downlink or backward"""
    slowest_part: str
    test_loss: float | None = None
    test_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """what the scheme measured of itself; and with test_ before their names, the further measures of the task"""
    wall_s: dict[str, float] | None = None
    """on real sites: measured seconds of the round's parts (upload, server, download, client)"""
    failures: dict[str, str] | None = None
    """on real sites: those that failed in this round, and why"""
    uplink: str | None = None
    """format of smashed data, where it is chosen anew in every round"""
    cuts: list[int] | None = None
    """of every client, where a policy chooses them; ``cut`` is the least"""

    @property
    def bytes(self) -> int:
        """Bytes on the air, both directions."""
        return self.up_bytes + self.down_bytes

    def tests(self) -> dict[str, float]:
        """All measures of the test after this round, by their names; none without a test."""
        found = {"loss": self.test_loss, "accuracy": self.test_accuracy}
        found |= {name.removeprefix("test_"): v for name, v in self.metrics.items() if name.startswith("test_")}
        return {name: value for name, value in found.items() if value is not None}

    def test(self, name: str) -> float | None:
        """What the test after this round found for a measure."""
        return self.test_accuracy if name == "accuracy" else self.tests().get(name)


class LineError(Exception):
    """What is wrong with a line, to follow its number."""


def line_of(record: RoundRecord, before: str, chained: bool) -> tuple[bytes, str]:
    """The line of a record, with its newline, and its chain; refuses what `read_line` would refuse."""
    try:
        values = vars(record) | {"failures": _clipped(record.failures)}
        if record.cuts is None:  # most runs have none
            del values["cuts"]
        body = json.dumps(values, allow_nan=False).encode()
        record_of(parsed(body))
    except (LineError, ValueError, TypeError):
        name = next((name for name, value in vars(record).items() if not _fits(name, value)), "record")
        value = shortened(getattr(record, name, record))
        raise SplitcastError(
            f"{name}: {value} in round {record.round} cannot be recorded; numbers must be finite, texts short"
        ) from None
    chain = _link(before, body)
    if chained:
        body = body[:-1] + _suffix(chain)
    if len(body) >= LINE_BYTES:
        raise SplitcastError(f"record: round {record.round} takes {len(body)} bytes, more than {LINE_BYTES}")
    return body + b"\n", chain


def read_line(line: bytes, place: int, before: str | None, chained: bool) -> tuple[RoundRecord, str]:
    """The record and chain of line number ``place``, without its newline; ``before`` None is not compared."""
    body = line[:-_SUFFIX] + b"}" if chained else line
    chain = _link(before or "", body)
    if not chained or line.endswith(_suffix(chain)):
        return _record(body, place), chain
    stored = stored_chain(line)
    record = _record(body if stored else line, place)
    if not stored:
        raise LineError("has no chain")
    if before is not None:
        raise LineError("does not follow from the lines before: it or one of them was edited")
    return record, stored


def stored_chain(line: bytes) -> str | None:
    """The chain at the end of a line, if it has one."""
    chain = line[-34:-2].decode("ascii", "replace")
    return chain if re.fullmatch("[0-9a-f]{32}", chain) and line.endswith(_suffix(chain)) else None


def start_of(run: str) -> str:
    """The chain before the first line of a run."""
    return _link("", run.encode())


def record_of(values: Any) -> RoundRecord:
    """A record from parsed JSON; every field has its type, numbers are finite and of 64 bits."""
    if type(values) is not dict:
        raise LineError("is not a round")
    try:
        made = {name: _CHECKS[name](value) for name, value in values.items()}
    except (KeyError, ValueError):
        name = next(name for name, value in values.items() if not _fits(name, value))
        if name not in _CHECKS:
            raise LineError(f"has an unknown key {shortened(name)}") from None
        raise LineError(f"has a bad {name}: {shortened(values[name])}") from None
    if "rank" in made or "gamma" in made or "dropped_energy" in made:
        old = {name: made.pop(name) for name in OLD if name in made}
        made["metrics"] = made.get("metrics", {}) | {name: value for name, value in old.items() if value is not None}
    made.setdefault("cuts", None)
    if len(made) == len(_FIELDS):
        whole_record = object.__new__(
            RoundRecord
        )  # a frozen dataclass sets its fields one by one, at five times the cost
        vars(whole_record).update(made)
        return whole_record
    try:
        return RoundRecord(**made)
    except TypeError:
        lacking = next(name for name in _FIELDS if name not in made)
        raise LineError(f"is not a round: it has no {lacking}") from None


def _record(body: bytes, place: int) -> RoundRecord:
    try:
        values = parsed(body)
    except UnicodeDecodeError:
        raise LineError("is damaged: not a text in UTF-8") from None
    except ValueError:
        raise LineError("is not a round") from None
    if type(values) is dict and "chain" in values:
        raise LineError("has a chain that nothing explains: it was edited, or run.json is missing")
    record = record_of(values)
    if record.round != place:
        raise LineError(f"is round {record.round}, not {place}: lines were removed, repeated or swapped")
    return record


class RoundsReader:
    """Follows the rounds of a folder: every look returns what is new.

    A look without news reads one line. When rounds were dropped by a resume, it goes on from where they were cut;
    the rounds run again are then returned again, unless they are the same.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rounds.jsonl"
        self.chained, self.torn = False, False
        """whether lines carry their chain; whether something, such as half a line, follows the rounds read"""
        self._chains = [""]
        self._ends = [0]
        self._last = b""

    @property
    def count(self) -> int:
        """Rounds read so far."""
        return len(self._ends) - 1

    @property
    def chain(self) -> str:
        """The chain after the last round read."""
        return self._chains[-1]

    @property
    def end(self) -> int:
        """Bytes of the rounds read so far."""
        return self._ends[-1]

    def new(self, upto: int | None = None) -> list[RoundRecord]:
        """The complete rounds since the last look, up to some round; bad lines are refused by number."""
        try:
            if not self.file.is_file() and self.file.exists():
                raise SplitcastError(f"run: {self.file} is not a file")
            file = self.file.open("rb")
        except FileNotFoundError:
            self._restart()
            return []
        except OSError as error:
            raise SplitcastError(f"run: cannot read {self.file}: {error.strerror}") from None
        with file:
            before = vars(self).copy()
            again = not self._stands(file)
            if again:
                self._restart()
            try:
                records = self._read(file, upto)
            except LineError as error:
                vars(self).update(before)
                raise SplitcastError(f"run: {self.file} {error}") from None
        if not again:
            return records
        pairs = zip(before["_chains"], self._chains, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return records[max(same - 1, 0) :]

    def _restart(self) -> None:
        identity = read_identity(self.file.parent)
        self.chained, self.torn = identity is not None, False
        self._chains, self._ends, self._last = [start_of(identity.run if identity else "")], [0], b""

    def _stands(self, file: BinaryIO) -> bool:
        """Whether the last line read is still where it was."""
        if not self.count:
            return False
        file.seek(self._ends[-2])
        return file.read(len(self._last)) == self._last

    def _read(self, file: BinaryIO, upto: int | None) -> list[RoundRecord]:
        file.seek(self.end)
        *lines, rest = file.read().split(b"\n", -1 if upto is None else max(0, upto - self.count))
        records, chains, ends = [], [], []
        chain, end = self.chain, self.end
        for place, line in enumerate(lines, self.count + 1):
            if len(line) >= LINE_BYTES:
                raise LineError(f"line {place} is longer than {LINE_BYTES} bytes")
            try:
                record, chain = read_line(line, place, chain, self.chained)
            except LineError as error:
                raise LineError(f"line {place} {error}") from None
            end += len(line) + 1
            records.append(record)
            chains.append(chain)
            ends.append(end)
        self._chains.extend(chains)
        self._ends.extend(ends)
        self._last = lines[-1] + b"\n" if lines else self._last
        self.torn = bool(rest)
        return records


def _link(before: str, body: bytes) -> str:
    return hashlib.blake2b(before.encode() + body, digest_size=16).hexdigest()


def _suffix(chain: str) -> bytes:
    return f', "chain": "{chain}"}}'.encode()


def _clipped(failures: dict[str, str] | None) -> dict[str, str] | None:
    """A run does not die of a long reason; JSON and UTF-8 take what is left of it."""
    return failures and {name: why[:ENTRIES].encode(errors="replace").decode() for name, why in failures.items()}


def _fits(name: str, value: Any) -> bool:
    try:
        _CHECKS[name](parsed(json.dumps(value, allow_nan=False).encode()))
    except (KeyError, ValueError, TypeError):
        return False
    return True


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "round": count,
    "cut": whole,
    "clients": count,
    "loss": number,
    "up_bytes": count,
    "down_bytes": count,
    "kinds": table(count),
    "drift": maybe_number,
    "latency_s": number,
    "slowest_client": whole,
    "slowest_part": text,
    "test_loss": maybe_number,
    "test_accuracy": maybe_number,
    "metrics": table(number),
    "wall_s": optional(table(number)),
    "failures": optional(table(text)),
    "uplink": optional(text),
    "cuts": optional(row(whole)),
    **dict.fromkeys(OLD, maybe_number),
}
_FIELDS = [field.name for field in fields(RoundRecord)]
