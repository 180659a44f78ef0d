"""Planning a cut for every client: who should hold what, and what it is worth (`cutting.assign`)."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitcast.allocate.allocate import allocate
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array, per_client
from splitcast.cost.clock import ALLOCATORS, Allocator, time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.memory import GB, client_memory
from splitcast.cost.scenario import Scenario
from splitcast.cost.stages import Stage
from splitcast.cutting.assign import assign
from splitcast.cutting.menu import Menu, timed
from splitcast.model.split import SplitModel
from splitcast.schemes.schemes import placed
from splitcast.studies.plan import scenario_of
from splitcast.training.placement import Fleet, Placed, Placement


@dataclass(frozen=True)
class PerClientPlan:
    """A cut for every client, and how far from the best it can be."""

    scheme: str
    draws: int
    cuts: list[int]
    seconds: float
    """mean round"""
    energy_j: float
    """of all clients in a mean round"""
    most_j: float
    """of the client that spends most"""
    objective: float
    """seconds, and the price of the joules where they have one"""
    lower_bound_s: float
    """no assignment has a smaller objective"""
    gap: float
    common_cut: int
    """best for all, or 0 where no cut is allowed to all"""
    common_s: float
    """its objective"""
    gain: float
    """common_s / objective"""
    memory_gb: list[float]
    """of each client at its cut"""

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)


def plan_per_client(config: Config, draws: int = 4, model: SplitModel | None = None) -> PerClientPlan:
    """The best cuts that are found for the first ``draws`` rounds, with privacy and memory of every client.

    >>> from splitcast.base.config import with_values
    >>> uneven = with_values(Config(), scheme="psl", clients=4, client_flops_per_s=(0.05e9, 5e9, 5e9, 5e9))
    >>> found = plan_per_client(uneven, draws=1)
    >>> found.cuts[0] <= min(found.cuts[1:]), found.seconds <= found.common_s
    (True, True)
    """
    if draws < 1:
        raise SplitcastError(f"draws: {draws}; must be at least 1")
    refuse_choices(config)
    if cap := config.network.energy_cap_j:
        raise SplitcastError(
            f"energy_cap_j: {cap:g}; must be 0 for cuts of each client, whose joules have a price at most"
        )
    scenario = scenario_of(config, model)
    placements = scenario.placements()
    if len(placements) < 2:
        raise SplitcastError(f"scheme: {scenario.scheme.name} has no cut to choose")
    every = tuple(placements[k % len(placements)].cut for k in range(config.data.clients))
    placed(with_values(config, cut=every), scenario.scheme, scenario.model.depth)  # refuses what training would
    model, optimiser, train = scenario.model, scenario.optimiser, scenario.config.train
    needs = [client_memory(model, p, optimiser, train.batch, recompute=train.recompute) for p in placements]
    held = np.array([need.total / GB for need in needs])
    found = assign(menu_of(scenario, draws, allowed(scenario, held)))
    chosen = [placements[k] for k in found.cuts]
    seconds, joules = mean_round(scenario, Fleet.of_clients(chosen), draws)
    common = placements[found.common].cut if found.common >= 0 else 0
    return PerClientPlan(
        scheme=scenario.scheme.name,
        draws=draws,
        cuts=[place.cut for place in chosen],
        seconds=seconds,
        energy_j=float(joules.sum()),
        most_j=float(joules.max()),
        objective=found.seconds,
        lower_bound_s=found.lower_bound_s,
        gap=found.gap,
        common_cut=common,
        common_s=found.common_s,
        gain=found.gain,
        memory_gb=held[found.cuts].tolist(),
    )


def mean_round(scenario: Scenario, placed: Placed, draws: int) -> tuple[float, Array]:
    """Seconds, and joules of each client (N,), of a mean round; client halves are averaged as often as the scheme
    does."""
    (clock,) = time_rounds([_cycle(scenario, placed)], scenario.cell, _met(scenario, draws), _allocator(scenario))
    rounds = max(1, scenario.scheme.sync_every)
    return float(clock.seconds.mean()) / rounds, np.add(*clock.spent_j(scenario.cell.clients)).mean(0) / rounds


def _cycle(scenario: Scenario, placed: Placed) -> list[Stage]:
    """The stages of as many rounds as it takes until halves are averaged."""
    return [s for t in range(1, max(1, scenario.scheme.sync_every) + 1) for s in scenario.stages(placed, t)]


def _met(scenario: Scenario, draws: int) -> Conditions:
    return scenario.conditions(range(1, draws + 1))


def _allocator(scenario: Scenario) -> Allocator:
    return scenario.allocator if scenario.config.network.energy_weight else allocate


def menu_of(scenario: Scenario, draws: int, allowed: NDArray[np.bool_]) -> Menu:
    """What each client may choose from for the channel of the first ``draws`` rounds; client halves are averaged as
    often as the scheme does."""
    places, n, price = scenario.placements(), scenario.cell.clients, scenario.config.network.energy_weight
    cycle, rounds = [_cycle(scenario, place) for place in places], max(1, scenario.scheme.sync_every)
    menu = Menu.of(scenario.cell, cycle, _met(scenario, draws), allowed, rounds, price)
    seconds, joules = mean_round(scenario, Fleet.of_clients([places[k % len(places)] for k in range(n)]), draws)
    (found,) = timed(menu, np.arange(n)[None] % len(places))
    if not np.isclose(found, seconds + price * joules.sum(), rtol=1e-6):
        name = scenario.scheme.name
        raise SplitcastError(f"scheme: what a client of {name} does depends on the cuts of others; give --cut instead")
    return menu


def allowed(scenario: Scenario, held_gb: Array) -> NDArray[np.bool_]:
    """Which cuts keep privacy and fit into the memory of each client, (N, V)."""
    net, n = scenario.config.network, scenario.cell.clients
    private = np.array(scenario.legal(scenario.placements()))
    if not net.client_memory_gb:
        return np.broadcast_to(private, (n, len(private)))
    room = per_client("client_memory_gb", net.client_memory_gb, n)
    return private & (held_gb <= room[:, None])


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes with which unequal clients end together."""

    scheme: str
    draws: int
    cut: int
    batches: list[int]
    seconds: float
    """mean round with these"""
    equal_s: float
    """and with all of ``batch`` for everyone"""
    samples_per_s: float
    equal_samples_per_s: float

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return asdict(self)


