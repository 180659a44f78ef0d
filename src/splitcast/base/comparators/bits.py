"""Whole numbers of any width as bytes."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def packed_size(count: int, width: int) -> int:
    """Bytes of so many numbers of so many bits."""
    return -(-count * width // 8)


def pack_wide(numbers: NDArray[np.int64], width: int) -> Tensor:
    """Numbers (n,) below 2^width, the first in the lowest bits.

    >>> packed = pack_wide(np.array([5, 1, 7]), 3)
    >>> packed.tolist(), unpack_wide(packed, 3, 3).tolist()
    ([205, 1], [5, 1, 7])
    """
    bits = (numbers[:, None] >> np.arange(width)) & 1
    return torch.from_numpy(np.packbits(bits.astype(np.uint8), bitorder="little"))


def unpack_wide(packed: Tensor, width: int, count: int) -> NDArray[np.int64]:
    """The inverse of `pack_wide`."""
    bits = np.unpackbits(packed.numpy(), count=count * width, bitorder="little").reshape(count, width)
    return bits.astype(np.int64) @ (1 << np.arange(width))


def width_of(count: int) -> int:
    """Bits of the numbers below ``count``.

    >>> width_of(1), width_of(2), width_of(6272)
    (0, 1, 13)
    """
    return max(0, count - 1).bit_length()


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """Samples and values of each in a message (b, *d)."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
