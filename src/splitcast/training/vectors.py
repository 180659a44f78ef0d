"""Tasks with several numbers per sample: labels that hold, and values."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.base.codec import FP32, Codec, Flags
from splitcast.base.errors import SplitcastError
from splitcast.training.measure import Sums, mean_ratio, ratio


class MultiLabel:
    """Any of several labels: binary cross-entropy of each, their mean per sample; a label is said to hold where its
    probability is above one half.

    The headline is the F1 score of all decisions together (micro), 2 TP / (2 TP + FP + FN). `f1_macro` is the mean of
    the F1 scores of the labels that hold or are said to hold somewhere, `label_accuracy` the share of right decisions.
    Mean average precision needs all scores at once and does not add over batches.
    """

    headline = "f1"

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.target_codec: Codec = Flags()

    def check(self, output_shape: tuple[int, ...]) -> None:
        if output_shape != (self.classes,):
            raise SplitcastError(f"model: ends in {output_shape} values, the data has {self.classes} labels")

    def target_shape(self, output_shape: tuple[int, ...]) -> tuple[int, ...]:
        return output_shape

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, target.to(output), reduction="none").mean(1)

    def metrics(self, output: Tensor, target: Tensor) -> Sums:
        said, true = output > 0, target > 0
        return {
            "loss": self.losses(output, target).sum(dtype=torch.float64),
            "both": (said & true).sum(0, dtype=torch.float64),  # (labels,) true positives
            "said": said.sum(0, dtype=torch.float64),
            "true": true.sum(0, dtype=torch.float64),
        }

    def measures(self, sums: Sums, rows: int) -> dict[str, float]:
        both, said, true = (torch.as_tensor(sums[name]) for name in ("both", "said", "true"))
        wrong = said + true - 2 * both  # false positives and false negatives
        return {
            "loss": float(sums["loss"]) / rows,
            "f1": ratio(2 * both.sum(), said.sum() + true.sum()),
            "f1_macro": mean_ratio(2 * both, said + true),
            "label_accuracy": 1 - float(wrong.sum()) / (rows * self.classes),
        }


class Regression:
    """One or more numbers: squared error, its mean over the numbers of a sample.

    The headline is the mean absolute error, in the unit of the targets; `rmse` is the root of the mean squared error,
    and `r2` what is explained of the variance, over all numbers of all samples.
    """

    headline = "mae"

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.target_codec: Codec = FP32

    def check(self, output_shape: tuple[int, ...]) -> None:
        if math.prod(output_shape) != self.classes:
            raise SplitcastError(f"model: ends in {output_shape} values, a target of the data has {self.classes}")

    def target_shape(self, output_shape: tuple[int, ...]) -> tuple[int, ...]:
        return output_shape

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.to(output).view_as(output), reduction="none").flatten(1).mean(1)

    def metrics(self, output: Tensor, target: Tensor) -> Sums:
        target = target.double().view_as(output)
        off = output - target
        return {
            "squared": off.square().sum(),
            "absolute": off.abs().sum(),
            "target": target.sum(),
            "target_squared": target.square().sum(),
        }

    def measures(self, sums: Sums, rows: int) -> dict[str, float]:
        squared, absolute, target, target_squared = (float(total) for total in sums.values())
        count = rows * self.classes
        variance = target_squared / count - (target / count) ** 2
        found = {"loss": squared / count, "mae": absolute / count, "rmse": math.sqrt(squared / count)}
        return found | ({"r2": 1 - squared / count / variance} if variance > 0 else {})
