"""What a learner sees before a round (`cutting.env` has the table); apart from the environment, so that who only trains
with a learned policy need not load Gymnasium."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array
from splitcast.cutting.costs import CutCosts

Observation = NDArray[np.float32]
LIMIT = 8.0


@dataclass(frozen=True)
class Encoder:
    """Turns what is known before a round into an observation."""

    mean: Array
    """Mean of log10 gain, (N,)"""
    deviation: Array
    """Its standard deviation, (N,)"""
    budget_s: float
    """Cost of an episode at the best single cut."""
    cuts: int
    """C"""
    shows_cut: bool

    @staticmethod
    def of(world: CutCosts, rounds: int) -> "Encoder":
        """Scales from the world's reference sample."""
        logs = np.log10(world.reference.gains)
        best = world.reference.cost.mean(0)[world.legal].min()
        deviation = np.maximum(logs.std(0), 0.05)
        return Encoder(logs.mean(0), deviation, rounds * float(best), len(world.cuts), world.charge_moves)

    @property
    def size(self) -> int:
        """D"""
        return len(self.mean) + 1 + (self.cuts if self.shows_cut else 0)

    def __call__(self, gains: Array, spent: Array, current: NDArray[np.int64]) -> Observation:
        """``gains`` (..., N), cost so far (...), position of the current cut or -1 (...); result (..., D)."""
        logs = ((np.log10(gains) - self.mean) / self.deviation).clip(-LIMIT, LIMIT)
        parts = [logs, np.minimum(spent / self.budget_s, 1.0)[..., None]]
        if self.shows_cut:
            parts.append(current[..., None] == np.arange(self.cuts))
        return np.concatenate(parts, axis=-1).astype(np.float32)
