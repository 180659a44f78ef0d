"""Formats of smashed data and gradients on the wire, with sizes in packed bytes.

`through` is what the other side sees after encode and decode; `nbytes` is what the wire carries for it. Float64
exists to check arithmetic and never travels: fp32 leaves such values as they are and counts four bytes each.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from splitcast.errors import one_of


class Codec(Protocol):
    """A wire format."""

    name: str

    def through(self, x: Tensor) -> Tensor:
        """``x`` as the receiver decodes it; same shape and dtype."""
        ...

    def nbytes(self, shape: Sequence[int]) -> int:
        """Packed size of a tensor of this shape."""
        ...


class Fp32:
    """Four bytes a value, unchanged."""

    name = "fp32"

    def through(self, x: Tensor) -> Tensor:
        return x

    def nbytes(self, shape: Sequence[int]) -> int:
        return 4 * math.prod(shape)


class Fp16:
    """Two bytes a value, IEEE half precision; values beyond its range saturate."""

    name = "fp16"

    def through(self, x: Tensor) -> Tensor:
        top = torch.finfo(torch.float16).max
        return x.clamp(-top, top).to(torch.float16).to(x.dtype)

    def nbytes(self, shape: Sequence[int]) -> int:
        return 2 * math.prod(shape)


FP32 = Fp32()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, Fp16())}


def codec(name: str, field: str = "codec") -> Codec:
    """Look a codec up.

    >>> codec("fp16").nbytes((32, 10))
    640
    """
    return CODECS[one_of(field, name, CODECS)]


def label_bytes(count: int, classes: int) -> int:
    """Packed size of integer labels: one byte each up to 256 classes, two up to 65536, else four.

    >>> label_bytes(32, 10), label_bytes(32, 1000)
    (32, 64)
    """
    return count * (1 if classes <= 2**8 else 2 if classes <= 2**16 else 4)
