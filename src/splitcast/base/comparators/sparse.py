"""Formats that send some values of a sample and not the others, which nothing comes back for: the chain rule.

Gradients of the values that were sent travel without places, which both sides know from what was decoded.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from splitcast.base.codec import Codec


class Sparse(Codec):
    """k of the d values of every sample are sent."""

    @abstractmethod
    def kept(self, d: int) -> int:
        """k."""

    @abstractmethod
    def places(self, seen: Tensor) -> Tensor:
        """Those (K, b, k) that were sent of messages which were decoded as this (K, b, d)."""

    def slope(self, x: Tensor) -> Tensor | float:
        """What the values sent were multiplied by, for messages x (K, b, *d); broadcastable to (K, b, d)."""
        return 1.0


def first_of(zero: Tensor, count: int) -> Tensor:
    """Places (..., count) of what is not zero (..., d), filled up with the first that is.

    >>> first_of(torch.tensor([[0, 3, 0, 2], [0, 0, 0, 1]]) == 0, 2).tolist()
    [[1, 3], [3, 0]]
    """
    return torch.argsort(zero.byte(), dim=-1, stable=True)[..., :count]
