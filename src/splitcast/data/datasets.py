"""Datasets as tensors: by name, or from the user's own data."""

import hashlib
import math
import os
import re
import zipfile
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from splitcast.base.codec import IGNORE
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.registry import Registry

EMBEDDED = Path(__file__).with_name("mnist_mini.npz")
ARRAYS = ("train_x", "train_y", "test_x", "test_y")  # what a stored dataset holds, uint8
MOST_BYTES = 2**33
"""Of the arrays that are read from one file."""
LAST_LABEL = 10**6
TYPES = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8")
"""Of the arrays in a file: truth values, integers and real numbers that torch has."""

# Mean and standard deviation of the training pixels in [0, 1], per channel. The embedded subset uses those
# of the full set, so that a model sees both alike.
MOMENTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist-mini": ((0.1307,), (0.3081,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
NAMES = tuple(MOMENTS)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and targets, split into training and test rows.

    Named sets hold pixels scaled to [0, 1] and then standardised, (x - mean) / std with one mean and
    standard deviation per channel (`MOMENTS`); the user's own data are kept as given.
    """

    train_x: Tensor  # (n, ...), images (n, C, H, W) float32
    train_y: Tensor  # (n,) int64 in [0, classes) for classification; else what the task takes (`training.task`)
    test_x: Tensor  # (m, ...)
    test_y: Tensor  # (m, ...)
    classes: int  # what a model puts out per sample, pixel or token: classes, labels, values or tokens (`classes_of`)
    name: str

    def fingerprint(self) -> str:
        """Tells other training data apart: all labels and the first images, in a few letters."""
        digest = hashlib.blake2b(self.train_y.numpy().tobytes(), digest_size=8)
        digest.update(self.train_x[:64].contiguous().numpy().tobytes())
        return digest.hexdigest()


def load(name: str, cache: str | Path | None = None) -> Dataset:
    """Dataset by name: `mnist-mini` (in the package), `mnist`, `fashion-mnist`, `cifar10`, or module:function.

    The full sets are read from the folder `cache` (see `cache_folder`), where `fetch` has put them. A function of the
    user's takes no argument and returns an `Dataset`, or tensors (train_x, train_y, test_x, test_y).
    """
    if name in MOMENTS:
        return stored(name, cache)
    found: Any = DATASETS.find(name)()
    if isinstance(found, Dataset):
        for split, x, y in (("train", found.train_x, found.train_y), ("test", found.test_x, found.test_y)):
            if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim and y.ndim and 0 < len(x) == len(y)):
                raise SplitcastError(f"dataset: {split} rows of {name}; allowed are tensors, as many images as labels")
        return found
    if not (isinstance(found, tuple | list) and len(found) == len(ARRAYS)):
        raise SplitcastError(
            f"dataset: {name} returned {type(found).__name__}; allowed are Dataset and ({', '.join(ARRAYS)})"
        )
    train_x, train_y, test_x, test_y = found
    return from_tensors(train_x, train_y, test_x, test_y, name)


def stored(name: str, cache: str | Path | None = None) -> Dataset:
    """A set of `MOMENTS`, from the package or the cache."""
    path = EMBEDDED if name == "mnist-mini" else cache_folder(cache) / f"{name}.npz"
    if not path.exists():
        raise SplitcastError(f"dataset = {name!r}: not in {path.parent}; get it with: splitcast data get {name}")
    try:
        return _read(path, name)
    except SplitcastError as error:
        raise SplitcastError(
            f"dataset = {name!r}: {path} is damaged ({error}); get it again with: splitcast data get {name}"
        ) from error


Loader = Callable[[], Dataset | tuple[Tensor, Tensor, Tensor, Tensor]]
DATASETS = Registry[Loader]("dataset", takes=0, entries={name: partial(stored, name) for name in NAMES})


def cache_folder(cache: str | Path | None = None) -> Path:
    """Where full datasets live: `cache`, else $SPLITCAST_DATA, else ~/.cache/splitcast."""
    return Path(cache or os.environ.get("SPLITCAST_DATA") or "~/.cache/splitcast").expanduser()


def _read(path: Path, name: str) -> Dataset:
    """Stored uint8 arrays -> tensors, one array at a time and in place, so that little is held twice."""
    mean, std = (255 * torch.tensor(m).view(-1, 1, 1) for m in MOMENTS[name])  # (C, 1, 1)

    def images(key: str) -> Tensor:
        read = torch.from_numpy(stored_array(path, key))
        if read.shape[1] != len(mean):
            raise SplitcastError(f"{key}: {read.shape[1]} channels; allowed are {len(mean)}")
        return read.to(torch.float32).sub_(mean).div_(std)

    def labels(key: str) -> Tensor:
        return torch.from_numpy(stored_array(path, key)).to(torch.int64)

    train_y, test_y = labels("train_y"), labels("test_y")
    train_x, test_x = images("train_x"), images("test_x")
    for split, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y) or x.shape[1:] != train_x.shape[1:]:
            raise SplitcastError(f"{split}_x: shape is {tuple(x.shape)} for {len(y)} labels; allowed is one of a size")
    classes = int(max(train_y.max(), test_y.max())) + 1
    return Dataset(train_x, train_y, test_x, test_y, classes, name)


def stored_array(path: Path, key: str) -> NDArray[np.uint8]:
    """One of the `ARRAYS` of a stored dataset: images (n, C, H, W) or labels (n,), uint8, none of the sizes 0."""
    found = read_npz(path, [key])[key]
    if found.dtype != np.uint8 or found.ndim != (4 if key.endswith("x") else 1) or not found.size:
        raise SplitcastError(f"{key}: {found.dtype} of shape {found.shape}; allowed are images or labels as uint8")
    return found


def read_npz(path: Path, keys: Sequence[str], most_bytes: int = MOST_BYTES) -> dict[str, NDArray[Any]]:
    """Arrays of a .npz file by name, of `TYPES` and in this machine's byte order; others in the file are not read.

    Sizes are checked before anything is allocated: what the file says it holds, together at most ``most_bytes``, must
    be what its headers and its length allow. Nothing of a file is run.
    """
    if not path.is_file():
        raise SplitcastError(f"data: {path} is not a file")
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
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


def from_tensors(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, name: str = "custom") -> Dataset:
    """The user's own images (n, C, H, W) and targets: integer labels (n,), or what the task takes, (n, ...).

    Values are kept, as float32, whole numbers of targets as int64."""
    train_x, train_y = _checked("train", train_x, train_y)
    test_x, test_y = _checked("test", test_x, test_y)
    if train_x.shape[1:] != test_x.shape[1:]:
        ours, theirs = tuple(test_x.shape[1:]), tuple(train_x.shape[1:])
        raise SplitcastError(f"test_x: images are {ours}; allowed is {theirs} as in train_x")
    if train_y.shape[1:] != test_y.shape[1:] or train_y.dtype != test_y.dtype:
        test, train = (f"{y.dtype} of {tuple(y.shape[1:])}" for y in (test_y, train_y))
        raise SplitcastError(f"test_y: targets are {test}; allowed is {train} as in train_y")
    classes = max(classes_of(train_y), classes_of(test_y))
    return Dataset(train_x, train_y, test_x, test_y, classes, name)


def classes_of(y: Tensor) -> int:
    """How many values a model must put out for targets (rows, ...): for whole numbers one per class or token, else as
    many as a target has (labels as 0 and 1, values).

    >>> classes_of(torch.tensor([0, 2])), classes_of(torch.zeros(2, 5)), classes_of(torch.tensor([0.5, 2.0]))
    (3, 5, 1)
    """
    return math.prod(y.shape[1:]) if y.is_floating_point() or y.dtype == torch.bool else max(1, int(y.max()) + 1)


def from_datasets(train: TorchDataset[Any], test: TorchDataset[Any], name: str = "custom") -> Dataset:
    """The user's own map-style datasets, whose items are (image tensor (C, H, W), integer label)."""
    return from_tensors(*_stacked("train", train), *_stacked("test", test), name=name)


