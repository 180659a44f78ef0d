"""The policy `assign:K`: every K rounds, the planner's cut for every client under the channel of that round.

A new assignment v' is taken from v where it pays for itself until the next one: with l_t the cost of a round under the
channel of round t and m the seconds in which the blocks move,

    K (l_t(v) - l_t(v')) > m(v, v').

Blocks move when all client halves are equal, right after an averaging, so that every move leaves the model as it is and
nothing is uploaded; K is rounded up to a multiple of the rounds between averagings.
"""

import re

from splitcast.base.errors import SplitcastError, shown
from splitcast.cost.clock import round_prices
from splitcast.cost.conditions import Conditions
from splitcast.cost.scenario import Scenario
from splitcast.cutting.fleet import FleetPlanner, mean_round
from splitcast.engine.dry import client_half
from splitcast.engine.links import CountingLink
from splitcast.engine.mixed import block_values
from splitcast.schemes.messages import Event, Ledger
from splitcast.training.placement import Placed, Placement, heard

NAME = "assign"


def period(policy: str) -> int:
    """K of a policy's name; 0 for every other policy.

    >>> period("assign:5"), period("assign"), period("greedy")
    (5, 1, 0)
    """
    kind, colon, rest = policy.partition(":")
    if kind != NAME:
        return 0
    if colon and not re.fullmatch(r"[1-9][0-9]{0,8}", rest):
        raise SplitcastError(f"policy: {shown(policy)}; give the rounds between assignments as a number, {NAME}:5")
    return int(rest) if colon else 1


class Reassign:
    """Asks the planner for the cuts of coming rounds, and moves where that pays."""

    def __init__(self, scenario: Scenario, policy: str, *, charge: bool = True) -> None:
        scheme, train = scenario.scheme, scenario.config.train
        rhythm = scheme.sync_every or int(scheme.equal_after(1))
        if not rhythm or scheme.by_side:
            raise SplitcastError(
                f"policy: {policy!r} moves blocks when client halves are equal; those of {scheme.name} stay different"
            )
        if train.optimizer_state in ("local", "reset"):
            raise SplitcastError(f"optimizer_state: {train.optimizer_state!r}; policy {policy!r} needs average")
        self.scenario, self.planner, self.charge = scenario, FleetPlanner(scenario), charge
        self.every = -(-period(policy) // rhythm) * rhythm

    def choose(self, t: int, now: Placed | None, spent: float) -> Placed:
        """Who holds what in round ``t``, coming from another placement, or at the start."""
        if now is not None and (t - 1) % self.every:
            return now
        met = self.scenario.conditions([t])
        found = self.planner.fleet(self.planner.best(met))
        if now is None or found == now:
            return found
        rounds = min(self.every, self.scenario.config.train.rounds - t + 1)
        saved = rounds * (self._round(now, met) - self._round(found, met))
        return found if saved > self._move(now, found, met) else now

    def format(self, t: int, placed: Placed) -> tuple[str, Scenario]:
        """There is no choice of formats."""
        return "", self.scenario

    def cost(self, cut: int, latency_s: float, joules: float = 0.0, uplink: str = "") -> float:
        """l_t of a recorded round, and the price of its joules."""
        return latency_s + self.scenario.config.network.energy_weight * joules

    def _round(self, placed: Placed, met: Conditions) -> float:
        seconds, joules = mean_round(self.scenario, placed, met, self.scenario.allocator)
        return self.cost(0, seconds, float(joules.sum()))

    def _move(self, now: Placed, then: Placed, met: Conditions) -> float:
        """Seconds in which blocks move; 0 where moves are not charged."""
        here = self.scenario
        stages = here.stages_of(move_events(here, now, then), then) if self.charge else []
        return float(round_prices([stages], here.cell, met, here.allocator).mean()) if stages else 0.0


def move_events(scenario: Scenario, now: Placed, then: Placed) -> list[Event]:
    """What a move sends while all client halves are equal."""
    ledger, model = Ledger(), scenario.model
    values = block_values(client_half(model, Placement.whole(model.depth), scenario.optimiser))
    each = heard(now, then, values, scenario.cell.clients)
    scenario.scheme.moved(CountingLink(ledger), list(each.values()), 0, list(each))
    return ledger.events
