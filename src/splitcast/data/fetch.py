"""Get a full dataset into the cache: try each source, check the content, store it in one step."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

from splitcast.base.errors import SplitcastError, one_of
from splitcast.data.catalog import RECIPES
from splitcast.data.datasets import ARRAYS
from splitcast.data.loading import cache_folder, stored_array
from splitcast.data.sources import Parts, Recipe, Report


def fetch(
    name: str, cache: str | Path | None = None, *, recipe: Recipe | None = None, report: Report | None = None
) -> Path:
    """Make dataset `name` ready for `load` and return its file; nothing is done if it is there already.

    `cache` is the folder (see `cache_folder`), `recipe` says where to look and what to accept (by default
    the one known under that name), `report` is told of the progress (by default a bar on the terminal).
    The file appears complete and checked, or not at all.
    """
    recipe = recipe or RECIPES[one_of("dataset", name, RECIPES)]
    folder = cache_folder(cache)
    target = folder / f"{name}.npz"
    if _is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".get-")  # same disk, so renaming is atomic
    except OSError as error:
        raise SplitcastError(f"cache = {str(folder)!r}: allowed is a folder to write in ({error})") from error
    with temporary as scratch, _bar() if report is None else _given(report) as tell:
        arrays: dict[str, Any] = {**recipe.arrays(_first_good(name, recipe, Path(scratch), tell))}
        ready = Path(scratch) / "ready.npz"
        np.savez(ready, **arrays)
        ready.replace(target)
    return target


def _is_whole(path: Path) -> bool:
    try:
        return all(stored_array(path, key).size for key in ARRAYS)  # which compares checksums
    except SplitcastError:
        return False


def _first_good(name: str, recipe: Recipe, scratch: Path, tell: Report) -> Parts:
    reasons = []
    for number, source in enumerate(recipe.sources):
        folder = scratch / str(number)
        folder.mkdir()
        try:
            parts = source.get(folder, tell)
            _verify(parts, recipe.checksums)
            return parts
        except Exception as error:  # whatever goes wrong inside a source, the next one may do
            reasons.append(f"{source.name} ({' '.join(str(error).split()) or type(error).__name__})")
    raise SplitcastError(f"dataset = {name!r}: no source could give it: {'; '.join(reasons)}")


def _verify(parts: Parts, checksums: dict[str, str]) -> None:
    for part, checksum in checksums.items():
        if part not in parts:
            raise SplitcastError(f"{part} is missing")
        algorithm, expected = checksum.split(":")
        found = hashlib.new(algorithm, parts[part], usedforsecurity=False).hexdigest()
        if found != expected:
            raise SplitcastError(f"{part} has {algorithm} {found}, expected {expected}")


@contextmanager
def _given(report: Report) -> Iterator[Report]:
    yield report


@contextmanager
def _bar() -> Iterator[Report]:
    """A line on the terminal: what is going on and how far it is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def report(what: str, done: int, total: int | None) -> None:
            shown = progress.tasks[0] if progress.tasks else None
            if shown is None or shown.description != what:
                if shown is not None:
                    progress.remove_task(shown.id)
                progress.add_task(what, total=total)
            progress.update(progress.tasks[0].id, completed=done)

        yield report
