"""The Newton iteration behind `splitcast.allocate.allocate`, in normalised units.

b and f are a client's shares of bandwidth and CPU. With B and F divided out, uplink time is x / ρ(b) and
server time y / f, where x and y are work in seconds at full resources and
    ρ(b) = b ln(1 + snr/b)   (Shannon rate, x in s·nat)      or      ρ(b) = b   (linear rate, snr is None).
Arrays are clients first, (N, I), so that a sum over clients adds whole rows.

**One client.** Given its slack t = χ − a and the price m² of CPU in units of bandwidth, meeting the deadline
at the least cost b + m² f is one equation in one unknown. Take the spectral efficiency L = ln(1 + snr/b):
    b = snr / (e^L − 1),   uplink time u = (x/snr) (e^L − 1)/L,   marginal rate ρ'(b) = L − 1 + e^−L.
Stationarity makes the server time u m √(ρ' y/x), so L solves
    T(L) = u(L) (1 + m √(ρ'(L) y/x)) = t,
which is increasing, flat at x/snr for small L and like e^L for large L: log T is almost straight, and Newton
on it takes few steps. For a linear rate b = (x + m√(xy))/t and f = (y + √(xy)/m)/t, in closed form.

**All clients.** Two unknowns per instance are left, χ and m, for Σb = 1 and Σf = 1. We fit the form that the
linear rate would give, with a common slack, to the value and the derivatives of both sums,
    Σb ≈ (p + q m) / (1 + κ_b δ),      Σf ≈ (r + s/m) / (1 + κ_f δ),      δ = change of χ,
and solve the fit: a quadratic in m with exactly one positive root. The fit is exact to first order, so this
is a Newton method and converges quadratically; but it bends the right way, so m stays positive, and where no
client trades one resource for the other (q = s = 0) it solves for each alone and takes the larger χ.
χ starts at and never falls below `floor`, the time of the slowest client if alone, which keeps every slack
away from its pole. (For a linear rate and fixed m, 1/Σb and 1/Σf are concave in χ, so the fit never overshoots
and χ rises to the answer monotonically; a Shannon rate bends them only mildly.)

One sweep does a Newton step for every client's L and, in instances whose clients all lie close to their
curves, also moves χ and m, taking L along the tangent. Solved instances leave the batch.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STEP_TOLERANCE = 3e-7  # a relative step this small leaves an error of about its square
_BLOCK = 12_000  # clients × instances worked on at a time: temporaries stay in the cache
_MAX_SWEEPS = 100  # six are usual
_TINY = float(np.finfo(np.float64).tiny)


def rate_and_slope(b: Array, snr: Array | None) -> tuple[Array, Array]:
    """ρ(b) and ρ'(b) for b > 0."""
    if snr is None:
        return b, np.ones_like(b)
    L, d = np.log1p(snr / b), snr / (snr + b)
    return b * L, _marginal(L, d, L * d)


def _marginal(L: Array, d: Array, Ld: Array) -> Array:
    """ρ' = L − d with d = 1 − e^−L. It cancels for small L, where L d/2 is a lower bound close to it."""
    return np.maximum(L - d, 0.5 * Ld)


def solo_time(a: Array, x: Array, y: Array, snr: Array | None) -> Array:
    """Finish time of each client if it had all resources to itself: no allocation is faster."""
    return a + x / (1.0 if snr is None else np.log1p(snr)) + y


class _Split(NamedTuple):
    """Shares of every client for a given (χ, m) and how they respond, (N, I) each.

    dlog b = −b_slack (dlog t − weight dlog m),    dlog f = −f_slack (dlog t − weight dlog m) − dlog m,
    the last term only for clients with uplink; the weight is the server's part of u + y/f.
    """

    b: Array
    f: Array
    b_slack: Array
    f_slack: Array
    weight: Array
    off_curve: Array  # log T − log t
    L_slack: Array  # ∂L / ∂log t


class _Totals(NamedTuple):
    """Σb, Σf and their derivatives, (I,) each."""

    b: Array
    f: Array
    b_slack: Array  # −∂Σb / ∂χ
    f_slack: Array  # −∂Σf / ∂χ
    price: Array  # ∂Σb / ∂log m = −m² ∂Σf / ∂log m


def _linear_split(per_t: Array, m: Array, x: Array, y: Array) -> _Split:
    trade, one, zero = np.sqrt(x * y), np.ones_like(x), np.zeros_like(x)
    air = x + m * trade
    return _Split(air * per_t, (y + trade / m) * per_t, one, one, m * trade / (air + _TINY), zero, zero)


