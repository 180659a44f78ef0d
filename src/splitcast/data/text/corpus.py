"""Documents out of text files, JSON lines and folders of both."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from splitcast.base.errors import SplitcastError, shown

SUFFIXES = (".txt", ".md", ".jsonl")
"""Other files of a folder are passed over."""
MOST_BYTES = 2**30
"""Of all files together."""
MOST_DOCUMENTS = 10**6
MOST_COLUMNS = 100


class Document(NamedTuple):
    """A text and what is known about it. In JSON lines: the key "text", and whatever else is a text or a whole number;
    of a file of a folder: "file", its path in there, and "folder", the first part of that path."""

    text: str
    about: dict[str, str | int]


def read_corpus(path: Path) -> list[Document]:
    """The documents of a file or folder, in the order of the files' names; empty ones are left out."""
    files = sorted(text_files(path)) if path.is_dir() else [path]
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise SplitcastError(f"dataset: cannot read {path}: {error.strerror}") from None
    if size > MOST_BYTES:
        raise SplitcastError(f"dataset: {path} has {size:,} bytes of text; at most {MOST_BYTES:,} are allowed")
    found: list[Document] = []
    for file in files:
        about = _place(file.relative_to(path) if path.is_dir() else Path(file.name))
        for document in _documents(file, about):
            if document.text.strip():
                found.append(document)
            if len(found) > MOST_DOCUMENTS:
                raise SplitcastError(f"dataset: {path} has more than {MOST_DOCUMENTS:,} documents")
    if not found:
        raise SplitcastError(f"dataset: {path} has no text; allowed are files {', '.join(SUFFIXES)} that are not empty")
    return found


def text_files(folder: Path) -> Iterator[Path]:
    """The text files below a folder; what is hidden is not seen."""
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.suffix.lower() in SUFFIXES and not hidden and file.is_file():
            yield file


def columns(documents: Sequence[Document]) -> list[str]:
    """What is known about every document."""
    return [name for name in documents[0].about if all(name in document.about for document in documents)]


def column(documents: Sequence[Document], name: str, field: str, source: str) -> list[str] | list[int]:
    """One value for every document: whole numbers where all are, else texts."""
    if name not in (known := columns(documents)):
        listed = ", ".join(known[:30]) or "none"
        raise SplitcastError(f"{field}: {source} has no column {shown(name)}; it has {listed}")
    values = [document.about[name] for document in documents]
    numbers = [value for value in values if isinstance(value, int)]
    return numbers if len(numbers) == len(values) else [str(value) for value in values]


def _place(relative: Path) -> dict[str, str | int]:
    known: dict[str, str | int] = {"file": relative.as_posix()}
    return known | {"folder": relative.parts[0]} if len(relative.parts) > 1 else known


def _documents(file: Path, about: dict[str, str | int]) -> Iterator[Document]:
    try:
        content = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SplitcastError(f"dataset: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SplitcastError(f"dataset: {file} is not a text in UTF-8 (byte {error.start})") from None
    if file.suffix.lower() != ".jsonl":
        yield Document(content, about)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _document(line, about, f"{file}, line {number}")


def _document(line: str, about: dict[str, str | int], where: str) -> Document:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise SplitcastError(f"dataset: {where} is not JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise SplitcastError(f"dataset: {where} is {shown(found)}; allowed is an object with a text under 'text'")
    text = found.pop("text").encode("utf-8", "replace").decode()  # half of a pair of surrogates is no character
    own = {name: value for name, value in found.items() if isinstance(value, str | int) and _fits(value)}
    if len(own) > MOST_COLUMNS:
        raise SplitcastError(f"dataset: {where} has {len(own)} keys; at most {MOST_COLUMNS} are allowed")
    return Document(text, about | own)


def _fits(value: str | int) -> bool:
    """Whether a value can be one of a column: texts, and whole numbers of 64 bits."""
    return isinstance(value, str) or abs(value) < 2**63
