"""What every client would do at every cut, and how long a round of any assignment of cuts takes.

A round is a sum of stages, and a stage ends with its slowest client (`cost.stages`): with v_n the cut of client n,

    T(v) = sum_s w_s chi_s(v),
    chi_s(v) = min over shares of max_n  a_sn(v_n) + X_sn(v_n) / r_n(B_sn) + c_sn(v_n) / f_sn,

a stage that comes w_s times in a round (or in w_s of several rounds). For given v that is P2.1, stage by stage, which
`allocate` solves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from splitcast.allocate.allocate import Allocation, allocate
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


@dataclass(frozen=True)
class Menu:
    """What every client would do at every cut."""

    cell: Cell
    blocks: Sequence[Block]
    allowed: NDArray[np.bool_]
    """(N, V)"""

    @staticmethod
    def of(
        cell: Cell, stages: Sequence[Sequence[Stage]], met: Conditions, allowed: NDArray[np.bool_], rounds: int = 1
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
        return Menu(cell, blocks, allowed)

    @property
    def stages(self) -> int:
        """S, of all blocks"""
        return sum(len(block.weight) for block in self.blocks)

    @property
    def in_cohorts(self) -> bool:
        """Whether something is broadcast to every cohort."""
        return any(bool(block.cohort_s.any()) for block in self.blocks)

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

    def each(load: str) -> Array:  # (1, S, N, V)
        values = [[[stage.of(load, k) for stage in column] for k in range(n)] for column in columns]
        return np.array(values, dtype=np.float64)[None]

    joint = np.array([[stage.joint_flops for stage in column] for column in columns])[None, :, None, :]
    speed = (cell.client_flops_per_s * met.speed)[:, None, :, None]
    efficiency = spectral_efficiency(cell, met.gains)[:, None, :, None]
    broadcast = each("broadcast_bits") / (cell.bandwidth_hz * efficiency)
    own = np.array([column[0].name == "model" for column in columns])[None, :, None, None]
    fixed = (each("compute_flops") + each("backward_flops")) / speed + broadcast + joint / cell.server_flops_per_s
    shape = (draws, len(columns), n, len(columns[0]))
    strength = cell.client_power_w * met.gains if sharing == "up" else efficiency[:, 0, :, 0]
    parts = [fixed, each("uplink_bits" if sharing == "up" else "unicast_bits"), each("server_flops"), broadcast * ~own]
    fixed, bits, flops, cohort = (np.broadcast_to(part, shape).reshape(-1, *shape[2:]).copy() for part in parts)
    weight = np.tile(np.array(counts, dtype=np.float64) / draws, draws)
    power = np.repeat(strength, len(columns), axis=0)
    return Block(sharing, weight, fixed, bits, flops, power, cohort)


def timed(menu: Menu, cuts: Cuts) -> Array:
    """T(v) of assignments (K, N), exactly, (K,)."""
    total = np.zeros(len(cuts))
    for block in menu.blocks:
        a, x, c = (taken(part, cuts) for part in (block.fixed_s, block.bits, block.flops))  # (S, K, N)
        if block.cohort_s.any():
            present = np.stack([(cuts == v).any(1) for v in range(menu.allowed.shape[1])], axis=-1)  # (K, V)
            a = a + np.einsum("snv,kv->skn", block.cohort_s, present) - taken(block.cohort_s, cuts)
        value = a.max(-1) if block.sharing == "none" else allocated(menu, block, a, x, c).value_s
        total += block.weight @ value
    return total


def taken(part: Array, cuts: Cuts) -> Array:
    """(S, N, V) at the cuts (K, N): (S, K, N)."""
    return np.asarray(part[:, np.arange(cuts.shape[1]), cuts])


def allocated(menu: Menu, block: Block, a: Array, x: Array, c: Array) -> Allocation:
    """The best shares for loads (S, K, N)."""
    power = block.strength[:, None, :]
    rate: Rate = ShannonRate(power, menu.cell.noise_w_per_hz) if block.sharing == "up" else LinearRate(power)
    totals = {"bandwidth_hz": menu.cell.bandwidth_hz, "cpu_flops": menu.cell.server_flops_per_s}
    return allocate(fixed_s=a, uplink_bits=x, server_flops=c, rate=rate, **totals)
