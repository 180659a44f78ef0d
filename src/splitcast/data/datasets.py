"""What clients learn from, as tensors: training rows, test rows, and the natural clients of the training rows."""

import hashlib
import math
from collections.abc import Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from splitcast.base.codec import IGNORE
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.seeds import stream

if TYPE_CHECKING:
    from splitcast.data.text.sequences import Writing

ARRAYS = ("train_x", "train_y", "test_x", "test_y")
LAST_LABEL = 10**6
TEST_SHARE = 0.2
"""How many of the rows are held out, if none are given for testing."""
_PIECE = 2**24


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
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    """Natural clients by column, (n,) int64 each: to which of them, from 0 on, a training row belongs (`by:COLUMN`)."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they have any."""
    writing: "Writing | None" = None
    """How to read the samples, where they are texts."""

    @classmethod
    def of(
        cls,
        train: Any,
        test: Any = None,
        *,
        target: str = "",
        by: str | Mapping[str, ArrayLike] = "",
        task: str = "classification",
        name: str = "custom",
    ) -> "Dataset":
        """Your own data: arrays or tensors (x, y), a map-style torch Dataset of such pairs, or a pandas frame, whose
        column ``target`` is learned (as numbers if the ``task`` is regression).

        Without ``test``, a fifth of the rows is held out (`held_out`). ``by`` tells the natural clients of the training
        rows for ``partition="by:NAME"``: a column of the frame, or {NAME: (n,)}.

        >>> data = Dataset.of((np.ones((10, 1, 2, 2)), np.arange(10) % 2), by={"writer": list("aabbccddee")})
        >>> len(data.train_y), len(data.test_y), data.groups["writer"].tolist()
        (8, 2, [0, 0, 1, 2, 2, 3, 4, 4])
        """
        if hasattr(train, "columns") and hasattr(train, "iloc"):
            from splitcast.data.table import table_dataset  # which builds upon this file

            return table_dataset(train, test, target=target, by=f"{by}", task=task, name=name)
        x, y = _pair("train", train)
        if isinstance(by, str) and by:
            raise SplitcastError(
                f"by: {shown(by)} would be a column of a frame; give {{{shown(by)}: one value per row}}"
            )
        groups = {key: codes(f"by:{key}", column, len(x)) for key, column in dict(by or {}).items()}
        if test is not None:
            return replace(from_tensors(x, y, *_pair("test", test), name), groups=groups)
        strata = next(iter(groups.values()), y if y.ndim == 1 and not y.is_floating_point() else torch.zeros(len(x)))
        rows = torch.from_numpy(held_out(strata))
        made = from_tensors(x[~rows], y[~rows], x[rows], y[rows], name)
        return replace(made, groups={key: codes(f"by:{key}", group[~rows]) for key, group in groups.items()})

    def fingerprint(self) -> str:
        """Tells other data apart. Two digests: of the training targets and the first 64 rows, which is all that earlier
        versions kept, and of everything."""
        first = hashlib.blake2b(_bytes(self.train_y), digest_size=8)
        first.update(_bytes(self.train_x[:64]))
        whole = hashlib.sha256()
        parts = {name: getattr(self, name) for name in ARRAYS} | {f"by:{name}": g for name, g in self.groups.items()}
        with ThreadPoolExecutor() as threads:  # hashing lets go of the interpreter
            for name, part in sorted(parts.items()):
                content = _bytes(part)
                pieces = (content[at : at + _PIECE] for at in range(0, len(content), _PIECE))
                whole.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
                for digest in threads.map(lambda piece: hashlib.sha256(piece).digest(), pieces):
                    whole.update(digest)
        return f"{first.hexdigest()}-{whole.hexdigest()[:32]}"


def _bytes(values: Tensor) -> memoryview:
    return values.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def codes(field: str, column: ArrayLike, rows: int | None = None) -> Tensor:
    """Numbers from 0 on, (n,) int64, in the order of the sorted values of a column.

    >>> codes("by:city", ["b", "a", "b"])
    tensor([1, 0, 1])
    """
    values = np.asarray(column)
    if values.ndim != 1 or rows not in (None, len(values)):
        raise SplitcastError(f"{field}: shape is {values.shape}; allowed is ({rows},), one for every training row")
    try:
        return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))
    except TypeError:
        raise SplitcastError(f"{field}: holds values that cannot be sorted; allowed are numbers or texts") from None


