"""Data sets by name, or by where they are."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.base.sections import DataConfig
from splitcast.data.datasets import ARRAYS, Dataset, from_tensors
from splitcast.data.folder import read_folder
from splitcast.data.npz import names_in, read_npz

EMBEDDED = Path(__file__).with_name("mnist_mini.npz")

# Mean and standard deviation of the training pixels in [0, 1], per channel. The embedded subset uses those
# of the full set, so that a model sees both alike.
MOMENTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist-mini": ((0.1307,), (0.3081,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
NAMES = tuple(MOMENTS)


def load(choice: str | DataConfig, cache: str | Path | None = None) -> Dataset:
    """Data by name, or as a configuration asks for them: `mnist-mini` (in the package), `mnist`, `fashion-mnist`,
    `cifar10`; a folder of images, a .npz file, or module:function.

    The full sets are read from the folder `cache` (see `cache_folder`), where `fetch` has put them. A function of the
    user's takes no argument and returns a `Dataset`, or tensors (train_x, train_y, test_x, test_y).
    """
    asked = DataConfig(dataset=choice) if isinstance(choice, str) else choice
    name, kind = asked.dataset, kind_of(asked.dataset)
    if kind != "folder" and asked.image_size:
        raise SplitcastError(f"image_size: {asked.image_size}, but {name} is no folder of images; leave it out")
    if kind == "named":
        return stored(name, cache)
    if kind == "folder":
        return read_folder(Path(name).expanduser(), asked.image_size, asked.labels, name)
    if kind == "npz":
        return read_arrays(Path(name).expanduser(), name)
    return called(name)


def kind_of(source: str) -> str:
    """What a source of data is.

    >>> [kind_of(source) for source in ("mnist", "data/photos", "a.npz", "my_data:load")]
    ['named', 'folder', 'npz', 'function']
    """
    if source in MOMENTS:
        return "named"
    if Path(source).suffix == ".npz":
        return "npz"
    if ":" not in source and (os.sep in source or Path(source).is_dir()):
        return "folder"
    return "function"


def read_arrays(path: Path, name: str) -> Dataset:
    """A .npz file with the `ARRAYS`, or with x and y, of which a fifth is held out for testing."""
    if not {"x", "y"} <= set(names_in(path)):
        train_x, train_y, test_x, test_y = (torch.from_numpy(array) for array in read_npz(path, ARRAYS).values())
        return from_tensors(train_x, train_y, test_x, test_y, name)
    x, y = (torch.from_numpy(array) for array in read_npz(path, ("x", "y")).values())
    return Dataset.of((x, y), name=name)


def called(name: str) -> Dataset:
    """What a function of the user's returns."""
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
