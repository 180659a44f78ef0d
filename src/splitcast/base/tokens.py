"""Formats for tokens: rotated rows, levels for what is then Gaussian, and exact rows for the few that are not alike.

Some features of a transformer are a hundred times larger than the others, and a grid from the smallest to the largest
value leaves nothing for the rest. A fixed random rotation R spreads every feature over all of them; what is sent is
R x, whose values are nearly Gaussian, and R is orthogonal, so that no error grows on the way back:

    R = D, then H over the first 2^k features; then D' and H over the last 2^k, if there are more than 2^k

with random signs D, D', the Walsh-Hadamard matrix H / sqrt(2^k), and 2^k the greatest power of two that fits.

    rotated:BITS    R x on the grid of intN (`base.codec.Integer`)
    lloyd:BITS      R x at the levels of Lloyd and Max for a Gaussian of the row's root mean square
    NAME+first      the same, and the first token of every sequence as fp32: it holds nearly all of the energy
    NAME+outliers   the same, and as fp32 every row of more than 16 times the median energy; a bit a row says which

Rotation as in Suresh et al., Distributed mean estimation with limited communication, ICML 2017, with levels as in
Vargaftik et al., EDEN, ICML 2022, but drawn once for all and scaled by the root mean square. Levels: Max, IRE Trans.
Inf. Theory 1960; Lloyd, IEEE Trans. Inf. Theory 1982. The first token: Xiao et al., Attention sinks, ICLR 2024.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from splitcast.base.codec import EMPTY, FP32, LIMIT, Codec, Integer, Rows, as_rows, counted
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.packing import pack, unpack
from splitcast.base.rounding import Draw
from splitcast.base.seeds import stream

OUTLIER = 16.0
"""Times the median energy."""


def rotated(rows: Tensor) -> Tensor:
    """R x for rows (..., n); values beyond 2^100 saturate."""
    rows = rows.clamp(-(2.0**100), 2.0**100)
    for signs, span in _parts(rows):
        rows = rows * signs
        rows[..., span] = _hadamard(rows[..., span])
    return rows


def rotated_back(rows: Tensor) -> Tensor:
    """R^T x for rows (..., n)."""
    for signs, span in reversed(_parts(rows)):
        rows = rows.clone()
        rows[..., span] = _hadamard(rows[..., span])
        rows *= signs
    return rows


def _parts(rows: Tensor) -> list[tuple[Tensor, slice]]:
    """The signs and the place of each H."""
    n, size = rows.shape[-1], _power(rows.shape[-1])
    spans = [slice(0, size)] if n == size else [slice(0, size), slice(n - size, n)]
    return list(zip(_signs(n).to(rows), spans, strict=False))


def _power(n: int) -> int:
    return 1 << (n.bit_length() - 1)


@cache
def _signs(n: int) -> Tensor:
    """(2, n) signs, the same everywhere."""
    drawn = torch.from_numpy(stream(0, "rotation", n).bit_generator.random_raw(2 * n).astype("int64"))
    return (1 - 2 * (drawn & 1)).view(2, n)


def _hadamard(rows: Tensor) -> Tensor:
    """H x for rows (..., 2^k), by sums and differences, whose last bits do not depend on how rows are grouped."""
    shape, n, h = rows.shape, rows.shape[-1], 1
    columns = rows.reshape(-1, n).T.contiguous()  # what is added lies together
    while h < n:
        pairs = columns.view(n // (2 * h), 2, -1)
        columns = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=columns[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=columns[:, 1])
        h *= 2
    scaled: Tensor = columns.view(n, -1) * n**-0.5
    return scaled.T.reshape(shape)


class Lloyd(Rows):
    """The levels of Lloyd and Max for a Gaussian of the row's root mean square, which is the head.

    >>> [round(float(level), 4) for level in Lloyd(2).levels], Lloyd(2).nbytes((32, 10, 576))
    ([-1.5104, -0.4528, 0.4528, 1.5104], 46720)
    """

    def __init__(self, bits: int) -> None:
        self.name, self.bits = f"levels{bits}", bits
        self.levels = _gaussian_levels(2**bits)

    def heads(self, rows: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
        size: Tensor = norm / math.sqrt(rows.shape[-1])
        return size.clamp(max=LIMIT).bfloat16()

    def numbers(self, rows: Tensor, heads: Tensor, draw: Draw | None) -> Tensor:
        size = heads.to(rows.dtype)
        between = (self.levels[1:] + self.levels[:-1]) / 2
        scaled = (rows / torch.where(size > 0, size, 1)).contiguous()
        return torch.bucketize(scaled, between.to(rows)).to(rows.dtype)

    def values(self, numbers: Tensor, heads: Tensor) -> Tensor:
        return self.levels.to(numbers)[numbers.long()] * heads.to(numbers.dtype)

    def packing(self) -> tuple[float, float]:
        """Square and add, divide, a comparison for every bit, shift and or; shift, mask, look up, multiply."""
        return 5.0 + self.bits, 4.0


@cache
def _gaussian_levels(count: int) -> Tensor:
    """Levels with the least mean squared error for N(0, 1): each is the mean of what is nearest to it."""

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def within(a: float, b: float) -> float:
        return (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2

    levels = [-2 + 4 * k / max(1, count - 1) for k in range(count)]
    for _ in range(2000):
        ends = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        levels = [(density(a) - density(b)) / within(a, b) for a, b in pairwise(ends)]
    half = torch.tensor(levels[count // 2 :], dtype=torch.float32, device="cpu")
    return torch.cat([-half.flip(0), half])


class Rotated(Codec):
    """Rows are rotated before they are sent and turned back by whoever receives them."""

    def __init__(self, inner: Rows, name: str) -> None:
        self.inner, self.name = inner, name

    @staticmethod
    def on_grid(text: str, field: str = "codec") -> "Rotated":
        """rotated:BITS, without the first part."""
        return Rotated(Integer(_bits("rotated", text, field, ("8", "4", "2"))), f"rotated:{text}")

    @staticmethod
    def on_levels(text: str, field: str = "codec") -> "Rotated":
        """lloyd:BITS, without the first part."""
        return Rotated(Lloyd(_bits("lloyd", text, field, ("4", "3", "2", "1"))), f"lloyd:{text}")

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.inner.nbytes(shape)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return self.inner.encode(_by_rows(x[None], rotated)[0], draw)

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        return _by_rows(self.inner.decode(payload, shape)[None], rotated_back)[0]

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return _by_rows(self.inner.through(_by_rows(x, rotated), draw), rotated_back)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        row, values = math.prod(shape[2 if len(shape) > 2 else 1 :]), math.prod(shape)
        passes = 1 if row == _power(max(1, row)) else 2
        turned = values * passes * (2.0 + math.log2(_power(max(1, row))))
        encode, decode = counted(self.inner, shape)
        return turned + 2.0 * values + encode, turned + decode


def _by_rows(x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
    return turn(as_rows(x)).view(x.shape) if x.numel() else x


def _bits(family: str, text: str, field: str, allowed: tuple[str, ...]) -> int:
    if text not in allowed:
        names = ", ".join(f"{family}:{each}" for each in allowed)
        raise SplitcastError(f"{field}: unknown {shown(f'{family}:{text}')}; choose one of {names}")
    return int(text)


class FirstExact(Codec):
    """The first token of every sequence in messages (b, T, d) as fp32; other messages as they would be without."""

    def __init__(self, inner: Codec) -> None:
        self.inner, self.name = inner, f"{inner.name}+first"

    def nbytes(self, shape: Sequence[int]) -> int:
        exact, rest = _first(shape)
        return FP32.nbytes(exact) + self.inner.nbytes(rest)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if x.dim() != 3:
            return self.inner.encode(x, draw)
        return torch.cat([FP32.encode(x[:, :1]), self.inner.encode(x[:, 1:], draw)])

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        exact, rest = _first(shape)
        size = FP32.nbytes(exact)
        values = self.inner.decode(payload[size:], rest)
        return torch.cat([FP32.decode(payload[:size].clone(), exact), values], 1) if len(shape) == 3 else values

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if x.dim() != 4:
            return self.inner.through(x, draw)
        return torch.cat([x[:, :, :1], self.inner.through(x[:, :, 1:], draw)], 2)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        return counted(self.inner, _first(shape)[1])


def _first(shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The shapes of what is exact and of the rest."""
    if len(shape) != 3:
        return (0,), shape
    b, t, d = shape
    return (b, min(t, 1), d), (b, max(0, t - 1), d)


