"""What P1 minimises: convergence and latency, weighed against each other."""

from collections.abc import Sequence

import numpy as np

from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array


def round_cost(gamma: Array, latency_s: Array, weight: float) -> Array:
    """w·Γ(φ(v)) + l_t(v) of a round, for every cut.

    ``gamma`` (C,), ``latency_s`` (..., C) in seconds; result (..., C).

    >>> round_cost(np.array([0.1, 0.4]), np.array([[3.0, 2.0]]), weight=10.0).tolist()
    [[4.0, 6.0]]
    """
    return weight * gamma + latency_s


def gamma_per_cut(given: Sequence[float], fraction: Sequence[float]) -> Array:
    """Γ(φ(v)) for C cuts: as given, else φ(v)/q, the simplest function that grows with φ as Assumption 4 asks."""
    if len(given) not in (0, len(fraction)):
        raise SplitcastError(f"gamma: {len(given)} numbers for {len(fraction)} cuts; give {len(fraction)}")
    return np.asarray(given or fraction, dtype=np.float64)
