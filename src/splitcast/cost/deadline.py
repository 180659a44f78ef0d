"""Who takes part in a round: those that are drawn, and of them those that can be done before its deadline.

The server knows the channel when it shares the band, so it leaves out those who would be late rather than wait for
them; the weights of the others are scaled up to one, as with any client that does not take part. Clients are admitted
in the order in which they would be done with equal shares of everything, as many as the deadline allows: a longer
list never makes a round shorter, so their number is found by bisection. At least one takes part, in time or not.
With `wait_for` all begin, and who is late finishes for a later round (`engine.asynchronous`).
"""

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.clock import ALLOCATORS, time_rounds
from splitcast.cost.latency import RoundTime
from splitcast.cost.scenario import Scenario
from splitcast.data.batches import participants
from splitcast.training.placement import Placed


def taking_part(scenario: Scenario, placement: Placed, t: int) -> NDArray[np.int64]:
    """The clients of round ``t``, (K,)."""
    train = scenario.config.train
    drawn = participants(train, scenario.cell.clients, t)
    if not train.deadline_s or train.wait_for:
        return drawn
    met = scenario.conditions([t])[0]

    def timed(who: NDArray[np.int64], shares: str) -> RoundTime:
        stages = scenario.stages(placement, t, who.tolist())
        return time_rounds([stages], scenario.cell, met, ALLOCATORS[shares] if shares else scenario.allocator)[0]

    if timed(drawn, "").seconds <= train.deadline_s:
        return drawn
    busy = np.zeros(scenario.cell.clients)
    for stage in timed(drawn, "equal").stages:
        busy[list(stage.stage.clients)] += stage.client_s
    order = drawn[np.argsort(busy[drawn], kind="stable")]
    good, bad = 1, len(order)  # good: known to be admitted; bad: known to be late
    while bad - good > 1:
        middle = (good + bad) // 2
        if timed(np.sort(order[:middle]), "").seconds <= train.deadline_s:
            good = middle
        else:
            bad = middle
    return np.sort(order[:good])
