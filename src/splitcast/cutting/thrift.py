"""What it takes to meet a deadline of a stage where joules have a price, from below.

For any price lambda of its seconds, whoever is done by chi pays at least

    h(lambda) - lambda chi

for band, server and joules (`joules` has h): a line in chi. It touches the least price, which is convex, where the
answer to lambda takes until chi; how well that is found decides how close the bound is, not whether it holds. Joules
have a price of their own, so that lines are not in proportion to the other prices as those of `tangents` are: they are
laid anew whenever prices change, with slopes from a step of Newton's in the logarithm of lambda.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitcast.allocate.responses import Loads, Response
from splitcast.cost.cell import Array
from splitcast.cutting.box import Box
from splitcast.cutting.joules import Spent, loads_of, spent
from splitcast.cutting.menu import Menu
from splitcast.cutting.tangents import StageChoices

_FIRST, _LEAST, _LONGEST = 8, 1e-30, 3.0
"""Steps to the first slopes; the least there is; the longest step"""


def stage_loads(menu: Menu) -> list[Loads]:
    """Of every stage, (V, N) each; a joule is worth w_s W, as all of a stage counts w_s times."""
    found = list[Loads]()
    for block in menu.blocks:
        every = loads_of(menu, block)
        for k, weight in enumerate(block.weight):
            a, compute, saved, x, y, n = (np.asarray(part)[k].T for part in (*every[:5], every.n))
            snr = None if every.snr is None else every.snr[k].T
            found.append(Loads(a, compute, weight * saved, x, y, snr, weight * n))
    return found


class Thrift:
    """Lines of all stages and choices in boxes of deadlines; methods are those of `tangents.Tangents`."""

    def __init__(
        self,
        stages: Sequence[StageChoices],
        loads: Sequence[Loads],
        boxes: Sequence[Box],
        barred: Array,
        weight: Array,
    ) -> None:
        """``barred``: 0, or infinity, (B, 1, V N)."""
        self.boxes, self.weight = np.array(boxes, dtype=object), weight
        self.loads, self.slack, shape = list[Loads](), list[Array](), loads[0].a.shape
        barred = barred.reshape(-1, *shape)
        for k, (stage, load) in enumerate(zip(stages, loads, strict=True)):
            a = np.array([stage.fixed(box.must).T for box in boxes])  # (B, V, N)
            lo, hi = (np.array(ends)[:, None, None] for ends in ([b.lo[k] for b in boxes], [b.hi[k] for b in boxes]))
            alone = a + stage.solo.T
            closed = alone > hi * (1 + 1e-12)
            barred = np.where(closed, np.inf, barred)
            self.loads.append(load._replace(a=np.maximum(a - load.compute, 0.0)))
            self.slack.append(np.where(closed, np.inf, np.maximum(lo + hi, alone + hi) / 2 - self.loads[-1].a))
        self.barred = barred[:, None]
        first = np.broadcast_to(weight[:, None, None] / shape[1], (len(weight), *shape))
        self.slopes = np.array([first if box.slopes is None else box.slopes for box in boxes])  # (B, Q, V, N)
        prices = np.array([box.prices for box in boxes])
        for _ in range(_FIRST if any(box.slopes is None for box in boxes) else 1):
            self._lay(prices)

    def keep(self, which: NDArray[np.bool_]) -> None:
        self.boxes, self.barred, self.slopes = self.boxes[which], self.barred[which], self.slopes[which]
        self.loads = [load._replace(a=load.a[which]) for load in self.loads]
        self.slack = [slack[which] for slack in self.slack]

    def costs(self, prices: Array, chi: Array) -> Array:
        old = self.slopes
        self.spent = self._lay(prices)
        whole = np.sum([each.cost for each in self.spent], axis=0)  # (B, V, N)
        falling = np.einsum("bkq,bqvn->bkvn", chi, old)
        return np.asarray(whole[:, None] - falling + self.barred)

    def fitted(self, prices: Array, chi: Array) -> Array:
        each = self.costs(prices, chi.mean(1, keepdims=True))
        picked = each[:, 0] == each[:, 0].min(1, keepdims=True)  # (B, V, N)
        slopes = self.slopes * picked[:, None]
        scale = self.weight / np.maximum(slopes.sum((2, 3)), 1e-300)  # (B, Q)
        work = np.stack([np.sqrt(slopes[:, q] * load.y).sum((1, 2)) ** 2 for q, load in enumerate(self.loads)], axis=-1)
        return np.stack([prices[:, 0] * scale, work * scale], axis=1)

    def uphill(self, prices: Array, chi: Array, near: Array, asked: Array) -> Array:
        picked = np.einsum("bk,bkm->bm", near, asked).reshape(self.barred[:, 0].shape)
        band, server = (
            np.stack([(getattr(each, name) * picked).sum((1, 2)) for each in self.spent], axis=-1)
            for name in ("band", "server")
        )
        return np.stack([band, server], axis=1) - prices

    def _lay(self, prices: Array) -> list[Spent]:
        """What choices cost with the slopes as they are; then these are made better."""
        found, better = list[Spent](), self.slopes.copy()
        for q, (load, slack) in enumerate(zip(self.loads, self.slack, strict=True)):
            lam, (alpha, beta) = self.slopes[:, q], prices[:, :, q].T[:, :, None, None]
            each = spent(load, lam, alpha, beta)
            found.append(each)
            better[:, q] = np.maximum(lam * np.exp(_step(each.answer, slack)), _LEAST)
        self.slopes = better
        for box, slopes in zip(self.boxes, better, strict=True):
            box.slopes = slopes
        return found


def _step(got: Response, slack: Array) -> Array:
    """Newton's, of log lambda, towards tau + t + s = slack. Who computes at full speed has the rest of its time for
    what it can still change."""
    held = np.where(got.tau_by == 0, got.tau, 0.0)
    total = got.tau - held + got.t + got.s
    some = total > 0
    by = (got.tau * got.tau_by + got.t * got.t_by[0] - 0.5 * got.s) / np.where(some, total, 1.0)
    off = np.log(np.maximum(slack - held, 1e-300) / np.where(some, total, 1.0))
    return np.where(some, np.clip(off / np.minimum(by, -1e-9), -_LONGEST, _LONGEST), -_LONGEST)
