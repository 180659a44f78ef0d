"""How long every client takes on its own, where nobody waits for the others (`engine.asynchronous`)."""

from collections.abc import Sequence

import numpy as np

from splitcast.cost.clock import ALLOCATORS, time_rounds
from splitcast.cost.latency import PARTS
from splitcast.cost.scenario import Scenario


class EqualShares:
    """Client n has 1/N of the band and of the server, whatever the others do: the sum of its stages."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.placement = scenario.place(scenario.config.split.cuts[0])

    def __call__(self, t: int) -> tuple[Sequence[float], Sequence[str]]:
        here = self.scenario
        (round_,) = time_rounds(
            [here.stages(self.placement, t)], here.cell, here.conditions([t])[0], ALLOCATORS["equal"]
        )
        parts = np.zeros((len(PARTS), here.cell.clients))  # s
        for stage in round_.stages:
            who = list(stage.stage.clients)
            parts[:, who] += np.stack([stage.part(name) for name in PARTS])
        return parts.sum(0).tolist(), [PARTS[k] for k in parts.argmax(0)]
