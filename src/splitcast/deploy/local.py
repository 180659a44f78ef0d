"""`local/splitcast.toml` in a kit: what its owner says, whatever a server or an operator asks for.

A site says where its data are (``data``), the server what it tests with (``test``), and both what a configuration from
elsewhere may import in their process (``imports``). A site may ask for a check of the gradients that it is sent
(``scrutiny``).
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitcast.base.errors import SplitcastError, shown
from splitcast.data.loading import kind_of

FILE = Path("local/splitcast.toml")


@dataclass(frozen=True)
class Local:
    """What is in the file."""

    source: str
    """``data`` of a site, ``test`` of the server"""
    imports: tuple[str, ...] = ()
    scrutiny: bool = False

    def allowed(self) -> list[str]:
        """What may be imported: the owner's entries, and the function by which the owner reads its own data."""
        return [*self.imports, *([self.source] if is_function(self.source) else [])]


def is_function(source: str) -> bool:
    """Whether a source of data is a module:function, neither a path nor part:N.

    >>> [source for source in ("my_data:load", "/data/a:b", "a:b.csv", "part:3") if is_function(source)]
    ['my_data:load']
    """
    return ":" in source and kind_of(source) == "function" and part_number(source) is None


def part_number(source: str) -> int | None:
    """N of part:N.

    >>> part_number("part:3"), part_number("parts:all")
    (3, None)
    """
    word, _, number = source.partition(":")
    return int(number) if word == "part" and number.isascii() and number.isdigit() else None


def local_text(key: str, source: str, imports: Sequence[str], **further: bool) -> str:
    """The content of the file."""
    values = {key: source, "imports": list(imports), **further}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["# read here only; nobody else can change what it says", *lines, ""])


def read_local(kit: Path) -> Local:
    """Read the file of a kit; every problem is one line."""
    file = kit / FILE
    key = "test" if (kit / "startup" / "fed_server.json").is_file() else "data"
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raw = {}
    source, imports = raw.pop(key, None), raw.pop("imports", [])
    if not isinstance(source, str):
        what = "the test data are (empty: those of the run)" if key == "test" else "the data are"
        raise SplitcastError(f'{key}: {file} must say where {what}: {key} = "..."')
    if not isinstance(imports, list) or not all(isinstance(entry, str) for entry in imports):
        raise SplitcastError(f'imports: {file} has {shown(imports)}, not a list of modules: imports = ["..."]')
    scrutiny = raw.pop("scrutiny", False) if key == "data" else False
    if not isinstance(scrutiny, bool):
        raise SplitcastError(f"scrutiny: {file} has {shown(scrutiny)}; allowed are true and false")
    if raw:
        known = f"{key}, imports" + (", scrutiny" if key == "data" else "")
        raise SplitcastError(f"{file}: unknown key {shown(next(iter(raw)))}; allowed are {known}")
    return Local(source, tuple(imports), scrutiny)
