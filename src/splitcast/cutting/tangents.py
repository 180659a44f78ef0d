"""What it takes to meet a deadline of a stage, from below: tangents of the least price of bandwidth and server CPU.

Whoever takes cut v needs shares b of the band and f of the server with a + x / r(b) + y / f <= chi. Priced at alpha and
beta, that is at least

    alpha (A - Lambda chi) + 2 sqrt(alpha beta) R,
    1 / Lambda = |d(x / r)/db| at some b0 > 0,   A = Lambda (a + x / r(b0)) + b0,   R = sqrt(Lambda y),

for **all** prices and deadlines: with lambda = alpha Lambda, b0 is where lambda x / r(b) + alpha b is least, and lambda
y / f + beta f is nowhere below 2 sqrt(lambda y beta). It is a tangent in chi of the least price, which is convex, where
b0 is what that deadline asks for; how well b0 is found decides how close the bound is, not whether it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array
from splitcast.cutting.menu import Menu

_NEWTON = 3
_EFFICIENCY = np.geomspace(1e-6, 60, 3000)
"""L = ln(1 + snr/b)"""
_LOG_STRETCH = np.log(np.expm1(_EFFICIENCY) / _EFFICIENCY)
"""ln of x / r(b) in units of x / snr"""


@dataclass(frozen=True)
class StageChoices:
    """One stage of a menu, in shares of the whole band and the whole server; (N, V)."""

    weight: float
    shared: bool
    a: Array
    """s"""
    x: Array
    """s of sending at 1 nat/s/Hz over the whole band, or with a linear rate at its own"""
    y: Array
    """s of the whole server"""
    snr: Array | None
    """(N, 1), over the whole band; None: the rate is linear"""
    cohort: Array
    """s of a broadcast to the cohort, in a too"""

    def fixed(self, used: NDArray[np.bool_]) -> Array:
        """a, if the cuts in ``used`` (V,) have cohorts."""
        return np.asarray(self.a - self.cohort + self.cohort[:, used].sum(-1, keepdims=True))

    @property
    def solo(self) -> Array:
        """Seconds of sending and of the server with the whole cell to itself."""
        return np.asarray(self.y + (self.x if self.snr is None else self.x / np.log1p(self.snr)))

    def tangents(self, a: Array, lo: Sequence[float], hi: Sequence[float], ratio: float) -> Array:
        """A, Lambda and R for deadlines from lo to hi (M,), (M, 3, N, V); A is infinite where a cut cannot meet hi.

        They touch at the middle, for beta = ratio alpha. ``a`` is (M, N, V).
        """
        first, last = (np.array(ends)[:, None, None] for ends in (lo, hi))
        alone = a + self.solo
        closed = alone > last * (1 + 1e-12)
        if not self.shared:
            return np.stack([np.where(closed, np.inf, 0.0), np.zeros_like(a), np.zeros_like(a)], axis=1)
        slack = np.where(closed, 1.0, np.maximum(first + last, alone + last) / 2 - a)
        slack = np.maximum(slack, 1e-300)
        if self.snr is None:
            slope, price = self.x / slack**2, 2 * self.x / slack
        else:
            slope, price = self._shannon(slack, self.snr, ratio)
        silent = self.x <= 0  # only the server's share matters, if it works at all
        slope = np.where(silent, max(ratio, 1e-12) * self.y / slack**2, slope)
        offset = slope * a + np.where(silent, 0.0, price)
        return np.stack([np.where(closed, np.inf, offset), slope, np.sqrt(slope * self.y)], axis=1)

    def _shannon(self, slack: Array, snr: Array, ratio: float) -> tuple[Array, Array]:
        """Lambda, and Lambda x / r + b, at b = snr / (e^L - 1) such that x / r + y / f = slack, nearly."""
        per, cpu = np.where(self.x > 0, self.x, 1.0) / snr, self.y * ratio
        L = np.interp(np.log(slack / per), _LOG_STRETCH, _EFFICIENCY)
        for last in (*[False] * _NEWTON, True):
            z = np.expm1(L)
            d = z / (1 + z)
            marginal = np.maximum(L - d, L * L * (0.5 - L / 6))
            u, b = per * z / L, snr / z  # x / r, and the share
            steep = u * marginal / (b * L)  # |du/db|
            if last:
                break
            server = np.sqrt(cpu * steep)  # y / f
            du = 1 / d - 1 / L  # of ln u
            slope = (u * du + server * (du + 0.5 * d / marginal)) / (u + server)
            L = np.clip(L - np.clip(np.log((u + server) / slack) / slope, -2, 2), 0.2 * L, 60.0)
        return 1 / steep, u / steep + b


def choices(menu: Menu) -> list[StageChoices]:
    """Every stage of a menu."""
    found, cell = list[StageChoices](), menu.cell
    for block in menu.blocks:
        for k, weight in enumerate(block.weight):
            x, snr, strength = block.bits[k] / cell.bandwidth_hz, None, block.strength[k][:, None]
            if block.sharing == "up":
                x, snr = x * np.log(2), strength / (cell.bandwidth_hz * cell.noise_w_per_hz)
            elif block.sharing == "down":
                x = x / strength
            y, shared = block.flops[k] / cell.server_flops_per_s, block.sharing != "none"
            found.append(StageChoices(float(weight), shared, block.fixed_s[k], x, y, snr, block.cohort_s[k]))
    return found
