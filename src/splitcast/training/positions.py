"""Tasks with a class at every position of a sample: pixels, tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.base.codec import IGNORE, Codec, Labels
from splitcast.base.errors import SplitcastError
from splitcast.training.measure import Sums, mean_ratio, ratio


class Positions:
    """One of several classes at every position of a sample; `IGNORE` where nothing is known."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.target_codec: Codec = Labels(classes, ignore=True)

    @staticmethod
    def nll(output: Tensor, target: Tensor) -> Tensor:
        """-log p of every target, 0 where it is ignored."""
        return F.cross_entropy(output, target, ignore_index=IGNORE, reduction="none")

    @staticmethod
    def said(output: Tensor) -> Tensor:
        """The most likely class at every position."""
        return output.argmax(1)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        nll, counted = self._sums(output, target)
        return nll / counted.clamp(min=1)

    def metrics(self, output: Tensor, target: Tensor) -> Sums:
        nll, counted = (each.double() for each in self._sums(output, target))
        return {
            "loss": (nll / counted.clamp(min=1)).sum(),
            "nll": nll.sum(),
            "counted": counted.sum(),
            "right": (self.said(output) == target).sum().double(),  # never where it is ignored
        }

    def _sums(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Of each sample: the sum of -log p over the positions that count, and how many these are, (rows,)."""
        return self.nll(output, target).flatten(1).sum(1), (target != IGNORE).flatten(1).sum(1)


class Pixel(Positions):
    """One of several classes for every pixel: logits (classes, H, W), targets (H, W); cross-entropy.

    The headline is the share of pixels that are right; `mean_iou` is the mean over the classes that are there or said
    to be there of intersection / union, over all images together.
    """

    headline = "accuracy"

    def check(self, output_shape: tuple[int, ...]) -> None:
        if len(output_shape) < 2 or output_shape[0] < self.classes:
            raise SplitcastError(
                f"model: ends in {output_shape}; allowed is (classes, height, width), the data has {self.classes} "
                "classes"
            )

    def target_shape(self, output_shape: tuple[int, ...]) -> tuple[int, ...]:
        return output_shape[1:]

    def metrics(self, output: Tensor, target: Tensor) -> Sums:
        counted, classes = target != IGNORE, output.shape[1]
        said, true = output.argmax(1)[counted], target[counted]
        pixels = {"both": true[said == true], "said": said, "true": true}
        return {
            **super().metrics(output, target),
            **{name: torch.bincount(of, minlength=classes).double() for name, of in pixels.items()},  # (classes,)
        }

    def measures(self, sums: Sums, rows: int) -> dict[str, float]:
        both, said, true = (torch.as_tensor(sums[name]) for name in ("both", "said", "true"))
        return {
            "loss": float(sums["loss"]) / rows,
            "accuracy": ratio(sums["right"], sums["counted"]),
            "mean_iou": mean_ratio(both, said + true - both),
        }


class NextToken(Positions):
    """The token after each: logits (T, tokens), targets (T,), which are the tokens shifted (`next_tokens`);
    cross-entropy.

    The headline is the perplexity, exp(nll of all tokens / number of all tokens) with padding left out of both.
    """

    headline = "perplexity"

    @staticmethod
    def nll(output: Tensor, target: Tensor) -> Tensor:
        flat = output.flatten(0, 1)  # a vocabulary lies together: transposed, it would be copied
        return F.cross_entropy(flat, target.flatten(), ignore_index=IGNORE, reduction="none").view_as(target)

    @staticmethod
    def said(output: Tensor) -> Tensor:
        return output.argmax(-1)

    def check(self, output_shape: tuple[int, ...]) -> None:
        if len(output_shape) != 2 or output_shape[1] < self.classes:
            raise SplitcastError(
                f"model: ends in {output_shape}; allowed is (positions, tokens), the data has {self.classes} tokens"
            )

    def target_shape(self, output_shape: tuple[int, ...]) -> tuple[int, ...]:
        return output_shape[:1]

    def measures(self, sums: Sums, rows: int) -> dict[str, float]:
        nll = ratio(sums["nll"], sums["counted"])
        return {
            "loss": float(sums["loss"]) / rows,
            "perplexity": math.exp(nll) if nll < 700 else math.inf,
            "accuracy": ratio(sums["right"], sums["counted"]),
        }


def next_tokens(tokens: Tensor, padding: int | None = None) -> Tensor:
    """Targets of token sequences (rows, T): at each position the token after it, nothing after the last.

    >>> next_tokens(torch.tensor([[5, 6, 7], [8, 9, 0]]), padding=0).tolist()
    [[6, 7, -100], [9, -100, -100]]
    """
    shifted = F.pad(tokens[:, 1:].to(torch.int64), (0, 1), value=IGNORE)
    return shifted if padding is None else torch.where(shifted == padding, IGNORE, shifted)
