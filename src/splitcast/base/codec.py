"""Formats of what travels, with sizes in packed bytes.

A message holds b rows (b, *d), one per sample. `encode` gives its bytes, `decode` reads them, `nbytes` is their
number, and `through` is decode(encode(x)) for many messages at once, without packing. Float64 exists to check
arithmetic and never travels: fp32 leaves such values as they are and counts four bytes each.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.base.packing import pack, unpack
from splitcast.base.rounding import Draw

EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class Codec(ABC):
    """A wire format. `name`, `nbytes`, `encode` and `decode` make one; the rest follows, if slowly."""

    name: str
    exact: bool = False
    """Whether `through` changes nothing."""
    varies: ClassVar[bool] = False
    """Whether the size of a message depends on what it holds; then `nbytes` is what is expected."""

    draws: ClassVar[bool] = False
    """Whether it chooses at random what is sent; others get a draw only where rounding at random helps."""

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Packed size of one message of this shape (b, *d)."""

    @abstractmethod
    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """One message (b, *d) as bytes, uint8, on the CPU; the draw is of this message alone."""

    @abstractmethod
    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        """The message (b, *d) that `encode` packed, in float32. Whatever the bytes are, it ends, and allocates no more
        than the shape asks for; bytes that no `encode` makes may raise a `SplitcastError`."""

    def bound(self, shape: Sequence[int]) -> int:
        """Most bytes that a message of this shape may have: what a receiver is ready for."""
        return self.nbytes(shape)

    def at(self, t: int) -> "Codec":
        """The format as it is sent in round ``t``, counted from 1. Whoever receives need not know the round."""
        return self

    def phase(self, t: int) -> int:
        """Rounds of the same phase have the same expected sizes."""
        return 0

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        """Operations of encoding and of decoding a message, if they are worth a thought; the clock takes them for
        FLOPs. Counted as a processor without vectors would do them."""
        return 0.0, 0.0

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """Messages ``x`` (k, b, *d) as the receiver decodes them; same shape and dtype."""
        return self.measured(x, draw)[0]

    def measured(self, x: Tensor, draw: Draw | None = None) -> tuple[Tensor, list[int]]:
        """`through`, and the packed size of every message."""
        packed = [self.encode(one, _one_of(draw, k)) for k, one in enumerate(x)]
        decoded = [self.decode(payload, x.shape[1:]) for payload in packed]
        values = torch.stack(decoded).to(x) if decoded else x
        return values, [len(payload) for payload in packed]


def _one_of(draw: Draw | None, k: int) -> Draw | None:
    """The draw of one of several messages."""
    return None if draw is None else lambda count: draw(count)[k : k + 1]


