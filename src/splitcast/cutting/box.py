"""A box of deadlines, as `deadlines` divides them."""

from dataclasses import dataclass
from typing import Any

from splitcast.cost.cell import Array

Set = tuple[bool, ...]
"""of cuts, (V,)"""


@dataclass
class Box:
    """Deadlines of all stages, from lo to hi."""

    must: Set
    """cuts that are in use"""
    may: Set
    """cuts that clients may choose from"""
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    bound: float
    prices: Array
    """alpha and beta of the Q stages in which something is shared, (2, Q)"""
    cost: Array | None = None
    """of every choice, where the bound is least, (N, V)"""
    slopes: Array | None = None
    """where joules have a price: of tangents in this box, or one that it is a part of, (Q, V, N)"""

    def changed(self, **values: Any) -> "Box":
        """A copy with other values; thousands are made, at a third of the cost of `dataclasses.replace`."""
        other = object.__new__(Box)
        vars(other).update(vars(self) | values)
        return other
