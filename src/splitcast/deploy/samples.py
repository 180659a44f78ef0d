"""Where a site's rows and the server's test rows come from. They are read where they are used and sent nowhere."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError, imported
from splitcast.data import Dataset, from_datasets, from_tensors
from splitcast.data.datasets import classes_of
from splitcast.data.loading import Rows as Loaded
from splitcast.data.loading import class_names, kind_of, load_rows
from splitcast.deploy.local import FILE, is_function, part_number, read_local
from splitcast.run.parts import load_data, make_parts, with_clients

Rows = tuple[Tensor, Tensor]


def site_rows(kit: Path, config: Config) -> Rows:
    """The rows of the site that owns this kit."""
    file, source = kit / FILE, read_local(kit).source
    number = part_number(source)
    if number is not None:
        found = load_data(config)
        parts = make_parts(with_clients(config, found), found)
        if number >= len(parts):
            raise SplitcastError(f"data: {source!r} is none of the {len(parts)} parts; correct {file}")
        rows = torch.from_numpy(parts[number])
        return found.train_x[rows], found.train_y[rows]
    if kind_of(source) == kind_of(config.data.dataset) == "table":
        raise SplitcastError(
            f"data: the server tests with {config.data.dataset}, whose numbers are standardised, those of {source} are "
            "not; give the server test rows of its own"
        )
    return read_rows(source, f"in {file}", config)[:2]


def server_dataset(source: str, config: Config) -> Dataset:
    """What the server tests with: its own rows, or those of the data set that the configuration names."""
    if not source:
        found = load_data(config)
        return replace(found, train_x=found.train_x[:0], train_y=found.train_y[:0], groups={})
    labels: tuple[str, ...] = ()
    if not is_function(source):
        labels = class_names(with_values(config, dataset=source).data, config.model.task)
    x, y, outputs = read_rows(source, f"as test in the server's {FILE}", with_values(config, labels=labels))
    return Dataset(x[:0], y[:0], x, y, outputs or max(len(labels), classes_of(y)), "own", labels=labels)


def read_rows(source: str, where: str, config: Config) -> Loaded:
    """Samples and targets from a folder of images, a .npz file with arrays x and y, a table, texts, or
    module:function."""
    if is_function(source):
        return _imported(source, where)
    path = Path(source).expanduser()
    if not path.exists():
        raise SplitcastError(f"data: {path} does not exist; put the data there, or correct the path {where}")
    try:
        return load_rows(with_values(config, dataset=source).data, config.model.task, config.model.arch)
    except SplitcastError as error:
        raise SplitcastError(f"data: cannot read {path} {where}: {error}") from None


def _imported(source: str, where: str) -> Loaded:
    try:
        found = imported("data", source, takes=0)()
    except (SplitcastError, TypeError) as error:
        raise SplitcastError(f"data: cannot call {source!r}: {error}; correct it {where}") from None
    if isinstance(found, tuple):
        return _rows(*found)
    made = from_datasets(found, found)
    return Loaded(made.train_x, made.train_y)


def _rows(x: Tensor, y: Tensor) -> Loaded:
    made = from_tensors(x, y, x, y)
    return Loaded(made.train_x, made.train_y)
