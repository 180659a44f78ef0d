"""Get a data set or a model into the cache: try each source, check the content, store it in one step."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

from splitcast.base.errors import SplitcastError, one_of
from splitcast.data.catalog import RECIPES
from splitcast.data.loading import TEXT_NAMES, cache_folder, read_text
from splitcast.data.sources import Parts, Recipe, Report
from splitcast.data.text.corpus import columns
from splitcast.data.text.packages import MODELS


def fetch(
    name: str, cache: str | Path | None = None, *, recipe: Recipe | None = None, report: Report | None = None
) -> Path:
    """Make data set or model `name` ready and return its file or folder; nothing is done if it is there already.

    `cache` is the folder (see `cache_folder`), `recipe` says where to look and what to accept (by default
    the one known under that name), `report` is told of the progress (by default a bar on the terminal).
    It appears complete and checked, or not at all.
    """
    recipe = recipe or RECIPES[one_of("dataset", name, RECIPES)]
    folder = cache_folder(cache)
    target = folder / recipe.file(name)
    if recipe.is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".get-")  # same disk, so renaming is atomic
    except OSError as error:
        raise SplitcastError(f"cache = {str(folder)!r}: allowed is a folder to write in ({error})") from error
    with temporary as scratch, _bar() if report is None else _given(report) as tell:
        parts, ready = _first_good(name, recipe, Path(scratch), tell), Path(scratch) / target.name
        tell(f"writing {target.name}", 0, None)
        recipe.write(parts, ready)
        if target.is_dir():
            target.replace(Path(scratch) / "old")
        ready.replace(target)
    return target


def stored_texts(cache: str | Path | None = None) -> dict[str, str]:
    """What there is of the known texts and models, in words; nothing of those that are to be fetched."""
    found = {}
    for name in (*TEXT_NAMES, *MODELS):
        try:
            found[name] = _size(name, cache)
        except SplitcastError:
            found[name] = ""
    return found


def _size(name: str, cache: str | Path | None) -> str:
    if name in MODELS:
        return "a language model" if MODELS[name].is_whole(cache_folder(cache) / name) else ""
    documents = read_text(name, cache)
    letters = sum(len(document.text) for document in documents)
    return f"{len(documents):6} texts, {letters / 1e6:.1f} million letters, by {', '.join(columns(documents))}"


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
