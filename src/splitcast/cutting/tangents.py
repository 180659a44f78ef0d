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

_NEWTON = 2
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

    def fixed(self, must: Sequence[bool]) -> Array:
        """a, if the cuts in ``must`` (V,) are in use and other clients' are not known; empty: none is."""
        if not any(must):
            return self.a
        return np.asarray(self.a + self.cohort[:, must].sum(-1, keepdims=True) - np.where(must, self.cohort, 0.0))

    @property
    def solo(self) -> Array:
        """Seconds of sending and of the server with the whole cell to itself."""
        return np.asarray(self.y + (self.x if self.snr is None else self.x / np.log1p(self.snr)))

    def tangents(self, a: Array, lo: Sequence[float], hi: Sequence[float], ratio: float) -> Array:
        """0, or infinity where a cut cannot meet hi, then A, Lambda and R, (M, 4, N, V), for deadlines lo to hi (M,).

        They touch at the middle, for beta = ratio alpha. ``a`` is (M, N, V).
        """
        first, last = (np.array(ends)[:, None, None] for ends in (lo, hi))
        alone = a + self.solo
        closed = alone > last * (1 + 1e-12)
        if not self.shared:
            return np.stack([np.where(closed, np.inf, 0.0), *[np.zeros_like(a)] * 3], axis=1)
        slack = np.where(closed, 1.0, np.maximum(first + last, alone + last) / 2 - a)
        slack = np.maximum(slack, 1e-300)
        if self.snr is None:
            slope, price = self.x / slack**2, 2 * self.x / slack
        else:
            slope, price = self._shannon(slack, self.snr, ratio)
        silent = self.x <= 0  # only the server's share matters, if it works at all
        slope = np.where(silent, max(ratio, 1e-12) * self.y / slack**2, slope)
        offset = slope * a + np.where(silent, 0.0, price)
        return np.stack([np.where(closed, np.inf, 0.0), offset, slope, np.sqrt(slope * self.y)], axis=1)

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


class Tangents:
    """The least price of meeting deadlines in boxes of them, stage by stage, of all choices: what `deadlines` adds up.

    Shapes: B boxes, K corners of each, Q stages in which something is shared.
    """

    def __init__(self, parts: Array, barred: Array, weight: Array, cuts: int) -> None:
        """``parts``: A, Lambda and R stage by stage, (B, 3 Q, V N); ``barred``: 0, or infinity, (B, 1, V N)."""
        self.parts, self.barred, self.weight, self.cuts = parts, barred, weight, cuts

    def keep(self, which: NDArray[np.bool_]) -> None:
        """Go on with some of the boxes."""
        self.parts, self.barred = self.parts[which], self.barred[which]

    def costs(self, prices: Array, chi: Array) -> Array:
        """Of every choice at prices (B, 2, Q) and deadlines (B, K, Q), (B, K, V, N)."""
        alpha, mean = prices[:, None, 0], np.sqrt(prices[:, None, 0] * prices[:, None, 1])  # (B, 1, Q)
        each = np.empty((*chi.shape, 3))
        each[..., 0], each[..., 1], each[..., 2] = alpha, -alpha * chi, 2 * mean
        cost = each.reshape(*chi.shape[:2], -1) @ self.parts + self.barred
        return np.asarray(cost.reshape(*chi.shape[:2], self.cuts, -1))

    def fitted(self, prices: Array, chi: Array) -> Array:
        """Prices (B, 2, Q) at which what is asked for in the middle is worth the time of a stage."""
        each = self.costs(prices, chi.mean(1, keepdims=True))  # (B, 1, V, N)
        picked = (each == each.min(2, keepdims=True)).reshape(len(each), -1, 1) * 1.0
        _, fall, work = self._sums(picked)
        alpha = self.weight / np.maximum(fall[..., 0], 1e-300)
        return np.stack([alpha, alpha * work[..., 0] ** 2], axis=1)

    def uphill(self, prices: Array, chi: Array, near: Array, asked: Array) -> Array:
        """Supergradient in the logarithms of the prices, (B, 2, Q): of what corners ask for, (B, K, V N), each counted
        ``near`` (B, K) times."""
        way = np.stack([near, *(near[:, :, None] * chi).transpose(2, 0, 1)], axis=1)  # (B, 1 + Q, K)
        need, fall, work = self._sums((way @ asked).swapaxes(1, 2))  # (B, Q, 1 + Q)
        used = np.diagonal(fall[..., 1:], axis1=1, axis2=2)
        alpha, beta = prices[:, 0], prices[:, 1]
        both = np.sqrt(alpha * beta) * work[..., 0]
        return np.stack([alpha * (need[..., 0] - used - 1) + both, both - beta], axis=1)

    def _sums(self, picked: Array) -> tuple[Array, Array, Array]:
        """Of A, Lambda and R over what was picked (B, V N, M), (B, Q, M) each."""
        total = (self.parts @ picked).reshape(len(self.parts), -1, 3, picked.shape[-1])
        return total[:, :, 0], total[:, :, 1], total[:, :, 2]