class Float(Codec):
    """IEEE floating point; values beyond the range of fp16 saturate."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.exact = dtype == torch.float32

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return x if self.exact else self._rounded(x).to(x.dtype)

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.dtype.itemsize * math.prod(shape)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return self._rounded(x).contiguous().flatten().view(torch.uint8).cpu()

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        return payload.view(self.dtype).view(*shape).float()

    def _rounded(self, x: Tensor) -> Tensor:
        top = torch.finfo(self.dtype).max
        return x.clamp(-top, top).to(self.dtype)


class Rows(Codec):
    """n bits a value, as a number of a level; the levels of a row follow from its head, two bytes.

    A row is what lies behind the second dimension of a message: a feature map of a sample, a token, or for flat data
    the whole sample. The message is the heads of all rows and then all numbers, packed with the first in the lowest
    bits: 2 rows + ceil(n values / 8) bytes.
    """

    bits: int

    @abstractmethod
    def heads(self, rows: Tensor) -> Tensor:
        """Of rows (..., values), bfloat16 (..., 1)."""

    @abstractmethod
    def numbers(self, rows: Tensor, heads: Tensor, draw: Draw | None) -> Tensor:
        """Of all values, from 0 to 2^n - 1, in the type of the rows."""

    @abstractmethod
    def values(self, numbers: Tensor, heads: Tensor) -> Tensor:
        """What is decoded; may write to the numbers, which are floating point."""

    @abstractmethod
    def packing(self) -> tuple[float, float]:
        """Operations a value of encoding and of decoding."""

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return x
        rows = as_rows(x)
        heads = self.heads(rows)
        return self.values(self.numbers(rows, heads, draw), heads).view(x.shape)

    def nbytes(self, shape: Sequence[int]) -> int:
        samples, rows, _ = as_rows_shape(shape)
        return 2 * samples * rows + -(-self.bits * math.prod(shape) // 8) if math.prod(shape) else 0

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        rows = as_rows(x[None])
        heads = self.heads(rows)
        small = torch.int8 if self.bits < 8 else torch.uint8  # twice as fast
        numbers = self.numbers(rows, heads, draw).flatten().to(small).view(torch.uint8)
        return torch.cat([heads.flatten().view(torch.uint8), pack(numbers, self.bits)]).cpu()

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        if not math.prod(shape):
            return torch.empty(*shape, device=payload.device)
        rows = 1, *as_rows_shape(shape)
        size = 2 * rows[1] * rows[2]
        heads = payload[:size].clone().view(torch.bfloat16).view(*rows[:-1], 1)
        numbers = unpack(payload[size:], self.bits, math.prod(shape)).view(rows).float()
        return self.values(numbers, heads).view(*shape)


class Integer(Rows):
    """A grid of its own for every row, rounded stochastically: E[through(x)] = x.

    It has 2^n points at even distances, and zero is one of them:

        nothing negative    0 to h, the greatest value
        else                -h to (1 - 2^(1-n)) h, or the mirror image, whichever has the smaller h

    So all bits serve what leaves a ReLU, and what is zero stays zero. A value goes to one of its two neighbours with
    probabilities that make it right on average, to 2^-16 of a step. The head is h, rounded up; its sign bit is set
    where there is a negative value, and then the last bit says which of the two grids. Values beyond 2^126 saturate.
    """

    def __init__(self, bits: int) -> None:
        self.name, self.bits, self.top = f"int{bits}", bits, 2**bits - 1

    def heads(self, rows: Tensor) -> Tensor:
        half = (self.top + 1) // 2
        low, high = rows.amin(-1, keepdim=True).float(), rows.amax(-1, keepdim=True).float()
        signed, down = low < 0, -low > high  # the longer side is the negative one
        longer, shorter = torch.where(down, -low, high), torch.where(down, high, -low)
        size = torch.where(signed, torch.maximum(longer, shorter * (half / (half - 1))), high).clamp(max=LIMIT)
        marked = rounded_up(size, fewer=1) | down.to(torch.int16) | -(2**15)
        return torch.where(signed, marked, rounded_up(size)).view(torch.bfloat16)

    def numbers(self, rows: Tensor, heads: Tensor, draw: Draw | None) -> Tensor:
        zero, step = self._grid(heads)
        levels = (rows / torch.where(step > 0, step, 1)).add_(zero)
        if draw:
            noise = draw(math.prod(rows.shape[1:])).to(levels)  # one type first: mixed addition is slow
            levels += noise.mul_(2**-16).view_as(levels)
        levels.round_()
        if draw or not bool((step * self.top < LIMIT).all()):  # else h, rounded up, is beyond every value
            levels.clamp_(0, self.top)
        return levels

    def values(self, numbers: Tensor, heads: Tensor) -> Tensor:
        zero, step = self._grid(heads)
        return numbers.sub_(zero).mul_(step)

    def packing(self) -> tuple[float, float]:
        """Least and greatest, divide, add, round, clamp (2), shift and or; shift, mask, subtract, multiply."""
        return 9.0, 4.0

    def _grid(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """The number of zero, and the distance of points."""
        half, bits = (self.top + 1) // 2, heads.view(torch.int16)
        signed, down = bits < 0, bits & 1
        size = torch.where(signed, bits & 0x7FFE, bits).view(torch.bfloat16).float()
        return torch.where(signed, half - 1 + down, 0.0), size * torch.where(signed, 1 / half, 1 / self.top)


def counted(codec: Codec, shape: Sequence[int]) -> tuple[float, float]:
    """`Codec.work`, and that of plain integers too, which has none: as smashed data and gradients they take the
    seconds that they took in version 0.1.0."""
    if not isinstance(codec, Rows):
        return codec.work(shape)
    encode, decode = codec.packing()
    return encode * math.prod(shape), decode * math.prod(shape)


LIMIT = 2.0**126
"""Where grids end, so that arithmetic on them is finite."""


def as_rows(x: Tensor) -> Tensor:
    """Messages (k, b, *d) as rows (k, b, r, values)."""
    if x.dim() < 4:
        return x.reshape(*x.shape[:2], 1, -1)
    return x.flatten(3)


def as_rows_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """The same of the shape of one message (b, *d): (b, r, values)."""
    rows = shape[1] if len(shape) > 2 else 1
    return shape[0], rows, math.prod(shape[1:]) // max(1, rows)


def rounded_up(size: Tensor, fewer: int = 0) -> Tensor:
    """Sizes in float32 up to the next bfloat16, which is the upper half of a float32, as its 16 bits; so many ``fewer``
    of them are used."""
    shift = 16 + fewer
    bits = ((size.view(torch.int32) + (2**shift - 1)) >> shift << fewer).to(torch.int16)
    return torch.where(size.isnan(), 0x7FC0, bits)


_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


IGNORE = -100
"""A target that counts for nothing, such as padding; torch's own number for it."""


