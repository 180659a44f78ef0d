"""`--cut auto`: the cuts of a training from the planner.

Each client takes the cut that `FleetPlanner` finds for the first rounds. Where the scheme or its settings need one cut
for all, it is the legal one with the least w Γ + l, and the price of joules where they have one, as in P1. A fleet that
the run's own sharing of the band (`allocation`) would make slower than the best common cut gives way to it.
"""

import numpy as np

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.sections import AUTO
from splitcast.cost.objective import gamma_per_cut, round_cost
from splitcast.cost.privacy import client_fraction
from splitcast.cost.scenario import Scenario
from splitcast.cutting.fleet import FleetPlanner, allowed, mean_round
from splitcast.training.placement import Placed, Placement

DRAWS = 4
"""Rounds that are looked at, the first of the training"""


def is_auto(config: Config) -> bool:
    """Whether cuts are to be chosen."""
    return config.split.cut == AUTO


def open_cut(config: Config) -> Config:
    """The configuration with some cut in place of auto, for what looks at all of them."""
    return with_values(config, cut=1) if is_auto(config) else config


def with_cuts(config: Config, scenario: Scenario) -> Config:
    """The configuration with numbers in place of auto; ``scenario`` is its own, with any cut (`open_cut`)."""
    if config.policy.policy != "fixed":
        raise SplitcastError(f"cut: 'auto' needs policy fixed; {config.policy.policy} chooses cuts by itself")
    if config.lora.side != "both":
        raise SplitcastError(f"cut: 'auto' needs lora.side both, not {config.lora.side!r}, which depends on the cut")
    chosen = best_placed(scenario)
    if chosen == Placement.whole(scenario.model.depth):  # the scheme has no cut
        return open_cut(config)
    placed = (chosen,) if isinstance(chosen, Placement) else chosen.placements
    return with_values(config, cut=tuple(place.cut for place in placed))


def best_placed(scenario: Scenario) -> Placed:
    """Who should hold what: a cut for each client, or one for all."""
    config, places = scenario.config, scenario.placements()
    met = scenario.conditions(range(1, min(DRAWS, config.train.rounds) + 1))
    may = allowed(scenario)
    common = [places[k] for k in np.flatnonzero(may.all(0))]
    try:
        fleet = FleetPlanner(scenario) if len(places) > 1 and not config.train.wait_for else None
    except SplitcastError:  # one cut for all, then
        if not common:
            raise
        fleet = None
    price = config.network.energy_weight

    def costs(placed: Placed) -> float:
        seconds, joules = mean_round(scenario, placed, met, scenario.allocator)
        return seconds + price * float(joules.sum())

    known = np.array([costs(place) for place in common])
    if fleet:
        found = fleet.fleet(fleet.best(met))
        return found if costs(found) <= known.min(initial=np.inf) * (1 + 1e-9) else common[int(known.argmin())]
    if not common:
        raise SplitcastError(
            "cut: 'auto' finds none that all clients may have; lower epsilon or raise client_memory_gb"
        )
    gamma = gamma_per_cut(config.network.gamma, [client_fraction(scenario.model, place) for place in places])
    mine = gamma[[places.index(place) for place in common]]
    return common[int(round_cost(mine, known, config.network.gamma_weight).argmin())]
