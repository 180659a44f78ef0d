"""The cut by bargaining between time, energy and privacy (Kim et al., WCNC 2023).

With u_i(v) the cost of cut v for player i (seconds of the round, joules of all clients, privacy lost), its gain is

    g_i(v) = (max_u u_i(u) - u_i(v)) / (max_u u_i(u) - min_u u_i(u)),

from 0, the worst, to 1, what it would have alone. The Kalai-Smorodinsky solution lets all have the same share of that,
the largest there is: the greatest k for which some cut gives every player at least k, found by bisection with a test
of feasibility. Among cuts it is the one with max_v min_i g_i(v); of equals the one with the largest sum.
"""

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array
from splitcast.cost.clock import time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.privacy import client_fraction
from splitcast.cost.scenario import Scenario
from splitcast.cutting.costs import CutCosts, EpisodeCosts

_BISECTIONS = 50


def kalai_smorodinsky(cost: Array, allowed: NDArray[np.bool_]) -> int:
    """The position of the bargained option; ``cost`` (players, options), ``allowed`` (options,).

    >>> time, energy, privacy = [4.0, 2.0, 1.0], [1.0, 2.0, 9.0], [3.0, 2.0, 1.0]
    >>> kalai_smorodinsky(np.array([time, energy, privacy]), np.ones(3, dtype=bool))
    1
    """
    options = np.flatnonzero(allowed)
    mine = cost[:, options]
    best, worst = mine.min(1, keepdims=True), mine.max(1, keepdims=True)
    spread = worst - best
    gain = np.where(spread > 0, (worst - mine) / np.where(spread > 0, spread, 1.0), 1.0)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if (gain >= middle).all(0).any():
            low = middle
        else:
            high = middle
    feasible = (gain >= low).all(0)
    return int(options[np.where(feasible, gain.sum(0), -np.inf).argmax()])


def energies(scenario: Scenario, met: Conditions) -> Array:
    """Joules of all clients in a round at every cut, (T, C); conditions (T, N)."""
    rounds = [scenario.stages(placement, 1) for placement in scenario.placements()]
    return np.stack([t.joules for t in time_rounds(rounds, scenario.cell, met, scenario.allocator)], axis=-1)


def bargained(world: CutCosts, known: EpisodeCosts) -> Array:
    """The position of the cut of every round, (T,)."""
    each = np.stack([energies(scenario, known.met) for scenario in world.formats.scenarios], axis=1)  # (T, F, C)
    joules = np.take_along_axis(each, known.format[:, None], 1)[:, 0]
    seconds = known.cost - world.weighted_gamma
    lost = -np.array([client_fraction(world.scenario.model, placement) for placement in world.placements])
    players = zip(seconds, joules, strict=True)
    return np.array([kalai_smorodinsky(np.stack([s, e, lost]), world.legal) for s, e in players])
