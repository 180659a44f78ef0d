"""What a transform-coded message is made of: coefficients of its KLT and DCT, their levels, and the bytes of these.

A message (b, C, H, W) of feature maps is M (C, H W b), a vector of C channels at every place of every sample.

    KLT     Y = Q^T M          Q: the eigenvectors of M M^T, so that channels are uncorrelated, greatest energy first
    DCT     X = D_H Y D_W^T    every map of every sample; D_n is the orthonormal DCT-II
    q = sign(X) floor(|X| / step + 0.35)      a dead zone of 1.3 steps around zero
    received: step q, back through D and Q, and clamped at 0 where nothing sent was negative

Levels q travel as a code stream (`base.entropy`) in groups, one for each channel and each ring max(u, v) of
frequencies, with its own scale. The columns of Q travel along, up to the last channel that is worth its column
(`base.spectrum`), so that nothing else is needed to decode a message. Column k is round(2^e_k Q_k), and all are made
orthonormal again on both sides (QR), so that their rounding costs a little decorrelation and no accuracy. As fine as
pays is 2^e_k = 32 sqrt(energy of the channel) / step, as a power of two from 4 to 256.

Clients whose samples differ, by their classes say, would each have another Q and step, so that what coding leaves of a
sample tells whose it is, and who trains on samples of many clients would learn that instead. So Q can also be a common
one, which all were given before; then it is not in the message.

Flat messages (b, d) are d channels of one place, and tokens (b, T, d) are b T samples of those. The KLT is left out
where it has fewer than 8 C vectors to be learned from, or more than 256 channels: its columns would outweigh what they
save. Then every channel has its own scale, as far as a group has 16 levels at least.

    message   0x01 (0x03: clamp), step as bfloat16, channels sent as uint16 (with a KLT), code stream
              0x05 (0x07: clamp)  likewise, with a common Q

After the design of image coders (JPEG; Karhunen-Loève over channels as in JPEG 2000 part 2 and spectral imaging).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.entropy import LIMIT, coded, decoded
from splitcast.base.errors import SplitcastError
from splitcast.base.scales import Integers, changes

OFFSET = 0.35
"""What is added before rounding down; 1/2 would be to nearest."""
VECTORS = 8
"""Vectors per channel that a KLT needs to be worth its columns."""
CHANNELS = 256
"""Most channels of a KLT."""
KEPT = 64
"""Tables of layouts at hand; what a sender claims chooses among them."""
GROUP = 16
"""Least levels of a group."""
LARGEST = 2.0**50
"""Values beyond travel as they are, so that arithmetic on the others is finite: sums of squares are."""
CODED, CLAMP, SHARED = 1, 2, 4
"""Bits of the first byte."""


class Shape(NamedTuple):
    """How a message is laid out as (channels, height, width, samples)."""

    samples: int
    channels: int
    height: int
    width: int

    @staticmethod
    def of(shape: Sequence[int]) -> "Shape":
        """
        >>> Shape.of((32, 8, 14, 14)), Shape.of((32, 10, 64)), Shape.of((32, 64))
        (Shape(samples=32, channels=8, height=14, width=14), Shape(samples=320, channels=64, height=1, width=1), \
Shape(samples=32, channels=64, height=1, width=1))
        """
        if len(shape) >= 4:
            return Shape(shape[0], shape[1], math.prod(shape[2:-1]), shape[-1])
        return Shape(math.prod(shape[:-1]) if len(shape) > 1 else shape[0], shape[-1] if len(shape) > 1 else 1, 1, 1)

    @property
    def places(self) -> int:
        """Vectors of channels."""
        return self.height * self.width * self.samples

    @property
    def klt(self) -> bool:
        """Whether the channels are decorrelated."""
        return 2 <= self.channels <= CHANNELS and self.places >= VECTORS * self.channels


@dataclass(frozen=True)
class Parts:
    """What a message says."""

    step: float
    clamped: bool
    shared: bool
    """whether Q is the common one"""
    exponents: Integers
    """e_k of the channels sent (r,); of no channel without a KLT of its own"""
    columns: Integers
    """round(2^e_k Q_k), (r, C)"""
    levels: Integers
    """(r or C, H W, b), frequencies ring after ring"""


class Coefficients:
    """A message before its coding, for a given KLT or for none."""

    def __init__(self, x: Tensor, *, clamped: bool, common: Tensor | None = None) -> None:
        """``common``: orthonormal columns (C, r) of the KLT."""
        self.shape, self.lay, self.clamped = x.shape, Shape.of(x.shape), clamped
        self.common = common if self.lay.klt else None
        self.maps = x.reshape(self.lay.samples, self.lay.channels, -1)

    def columns(self, step: float) -> tuple[Integers, Integers]:
        """e_k and rounded columns of a KLT of its own, (r,) and (r, C)."""
        return np.zeros(0, np.int32), np.zeros((0, self.lay.channels), np.int32)

    def instead(self, spread: Tensor, step: float) -> "Coefficients | None":
        """Who is to make the message, seeing what these coefficients, in steps, leave out."""
        return None

    def message(self, step: float) -> tuple[bytes, Parts] | None:
        """The message of this step, and what it says; None where a level would be too large."""
        step = as_sent(step)
        if not 2.0**-100 <= step <= LARGEST:
            return None
        lay, q = self.lay, self.common
        exponents, columns = self.columns(step)
        if lay.klt and q is None:
            q = _orthonormal(exponents, columns)
        # the DCT comes last, when there are fewest channels: KLT and DCT commute
        spread = spectra(as_rows(self.maps) / step if q is None else projected(q / step, self.maps), lay)
        if (better := self.instead(spread, step)) is not None:
            return better.message(step)
        largest = torch.maximum(spread.amax(1), -spread.amin(1))
        if len(largest) and not float(largest.max()) < LIMIT - 1:  # not so if there is a NaN
            return None
        if lay.klt:
            kept = spoken(largest)
            exponents, columns, spread = exponents[:kept], columns[:kept], spread[:kept]
        levels = _quantised(spread).view(len(spread), lay.height * lay.width, lay.samples).numpy()
        parts = Parts(step, self.clamped, self.common is not None, exponents, columns, levels)
        return _packed(parts, lay), parts

    def seen(self, parts: Parts) -> Tensor:
        """What is decoded of a message."""
        return rebuilt(parts, self.lay, self.shape, self.common)


@lru_cache(maxsize=KEPT)
def as_sent(step: float) -> float:
    """A step as bfloat16."""
    return float(torch.tensor(step, device="cpu").bfloat16())


def spoken(largest: Tensor) -> int:
    """Channels up to the last with a level other than zero, of the largest size of each, in steps."""
    used = np.flatnonzero(largest.numpy() + OFFSET >= 1)
    return int(used[-1]) + 1 if len(used) else 0


def _quantised(spread: Tensor) -> Tensor:
    """sign(x) floor(|x| + OFFSET), as int32"""
    return torch.add(spread, spread.sign(), alpha=OFFSET).to(torch.int32)  # which rounds towards zero


def quantised_sizes(sizes: Tensor, step: float) -> Tensor:
    """floor(x / step + OFFSET) of x >= 0, as int32"""
    return torch.mul(sizes, 1 / step).add_(OFFSET).to(torch.int32)


def as_rows(maps: Tensor) -> Tensor:
    """Maps (b, k, H W) as rows (k, H W b)."""
    return maps.permute(1, 2, 0).flatten(1)


def projected(q: Tensor, maps: Tensor) -> Tensor:
    """Maps (b, C, H W) along columns (C, k), as rows (k, H W b)."""
    return q.T @ maps[:, :, 0].T if maps.shape[2] == 1 else as_rows(q.T @ maps)


def _restored(q: Tensor, rows: Tensor, lay: Shape) -> Tensor:
    """The way back of `projected` (b, C, H W), for orthonormal columns."""
    if lay.height * lay.width == 1:
        return (q @ rows).T[:, :, None]
    return q @ rows.view(len(rows), -1, lay.samples).permute(2, 0, 1).contiguous()


def spectra(rows: Tensor, lay: Shape) -> Tensor:
    """The DCT of every map in (k, H W b), ring after ring."""
    if lay.height * lay.width == 1:
        return rows
    turned = _turned(rows, lay, _dct(lay.height), _dct(lay.width))
    turned = turned.view(len(rows), lay.height * lay.width, lay.samples)
    return turned.index_select(1, torch.from_numpy(_rings(lay).order)).view(rows.shape)


def _turned(rows: Tensor, lay: Shape, down: Tensor, across: Tensor) -> Tensor:
    """Every map in (k, H W b) times a matrix from both sides, down M across^T."""
    if not len(rows):
        return rows
    half = down @ rows.view(-1, lay.height, lay.width * lay.samples)
    if lay.samples >= lay.width:
        return (across @ half.view(-1, lay.width, lay.samples)).view(rows.shape)
    flat = half.view(-1, lay.width, lay.samples).transpose(0, 1).reshape(lay.width, -1)  # many products would be narrow
    return (across @ flat).view(lay.width, -1, lay.samples).transpose(0, 1).reshape(rows.shape)


@lru_cache(maxsize=KEPT)
def _dct(n: int) -> Tensor:
    """The orthonormal DCT-II, (n, n)."""
    k, i = torch.arange(n, device="cpu")[:, None], torch.arange(n, device="cpu")[None]
    basis = torch.cos(math.pi * k * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


class Rings(NamedTuple):
    """Frequencies by rings max(u, v)."""

    order: NDArray[np.intp]
    inverse: NDArray[np.intp]
    counts: tuple[int, ...]
    """how many are in each group of a channel"""


@lru_cache(maxsize=KEPT)
def _rings(lay: Shape) -> Rings:
    ring = np.maximum(*np.indices((lay.height, lay.width))).flatten()
    order, counts = np.argsort(ring, kind="stable"), [0]
    for size in np.bincount(ring):
        if counts[-1] * lay.samples >= GROUP:
            counts.append(0)
        counts[-1] += int(size)
    return Rings(order, np.argsort(order), tuple(counts))


@lru_cache(maxsize=KEPT)
def group_sizes(lay: Shape, channels: int) -> Integers:
    """Sizes of the groups of levels of so many channels."""
    each = lay.samples * np.array(_rings(lay).counts, np.int32)
    if len(each) > 1 or each[0] >= GROUP:
        return np.tile(each, channels)
    together = -(-GROUP // int(each[0]))  # channels too small for a group of their own
    full, rest = divmod(channels, together)
    return int(each[0]) * np.array([together] * full + [rest] * (rest > 0), np.int32)


def _all_sizes(lay: Shape, channels: int, *, shared: bool) -> Integers:
    """Sizes of all groups of a message: exponents and columns of its own KLT, then levels."""
    sizes = group_sizes(lay, channels)
    if not lay.klt or shared or not channels:
        return sizes
    return np.concatenate([np.array([channels] + [lay.channels] * channels, np.int32), sizes])


def _orthonormal(exponents: Integers, columns: Integers) -> Tensor:
    """Q (C, r) from its rounded columns (r, C)."""
    return orthonormal(torch.from_numpy(np.ldexp(columns.astype(np.float32), -exponents[:, None])))


def orthonormal(rough: Tensor) -> Tensor:
    """Q (C, r) from columns that were rounded (r, C)."""
    q: Tensor = torch.linalg.qr(rough.T).Q
    return q


def _packed(parts: Parts, lay: Shape) -> bytes:
    head = bytes([CODED + CLAMP * parts.clamped + SHARED * parts.shared]) + _head(parts.step)
    numbers = [parts.levels.reshape(-1)]
    if lay.klt:
        head += len(parts.levels).to_bytes(2, "little")
        if not parts.shared:
            numbers = [changes(parts.exponents, 5), parts.columns.reshape(-1), *numbers]
    return head + coded(np.concatenate(numbers), _all_sizes(lay, len(parts.levels), shared=parts.shared))


def parsed(data: bytes, lay: Shape, common: Tensor | None = None) -> Parts:
    """What a coded message says; whatever is not one raises a `SplitcastError`."""
    start = 5 if lay.klt else 3
    shared = common is not None and lay.klt
    if len(data) < start or data[0] & ~(CLAMP | (SHARED if shared else 0)) != CODED:
        raise SplitcastError("is not a message of this format")
    shared = bool(data[0] & SHARED)
    most = common.shape[1] if common is not None and shared else lay.channels
    (step,) = struct.unpack("<f", bytes(2) + data[1:3])
    channels = int.from_bytes(data[3:5], "little") if lay.klt else lay.channels
    if not 2.0**-100 <= step <= LARGEST or channels > most:
        raise SplitcastError("has a step or a number of channels that cannot be")
    numbers = decoded(data[start:], _all_sizes(lay, channels, shared=shared))
    exponents, columns = np.zeros(0, np.int32), np.zeros((0, lay.channels), np.int32)
    if lay.klt and not shared:
        exponents = (5 + np.cumsum(numbers[:channels], dtype=np.int64)).clip(0, 99).astype(np.int32)
        columns = numbers[channels:][: channels * lay.channels].reshape(channels, lay.channels)
        numbers = numbers[channels + columns.size :]
        if channels and (exponents.min() < 2 or exponents.max() > 8 or np.abs(columns).max() > 2**8):
            raise SplitcastError("has a column that cannot be")
    levels = numbers.reshape(channels, lay.height * lay.width, lay.samples)
    return Parts(step, bool(data[0] & CLAMP), shared, exponents, columns, levels)


def rebuilt(parts: Parts, lay: Shape, shape: Sequence[int], common: Tensor | None = None) -> Tensor:
    """What is decoded (b, *d)."""
    if not len(parts.levels):
        return torch.zeros(*shape, device="cpu")
    levels = torch.from_numpy(parts.levels.take(_rings(lay).inverse, axis=1)).float().mul_(parts.step)
    rows = levels.view(len(levels), -1)
    if lay.height * lay.width > 1:
        rows = _turned(rows, lay, _dct(lay.height).T, _dct(lay.width).T)
    if lay.klt:
        q = common if parts.shared else _orthonormal(parts.exponents, parts.columns)
        assert q is not None
        maps = _restored(q[:, : len(rows)], rows, lay)
    else:
        maps = rows.view(len(rows), -1, lay.samples).permute(2, 0, 1)
    return maps.clamp_(min=0).reshape(*shape) if parts.clamped else maps.reshape(*shape)


def _head(step: float) -> bytes:
    """A step that is a bfloat16, the upper half of a float32."""
    return struct.pack("<f", step)[2:]
