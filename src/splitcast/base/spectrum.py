"""Which step a transform-coded message takes: the finest of a ladder that fits into bytes, or the coarsest within an
error.

On a few of the samples, with their KLT, the entropy of the levels (`base.entropy.ideal_bits`) tells about what a step
costs, and the coefficients what it loses; both are nearly powers of the step. From there messages are made until one
fits. Channels are sent up to the last that is worth its column of the KLT: whose levels, by size, add up to as many as
the column has entries. A level takes some ten bits where they are rare, an entry two or three.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.coefficients import (
    KEPT,
    OFFSET,
    Coefficients,
    Parts,
    as_rows,
    as_sent,
    group_sizes,
    quantised_sizes,
    spectra,
)
from splitcast.base.entropy import LIMIT, ideal_bits
from splitcast.base.scales import Integers

Floats = NDArray[np.float64]

SEARCHED = 8
"""Samples at least on which a step is searched, of as many."""
VECTORS = 32
"""Vectors per channel of the few samples that suffice for the KLT; with fewer it is that of all samples."""
FINE = 32.0
"""2^e_k in roots of the channel's energy, in steps."""
SCALE_BITS = 2
"""About what telling the scale of a group takes."""
RUNGS = 16
"""Steps to the octave among which one is searched."""
AIM = 0.97
"""Share of the bytes that is aimed at, since messages that do not fit are made in vain."""
SURE = 1.02
"""By how much the next finer step must be expected to miss the goal if it is not to be tried."""
UNLIKE = 2.0
"""Times what the few samples let expect of all: then all are looked at."""
FAR = 50.0
"""Beyond it, on a log scale, a size tells nothing: that of no bits, or of no error."""
_LEAST = 2.0**-500
MOST_TRIALS = 12 * RUNGS


def ladder(k: int) -> float:
    """Step k of all that are tried, as it is sent."""
    return as_sent(2.0 ** (k / RUNGS))


class Look(NamedTuple):
    """What a step gives on a few samples."""

    channels: int
    """worth their columns"""
    bits: float
    """of a message: levels, their scales, and columns"""
    levels: Tensor
    """sizes of levels, of these channels and perhaps some more"""


