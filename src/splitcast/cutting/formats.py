"""The format of smashed data as a further decision: a round has a pair of cut v and format f, and costs

    w Γ(φ(v)) + l_t(v, f) + p e(v, f),

where a unit of the relative squared error e of a format is worth p seconds. Another format than before costs nothing
and leaves later rounds as they are, so that in any sum over rounds, in expectation too,

    min over (v_t, f_t) of Σ cost_t(v_t, f_t) + move_t(v_{t-1}, v_t) = min over v_t of Σ min_f cost_t(v_t, f) + move_t.

So policies go on choosing cuts, at costs with the best format of each, and what they choose are pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitcast.base.config import PolicyConfig
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array
from splitcast.cost.memory import client_memory, fitting, least_room
from splitcast.cost.scenario import Scenario, none_private
from splitcast.schemes.choices import schemes_by_format
from splitcast.training.placement import Placement


@dataclass(frozen=True)
class Formats:
    """Formats to choose from, F of them at C cuts; one without a name where there is no choice."""

    names: tuple[str, ...]
    scenarios: tuple[Scenario, ...]
    """the same, with smashed data in each"""
    price_s: Array
    """p e(v, f), (F, C)"""
    legal: NDArray[np.bool_]
    """pairs that privacy and the memory of clients allow, (F, C)"""

    @staticmethod
    def of(scenario: Scenario, placements: Sequence[Placement]) -> "Formats":
        """Those of a configuration."""
        policy, schemes = scenario.config.policy, schemes_by_format(scenario.config)
        scenarios = tuple(scenario.sending(name, scheme) for name, scheme in schemes.items()) or (scenario,)
        price = policy.error_weight * errors_of(policy, len(scenarios), len(placements))
        return Formats(tuple(schemes) or ("",), scenarios, price, allowed(scenarios, placements))

    def best(self, seconds: Array) -> tuple[Array, NDArray[np.int64]]:
        """min_f l + p e over the legal formats of every cut, or over all if none is, and which it is; seconds
        (..., F, C), results (..., C)."""
        open_ = self.legal | ~self.legal.any(0)
        which = np.where(open_, seconds + self.price_s, np.inf).argmin(-2)
        cost = np.take_along_axis(seconds + self.price_s, which[..., None, :], -2)[..., 0, :]
        return cost, which


def allowed(scenarios: Sequence[Scenario], placements: Sequence[Placement]) -> NDArray[np.bool_]:
    """Which placements are private and fit into the memory of all clients, in each scenario (F, C); one must."""
    private, first = [each.private(placements) for each in scenarios], scenarios[0]
    some = [any(each) for each in zip(*private, strict=True)]
    if not any(some):
        raise none_private([each.leaking(placements) for each in scenarios])
    train, room = first.config.train, least_room(first.config.network.client_memory_gb)
    if not room:
        return np.array(private)
    needs = [client_memory(first.model, p, first.optimiser, train.batch, recompute=train.recompute) for p in placements]
    return np.logical_and(private, fitting(placements, needs, some, room))


def errors_of(policy: PolicyConfig, formats: int, cuts: int) -> Array:
    """e(v, f), (F, C), as a configuration gives them; of one format they do not matter.

    >>> errors_of(PolicyConfig(uplink_choices="int2,int8", uplink_errors=(0.1, 0.0)), 2, 3).tolist()
    [[0.1, 0.1, 0.1], [0.0, 0.0, 0.0]]
    """
    given = np.array(policy.uplink_errors, dtype=np.float64)
    if given.size not in (0, formats, formats * cuts) or (given.size and not policy.uplink_choices):
        raise SplitcastError(
            f"uplink_errors: {given.size} numbers for {len(policy.uplink_choices)} uplink_choices at {cuts} cuts; give "
            "one of each, or of each at every cut"
        )
    if formats == 1:
        return np.zeros((1, cuts))
    if not given.size and policy.error_weight:
        raise SplitcastError("uplink_errors: there are no data here to measure them on; give them, or error_weight 0")
    each = given if given.size else np.zeros(formats)
    return np.broadcast_to(each.reshape(formats, -1), (formats, cuts))


def measures(policy: PolicyConfig) -> bool:
    """Whether errors are to be measured before the first round."""
    return len(policy.uplink_choices) > 1 and not policy.uplink_errors and policy.error_weight > 0
