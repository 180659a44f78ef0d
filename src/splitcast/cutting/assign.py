"""A cut for every client, planned together with bandwidth and server CPU, with a certificate.

A round is a sum of stages, and a stage ends with its slowest client (`cost.stages`): with v_n the cut of client n,

    minimise over v of  T(v) = sum_s w_s chi_s(v),
    chi_s(v) = min over shares of max_n  a_sn(v_n) + X_sn(v_n) / r_n(B_sn) + c_sn(v_n) / f_sn,

a stage that comes w_s times in a round (or in w_s of several rounds). For given v that is P2.1, stage by stage, which
`allocate` solves. The V^N assignments are searched through its prices. By weak duality, for any weights lambda_sn >= 0
that sum to 1 in every stage, and any prices alpha_s, beta_s >= 0 of all bandwidth and of the whole CPU,

    chi_s(v) >= sum_n h_sn(v_n) - alpha_s - beta_s,
    h_sn(v) = lambda_sn a_sn(v) + min_b (lambda_sn X_sn(v) / r_n(b) + alpha_s b) + 2 sqrt(lambda_sn c_sn(v) beta_s),

so that T(v) >= sum_n min_u sum_s w_s h_sn(u) - sum_s w_s (alpha_s + beta_s) **for every v**: clients separate. That is
the certified bound. Its minimisers u_n are the next assignment to try; the allocation of that one gives other prices,
and these are mixed with those before. The gap that is left is that of a problem in whole numbers, and shrinks as 1/N.

A gradient that is broadcast to every cohort (SFL-GA) ties clients together: it lasts as long as all cohorts' together.
There the bound is the least of those for every set of cuts that may be in use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
Prices = tuple[Array, Array, Array]
"""lambda (S, N), alpha (S,) and beta (S,) of a block"""
_PASSES, _MIXES, _CLIMBS, _LOOKS = 2, 4, 16, 3
"""Rounds of dropping choices; in each, of prices and answers and of better prices; then of moves of single clients"""
_ASKED, _NEIGHBOURS = 6, 16
"""Assignments that better prices ask for, and moves, that are timed"""
_CERTAIN = 1 - 1e-9
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
    def of(cell: Cell, rounds: Sequence[Sequence[Stage]], met: Conditions, allowed: NDArray[np.bool_]) -> "Menu":
        """From the stages of a round at each of V cuts, all clients at the same one, and conditions (D, N) of D rounds;
        ``allowed`` (N, V)."""
        if len({tuple(_shape(stage) for stage in stages) for stages in rounds}) > 1:
            raise SplitcastError("cut: the stages of a round differ from cut to cut; they need one cut for all clients")
        if not allowed.any(1).all():
            client = int(np.flatnonzero(~allowed.any(1))[0])
            raise SplitcastError(f"cut: none is left for client {client}; lower epsilon or raise its memory")
        columns = list(zip(*rounds, strict=True))  # stage by stage, at every cut
        counts = {column: columns.count(column) for column in dict.fromkeys(columns)}
        blocks = []
        for sharing in ("up", "down", "none"):
            some = [column for column in counts if _sharing(column[0]) == sharing]
            if some:
                blocks.append(_block(sharing, some, [counts[column] for column in some], cell, met))
        return Menu(cell, blocks, allowed)


def _shape(stage: Stage) -> tuple[str, tuple[int, ...], str]:
    return stage.name, tuple(sorted(stage.clients)), _sharing(stage)


def _sharing(stage: Stage) -> str:
    return "up" if stage.uplink_bits or stage.server_flops else "down" if stage.unicast_bits else "none"


def _block(
    sharing: str, columns: Sequence[tuple[Stage, ...]], counts: Sequence[int], cell: Cell, met: Conditions
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
        a, x, c = (_taken(part, cuts) for part in (block.fixed_s, block.bits, block.flops))  # (S, K, N)
        if block.cohort_s.any():
            present = np.stack([(cuts == v).any(1) for v in range(menu.allowed.shape[1])], axis=-1)  # (K, V)
            a = a + np.einsum("snv,kv->skn", block.cohort_s, present) - _taken(block.cohort_s, cuts)
        value = a.max(-1) if block.sharing == "none" else _allocated(menu, block, a, x, c).value_s
        total += block.weight @ value
    return total


def _taken(part: Array, cuts: Cuts) -> Array:
    """(S, N, V) at the cuts (K, N): (S, K, N)."""
    return np.asarray(part[:, np.arange(cuts.shape[1]), cuts])


def _allocated(menu: Menu, block: Block, a: Array, x: Array, c: Array) -> Allocation:
    """The best shares for loads (S, K, N)."""
    power = block.strength[:, None, :]
    rate: Rate = ShannonRate(power, menu.cell.noise_w_per_hz) if block.sharing == "up" else LinearRate(power)
    totals = {"bandwidth_hz": menu.cell.bandwidth_hz, "cpu_flops": menu.cell.server_flops_per_s}
    return allocate(fixed_s=a, uplink_bits=x, server_flops=c, rate=rate, **totals)


def prices_of(menu: Menu, mixture: Array) -> list[Prices]:
    """Weights and prices of the best allocation, if client n did a share ``mixture`` (N, V) of the work of each cut."""
    found = []
    for block in menu.blocks:
        a, x, c = ((part * mixture).sum(-1)[:, None] for part in (block.fixed_s, block.bits, block.flops))  # (S, 1, N)
        if block.sharing == "none":
            last = a[:, 0] >= a.max(-1) * (1 - 1e-9)
            found.append((last / last.sum(-1, keepdims=True), np.zeros(len(a)), np.zeros(len(a))))
            continue
        share = _allocated(menu, block, a, x, c)
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
    cost, spent, parts = np.zeros(menu.allowed.shape), 0.0, []
    for block, (weight, alpha, beta) in zip(menu.blocks, prices, strict=True):
        lam, y = weight[:, :, None], block.flops / menu.cell.server_flops_per_s
        root = np.sqrt(lam * y * beta[:, None, None])  # beta times the share that is asked for
        seconds, share = lam * block.fixed_s + 2 * root, np.zeros_like(root)
        if block.sharing != "none":
            air, share = _air(lam * block.bits, alpha[:, None, None], block, menu.cell)
            seconds += air
        cost += np.tensordot(block.weight, seconds, axes=1)
        spent += float(block.weight @ (alpha + beta))
        parts.append((seconds, share, root))
    cost = np.where(menu.allowed, cost, np.inf)
    asked = cost.argmin(1)
    low, uphill = _CERTAIN * (float(cost.min(1).sum()) - spent), list[Prices]()
    for block, (weight, alpha, beta), part in zip(menu.blocks, prices, parts, strict=True):
        seconds, share, root = (_taken(each, asked[None])[:, 0] for each in part)
        b, f = share.sum(1), root.sum(1)
        each = seconds - alpha[:, None] * share - root  # lambda times the time of each client
        times = block.weight[:, None]
        climb = times * (each - weight * each.sum(1, keepdims=True))
        uphill.append((climb, block.weight * alpha * (b - 1), block.weight * (f - beta)))
    return Dual(low, asked, cost, uphill)


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


def _alone(block: Block, cell: Cell) -> Array:
    """Seconds of each client at each cut with the whole cell to itself, (S, N, V)."""
    strength, seconds = block.strength[:, :, None], block.fixed_s + block.flops / cell.server_flops_per_s
    if block.sharing == "none":
        return seconds
    snr = strength / (cell.bandwidth_hz * cell.noise_w_per_hz)
    efficiency = np.log1p(snr) / np.log(2) if block.sharing == "up" else strength
    return np.asarray(seconds + block.bits / (cell.bandwidth_hz * efficiency))


_EFFICIENCY = np.concatenate([np.geomspace(1e-9, 1e-2, 400)[:-1], np.geomspace(1e-2, 80, 6000)])
"""L = ln(1 + snr/b)"""
_LOG_SLOPE = np.log(
    np.maximum(_EFFICIENCY - 1 + np.exp(-_EFFICIENCY), _EFFICIENCY**2 / 2 * (1 - _EFFICIENCY / 3))
) + 2 * np.log(np.expm1(_EFFICIENCY) / _EFFICIENCY)
"""ln of alpha snr^2 / x at which b = snr / (e^L - 1) is the best share"""


@dataclass(frozen=True)
class Assignment:
    """A cut for every client."""

    cuts: Cuts
    """positions, (N,)"""
    seconds: float
    """T(v)"""
    lower_bound_s: float
    """no assignment is faster"""
    common: int
    """position of the best cut for all"""
    common_s: float

    @property
    def gap(self) -> float:
        """(T - lower bound) / T"""
        return max(0.0, 1 - self.lower_bound_s / self.seconds)

    @property
    def gain(self) -> float:
        """How much longer the best common cut takes."""
        return self.common_s / self.seconds


def assign(menu: Menu) -> Assignment:
    """The best assignment that is found, never worse than the best common cut that all are allowed."""
    n, v = menu.allowed.shape
    common = [k for k in range(v) if menu.allowed[:, k].all()]
    start = np.array([np.full(n, k) for k in common] or [np.argmax(menu.allowed, axis=1)])
    seconds = timed(menu, start)
    at = int(seconds.argmin())
    found, least = _Search(menu, start[at], float(seconds[at])), np.inf
    for used in _cohorts(menu):
        least = min(least, found.run(used))
    common_s = float(seconds[at]) if common else np.inf
    least = min(least, found.best_s)
    return Assignment(found.best, found.best_s, least, common[at] if common else -1, common_s)


def _cohorts(menu: Menu) -> Iterator[Menu]:
    """The menu as it is; where every cohort has a broadcast of its own, once for every set of cuts that may be used,
    with the broadcasts of all of these."""
    if not any(block.cohort_s.any() for block in menu.blocks):
        yield menu
        return
    v = menu.allowed.shape[1]
    for size in range(1, v + 1):
        for some in combinations(range(v), size):
            used = np.isin(np.arange(v), some)
            if (menu.allowed & used).any(1).all():
                blocks = [
                    replace(
                        block,
                        fixed_s=block.fixed_s - block.cohort_s + block.cohort_s[:, :, used].sum(-1, keepdims=True),
                    )
                    for block in menu.blocks
                ]
                yield Menu(menu.cell, blocks, menu.allowed & used)


class _Search:
    """Prices ask for assignments, and assignments give prices; what is timed is timed as it is."""

    def __init__(self, menu: Menu, best: Cuts, best_s: float) -> None:
        self.menu, self.best, self.best_s = menu, best, best_s
        self.tried: set[bytes] = set()

    def run(self, menu: Menu) -> float:
        """Search a menu; returns what none on it can beat, or the best that is known if that is less."""
        for _ in range(_PASSES):
            kept = self.hopeful(menu)
            if not kept.any(1).all():  # whoever is left without a choice: nothing here beats the best
                return self.best_s
            menu = replace(menu, allowed=kept)
            least, cost = self.priced(menu)
            if least >= self.best_s * _CERTAIN:
                return least
            slack = cost - cost.min(1, keepdims=True)
            fixed = menu.allowed & (least + slack < self.best_s)  # any other choice costs more than the best
            if (fixed == menu.allowed).all():
                break
            menu = replace(menu, allowed=fixed)
        self.look_around(cost)
        return min(least, self.best_s)

    def hopeful(self, menu: Menu) -> NDArray[np.bool_]:
        """Choices that may be part of something better: a client alone in the cell, the others at their fastest."""
        kept = menu.allowed
        for _ in range(2):
            total = np.zeros(kept.shape)
            for block in menu.blocks:
                alone = np.where(kept, _alone(block, menu.cell), np.inf)  # (S, N, V)
                floor = alone.min(2).max(1)[:, None, None]
                total += np.tensordot(block.weight, np.maximum(alone, floor), axes=1)
            kept = kept & (total * _CERTAIN < self.best_s)
            if not kept.any(1).all():
                break
        return kept

    def priced(self, menu: Menu) -> tuple[float, Array]:
        """Mix the assignments that prices ask for, then climb from the best prices: a bound, and its costs (N, V)."""
        known = menu.allowed[np.arange(len(self.best)), self.best].all()
        first = self.best if known else menu.allowed.argmax(1)
        mixture, asked, least = np.eye(menu.allowed.shape[1])[first], list[Cuts](), -np.inf
        for step in range(_MIXES):
            prices = prices_of(menu, mixture)
            dual = bound(menu, prices)
            if dual.seconds > least:
                least, leading, cost = dual.seconds, prices, dual.cost
            asked.append(dual.asked)
            mixture += (np.eye(mixture.shape[1])[dual.asked] - mixture) * 2 / (step + 3)
        self.take([*asked, mixture.argmax(1)])
        prices = [(np.maximum(w, 1e-9 / w.shape[1]), a, b) for w, a, b in leading]
        prices = [(w / w.sum(1, keepdims=True), a, b) for w, a, b in prices]
        asked = []
        for _ in range(_CLIMBS):
            dual = bound(menu, prices)
            if dual.seconds > least:
                least, cost = dual.seconds, dual.cost
            asked.append(dual.asked)
            prices = climbed(prices, dual.uphill, self.best_s - dual.seconds)
        self.take(asked[-_ASKED:])
        return least, cost

    def take(self, some: Sequence[Cuts]) -> None:
        """Time those that are new, and keep the best of all."""
        new = {row.tobytes(): row for row in some if row.tobytes() not in self.tried}
        if not new:
            return
        self.tried |= set(new)
        rows = np.array(list(new.values()))
        seconds = timed(self.menu, rows)
        if seconds.min() < self.best_s:
            self.best, self.best_s = rows[seconds.argmin()], float(seconds.min())

    def look_around(self, cost: Array) -> None:
        """Move one client at a time, those first that mind least by their prices, while that helps."""
        n, v = cost.shape
        cost = np.where(np.isfinite(cost), cost, 1e3 * np.where(np.isfinite(cost), cost, 0.0).max())
        for _ in range(_LOOKS):
            before = self.best_s
            regret = cost - cost[np.arange(n), self.best][:, None]
            regret[np.arange(n), self.best] = np.inf
            order = np.argsort(regret, axis=None)[: min(_NEIGHBOURS, n * (v - 1))]
            rows = []
            for client, cut in zip(*np.unravel_index(order, cost.shape), strict=True):
                if self.menu.allowed[client, cut] and np.isfinite(regret[client, cut]):
                    row = self.best.copy()
                    row[client] = cut
                    rows.append(row)
            self.take(rows)
            if self.best_s >= before:
                break
