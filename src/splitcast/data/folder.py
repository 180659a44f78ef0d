"""Images in a folder with a sub-folder per class."""

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.data.datasets import Dataset, held_out
from splitcast.data.npz import MOST_BYTES

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""Other files are passed over."""
GREY = ("1", "L", "LA", "I;16")
"""Modes of images without colour."""
MOST_PIXELS = 2**26
"""Of one image, which is unpacked as a whole."""


class Format(NamedTuple):
    """What all images are turned into."""

    mode: str
    width: int
    height: int
    resize: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)"""
        return 1 if self.mode == "L" else 3, self.height, self.width


def read_folder(path: Path, size: int, labels: Sequence[str], name: str) -> Dataset:
    """Images of a folder that has the sub-folders `train` and `test`, each with a sub-folder per class, or a sub-folder
    per class at once; then a fifth of every class is held out for testing (`held_out`).

    Classes are numbered in the order of ``labels``, or of their sorted names. Pixels are scaled to [-1, 1], one channel
    if all images are grey, else three. With a ``size``, images are cut to their middle square and resized to it;
    without (0) all must be of one size.
    """
    split = [path / part for part in ("train", "test")]
    parts = split if all(part.is_dir() for part in split) else [path]
    labels = tuple(labels) or folder_names(*parts)
    listed = [list_images(part, labels) for part in parts]
    if len(set(listed[0][1])) < 2:
        raise SplitcastError(f"dataset: {parts[0]} has images of one class only; at least 2 classes are needed")
    files, y = [file for part in listed for file in part[0]], torch.cat([torch.tensor(part[1]) for part in listed])
    test = torch.arange(len(y)) >= len(listed[0][1]) if len(listed) == 2 else torch.from_numpy(held_out(y))
    form = common_format(files, size)
    train_x, test_x = (
        read_images([file for file, mine in zip(files, rows.tolist(), strict=True) if mine], form)
        for rows in (~test, test)
    )
    return Dataset(train_x, y[~test], test_x, y[test], len(labels), name, labels=labels)


def folder_names(*paths: Path) -> tuple[str, ...]:
    """The classes that these folders have sub-folders for."""
    found = sorted({name for path in paths for name in _folders(path)})
    if len(found) < 2:
        raise SplitcastError(
            f"dataset: {paths[0]} has {len(found)} sub-folder(s); at least 2 are needed, one per class"
        )
    return tuple(found)


def list_images(path: Path, labels: Sequence[str]) -> tuple[list[Path], list[int]]:
    """The images below a folder and their classes; a class may have none, an unknown one is refused."""
    unknown = [name for name in _folders(path) if name not in labels]
    if unknown:
        raise SplitcastError(f"dataset: {path / unknown[0]} is none of the classes {', '.join(labels)}")
    files: list[Path] = []
    y: list[int] = []
    for number, label in enumerate(labels):
        own = sorted(file for file in (path / label).glob("[!.]*") if file.suffix.lower() in SUFFIXES)
        files += own
        y += [number] * len(own)
    if not files:
        raise SplitcastError(f"dataset: {path} has no images in its sub-folders; allowed are {', '.join(SUFFIXES)}")
    return files, y


def common_format(files: Sequence[Path], size: int) -> Format:
    """What images are turned into, from their headers alone; refused where they differ or are too large together."""
    sizes, modes = zip(*map(_header, files), strict=True)
    other = next((i for i, each in enumerate(sizes) if each != sizes[0]), None)
    if other is not None and not size:
        (w, h), (w2, h2) = sizes[0], sizes[other]
        raise SplitcastError(
            f"image_size: {files[0]} is {w} x {h}, {files[other]} is {w2} x {h2}; choose a size for all, such as 32"
        )
    width, height = (size, size) if size else sizes[0]
    form = Format("L" if all(mode in GREY for mode in modes) else "RGB", width, height, size > 0)
    total = 4 * len(files) * math.prod(form.shape)
    if total > MOST_BYTES:
        raise SplitcastError(
            f"image_size: {len(files)} images of {width} x {height} take {total:,} bytes, at most {MOST_BYTES:,} are "
            "allowed; choose a smaller size"
        )
    return form


def read_images(files: Sequence[Path], form: Format) -> Tensor:
    """Images (n, C, H, W) in [-1, 1]."""
    x = torch.empty(len(files), *form.shape)
    for i, file in enumerate(files):
        x[i] = torch.from_numpy(_pixels(file, form))
    return x.mul_(2).sub_(1)


def _folders(path: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise SplitcastError(f"dataset: cannot read {path}: {error.strerror}") from None


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """An image, of which only the header has been read; whatever goes wrong with it is one line with its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are odd but can be read
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width} x {image.height}, more than {MOST_PIXELS:,} pixels")
                yield image
    except Exception as error:  # of many kinds, for a file that anybody may have written
        said = " ".join(str(error).split()).replace(f"{str(file)!r}", "the file") or type(error).__name__
        raise SplitcastError(f"dataset: {file} cannot be read as an image: {said}") from None


def _header(file: Path) -> tuple[tuple[int, int], str]:
    """Width and height as the image is meant to be seen, and mode."""
    with _opened(file) as image:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # by a quarter
        return (image.size[::-1] if turned else image.size), image.mode


def _pixels(file: Path, form: Format) -> NDArray[np.float32]:
    """Pixels (C, H, W) in [0, 1]."""
    with _opened(file) as image:
        if form.resize:
            image.draft(form.mode, (2 * form.width, 2 * form.height))  # a large JPEG need not be unpacked in full
        seen = ImageOps.exif_transpose(image)
        if seen.mode == "I;16":  # which `convert` would clip
            seen = Image.fromarray((np.asarray(seen) / 257).round().astype(np.uint8))
        seen = seen.convert(form.mode)
        if form.resize:
            seen = ImageOps.fit(seen, (form.width, form.height), Image.Resampling.BILINEAR)
        pixels = np.asarray(seen, dtype=np.float32) / np.float32(255)
        return pixels.reshape(form.height, form.width, -1).transpose(2, 0, 1)
