"""Bandwidth and server CPU for one stage: problem P2.1 of the paper, solved exactly and in batches.

Transmit power and client CPUs sit at their maxima. Client n has a fixed time a_n, X_n bits to send and c_n
server FLOPs, and the stage ends with the slowest client:
    minimise χ   s.t.   a_n + X_n / r_n(B_n) + c_n / f_n ≤ χ,   Σ B_n ≤ B,   Σ f_n ≤ F.
The rate r_n is concave (`ShannonRate`, `LinearRate`), so the problem is convex. At the optimum every client
with work meets the deadline exactly, and all that is left to find are χ and the price of CPU relative to
bandwidth: `splitcast.allocate.shares` does it by a safeguarded Newton method, in a handful of sweeps over all
clients of all instances at once.

**Certificate.** The answer is checked without trusting the solver. Its value is the largest finish time under
the returned allocation, which is feasible as it stands. The lower bound is weak duality: for any weights
λ_n ≥ 0 with Σ λ_n = 1 and any bandwidth price α ≥ 0,
    χ* ≥ Σ λ_n a_n + Σ_n min_b (λ_n X_n/r_n(b) + α b) − α B + (Σ_n √(λ_n c_n))² / F,
where the last term is the least Σ λ_n c_n/f_n over Σ f_n ≤ F. A careless inner minimisation would void the
bound, so we go the other way round: take the returned B_n and *choose* λ_n = α / |d(X_n/r_n)/dB_n|, scaled
to sum to one. The convex inner function is then stationary, hence minimal, at B_n, whatever B_n is, and the
bound holds for every allocation, good or bad; at the optimum it is tight, with an error of second order. A
client without uplink does not enter the inner minimum and takes its weight from its CPU share. A second bound
is the time of the slowest client with all resources to itself. `gap` = (value − lower bound) / value.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splitcast.allocate.problem import Problem
from splitcast.allocate.rate import Rate
from splitcast.allocate.shares import Array, rate_and_slope, solo_time, solve_shares

_ROUNDING = 1 - 2.0**-46  # far more than the rounding error of a pairwise sum


@dataclass(frozen=True)
class Allocation:
    """Allocations of a batch of stages; leading dimensions are the instances, N the clients."""

    value_s: Array
    """χ, the finish time of the slowest client, (...)."""
    bandwidth_hz: Array
    """B_n, (..., N); sums to at most the total."""
    cpu_flops: Array
    """f_n, server FLOP/s, (..., N); sums to at most the total."""
    lower_bound_s: Array
    """No allocation can be faster than this (up to rounding), (...)."""
    gap: Array
    """(value − lower bound) / value, (...)."""
    client_weight: Array
    """λ_n of the lower bound, sums to 1: −dχ per second saved by client n, (..., N)."""
    bandwidth_price_s_per_hz: Array
    """−dχ/dB of the lower bound, (...); 0 if bandwidth does not bind."""
    cpu_price_s_per_flops: Array
    """−dχ/dF of the lower bound, (...); 0 if CPU does not bind."""

    @property
    def bandwidth_binds(self) -> NDArray[np.bool_]:
        return self.bandwidth_price_s_per_hz > 0

    @property
    def cpu_binds(self) -> NDArray[np.bool_]:
        return self.cpu_price_s_per_flops > 0


def allocate(
    *,
    fixed_s: ArrayLike,
    uplink_bits: ArrayLike,
    server_flops: ArrayLike,
    rate: Rate,
    bandwidth_hz: ArrayLike,
    cpu_flops: ArrayLike,
) -> Allocation:
    """The fastest allocation of each instance.

    The first three and the rate's client fields broadcast to (..., N); the totals `bandwidth_hz` and
    `cpu_flops` to (...). A client may have no bits or no FLOPs, and a stage may need only one resource.

    Two equal clients split everything evenly: 1 Mbit over 1 MHz at 2 bit/s/Hz and 1 GFLOP of 10 GFLOP/s each
    take 1 s and 0.2 s.

    >>> from splitcast.allocate.rate import LinearRate
    >>> stage = dict(fixed_s=0.0, uplink_bits=1e6, server_flops=1e9, rate=LinearRate([2.0, 2.0]))
    >>> best = allocate(**stage, bandwidth_hz=1e6, cpu_flops=10e9)
    >>> print(best.value_s.round(6), best.bandwidth_hz.round(), best.gap < 1e-8)
    1.2 [500000. 500000.] True
    """
    problem = Problem.of(fixed_s, uplink_bits, server_flops, rate, bandwidth_hz, cpu_flops)
    b, f, log_price = solve_shares(problem.a, problem.x, problem.y, problem.snr)
    return certify(problem, b, f, log_price)


def equal_share(
    *,
    fixed_s: ArrayLike,
    uplink_bits: ArrayLike,
    server_flops: ArrayLike,
    rate: Rate,
    bandwidth_hz: ArrayLike,
    cpu_flops: ArrayLike,
) -> Allocation:
    """B/N and F/N for every client: the usual baseline. Its lower bound is valid but not tight."""
    problem = Problem.of(fixed_s, uplink_bits, server_flops, rate, bandwidth_hz, cpu_flops)
    share = np.full_like(problem.x, 1 / len(problem.x))
    return certify(problem, share, share, np.zeros_like(problem.total_hz))


def scaled(share: Array, total: Array) -> Array:
    """Shares (N, I) as amounts (I, N) that use up the total and never exceed it; zero if nobody needs any."""
    used = share.sum(0)
    amount = np.ascontiguousarray((share * (total / np.where(used > 0, used, 1.0))).T)
    while (over := amount.sum(1) > total).any():
        amount[over] *= _ROUNDING
    return amount


def certify(problem: Problem, b: Array, f: Array, log_price: Array) -> Allocation:
    """Value and lower bound of given shares; `log_price` (CPU over bandwidth) weighs who has no uplink."""
    hz, flops = scaled(b, problem.total_hz), scaled(f, problem.total_flops)
    a, x, y, snr = problem.a, problem.x, problem.y, problem.snr
    b, f = (hz.T / problem.total_hz), (flops.T / problem.total_flops)
    sends, computes = x > 0, y > 0
    rho, slope = rate_and_slope(np.where(sends, b, 1.0), snr)
    uplink = x / rho
    value = (a + uplink + y / np.where(computes, f, 1.0)).max(0)

    # Prices (α, β) of the two resources up to scale, then λ from them; see the module's docstring.
    alpha, beta = 1 / (1 + np.exp(log_price)), 1 / (1 + np.exp(-log_price))
    by_air, by_cpu = (rho * rho) / np.where(sends, x * slope, np.inf), (f * f) / np.where(computes, y, np.inf)
    weight = np.where(sends, alpha * by_air, beta * by_cpu)
    scale = weight.sum(0)
    scale = np.where(scale > 0, scale, 1.0)
    cpu = np.sqrt(weight * y).sum(0) ** 2
    dual = ((weight * (a + uplink)).sum(0) + cpu + alpha * (np.where(sends, b, 0.0).sum(0) - 1)) / scale

    # The slowest client alone gives the better bound if the others do not matter.
    alone = solo_time(a, x, y, snr)
    slowest = alone.argmax(0), np.arange(alpha.size)
    bound = np.maximum(dual, alone[slowest])
    by_one = alone[slowest] >= dual
    one_rate, one_slope = rate_and_slope(np.ones_like(alpha), None if snr is None else snr[slowest])
    client_weight = weight / scale * ~by_one
    client_weight[slowest] += by_one
    alpha = np.where(by_one, x[slowest] * one_slope / one_rate**2, alpha / scale)
    beta = np.where(by_one, y[slowest], cpu / scale)

    lead = problem.shape[:-1]
    gap = np.maximum(value - bound, 0) / np.where(value > 0, value, 1.0)
    return Allocation(
        value_s=value.reshape(lead),
        bandwidth_hz=hz.reshape(problem.shape),
        cpu_flops=flops.reshape(problem.shape),
        lower_bound_s=bound.reshape(lead),
        gap=gap.reshape(lead),
        client_weight=client_weight.T.reshape(problem.shape),
        bandwidth_price_s_per_hz=(alpha / problem.total_hz).reshape(lead),
        cpu_price_s_per_flops=(beta / problem.total_flops).reshape(lead),
    )
