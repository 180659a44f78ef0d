"""Features dropped at random by how little they vary, the others quantised by how widely they range.

    splitfc:BITS/R    about BITS bits for every value of a message; one feature in R is sent

A message is F (b, d), a column for each feature. Column i is sent with the probability

    p_i = D (s_i + c) / sum_j (s_j + c)      D = d / R;   c >= 0 as small as keeps all p_i <= 1

with s_i its standard deviation, after every channel is scaled to [0, 1], and is divided by p_i, so that it is right on
average. Of the columns sent, those with a small range are told by their mean; the others have Q_j even levels between
their least and greatest value. These end points, and means, are one of 200 points between those of all columns. Levels
minimise the error, sum_j range_j^2 / (Q_j - 1)^2, within the bits there are: (Q_j - 1)^3 = k range_j^2 Q_j.

    message   least and greatest value of all, and k, as fp32; a bit for every column, whether it is sent; a bit for
              every column sent, whether it has levels; means, end points and levels as an ANS stream, log2 Q bits each

Oh, Lee, Brinton, Jeon: Communication-efficient split learning via adaptive feature-wise compression, IEEE TNNLS 2025
(SplitFC). Not in the paper: columns are drawn by systematic sampling, which has the same p_i and always D columns; how
many have levels is the best of ten shares; the Q_j are whole numbers that the receiver finds from k and the end points.
Gradients come back for the columns that were sent, (b, D), in a format that is chosen apart: `splitfc:R BITS/1` has as
many bits and the quantiser of the paper. Clients divide them by p_i.
"""

import math
import re
import struct
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from constriction import stream as ans
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.codec import EMPTY
from splitcast.base.comparators.bits import flat
from splitcast.base.comparators.sparse import Sparse, first_of
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.rounding import Draw, generator

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
POINTS = 200
"""For end points and means."""
MOST_LEVELS = 2**16
SHARES = 10
SLACK = 16
"""Bytes by which the stream may exceed its bits."""
RUNGS = 32
"""Values of k to the octave, of which one is chosen."""
HEAD = struct.Struct("<fff")
_FORM = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)/([1-9][0-9]{0,3})")


class SplitFC(Sparse):
    """Messages as above."""

    varies: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def __init__(self, bits: float, ratio: int, name: str) -> None:
        self.bits, self.ratio, self.name = bits, ratio, name

    @staticmethod
    def named(text: str, field: str = "codec") -> "SplitFC":
        """splitfc:BITS/R, without the first part."""
        found = _FORM.fullmatch(text)
        if not found or not 0 < float(found[1]) <= 32:
            bad = shown(f"splitfc:{text}")
            raise SplitcastError(
                f"{field}: unknown {bad}; give bits per value, above 0 and up to 32, and features to one sent, up to "
                "9999: splitfc:0.2/16"
            )
        return SplitFC(float(found[1]), int(found[2]), f"splitfc:{text}")

    def kept(self, d: int) -> int:
        """D, columns that are sent."""
        return max(1, round(d / self.ratio))

    def places(self, seen: Tensor) -> Tensor:
        columns = first_of((seen == 0).all(1, keepdim=True), self.kept(seen.shape[2]))
        return columns.expand(-1, seen.shape[1], -1)

    def slope(self, x: Tensor) -> Tensor:
        chance = np.stack([_chances(_matrix(one), one.shape, self.kept(one[0].numel())) for one in x])
        return torch.from_numpy(np.divide(1, chance, out=np.zeros_like(chance), where=chance > 0))[:, None].to(x)

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.bound(shape) - SLACK if math.prod(shape) else 0

    def bound(self, shape: Sequence[int]) -> int:
        b, d = flat(shape)
        if not b * d:
            return 0
        least = _fixed_bits(d, self.kept(d)) + self.kept(d) * math.log2(POINTS)
        return math.ceil(max(self.bits * b * d, least) / 8) + SLACK

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        b, d = flat(x.shape)
        f = _matrix(x)
        if not np.isfinite(f).all():
            return _bytes(HEAD.pack(math.nan, math.nan, 0.0))
        chance = _chances(f, x.shape, self.kept(d))
        at = _drawn(chance, float(generator(draw).random()) if draw else 0.5)
        sent = np.zeros(d, np.bool_)
        sent[at] = True
        columns = f[:, sent] / chance[sent]
        return _bytes(_coded(columns, sent, self.bits * b * d))

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        b, d = flat(shape)
        if not b * d:
            return torch.empty(*shape, device=payload.device)
        found = _decoded(payload.cpu().numpy().tobytes(), b, d, self.kept(d))
        return torch.from_numpy(found.astype(np.float32)).view(*shape)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        values = float(math.prod(shape))
        return 8 * values + 30 * values / self.ratio, values + 10 * values / self.ratio


