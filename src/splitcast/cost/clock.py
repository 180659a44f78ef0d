"""The virtual clock: stages and channel gains in, seconds out, with bandwidth and server CPU shared as asked.

All stages of all rounds (one per cut, say) and all channel draws are solved together, in one batch for each way of
sharing: clients upload over slices of the band and share the server, or the server sends to each of them over a slice.
Power and client CPUs are at their maxima unless joules have a price or a cap (`EnergyAware`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from splitcast.allocate.allocate import Allocation, allocate, equal_share
from splitcast.allocate.capped import Indices, Spent, within_caps
from splitcast.allocate.energy import allocate_energy
from splitcast.allocate.rate import LinearRate, Rate, ShannonRate
from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.cost.cell import Array, Cell
from splitcast.cost.conditions import Conditions
from splitcast.cost.latency import RoundTime, StageTime, spectral_efficiency, uplink_rate
from splitcast.cost.stages import Stage


@dataclass(frozen=True)
class EnergyAware:
    """Shares, transmit power and client speed with the least seconds + price · joules, within caps if there are any."""

    seconds_per_j: float | Array
    """the same for all clients and draws, or (..., N)"""
    cap_j: float = 0.0
    """Joules that a client may spend in a round; 0: as many as it likes. Prices are one number then."""


_UNSURE = 1e-3  # relatively, of what no certificate vouches for
Shares = Callable[..., Allocation]
Allocator = Shares | EnergyAware
ALLOCATORS: Registry[Shares] = Registry("allocation", takes=0, entries={"optimal": allocate, "equal": equal_share})


def time_rounds(
    rounds: Sequence[Sequence[Stage]], cell: Cell, gains: Array | Conditions, allocator: Allocator = allocate
) -> list[RoundTime]:
    """The time of every round under every channel draw; ``gains`` (..., N), or conditions of that shape.

    Two clients at equal gains share 1 MHz: 1 Mbit each at 500 kHz · log2(1 + 1 W · 1.5e-6 / (500 kHz · 1e-12 W/Hz))
    = 1 Mbit/s.

    >>> cell = Cell(1e6, 1e-12, 1.0, 1e9, np.ones(2), np.ones(2))
    >>> (one,) = time_rounds([[Stage("model", (0, 1), uplink_bits=10**6)]], cell, np.full(2, 1.5e-6))
    >>> float(one.seconds.round(6))
    1.0
    """
    met = Conditions.of(gains)
    if isinstance(allocator, EnergyAware) and allocator.cap_j:
        return [_within(allocator, stages, cell, met) for stages in rounds]
    batches: dict[tuple[str, int], list[Stage]] = {}
    for stage in dict.fromkeys(stage for stages in rounds for stage in stages):
        batches.setdefault((_sharing(stage), len(stage.clients)), []).append(stage)
    solved: dict[Stage, StageTime] = {}
    for (sharing, _), batch in batches.items():
        solved |= _solve(batch, sharing, cell, met, allocator)
    return [RoundTime([solved[stage] for stage in stages]) for stages in rounds]


def round_seconds(
    rounds: Sequence[Sequence[Stage]], cell: Cell, gains: Array | Conditions, allocator: Allocator = allocate
) -> Array:
    """l_t of C rounds under every draw, (..., C): what each cut would take."""
    return np.stack([timed.seconds for timed in time_rounds(rounds, cell, gains, allocator)], axis=-1)


def round_prices(
    rounds: Sequence[Sequence[Stage]], cell: Cell, gains: Array | Conditions, allocator: Allocator = allocate
) -> Array:
    """What P1 charges for C rounds under every draw, (..., C): l_t, and the price of all joules if they have one."""
    price = float(allocator.seconds_per_j) if isinstance(allocator, EnergyAware) else 0.0
    timed = time_rounds(rounds, cell, gains, allocator)
    return np.stack([one.seconds + price * one.joules for one in timed], axis=-1)


def _within(allocator: EnergyAware, stages: Sequence[Stage], cell: Cell, met: Conditions) -> RoundTime:
    """One round within the caps of its clients, under every draw."""
    weight, cap, flat = float(allocator.seconds_per_j), np.full(cell.clients, allocator.cap_j), met.flat()
    bits = np.zeros(cell.clients)
    for stage in stages:
        bits[list(stage.clients)] += stage.uplink_bits
    least = (bits * np.log(2) * cell.noise_w_per_hz / flat.gains).max(0)  # J, of endless time: x n as L → 0
    if (least >= cap).any():
        n = int(least.argmax())
        raise SplitcastError(
            f"energy_cap_j: {allocator.cap_j:g}; must be above {least[n]:.3g}, which client {n} needs in its worst "
            "round however slowly it sends"
        )

    def spend(price: Array, which: Indices) -> Spent:
        (timed,) = time_rounds([stages], cell, flat[which], EnergyAware(price))
        bound = np.sum([stage.bound_s for stage in timed.stages if stage.bound_s is not None], axis=0)
        return Spent(timed.seconds, np.add(*timed.spent_j(cell.clients)), bound)

    found = within_caps(spend, weight, cap, len(flat.gains))
    if (worst := float(np.maximum(found.gap, found.over - 1).max())) > _UNSURE:
        raise SplitcastError(f"energy_cap_j: {allocator.cap_j:g} was met to {worst:.1%} only; must be larger, or 0")
    prices = found.price.reshape(met.gains.shape)
    return time_rounds([stages], cell, met, EnergyAware(prices))[0]


def _sharing(stage: Stage) -> str:
    return "up" if stage.uplink_bits or stage.server_flops else "down" if stage.unicast_bits else "none"


def _solve(
    stages: Sequence[Stage], sharing: str, cell: Cell, met: Conditions, allocator: Allocator
) -> dict[Stage, StageTime]:
    """G stages of K clients each; all arrays broadcast to (..., G, K)."""

    who = np.array([stage.clients for stage in stages])  # (G, K)

    def each(field: str) -> Array:  # (G, 1), or (G, K) where clients differ
        loads = [getattr(stage, field) for stage in stages]
        width = who.shape[1] if any(isinstance(load, tuple) for load in loads) else 1
        return np.array([np.broadcast_to(load, width) for load in loads], dtype=np.float64)

    g = met.gains[..., who]  # (..., G, K), linear
    clock, power = cell.client_flops_per_s[who], cell.client_power_w[who]  # FLOP/s, W
    speed = clock * met.speed[..., who]  # a background load takes cycles, not clock frequency
    efficiency = spectral_efficiency(cell, g)  # bit/s/Hz
    compute = each("compute_flops") / speed  # l^F = D γ_F / f^n, s
    backward = each("backward_flops") / speed  # l^B = D γ_B / f^n, s
    downlink = each("broadcast_bits") / (cell.bandwidth_hz * efficiency)  # l^D = X / (B e), s
    server = each("joint_flops") / cell.server_flops_per_s  # s
    uplink = np.zeros(1)
    flops_of = each("compute_flops") + each("backward_flops")
    compute_j, air_j = cell.kappa * clock**2 * flops_of, np.zeros(1)  # κ f² per cycle
    up = sharing == "up"
    bits = each("uplink_bits" if up else "unicast_bits")
    rate: Rate = ShannonRate(power * g, cell.noise_w_per_hz) if up else LinearRate(efficiency)
    totals = {"bandwidth_hz": cell.bandwidth_hz, "cpu_flops": cell.server_flops_per_s}
    bound = None

    if isinstance(allocator, EnergyAware):
        busy = compute + backward
        best = allocate_energy(
            fixed_s=server + downlink,
            compute_s=busy,
            compute_j=compute_j,
            uplink_bits=bits,
            server_flops=each("server_flops"),
            rate=rate,
            power_w=power,
            seconds_per_j=np.broadcast_to(allocator.seconds_per_j, met.gains.shape)[..., who],
            **totals,
        )
        slower = best.compute_s / np.where(busy > 0, busy, 1.0)
        compute, backward = compute * slower, backward * slower
        uplink, downlink = (best.uplink_s, downlink) if up else (uplink, downlink + best.uplink_s)
        hz, flops, weight = best.bandwidth_hz, best.cpu_flops, best.client_weight
        compute_j, air_j, bound = best.compute_j, best.air_j, best.lower_bound_s
    elif sharing == "none":
        fixed = compute + server + downlink + backward
        hz = flops = np.zeros_like(g)
        last = fixed == fixed.max(-1, keepdims=True)
        weight = last / last.sum(-1, keepdims=True)
    else:
        fixed = compute + server + downlink + backward
        share = allocator(fixed_s=fixed, uplink_bits=bits, server_flops=each("server_flops"), rate=rate, **totals)
        hz, flops, weight = share.bandwidth_hz, share.cpu_flops, share.client_weight
        some_hz = np.where(hz > 0, hz, 1.0)
        if up:
            uplink = bits / uplink_rate(some_hz, power, g, cell.noise_w_per_hz)  # l^U = X / r^U, s
            air_j = power * uplink
        else:
            downlink = downlink + bits / (some_hz * efficiency)  # l^D = X / (B_n e), s
    server = server + each("server_flops") / np.where(flops > 0, flops, 1.0)  # l^s = D (γ_F + γ_B) / f^{s,n}, s

    found = (compute, uplink, server, downlink, backward, hz, flops, weight, compute_j, air_j)
    parts = [np.broadcast_to(part, g.shape) for part in found]
    return {
        stage: replace(
            StageTime(stage, *(part[..., k, :] for part in parts)), bound_s=None if bound is None else bound[..., k]
        )
        for k, stage in enumerate(stages)
    }
