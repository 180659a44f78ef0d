"""What every client takes and spends on its own, where nobody waits for the others (`engine.asynchronous`)."""

from collections.abc import Sequence

import numpy as np

from splitcast.cost.clock import ALLOCATORS, time_rounds
from splitcast.cost.latency import PARTS, RoundTime
from splitcast.cost.scenario import Scenario, energy_of
from splitcast.training.placement import Placed


class EqualShares:
    """Client n has 1/N of the band and of the server, whatever the others do: the sum of its stages."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.placement = scenario.place(scenario.config.split.cuts[0])

    def __call__(self, t: int) -> tuple[Sequence[float], Sequence[str]]:
        parts = np.zeros((len(PARTS), self.scenario.cell.clients))  # s
        for stage in _alone(self.scenario, self.placement, t).stages:
            who = list(stage.stage.clients)
            parts[:, who] += np.stack([stage.part(name) for name in PARTS])
        return parts.sum(0).tolist(), [PARTS[k] for k in parts.argmax(0)]


def energy_of_beginning(scenario: Scenario, placement: Placed, t: int, clients: Sequence[int]) -> dict[str, float]:
    """Joules that those who begin in round ``t`` spend until they deliver, counted then as their bytes are."""
    compute, air = _alone(scenario, placement, t).spent_j(scenario.cell.clients)
    return energy_of(compute[list(clients)], air[list(clients)])


def _alone(scenario: Scenario, placement: Placed, t: int) -> RoundTime:
    met = scenario.conditions([t])[0]
    (timed,) = time_rounds([scenario.stages(placement, t)], scenario.cell, met, ALLOCATORS["equal"])
    return timed
