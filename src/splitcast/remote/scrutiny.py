"""A site's check that what the server sends are gradients of the task: those know the labels.

With labels of i, j the same and those of k, l different,

    A(v) = P( cos(v_i, v_j) > cos(v_k, v_l) )

says how well vectors of samples tell classes apart. Smashed data S of similar samples are similar, so A(S) is above one
half already. Gradients s of the task tell more, since they depend on the labels. Those of a server that trains the
client half for a purpose of its own (feature-space hijacking, Pasquini et al., CCS 2021) follow from S alone, and do
not. So a site refuses to go on once A(s) - A(S) is not above `MARGIN` in the mean of the last `WINDOW` steps.

Fu et al. (Gradients scrutinizer, NDSS 2023) look at the same two sets of pairs; SplitGuard (Erdoğan et al., WPES 2022)
sends false labels in between. Not in the papers: A, and the comparison with smashed data. Nothing is sent for it, and
the server cannot see it.
"""

from collections import deque

import torch
from torch import Tensor

from splitcast.remote.wire import Refused

WINDOW = 20
"""Steps in a row that are judged together."""
MARGIN = 0.03
"""Honest servers had 0.09 and more, with the paper's CNN and a ResNet on MNIST and CIFAR-10."""


def label_separation(vectors: Tensor, labels: Tensor) -> float | None:
    """A of vectors (b, ...) and labels (b,), ties counted half; None without pairs of both sorts.

    >>> s, y = torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]]), torch.tensor([0, 0, 1, 1])
    >>> label_separation(s, y), label_separation(s, torch.tensor([0, 1, 0, 1])), label_separation(s, 0 * y)
    (1.0, 0.25, None)
    """
    directions = torch.nn.functional.normalize(vectors.flatten(1).double(), dim=1)
    above = torch.ones(len(labels), len(labels), dtype=torch.bool, device="cpu").triu(1)
    similar = (directions @ directions.T)[above]
    same = (labels[:, None] == labels)[above]
    mine, other = similar[same], similar[~same].sort().values
    if not len(mine) or not len(other):
        return None
    below = torch.searchsorted(other, mine) + torch.searchsorted(other, mine, right=True)
    return float(below.double().mean()) / (2 * len(other))


class Scrutiny:
    """What a site has seen of the gradients that it was sent for its own samples."""

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=WINDOW)
        """A(s) - A(S) of the last steps"""

    def look(self, gradients: Tensor, smashed: Tensor, labels: Tensor) -> None:
        """One step more, with both (b, *d); refused where the last gradients knew no labels."""
        if labels.dim() != 1 or labels.is_floating_point() or gradients.shape != smashed.shape:
            return
        told, there = label_separation(gradients, labels), label_separation(smashed, labels)
        if told is not None and there is not None:
            self.seen.append(told - there)
        if len(self.seen) == WINDOW and (mean := sum(self.seen) / WINDOW) < MARGIN:
            raise Refused(
                f"gradients: tell no more of the labels than the smashed data do ({mean:+.2f} in {WINDOW} steps); "
                "the server may train for a purpose of its own"
            )