def _checked(split: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _plain(f"{split}_x", x), _plain(f"{split}_y", y)
    if x.ndim != 4 or x.numel() == 0:
        raise SplitcastError(
            f"{split}_x: shape is {tuple(x.shape)}; allowed is (n, channels, height, width), none of them 0"
        )
    if y.shape[:1] != x.shape[:1] or y.numel() == 0:
        raise SplitcastError(f"{split}_y: shape is {tuple(y.shape)}; allowed is ({len(x)}, ...), one per image")
    return _finite(f"{split}_x", x.to(torch.float32)), _targets(f"{split}_y", y)


def _targets(field: str, y: Tensor) -> Tensor:
    """Whole numbers as int64, others as float32."""
    if y.is_floating_point() or y.dtype == torch.bool:
        return _finite(field, y.to(torch.float32))
    if y.dtype == torch.uint64:
        raise SplitcastError(f"{field}: type is {y.dtype}; allowed are integers of at most int64, and numbers")
    y = y.to(torch.int64)
    if (low := int(torch.where(y == IGNORE, 0, y).min())) < 0:
        raise SplitcastError(f"{field}: smallest label is {low}; allowed are 0 to classes - 1")
    if y.max() > LAST_LABEL:
        raise SplitcastError(f"{field}: largest label is {int(y.max())}; allowed are 0 to {LAST_LABEL}")
    return y


def _finite(field: str, values: Tensor) -> Tensor:
    if not all(bound.isfinite() for bound in torch.aminmax(values)):  # no mask as large as the data
        raise SplitcastError(f"{field}: holds NaN or infinite values; allowed are finite ones")
    return values


def _plain(field: str, values: Any) -> Tensor:
    """A tensor of real numbers, with all of its values in memory."""
    try:
        made = torch.as_tensor(values).detach()
    except Exception as error:  # of many kinds: texts, objects, rows of several lengths
        said = shown(" ".join(str(error).split()))
        raise SplitcastError(f"{field}: {type(values).__name__}; allowed is a tensor of numbers ({said})") from None
    if made.is_complex() or made.is_quantized or made.is_meta or made.layout != torch.strided or made.is_nested:
        raise SplitcastError(
            f"{field}: a tensor of type {made.dtype}, {made.layout} on {made.device}; allowed is a dense one of real "
            "numbers"
        )
    return made


def _stacked(split: str, dataset: TorchDataset[Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(dataset, Sized) or len(dataset) == 0:
        raise SplitcastError(f"{split}: {type(dataset).__name__} has no items; allowed is a dataset with a length")
    count = len(dataset)
    x, y = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for i in range(count):
        try:
            image, label = dataset[i]
            image, number = torch.as_tensor(image), torch.as_tensor(label)
        except Exception as error:  # of whatever kind the dataset, which is not ours, raises
            said = " ".join(str(error).split()) or type(error).__name__
            raise SplitcastError(f"{split}[{i}]: allowed is (image tensor, integer label); {said}") from error
        if i == 0:
            try:
                x, y = torch.empty((count, *image.shape)), torch.empty(count, dtype=torch.int64)
            except RuntimeError:
                raise SplitcastError(
                    f"{split}: {count} images of {tuple(image.shape)}; allowed is what the memory can hold"
                ) from None
        if image.shape != x.shape[1:] or number.ndim or number.is_floating_point() or number.is_complex():
            raise SplitcastError(
                f"{split}[{i}]: image is {tuple(image.shape)}, label is {shown(label)}; "
                f"allowed are an image of {tuple(x.shape[1:])} and one integer"
            )
        x[i], y[i] = _plain(f"{split}[{i}]", image), number
    return x, y
