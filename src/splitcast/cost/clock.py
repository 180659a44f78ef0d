"""The virtual clock: stages and channel gains in, seconds out, with bandwidth and server CPU shared as asked.

All stages of all rounds (one per cut, say) and all channel draws are solved together, in one batch for each way of
sharing: clients upload over slices of the band and share the server, or the server sends to each of them over a slice.
"""

from collections.abc import Callable, Sequence

import numpy as np

from splitcast.allocate.allocate import Allocation, allocate, equal_share
from splitcast.allocate.rate import LinearRate, Rate, ShannonRate
from splitcast.base.registry import Registry
from splitcast.cost.cell import Array, Cell
from splitcast.cost.conditions import Conditions
from splitcast.cost.latency import RoundTime, StageTime, spectral_efficiency, uplink_rate
from splitcast.cost.stages import Stage

Allocator = Callable[..., Allocation]
ALLOCATORS: Registry[Allocator] = Registry("allocation", takes=0, entries={"optimal": allocate, "equal": equal_share})


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
    speed = cell.client_flops_per_s[who] * met.speed[..., who]  # FLOP/s
    efficiency = spectral_efficiency(cell, g)  # bit/s/Hz
    compute = each("compute_flops") / speed  # l^F = D γ_F / f^n, s
    backward = each("backward_flops") / speed  # l^B = D γ_B / f^n, s
    downlink = each("broadcast_bits") / (cell.bandwidth_hz * efficiency)  # l^D = X / (B e), s
    server = each("joint_flops") / cell.server_flops_per_s  # s
    uplink = np.zeros(1)
    fixed = compute + server + downlink + backward

    if sharing == "none":
        hz = flops = np.zeros_like(g)
        last = fixed == fixed.max(-1, keepdims=True)
        weight = last / last.sum(-1, keepdims=True)
    else:
        power = cell.client_power_w[who]
        up = sharing == "up"
        rate: Rate = ShannonRate(power * g, cell.noise_w_per_hz) if up else LinearRate(efficiency)
        bits = each("uplink_bits" if up else "unicast_bits")
        share = allocator(
            fixed_s=fixed,
            uplink_bits=bits,
            server_flops=each("server_flops"),
            rate=rate,
            bandwidth_hz=cell.bandwidth_hz,
            cpu_flops=cell.server_flops_per_s,
        )
        hz, flops, weight = share.bandwidth_hz, share.cpu_flops, share.client_weight
        some_hz = np.where(hz > 0, hz, 1.0)
        if up:
            uplink = bits / uplink_rate(some_hz, power, g, cell.noise_w_per_hz)  # l^U = X / r^U, s
        else:
            downlink = downlink + bits / (some_hz * efficiency)  # l^D = X / (B_n e), s
        server = server + each("server_flops") / np.where(flops > 0, flops, 1.0)  # l^s = D (γ_F + γ_B) / f^{s,n}, s

    parts = [
        np.broadcast_to(part, g.shape) for part in (compute, uplink, server, downlink, backward, hz, flops, weight)
    ]
    return {stage: StageTime(stage, *(part[..., k, :] for part in parts)) for k, stage in enumerate(stages)}
