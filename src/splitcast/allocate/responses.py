"""What a client does when time, bandwidth and server have prices: the inner minima of `splitcast.allocate.energy`.

In normalised units (shares of the totals, seconds, x in s·nat, y in s at the whole server): a client that pays λ for a
second, α for the band and β for the server, and w seconds for a joule, chooses

    computing   τ ≥ τ0:   least λ τ + k/τ²             k = w E0 τ0²: E0 joules at full speed, in τ0 seconds
    server      φ:        least λ y/φ + β φ            φ = √(λ y/β)
    uplink      t, b:     least λ t + α b + n W (e^L − 1)    W = t b,  L = x/W,  n = w p/snr,  power ≤ p.

The last is convex in (t, b): with u = 1/(t b) its energy is n Σ_k x^k u^(k−1)/k!, and each term is convex. It is
stationary where t/b = α/λ and

    ψ(L)/√L = √(λ α/x)/n,      ψ(L) = L e^L − e^L + 1,      t = α/(n ψ),  b = λ/(n ψ).

Where that needs more than full power, b (e^L − 1) > snr, power is full, b = snr/(e^L − 1), and

    L / ((e^L − 1) √(L − 1 + e^−L)) = √((λ + n snr) x/α)/snr.

Both left sides are fixed monotone functions of L: they are inverted by a table and two Newton steps in logarithms. A
unicast downlink costs a client no energy; its rate is linear, and t = x/b with b = √(λ x/α).
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LOGS = np.linspace(np.log(1e-9), np.log(500.0), 4001)  # of L
_SERIES = 0.05


def psi(L: Array) -> Array:
    """L e^L − e^L + 1, by its series Σ_{k≥2} L^k (k − 1)/k! where it would cancel."""
    series = L * L * (1 / 2 + L * (1 / 3 + L * (1 / 8 + L * (1 / 30 + L * (1 / 144 + L * (1 / 840 + L / 5760))))))
    return np.where(_SERIES > L, series, L * np.exp(L) - np.expm1(L))


def marginal(L: Array) -> Array:
    """L − 1 + e^−L = e^−L ψ(L)."""
    return np.exp(-L) * psi(L)


def _free(L: Array) -> tuple[Array, Array]:
    """log ψ(L)/√L and its slope by log L."""
    value = psi(L)
    return np.log(value) - 0.5 * np.log(L), L * L * np.exp(L) / value - 0.5


def _full(L: Array) -> tuple[Array, Array]:
    """−log L/((e^L − 1) √(L − 1 + e^−L)) and its slope by log L."""
    m, grown = marginal(L), np.expm1(L)
    return np.log(grown) + 0.5 * np.log(m) - np.log(L), L * ((1 + grown) / grown - 1 / L - 0.5 * np.expm1(-L) / m)


@cache
def _table(which: str) -> Array:
    return {"free": _free, "full": _full}[which](np.exp(_LOGS))[0]


def inverse(which: str, log_value: Array) -> tuple[Array, Array]:
    """L at which a function has a value, and dlog L / dlog value."""
    function = {"free": _free, "full": _full}[which]
    logs = np.interp(log_value, _table(which), _LOGS)
    for _ in range(2):
        value, slope = function(np.exp(logs))
        logs = np.clip(logs - (value - log_value) / slope, _LOGS[0], _LOGS[-1])
    L = np.exp(logs)
    return L, 1 / function(L)[1]


def inverse_psi(value: Array) -> Array:
    """L with ψ(L) about as given, to start from."""
    return np.exp(np.interp(np.log(value), np.log(psi(np.exp(_LOGS))), _LOGS))


class Loads(NamedTuple):
    """Work of the clients, (N, I) each."""

    a: Array
    """s that nothing shortens"""
    compute: Array
    """τ0, s"""
    k: Array
    x: Array
    y: Array
    snr: Array | None
    """None: a linear rate, and no energy on the air"""
    n: Array

    def keep(self, which: Any) -> "Loads":
        """Some of the instances."""
        some: list[Any] = [None if part is None else part[:, which] for part in self]
        return Loads(*some)


class Response(NamedTuple):
    """What clients choose, (N, I) each, with derivatives by the logarithms of λ and α; those by β are those of √β."""

    tau: Array
    t: Array
    s: Array
    b: Array
    phi: Array
    L: Array
    full: NDArray[np.bool_]
    """at full power"""
    tau_by: Array
    """∂log τ / ∂log λ"""
    t_by: tuple[Array, Array]
    """∂log t / ∂log λ, ∂log α"""
    b_by: tuple[Array, Array]


def respond(loads: Loads, lam: Array, alpha: Array, beta: Array) -> Response:
    """Choices at prices λ (N, I), α and β (I,), all positive."""
    wanted = np.cbrt(2 * loads.k / lam)
    tau, slow = np.maximum(wanted, loads.compute), wanted > loads.compute
    s, phi = np.sqrt(loads.y * beta / lam), np.sqrt(loads.y * lam / beta)
    t, b, L, full, t_by, b_by = _sending(loads, lam, alpha)
    return Response(tau, t, s, b, phi, L, full, np.where(slow, -1 / 3, 0.0), t_by, b_by)


Pair = tuple[Array, Array]


def _sending(loads: Loads, lam: Array, alpha: Array) -> tuple[Array, Array, Array, NDArray[np.bool_], Pair, Pair]:
    x, n, snr = loads.x, loads.n, loads.snr
    sends = x > 0
    if snr is None:
        t, b, half = np.sqrt(alpha * x / lam), np.sqrt(lam * x / alpha), np.full_like(x, 0.5)
        return t, b, np.zeros_like(x), np.zeros_like(sends), (-half, half), (half, -half)
    some, log_lam, log_alpha = np.where(sends, x, 1.0), np.log(lam), np.log(alpha)
    pays = n > 0
    price = np.where(pays, n, 1.0)
    L, by = inverse("free", 0.5 * (log_lam + log_alpha - np.log(some)) - np.log(price))
    value = price * psi(L)
    t, b = alpha / value, lam / value
    grow = 0.5 * (1 + 0.5 * by)  # dlog ψ / dlog(λ α): log ψ = log of the left side + log L / 2
    t_by, b_by = (-grow, 1 - grow), (1 - grow, -grow)

    full = sends & (~pays | (b * np.expm1(L) > snr))
    if full.any():
        paid = np.where(pays, lam + n * snr, lam)
        L2, by2 = inverse("full", -0.5 * (np.log(paid * some) - log_alpha) + np.log(snr))
        grown = np.expm1(L2)
        b2 = snr / grown
        b_L = -L2 * (1 + grown) / grown  # dlog b / dlog L
        step = by2 * -0.5 * (lam / paid), by2 * 0.5  # dlog L / dlog λ, dlog α
        b2_by = b_L * step[0], b_L * step[1]
        t2_by = -(b_L + 1) * step[0], -(b_L + 1) * step[1]
        L, t, b = np.where(full, L2, L), np.where(full, some / (b2 * L2), t), np.where(full, b2, b)
        t_by = np.where(full, t2_by[0], t_by[0]), np.where(full, t2_by[1], t_by[1])
        b_by = np.where(full, b2_by[0], b_by[0]), np.where(full, b2_by[1], b_by[1])
    return np.where(sends, t, 0.0), np.where(sends, b, 0.0), L, full, t_by, b_by
