"""Data sets by name, or by where they are."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.base.sections import DataConfig
from splitcast.data.datasets import ARRAYS, Dataset, from_tensors
from splitcast.data.folder import SUFFIXES as IMAGES
from splitcast.data.folder import common_format, folder_names, list_images, read_folder, read_images
from splitcast.data.npz import names_in, read_npz, stored_array
from splitcast.data.partition import natural_column
from splitcast.data.table import SUFFIXES, check_columns, read_table, table_dataset, table_rows, targets
from splitcast.data.text import corpus
from splitcast.data.text.packages import TEXTS
from splitcast.data.text.sequences import labels_of, text_dataset, text_rows
from splitcast.data.text.tokens import Tokenizer, find_tokenizer, tokens_of

EMBEDDED = Path(__file__).with_name("mnist_mini.npz")
EMBEDDED_TEXT = Path(__file__).with_name("text_mini.jsonl")

# Mean and standard deviation of the training pixels in [0, 1], per channel. The embedded subset uses those
# of the full set, so that a model sees both alike.
MOMENTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist-mini": ((0.1307,), (0.3081,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
NAMES = tuple(MOMENTS)
TEXT_NAMES = ("text-mini", *TEXTS)
NUMBERS = ("regression", "multi-label")
"""Tasks whose targets are no classes, even if they are whole numbers."""


def load(
    choice: str | DataConfig, cache: str | Path | None = None, task: str = "classification", arch: str = ""
) -> Dataset:
    """Data by name, or as a configuration asks for them: `mnist-mini` (in the package), `mnist`, `fashion-mnist`,
    `cifar10`; a folder of images, a .npz, .csv or .parquet file, or module:function; texts: `text-mini` (in the
    package), `sotu`, `moby-dick`, `kjv`, `spam-assassin`, a .txt, .md or .jsonl file, a folder of such files. The
    ``task`` tells whether whole numbers are classes, ``arch``, the model, how texts become tokens.

    The full sets are read from the folder `cache` (see `cache_folder`), where `fetch` has put them. A function of the
    user's takes no argument and returns a `Dataset`, or tensors (train_x, train_y, test_x, test_y).
    """
    asked = DataConfig(dataset=choice) if isinstance(choice, str) else choice
    name, kind = asked.dataset, kind_of(asked.dataset)
    if kind != "folder" and asked.image_size:
        raise SplitcastError(f"image_size: {asked.image_size}, but {name} is no folder of images; leave it out")
    if kind not in ("table", "text") and asked.target:
        raise SplitcastError(f"target: {asked.target!r}, but {name} is no table; leave it out")
    path, by = Path(name).expanduser(), natural_column(asked.partition)
    if kind == "named":
        return stored(name, cache)
    if kind == "text":
        documents, tokenizer = read_text(name, cache), find_tokenizer(asked.tokenizer, arch, cache_folder(cache))
        return text_dataset(documents, _tokens(documents, tokenizer, cache), tokenizer, asked, task)
    if kind == "folder":
        return read_folder(path, asked.image_size, asked.labels, name)
    if kind == "npz":
        return read_arrays(path, by, task, name)
    if kind == "table":
        frame = read_table(path)
        return table_dataset(frame, None, target=asked.target, by=by, task=task, labels=asked.labels, name=name)
    return called(name)


class Rows(NamedTuple):
    """Samples and targets without a division into training and test."""

    x: Tensor
    y: Tensor
    outputs: int = 0
    """What a model puts out for each, where that is not told by the targets: the tokens there are."""


def load_rows(asked: DataConfig, task: str, arch: str = "") -> Rows:
    """All rows of a folder or file that holds a part of what is learned from, as on a site: values are kept, and
    classes have the numbers that ``labels`` gives them, since none of it may depend on which rows happen to be here."""
    path, kind = Path(asked.dataset).expanduser(), kind_of(asked.dataset)
    if kind == "folder":
        if not asked.labels:
            raise SplitcastError(f"labels: not given, but {path} has sub-folders for classes; give all names, in order")
        files, classes = list_images(path, asked.labels)
        return Rows(read_images(files, common_format(files, asked.image_size)), torch.tensor(classes))
    if kind == "text":
        documents, tokenizer = read_text(asked.dataset), find_tokenizer(asked.tokenizer, arch, cache_folder())
        if task == "classification" and not asked.labels:
            raise SplitcastError(f"labels: not given, but {path} has names of classes; give all names, in order")
        x, y, _, names = text_rows(documents, _tokens(documents, tokenizer), tokenizer, asked, task)
        return Rows(x, y, len(names) or tokenizer.size)
    if kind == "table":
        by = natural_column(asked.partition)
        return Rows(*table_rows(read_table(path), asked.target, by, task, asked.labels))
    x, y = (torch.from_numpy(array) for array in read_npz(path, ("x", "y")).values())
    made = from_tensors(x, y, x, y)
    return Rows(made.train_x, made.train_y)


def class_names(asked: DataConfig, task: str) -> tuple[str, ...]:
    """The names of the classes: given, or those found in a folder or a table; none where classes are numbers."""
    if asked.labels or kind_of(asked.dataset) not in ("folder", "table", "text"):
        return asked.labels
    path = Path(asked.dataset).expanduser()
    if kind_of(asked.dataset) == "text":
        return labels_of(read_text(asked.dataset), asked)[0] if task == "classification" else ()
    if kind_of(asked.dataset) == "folder":
        return folder_names(path)
    frame = read_table(path)
    check_columns(frame, asked.target, "")
    return targets(frame[asked.target], task, ())[1]


def kind_of(source: str) -> str:
    """What a source of data is.

    >>> [kind_of(source) for source in ("mnist", "data/photos", "a.npz", "b.csv", "my_data:load", "kjv", "c.txt")]
    ['named', 'folder', 'npz', 'table', 'function', 'text', 'text']
    """
    if source in MOMENTS:
        return "named"
    if source in TEXT_NAMES or Path(source).suffix in corpus.SUFFIXES:
        return "text"
    if Path(source).suffix in SUFFIXES:
        return "table"
    if Path(source).suffix == ".npz" or Path(source).is_file():
        return "npz"
    if os.sep in source or (":" not in source and Path(source).is_dir()):
        return "text" if _of_texts(Path(source).expanduser()) else "folder"
    return "function"


def _of_texts(folder: Path) -> bool:
    """Whether a folder has texts and no images in its sub-folders."""
    images = (file for file in folder.glob("*/**/*") if file.suffix.lower() in IMAGES)
    return any(corpus.text_files(folder)) and not any(images)


def read_arrays(path: Path, by: str, task: str, name: str) -> Dataset:
    """A .npz file with the `ARRAYS`, or with x and y, of which a fifth is held out for testing; ``by`` names an array
    that tells the client of every training row."""
    keys = ("x", "y") if {"x", "y"} <= set(names_in(path)) else ARRAYS
    found = read_npz(path, [*keys, *([by] if by else [])])
    if task in NUMBERS:
        found |= {key: found[key].astype(np.float32) for key in keys if key.endswith("y")}
    x, y, *test = (torch.from_numpy(found[key]) for key in keys)
    return Dataset.of((x, y), test or None, by={by: found[by]} if by else {}, name=name)


def read_text(source: str, cache: str | Path | None = None) -> list[corpus.Document]:
    """The documents of a set by name, a file or a folder."""
    if source not in TEXT_NAMES:
        return corpus.read_corpus(Path(source).expanduser())
    path = EMBEDDED_TEXT if source == "text-mini" else cache_folder(cache) / TEXTS[source].file(source)
    if source in TEXTS and not TEXTS[source].is_whole(path):
        why = f"{path} is damaged" if path.exists() else f"not in {path.parent}"
        raise SplitcastError(f"dataset = {source!r}: {why}; get it with: splitcast data get {source}")
    return corpus.read_corpus(path)


def _tokens(
    documents: list[corpus.Document], tokenizer: Tokenizer, cache: str | Path | None = None
) -> list[NDArray[np.uint32]]:
    return tokens_of([document.text for document in documents], tokenizer, cache_folder(cache))


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
    if name == "mnist-mini":
        data = _embedded()
        return replace(data, **{key: getattr(data, key).clone() for key in ARRAYS})
    path = cache_folder(cache) / f"{name}.npz"
    if not path.exists():
        raise SplitcastError(f"dataset = {name!r}: not in {path.parent}; get it with: splitcast data get {name}")
    try:
        return _read(path, name)
    except SplitcastError as error:
        raise SplitcastError(
            f"dataset = {name!r}: {path} is damaged ({error}); get it again with: splitcast data get {name}"
        ) from error


@functools.cache
def _embedded() -> Dataset:
    """Read once in a process: it is small, and many short trainings begin with it."""
    return _read(EMBEDDED, "mnist-mini")


Loader = Callable[[], Dataset | tuple[Tensor, Tensor, Tensor, Tensor]]
DATASETS = Registry[Loader](
    "dataset",
    takes=0,
    entries={name: partial(stored, name) for name in NAMES},
    forms=(*TEXT_NAMES, "a folder", "a .npz, .csv, .parquet, .txt, .md or .jsonl file"),
)


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
