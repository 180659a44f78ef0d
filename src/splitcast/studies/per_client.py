"""Planning a cut for every client: who should hold what, and what it is worth (`cutting.fleet`)."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array
from splitcast.cost.clock import ALLOCATORS, time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.scenario import Scenario
from splitcast.cutting.fleet import FleetPlanner, every_round, mean_round, refuse_choices
from splitcast.model.split import SplitModel
from splitcast.schemes.schemes import placed
from splitcast.studies.plan import scenario_of
from splitcast.training.placement import Placement


@dataclass(frozen=True)
class PerClientPlan:
    """A cut for every client, and how far from the best it can be."""

    scheme: str
    draws: int
    cuts: list[int]
    seconds: float
    """mean round"""
    median_s: float
    p95_s: float
    """of the rounds"""
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
    scenario = scenario_of(config, model)
    planner, met = FleetPlanner(scenario), _met(scenario, draws)
    found = planner.best(met)
    chosen = [planner.placements[k] for k in found.cuts]
    seconds, joules = every_round(scenario, planner.fleet(found), met)
    common = planner.placements[found.common].cut if found.common >= 0 else 0
    return PerClientPlan(
        scheme=scenario.scheme.name,
        draws=draws,
        cuts=[place.cut for place in chosen],
        seconds=float(seconds.mean()),
        median_s=float(np.median(seconds)),
        p95_s=float(np.quantile(seconds, 0.95)),
        energy_j=float(joules.mean(0).sum()),
        most_j=float(joules.mean(0).max()),
        objective=found.seconds,
        lower_bound_s=found.lower_bound_s,
        gap=found.gap,
        common_cut=common,
        common_s=found.common_s,
        gain=found.gain,
        memory_gb=planner.held_gb[found.cuts].tolist(),
    )


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
        return mean_round(some, some.place(cut), _met(some, draws))[0]

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


def _met(scenario: Scenario, draws: int) -> Conditions:
    return scenario.conditions(range(1, draws + 1))


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
