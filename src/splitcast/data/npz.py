"""Arrays out of .npz files that anybody may have written: nothing is run, nothing allocated that a file cannot hold."""

import math
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError, shown

MOST_BYTES = 2**33
"""Of the arrays that are read from one file."""
TYPES = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8")
"""Of the arrays in a file: truth values, integers and real numbers that torch has."""


def read_npz(path: Path, keys: Sequence[str], most_bytes: int = MOST_BYTES) -> dict[str, NDArray[Any]]:
    """Arrays of a .npz file by name, of `TYPES` and in this machine's byte order; others in the file are not read.

    Sizes are checked before anything is allocated: what the file says it holds, together at most ``most_bytes``, must
    be what its headers and its length allow. Nothing of a file is run.
    """
    with _opened(path) as archive:
        size, names = path.stat().st_size, archive.namelist()
        for key in keys:
            if names.count(f"{key}.npy") != 1:
                raise SplitcastError(f"data: {path} has {names.count(f'{key}.npy')} arrays {key}; allowed is one")
        members = {key: archive.getinfo(f"{key}.npy") for key in keys}
        for key, member in members.items():
            _check_member(path, key, member, size)
        total = sum(member.file_size for member in members.values())
        if total > most_bytes:
            raise SplitcastError(f"data: {path} inflates to {total:,} bytes; at most {most_bytes:,} are allowed")
        return {key: _array(path, key, archive, member) for key, member in members.items()}


def stored_array(path: Path, key: str) -> NDArray[np.uint8]:
    """One of the arrays of a stored dataset: images (n, C, H, W) or labels (n,), uint8, none of the sizes 0."""
    found = read_npz(path, [key])[key]
    if found.dtype != np.uint8 or found.ndim != (4 if key.endswith("x") else 1) or not found.size:
        raise SplitcastError(f"{key}: {found.dtype} of shape {found.shape}; allowed are images or labels as uint8")
    return found


def names_in(path: Path) -> list[str]:
    """The names of the arrays in a .npz file."""
    with _opened(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    if not path.is_file():
        raise SplitcastError(f"data: {path} is not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except SplitcastError:
        raise
    except Exception as error:  # of many kinds, for a file that anybody may have written
        said = shown(" ".join(str(error).split()) or type(error).__name__)
        raise SplitcastError(f"data: {path} must be a .npz file, whole: {said}") from None


def _check_member(path: Path, key: str, member: zipfile.ZipInfo, size: int) -> None:
    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}.get(member.compress_type)  # no more is possible
    if ratio is None or member.flag_bits & 1:
        raise SplitcastError(f"data: {path} packs {key} in a way that is not known; allowed is what numpy.savez writes")
    if member.compress_size > size or member.file_size > ratio * member.compress_size:
        raise SplitcastError(
            f"data: {path} says that {key} has {member.file_size:,} bytes, more than a file of {size:,} can hold"
        )


def _array(path: Path, key: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        header, dtype, fortran, shape = _header(path, key, file.read(_LONGEST_HEADER))
        count = math.prod(shape)
        if header + count * dtype.itemsize != member.file_size:
            raise SplitcastError(
                f"data: {path} says that {key} is {dtype} of shape {shown(shape)}, which is not its "
                f"{member.file_size:,} bytes"
            )
        file.seek(header)
        made = np.empty(count, dtype)
        rest = made.view(np.uint8).data
        while piece := file.read(_PIECE):  # to the end, where the checksum is compared
            rest[: len(piece)] = piece
            rest = rest[len(piece) :]
        if len(rest):
            raise SplitcastError(f"data: {path} ends in the middle of {key}")
    made = made.reshape(shape[::-1]).T if fortran else made.reshape(shape)
    return made.astype(made.dtype.newbyteorder("="), order="C", copy=False)


def _header(path: Path, key: str, start: bytes) -> tuple[int, np.dtype[Any], bool, tuple[int, ...]]:
    """Its length, and the type, order and shape it tells of."""
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4, b"\x93NUMPY\x03\x00": 4}.get(start[:8], 0)
    end = 8 + width + int.from_bytes(start[8 : 8 + width], "little")
    told = _HEADER.fullmatch(start[8 + width : end]) if width and end <= len(start) else None
    if told is None:
        raise SplitcastError(f"data: {path} has no header of numpy's at {key}, or one that is not of plain numbers")
    kind, fortran, sizes = (part.decode("ascii") for part in told.groups())
    if kind[-2:] not in TYPES or len(kind) > 3:
        raise SplitcastError(f"data: {path} holds {key} of type {kind!r}; allowed are {', '.join(TYPES)}")
    shape = tuple(int(n) for n in re.findall("[0-9]+", sizes))
    if len(shape) > _MOST_DIMENSIONS:
        raise SplitcastError(f"data: {path} holds {key} of {len(shape)} dimensions; at most {_MOST_DIMENSIONS}")
    return end, np.dtype(kind), fortran == "True", shape


_LONGEST_HEADER = 4096
_PIECE = 2**22
_MOST_DIMENSIONS = 8
_HEADER = re.compile(
    rb"""\{'descr': '([^']{1,40})', 'fortran_order': (True|False), """
    rb"""'shape': \(((?:[0-9]{1,18}, ?){0,32}(?:[0-9]{1,18})?)\), \} *\n"""
)
