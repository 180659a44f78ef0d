"""P1 with energy, for one stage: bandwidth, server, transmit power and client CPUs, solved exactly and in batches.

Client n computes C_n cycles at f_n ≤ f_max, which takes κ C_n f_n² joules, sends X_n bits with power p_n ≤ p_max, and
has c_n FLOPs on the server. A joule of client n is worth w_n seconds:

    minimise χ + Σ w_n E_n    s.t.   a_n + τ_n + t_n + c_n/F_n ≤ χ,   Σ B_n ≤ B,   Σ F_n ≤ F,
    E_n = κ C_n f_n² + p_n t_n,   τ_n = C_n/f_n,   X_n = t_n B_n log2(1 + p_n g_n/(B_n N0)).

For a given deadline χ this is convex in times and bandwidth, and so it is with χ as one more variable
(`splitcast.allocate.responses` has the terms): no search over the deadline is needed. Prices λ_n of a second of client
n, α of the band and β of the server split it into clients that each answer for themselves; what is left are the N + 3
equations

    τ_n + t_n + s_n = χ − a_n,      Σ λ_n = 1,      Σ b_n = 1,      Σ φ_n = 1,

nearly straight in logarithms. Newton's method eliminates every λ_n and solves three equations per instance. A client
that only computes has λ_n = 2k/(χ − a_n)³ in closed form; if the answer would have it exceed its speed, χ is the time
of the slowest such client at full speed, by convexity in χ, and that client takes the weight that the others leave.

**Certificate.** The value is that of a feasible point. The lower bound is the dual function at the prices found: weak
duality makes it valid whatever the solver did, and the inner minima are in closed form up to the inversion of one
monotone function, whose error enters squared. The server's price is the best one for the λ_n: (Σ √(λ_n y_n))².
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splitcast.allocate.allocate import scaled
from splitcast.allocate.problem import Problem, checked
from splitcast.allocate.rate import Rate, ShannonRate
from splitcast.allocate.responses import Array, Loads, inverse_psi, marginal, respond
from splitcast.base.errors import SplitcastError

_SWEEPS, _EAGER = 80, 20  # about ten are usual
_TOLERANCE = 1e-8  # of a step in logarithms; the error left is about its square
_TRACE = 1e-12  # of the time scale of an instance
_LONGEST, _WILD, _DAMPING = 2.5, 30.0, 1e-3
_BISECTIONS = 45
_BLOCK = 12_000  # clients × instances at a time: temporaries stay in the cache
_TINY = 1e-300
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class EnergyAllocation:
    """Allocations of a batch of stages; leading dimensions are the instances, N the clients."""

    value_s: Array
    """χ + Σ w_n E_n, (...)"""
    seconds: Array
    """χ, (...)"""
    compute_s: Array
    """τ_n, (..., N)"""
    uplink_s: Array
    """t_n, (..., N)"""
    power_w: Array
    """p_n, (..., N); 0 for who does not send"""
    bandwidth_hz: Array
    cpu_flops: Array
    compute_j: Array
    air_j: Array
    lower_bound_s: Array
    """No choice has a smaller value than this (up to rounding), (...)."""
    gap: Array
    """(value − lower bound) / value, (...)"""
    client_weight: Array
    """λ_n, sums to 1, (..., N)"""


def allocate_energy(
    *,
    fixed_s: ArrayLike,
    compute_s: ArrayLike,
    compute_j: ArrayLike,
    uplink_bits: ArrayLike,
    server_flops: ArrayLike,
    rate: Rate,
    power_w: ArrayLike,
    bandwidth_hz: ArrayLike,
    cpu_flops: ArrayLike,
    seconds_per_j: ArrayLike,
) -> EnergyAllocation:
    """The best choice in each instance. ``compute_s`` and ``compute_j`` are those of full speed, ``power_w`` and the
    rate's received power those of full power; over a `LinearRate`, the server sends.

    One client that only computes, 1 s and 4 J at full speed: the least χ + w 4/χ² is where χ³ = 8 w.

    >>> from splitcast.allocate.rate import LinearRate
    >>> one = dict(fixed_s=0.0, compute_s=[1.0], compute_j=4.0, uplink_bits=0, server_flops=0, rate=LinearRate(1.0))
    >>> best = allocate_energy(**one, power_w=1.0, bandwidth_hz=1.0, cpu_flops=1.0, seconds_per_j=8.0)
    >>> best.seconds.round(9), best.value_s.round(9), best.compute_j.round(9)
    (np.float64(4.0), np.float64(6.0), array([0.25]))
    """
    named = {
        "fixed_s": fixed_s,
        "compute_s": compute_s,
        "compute_j": compute_j,
        "power_w": power_w,
        "seconds_per_j": seconds_per_j,
    }
    given = {name: checked(name, value, zero=name != "power_w") for name, value in named.items()}
    try:
        own = np.broadcast_shapes(*(value.shape for value in given.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {value.shape}" for name, value in given.items())
        raise SplitcastError(f"{shapes}: shapes do not fit; must broadcast to (..., N)") from None
    fixed = np.broadcast_to(given["fixed_s"], own)
    problem = Problem.of(fixed, uplink_bits, server_flops, rate, bandwidth_hz, cpu_flops)
    shape = problem.shape
    tau0, e0, power, w = (
        np.ascontiguousarray(np.broadcast_to(given[name], shape).reshape(-1, shape[-1]).T)
        for name in ("compute_s", "compute_j", "power_w", "seconds_per_j")
    )
    shannon = isinstance(rate, ShannonRate)
    per_dof = np.zeros_like(w) if problem.snr is None else power / problem.snr  # J per s of all the band at SNR 1
    loads = Loads(problem.a, tau0, w * e0 * tau0**2, problem.x, problem.y, problem.snr, w * per_dof)
    lam, alpha, tau, t, b, phi = (np.empty_like(part) for part in (w, w[0], w, w, w, w))
    width = max(1, _BLOCK // len(w))
    for p in (slice(at, at + width) for at in range(0, w.shape[1], width)):
        lam[:, p], alpha[p], tau[:, p], t[:, p], b[:, p], phi[:, p] = _solve(loads.keep(p))

    hz, flops = scaled(b, problem.total_hz), scaled(phi, problem.total_flops)
    b, phi = hz.T / problem.total_hz, flops.T / problem.total_flops
    t = _long_enough(loads, t, b)
    sends = loads.x > 0
    L = np.where(sends & shannon, loads.x / np.where(sends, t * b, 1.0), 0.0)
    air = per_dof * t * b * np.expm1(L) if shannon else np.zeros_like(t)
    computing = e0 * (tau0 / np.where(tau > 0, tau, 1.0)) ** 2
    done = problem.a + tau + t + problem.y / np.where(phi > 0, phi, 1.0)
    chi = done.max(0)
    value = chi + (w * (computing + air)).sum(0)
    bound = dual(loads, lam, alpha)
    lead = shape[:-1]

    def each(part: Array) -> Array:
        return part.T.reshape(shape)

    return EnergyAllocation(
        value_s=value.reshape(lead),
        seconds=chi.reshape(lead),
        compute_s=each(tau),
        uplink_s=each(t),
        power_w=each(np.where(sends & shannon, np.minimum(air / np.where(sends, t, 1.0), power), 0.0)),
        bandwidth_hz=hz.reshape(shape),
        cpu_flops=flops.reshape(shape),
        compute_j=each(computing),
        air_j=each(air),
        lower_bound_s=bound.reshape(lead),
        gap=(np.maximum(value - bound, 0) / np.where(value > 0, value, 1.0)).reshape(lead),
        client_weight=each(lam),
    )


def _long_enough(loads: Loads, t: Array, b: Array) -> Array:
    """Times on the air that full power suffices for."""
    sends = loads.x > 0
    some = np.where(sends, b, 1.0)
    rate = some if loads.snr is None else some * np.log1p(loads.snr / some)
    return np.where(sends, np.maximum(t, loads.x / rate), 0.0)


def dual(loads: Loads, lam: Array, alpha: Array) -> Array:
    """The dual function at prices λ (N, I) that sum to 1 and α (I,), with the best price of the server; (I,)."""
    some = np.where(lam > 0, lam, 1.0)
    answer = respond(loads, some, np.where(alpha > 0, alpha, 1.0), np.ones_like(alpha))
    computing = lam * answer.tau + loads.k / np.where(answer.tau > 0, answer.tau, 1.0) ** 2
    if loads.snr is None:
        air = 2 * np.sqrt(lam * loads.x * alpha)
    else:
        W = loads.x / np.where(loads.x > 0, answer.L, 1.0)  # all bits are carried, whatever the error of L
        priced = np.where(answer.full, lam * answer.t + alpha * answer.b, 2 * np.sqrt(lam * alpha * W))
        air = np.where(loads.x > 0, priced + loads.n * W * np.expm1(answer.L), 0.0)
    each = np.where(lam > 0, lam * loads.a + computing + air, 0.0)  # who has no weight may take forever
    found: Array = each.sum(0) + np.sqrt(lam * loads.y).sum(0) ** 2 - alpha
    return found


def _solve(loads: Loads) -> tuple[Array, Array, Array, Array, Array, Array]:
    """λ (N, I), α (I,), and τ, t, b, φ (N, I)."""
    only = (loads.x == 0) & (loads.y == 0)  # they only compute, or do nothing
    slowest = np.where(only, loads.a + loads.compute, -np.inf)
    floor, mixed = slowest.max(0), ~only.all(0)
    # Who has no energy to save may be done early, at no price. A trace of something to save makes it use all its time.
    scale = np.maximum(loads.a + loads.compute + loads.x + loads.y, _TINY).max(0)
    traced = loads._replace(k=np.where(~only & (loads.k == 0), (_TRACE * scale) ** 3, loads.k))
    prices = _newton(traced, only, np.ones_like(floor))
    tight = prices.chi < floor
    if (late := tight & mixed).any():
        found = _before(traced.keep(late), only[:, late], floor[late])
        prices.lam[:, late], prices.alpha[late], prices.beta[late] = found[:3]
    chi = np.maximum(prices.chi, floor)
    own = 2 * loads.k / np.where(only, chi - loads.a, 1.0).clip(1e-90) ** 3
    lam = np.where(only, own, prices.lam)
    rest = np.maximum(1 - lam.sum(0), 0.0)
    lam[slowest.argmax(0), np.arange(chi.size)] += np.where(chi <= floor, rest, 0.0)
    lam = lam / np.where(lam.sum(0) > 0, lam.sum(0), 1.0)

    answer = respond(loads, np.maximum(lam, _TINY), prices.alpha, prices.beta)
    tau = np.where(only, np.where(loads.k > 0, chi - loads.a, loads.compute), answer.tau)
    alpha = np.where((loads.x > 0).any(0), prices.alpha, 0.0)
    return lam, alpha, np.maximum(tau, loads.compute), answer.t, answer.b, answer.phi


class _Prices(NamedTuple):
    lam: Array
    """(N, I), of those who send or need the server"""
    alpha: Array
    beta: Array
    chi: Array


def _before(loads: Loads, only: Bools, floor: Array) -> _Prices:
    """Prices with which those who send or need the server are done at ``floor``, or before if time is worth nothing to
    them: the sum of their λ, by bisection of its logarithm."""
    loads = loads._replace(k=np.where(only, 0.0, loads.k))
    low, high = np.full_like(floor, np.log(1e-14)), np.zeros_like(floor)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        late = _newton(loads, only, np.exp(middle)).chi > floor
        low, high = np.where(late, middle, low), np.where(late, high, middle)
    return _newton(loads, only, np.exp(high))


def _newton(loads: Loads, only: Bools, share: Array) -> _Prices:
    """Prices with Σ λ = share (I,), those included of who only computes, without limit to its speed."""
    part = ~only
    count = np.maximum(part.sum(0), 1)
    sends, serves = np.asarray((loads.x > 0).any(0)), np.asarray((loads.y > 0).any(0))
    lam = np.where(part, share / count, 1.0)
    alpha = _first_price(loads, lam)
    beta = np.where(serves, np.sqrt(lam * loads.y * part).sum(0) ** 2, 1.0)
    low = np.where(part, loads.a + loads.compute, np.where(loads.k > 0, loads.a, -np.inf)).max(0)
    answer = respond(loads, lam, alpha, beta)
    spent = np.where(part, answer.tau + answer.t + answer.s, np.cbrt(2 * loads.k * only.sum(0)))
    chi = np.where(np.isfinite(low), (loads.a + spent).max(0), -np.inf)
    live = np.isfinite(low)
    out = _Prices(lam.copy(), alpha.copy(), beta.copy(), chi.copy())
    todo, now = np.flatnonzero(live), loads.keep(live)
    part, lam = part[:, live], lam[:, live]
    sends, serves, alpha, beta, chi, low, share = (each[live] for each in (sends, serves, alpha, beta, chi, low, share))
    for sweep in range(_SWEEPS if len(todo) else 0):
        delta, prices = _step(now, part, sends, serves, lam, alpha, beta, chi, low, share)
        size = np.maximum(np.abs(delta).max(0), np.abs(prices).max(0))
        patient = 1.0 if sweep < _EAGER else 0.5  # a kink (full power, full speed) may make whole steps swing
        shrink = np.minimum(patient, _LONGEST / np.maximum(size, _TINY))
        lam, alpha = lam * np.exp(shrink * delta), alpha * np.exp(shrink * prices[1])
        beta = beta * np.exp(shrink * prices[2])
        chi = low + (chi - low) * np.exp(shrink * prices[0])
        done = size < _TOLERANCE
        if sweep < _SWEEPS - 1 and 2 * done.sum() < done.size:  # too few to be worth the copying
            continue
        out.lam[:, todo] = lam
        out.alpha[todo], out.beta[todo], out.chi[todo] = alpha, beta, chi
        if done.all():
            break
        stay = ~done
        now, todo, part, lam = now.keep(stay), todo[stay], part[:, stay], lam[:, stay]
        sends, serves, alpha, beta, chi, low, share = (
            each[stay] for each in (sends, serves, alpha, beta, chi, low, share)
        )
    return out


def _first_price(loads: Loads, lam: Array) -> Array:
    """α for which an equal share of the band would be right for the mean client."""
    sends = loads.x > 0
    count = np.maximum(sends.sum(0), 1)
    if loads.snr is None:
        each = lam * loads.x * count**2
    else:
        L = np.log1p(loads.snr * count)
        full = (lam + loads.n * loads.snr) * loads.x * marginal(L) / (L / count) ** 2
        saving = inverse_psi(lam * count / np.maximum(loads.n, _TINY))
        each = np.where(saving < L, lam * count**2 * loads.x / saving, full)
    return np.where(sends.any(0), np.where(sends, each, 0.0).sum(0) / count, 1.0)


def _step(
    loads: Loads,
    part: Bools,
    sends: Bools,
    serves: Bools,
    lam: Array,
    alpha: Array,
    beta: Array,
    chi: Array,
    low: Array,
    share: Array,
) -> tuple[Array, Array]:
    """Newton: changes of log λ (N, I), and of log(χ − low), log α, log β (3, I)."""
    got = respond(loads, lam, alpha, beta)
    held = np.where(part & (got.tau_by == 0), got.tau, 0.0)  # at full speed: of no use to compare
    slack = np.where(part | (loads.k > 0), chi - loads.a - held, 1.0)
    total = np.where(part, got.tau - held + got.t + got.s, 1.0)
    by_lam = np.minimum((got.tau * got.tau_by + got.t * got.t_by[0] - 0.5 * got.s) / total, -1e-9)
    by_alpha, by_beta = got.t * got.t_by[1] / total, 0.5 * got.s / total
    off = np.where(part, np.log(slack / total), 0.0)
    reach = (chi - low) / slack
    inverse = np.where(part, 1 / by_lam, 0.0)

    own = np.where(part, 0.0, 2 * loads.k / slack**3)  # λ of those who only compute
    weight = np.where(part, lam, 0.0)
    sums = (weight + own).sum(0), np.where(part, got.b, 0.0).sum(0), np.where(part, got.phi, 0.0).sum(0)
    logs = [np.log(np.maximum(each, _TINY)) for each in sums]
    b_share, phi_share = (each / np.maximum(whole, _TINY) for each, whole in ((got.b, sums[1]), (got.phi, sums[2])))
    pull = [g * inverse for g in (weight / np.maximum(sums[0], _TINY), b_share * got.b_by[0], 0.5 * phi_share)]
    rows = [[(g * reach).sum(0), -(g * by_alpha).sum(0), -(g * by_beta).sum(0)] for g in pull]
    right = [aim - log - (g * off).sum(0) for aim, log, g in zip((np.log(share), 0, 0), logs, pull, strict=True)]
    rows[0][0] = rows[0][0] - 3 * (own * reach).sum(0) / np.maximum(sums[0], _TINY)
    rows[1][1] = rows[1][1] + (b_share * got.b_by[1] * part).sum(0)
    rows[2][2] = rows[2][2] - 0.5
    for k, there in ((1, sends), (2, serves)):  # a price that nobody pays does not move
        right[k] = np.where(there, right[k], 0.0)
        rows[k] = [np.where(there, entry, float(k == j)) for j, entry in enumerate(rows[k])]
    matrix = np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)  # (I, 3, 3)
    prices = _steady(matrix, np.stack(right, axis=-1))
    delta = inverse * (off + reach * prices[0] - by_alpha * prices[1] - by_beta * prices[2])
    return delta, prices


def _steady(matrix: Array, right: Array) -> Array:
    """Solve (I, 3, 3) systems, (3, I); where the solution is wild, a damped one (Levenberg and Marquardt).

    A client alone on the band at full power, or alone on the server, cannot be slowed down by its price until that is
    low enough to change what it does: such equations have no solution yet, and a step that moves as far as it helps.
    """
    found = np.linalg.solve(matrix + 1e-13 * np.eye(3), right[..., None])[..., 0]
    wild = ~(np.abs(found).max(-1) < _WILD)
    if wild.any():
        some, turned = matrix[wild], matrix[wild].swapaxes(-1, -2)
        normal = turned @ some
        damping = _DAMPING * np.trace(normal, axis1=-2, axis2=-1)[:, None, None] * np.eye(3)
        found[wild] = np.linalg.solve(normal + damping, turned @ right[wild][..., None])[..., 0]
    return np.asarray(found.T)
