"""What a round meets: the gain of every client, how much of its speed is free, and the state behind both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array


@dataclass(frozen=True)
class Conditions:
    """Leading dimensions ... are episodes and rounds; an index applies to them.

    >>> Conditions.of(np.ones((4, 2)))[1:3].speed.shape
    (2, 2)
    """

    gains: Array
    """(..., N), linear"""
    speed: Array
    """(..., N): share of its full speed that a client has left, in (0, 1]"""
    state: NDArray[np.int64]
    """(...): number of the state of a small Markov chain behind them; 0 where there is none"""

    @staticmethod
    def of(gains: Union[Array, "Conditions"]) -> "Conditions":
        """Gains alone: clients are at full speed."""
        if isinstance(gains, Conditions):
            return gains
        return Conditions(gains, np.ones_like(gains), np.zeros(gains.shape[:-1], dtype=np.int64))

    @staticmethod
    def join(many: Sequence["Conditions"], *, stack: bool = False) -> "Conditions":
        """One after the other along the first dimension, or stacked along a new one."""
        put: Any = np.stack if stack else np.concatenate
        return Conditions(*(put([getattr(one, name) for one in many]) for name in ("gains", "speed", "state")))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the leading dimensions."""
        return self.state.shape

    def __getitem__(self, index: Any) -> "Conditions":
        return Conditions(self.gains[index], self.speed[index], self.state[index])

    def flat(self) -> "Conditions":
        """All leading dimensions as one."""
        clients = self.gains.shape[-1]
        return Conditions(self.gains.reshape(-1, clients), self.speed.reshape(-1, clients), self.state.ravel())
