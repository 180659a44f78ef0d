"""Cuts for the clients of a scenario: what each may take, and what `assign` finds under any channel."""

import numpy as np
from numpy.typing import NDArray

from splitcast.allocate.allocate import allocate
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array, per_client
from splitcast.cost.clock import Allocator, time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.memory import GB, client_memory
from splitcast.cost.scenario import Scenario
from splitcast.cost.stages import Stage
from splitcast.cutting.assign import Assignment, assign
from splitcast.cutting.menu import Menu, timed
from splitcast.engine.state import check_sides
from splitcast.schemes.schemes import placed
from splitcast.training.defence import Defence
from splitcast.training.placement import Fleet, Placed


class FleetPlanner:
    """Finds a cut for every client of a scenario; refuses what training would."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.placements = scenario, scenario.placements()
        config, n = scenario.config, scenario.cell.clients
        refuse_choices(config)
        if cap := config.network.energy_cap_j:
            raise SplitcastError(
                f"energy_cap_j: {cap:g}; must be 0 for cuts of each client, whose joules have a price at most"
            )
        if len(self.placements) < 2:
            raise SplitcastError(f"scheme: {scenario.scheme.name} has no cut to choose")
        every = tuple(self.placements[k % len(self.placements)].cut for k in range(n))
        fixed = with_values(config, cut=every, policy="fixed")
        check_sides(fixed, placed(fixed, scenario.scheme, scenario.model.depth))
        if Defence.of(config.defence, 0):
            raise SplitcastError("defence: needs one cut for all clients")
        self.held_gb, self.allowed = memories(scenario), allowed(scenario)
        self._cycles = [_cycle(scenario, place) for place in self.placements]
        self._check()

    def menu(self, met: Conditions, allowed: NDArray[np.bool_] | None = None) -> Menu:
        """What each client may choose from (N, V) in rounds that meet this (D, N); client halves are averaged as often
        as the scheme does."""
        here, may = self.scenario, self.allowed if allowed is None else allowed
        rounds, price = max(1, here.scheme.sync_every), here.config.network.energy_weight
        return Menu.of(here.cell, self._cycles, met, may, rounds, price)

    def best(self, met: Conditions) -> Assignment:
        """The best cuts that are found for these rounds, as positions among the placements."""
        return assign(self.menu(met))

    def fleet(self, found: Assignment) -> Placed:
        """Who holds which blocks then."""
        return Fleet.of_clients([self.placements[k] for k in found.cuts])

    def _check(self) -> None:
        """Refuse a scheme in which what a client does depends on the cuts of others: menus know nothing of them."""
        here, n, met = self.scenario, self.scenario.cell.clients, self.scenario.conditions([1])
        mixed = np.arange(n) % len(self.placements)
        seconds, joules = mean_round(here, Fleet.of_clients([self.placements[k] for k in mixed]), met)
        (found,) = timed(self.menu(met), mixed[None])
        if not np.isclose(found, seconds + here.config.network.energy_weight * joules.sum(), rtol=1e-6):
            name = here.scheme.name
            raise SplitcastError(
                f"scheme: what a client of {name} does depends on the cuts of others; give --cut instead"
            )


def refuse_choices(config: Config) -> None:
    """For plans in which clients differ."""
    if config.policy.uplink_choices:
        raise SplitcastError("uplink_choices: a plan for every client needs one format; give uplink_codec instead")


def memories(scenario: Scenario) -> Array:
    """GB that a client needs at every cut, (V,)."""
    model, optimiser, train = scenario.model, scenario.optimiser, scenario.config.train
    needs = (
        client_memory(model, place, optimiser, train.batch, recompute=train.recompute)
        for place in scenario.placements()
    )
    return np.array([need.total / GB for need in needs])


def allowed(scenario: Scenario) -> NDArray[np.bool_]:
    """Which cuts keep privacy and fit into the memory of each client, (N, V); one at least must be left for each."""
    net, n = scenario.config.network, scenario.cell.clients
    private = np.array(scenario.legal(scenario.placements()))
    if not net.client_memory_gb:
        return np.broadcast_to(private, (n, len(private)))
    room = per_client("client_memory_gb", net.client_memory_gb, n)
    return np.asarray(private & (memories(scenario) <= room[:, None]))


def mean_round(
    scenario: Scenario, placed: Placed, met: Conditions, allocator: Allocator | None = None
) -> tuple[float, Array]:
    """Seconds, and joules of each client (N,), of a mean round, as `every_round` has them."""
    seconds, joules = every_round(scenario, placed, met, allocator)
    return float(seconds.mean()), joules.mean(0)


def every_round(
    scenario: Scenario, placed: Placed, met: Conditions, allocator: Allocator | None = None
) -> tuple[Array, Array]:
    """Seconds (D,), and joules of each client (D, N), of rounds that meet this (D, N); client halves are averaged as
    often as the scheme does. By default bandwidth, server and what else has a price are shared as is best."""
    shared = allocator or (scenario.allocator if scenario.config.network.energy_weight else allocate)
    (clock,) = time_rounds([_cycle(scenario, placed)], scenario.cell, met, shared)
    rounds = max(1, scenario.scheme.sync_every)
    return clock.seconds / rounds, np.add(*clock.spent_j(scenario.cell.clients)) / rounds


def _cycle(scenario: Scenario, placed: Placed) -> list[Stage]:
    """The stages of as many rounds as it takes until halves are averaged."""
    return [s for t in range(1, max(1, scenario.scheme.sync_every) + 1) for s in scenario.stages(placed, t)]
