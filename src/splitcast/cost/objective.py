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


def weight_of_gamma(gamma: Sequence[float], rounds: Sequence[float], latency_s: float, name: str = "gamma") -> float:
    """w of P1 from trainings: what a unit of Γ costs in seconds per round; or of something else with this name.

    Trainings at cuts with these Γ needed so many rounds to the same accuracy. With the least squares line
    rounds ≈ T0 + r Γ and rounds of l̄ seconds, a training at Γ takes r Γ l̄ seconds more than one without, over its T0
    rounds: w = r l̄ / T0. Never negative: Γ does not help.

    >>> weight_of_gamma([0.0, 1.0, 2.0], [100.0, 110.0, 120.0], latency_s=3.0)
    0.3
    """
    if len(gamma) != len(rounds) or len(set(gamma)) < 2:
        raise SplitcastError(
            f"{name}: {len(gamma)} values for {len(rounds)} trainings; at least two that differ are needed"
        )
    slope, start = np.polyfit(np.asarray(gamma, dtype=np.float64), np.asarray(rounds, dtype=np.float64), 1)
    if start <= 0:
        raise SplitcastError(f"rounds: rise too steeply with {name}; measure with more trainings")
    return round(max(0.0, float(slope / start)) * latency_s, 12)
