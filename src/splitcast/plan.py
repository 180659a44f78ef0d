"""Planning without training: what every cut would cost in a cell, which one to take, and who gets what.

Draw t is round t of a training with the same configuration in which all clients take part, so the mean over T draws
is the mean round of that training.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from splitcast.ccc.clock import ALLOCATORS, Allocator, time_rounds
from splitcast.ccc.scenario import Scenario
from splitcast.config import Config
from splitcast.data import NAMES
from splitcast.errors import SplitcastError, one_of
from splitcast.models import build
from splitcast.network.cell import Array
from splitcast.network.channel import record
from splitcast.network.latency import PARTS, RoundTime
from splitcast.network.objective import gamma_per_cut, round_cost
from splitcast.network.privacy import allowed_cuts
from splitcast.network.trace import Trace
from splitcast.schemes.stages import Stage
from splitcast.seeds import torch_seed
from splitcast.split import SplitModel

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    name: ((3, 32, 32), 10) if name == "cifar10" else ((1, 28, 28), 10) for name in NAMES
}
"""Shape of a sample and number of classes, so that a plan needs no data."""

LOADS = ("up_bits", "down_bits", "client_flops", "server_flops")


@dataclass(frozen=True)
class CutPlan:
    """A mean round at one cut."""

    cut: int
    privacy: float
    """log(1 + phi(v)/q)"""
    allowed: bool
    """privacy is at least epsilon"""
    up_bits: float
    down_bits: float
    """on the air, all clients"""
    client_flops: float
    """of each client"""
    server_flops: float
    """for all clients"""
    latency_s: float
    parts_s: dict[str, float]
    """latency along the slowest client of every stage"""
    equal_share_s: float
    """latency with equal shares of bandwidth and server"""
    gamma: float
    objective: float
    """w * gamma + latency"""


@dataclass(frozen=True)
class ClientPlan:
    """What a client gets and does in the round that is shown, at the best cut."""

    client: int
    distance_m: float | None
    gain_db: float
    power_w: float
    uplink_hz: float
    downlink_hz: float
    """0 where everything is broadcast"""
    server_flops_per_s: float
    parts_s: dict[str, float]
    waiting_s: float


@dataclass(frozen=True)
class Plan:
    """The answer to: which cut, how long, and who gets what."""

    scheme: str
    draws: int
    cuts: list[CutPlan]
    best: CutPlan
    shown_round: int
    clients: list[ClientPlan]
    optimal: RoundTime
    """the round that is shown, at the best cut"""
    equal: RoundTime

    def as_json(self) -> dict[str, Any]:
        """Everything but the time lines."""
        return {
            "scheme": self.scheme,
            "draws": self.draws,
            "best_cut": self.best.cut,
            "cuts": [asdict(cut) for cut in self.cuts],
            "shown_round": self.shown_round,
            "clients": [asdict(client) for client in self.clients],
        }


def plan(config: Config, draws: int = 100, model: SplitModel | None = None, classes: int | None = None) -> Plan:
    """Plan for the model a configuration names, or for ``model`` with so many ``classes``.

    >>> from splitcast.config import ModelConfig
    >>> plan(Config(model=ModelConfig(arch="cnn-small")), draws=3).best.cut
    1
    """
    if draws < 1:
        raise SplitcastError(f"draws: {draws}; must be at least 1")
    scenario = scenario_of(config, model, classes)
    if isinstance(scenario.channel, Trace):
        draws = min(draws, len(scenario.channel.gains))
    cuts = cut_plans(scenario, draws)
    best = min((cut for cut in cuts if cut.allowed), key=lambda cut: cut.objective)

    scheme = scenario.scheme.at(best.cut)
    shown = min(scheme.sync_every or 1, draws)  # a round that has all kinds of stages
    stages, gains = scenario.stages(best.cut, syncs=scheme.syncs(shown)), scenario.channel.at(shown)
    times = {name: time_rounds([stages], scenario.cell, gains, share)[0] for name, share in ALLOCATORS.items()}
    clients = client_plans(scenario, times[config.network.allocation], gains)
    return Plan(scheme.name, draws, cuts, best, shown, clients, times["optimal"], times["equal"])


def scenario_of(config: Config, model: SplitModel | None = None, classes: int | None = None) -> Scenario:
    """The scenario a configuration describes, without its data."""
    shape, known_classes = SHAPES[one_of("dataset", config.data.dataset, SHAPES)]
    classes = known_classes if classes is None else classes
    model = model or build(config.model.arch, shape, classes, torch_seed(config.train.seed, "model"))
    return Scenario.of(config, model, classes)


def cut_plans(scenario: Scenario, draws: int) -> list[CutPlan]:
    """Every cut, averaged over the first ``draws`` rounds."""
    model, net = scenario.model, scenario.config.network
    if scenario.scheme.whole_model:
        cuts, fraction, private, allowed = [model.depth], [1.0], [math.log(2)], [model.depth]
    else:
        profile = model.profile()
        cuts, fraction = [row.cut for row in profile], [row.client_fraction for row in profile]
        private, allowed = [row.privacy for row in profile], allowed_cuts(profile, net.epsilon)
    gains = record(scenario.channel, draws).gains
    loads, seconds, parts, equal = (np.zeros((len(cuts), n)) for n in (len(LOADS), 1, len(PARTS), 1))
    for these, rounds in scenario.rhythms(cuts, draws):
        mine = gains[these]
        share = len(mine) / draws
        timed, baseline = (_means(rounds, scenario, mine, by) for by in (scenario.allocator, ALLOCATORS["equal"]))
        loads += share * np.array([_loads(stages) for stages in rounds])
        seconds += share * timed[0]
        parts += share * timed[1]
        equal += share * baseline[0]
    gamma = gamma_per_cut(net.gamma, fraction)
    objective = round_cost(gamma, seconds[:, 0], net.gamma_weight)
    return [
        CutPlan(
            cut=cut,
            privacy=private[k],
            allowed=cut in allowed,
            **dict(zip(LOADS, loads[k].tolist(), strict=True)),
            latency_s=float(seconds[k, 0]),
            parts_s=dict(zip(PARTS, parts[k].tolist(), strict=True)),
            equal_share_s=float(equal[k, 0]),
            gamma=float(gamma[k]),
            objective=float(objective[k]),
        )
        for k, cut in enumerate(cuts)
    ]


def _means(
    rounds: Sequence[Sequence[Stage]], scenario: Scenario, gains: Array, allocator: Allocator
) -> tuple[Array, Array]:
    """Mean latency (C, 1) and mean parts (C, 5) over draws (I, N)."""
    timed = time_rounds(rounds, scenario.cell, gains, allocator)
    return np.array([[t.seconds.mean()] for t in timed]), np.array([t.parts_s.mean(0) for t in timed])


def _loads(stages: Sequence[Stage]) -> tuple[float, float, float, float]:
    """`LOADS` of a round."""
    up = sum(s.uplink_bits * len(s.clients) for s in stages)
    down = sum(s.broadcast_bits + s.unicast_bits * len(s.clients) for s in stages)
    first = stages[0].clients[0]  # all clients do the same
    client = sum(s.compute_flops + s.backward_flops for s in stages if first in s.clients)
    server = sum(s.server_flops * len(s.clients) + s.joint_flops for s in stages)
    return up, down, client, server


def client_plans(scenario: Scenario, timed: RoundTime, gains: Array) -> list[ClientPlan]:
    """Shares and seconds of every client under one draw, (N,)."""
    count = scenario.cell.clients
    parts, up, down, speed = np.zeros((count, len(PARTS))), np.zeros(count), np.zeros(count), np.zeros(count)
    for stage in reversed(timed.stages):  # the first stage that shares something has the last word
        who = list(stage.stage.clients)
        parts[who] += np.stack([stage.part(name) for name in PARTS], axis=-1)
        if stage.stage.uplink_bits:
            up[who] = stage.bandwidth_hz
        if stage.stage.unicast_bits:
            down[who] = stage.bandwidth_hz
        if stage.stage.server_flops:
            speed[who] = stage.server_flops_per_s
    distance = scenario.channel.distance_m
    return [
        ClientPlan(
            client=n,
            distance_m=None if distance is None else float(distance[n]),
            gain_db=float(10 * np.log10(gains[n])),
            power_w=float(scenario.cell.client_power_w[n]),
            uplink_hz=float(up[n]),
            downlink_hz=float(down[n]),
            server_flops_per_s=float(speed[n]),
            parts_s=dict(zip(PARTS, parts[n].tolist(), strict=True)),
            waiting_s=float(timed.seconds - parts[n].sum()),
        )
        for n in range(count)
    ]
