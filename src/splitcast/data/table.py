"""Tables: .csv and .parquet files, and pandas frames.

Numbers become features, standardised by the mean and standard deviation of the training rows, truth values 0 and 1;
texts become a feature per value that the training rows have (one-hot). The target is a class number, or the number
itself where the task is regression. The column of natural clients is no feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError, shown
from splitcast.data.datasets import Dataset, classes_of, codes, held_out
from splitcast.data.npz import MOST_BYTES

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SUFFIXES = (".csv", ".parquet")
MOST_CATEGORIES = 100
"""Different texts in one column."""
MOST_FEATURES = 100_000
MOST_CELLS = 2**28
MOST_NAMES = 30
"""Columns that an error lists."""


@dataclass(frozen=True)
class Encoding:
    """How columns become features."""

    numbers: dict[str, tuple[float, float]]
    """mean and standard deviation by column"""
    texts: dict[str, list[str]]
    """values by column"""
    columns: list[str]

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(len(self.texts.get(name, "1")) for name in self.columns)

    def __call__(self, frame: "DataFrame") -> Tensor:
        """Features (n, F)."""
        x, at = np.empty((len(frame), self.width), dtype=np.float32), 0
        for name in self.columns:
            if name in self.texts:
                own = frame[name].to_numpy(dtype=object)
                for value in self.texts[name]:
                    x[:, at] = own == value
                    at += 1
            else:
                mean, std = self.numbers[name]
                x[:, at] = (frame[name].to_numpy(dtype=np.float64) - mean) / std
                at += 1
        return torch.from_numpy(x)


def read_table(path: Path) -> "DataFrame":
    """The table of a file; a file that is damaged or too large is refused before it is unpacked."""
    pandas = _pandas(f"dataset: {path}")
    if not path.is_file():
        raise SplitcastError(f"dataset: {path} is not a file")
    if path.stat().st_size > MOST_BYTES:
        raise SplitcastError(f"dataset: {path} is larger than {MOST_BYTES:,} bytes")
    try:
        if path.suffix == ".csv":
            return pandas.read_csv(path, low_memory=False, encoding="utf-8-sig")
        return _parquet(path)
    except SplitcastError:
        raise
    except Exception as error:  # of many kinds, for a file that anybody may have written
        said = shown(" ".join(str(error).split()) or type(error).__name__)
        raise SplitcastError(f"dataset: {path} must be a {path.suffix} file, whole: {said}") from None


def _parquet(path: Path) -> "DataFrame":
    from pyarrow import parquet, types

    with parquet.ParquetFile(path) as file:
        rows, schema = file.metadata.num_rows, file.schema_arrow
        if rows * len(schema) > MOST_CELLS:
            raise SplitcastError(
                f"dataset: {path} has {rows} rows of {len(schema)} columns, more than {MOST_CELLS} cells"
            )
        odd = [entry.name for entry in schema if types.is_nested(entry.type) or types.is_large_binary(entry.type)]
        if odd:
            raise SplitcastError(f"dataset: {path} has column {shown(odd[0])}, not of numbers or texts")
        texts = [entry.name for entry in schema if types.is_string(entry.type) or types.is_large_string(entry.type)]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:  # a long text that is often there is held once
        frame: DataFrame = file.read().to_pandas()
        return frame


def table_dataset(
    train: "DataFrame",
    test: "DataFrame | None",
    *,
    target: str,
    by: str = "",
    task: str = "classification",
    labels: Sequence[str] = (),
    name: str = "custom",
) -> Dataset:
    """A data set out of training and test rows, or out of rows of which a fifth is held out (`held_out`)."""
    pandas = _pandas("dataset: a frame")
    check_columns(train, target, by)
    frame = train.set_axis([str(column) for column in train.columns], axis=1)
    if test is not None:
        check_columns(test, target, "")
        other = set(map(str, test.columns)) ^ set(frame.columns)
        if other - {by}:
            raise SplitcastError(f"test: column {shown(min(other - {by}))} is in the training or in the test rows only")
        frame = pandas.concat([frame, test.set_axis([str(column) for column in test.columns], axis=1)])
    y, names = targets(frame[target], task, labels)
    if not y.is_floating_point() and bool((y == y[0]).all()):
        raise SplitcastError(f"target: column {shown(target)} has one class only; at least 2 are needed")
    group = codes(f"by:{by}", frame[by].to_numpy()) if by and test is None else None
    if test is not None:
        rows = np.arange(len(frame)) >= len(train)
    else:
        rows = held_out(group if group is not None else torch.zeros(len(y)) if y.is_floating_point() else y)
    encode = encoding(frame[~rows], leave_out=(target, by))
    groups = {by: codes(f"by:{by}", frame[by].to_numpy()[~rows])} if by else {}
    mine = torch.from_numpy(rows)
    train_x, test_x = encode(frame[~rows]), encode(frame[rows])
    classes = max(len(names), classes_of(y))
    return Dataset(train_x, y[~mine], test_x, y[mine], classes, name, groups, names)


def table_rows(frame: "DataFrame", target: str, by: str, task: str, labels: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Features and targets of all rows, as they are: for a table that is a part of what is learned from, so that
    neither its mean nor its categories nor its classes are those of the whole."""
    check_columns(frame, target, "")
    frame = frame.set_axis([str(column) for column in frame.columns], axis=1)
    made = encoding(frame, leave_out=(target, by))
    if made.texts:
        raise SplitcastError(
            f"data: column {shown(next(iter(made.texts)))} holds texts, and other sites may have others; make them "
            "numbers"
        )
    as_they_are = Encoding(dict.fromkeys(made.columns, (0.0, 1.0)), {}, made.columns)
    column = frame[target]
    if task != "regression" and not labels and column.dtype.kind in "iu":
        return as_they_are(frame), torch.from_numpy(column.to_numpy(dtype=np.int64, copy=True))
    y, _ = targets(column, task, labels)
    if not labels and not y.is_floating_point():
        raise SplitcastError(
            f"labels: not given, but column {shown(target)} holds names of classes; give all, in order"
        )
    return as_they_are(frame), y


