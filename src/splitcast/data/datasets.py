"""Image datasets as tensors: by name, or from the user's own data."""

import hashlib
import os
import zipfile
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from splitcast.errors import SplitcastError, one_of

EMBEDDED = Path(__file__).with_name("mnist_mini.npz")
ARRAYS = ("train_x", "train_y", "test_x", "test_y")  # what a stored dataset holds, uint8

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
class ImageData:
    """Labelled images, split into training and test rows.

    Named sets hold pixels scaled to [0, 1] and then standardised, (x - mean) / std with one mean and
    standard deviation per channel (`MOMENTS`); the user's own data are kept as given.
    """

    train_x: Tensor  # (n, C, H, W) float32
    train_y: Tensor  # (n,) int64, in [0, classes)
    test_x: Tensor  # (m, C, H, W) float32
    test_y: Tensor  # (m,) int64, in [0, classes)
    classes: int
    name: str

    def fingerprint(self) -> str:
        """Tells other training data apart: all labels and the first images, in a few letters."""
        digest = hashlib.blake2b(self.train_y.numpy().tobytes(), digest_size=8)
        digest.update(self.train_x[:64].contiguous().numpy().tobytes())
        return digest.hexdigest()


def load(name: str, cache: str | Path | None = None) -> ImageData:
    """Dataset by name: `mnist-mini` (in the package), `mnist`, `fashion-mnist` or `cifar10`.

    The full sets are read from the folder `cache` (see `cache_folder`), where `fetch` has put them.
    """
    one_of("dataset", name, NAMES)
    path = EMBEDDED if name == "mnist-mini" else cache_folder(cache) / f"{name}.npz"
    if not path.exists():
        raise SplitcastError(f"dataset = {name!r}: not in {path.parent}; get it with: splitcast data get {name}")
    try:
        return _read(path, name)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SplitcastError(
            f"dataset = {name!r}: {path} is damaged ({error}); get it again with: splitcast data get {name}"
        ) from error


def cache_folder(cache: str | Path | None = None) -> Path:
    """Where full datasets live: `cache`, else $SPLITCAST_DATA, else ~/.cache/splitcast."""
    return Path(cache or os.environ.get("SPLITCAST_DATA") or "~/.cache/splitcast").expanduser()


def _read(path: Path, name: str) -> ImageData:
    """Stored uint8 arrays -> tensors, one array at a time and in place, so that little is held twice."""
    mean, std = (255 * torch.tensor(m).view(-1, 1, 1) for m in MOMENTS[name])  # (C, 1, 1)

    def images(key: str) -> Tensor:
        return torch.from_numpy(stored[key]).to(torch.float32).sub_(mean).div_(std)

    def labels(key: str) -> Tensor:
        return torch.from_numpy(stored[key]).to(torch.int64)

    stored: Any
    with np.load(path, allow_pickle=False) as stored:
        train_y, test_y = labels("train_y"), labels("test_y")
        classes = int(train_y.max()) + 1
        return ImageData(images("train_x"), train_y, images("test_x"), test_y, classes, name)


def from_tensors(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, name: str = "custom") -> ImageData:
    """The user's own images (n, C, H, W) and integer labels (n,); values are kept, as float32 and int64."""
    train_x, train_y = _checked("train", train_x, train_y)
    test_x, test_y = _checked("test", test_x, test_y)
    if train_x.shape[1:] != test_x.shape[1:]:
        ours, theirs = tuple(test_x.shape[1:]), tuple(train_x.shape[1:])
        raise SplitcastError(f"test_x: images are {ours}; allowed is {theirs} as in train_x")
    classes = int(max(train_y.max(), test_y.max())) + 1
    return ImageData(train_x, train_y, test_x, test_y, classes, name)


def from_datasets(train: Dataset[Any], test: Dataset[Any], name: str = "custom") -> ImageData:
    """The user's own map-style datasets, whose items are (image tensor (C, H, W), integer label)."""
    return from_tensors(*_stacked("train", train), *_stacked("test", test), name=name)


def _checked(split: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    if x.ndim != 4 or x.numel() == 0:
        raise SplitcastError(
            f"{split}_x: shape is {tuple(x.shape)}; allowed is (n, channels, height, width), none of them 0"
        )
    if y.shape != x.shape[:1]:
        raise SplitcastError(f"{split}_y: shape is {tuple(y.shape)}; allowed is ({len(x)},), one per image")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise SplitcastError(f"{split}_y: type is {y.dtype}; allowed are integers 0 to classes - 1")
    if y.min() < 0:
        raise SplitcastError(f"{split}_y: smallest label is {int(y.min())}; allowed are 0 to classes - 1")
    x = x.to(torch.float32)
    if not all(bound.isfinite() for bound in torch.aminmax(x)):  # no mask as large as the data
        raise SplitcastError(f"{split}_x: holds NaN or infinite values; allowed are finite ones")
    return x, y.to(torch.int64)


def _stacked(split: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(dataset, Sized) or len(dataset) == 0:
        raise SplitcastError(f"{split}: {type(dataset).__name__} has no items; allowed is a dataset with a length")
    x, y = torch.empty(0), torch.empty(len(dataset), dtype=torch.int64)
    for i in range(len(dataset)):
        try:
            image, label = dataset[i]
            image, number = torch.as_tensor(image), torch.as_tensor(label)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SplitcastError(f"{split}[{i}]: allowed is (image tensor, integer label); {error}") from error
        if i == 0:
            x = torch.empty((len(dataset), *image.shape))
        if image.shape != x.shape[1:] or number.ndim or number.is_floating_point():
            raise SplitcastError(
                f"{split}[{i}]: image is {tuple(image.shape)}, label is {label!r}; "
                f"allowed are an image of {tuple(x.shape[1:])} and one integer"
            )
        x[i], y[i] = image, number
    return x, y