class OutliersExact(Codec):
    """Rows of more than 16 times the median energy as fp32: at most half of them. A bit for every row, exact rows,
    and the message of the others."""

    varies: ClassVar[bool] = True

    def __init__(self, inner: Codec) -> None:
        self.inner, self.name = inner, f"{inner.name}+outliers"

    def nbytes(self, shape: Sequence[int]) -> int:
        return self._size(shape, 0)

    def bound(self, shape: Sequence[int]) -> int:
        return max(self._size(shape, exact) for exact in (0, _row_count(shape) // 2))

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        rows = as_rows(x[None]).flatten(0, 2)
        energy = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).square()
        exact = energy > OUTLIER * energy.median()
        mask = pack(exact.to(torch.uint8).cpu(), 1)
        return torch.cat([mask, FP32.encode(rows[exact]), self.inner.encode(rows[~exact], draw)])

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        if not math.prod(shape):
            return torch.empty(*shape, device=payload.device)
        count, head = _row_count(shape), -(-_row_count(shape) // 8)
        if len(payload) < head:
            raise SplitcastError("is not a message of this format")
        exact = unpack(payload[:head], 1, 8 * head).bool()
        found = int(exact.sum())
        if bool(exact[count:].any()) or found > count // 2 or len(payload) != self._size(shape, found):
            raise SplitcastError("has rows that cannot be")
        exact, each = exact[:count], math.prod(shape) // count
        rows, split = torch.empty(count, each, device=payload.device), head + 4 * found * each
        rows[exact] = FP32.decode(payload[head:split].clone(), (found, each))
        rows[~exact] = self.inner.decode(payload[split:], (count - found, each))
        return rows.view(*shape)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        encode, decode = counted(self.inner, shape)
        return encode + 2.0 * math.prod(shape), decode

    def _size(self, shape: Sequence[int], exact: int) -> int:
        count, values = _row_count(shape), math.prod(shape)
        if not values:
            return 0
        each = values // count
        return -(-count // 8) + 4 * exact * each + self.inner.nbytes((count - exact, each))


def _row_count(shape: Sequence[int]) -> int:
    return math.prod(shape[: 2 if len(shape) > 2 else 1])


EXACT = {"first": FirstExact, "outliers": OutliersExact}
"""NAME+first and NAME+outliers."""


def with_exact(inner: Codec, which: str, field: str) -> Codec:
    """A format of rows with some of them exact."""
    name = f"{inner.name}+{which}"
    if which not in EXACT or not isinstance(inner, Rows | Rotated):
        raise SplitcastError(
            f"{field}: unknown {shown(name)}; +first and +outliers go with intBITS, rotated:BITS and lloyd:BITS"
        )
    return EXACT[which](inner)