def squares(x: Tensor) -> float:
    """The sum of squares, in double precision."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def power(x: Tensor) -> float:
    """The sum of squares, in that of x."""
    flat = x.reshape(-1)
    return float(flat @ flat)


def sparsity(samples: int) -> int:
    """Of how many samples one is looked at: of eight one, but eight at least.

    >>> sparsity(20), sparsity(32), sparsity(64), sparsity(256)
    (2, 4, 8, 8)
    """
    return max(1, min(samples // SEARCHED, SEARCHED))


class Spectrum(Coefficients):
    """A message with the KLT of some of its samples and the coefficients of these, which tell what a step costs and
    loses."""

    def __init__(self, x: Tensor, *, clamped: bool, whole: bool = False) -> None:
        """``whole``: look at all samples; else at a few, if these tell enough of the others."""
        super().__init__(x, clamped=clamped)
        self.known: dict[float, Look] = {}
        """the steps that were tried last"""
        self.total = power(self.maps)
        few = self.maps[:: 1 if whole else sparsity(self.lay.samples)]
        self.share = self.lay.samples / len(few)
        """samples for each of the few"""
        if not whole and not self.total / UNLIKE <= self.share * power(few) <= UNLIKE * self.total:
            few, self.share = self.maps, 1.0
        rows, lay = as_rows(few), self.lay._replace(samples=len(few))
        self.energies, self.vectors = torch.empty(0, device="cpu"), torch.empty(0, 0, device="cpu")
        """of the KLT, greatest first"""
        if self.lay.klt:
            seen = rows if lay.places >= VECTORS * lay.channels else as_rows(self.maps)
            gram = (seen @ seen.T / seen.shape[1]).double()  # in single, solvers fail on dead channels
            energies, vectors = (part.to(x.dtype) for part in torch.linalg.eigh(gram))
            self.energies, self.vectors = energies.flip(0), vectors.flip(1)
            rows = self.vectors.T @ rows
        self.some, self.few = spectra(rows, lay).abs(), lay
        """sizes of coefficients (C, H W few), ring after ring"""

    @cached_property
    def whole(self) -> "Spectrum":
        """The same of all samples."""
        return Spectrum(self.maps.view(self.shape), clamped=self.clamped, whole=True)

    def instead(self, spread: Tensor, step: float) -> Coefficients | None:
        """All samples, if others than the few have much in channels that are left out."""
        left_out = self.lay.channels - len(spread)
        if self.share == 1 or not left_out:
            return None
        expected = self.share * self.energy[len(spread)] / step**2 + self.lay.channels * left_out
        return self.whole if self.total / step**2 - power(spread) > UNLIKE * expected else None

    def within_bytes(self, budget: float) -> tuple[bytes, Parts] | None:
        """The message of the finest step that fits, from the coarse side of an estimate."""
        at, found = self.search(self.bits, 8 * AIM * budget), None
        for k in range(at, at + MOST_TRIALS):
            found = self.message(ladder(k))
            if found and len(found[0]) <= budget:
                return found
        return found

    def within_error(self, x: Tensor, worst: float) -> tuple[bytes, Parts] | None:
        """The message of the coarsest step whose squared error from x is at most this; None where there is none."""
        at = self.search(lambda step: 1 / (self.error(step) + _LEAST), 1 / (worst + 2 * _LEAST)) - 1
        for k in range(at, at - MOST_TRIALS, -1):
            found = self.message(ladder(k))
            if not found or squares(self.seen(found[1]) - x) <= worst:
                return found
        return None

    def search(self, size: Callable[[float], float], goal: float) -> int:
        """The first step of the ladder at which ``size``, nearly a power of the step and falling, is at most this."""
        high = math.ceil(RUNGS * math.log2(max(2.0**-100, float(self.peaks.max())))) + RUNGS
        low, k = high - 20 * RUNGS, high - 5 * RUNGS
        before = (k, math.inf)
        while low < high:
            missed = math.log(max(size(ladder(k)), _LEAST) / goal)
            low, high = (k + 1, high) if missed > 0 else (low, k)
            slope = math.log(2) / RUNGS
            if max(abs(missed), abs(before[1])) < FAR:
                slope = max(slope / 8, (missed - before[1]) / (before[0] - k))
            if missed <= 0 and missed + slope > math.log(SURE):
                break
            before = (k, missed)
            k = min(max(low, k + math.ceil(missed / slope)), high - 1)
        return high

    @cached_property
    def peaks(self) -> NDArray[np.float32]:
        """The largest of each channel (C,)."""
        return self.some.amax(1).numpy()

    @cached_property
    def energy(self) -> Floats:
        """Of the channels from each on (C + 1,)."""
        each = torch.linalg.vector_norm(self.some, dim=1).double().square().numpy()
        return np.append(each[::-1].cumsum()[::-1], 0.0)

    def look(self, step: float) -> Look:
        """What a step gives."""
        if step not in self.known:
            if len(self.known) == KEPT:
                self.known.clear()
            self.known[step] = self._looked(step)
        return self.known[step]

    def _looked(self, step: float) -> Look:
        alive = np.flatnonzero(self.peaks + OFFSET * step >= step)
        some = self.some[: int(alive[-1]) + 1 if len(alive) else 0]
        if len(some) and not self.peaks.max() < LIMIT * step:  # no message has such levels
            some = some.clamp(max=LIMIT * step)
        levels = quantised_sizes(some, step)
        if not len(some):
            return Look(0, 0.0, levels)
        sizes = group_sizes(self.few, len(some))
        sums = np.add.reduceat(levels.flatten().numpy(), np.cumsum(sizes) - sizes)
        kept = len(some)
        if self.lay.klt:
            told = levels.sum(1).numpy() if len(sizes) % kept else sums.reshape(kept, -1).sum(1)
            used = np.flatnonzero(self.share * told >= self.lay.channels)
            kept = int(used[-1]) + 1 if len(used) else 0
            sizes = group_sizes(self.few, kept)
            sums = sums[: len(sizes)]
        scales = SCALE_BITS * np.count_nonzero(sums)
        if self.lay.klt:  # columns are told once, levels of all samples
            columns = self.column_sums[:kept] * np.exp2(self.fine(step)[:kept])
            sums = np.concatenate([sums, columns / self.share])
            sizes = np.concatenate([sizes, np.full(kept, self.lay.channels / self.share)])
        return Look(kept, self.share * ideal_bits(sums, sizes) + scales, levels)

    def columns(self, step: float) -> tuple[Integers, Integers]:
        if not self.lay.klt:
            return super().columns(step)
        kept = self.look(step).channels
        fine = self.fine(step)[:kept].astype(np.int32)
        columns = self.vectors[:, :kept] * torch.from_numpy(np.exp2(fine, dtype=np.float32))
        return fine, columns.round().T.to(torch.int32).numpy()

    def fine(self, step: float) -> Floats:
        """e_k of all channels."""
        return np.rint(self.log_roots + math.log2(FINE / step)).clip(2, 8)

    def bits(self, step: float) -> float:
        """Bits of the message."""
        return self.look(step).bits

    def error(self, step: float) -> float:
        """Squared error of the message."""
        found = self.look(step)
        lost = torch.sub(self.some[: found.channels], found.levels[: found.channels], alpha=step)
        return self.share * float(squares(lost) + self.energy[found.channels])

    @cached_property
    def column_sums(self) -> Floats:
        """Of the sizes in every column of the KLT (C,)."""
        return self.vectors.abs().sum(0).double().numpy()

    @cached_property
    def log_roots(self) -> Floats:
        """log2 of the roots of the energies (C,)."""
        roots: Floats = 0.5 * np.log2(self.energies.double().clamp(min=2.0**-100).numpy())
        return roots
