"""Where a site's rows and the server's test rows come from. They are read where they are used and sent nowhere."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from splitcast import data
from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError, imported
from splitcast.data import Dataset, from_datasets, from_tensors
from splitcast.data.datasets import classes_of
from splitcast.data.npz import read_npz
from splitcast.deploy.local import FILE, is_function, part_number, read_local
from splitcast.run.loop import make_parts

Rows = tuple[Tensor, Tensor]


def site_rows(kit: Path, config: Config) -> Rows:
    """The rows of the site that owns this kit."""
    file, source = kit / FILE, read_local(kit).source
    number = part_number(source)
    if number is not None:
        found = data.load(config.data)
        parts = make_parts(config, found)
        if number >= len(parts):
            raise SplitcastError(f"data: {source!r} is none of the {len(parts)} parts; correct {file}")
        rows = torch.from_numpy(parts[number])
        return found.train_x[rows], found.train_y[rows]
    return read_rows(source, f"in {file}")


def server_dataset(source: str, config: Config) -> Dataset:
    """What the server tests with: its own rows, or those of the data set that the configuration names."""
    if not source:
        found = data.load(config.data)
        return replace(found, train_x=found.train_x[:0], train_y=found.train_y[:0])
    x, y = read_rows(source, f"as test in the server's {FILE}")
    return Dataset(x[:0], y[:0], x, y, classes_of(y), "own")


def read_rows(source: str, where: str) -> Rows:
    """Images and labels from a .npz file with arrays x and y, or from module:function."""
    if is_function(source):
        return _imported(source, where)
    path = Path(source).expanduser()
    if not path.is_file():
        raise SplitcastError(f"data: {path} does not exist; put the data there, or correct the path {where}")
    try:
        stored = read_npz(path, ("x", "y"))
    except SplitcastError as error:
        raise SplitcastError(f"data: {path} must be a .npz file with arrays x and y: {error}") from None
    return _rows(torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"]))


def _imported(source: str, where: str) -> Rows:
    try:
        found = imported("data", source, takes=0)()
    except (SplitcastError, TypeError) as error:
        raise SplitcastError(f"data: cannot call {source!r}: {error}; correct it {where}") from None
    if isinstance(found, tuple):
        return _rows(*found)
    made = from_datasets(found, found)
    return made.train_x, made.train_y


def _rows(x: Tensor, y: Tensor) -> Rows:
    made = from_tensors(x, y, x, y)
    return made.train_x, made.train_y
