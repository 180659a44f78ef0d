"""A bound on all assignments of cuts, from prices.

By weak duality, for any weights lambda_sn >= 0 that sum to 1 in every stage, and any prices alpha_s, beta_s >= 0 of all
bandwidth and of the whole CPU (`menu` has the other names),

    chi_s(v) >= sum_n h_sn(v_n) - alpha_s - beta_s,
    h_sn(v) = lambda_sn a_sn(v) + min_b (lambda_sn X_sn(v) / r_n(b) + alpha_s b) + 2 sqrt(lambda_sn c_sn(v) beta_s),

so that T(v) >= sum_n min_u sum_s w_s h_sn(u) - sum_s w_s (alpha_s + beta_s) for every v: clients separate (`joules` has
h where joules have a price). The minimisers u_n are an assignment to try. Where clients weigh several stages
differently, the bound lets each of them be late in one if it is early in another; with few stages, `deadlines` does
not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from splitcast.cost.cell import Array, Cell
from splitcast.cutting.joules import loads_of, prices_at, spent
from splitcast.cutting.menu import CERTAIN, Block, Cuts, Menu, allocated, taken

Prices = tuple[Array, Array, Array]
"""lambda (S, N), alpha (S,) and beta (S,) of a block"""


def prices_of(menu: Menu, mixture: Array) -> list[Prices]:
    """Weights and prices of the best allocation, if client n did a share ``mixture`` (N, V) of the work of each cut."""
    found = []
    for block in menu.blocks:
        if menu.seconds_per_j:
            found.append(prices_at(menu, block, mixture))
            continue
        a, x, c = ((part * mixture).sum(-1)[:, None] for part in (block.fixed_s, block.bits, block.flops))  # (S, 1, N)
        if block.sharing == "none":
            last = a[:, 0] >= a.max(-1) * (1 - 1e-9)
            found.append((last / last.sum(-1, keepdims=True), np.zeros(len(a)), np.zeros(len(a))))
            continue
        share = allocated(menu, block, a, x, c)
        alpha = share.bandwidth_price_s_per_hz[:, 0] * menu.cell.bandwidth_hz
        beta = share.cpu_price_s_per_flops[:, 0] * menu.cell.server_flops_per_s
        found.append((share.client_weight[:, 0], alpha, beta))
    return found


@dataclass(frozen=True)
class Dual:
    """A bound by prices, and where better ones are."""

    seconds: float
    """what no assignment can beat"""
    asked: Cuts
    """the assignment that the prices ask for, (N,)"""
    cost: Array
    """of every choice, (N, V)"""
    uphill: list[Prices]
    """a supergradient of the bound in the logarithms of the prices, of every block"""


def bound(menu: Menu, prices: Sequence[Prices]) -> Dual:
    """The bound by prices, whose weights sum to 1 in every stage."""
    cost, paid, parts = np.zeros(menu.allowed.shape), 0.0, []
    for block, (weight, alpha, beta) in zip(menu.blocks, prices, strict=True):
        part = _asked(menu, block, weight[:, :, None], alpha[:, None, None], beta[:, None, None])
        cost += np.tensordot(block.weight, part[0], axes=1)
        paid += float(block.weight @ (alpha + beta))
        parts.append(part)
    cost = np.where(menu.allowed, cost, np.inf)
    asked = cost.argmin(1)
    low, uphill = CERTAIN * (float(cost.min(1).sum()) - paid), list[Prices]()
    for block, (weight, alpha, beta), part in zip(menu.blocks, prices, parts, strict=True):
        costs, band, server, *joules = (taken(each, asked[None])[:, 0] for each in part)
        each = costs - band - server - sum(joules)  # lambda times the time of each client
        times = block.weight[:, None]
        climb = times * (each - weight * each.sum(1, keepdims=True))
        uphill.append((climb, block.weight * (band.sum(1) - alpha), block.weight * (server.sum(1) - beta)))
    return Dual(low, asked, cost, uphill)


def _asked(menu: Menu, block: Block, lam: Array, alpha: Array, beta: Array) -> list[Array]:
    """What every choice costs, and how much of it is for the band, the server and joules, if these have a price;
    (S, N, V) each."""
    if menu.seconds_per_j:
        return list(spent(loads_of(menu, block), lam, alpha, beta)[:4])
    root = np.sqrt(lam * (block.flops / menu.cell.server_flops_per_s) * beta)
    seconds = lam * block.fixed_s + 2 * root
    if block.sharing == "none":
        return [seconds, np.zeros_like(root), root]
    air, share = _air(lam * block.bits, alpha, block, menu.cell)
    return [seconds + air, alpha * share, root]


def climbed(prices: Sequence[Prices], uphill: Sequence[Prices], missing_s: float) -> list[Prices]:
    """Prices that are better if the bound is to rise by ``missing_s`` (a step of Polyak's in their logarithms)."""
    size = sum(float((part**2).sum()) for each in uphill for part in each)
    step, found = missing_s / max(size, 1e-300), list[Prices]()
    for mine, way in zip(prices, uphill, strict=True):
        weight, alpha, beta = (old * np.exp(np.clip(step * part, -1, 1)) for old, part in zip(mine, way, strict=True))
        found.append((weight / weight.sum(1, keepdims=True), alpha, beta))
    return found


def _air(bits: Array, alpha: Array, block: Block, cell: Cell) -> tuple[Array, Array]:
    """min over b in (0, 1] of bits / r(b) + alpha b, or a little less, and where that is, (S, N, V)."""
    strength = block.strength[:, :, None]
    if block.sharing == "down":
        seconds = bits / (strength * cell.bandwidth_hz)
        b = np.clip(np.sqrt(seconds / np.maximum(alpha, 1e-300)), 1e-12, 1.0)
        value, slope = seconds / b + alpha * b, alpha - seconds / (b * b)
    else:
        x, snr = bits * (np.log(2) / cell.bandwidth_hz), strength / (cell.bandwidth_hz * cell.noise_w_per_hz)
        wanted = np.log(np.maximum(alpha, 1e-300) * snr * snr / np.where(x > 0, x, 1.0))
        b = np.clip(snr / np.expm1(np.interp(wanted, _LOG_SLOPE, _EFFICIENCY)), 1e-12, 1.0)
        gained = np.log1p(snr / b)
        rate, marginal = b * gained, np.maximum(gained - snr / (snr + b), 1e-300)
        value, slope = x / rate + alpha * b, alpha - x * marginal / (rate * rate)
    # the function is convex: over (0, 1] it is nowhere below its tangent at b
    least = np.maximum(value + np.minimum(-slope * b, slope * (1 - b)), 0.0)
    return np.where(bits > 0, least, 0.0), np.where(bits > 0, b, 0.0)


def alone(block: Block, cell: Cell) -> Array:
    """Seconds of each client at each cut with the whole cell to itself, (S, N, V)."""
    strength, seconds = block.strength[:, :, None], block.fixed_s + block.flops / cell.server_flops_per_s
    if block.sharing == "none":
        return seconds
    snr = strength / (cell.bandwidth_hz * cell.noise_w_per_hz)
    efficiency = np.log1p(snr) / np.log(2) if block.sharing == "up" else strength
    return np.asarray(seconds + block.bits / (cell.bandwidth_hz * efficiency))


def earliest(menu: Menu) -> list[float]:
    """When each stage ends at the earliest, whatever the others take: its bound by prices if it were the only one."""
    found = []
    for block in menu.blocks:
        for k in range(len(block.weight)):
            parts = {name: getattr(block, name)[k : k + 1] for name in _STAGED}
            only = replace(block, weight=np.ones(1), **parts)
            single = Menu(menu.cell, [only], menu.allowed)
            seconds = np.where(menu.allowed, alone(only, menu.cell)[0], np.inf)
            least, asked = float(seconds.min(1).max()) * CERTAIN, seconds.argmin(1)
            if block.sharing != "none":
                least = max(least, bound(single, prices_of(single, np.eye(seconds.shape[1])[asked])).seconds)
            found.append(least)
    return found


_STAGED = ("fixed_s", "bits", "flops", "strength", "cohort_s", "busy_s", "busy_j")
_EFFICIENCY = np.concatenate([np.geomspace(1e-9, 1e-2, 400)[:-1], np.geomspace(1e-2, 80, 6000)])
"""L = ln(1 + snr/b)"""
_LOG_SLOPE = np.log(
    np.maximum(_EFFICIENCY - 1 + np.exp(-_EFFICIENCY), _EFFICIENCY**2 / 2 * (1 - _EFFICIENCY / 3))
) + 2 * np.log(np.expm1(_EFFICIENCY) / _EFFICIENCY)
"""ln of alpha snr^2 / x at which b = snr / (e^L - 1) is the best share"""


def cohorts(menu: Menu) -> Iterator[Menu]:
    """The menu as it is; where every cohort has a broadcast of its own, once for every set of cuts that may be used,
    with the broadcasts of all of these."""
    if not menu.in_cohorts:
        yield menu
        return
    for used in menu.sets():
        blocks = [
            replace(block, fixed_s=block.fixed_s - block.cohort_s + block.cohort_s[:, :, used].sum(-1, keepdims=True))
            for block in menu.blocks
        ]
        yield replace(menu, blocks=blocks, allowed=menu.allowed & used)
