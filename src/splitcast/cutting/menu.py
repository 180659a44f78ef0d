"""What every client would do at every cut, and how long a round of any assignment of cuts takes.

A round is a sum of stages, and a stage ends with its slowest client (`cost.stages`): with v_n the cut of client n,

    T(v) = sum_s w_s chi_s(v),
    chi_s(v) = min over shares of max_n  a_sn(v_n) + X_sn(v_n) / r_n(B_sn) + c_sn(v_n) / f_sn,

a stage that comes w_s times in a round (or in w_s of several rounds). For given v that is P2.1, stage by stage, which
`allocate` solves. Where a joule is worth W seconds, stages cost chi_s + W sum_n E_sn, client speed and power are chosen
too, and `allocate_energy` solves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitcast.allocate.allocate import Allocation, allocate
from splitcast.allocate.energy import EnergyAllocation, allocate_energy
from splitcast.allocate.rate import LinearRate, Rate, ShannonRate
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array, Cell
from splitcast.cost.conditions import Conditions
from splitcast.cost.latency import spectral_efficiency
from splitcast.cost.stages import Stage

Cuts = NDArray[np.int64]
"""Positions 0..V-1 among the cuts, (N,), or (K, N) for several assignments"""
CERTAIN = 1 - 1e-9
"""What rounding may take from a bound"""


@dataclass(frozen=True)
class Block:
    """Stages that share alike, (S, N, V) each."""

    sharing: str
    """up: uplink and server; down: unicasts; none"""
    weight: Array
    """how often each comes, (S,)"""
    fixed_s: Array
    bits: Array
    flops: Array
    strength: Array
    """received power of the uplink (W), or bit/s/Hz of the downlink, (S, N)"""
    cohort_s: Array
    """seconds of a broadcast that every cohort has one of, in ``fixed_s`` too; 0 where there is one for all"""
    busy_s: Array
    """seconds of computing on the client at full speed, in ``fixed_s`` too"""
    busy_j: Array
    """joules of that"""

    @property
    def loads(self) -> tuple[Array, ...]:
        """What a client has to do."""
        return self.fixed_s, self.bits, self.flops, self.busy_s, self.busy_j


@dataclass(frozen=True)
class Menu:
    """What every client would do at every cut."""

    cell: Cell
    blocks: Sequence[Block]
    allowed: NDArray[np.bool_]
    """(N, V)"""
    seconds_per_j: float = 0.0
    """W; 0: clients are at full speed and power"""

    @staticmethod
    def of(
        cell: Cell,
        stages: Sequence[Sequence[Stage]],
        met: Conditions,
        allowed: NDArray[np.bool_],
        rounds: int = 1,
        seconds_per_j: float = 0.0,
    ) -> "Menu":
        """From the stages of a round, or of several, at each of V cuts, all clients at the same one, and conditions
        (D, N) of D rounds; ``allowed`` (N, V)."""
        if len({tuple(_shape(stage) for stage in each) for each in stages}) > 1:
            raise SplitcastError("cut: the stages of a round differ from cut to cut; they need one cut for all clients")
        if not allowed.any(1).all():
            client = int(np.flatnonzero(~allowed.any(1))[0])
            raise SplitcastError(f"cut: none is left for client {client}; lower epsilon or raise its memory")
        columns = list(zip(*stages, strict=True))  # stage by stage, at every cut
        counts = {column: columns.count(column) / rounds for column in dict.fromkeys(columns)}
        blocks = []
        for sharing in ("up", "down", "none"):
            some = [column for column in counts if _sharing(column[0]) == sharing]
            if some:
                blocks.append(_block(sharing, some, [counts[column] for column in some], cell, met))
        return Menu(cell, blocks, allowed, seconds_per_j)

    @property
    def stages(self) -> int:
        """S, of all blocks"""
        return sum(len(block.weight) for block in self.blocks)

    @property
    def in_cohorts(self) -> bool:
        """Whether something is broadcast to every cohort."""
        return any(bool(block.cohort_s.any()) for block in self.blocks)

    @property
    def in_turn(self) -> bool:
        """Whether no two clients have a part in the same stage."""
        loads = (np.stack([b.fixed_s, b.bits, b.flops]).any((0, 3)) for b in self.blocks)  # (S, N) each
        return all(bool((some.sum(1) <= 1).all()) for some in loads)

    def sets(self) -> list[NDArray[np.bool_]]:
        """The sets of cuts that may be in use, (V,) each; without broadcasts to cohorts, that of all is enough."""
        v = self.allowed.shape[1]
        if not self.in_cohorts:
            return [np.ones(v, dtype=np.bool_)]
        some = [np.isin(np.arange(v), part) for size in range(1, v + 1) for part in combinations(range(v), size)]
        return [used for used in some if (self.allowed & used).any(1).all()]


def _shape(stage: Stage) -> tuple[str, tuple[int, ...], str]:
    return stage.name, tuple(sorted(stage.clients)), _sharing(stage)


def _sharing(stage: Stage) -> str:
    return "up" if stage.uplink_bits or stage.server_flops else "down" if stage.unicast_bits else "none"


def _block(
    sharing: str, columns: Sequence[tuple[Stage, ...]], counts: Sequence[float], cell: Cell, met: Conditions
) -> Block:
    draws, n = met.gains.shape

    def each(load: str) -> Array:  # (1, S, N, V); those who have no part in a stage have 0
        values = np.zeros((1, len(columns), n, len(columns[0])))
        for s, column in enumerate(columns):
            for v, stage in enumerate(column):
                values[0, s, list(stage.clients), v] = getattr(stage, load)
        return values

    joint = np.array([[stage.joint_flops for stage in column] for column in columns])[None, :, None, :]
    speed = (cell.client_flops_per_s * met.speed)[:, None, :, None]
    efficiency = spectral_efficiency(cell, met.gains)[:, None, :, None]
    broadcast = each("broadcast_bits") / (cell.bandwidth_hz * efficiency)
    own = np.array([column[0].name == "model" for column in columns])[None, :, None, None]
    cycles = each("compute_flops") + each("backward_flops")
    busy, joules = cycles / speed, cell.kappa * cell.client_flops_per_s[:, None] ** 2 * cycles
    fixed = busy + broadcast + joint / cell.server_flops_per_s
    shape = (draws, len(columns), n, len(columns[0]))
    strength = cell.client_power_w * met.gains if sharing == "up" else efficiency[:, 0, :, 0]
    bits = each("uplink_bits" if sharing == "up" else "unicast_bits")
    parts = (fixed, bits, each("server_flops"), broadcast * ~own, busy, joules)
    fixed, bits, flops, cohort, busy, joules = (
        np.broadcast_to(part, shape).reshape(-1, *shape[2:]).copy() for part in parts
    )
    weight = np.tile(np.array(counts, dtype=np.float64) / draws, draws)
    power = np.repeat(strength, len(columns), axis=0)
    return Block(sharing, weight, fixed, bits, flops, power, cohort, busy, joules)


def timed(menu: Menu, cuts: Cuts) -> Array:
    """T(v) of assignments (K, N), exactly, (K,)."""
    total = np.zeros(len(cuts))
    for block in menu.blocks:
        a, *others = (taken(part, cuts) for part in block.loads[: 5 if menu.seconds_per_j else 3])  # (S, K, N)
        if block.cohort_s.any():
            present = np.stack([(cuts == v).any(1) for v in range(menu.allowed.shape[1])], axis=-1)  # (K, V)
            a = a + np.einsum("snv,kv->skn", block.cohort_s, present) - taken(block.cohort_s, cuts)
        if menu.seconds_per_j:
            value = saving(menu, block, a, *others).value_s
        else:
            value = a.max(-1) if block.sharing == "none" else allocated(menu, block, a, *others).value_s
        total += block.weight @ value
    return total


def taken(part: Array, cuts: Cuts) -> Array:
    """(S, N, V) at the cuts (K, N): (S, K, N)."""
    return np.asarray(part[:, np.arange(cuts.shape[1]), cuts])


def allocated(menu: Menu, block: Block, a: Array, x: Array, c: Array) -> Allocation:
    """The best shares for loads (S, K, N)."""
    return allocate(fixed_s=a, uplink_bits=x, server_flops=c, **_cell(menu, block))


def saving(
    menu: Menu, block: Block, a: Array, x: Array, c: Array, busy: Array, joules: Array, power_w: Array | None = None
) -> EnergyAllocation:
    """The best shares, power and speed for loads (S, K, N); power up to ``power_w``, or that of the cell."""
    return allocate_energy(
        fixed_s=np.maximum(a - busy, 0.0),
        compute_s=busy,
        compute_j=joules,
        uplink_bits=x,
        server_flops=c,
        power_w=menu.cell.client_power_w if power_w is None else power_w,
        seconds_per_j=menu.seconds_per_j,
        **_cell(menu, block),
    )


def _cell(menu: Menu, block: Block) -> dict[str, Any]:
    power = block.strength[:, None, :]
    rate: Rate = ShannonRate(power, menu.cell.noise_w_per_hz) if block.sharing == "up" else LinearRate(power)
    return {"rate": rate, "bandwidth_hz": menu.cell.bandwidth_hz, "cpu_flops": menu.cell.server_flops_per_s}