def _totals(split: _Split, per_t: Array) -> tuple[_Totals, Array]:
    """The totals, and how far the worst client is off its curve."""
    off_b, off_f = split.b_slack * split.off_curve, split.f_slack * split.off_curve
    b, f = split.b * (1 + off_b.clip(-0.5, 0.5)), split.f * (1 + off_f.clip(-0.5, 0.5))  # on it, to first order
    b_slack, f_slack = b * split.b_slack, f * split.f_slack
    parts = b, f, b_slack * per_t, f_slack * per_t, b_slack * split.weight
    return _Totals(*(part.sum(0) for part in parts)), np.maximum(np.abs(off_b), np.abs(off_f)).max(0)


def _joint_step(blocks: list[_Totals], m: Array) -> tuple[Array, Array, _Totals]:
    """Change of χ, change of log m, and the totals over all blocks."""
    total = _Totals(*(reduce(np.add, field) for field in zip(*blocks, strict=True)))
    kappa_b, kappa_f = total.b_slack / (total.b + _TINY), total.f_slack / (total.f + _TINY)
    qm, sm = total.price, total.price / (m * m)  # the parts q m of Σb and s/m of Σf
    excess_b, excess_f = total.b - qm - 1, total.f - sm - 1
    c = kappa_f * excess_b - kappa_b * excess_f
    root = np.abs(c) + np.sqrt(c * c + 4 * kappa_b * kappa_f * qm * sm) + _TINY
    # Of the two forms of the root, the sign of c picks the one that does not cancel.
    new_qm, new_sm = 2 * kappa_b * qm * sm / root, 2 * kappa_f * qm * sm / root
    by_b = c >= 0
    delta = np.where(by_b, (excess_b + new_qm) / (kappa_b + _TINY), (excess_f + new_sm) / (kappa_f + _TINY))
    growth = np.where(by_b, new_qm / (qm + _TINY), sm / (new_sm + _TINY))
    log_m = np.log(np.where(qm * sm > 0, np.maximum(growth, _TINY), 1.0))
    return delta, log_m.clip(-8, 8), total  # far from the answer the fit may suggest absurd prices


class _Block:
    """Some clients of all instances, (n, I). Those without uplink carry b = 0 and a dummy L along."""

    def __init__(self, a: Array, x: Array, y: Array, snr: Array | None) -> None:
        self.linear = snr is None
        self.a, self.x, self.y = a, x, y
        self.sends: Array = np.sign(x)
        self.silent: Array = 1 - self.sends
        self.silent_y: Array = self.silent * y
        self.idle: Array = 1 - np.sign(x + y)  # keeps the slack of clients without work positive
        self.snr: Array = self.sends if snr is None else snr
        self.snr_sends: Array = self.snr * self.sends
        self.x_per_snr: Array = x / (self.snr_sends + self.silent) + self.silent
        self.root_xy: Array = np.sqrt(x * y)
        self.root_yx: Array = self.root_xy / (x + self.silent)  # √(y/x), and 0 without uplink
        self.L = self.sends

    def per_slack(self, chi: Array) -> Array:
        return 1 / (chi - self.a + self.idle)

    def linear_totals(self, chi: Array, m: Array, clients: int) -> _Totals:
        """As if the rate were linear, with the efficiency of an equal share."""
        self.linear_x = self.x if self.linear else self.x / np.log1p(clients * self.snr)
        per_t = self.per_slack(chi)
        return _totals(_linear_split(per_t, m, self.linear_x, self.y), per_t)[0]

    def guess_efficiency(self, chi: Array, m: Array) -> None:
        """L from the linear rate, then once more with the efficiency of that guess."""
        per_t, x = self.per_slack(chi), self.linear_x
        for _ in range(2):
            b = (x + m * np.sqrt(x * self.y)) * per_t
            L = np.log1p(self.snr / (b + self.silent))
            x = self.x / L
        bound = 2 * (1 / (per_t * self.x_per_snr) - 1)  # t ≥ u ≥ (x/snr) (1 + L/2); matters in deep fades
        self.L = np.where((self.sends > 0) & (bound > 0), np.minimum(L, bound), L)

    def evaluate(self, chi: Array, m: Array) -> tuple[_Totals, Array]:
        self.per_t = self.per_slack(chi)
        if self.linear:
            self.split = _linear_split(self.per_t, m, self.x, self.y)
        else:
            self.split = self._shannon_split(m)
        return _totals(self.split, self.per_t)

    def _shannon_split(self, m: Array) -> _Split:
        L = self.L
        z = np.expm1(L)
        d = z / (1 + z)
        Ld = L * d
        marginal = _marginal(L, d, Ld)
        root = np.sqrt(marginal)
        u = self.x_per_snr * (z / L)
        ratio = self.root_yx * root * m  # server time / uplink time
        total = 1 + ratio
        weight = ratio / total
        du, dw = marginal / Ld, 0.5 * d / marginal  # dlog u/dL and dlog √ρ'/dL
        L_slack = 1 / (du + weight * dw)
        return _Split(
            b=self.snr_sends / z,
            f=self.root_xy / (u * root * m) + self.silent_y * self.per_t,
            b_slack=L_slack / d,
            f_slack=self.sends * (du + dw) * L_slack + self.silent,
            weight=weight,
            off_curve=self.sends * np.log(u * total * self.per_t),
            L_slack=L_slack,
        )

    def advance(self, delta: Array, log_m: Array) -> Array:
        """Follow (χ, m), correcting towards the curve; return the largest relative change of a share."""
        split, stretch = self.split, delta * self.per_t
        stretch = stretch / (1 + 0.5 * stretch)  # ≈ log((t + δ)/t), but bounded
        change = stretch - split.off_curve - split.weight * log_m
        # Newton may aim below zero where log T is concave; from the left it then converges monotonically.
        self.L = np.maximum(self.L + self.sends * split.L_slack * change, 0.05 * self.L)
        self.last = change, log_m
        step: Array = (np.abs(change) * np.maximum(split.b_slack, split.f_slack)).max(0)
        return np.maximum(step, np.abs(log_m))

    def shares(self, which: NDArray[np.bool_]) -> tuple[Array, Array]:
        """b and f after the last step, which is applied to the shares themselves."""
        split, (change, log_m) = self.split, self.last
        log_b = -split.b_slack[:, which] * change[:, which]
        log_f = -split.f_slack[:, which] * change[:, which] - self.sends[:, which] * log_m[which]
        return split.b[:, which] * (1 + log_b.clip(-0.5, 0.5)), split.f[:, which] * (1 + log_f.clip(-0.5, 0.5))

    def keep(self, which: NDArray[np.bool_]) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray):
                setattr(self, name, value[:, which])