def held_out(strata: ArrayLike) -> NDArray[np.bool_]:
    """Which rows are for testing, (n,): a fifth of them, from all strata alike, and of none the last row.

    Chosen at random, but always alike: neither a run's seed nor its scheme changes what it is tested on.

    >>> test, strata = held_out([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]), np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2])
    >>> strata[test].tolist()
    [0, 1]
    """
    strata = np.asarray(strata)
    order = np.lexsort((stream(0, "data", len(strata)).random(len(strata)), strata))
    free = order[np.flatnonzero(np.diff(strata[order]) == 0) + 1]  # all but one of every stratum, stratum by stratum
    count = min(len(free), max(1, round(TEST_SHARE * len(strata))))
    if not count:
        raise SplitcastError(f"data: {len(strata)} row(s) are too few to hold some out for testing; give test rows too")
    test = np.zeros(len(strata), dtype=np.bool_)
    test[free[(2 * np.arange(count) + 1) * len(free) // (2 * count)]] = True  # evenly spaced
    return test


def from_tensors(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, name: str = "custom") -> Dataset:
    """The user's own samples (n, ...), such as images (n, C, H, W), and targets: integer labels (n,), or what the task
    takes, (n, ...). Values are kept, as float32, tokens (n, T) and whole numbers of targets as int64."""
    train_x, train_y = _checked("train", train_x, train_y)
    test_x, test_y = _checked("test", test_x, test_y)
    if train_x.shape[1:] != test_x.shape[1:]:
        ours, theirs = tuple(test_x.shape[1:]), tuple(train_x.shape[1:])
        raise SplitcastError(f"test_x: samples are {ours}; allowed is {theirs} as in train_x")
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


def _pair(split: str, given: Any) -> tuple[Tensor, Tensor]:
    if isinstance(given, tuple | list) and len(given) == 2:
        x, y = _plain(f"{split}_x", given[0]), _plain(f"{split}_y", given[1])
        if not x.ndim or x.shape[:1] != y.shape[:1]:
            raise SplitcastError(
                f"{split}_y: shape is {tuple(y.shape)} for x of {tuple(x.shape)}; allowed is one per row"
            )
        return x, y
    return _stacked(split, given)


def from_datasets(train: TorchDataset[Any], test: TorchDataset[Any], name: str = "custom") -> Dataset:
    """The user's own map-style datasets, whose items are (sample, target), such as (image (C, H, W), integer)."""
    return from_tensors(*_stacked("train", train), *_stacked("test", test), name=name)


def _checked(split: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _plain(f"{split}_x", x), _plain(f"{split}_y", y)
    if x.ndim < 2 or x.numel() == 0:
        raise SplitcastError(
            f"{split}_x: shape is {tuple(x.shape)}; allowed is (n, ...), such as (n, channels, height, width), "
            "none of them 0"
        )
    if y.shape[:1] != x.shape[:1] or y.numel() == 0:
        raise SplitcastError(f"{split}_y: shape is {tuple(y.shape)}; allowed is ({len(x)}, ...), one per sample")
    return _finite(f"{split}_x", x.to(sample_dtype(x))), _targets(f"{split}_y", y)


def sample_dtype(x: Tensor) -> torch.dtype:
    """What samples (n, ...) are kept as: rows of whole numbers (n, T) are tokens and stay whole, others are float32."""
    return torch.int64 if x.ndim == 2 and x.dtype in (torch.int32, torch.int64) else torch.float32


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
    if values.is_floating_point() and not all(
        bound.isfinite() for bound in torch.aminmax(values)
    ):  # no mask as large as the data
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


def _real(values: Tensor) -> bool:
    return values.is_floating_point() or values.dtype == torch.bool


def _stacked(split: str, dataset: TorchDataset[Any]) -> tuple[Tensor, Tensor]:
    if not isinstance(dataset, Sized) or len(dataset) == 0:
        raise SplitcastError(f"{split}: {type(dataset).__name__} has no items; allowed is a dataset with a length")
    count = len(dataset)
    x, y = torch.empty(0), torch.empty(0)
    for i in range(count):
        try:
            sample, target = dataset[i]
            sample, target = torch.as_tensor(sample), torch.as_tensor(target)
        except Exception as error:  # of whatever kind the dataset, which is not ours, raises
            said = " ".join(str(error).split()) or type(error).__name__
            raise SplitcastError(f"{split}[{i}]: allowed is (sample tensor, target); {said}") from error
        sample, target = _plain(f"{split}[{i}]", sample), _plain(f"{split}[{i}]", target)
        if i == 0:
            try:
                x = torch.empty((count, *sample.shape), dtype=sample_dtype(sample[None]))
                y = torch.empty((count, *target.shape), dtype=torch.float32 if _real(target) else torch.int64)
            except RuntimeError:
                raise SplitcastError(
                    f"{split}: {count} samples of {tuple(sample.shape)}; allowed is what the memory can hold"
                ) from None
        if any(a.shape != b.shape[1:] or _real(a) > _real(b) for a, b in ((sample, x), (target, y))):
            ours, theirs = (
                " and ".join(f"{each.dtype} of {tuple(each.shape)}" for each in pair)
                for pair in ((sample, target), (x[0], y[0]))
            )
            raise SplitcastError(f"{split}[{i}]: sample and target are {ours}; allowed are {theirs}, as in {split}[0]")
        x[i], y[i] = sample, target
    return x, y
