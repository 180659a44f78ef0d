"""Whether a run folder is as splitcast left it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from splitcast.base.errors import SplitcastError
from splitcast.run.checkpoint import unpack
from splitcast.run.identity import read_identity
from splitcast.run.lines import LineError, read_line, start_of, stored_chain
from splitcast.run.records import RunFolder
from splitcast.run.strict import LINE_BYTES, shortened

MOST = 20
"""Most problems told of one file."""


def verify(path: Path) -> list[str]:
    """Every problem of a run that nobody writes just now, one line each: where and what. Empty if all is well.

    Only reads, never raises, runs nothing of what it reads.
    """
    if not path.is_dir():
        return [f"run: {path} is not a folder"]
    folder = RunFolder(path)
    checks: list[Callable[[], list[str]]] = [
        lambda: _nothing(read_identity(path)),
        lambda: _nothing(folder.config()),
        lambda: _nothing([folder.measured(name) for name in ("gamma", "errors")]),
        lambda: _rounds(folder),
        lambda: _checkpoint(folder),
        lambda: _nothing(folder.summary() if folder.summary_file.exists() else None),
        lambda: _leftovers(path),
    ]
    found = [problem for check in checks for problem in _safely(path, check)]
    return list(dict.fromkeys(found))


def _safely(path: Path, check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except SplitcastError as error:
        return [" ".join(str(error).split())]
    except Exception as error:
        return [f"run: {path} cannot be read: {type(error).__name__} {shortened(str(error))}"]


def _nothing(_: object) -> list[str]:
    return []


def _rounds(folder: RunFolder) -> list[str]:
    found: list[str] = []
    for number, problem, _ in _lines(folder):
        if problem and len(found) == MOST:
            return [*found, f"run: {folder.rounds_file} has more such lines"]
        if problem:
            found.append(f"run: {folder.rounds_file} line {number} {problem}")
    return found


def _checkpoint(folder: RunFolder) -> list[str]:
    if not folder.checkpoint_file.exists():
        return []
    stored = unpack(folder.checkpoint_file)
    known = read_identity(folder.path)
    run = known.run if known else ""
    rounds, chain = 0, start_of(run)
    for number, _, after in _lines(folder):
        if number > stored.checkpoint.round:
            break
        rounds, chain = number, after or ""
    folder.compare(stored, run, rounds, chain)
    return []


def _lines(folder: RunFolder) -> Iterator[tuple[int, str, str | None]]:
    """Number, problem and chain of every line; after a bad line, the next is compared with what that one says."""
    if not folder.rounds_file.exists():
        return
    if not folder.rounds_file.is_file():
        raise SplitcastError(f"run: {folder.rounds_file} is not a file")
    chain: str | None
    try:
        known = read_identity(folder.path)
        chained, chain = known is not None, start_of(known.run if known else "")
    except SplitcastError:  # told by another check
        chained, chain = True, None
    number = 0
    with folder.rounds_file.open("rb") as file:
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                yield number, f"is longer than {LINE_BYTES} bytes; nothing after it was read", None
                return
            if not line.endswith(b"\n"):
                yield number, "is half-written; it is dropped when the run is resumed", None
                return
            try:
                _, chain = read_line(line[:-1], number, chain, chained)
                problem = ""
            except LineError as error:
                problem, chain = str(error), stored_chain(line[:-1]) if chained else ""
            yield number, problem, chain


def _leftovers(path: Path) -> list[str]:
    left = sorted(entry.name for entry in path.iterdir() if entry.name.startswith(".") and entry.name.endswith(".tmp"))
    return [f"run: {path / name} was left by a write that was stopped; delete it" for name in left[:MOST]]
