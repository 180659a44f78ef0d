"""A bound on all assignments of cuts, from deadlines of the stages.

Give every stage s a deadline chi_s. Clients are then tied by sum_n b_n <= 1 and sum_n f_n <= 1 in every stage and by
nothing else. So for deadlines that some assignment meets, and all prices alpha_s, beta_s >= 0 (the rest: `tangents`),

    T >= sum_s w_s chi_s + sum_n min_v sum_s [alpha_s (A_snv - Lambda_snv chi_s) + 2 sqrt(alpha_s beta_s) R_snv]
         - sum_s (alpha_s + beta_s).

The right side is concave in chi, so in a box of deadlines it is least at a corner. That is the bound of a box; cuts
that cannot meet its latest deadlines drop out of the minimum. Boxes whose bound is too low are divided, and tangents
are laid anew: what they miss falls with the square of the width of a box. What is left is that some clients would
divide themselves between two cuts: no more of them than there are resources, whatever N.

A gradient that is broadcast to every cohort (SFL-GA) lasts as long as all cohorts' together: there is a family of boxes
for every set of cuts that may be in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from splitcast.cost.cell import Array
from splitcast.cutting.menu import CERTAIN, Cuts, Menu
from splitcast.cutting.tangents import choices

STAGES = 3
"""With more, boxes are too many"""
_CLIMBS, _SOFT = 4, 2e-3
"""How often the bound of a box is worked out, with better prices each time, and how much (relatively) above the least
corner another still counts"""


@dataclass
class Box:
    """Deadlines of all stages, from lo to hi."""

    used: int
    """which set of cuts"""
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    bound: float
    prices: Array
    """alpha and beta of the Q stages in which something is shared, (2, Q)"""
    cost: Array | None = None
    """of every choice, where the bound is least, (N, V)"""


class Boxes:
    """Boxes that may hold something better than what is known."""

    def __init__(self, menu: Menu, prices: Sequence[tuple[float, float]], best_s: float) -> None:
        """``prices``: alpha and beta of every stage, to begin with."""
        self.menu, self.stages, self.best_s, self.sets = menu, choices(menu), best_s, menu.sets()
        self.weight = np.array([stage.weight for stage in self.stages])
        self.shared = [k for k, stage in enumerate(self.stages) if stage.shared]
        self.quiet = np.array([k for k, stage in enumerate(self.stages) if not stage.shared], dtype=np.int64)
        self.corners = np.array(list(product((False, True), repeat=len(self.shared))))  # (K, Q)
        start = np.maximum(np.array([prices[k] for k in self.shared]).reshape(-1, 2).T, 1e-9 * best_s)
        self.ratio = dict(zip(self.shared, (start[1] / start[0]).tolist(), strict=True))
        self.tables: dict[tuple[int, int, float, float], Array] = {}
        floors = np.array([self._floors(u) for u in range(len(self.sets))])
        lo = floors.min(0)
        hi = lo + (best_s - self.weight @ lo) / self.weight
        least = floors @ self.weight
        self.open = self.evaluate(
            [Box(u, tuple(lo), tuple(hi), float(low), start) for u, low in enumerate(least) if low < best_s]
        )

    @property
    def least(self) -> float:
        """What no assignment can beat."""
        return min((box.bound for box in self.open), default=self.best_s)

    def lowest(self) -> list[Box]:
        """All of them, the lowest first."""
        return sorted(self.open, key=lambda box: box.bound)

    def refine(self, some: int, target_s: float) -> list[Cuts]:
        """Divide up to ``some`` of the boxes whose bound is below ``target_s``, the lowest first; returns what the new
        ones ask for, the lowest first."""
        order = self.lowest()
        low = [box for box in order[:some] if box.bound < target_s]
        new = self.evaluate([part for box in low for part in self.quarters(box)])
        self.open = [box for box in order[len(low) :] + new if box.bound < self.best_s * CERTAIN]
        new.sort(key=lambda box: box.bound)
        return [box.cost.argmin(1) for box in new if box.cost is not None]

    def quarters(self, box: Box) -> list[Box]:
        """The box halved along its two longest sides, without parts that begin too late."""
        sides = np.argsort(-(np.array(box.hi) - np.array(box.lo)) * self.weight)[:2]
        ends = [(box.lo, box.hi)]
        for k in sides.tolist():
            middle = (box.lo[k] + box.hi[k]) / 2
            ends = [half for lo, hi in ends for half in ((lo, _with(hi, k, middle)), (_with(lo, k, middle), hi))]
        early = [(lo, hi) for lo, hi in ends if float(self.weight @ np.array(lo)) < self.best_s * CERTAIN]
        return [Box(box.used, lo, hi, box.bound, box.prices) for lo, hi in early]

    def evaluate(self, boxes: list[Box]) -> list[Box]:
        """The boxes with their bounds, without those that hold nothing better."""
        if not boxes:
            return []
        laid = self._laid(boxes)  # (B, S, 3, N, V)
        closed = np.array([~(self.menu.allowed & self.sets[box.used]) for box in boxes])
        barred = np.where(closed, np.inf, laid[:, self.quiet, 0].sum(1))  # (B, N, V)
        offset, slope, root = (np.ascontiguousarray(laid[:, self.shared, k]) for k in range(3))  # (B, Q, N, V)
        lo, hi = np.array([box.lo for box in boxes]), np.array([box.hi for box in boxes])  # (B, S)
        chi = np.where(self.corners, hi[:, None, self.shared], lo[:, None, self.shared])  # (B, K, Q)
        early = chi @ self.weight[self.shared] + (lo[:, self.quiet] @ self.weight[self.quiet])[:, None]  # (B, K)
        prices, rows = np.array([box.prices for box in boxes]), np.arange(len(boxes))
        middle = chi.mean(1, keepdims=True)

        def costs(prices: Array, at: Array) -> Array:  # of every choice at deadlines (B, K, Q), (B, K, N, V)
            alpha, mean = prices[:, 0], np.sqrt(prices[:, 0] * prices[:, 1])
            base = np.einsum("bq,bqnv->bnv", alpha, offset) + 2 * np.einsum("bq,bqnv->bnv", mean, root) + barred
            return np.asarray(base[:, None] - np.einsum("bkq,bqnv->bknv", at * alpha[:, None], slope))

        def sums(cuts: Cuts) -> list[Array]:  # of A, Lambda, R for assignments (B, K, N), (B, K, Q)
            index = cuts[:, None, :, :, None]
            each = (np.take_along_axis(part[:, :, None], index, -1)[..., 0] for part in (offset, slope, root))
            return [part.sum(-1).swapaxes(1, 2) for part in each]

        least, leading = np.full(len(boxes), -np.inf), prices
        for step in range(_CLIMBS):
            if step == 1:
                _, fall, work = sums(costs(leading, middle).argmin(-1))
                alpha = self.weight[self.shared] / np.maximum(fall[:, 0], 1e-300)
                fitted = np.stack([alpha, alpha * work[:, 0] ** 2], axis=1)
                prices = np.sqrt(leading * np.maximum(fitted, 1e-9 * self.best_s))
            cost = costs(prices, chi)
            cuts = cost.argmin(-1)
            value = np.take_along_axis(cost, cuts[..., None], -1)[..., 0].sum(-1) + early
            value -= prices.sum((1, 2))[:, None]
            at = value.argmin(1)
            found = value[rows, at]
            better = found > least
            for k in np.flatnonzero(better):
                boxes[k].cost = cost[k, at[k]]
            least, leading = np.where(better, found, least), np.where(better[:, None, None], prices, leading)
            if step == _CLIMBS - 1 or (least >= self.best_s).all():
                break
            if step == 0:
                continue
            lowest = np.where(np.isfinite(found), found, 0.0)[:, None]
            near = np.exp((lowest - value) / (_SOFT * self.best_s))
            near = near / np.maximum(near.sum(1, keepdims=True), 1e-300)
            alpha, beta, mean = prices[:, None, 0], prices[:, None, 1], np.sqrt(prices[:, None, 0] * prices[:, None, 1])
            need, fall, work = sums(cuts)
            uphill = alpha * (need - fall * chi - 1) + mean * work, mean * work - beta
            climb = np.stack([(near[:, :, None] * np.nan_to_num(part, posinf=0.0)).sum(1) for part in uphill], axis=1)
            length = np.maximum(self.best_s - found, 0.0) / np.maximum((climb**2).sum((1, 2)), 1e-300)  # Polyak's
            prices = prices * np.exp(np.clip(length[:, None, None] * climb, -0.7, 0.7))
        for box, low, best in zip(boxes, least, leading, strict=True):
            box.bound, box.prices = max(box.bound, float(low) * CERTAIN), best
        return [box for box in boxes if box.bound < self.best_s * CERTAIN]

    def _laid(self, boxes: Sequence[Box]) -> Array:
        """The tangents of all stages in all boxes; many boxes share them."""
        for k, stage in enumerate(self.stages):
            new = list(dict.fromkeys(key for box in boxes if (key := self._key(k, box)) not in self.tables))
            if new:
                a = np.array([stage.a if u < 0 else stage.fixed(self.sets[u]) for _, u, _, _ in new])
                ends = [key[2] for key in new], [key[3] for key in new]
                self.tables |= dict(zip(new, stage.tangents(a, *ends, self.ratio.get(k, 0.0)), strict=True))
        return np.array([[self.tables[self._key(k, box)] for k in range(len(self.stages))] for box in boxes])

    def _key(self, k: int, box: Box) -> tuple[int, int, float, float]:
        return k, box.used if self.stages[k].cohort.any() else -1, box.lo[k], box.hi[k]

    def _floors(self, u: int) -> list[float]:
        """The earliest deadlines of all stages, if one set of cuts is in use."""
        some = np.where(self.menu.allowed & self.sets[u], 0.0, np.inf)
        return [float((stage.fixed(self.sets[u]) + stage.solo + some).min(1).max()) for stage in self.stages]


def _with(ends: tuple[float, ...], k: int, value: float) -> tuple[float, ...]:
    return (*ends[:k], value, *ends[k + 1 :])
