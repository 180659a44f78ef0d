"""Transform coding of what is sent: decorrelate, quantise coarsely, spend bits where the energy is.

A message (b, C, H, W) of feature maps is M (C, H W b), a vector of C channels at every place of every sample.

    KLT     Y = Q^T M          Q: the eigenvectors of M M^T, so that channels are uncorrelated, greatest energy first
    DCT     X = D_H Y D_W^T    every map of every sample; D_n is the orthonormal DCT-II
    q = sign(X) floor(|X| / step + 0.35)      a dead zone of 1.3 steps around zero
    received: step q, back through D and Q, and clamped at 0 where nothing sent was negative

Levels q travel as a code stream (`base.entropy`) in groups, one for each channel and each ring max(u, v) of
frequencies, with its own scale. Nothing but the message itself is needed to decode it: the columns of Q travel along,
up to the last whose channel has a level other than zero. Column k is round(2^e_k Q_k), and all are made orthonormal
again on both sides (QR), so that their rounding costs a little decorrelation and no accuracy. As fine as pays is
2^e_k = 32 sqrt(energy of the channel) / step, as a power of two from 4 to 256.

Flat messages (b, d) are d channels of one place, and tokens (b, T, d) are b T samples of those. The KLT is left out
where it has fewer than 8 C vectors to be learned from, or more than 256 channels: its columns would outweigh what they
save. Then every channel has its own scale, as far as a group has 16 levels at least.

    message   0x00, fp32 values                              where coding would take more, or is not possible
              0x01 (0x03: clamp), step as bfloat16, channels sent as uint16 (with a KLT), code stream

After the design of image coders (JPEG; Karhunen-Loève over channels as in JPEG 2000 part 2 and spectral imaging).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.codec import EMPTY, FP32, Codec
from splitcast.base.entropy import LIMIT, Integers, coded, decoded, ideal_bits
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.rounding import Draw

OFFSET = 0.35
"""What is added before rounding down; 1/2 would be to nearest."""
VECTORS = 8
"""Vectors per channel that a KLT needs to be worth its columns."""
CHANNELS = 256
"""Most channels of a KLT."""
GROUP = 16
"""Least levels of a group."""
FINE = 32.0
LARGEST = 2.0**50
"""Values beyond travel as they are, so that arithmetic on the others is finite: sums of squares are."""
SEARCHED = 8
"""Samples on which a step is searched."""
CODER = 80.0
"""Operations of the entropy coder for a byte: about 1.3 levels, each with the zeros before it, two numbers of 30."""
PROBES, PROBE = 8.0, 8.0
"""Steps that are tried in a search, and operations of each for a value."""
SCALE_BITS = 2
"""About what telling the scale of a group takes."""
EXPECTED_BITS = 0.2
"""Bits per value that plans expect where only data can tell; about what step 2.5 takes on the paper's CNN at cut 1."""
RAW, CODED, CLAMPED = 0, 1, 3
_TOP = torch.finfo(torch.float32).max


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
    exponents: Integers
    """e_k of the channels sent (r,); of no channel without a KLT"""
    columns: Integers
    """round(2^e_k Q_k), (r, C)"""
    levels: Integers
    """(r or C, H W, b), frequencies ring after ring"""


@dataclass(frozen=True)
class Rate:
    """How coarse: by the step, by bytes per sample, or by the squared error relative to what is sent."""

    by: Literal["step", "bytes", "error"]
    first: float
    last: float
    rounds: int = 1
    """rounds from the first value to the last, evenly on a log scale"""
    expected: float = 0.0
    """bytes per sample that plans count; 0 where none are stated"""

    @staticmethod
    def parse(text: str, field: str) -> "Rate":
        """
        >>> Rate.parse("140B", "codec"), Rate.parse("4..2@100", "codec").at(50)
        (Rate(by='bytes', first=140.0, last=140.0, rounds=1, expected=0.0), 2.8284271247461903)
        """
        found = _RATE.fullmatch(text)
        if not found:
            raise SplitcastError(
                f"{field}: {shown('transform:' + text)} has no rate; give transform:2.5 (step), :140B (per sample), "
                ":5% (squared error), :4..2@100 (over 100 rounds), or :2.5~160B (what plans expect)"
            )
        first, last = float(found["first"]), float(found["last"] or found["first"])
        by: dict[str, Literal["step", "bytes", "error"]] = {"": "step", "B": "bytes", "%": "error"}
        scale = 0.01 if found["unit"] == "%" else 1.0
        if not (min(first, last) > 0 and max(first, last) <= (100 if scale < 1 else 1e9)):
            raise SplitcastError(f"{field}: {shown('transform:' + text)} must be above 0, and at most 1e9, or 100 %")
        rounds, expected = int(found["rounds"] or 1), float(found["expected"] or 0)
        return Rate(by[found["unit"]], scale * first, scale * last, rounds, expected)

    def at(self, t: int) -> float:
        """The value in round ``t``, counted from 1."""
        share = min(1.0, max(0, t) / self.rounds)
        return self.first if self.first == self.last else self.first * (self.last / self.first) ** share


