"""A cut for every client, planned together with bandwidth and server CPU, with a certificate.

The V^N assignments are searched through bounds, of which each asks for an assignment: by deadlines of the stages where
there are few (`deadlines`), and by prices of bandwidth and CPU (`prices`). What they ask for is timed as it is, and
single clients are moved while that helps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array
from splitcast.cutting.box import Set
from splitcast.cutting.deadlines import STAGES, THRIFTY, Boxes
from splitcast.cutting.joules import alone_at
from splitcast.cutting.menu import CERTAIN, Cuts, Menu, timed
from splitcast.cutting.prices import Prices, alone, bound, climbed, cohorts, prices_of

_PASSES, _MIXES, _CLIMBS, _LOOKS = 2, 3, 10, 3
"""With prices: rounds of dropping choices; in each, of prices and answers and of better prices; then of moves"""
_ASKED, _NEIGHBOURS = 6, 16
"""Assignments that are timed of those that better prices ask for, and of moves of single clients"""
_CLOSE, _FAR = 0.999, 0.9
"""With prices: a bound that needs no better, and one that deadlines will better anyhow, where there are few"""
_HALVINGS, _WIDTH, _TRIED, _PATIENCE, _GOAL, _LINES = 14, 32, 2, 3, 0.992, 3000
"""With deadlines: rounds of halving, boxes in each, how many of their assignments are timed, after how many rounds, a
good bound, and choices in the boxes of a round where joules have a price"""


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
    if menu.in_turn:
        return _each_alone(menu, common)
    start = np.array([np.full(n, k) for k in common] or [np.argmax(menu.allowed, axis=1)])
    seconds = timed(menu, start)
    at = int(seconds.argmin())
    found = _Search(menu, start[at], float(seconds[at]))
    least, few, sets = 0.0, menu.stages <= (THRIFTY if menu.seconds_per_j else STAGES), list[tuple[Set, float]]()
    if not few or menu.seconds_per_j or (menu.stages == STAGES and not menu.in_cohorts):
        far = _FAR if few and not menu.seconds_per_j else -np.inf
        sets = [
            (tuple(bool(mine.any()) for mine in some.allowed.T), found.by_prices(some, far)) for some in cohorts(menu)
        ]
        least = min(low for _, low in sets)
    if few and least < found.best_s * _GOAL:
        least = max(least, found.by_deadlines(sets if menu.in_cohorts else ()))
    common_s = float(seconds[at]) if common else np.inf
    return Assignment(found.best, found.best_s, min(least, found.best_s), common[at] if common else -1, common_s)


def _each_alone(menu: Menu, common: Sequence[int]) -> Assignment:
    """The best assignment where no two clients meet in a stage: each takes the cut that is fastest for itself."""
    values = (alone_at(menu, block) if menu.seconds_per_j else alone(block, menu.cell) for block in menu.blocks)
    each = sum(np.tensordot(block.weight, value, axes=1) for block, value in zip(menu.blocks, values, strict=True))
    best, together = np.where(menu.allowed, each, np.inf), np.sum(each, axis=0)
    seconds, at = float(best.min(1).sum()), min(common, key=lambda k: together[k], default=-1)
    return Assignment(best.argmin(1), seconds, seconds, at, float(together[at]) if common else np.inf)


class _Search:
    """Bounds ask for assignments; what is timed is timed as it is."""

    def __init__(self, menu: Menu, best: Cuts, best_s: float) -> None:
        self.menu, self.best, self.best_s = menu, best, best_s
        self.tried: set[bytes] = set()

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

    def by_deadlines(self, sets: Sequence[tuple[Set, float]]) -> float:
        """Halve boxes of deadlines; returns what no assignment can beat. ``sets``: see `Boxes`."""
        prices = prices_of(self.menu, np.eye(self.menu.allowed.shape[1])[self.best])
        each = [
            (w * a, w * b)
            for block, (_, alpha, beta) in zip(self.menu.blocks, prices, strict=True)
            for w, a, b in zip(block.weight, alpha, beta, strict=True)
        ]
        boxes, width = Boxes(self.menu, each, self.best_s, sets), _WIDTH
        if self.menu.seconds_per_j:  # lines that are laid anew take longer
            width = min(width, max(4, _LINES // self.menu.allowed.size))
        asked = list[Cuts]()
        for step in range(_HALVINGS):
            if boxes.least >= self.best_s * _GOAL:
                break
            asked += boxes.refine(width, _GOAL)[:_TRIED]
            if step % _PATIENCE == 0:
                self.take(asked)
                asked, boxes.best_s = [], self.best_s
        self.take(asked)
        for box in boxes.lowest()[:1]:
            if box.cost is not None and boxes.least < self.best_s * _GOAL:
                self.look_around(box.cost)
        return min(boxes.least, self.best_s)

    def by_prices(self, menu: Menu, far: float = -np.inf) -> float:
        """Prices ask for assignments, and assignments give prices; returns what none on this menu can beat, or the best
        that is known if that is less. A bound that begins below ``far`` times the best is not worth bettering."""
        leading = list[Prices]()
        for _ in range(_PASSES):
            kept = self.hopeful(menu)
            if not kept.any(1).all():  # whoever is left without a choice: nothing here beats the best
                return self.best_s
            menu = replace(menu, allowed=kept)
            least, cost, leading = self.priced(menu, leading, far)
            if least >= self.best_s * CERTAIN or least < self.best_s * far:
                return max(least, 0.0)
            if least >= self.best_s * _CLOSE:
                break
            slack = cost - cost.min(1, keepdims=True)
            fixed = menu.allowed & (least + slack < self.best_s)  # any other choice costs more than the best
            if (fixed == menu.allowed).all():
                break
            menu = replace(menu, allowed=fixed)
            leading = leading if least >= self.best_s * _GOAL else []
        self.look_around(cost)
        return min(least, self.best_s)

    def hopeful(self, menu: Menu) -> NDArray[np.bool_]:
        """Choices that may be part of something better: a client alone in the cell, the others at their fastest."""
        kept = menu.allowed
        for _ in range(2):
            total = np.zeros(kept.shape)
            for block in menu.blocks:
                single = np.where(kept, alone(block, menu.cell), np.inf)  # (S, N, V)
                floor = single.min(2).max(1)[:, None, None]
                total += np.tensordot(block.weight, np.maximum(single, floor), axes=1)
            kept = kept & (total * CERTAIN < self.best_s)
            if not kept.any(1).all():
                break
        return kept

    def priced(self, menu: Menu, leading: list[Prices], far: float) -> tuple[float, Array, list[Prices]]:
        """Mix the assignments that prices ask for, unless there are ``leading`` prices, then climb from the best of
        them: a bound, its costs (N, V) and its prices."""
        asked, least = list[Cuts](), -np.inf
        if not leading:
            known = menu.allowed[np.arange(len(self.best)), self.best].all()
            mixture = np.eye(menu.allowed.shape[1])[self.best if known else menu.allowed.argmax(1)]
            for step in range(_MIXES):
                prices = prices_of(menu, mixture)
                dual = bound(menu, prices)
                if dual.seconds > least:
                    least, leading, cost = dual.seconds, prices, dual.cost
                asked.append(dual.asked)
                mixture += (np.eye(mixture.shape[1])[dual.asked] - mixture) * 2 / (step + 3)
            self.take([*asked, mixture.argmax(1)])
            if least < self.best_s * far:
                return least, cost, leading
            leading, asked = [_positive(part) for part in leading], []
        prices = leading
        for _ in range(_CLIMBS if least < self.best_s * _CLOSE else 0):
            dual = bound(menu, prices)
            if dual.seconds > least:
                least, leading, cost = dual.seconds, prices, dual.cost
            asked.append(dual.asked)
            prices = climbed(prices, dual.uphill, self.best_s - dual.seconds)
        self.take(asked[-_ASKED:])
        return least, cost, leading

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


def _positive(prices: Prices) -> Prices:
    """With weights that can grow."""
    weight, alpha, beta = prices
    weight = np.maximum(weight, 1e-9 / weight.shape[1])
    return weight / weight.sum(1, keepdims=True), alpha, beta