def _matrix(x: Tensor) -> Floats:
    """A message (b, *d) as F (b, d)."""
    f: Floats = x.detach().to("cpu", torch.float64).clamp(-(2.0**100), 2.0**100).reshape(flat(x.shape)).numpy()
    return f


def _chances(f: Floats, shape: Sequence[int], kept: int) -> Floats:
    """p_i of every column."""
    d = f.shape[1]
    if kept >= d:
        return np.ones(d)
    channels = shape[1] if len(shape) >= 4 else 1
    maps = f.reshape(len(f), channels, -1)
    span = (maps.max((0, 2)) - maps.min((0, 2)))[:, None]
    spread = (maps.std(0) / np.where(span > 0, span, 1)).reshape(-1)
    more = max(0.0, (kept * spread.max() - spread.sum()) / (d - kept))
    if not (spread + more).any():
        more = 1.0
    chances: Floats = np.minimum(kept * (spread + more) / (spread + more).sum(), 1.0)
    return chances


def _drawn(chance: Floats, start: float) -> NDArray[np.intp]:
    """Systematic sampling: where the running sum of p passes start, start + 1, ..."""
    within = np.cumsum(chance)
    count = round(float(within[-1]))
    return np.minimum(np.searchsorted(within, start + np.arange(count)), len(chance) - 1)


class Plan(NamedTuple):
    """Which columns have levels, and how many."""

    told: NDArray[np.bool_]
    k: np.float32
    error: float


