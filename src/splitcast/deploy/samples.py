"""Where a site's rows and the server's test rows come from. They are read where they are used and sent nowhere."""

import importlib
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitcast import data
from splitcast.config import Config
from splitcast.data import ImageData, from_datasets, from_tensors
from splitcast.deploy.kits import SITE_FILE
from splitcast.errors import SplitcastError
from splitcast.run import make_parts

Rows = tuple[Tensor, Tensor]


def site_rows(kit: Path, config: Config) -> Rows:
    """The rows of the site that owns this kit."""
    file = kit / SITE_FILE
    try:
        source = tomllib.loads(file.read_text(encoding="utf-8"))["data"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        raise SplitcastError(f'data: {file} must say where the data are: data = "..."') from None
    part, _, number = str(source).partition(":")
    if part == "part" and number.isdigit():
        images = data.load(config.data.dataset)
        parts = make_parts(config, images)
        if int(number) >= len(parts):
            raise SplitcastError(f"data: {source!r} is none of the {len(parts)} parts; correct {file}")
        rows = torch.from_numpy(parts[int(number)])
        return images.train_x[rows], images.train_y[rows]
    return read_rows(str(source), f"in {file}")


def server_images(source: str, config: Config) -> ImageData:
    """What the server tests with: its own rows, or those of the data set that the configuration names."""
    if not source:
        images = data.load(config.data.dataset)
        return replace(images, train_x=images.train_x[:0], train_y=images.train_y[:0])
    x, y = read_rows(source, "at [server] test")
    return ImageData(x[:0], y[:0], x, y, int(y.max()) + 1, "own")


def read_rows(source: str, where: str) -> Rows:
    """Images and labels from a .npz file with arrays x and y, or from module:function."""
    if ":" in source and Path(source).suffix != ".npz":
        return _imported(source, where)
    path = Path(source).expanduser()
    if not path.is_file():
        raise SplitcastError(f"data: {path} does not exist; put the data there, or correct the path {where}")
    stored: Any
    try:
        with np.load(path, allow_pickle=False) as stored:
            return _rows(torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SplitcastError(f"data: {path} must be a .npz file with arrays x and y: {error}") from None


def _imported(source: str, where: str) -> Rows:
    module, _, name = source.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise SplitcastError(f"data: cannot call {source!r}: {error}; correct it {where}") from None
    if isinstance(found, tuple):
        return _rows(*found)
    images = from_datasets(found, found)
    return images.train_x, images.train_y


def _rows(x: Tensor, y: Tensor) -> Rows:
    images = from_tensors(x, y, x, y)
    return images.train_x, images.train_y
