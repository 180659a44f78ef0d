"""Which step a transform-coded message takes: the finest of a ladder that fits into bytes, or the coarsest within an
error.

On a few of the samples, with an exact KLT, the entropy of the levels (`base.entropy.ideal_bits`) tells about what a
step costs, and the coefficients what it loses; both are nearly powers of the step. From there messages are made until
one fits.
"""

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
from torch import Tensor

from splitcast.base.coefficients import OFFSET, Coefficients, Parts, group_sizes, quantised_sizes, spoken
from splitcast.base.entropy import ideal_bits

SEARCHED = 8
"""Samples on which a step is searched."""
SCALE_BITS = 2
"""About what telling the scale of a group takes."""
RUNGS = 16
"""Steps to the octave among which one is searched."""
INTERPOLATED = 5
"""Steps tried where a power of the step would be; then halves."""
_LEAST = 2.0**-500
MOST_TRIALS = 12 * RUNGS


def ladder(k: int) -> float:
    """Step k of all that are tried."""
    return float(2.0 ** (k / RUNGS))


class Spectrum(Coefficients):
    """The coefficients of a message, and what a step costs and loses."""

    def __init__(self, x: Tensor, *, clamped: bool) -> None:
        super().__init__(x, clamped=clamped)
        self.known: dict[float, float] = {}
        """bits of the steps that were tried"""

    def within_bytes(self, budget: float) -> tuple[bytes, Parts] | None:
        """The message of the finest step that fits, from the coarse side of an estimate."""
        at, found = self.search(self.bits, 8 * budget), None
        for step in map(ladder, range(at, at + MOST_TRIALS)):
            if self.bits(step) + self.column_bits(step) > 8 * budget:
                continue
            found = self.message(step)
            if found and len(found[0]) <= budget:
                return found
        return found

    def within_error(self, x: Tensor, worst: float) -> tuple[bytes, Parts] | None:
        """The message of the coarsest step whose squared error from x is at most this; None where there is none."""
        at = self.search(lambda step: 1 / (self.error(step) + _LEAST), 1 / (worst + 2 * _LEAST)) - 1
        for k in range(at, at - MOST_TRIALS, -1):
            found = self.message(ladder(k))
            if not found or float((self.seen(found[1]) - x).double().square().sum()) <= worst:
                return found
        return None

    def search(self, size: Callable[[float], float], goal: float) -> int:
        """The first step of the ladder at which ``size``, nearly a power of the step and falling, is at most this."""
        top = math.ceil(RUNGS * math.log2(float(self.peaks.max().clamp(min=2.0**-100)))) + RUNGS
        low, high, above, below = top - 20 * RUNGS, top, 0.0, 0.0  # sizes just before low, and at high
        middle, probes = top - 4 * RUNGS, 0
        while low < high:
            found, probes = size(ladder(middle)), probes + 1
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
        kept = spoken(self.peaks / step)
        if not kept:
            return 0.0
        some = self.some[:kept]
        sizes = group_sizes(self.lay._replace(samples=some.shape[2]), len(some))
        sums = np.add.reduceat(quantised_sizes(some, step).flatten().numpy(), np.cumsum(sizes) - sizes)
        return self.lay.samples / some.shape[2] * ideal_bits(sums, sizes) + SCALE_BITS * np.count_nonzero(sums)

    def column_bits(self, step: float) -> float:
        """Bits of the columns of the KLT."""
        if not self.lay.klt:
            return 0.0
        sums = (self.column_sums * self.fine(step).exp2())[self.peaks + OFFSET * step >= step].numpy()
        return ideal_bits(sums, np.full(len(sums), self.lay.channels))

    @cached_property
    def column_sums(self) -> Tensor:
        """Of the sizes in every column of the KLT (C,)."""
        return self.vectors.abs().sum(0)

    def error(self, step: float) -> float:
        """Squared error of the message."""
        share = self.lay.samples / self.some.shape[2]
        lost = self.some - step * quantised_sizes(self.some, step)
        return share * float(lost.double().square().sum())
