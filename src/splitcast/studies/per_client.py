"""Planning a cut for every client: who should hold what, and what it is worth (`cutting.assign`)."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array, per_client
from splitcast.cost.clock import ALLOCATORS, time_rounds
from splitcast.cost.memory import GB, client_memory
from splitcast.cost.scenario import Scenario
from splitcast.cutting.assign import assign
from splitcast.cutting.menu import Menu
from splitcast.model.split import SplitModel
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
    lower_bound_s: float
    """no assignment has a shorter one"""
    gap: float
    common_cut: int
    """best for all, or 0 where no cut is allowed to all"""
    common_s: float
    gain: float
    """common_s / seconds"""
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
    if config.network.energy_weight:
        raise SplitcastError("energy_weight: cuts of each client are planned for time alone; leave it out")
    scenario = scenario_of(config, model)
    placements = scenario.placements()
    if len(placements) < 2:
        raise SplitcastError(f"scheme: {scenario.scheme.name} has no cut to choose")
    model, optimiser, train = scenario.model, scenario.optimiser, scenario.config.train
    needs = [client_memory(model, p, optimiser, train.batch, recompute=train.recompute) for p in placements]
    held = np.array([need.total / GB for need in needs])
    found = assign(menu_of(scenario, draws, allowed(scenario, held)))
    cuts = [placements[k].cut for k in found.cuts]
    common = placements[found.common].cut if found.common >= 0 else 0
    times = found.seconds, found.lower_bound_s, found.gap, common, found.common_s, found.gain
    return PerClientPlan(scenario.scheme.name, draws, cuts, *times, held[found.cuts].tolist())


def menu_of(scenario: Scenario, draws: int, allowed: NDArray[np.bool_]) -> Menu:
    """What each client may choose from for the channel of the first ``draws`` rounds; client halves are averaged as
    often as the scheme does."""
    rounds = range(1, max(1, scenario.scheme.sync_every) + 1)
    cycle = [[s for t in rounds for s in scenario.stages(place, t)] for place in scenario.placements()]
    return Menu.of(scenario.cell, cycle, scenario.conditions(range(1, draws + 1)), allowed, rounds=len(rounds))


def allowed(scenario: Scenario, held_gb: Array) -> NDArray[np.bool_]:
    """Which cuts keep privacy and fit into the memory of each client, (N, V)."""
    net, n = scenario.config.network, scenario.cell.clients
    private = np.array(scenario.legal(scenario.placements()))
    if not net.client_memory_gb:
        return np.broadcast_to(private, (n, len(private)))
    room = per_client("client_memory_gb", net.client_memory_gb, n)
    return private & (held_gb <= room[:, None])


def regulated(scenario: Scenario, placement: Placement) -> tuple[int, ...]:
    """Batch sizes with which all clients are done at about the same time, the fastest with all of ``batch`` (MergeSFL,
    Liao et al.): b^n = b min_m t^m / t^n, t^n being its seconds of computing and sending under equal shares."""
    stages = scenario.stages(placement, 1)
    (timed,) = time_rounds([stages], scenario.cell, scenario.conditions([1])[0], ALLOCATORS["equal"])
    seconds = np.zeros(scenario.cell.clients)
    for stage in timed.stages:
        if stage.stage.name != "model":
            seconds[list(stage.stage.clients)] += stage.compute_s + stage.uplink_s + stage.backward_s
    sizes = np.floor(scenario.config.train.batch * seconds.min() / seconds).astype(int)
    return tuple(int(size) for size in np.maximum(sizes, 1))