def refuse_choices(config: Config) -> None:
    """For plans in which clients differ."""
    if config.policy.uplink_choices:
        raise SplitcastError("uplink_choices: a plan for every client needs one format; give uplink_codec instead")


def plan_batches(config: Config, draws: int = 4, model: SplitModel | None = None) -> BatchPlan:
    """Regulated batches at the cut of ``config``, and mean rounds timed by its allocator, with them and without.

    With a deadline, they are the largest whose mean round meets it: b^n = min(b, theta / t^n) for the largest theta, by
    bisection (t^n as in `regulated`).
    """
    if draws < 1:
        raise SplitcastError(f"draws: {draws}; must be at least 1")
    refuse_choices(config)
    most, deadline, count = config.train.batch, config.train.deadline_s, config.data.clients
    steps = config.train.local_steps

    def seconds(batches: tuple[int, ...]) -> float:
        some = scenario_of(with_values(config, batches=batches), model)
        return mean_round(some, some.place(cut), draws)[0]

    scenario = scenario_of(with_values(config, batches=()), model)
    cut = placed(config, scenario.scheme, scenario.model.depth).cut
    sizes, equal = regulated(scenario, scenario.place(cut), draws), seconds(())
    if deadline:
        each = _sample_s(scenario, scenario.place(cut), draws)
        low, high = 0.0, most * float(each.max())
        sizes = _sizes(high, each, most)
        if seconds(sizes) > deadline:
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                met = seconds(_sizes(middle, each, most)) <= deadline
                low, high = (middle, high) if met else (low, middle)
            sizes = _sizes(low, each, most)
        if (needed := seconds(sizes)) > deadline:
            raise SplitcastError(
                f"deadline_s: {deadline:g}; must be at least {needed:.3g}, with a sample of each client"
            )
    took = seconds(sizes)
    rates = (steps * sum(sizes) / took, steps * most * count / equal)
    return BatchPlan(scenario.scheme.name, draws, cut, list(sizes), took, equal, *rates)


_BISECTIONS = 16


def regulated(scenario: Scenario, placement: Placement, draws: int = 1) -> tuple[int, ...]:
    """Batch sizes with which all clients are done at about the same time, the fastest with all of ``batch`` (MergeSFL,
    Liao et al.): b^n = b min_m t^m / t^n, t^n being the seconds of a sample.

    The paper's t^n are of computing and sending as measured before. Here they are of equal shares of the band: under
    the best shares all end together whatever the batches, so that these say nothing about who is slow. The round is
    then shared as the allocator does, which gives what is left to whoever is still last.
    """
    each, most = _sample_s(scenario, placement, draws), scenario.config.train.batch
    return _sizes(most * float(each.min()), each, most)


def _sizes(theta: float, each: Array, most: int) -> tuple[int, ...]:
    """As many samples as take ``theta`` seconds, from 1 to ``most``."""
    return tuple(np.clip(np.floor(theta / each * (1 + 1e-12)), 1, most).astype(int).tolist())


def _sample_s(scenario: Scenario, placement: Placement, draws: int) -> Array:
    """Seconds that a sample of each client takes under equal shares, (N,)."""
    (clock,) = time_rounds([scenario.stages(placement, 1)], scenario.cell, _met(scenario, draws), ALLOCATORS["equal"])
    seconds = np.zeros(scenario.cell.clients)
    for stage in clock.stages:
        if stage.stage.name != "model":
            own = stage.compute_s + stage.uplink_s + stage.backward_s
            seconds[list(stage.stage.clients)] += own.mean(0)
    return seconds / scenario.config.train.batch
