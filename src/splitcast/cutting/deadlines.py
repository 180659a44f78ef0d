"""A bound on all assignments of cuts, from deadlines of the stages.

Give every stage s a deadline chi_s. Clients are then tied by sum_n b_n <= 1 and sum_n f_n <= 1 in every stage and by
nothing else. So for deadlines that some assignment meets, and all prices alpha_s, beta_s >= 0 (the rest: `tangents`),

    T >= sum_s w_s chi_s + sum_n min_v sum_s [alpha_s (A_snv - Lambda_snv chi_s) + 2 sqrt(alpha_s beta_s) R_snv]
         - sum_s (alpha_s + beta_s).

The right side is concave in chi, so in a box of deadlines it is least at a corner. That is the bound of a box; cuts
that cannot meet its latest deadlines drop out of the minimum. Boxes whose bound is too low are divided, and tangents
are laid anew: what they miss falls with the square of the width of a box. What is left is that some clients would
divide themselves between two cuts: no more of them than there are resources, whatever N.

A gradient that is broadcast to every cohort (SFL-GA) lasts as long as all cohorts' together. A box says which cuts are
in use for certain, whose broadcasts everybody waits for, and which ones may be; where the others' would take longer
than the box is wide, it is divided into what uses one of them and what does not.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import product
from operator import mul
from typing import TypeVar

import numpy as np

from splitcast.cost.cell import Array
from splitcast.cutting.box import Box, Set
from splitcast.cutting.menu import CERTAIN, Cuts, Menu
from splitcast.cutting.prices import earliest
from splitcast.cutting.tangents import Tangents, choices
from splitcast.cutting.thrift import Thrift, stage_loads

T = TypeVar("T")
STAGES, THRIFTY = 3, 2
"""With more, boxes are too many; where joules have a price, they take longer"""
_CLIMBS, _SOFT = 4, 2e-3
"""How often the bound of a box is worked out, with better prices each time, and how much (relatively) above the least
corner another still counts"""


class Boxes:
    """Boxes that may hold something better than what is known."""

    def __init__(
        self,
        menu: Menu,
        prices: Sequence[tuple[float, float]],
        best_s: float,
        sets: Sequence[tuple[Set, float]] = (),
    ) -> None:
        """``prices``: alpha and beta of every stage, to begin with; ``sets``: what may be in use together, and what
        nothing that uses all of it can beat, if that is known."""
        self.menu, self.stages, self.best_s = menu, choices(menu), best_s
        self.weights = [stage.weight for stage in self.stages]
        self.weight = np.array(self.weights)
        self.shared = [k for k, stage in enumerate(self.stages) if stage.shared or menu.seconds_per_j]
        self.loads = stage_loads(menu) if menu.seconds_per_j else []
        self.by_set = [bool(stage.cohort.any()) for stage in self.stages]
        self.waits = np.sum([stage.weight * stage.cohort for stage in self.stages], axis=0)  # for broadcasts, (N, V)
        self.corners = np.array(list(product((False, True), repeat=len(self.shared))))  # (K, Q)
        start = np.maximum(np.array([prices[k] for k in self.shared]).reshape(-1, 2).T, 1e-9 * best_s)
        self.ratio = dict(zip(self.shared, (start[1] / start[0]).tolist(), strict=True))
        self.tables: dict[tuple[int, Set, float, float], Array] = {}
        self.levels: dict[tuple[int, Set, Set], list[float]] = {}
        cuts, lo, hi = menu.allowed.shape[1], tuple(earliest(menu)), (np.inf,) * len(self.stages)
        roots = [Box(used, used, lo, hi, least, start) for used, least in sets]
        roots = roots or [Box((False,) * cuts, (True,) * cuts, lo, hi, 0.0, start)]
        self.open = self.evaluate([part for each in roots if (part := self.trimmed(each)) is not None])

    @property
    def least(self) -> float:
        """What no assignment can beat."""
        return min((box.bound for box in self.open), default=self.best_s)

    def lowest(self) -> list[Box]:
        """All of them, the lowest first."""
        return sorted(self.open, key=lambda box: box.bound)

    def refine(self, some: int, goal: float) -> list[Cuts]:
        """Divide up to ``some`` of the boxes whose bound is below ``goal`` times the best, the lowest first; returns
        what the new ones ask for, the lowest first."""
        order = self.lowest()
        low = [box for box in order[:some] if box.bound < self.best_s * goal]
        new = self.evaluate([part for box in low for part in self.parts(box)], goal)
        self.open = [box for box in order[len(low) :] + new if box.bound < self.best_s * CERTAIN]
        new.sort(key=lambda box: box.bound)
        return [box.cost.argmin(1) for box in new if box.cost is not None]

    def parts(self, box: Box) -> list[Box]:
        """The box halved along its two longest sides, or by whether a cut is in use."""
        sides, further = (np.array(box.hi) - np.array(box.lo)) * self.weight, np.zeros(len(box.must))
        if box.cost is not None and any(self.by_set):
            asked = np.bincount(box.cost.argmin(1), minlength=len(further)) * ~np.array(box.must)
            further = asked * ((self.waits @ (asked > 0)).max() > sides.max())
        if further.any():
            v = int(further.argmax())
            hi = tuple(np.inf if mine else end for mine, end in zip(self.by_set, box.hi, strict=True))
            parts = [box.changed(must=_with(box.must, v, True), hi=hi), box.changed(may=_with(box.may, v, False))]
        else:
            parts = [box]
            for k in np.argsort(-sides)[:2].tolist():
                middle = (box.lo[k] + box.hi[k]) / 2
                early = [part.changed(hi=_with(part.hi, k, middle)) for part in parts]
                parts = early + [part.changed(lo=_with(part.lo, k, middle)) for part in parts]
        return [part for each in parts if (part := self.trimmed(each)) is not None]

    def trimmed(self, box: Box) -> Box | None:
        """The box without deadlines that are too late to be better; where nothing is shared, from one that some cut
        meets exactly to another. None if nothing is left."""
        lo, hi, levels = list(box.lo), list(box.hi), self._levels(box)
        for k, level in levels.items():
            first = bisect_left(level, lo[k] * (1 - 1e-12))
            if first == len(level):
                return None
            lo[k] = level[first]
        early = sum(map(mul, self.weights, lo))
        late = self.best_s * CERTAIN - early
        if late <= 0:
            return None
        hi = [min(b, a + late / w) for a, b, w in zip(lo, hi, self.weights, strict=True)]
        for k, level in levels.items():
            last = bisect_right(level, hi[k] * (1 + 1e-12)) - 1
            if last < 0 or level[last] < lo[k]:
                return None
            hi[k] = level[last]
        return box.changed(lo=tuple(lo), hi=tuple(hi), bound=max(box.bound, early * CERTAIN), cost=None)

    def evaluate(self, boxes: list[Box], goal: float = 1.0) -> list[Box]:
        """The boxes with their bounds, without those that hold nothing better; no bound is raised further than
        ``goal`` times the best."""
        if not boxes:
            return []
        lines = self._lines(boxes)
        lo, hi = np.array([box.lo for box in boxes]), np.array([box.hi for box in boxes])  # (B, S)
        chi = np.where(self.corners, hi[:, None, self.shared], lo[:, None, self.shared])  # (B, K, Q)
        quiet = [k for k in range(len(self.stages)) if k not in self.shared]
        early = chi @ self.weight[self.shared] + (lo[:, quiet] @ self.weight[quiet])[:, None]  # (B, K)
        prices = np.array([box.prices for box in boxes])
        least, leading, rows = np.full(len(boxes), -np.inf), prices, np.arange(len(boxes))
        for step in range(_CLIMBS):
            if step == 1:
                prices = np.sqrt(leading[rows] * np.maximum(lines.fitted(leading[rows], chi), 1e-9 * self.best_s))
            cost = lines.costs(prices, chi)  # (B, K, V, N)
            lowest = cost.min(2)
            value = lowest.sum(-1) + early - prices.sum((1, 2))[:, None]  # (B, K)
            at = value.argmin(1)
            found = value[np.arange(len(rows)), at]
            for k in np.flatnonzero(found > least[rows]):
                row = rows[k]
                boxes[row].cost, least[row], leading[row] = cost[k, at[k]].T, found[k], prices[k]
            on = least[rows] < self.best_s * goal
            if step == _CLIMBS - 1 or not on.any():
                break
            if step:  # Polyak's step, along what the corners near the lowest ask for
                safe = np.where(np.isfinite(found), found, 0.0)[:, None]
                near = np.exp((safe - np.where(np.isfinite(value), value, np.inf)) / (_SOFT * self.best_s))
                near = near / np.maximum(near.sum(1, keepdims=True), 1e-300)
                asked = (cost == lowest[:, :, None]) * np.isfinite(lowest)[:, :, None]
                climb = lines.uphill(prices, chi, near, asked.reshape(len(rows), len(self.corners), -1))
                length = np.maximum(self.best_s - found, 0.0) / np.maximum((climb**2).sum((1, 2)), 1e-300)
                prices = prices * np.exp(np.clip(length[:, None, None] * climb, -0.7, 0.7))
            if 2 * on.sum() < len(on):
                lines.keep(on)
                rows, prices, chi, early = rows[on], prices[on], chi[on], early[on]
        for box, low, best in zip(boxes, least, leading, strict=True):
            box.bound, box.prices = max(box.bound, float(low) * CERTAIN), best
        return [box for box in boxes if box.bound < self.best_s * CERTAIN]

    def _lines(self, boxes: Sequence[Box]) -> Tangents | Thrift:
        """What meeting deadlines costs in these boxes."""
        may = np.array([box.may for box in boxes])[:, :, None] & self.menu.allowed.T  # (B, V, N)
        barred = np.where(may, 0.0, np.inf).reshape(len(boxes), 1, -1)
        weight, cuts = self.weight[self.shared], self.menu.allowed.shape[1]
        if self.menu.seconds_per_j:
            return Thrift(self.stages, self.loads, boxes, barred, weight)
        laid = self._laid(boxes)  # (B, S, 4, V N)
        parts = laid[:, self.shared, 1:].reshape(len(boxes), -1, laid.shape[-1])
        return Tangents(parts, barred + laid[:, None, :, 0].sum(2), weight, cuts)

    def _laid(self, boxes: Sequence[Box]) -> Array:
        """The tangents of all stages in all boxes; many boxes share them."""
        keys = [[self._key(k, box) for k in range(len(self.stages))] for box in boxes]
        for k, stage in enumerate(self.stages):
            new = list(dict.fromkeys(key[k] for key in keys if key[k] not in self.tables))
            if new:
                a = np.array([stage.fixed(must) for _, must, _, _ in new])
                ends = [key[2] for key in new], [key[3] for key in new]
                laid = stage.tangents(a, *ends, self.ratio.get(k, 0.0)).swapaxes(2, 3).reshape(len(new), 4, -1)
                self.tables |= dict(zip(new, laid, strict=True))
        return np.array([[self.tables[key] for key in mine] for mine in keys])

    def _key(self, k: int, box: Box) -> tuple[int, Set, float, float]:
        return k, box.must if self.by_set[k] else (), box.lo[k], box.hi[k]

    def _levels(self, box: Box) -> dict[int, list[float]]:
        """Deadlines that cuts meet exactly, of the stages in which nothing is shared; none is before the last client's
        earliest."""
        found = {}
        for k, stage in enumerate(self.stages):
            if k not in self.shared:
                key = k, box.must if self.by_set[k] else (), box.may
                if key not in self.levels:
                    each = np.where(self.menu.allowed & box.may, stage.fixed(key[1]), np.inf)
                    ends = np.unique(each)
                    self.levels[key] = ends[(ends >= each.min(1).max()) & (ends < np.inf)].tolist()
                found[k] = self.levels[key]
        return found


def _with(old: tuple[T, ...], k: int, value: T) -> tuple[T, ...]:
    return (*old[:k], value, *old[k + 1 :])