class Labels(Codec):
    """Integers 0 to classes - 1: one byte each up to 256 classes, two up to 65536, else four.

    With ``ignore``, targets may also be `IGNORE`, which travels as one class more.

    >>> Labels(10).nbytes((32,)), Labels(1000).nbytes((32,)), Labels(256, ignore=True).nbytes((32,))
    (32, 64, 64)
    """

    exact = True

    def __init__(self, classes: int, *, ignore: bool = False) -> None:
        self.classes, self.ignore = classes, ignore
        codes = classes + ignore
        self.width = 1 if codes <= 2**8 else 2 if codes <= 2**16 else 4
        self.name = f"uint{8 * self.width}"

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return x

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.width * math.prod(shape)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        codes = torch.where(x == IGNORE, self.classes, x) if self.ignore else x
        packed = codes.cpu().numpy().astype(_WIDTHS[self.width])
        return torch.from_numpy(np.frombuffer(bytearray(packed.tobytes()), np.uint8)) if packed.size else EMPTY

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        labels = torch.from_numpy(payload.numpy().view(_WIDTHS[self.width]).astype(np.int64)).view(*shape)
        if labels.numel() and int(labels.max()) >= self.classes + self.ignore:
            raise SplitcastError(f"{int(labels.max())} is not below {self.classes}, the number of classes")
        return torch.where(labels == self.classes, IGNORE, labels) if self.ignore else labels


class Flags(Codec):
    """Values that are 0 or 1, a bit each.

    >>> Flags().nbytes((3, 6)), Flags().encode(torch.tensor([[1.0, 0, 1], [1, 0, 0]])).tolist()
    (3, [13])
    """

    name, exact = "flags", True

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return x

    def nbytes(self, shape: Sequence[int]) -> int:
        return -(-math.prod(shape) // 8)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return pack(x.flatten().to(torch.uint8).cpu(), 1) if x.numel() else EMPTY

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        return unpack(payload, 1, math.prod(shape)).float().view(*shape)


FP32, FP16 = Float("fp32", torch.float32), Float("fp16", torch.float16)