_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_RATE = re.compile(
    rf"(?P<first>{_NUMBER})(?:\.\.(?P<last>{_NUMBER})(?=[B%]?@))?(?P<unit>[B%]?)"
    rf"(?:@(?P<rounds>[1-9]\d{{0,8}}))?(?:~(?P<expected>{_NUMBER})B)?"
)


class Transform(Codec):
    """Messages as above; decoding needs no rate, so that whoever receives knows none."""

    varies: ClassVar[bool] = True

    def __init__(self, rate: Rate, name: str, value: float | None = None) -> None:
        self.rate, self.name = rate, name
        self.value = rate.at(1) if value is None else value

    @staticmethod
    def named(text: str, field: str = "codec") -> "Transform":
        """transform:RATE, without the first part."""
        return Transform(Rate.parse(text, field), f"transform:{text}")

    def at(self, t: int) -> "Transform":
        return self if self.rate.rounds == 1 else Transform(self.rate, self.name, self.rate.at(t))

    def nbytes(self, shape: Sequence[int]) -> int:
        each = self.rate.expected or (self.value if self.rate.by == "bytes" else 0)
        samples, values = shape[0] if shape else 1, math.prod(shape)
        told = math.ceil(each * samples) if each else math.ceil(EXPECTED_BITS * values / 8)
        return min(told, self.bound(shape))

    def bound(self, shape: Sequence[int]) -> int:
        values = math.prod(shape)
        return 1 + 4 * values if values else 0

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        """Both ways KLT and DCT as multiply-adds, 8 operations a value for levels and their places, and `CODER` for
        every byte. Encoding learns the KLT (a Gram matrix, and 9 C^3 for its eigenvectors); unless the step is given,
        it is searched by `PROBES` times `PROBE` operations a value on some of the samples, and one message in five is
        made twice."""
        lay, values = Shape.of(shape), float(math.prod(shape))
        turn = 2.0 * lay.channels**2 * lay.places if lay.klt else 0.0
        made = turn + 8.0 * values + CODER * self.nbytes(shape)
        both = made + 2.0 * (lay.height + lay.width) * values if lay.height * lay.width > 1 else made
        learned = turn + 9.0 * lay.channels**3 if lay.klt else 0.0
        searched = 0.0
        if self.rate.by != "step":
            searched = PROBES * PROBE * values * min(1.0, SEARCHED / max(1, lay.samples)) + 0.2 * made
        return both + learned + searched, both

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return torch.frombuffer(bytearray(self._sent(x)[0]), dtype=torch.uint8) if x.numel() else EMPTY

    def measured(self, x: Tensor, draw: Draw | None = None) -> tuple[Tensor, list[int]]:
        if not x.numel():
            return x, [0] * len(x)
        sent = [self._sent(one) for one in x]  # one by one: a message is the same whoever else sends
        lay = Shape.of(x.shape[1:])
        seen = [
            one.detach().to("cpu", torch.float32).clamp(-_TOP, _TOP)
            if parts is None
            else _rebuilt(parts, lay, one.shape)
            for one, (_, parts) in zip(x, sent, strict=True)
        ]
        return torch.stack(seen).to(x), [len(payload) for payload, _ in sent]

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        if not math.prod(shape):
            return torch.empty(*shape, device=payload.device)
        data = payload.cpu().numpy().tobytes()
        if data[:1] == bytes([RAW]):
            if len(data) != self.bound(shape):
                raise SplitcastError(f"has {len(data)} bytes, not {self.bound(shape)}")
            return payload[1:].clone().view(torch.float32).view(*shape)
        lay = Shape.of(shape)
        return _rebuilt(_parsed(data, lay), lay, shape)

    def _sent(self, x: Tensor) -> tuple[bytes, Parts | None]:
        """A message, and what it says; None if the values as they are."""
        x = x.detach().to("cpu", torch.float32)
        low, high = (float(v) for v in torch.aminmax(x))
        if max(-low, high) < LARGEST:  # not so if there is a NaN
            found = self._coded(x, clamped=low >= 0)
            if found and len(found[0]) < self.bound(x.shape):
                return found
        return bytes([RAW]) + FP32.encode(x).numpy().tobytes(), None

    def _coded(self, x: Tensor, *, clamped: bool) -> tuple[bytes, Parts] | None:
        """As above, at the rate; None where levels would be too large."""
        spectrum = Spectrum(x, clamped=clamped)
        if self.rate.by == "step":
            return spectrum.message(self.value)
        if self.rate.by == "bytes":  # the finest step that fits, from the coarse side of an estimate
            budget = self.value * x.shape[0]
            at = spectrum.search(spectrum.bits, 8 * budget)
            found = None
            for step in map(_ladder, range(at, at + MOST_TRIALS)):
                if spectrum.bits(step) + spectrum.column_bits(step) > 8 * budget:
                    continue
                found = spectrum.message(step)
                if found and len(found[0]) <= budget:
                    return found
            return found
        worst = self.value * float(x.double().square().sum())
        at = spectrum.search(lambda step: 1 / (spectrum.error(step) + _LEAST), 1 / (worst + 2 * _LEAST)) - 1
        for k in range(at, at - MOST_TRIALS, -1):
            found = spectrum.message(_ladder(k))
            if not found or float((spectrum.seen(found[1]) - x).double().square().sum()) <= worst:
                return found
        return None