def solve_shares(a: Array, x: Array, y: Array, snr: Array | None) -> tuple[Array, Array, Array]:
    """Optimal shares b and f, (N, I), and log m², (I,); a resource that binds is used up."""
    n, count = x.shape
    b, f, log_price = np.empty_like(x), np.empty_like(x), np.empty(count)
    width = max(1, _BLOCK // n)
    for p in (slice(i, i + width) for i in range(0, count, width)):
        some_snr = None if snr is None else snr[:, p]
        _solve(a[:, p], x[:, p], y[:, p], some_snr, out=(b[:, p], f[:, p], log_price[p]))
    return b, f, log_price


def _solve(a: Array, x: Array, y: Array, snr: Array | None, out: tuple[Array, Array, Array]) -> None:
    n, count = x.shape
    b, f, log_price = out
    a = np.where(x + y > 0, a, 0.0)  # who has no work has no say in who gets what
    a = a - a.max(0)  # a short slack must not drown in a long common time
    floor = solo_time(a, x, y, snr).max(0)
    height = max(1, _BLOCK // count)
    rows = [slice(i, i + height) for i in range(0, n, height)]
    blocks = [_Block(a[r], x[r], y[r], None if snr is None else snr[r]) for r in rows]

    # Start with one joint step of the linear model.
    chi, m = floor, np.ones(count)
    delta, log_m, _ = _joint_step([block.linear_totals(chi, m, n) for block in blocks], m)
    chi, m = np.maximum(chi + delta, floor), np.exp(log_m)
    if snr is not None:
        for block in blocks:
            block.guess_efficiency(chi, m)

    todo, traded = np.arange(count), (np.sign(x) * y).max(0) > 0
    for sweep in range(_MAX_SWEEPS):
        totals, off = zip(*(block.evaluate(chi, m) for block in blocks), strict=True)
        delta, log_m, total = _joint_step(list(totals), m)
        moves = reduce(np.maximum, off) < max(0.7**sweep, 1e-4)  # patience with instances that prove hard
        delta = np.where(moves, np.maximum(delta, floor - chi), 0.0)
        log_m = np.where(moves, log_m, 0.0)
        step = reduce(np.maximum, [block.advance(delta, log_m) for block in blocks])
        done = (moves & (step < _STEP_TOLERANCE)) | (sweep == _MAX_SWEEPS - 1)
        chi, m = np.maximum(chi + delta, floor), m * np.exp(log_m)
        if 2 * done.sum() < done.size:  # too few to be worth the copying
            continue
        ready = todo[done]
        for block, r in zip(blocks, rows, strict=True):
            b[r, ready], f[r, ready] = block.shares(done)
        untraded = np.where(total.b >= total.f, -np.inf, np.inf)  # then only the scarcer has a price
        log_price[ready] = np.where(traded[todo], 2 * np.log(m), untraded)[done]
        if done.all():
            break
        stay = ~done
        todo, floor, chi, m = todo[stay], floor[stay], chi[stay], m[stay]
        for block in blocks:
            block.keep(stay)
