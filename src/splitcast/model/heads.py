"""Auxiliary heads: a small network from what leaves the client half to the output, so that clients have a loss."""

import math
from collections.abc import Callable, Sequence

from torch import nn

from splitcast.base.errors import SplitcastError


def linear_head(pool: int) -> Callable[[Sequence[int], Sequence[int]], nn.Module]:
    """Makes heads of one linear layer, from a starting point of zero.

    Feature maps (C, H, W) are first averaged to ``pool`` x ``pool`` at most, 0 leaves them as they are. Where the
    output has a vector for every position, as with tokens, so has the head.

    >>> sum(p.numel() for p in linear_head(4)((32, 14, 14), (10,)).parameters())
    5130
    """

    def make(enters: Sequence[int], out: Sequence[int]) -> nn.Module:
        if len(out) > 1 and tuple(enters[:-1]) == tuple(out[:-1]):
            return _zeroed(nn.Linear(enters[-1], out[-1]))
        if len(out) != 1:
            raise SplitcastError(f"scheme: its heads go from {tuple(enters)} to one vector, not to {tuple(out)}")
        size = tuple(min(pool or edge, edge) for edge in enters[1:]) if len(enters) == 3 else ()
        values = enters[0] * math.prod(size) if size else math.prod(enters)
        pooling = [nn.AdaptiveAvgPool2d(size)] if size and size != tuple(enters[1:]) else []
        return nn.Sequential(*pooling, nn.Flatten(), _zeroed(nn.Linear(values, out[0])))

    return make


def _zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