class Spectrum:
    """The coefficients of a message, before their quantisation; the DCT comes first here, since KLT and DCT commute."""

    def __init__(self, x: Tensor, *, clamped: bool) -> None:
        self.shape, self.lay, self.clamped = x.shape, Shape.of(x.shape), clamped
        self.known: dict[float, float] = {}
        """bits of the steps that were tried"""
        turned = _turned(_rows(x, self.lay), self.lay, forward=True).view(self.lay.channels, -1, self.lay.samples)
        self.rows = turned.index_select(1, torch.from_numpy(_rings(self.lay).order)).view(self.lay.channels, -1)
        self.energies, self.vectors = torch.empty(0, device="cpu"), torch.empty(0, 0, device="cpu")
        if self.lay.klt:
            gram = (self.rows @ self.rows.T / self.lay.places).double()  # in single, solvers fail on dead channels
            energies, vectors = (part.to(x.dtype) for part in torch.linalg.eigh(gram))
            self.energies, self.vectors = energies.flip(0), vectors.flip(1)

    def message(self, step: float) -> tuple[bytes, Parts] | None:
        """The message of this step, and what it says; None where a level would be too large."""
        step = float(torch.tensor(step, device="cpu").bfloat16())
        if step < 2.0**-100:
            return None
        lay, exponents, columns = self.lay, np.zeros(0, np.int32), np.zeros((0, self.lay.channels), np.int32)
        if lay.klt:
            fine = self._fine(step)
            exponents = fine.to(torch.int32).numpy()
            columns = (self.vectors * fine.exp2()).round().T.to(torch.int32).numpy()
            spread = _orthonormal(exponents, columns).div_(step).T @ self.rows
        else:
            spread = self.rows / step
        largest = torch.maximum(spread.amax(1), -spread.amin(1))
        if float(largest.max()) >= LIMIT - 1:
            return None
        if lay.klt:
            kept = _spoken(largest)
            exponents, columns, spread = exponents[:kept], columns[:kept], spread[:kept]
        levels = _quantised(spread).view(-1, lay.height * lay.width, lay.samples).numpy()
        parts = Parts(step, self.clamped, exponents, columns, levels)
        return _packed(parts, lay), parts

    def seen(self, parts: Parts) -> Tensor:
        """What is decoded of a message."""
        return _rebuilt(parts, self.lay, self.shape)

    def _fine(self, step: float) -> Tensor:
        """e_k of all channels."""
        return (FINE / step * self.energies.clamp(min=2.0**-100).sqrt()).log2().round().clamp(2, 8)

    # on some of the samples, with an exact KLT: what a step costs and what it loses, about

    def search(self, size: Callable[[float], float], goal: float) -> int:
        """The first step of the ladder at which ``size``, nearly a power of the step and falling, is at most this."""
        top = math.ceil(RUNGS * math.log2(float(self.peaks.max().clamp(min=2.0**-100)))) + RUNGS
        low, high, above, below = top - 20 * RUNGS, top, 0.0, 0.0  # sizes just before low, and at high
        middle, probes = top - 4 * RUNGS, 0
        while low < high:
            found, probes = size(_ladder(middle)), probes + 1
            if found > goal:
                low, above = middle + 1, found
            else:
                high, below = middle, found
            if not above:  # nothing too fine yet: two octaves on
                middle = max(low, high - 2 * RUNGS)
                continue
            share = 0.5
            if below > 0 and probes < INTERPOLATED:
                share = math.log(above / goal) / math.log(above / below)
            middle = min(high - 1, low + int(share * (high - low)))
        return low

    @cached_property
    def some(self) -> Tensor:
        """Sizes of coefficients (C, H W, a few samples), ring after ring."""
        lay = self.lay
        every = -(-lay.samples // SEARCHED)
        rows = self.rows.view(lay.channels, -1, lay.samples)[:, :, ::every]
        flat = rows.reshape(lay.channels, -1)
        return (self.vectors.T @ flat if lay.klt else flat).abs().view(rows.shape)

    @cached_property
    def peaks(self) -> Tensor:
        """The largest of each channel (C,)."""
        return self.some.flatten(1).amax(1)

    def bits(self, step: float) -> float:
        """Bits of the levels, and of their scales."""
        if step not in self.known:
            self.known[step] = self._bits(step)
        return self.known[step]

    def _bits(self, step: float) -> float:
        kept = _spoken(self.peaks / step)
        if not kept:
            return 0.0
        some = self.some[:kept]
        sizes = _sizes(self.lay._replace(samples=some.shape[2]), len(some))
        sums = np.add.reduceat(_quantised_sizes(some, step).flatten().numpy(), np.cumsum(sizes) - sizes)
        return self.lay.samples / some.shape[2] * ideal_bits(sums, sizes) + SCALE_BITS * np.count_nonzero(sums)

    def column_bits(self, step: float) -> float:
        """Bits of the columns of the KLT."""
        if not self.lay.klt:
            return 0.0
        columns = (self.vectors * self._fine(step).exp2())[:, self.peaks + OFFSET * step >= step]
        return ideal_bits(columns.abs().sum(0).numpy(), np.full(columns.shape[1], self.lay.channels))

    def error(self, step: float) -> float:
        """Squared error of the message."""
        share = self.lay.samples / self.some.shape[2]
        lost = self.some - step * _quantised_sizes(self.some, step)
        return share * float(lost.double().square().sum())


RUNGS = 16
"""Steps to the octave among which one is searched."""
INTERPOLATED = 5
"""Steps tried where a power of the step would be; then halves."""
_LEAST = 2.0**-500
MOST_TRIALS = 12 * RUNGS


def _ladder(k: int) -> float:
    return float(2.0 ** (k / RUNGS))


def _spoken(largest: Tensor) -> int:
    """Channels up to the last with a level other than zero, of the largest size of each, in steps."""
    used = np.flatnonzero(largest.numpy() + OFFSET >= 1)
    return int(used[-1]) + 1 if len(used) else 0


def _quantised(spread: Tensor) -> Tensor:
    """sign(x) floor(|x| + OFFSET), as int32"""
    return torch.add(spread, spread.sign(), alpha=OFFSET).to(torch.int32)  # which rounds towards zero


def _quantised_sizes(sizes: Tensor, step: float) -> Tensor:
    """floor(x / step + OFFSET) of x >= 0, as int32"""
    return torch.mul(sizes, 1 / step).add_(OFFSET).to(torch.int32)


def _rows(x: Tensor, lay: Shape) -> Tensor:
    """A message as M (C, H W b)."""
    if lay.height * lay.width == 1:
        return x.reshape(lay.samples, lay.channels).T.contiguous()
    return x.reshape(lay.samples, lay.channels, -1).permute(1, 2, 0).reshape(lay.channels, -1)


def _message(rows: Tensor, lay: Shape, shape: Sequence[int]) -> Tensor:
    """The inverse of `_rows`."""
    return rows.view(lay.channels, -1, lay.samples).permute(2, 0, 1).reshape(*shape)


def _turned(rows: Tensor, lay: Shape, *, forward: bool) -> Tensor:
    """The DCT of every map in (k, H W b), or its inverse."""
    if lay.height * lay.width == 1:
        return rows.clone()
    down, across = _dct(lay.height), _dct(lay.width)
    if not forward:
        down, across = down.T, across.T
    rows = down @ rows.view(-1, lay.height, lay.width * lay.samples)
    return (across @ rows.view(-1, lay.width, lay.samples)).view(-1, lay.places)


@cache
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


@cache
def _rings(lay: Shape) -> Rings:
    ring = np.maximum(*np.indices((lay.height, lay.width))).flatten()
    order, counts = np.argsort(ring, kind="stable"), [0]
    for size in np.bincount(ring):
        if counts[-1] * lay.samples >= GROUP:
            counts.append(0)
        counts[-1] += int(size)
    return Rings(order, np.argsort(order), tuple(counts))


@cache
def _sizes(lay: Shape, channels: int) -> Integers:
    """Sizes of the groups of levels of so many channels."""
    each = lay.samples * np.array(_rings(lay).counts, np.int32)
    if len(each) > 1 or each[0] >= GROUP:
        return np.tile(each, channels)
    together = -(-GROUP // int(each[0]))  # channels too small for a group of their own
    full, rest = divmod(channels, together)
    return int(each[0]) * np.array([together] * full + [rest] * (rest > 0), np.int32)


def _all_sizes(lay: Shape, channels: int) -> Integers:
    """Sizes of all groups of a message: exponents and columns of its KLT, then levels."""
    sizes = _sizes(lay, channels)
    if not lay.klt or not channels:
        return sizes
    return np.concatenate([np.array([channels] + [lay.channels] * channels, np.int32), sizes])


def _orthonormal(exponents: Integers, columns: Integers) -> Tensor:
    """Q (C, r) from its rounded columns (r, C)."""
    rough = torch.from_numpy(columns).float() * torch.from_numpy(exponents).float().neg().exp2()[:, None]
    q: Tensor = torch.linalg.qr(rough.T).Q
    return q


def _packed(parts: Parts, lay: Shape) -> bytes:
    head = bytes([CLAMPED if parts.clamped else CODED]) + _head(parts.step)
    numbers = [parts.levels.reshape(-1)]
    if lay.klt:
        head += len(parts.exponents).to_bytes(2, "little")
        numbers = [np.diff(parts.exponents, prepend=np.int32(5)), parts.columns.reshape(-1), *numbers]
    return head + coded(np.concatenate(numbers), _all_sizes(lay, len(parts.levels)))


def _parsed(data: bytes, lay: Shape) -> Parts:
    """What a coded message says; whatever is not one raises a `SplitcastError`."""
    start = 5 if lay.klt else 3
    if len(data) < start or data[0] not in (CODED, CLAMPED):
        raise SplitcastError("is not a message of this format")
    step = float(torch.frombuffer(bytearray(data[1:3]), dtype=torch.bfloat16))
    channels = int.from_bytes(data[3:5], "little") if lay.klt else lay.channels
    if not 2.0**-100 <= step <= LARGEST or channels > lay.channels:
        raise SplitcastError("has a step or a number of channels that cannot be")
    numbers = decoded(data[start:], _all_sizes(lay, channels))
    exponents, columns = np.zeros(0, np.int32), np.zeros((0, lay.channels), np.int32)
    if lay.klt:
        exponents = (5 + np.cumsum(numbers[:channels], dtype=np.int64)).clip(0, 99).astype(np.int32)
        columns = numbers[channels:][: channels * lay.channels].reshape(channels, lay.channels)
        numbers = numbers[channels + columns.size :]
        if channels and (exponents.min() < 2 or exponents.max() > 8 or np.abs(columns).max() > 2**8):
            raise SplitcastError("has a column that cannot be")
    levels = numbers.reshape(channels, lay.height * lay.width, lay.samples)
    return Parts(step, data[0] == CLAMPED, exponents, columns, levels)


def _rebuilt(parts: Parts, lay: Shape, shape: Sequence[int]) -> Tensor:
    """What is decoded (b, *d)."""
    if not len(parts.levels):
        return torch.zeros(*shape, device="cpu")
    levels = torch.from_numpy(parts.levels.take(_rings(lay).inverse, axis=1)).float().mul_(parts.step)
    rows = _turned(levels.view(len(levels), -1), lay, forward=False)
    if lay.klt:
        rows = _orthonormal(parts.exponents, parts.columns) @ rows
    if parts.clamped:
        rows.clamp_(min=0)
    return _message(rows, lay, shape)


def _head(step: float) -> bytes:
    return torch.tensor([step], device="cpu").bfloat16().view(torch.uint8).numpy().tobytes()