def check_columns(frame: "DataFrame", target: str, by: str) -> None:
    """Refuse a table that lacks a column, has one twice, or a value missing."""
    names = [str(name) for name in frame.columns]
    listed = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    twice = [name for name, count in zip(*np.unique(names, return_counts=True), strict=True) if count > 1]
    if twice:
        raise SplitcastError(f"dataset: column {shown(twice[0])} is there twice")
    if not target:
        raise SplitcastError(f"target: not given; choose the column to learn out of {listed}")
    for field, name in (("target", target), ("partition", by)):
        if name and name not in names:
            raise SplitcastError(f"{field}: there is no column {shown(name)}; the columns are {listed}")
    if not len(frame):
        raise SplitcastError("dataset: the table has no rows")
    if len(frame) * len(names) > MOST_CELLS:
        raise SplitcastError(f"dataset: {len(frame)} rows of {len(names)} columns, more than {MOST_CELLS} cells")
    for name in names:
        bad = frame[name].isna().to_numpy()
        if frame[name].dtype.kind == "f":
            bad = bad | ~np.isfinite(frame[name].to_numpy(dtype=np.float64))
        if bad.any():
            row = int(bad.argmax())
            raise SplitcastError(
                f"dataset: row {row + 1}, column {shown(name)} is missing or not finite; fill it in, or leave the row "
                "out"
            )


def encoding(frame: "DataFrame", leave_out: Sequence[str]) -> Encoding:
    """How the columns of training rows become features."""
    numbers: dict[str, tuple[float, float]] = {}
    texts: dict[str, list[str]] = {}
    columns = [name for name in frame.columns if name not in leave_out]
    for name in columns:
        column = frame[name]
        if column.dtype.kind == "b":
            numbers[name] = 0.0, 1.0
        elif column.dtype.kind in "iuf":
            values = column.to_numpy(dtype=np.float64)
            numbers[name] = float(values.mean()), float(values.std()) or 1.0
        else:
            texts[name] = _categories(name, column)
    made = Encoding(numbers, texts, columns)
    if not 1 <= made.width <= MOST_FEATURES or 4 * made.width * len(frame) > MOST_BYTES:
        raise SplitcastError(
            f"dataset: {made.width} features of {len(frame)} rows; allowed are 1 to {MOST_FEATURES}, together at most "
            f"{MOST_BYTES:,} bytes"
        )
    return made


def _categories(name: str, column: "Series[Any]") -> list[str]:
    found = column.unique().tolist()
    other = [value for value in found if not isinstance(value, str)]
    if other:
        raise SplitcastError(
            f"dataset: column {shown(name)} holds {type(other[0]).__name__}; allowed are numbers, truth values, texts"
        )
    if len(found) > MOST_CATEGORIES:
        raise SplitcastError(
            f"dataset: column {shown(name)} has {len(found)} different texts, at most {MOST_CATEGORIES} are allowed; "
            "leave it out"
        )
    return sorted(found)


def targets(column: "Series[Any]", task: str, labels: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """What is learned, and the names of its classes: numbers (n,) as float32 if the task is regression, or if they are
    not whole and the task is not classification; else class numbers (n,), in the order of ``labels`` or of the sorted
    values."""
    name, kind = str(column.name), column.dtype.kind
    whole = kind in "iub" or (kind == "f" and bool((column == column.round()).all()))
    if task == "regression" or (kind == "f" and not whole):
        if kind not in "iufb":
            raise SplitcastError(f"target: column {shown(name)} holds no numbers, which the task regression needs")
        if task == "classification":
            odd = column[column != column.round()].iloc[0]
            raise SplitcastError(
                f"target: column {shown(name)} holds {odd:g}, which is no class; choose --task regression, or a column "
                "of texts or whole numbers"
            )
        return torch.from_numpy(column.to_numpy(dtype=np.float32, copy=True)), ()
    try:
        found, y = np.unique(column.to_numpy(dtype=np.int64 if whole else object), return_inverse=True)
    except TypeError:
        raise SplitcastError(f"target: column {shown(name)} holds values of several kinds; allowed is one") from None
    names = tuple(str(value) for value in found)
    unknown = [value for value in names if value not in labels] if labels else []
    if unknown:
        raise SplitcastError(f"target: column {shown(name)} has {unknown[0]}, none of the classes {', '.join(labels)}")
    places = np.array([labels.index(value) for value in names]) if labels else np.arange(len(names))
    return torch.from_numpy(places[y]), tuple(labels) or names


def _pandas(field: str) -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401
    except ImportError:
        raise SplitcastError(f"{field} is a table; install what reads it: pip install 'splitcast[tables]'") from None
    return pandas