def _fixed_bits(d: int, kept: int) -> float:
    return 8 * HEAD.size + 8 * (-(-d // 8)) + 8 * (-(-kept // 8))


def _levels(ranges: Ints, k: float | Floats) -> Ints:
    """Q_j of columns with these ranges, in points: u^3 = c (u + 1) with u = Q - 1 and c = k range^2.

    Newton's method from above, in operations that every machine rounds alike.
    """
    c = k * ranges.astype(np.float64) ** 2
    u = np.sqrt(c) + 1.0
    for _ in range(16):  # below u = 2 it has not ended yet, and that does not matter
        u = u - (u * u * u - c * u - c) / (3.0 * u * u - c)
    return np.clip(np.floor(u + 1.0), 2, MOST_LEVELS).astype(np.int32)


@cache
def _ladder() -> tuple[NDArray[np.float32], Floats]:
    """Values of k from 2^-40 to 2^60, and log2 Q of every range at each of them (k, ranges)."""
    k = np.exp2(np.arange(-40 * RUNGS, 60 * RUNGS + 1) / RUNGS).astype(np.float32)
    return k, np.log2(_levels(np.arange(POINTS, dtype=np.int32), k[:, None].astype(np.float64)))


def _planned(ranges: Ints, b: int, bits: float) -> Plan:
    """The best of ten shares of columns with levels, for so many bits in all."""
    order = np.argsort(-ranges, kind="stable")
    best = Plan(np.zeros(len(ranges), np.bool_), np.float32(0), float((ranges.astype(np.float64) ** 2).sum()) / 4)
    for share in range(1, SHARES + 1):
        count = -(-share * len(ranges) // SHARES)
        left = bits - (len(ranges) + count) * math.log2(POINTS)
        widest, rest = ranges[order[:count]], ranges[order[count:]].astype(np.float64)
        known, logs = _ladder()
        fit = np.searchsorted(b * (logs @ np.bincount(widest, minlength=POINTS)), left, side="right")
        if not fit:
            break
        k = known[fit - 1]
        steps = widest / (_levels(widest, float(k)) - 1)
        error = (float((steps**2).sum()) + float((rest**2).sum())) / 4
        if error < best.error:
            told = np.zeros(len(ranges), np.bool_)
            told[order[:count]] = True
            best = Plan(told, k, error)
    return best


def _coded(columns: Floats, sent: NDArray[np.bool_], bits: float) -> bytes:
    low, high = np.float32(columns.min()), np.float32(columns.max())
    low, high = np.nextafter(low, np.float32(-np.inf)), np.nextafter(high, np.float32(np.inf))  # nothing is outside
    point = (float(high) - float(low)) / (POINTS - 1)
    least = np.floor((columns.min(0) - float(low)) / point).astype(np.int32).clip(0, POINTS - 1)
    most = np.ceil((columns.max(0) - float(low)) / point).astype(np.int32).clip(0, POINTS - 1)
    ranges = (most - least).astype(np.int32)
    plan = _planned(ranges, len(columns), bits - _fixed_bits(len(sent), columns.shape[1]))
    means = np.rint((columns[:, ~plan.told].mean(0) - float(low)) / point).astype(np.int32).clip(0, POINTS - 1)
    ends = np.concatenate([least[plan.told], most[plan.told]])
    levels = _levels(ranges[plan.told], float(plan.k))
    place = (columns[:, plan.told] - float(low)) / point - least[plan.told]  # in points, from the column's own least
    numbers = np.rint(place / np.maximum(ranges[plan.told], 1) * (levels - 1)).clip(0, levels - 1).astype(np.int32)
    coder = ans.stack.AnsCoder()
    if numbers.size:
        coder.encode_reverse(numbers.T.reshape(-1), ans.model.Uniform(), np.repeat(levels, len(columns)))
    for part in (ends, means):
        if part.size:
            coder.encode_reverse(part, ans.model.Uniform(POINTS))
    masks = [np.packbits(mask, bitorder="little").tobytes() for mask in (sent, plan.told)]
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return HEAD.pack(low, high, plan.k) + b"".join(masks) + words


def _decoded(data: bytes, b: int, d: int, kept: int) -> Floats:
    """What a message says (b, d); whatever is not one raises a `SplitcastError`."""
    if len(data) < HEAD.size:
        raise SplitcastError("is not a message of this format")
    low, high, k = HEAD.unpack_from(data)
    if math.isnan(low):
        return np.full((b, d), np.nan)
    if not (-math.inf < low < high < math.inf and 0 <= k <= 2.0**60):
        raise SplitcastError("has a range that cannot be")
    sent, rest = _mask(data[HEAD.size :], d)
    told, rest = _mask(rest, int(sent.sum()))
    if len(told) > kept or len(rest) % 4:
        raise SplitcastError("has columns that cannot be")
    words = np.frombuffer(rest, "<u4").astype(np.uint32)
    if len(words) and not words[-1]:
        raise SplitcastError("ends in zeros")
    coder, point = ans.stack.AnsCoder(words), (high - low) / (POINTS - 1)
    columns = np.empty((b, len(told)))
    columns[:, ~told] = low + point * coder.decode(ans.model.Uniform(POINTS), int((~told).sum()))
    least, most = coder.decode(ans.model.Uniform(POINTS), 2 * int(told.sum())).reshape(2, -1)
    if (least > most).any():
        raise SplitcastError("has a column that ends before it begins")
    levels = _levels(most - least, k)
    if len(levels):
        numbers = coder.decode(ans.model.Uniform(), np.repeat(levels, b)).reshape(-1, b).T
        columns[:, told] = low + point * (least + numbers * ((most - least) / (levels - 1)))
    if not coder.is_empty():
        raise SplitcastError("is longer than what it holds")
    found = np.zeros((b, d))
    found[:, sent] = columns
    return found


def _mask(data: bytes, count: int) -> tuple[NDArray[np.bool_], bytes]:
    """So many bits from the beginning, and what follows them."""
    size = -(-count // 8)
    bits = np.unpackbits(np.frombuffer(data[:size], np.uint8), bitorder="little").astype(np.bool_)
    if len(bits) < count or bits[count:].any():
        raise SplitcastError("has columns that cannot be")
    return bits[:count], data[size:]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
