"""What is learned: the loss of every sample, what a test reports, and what targets cost on the wire."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from splitcast.base.codec import Codec, Labels
from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry


class Task(Protocol):
    """What is learned from a model's output (rows, ...) and targets (rows, ...)."""

    headline: str
    """Name of the measure that a run is judged by, one of `metrics`."""
    target_codec: Codec

    def check(self, output_shape: tuple[int, ...]) -> None:
        """Refuse a model whose output per sample does not fit."""
        ...

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """One loss per sample, (rows,)."""
        ...

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, float]:
        """Sums over the rows, which add over batches and clients; divided by all rows they are the measures."""
        ...


class Classification:
    """One of several classes: cross-entropy, accuracy.

    >>> import torch
    >>> task, logits = Classification(2), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    >>> task.metrics(logits, torch.tensor([0, 1]))["accuracy"]
    1.0
    """

    headline = "accuracy"

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.target_codec: Codec = Labels(classes)

    def check(self, output_shape: tuple[int, ...]) -> None:
        if output_shape[-1:] < (self.classes,):
            raise SplitcastError(f"model: ends in {output_shape} values, the data has {self.classes} classes")

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, float]:
        right = int((output.argmax(1) == target).sum())
        return {"loss": float(self.losses(output, target).sum()), "accuracy": float(right)}


TASKS: Registry[type[Classification]] = Registry("task", takes=1)
TASKS["classification"] = Classification


def make_task(name: str, classes: int) -> Task:
    """The task of a name, for so many classes; ``module:function`` takes the number of classes."""
    return TASKS.find(name)(classes)
