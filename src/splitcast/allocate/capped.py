"""P1 with at most so many joules per client and round: multipliers of the caps, found by their dual.

A round has one or several stages, each a problem of `splitcast.allocate.energy`. With caps e_n on what client n spends
in all of them,

    minimise Σ_s χ_s + Σ_n w_n E_n    s.t.  E_n = Σ_s E_{s,n} ≤ e_n,

a multiplier μ_n ≥ 0 of cap n is a further price of its joules, the same in all stages, and what is left are stages that
are solved apart at prices ω_n = w_n + μ_n. The dual D(μ) = Σ_s min(χ_s + Σ ω_n E_{s,n}) − Σ μ_n e_n is concave with
gradient E_n − e_n. It is maximised by Newton's method in θ = log μ: curvatures come from differences, of all clients
and instances in one batch, and each step is the best of several lengths by D.

**Certificate.** The value is that of a point within the caps. D(μ), with the lower bounds of the stages in place of
their minima, is a lower bound for every μ ≥ 0, whatever the search did. Where some clients of a stage only compute and
others send, prices can be further apart than the solver of a stage takes, and the gap says so.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from splitcast.allocate.responses import Array

_SWEEPS = 40
_INSIDE = 2e-10  # how far within its cap a client is aimed at, relatively
_NEAR = 1e-10
_NUDGE = 1e-4  # of log μ, for the differences
_LONGEST = 3.0
_LEAST = 1e-6  # of μ_n e_n, in the time of a round without caps: who has time to spare, uses it
_LENGTHS = (1.0, 0.5, 0.2, 0.05)
_RAISES = 200
Indices = NDArray[np.int64]


class Spent(NamedTuple):
    """What rounds take at given prices of joules."""

    seconds: Array
    """Σ_s χ_s, (R,)"""
    joules: Array
    """E_n, (R, N)"""
    bound_s: Array
    """No choice has less Σ χ_s + Σ ω_n E_n than this, (R,)."""


class Spend(Protocol):
    """Solves rounds without caps."""

    def __call__(self, price: Array, which: Indices) -> Spent:
        """Instances ``which`` (R,) at prices ω (R, N), s/J."""
        ...


class Capped(NamedTuple):
    """The prices that keep clients within their caps."""

    price: Array
    """ω, (I, N), s/J"""
    value_s: Array
    """Σ χ_s + Σ w_n E_n, (I,)"""
    lower_bound_s: Array
    gap: Array
    """(value − lower bound) / value, (I,)"""
    over: Array
    """Largest E_n / e_n, (I,): at most 1 where caps can be met"""


def within_caps(spend: Spend, weight: float, cap: Array, instances: int) -> Capped:
    """Prices for I instances with caps (N,); ``weight`` is w.

    A client with 1 J at full speed, E = 1/χ², that may spend a quarter: χ = 2, and −dχ/de = e^(−3/2)/2 = 4.

    >>> def spend(price, which):
    ...     chi = np.maximum(np.cbrt(2 * price[:, 0]), 1.0)  # least χ + ω/χ²
    ...     return Spent(chi, (1 / chi**2)[:, None], chi + price[:, 0] / chi**2)
    >>> found = within_caps(spend, 0.0, np.array([0.25]), 1)
    >>> found.value_s.round(5), found.price.round(3), found.gap < 1e-6
    (array([2.]), array([[4.]]), array([ True]))
    """
    everyone, aim = np.arange(instances), cap * (1 - _INSIDE)
    free = spend(np.full((instances, len(cap)), weight), everyone)
    price = np.full((instances, len(cap)), weight)
    bound = free.bound_s.copy()
    if len(tight := np.flatnonzero((free.joules > cap).any(1))):
        scale = free.seconds[tight, None] / cap
        theta = np.log(np.where(free.joules[tight] > cap, 0.1, 1e-4) * scale)
        least = np.log(_LEAST * scale)
        theta = _searched(spend, weight, aim, tight, theta, least)
        mu = _raised(spend, weight, cap, tight, np.exp(theta))
        price[tight] = weight + mu
        for part in (mu, np.where(theta > least + _NUDGE, mu, 0.0)):
            bound[tight] = np.maximum(bound[tight], spend(weight + part, tight).bound_s - part @ cap)
    found = spend(price, everyone)
    value = found.seconds + weight * found.joules.sum(1)
    gap = np.maximum(value - bound, 0) / np.where(value > 0, value, 1.0)
    return Capped(price, value, bound, gap, (found.joules / cap).max(1))


def _searched(spend: Spend, weight: float, cap: Array, which: Indices, theta: Array, least: Array) -> Array:
    """log μ (I, N) at the top of the dual."""
    theta, clients = theta.copy(), len(cap)
    todo = np.arange(len(theta))
    for _ in range(_SWEEPS):
        here, at = which[todo], theta[todo]
        nudged = np.concatenate([at[None], at[None] + _NUDGE * np.eye(clients)[:, None, :]])  # (1 + N, I, N)
        spent = spend(weight + np.exp(nudged).reshape(-1, clients), np.tile(here, 1 + clients))
        joules = spent.joules.reshape(1 + clients, len(todo), clients)
        mu, off = np.exp(at), joules[0] - cap
        slope = np.moveaxis((joules[1:] - joules[0]) / _NUDGE, 0, -1)  # [.., n, m]: dE_n / dθ_m
        curve = -mu[..., None] * slope
        curve = (curve + np.swapaxes(curve, 1, 2)) / 2
        push = mu * off  # dD / dθ
        damped = 0.3 * np.maximum(-push, 0) + 1e-9 * np.abs(curve).max((1, 2))[:, None] + 1e-300
        step = np.linalg.solve(curve + damped[..., None] * np.eye(clients), push[..., None])[..., 0]
        step = np.clip(np.nan_to_num(step), -_LONGEST, _LONGEST)
        tries = np.maximum(at + np.array(_LENGTHS)[:, None, None] * step, least[todo])
        dual = _dual(spend, weight, cap, here, tries)
        theta[todo] = tries[dual.argmax(0), np.arange(len(todo))]
        free = at > least[todo] + _NUDGE
        wasted = (mu * np.abs(off) * free).sum(1) / spent.seconds[: len(todo)]
        done = (off / cap).max(1) <= _NEAR
        todo = todo[~(done & (wasted <= _NEAR))]
        if not len(todo):
            break
    return theta


def _dual(spend: Spend, weight: float, cap: Array, which: Indices, theta: Array) -> Array:
    """D at each of several θ (K, I, N), (K, I)."""
    count, instances, clients = theta.shape
    mu = np.exp(theta).reshape(-1, clients)
    spent = spend(weight + mu, np.tile(which, count))
    found: Array = spent.bound_s - mu @ cap
    return found.reshape(count, instances)


def _raised(spend: Spend, weight: float, cap: Array, which: Indices, mu: Array) -> Array:
    """Higher multipliers for whoever is still above its cap."""
    mu, todo, factor = mu.copy(), np.arange(len(mu)), 1 + 1e-9
    for _ in range(_RAISES):
        over = spend(weight + mu[todo], which[todo]).joules > cap
        todo, over = todo[over.any(1)], over[over.any(1)]
        if not len(todo):
            break
        mu[todo] = np.where(over, mu[todo] * factor, mu[todo])
        factor = min(2.0, 1 + 2 * (factor - 1))
    return mu
