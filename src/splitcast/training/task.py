"""What is learned: the loss of every sample, what a test reports, and what targets cost on the wire.

A batch's loss is the mean of its samples' losses, and a client's share is its number of samples, whatever a sample
holds: of a sample of many positions (pixels, tokens) the loss is the mean over those that count. So a short sentence
weighs as much as a long one, and what padding there is beside it changes nothing. Measures are taken over all positions
of all samples together, as is usual: perplexity is exp(nll of all tokens / number of all tokens).
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.base.codec import IGNORE, Codec, Flags, Float, Labels
from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.training.measure import Measure, Sums, measure
from splitcast.training.positions import NextToken, Pixel
from splitcast.training.vectors import MultiLabel, Regression


class Task(Protocol):
    """What is learned from a model's output (rows, ...) and targets (rows, ...).

    A task may also have `target_shape` and `measures`, as `NextToken` does; without, targets are one number per
    sample, and measures are the sums of `metrics` divided by the number of rows.
    """

    target_codec: Codec

    @property
    def headline(self) -> str | Measure:
        """The measure that a run is judged by: its name among the measures, or a `Measure` with unit and direction."""
        ...

    def check(self, output_shape: tuple[int, ...]) -> None:
        """Refuse a model whose output per sample does not fit."""
        ...

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """One loss per sample, (rows,)."""
        ...

    def metrics(self, output: Tensor, target: Tensor) -> Sums:
        """Sums over the rows, which add over batches and clients."""
        ...


def headline_of(task: Task) -> Measure:
    """What a run of a task is judged by."""
    return measure(task.headline) if isinstance(task.headline, str) else task.headline


def target_shape(task: Task, output_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a sample's target, given that of the model's output."""
    own = getattr(task, "target_shape", None)
    return tuple(own(output_shape)) if own else ()


def measures_of(task: Task, sums: Sums, rows: int) -> dict[str, float]:
    """The measures of so many rows, from the sums of `metrics` over all of them."""
    own = getattr(task, "measures", None)
    found = dict(own(sums, rows)) if own else {name: float(total) / rows for name, total in sums.items()}
    if (name := headline_of(task).name) not in found:
        raise SplitcastError(f"task: its headline {name!r} is none of its measures, {', '.join(found)}")
    return found


def fit_targets(task: Task, y: Tensor, output_shape: tuple[int, ...], name: str) -> Tensor:
    """Targets (rows, ...) as they are trained with and sent; refuses, by ``name``, what the task cannot learn.

    >>> fit_targets(Regression(1), torch.tensor([0.5, 2.0]), (1,), "train_y").shape
    torch.Size([2, 1])
    >>> fit_targets(Classification(3), torch.tensor([0, 3]), (3,), "train_y")
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: train_y: largest label is 3; allowed are 0 to 2, as there are 3 classes
    """
    shape, codec = target_shape(task, output_shape), task.target_codec
    if tuple(y.shape[1:]) != shape:
        if isinstance(codec, Labels) or math.prod(y.shape[1:]) != math.prod(shape):
            raise SplitcastError(
                f"{name}: targets are {tuple(y.shape[1:])} per sample; for a model that puts out {output_shape}, "
                f"allowed are {shape}"
            )
        y = y.reshape(len(y), *shape)
    if isinstance(codec, Labels):
        return _labels(codec, y, name)
    if isinstance(codec, Flags) and y.numel() and not bool(((y == 0) | (y == 1)).all()):
        raise SplitcastError(f"{name}: holds something else than 0 and 1; allowed is 1 where a label holds")
    if isinstance(codec, Flags | Float):
        y = y if y.is_floating_point() else y.to(torch.float32)
        if y.numel() and not all(bool(bound.isfinite()) for bound in torch.aminmax(y)):
            raise SplitcastError(f"{name}: holds NaN or infinite values; allowed are finite ones")
    return y


def _labels(codec: Labels, y: Tensor, name: str) -> Tensor:
    if y.is_floating_point() or y.is_complex():
        raise SplitcastError(f"{name}: type is {y.dtype}; allowed are integers 0 to {codec.classes - 1}")
    y = y.to(torch.int64)
    counted = y[y != IGNORE] if codec.ignore else y
    if counted.numel():
        low, high = (int(bound) for bound in torch.aminmax(counted))
        if low < 0 or high >= codec.classes:
            which = f"smallest label is {low}" if low < 0 else f"largest label is {high}"
            beside = f", {IGNORE} where nothing counts" if codec.ignore else ""
            raise SplitcastError(
                f"{name}: {which}; allowed are 0 to {codec.classes - 1}, as there are {codec.classes} classes{beside}"
            )
    return y


class Classification:
    """One of several classes: cross-entropy, accuracy.

    >>> task, logits = Classification(2), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    >>> task.metrics(logits, torch.tensor([0, 1]))["accuracy"]
    1.0
    """

    headline = "accuracy"

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.target_codec: Codec = Labels(classes)

    def check(self, output_shape: tuple[int, ...]) -> None:
        if self.classes < 2:
            raise SplitcastError("classes: 1 in the data, at least 2 are needed; for numbers choose --task regression")
        if len(output_shape) != 1 or output_shape[0] < self.classes:
            raise SplitcastError(f"model: ends in {output_shape} values, the data has {self.classes} classes")

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def metrics(self, output: Tensor, target: Tensor) -> Sums:
        right = int((output.argmax(1) == target).sum())
        return {"loss": float(self.losses(output, target).sum()), "accuracy": float(right)}


TASKS: Registry[type[Any]] = Registry("task", takes=1)
TASKS["classification"] = Classification
TASKS["multi-label"] = MultiLabel
TASKS["regression"] = Regression
TASKS["pixel"] = Pixel
TASKS["next-token"] = NextToken


def make_task(name: str, classes: int) -> Task:
    """The task of a name, for so many classes; ``module:function`` takes the number of classes."""
    made: Task = TASKS.find(name)(classes)
    return made
