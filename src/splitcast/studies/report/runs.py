"""The runs that a report is about."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.run.records import RoundRecord, RunFolder


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    name: str
    path: Path
    config: Config
    rounds: list[RoundRecord]
    """at least one"""
    gamma: tuple[float, ...]
    """Gamma of every cut, if it was measured for the policy"""
    summary: dict[str, Any] | None
    """None while the run is unfinished"""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run of ``paths``, each a run folder or a folder of run folders."""
    if not paths:
        raise SplitcastError("runs: none given; name a run folder, or a folder of run folders")
    by_place = {folder.resolve(): folder for path in paths for folder in _folders(path)}
    folders = list(by_place.values())
    begun = [folder for folder in folders if not _is_empty(folder)] or folders
    for folder in folders:
        if folder not in begun:
            warnings.warn(f"run: {folder} has no finished round yet and is left out", stacklevel=2)
    return [_read(folder, name) for folder, name in zip(begun, names(begun), strict=True)]


def names(folders: Sequence[Path]) -> list[str]:
    """What to call runs: as little of their paths as tells them apart.

    >>> names([Path("a/sfl"), Path("a/psl")]), names([Path("a/sfl"), Path("b/sfl")])
    (['sfl', 'psl'], ['a/sfl', 'b/sfl'])
    """
    whole = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, whole)) + 1):
        short = ["/".join(parts[-length:]) for parts in whole]
        if max(Counter(short).values()) == 1:
            return short
    return [str(folder) for folder in folders]


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise SplitcastError(f"run: {path} is not a folder")
    if RunFolder(path).config_file.is_file():
        return [path]
    inside = sorted(RunFolder(entry).config_file.parent for entry in path.iterdir() if _is_run(entry))
    if not inside:
        raise SplitcastError(f"run: {path} is not a run folder and holds none (no config.toml)")
    return inside


def _is_empty(path: Path) -> bool:
    file = RunFolder(path).rounds_file
    return not file.is_file() or not file.stat().st_size


def _is_run(path: Path) -> bool:
    return path.is_dir() and RunFolder(path).config_file.is_file()


def _read(path: Path, name: str) -> Run:
    folder = RunFolder(path)
    config, rounds = folder.config(), folder.rounds()
    if not rounds:
        raise SplitcastError(f"run: {path} has no finished round to show; go on with splitcast train --resume {path}")
    summary = folder.summary() if folder.summary_file.is_file() else None
    return Run(name, path, config, rounds, folder.measured("gamma"), summary)
