"""Planning without training: what every cut would cost in a cell, which one to take, and who gets what.

Draw t is round t of a training with the same configuration in which all clients take part, so the mean over T draws
is the mean round of that training.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError, imports_allowed
from splitcast.base.formats import codec
from splitcast.cost.cell import Array
from splitcast.cost.clock import ALLOCATORS, round_seconds, time_rounds
from splitcast.cost.latency import PARTS, RoundTime
from splitcast.cost.leakage import read_leakage
from splitcast.cost.memory import ClientMemory, client_memory
from splitcast.cost.objective import gamma_per_cut, round_cost
from splitcast.cost.privacy import client_fraction, privacy
from splitcast.cost.scenario import Scenario, rhythms
from splitcast.cost.stages import Stage
from splitcast.cost.trace import Trace
from splitcast.cutting.auto import open_cut
from splitcast.cutting.formats import Formats, allowed
from splitcast.data import NAMES
from splitcast.model import make_model
from splitcast.model.split import SplitModel
from splitcast.run.parts import load_data, with_clients
from splitcast.training.task import make_task

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    name: ((3, 32, 32), 10) if name == "cifar10" else ((1, 28, 28), 10) for name in NAMES
}
"""Shape of a sample and number of classes, so that a plan needs no data."""
QUANTILES = {"median_s": 0.5, "p95_s": 0.95}
"""Of the latency: a few deep fades carry its mean."""

PAIR = ("cut", "codec", "privacy", "ssim", "attack", "allowed", "leak", "latency_s", "objective")
"""What `--json` says of a cut and a codec."""
LOADS = ("up_bits", "down_bits", "client_flops", "server_flops")


@dataclass(frozen=True)
class CutPlan:
    """A mean round at one cut."""

    cut: int
    privacy: float
    """log(1 + phi(v)/q)"""
    allowed: bool
    """privacy is at least epsilon, no attack got further than it may, and a client has the memory"""
    memory: ClientMemory
    """of a client"""
    up_bits: float
    down_bits: float
    """on the air, all clients"""
    client_flops: float
    """of each client"""
    server_flops: float
    """for all clients"""
    energy_j: float
    """of all clients: computing and on the air"""
    most_j: float
    """of the client that spends most"""
    latency_s: float
    """mean"""
    median_s: float
    p95_s: float
    outage: float | None
    """share of rounds that with all clients would miss the deadline, where there is one"""
    parts_s: dict[str, float]
    """latency along the slowest client of every stage"""
    equal_share_s: float
    """latency with equal shares of bandwidth and server"""
    gamma: float
    objective: float
    """w * gamma + latency, and the price of the joules, and of the error of the format, where they have one"""
    codec: str = ""
    """of the smashed data"""
    ssim: float | None = None
    """what the strongest attack got, where privacy was measured (of texts, the share of tokens)"""
    attack: str = ""
    """which attack it was"""
    leak: str = ""
    """why measured privacy rules it out"""


@dataclass(frozen=True)
class ClientPlan:
    """What a client gets and does in the round that is shown, at the best cut."""

    client: int
    distance_m: float | None
    gain_db: float
    power_w: float
    """of what it sends, mean over the stages"""
    uplink_hz: float
    downlink_hz: float
    """0 where everything is broadcast"""
    server_flops_per_s: float
    parts_s: dict[str, float]
    waiting_s: float
    compute_j: float
    air_j: float


@dataclass(frozen=True)
class Plan:
    """The answer to: which cut, how long, and who gets what."""

    scheme: str
    draws: int
    cuts: list[CutPlan]
    """every cut, with the format that is best for it"""
    pairs: list[CutPlan]
    """every cut in every format: those to choose from, or that were measured, where privacy is, else the one that is
    asked for"""
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
            "best_codec": self.best.codec,
            "cuts": [asdict(cut) for cut in self.cuts],
            "pairs": [{name: getattr(pair, name) for name in PAIR} for pair in self.pairs],
            "shown_round": self.shown_round,
            "clients": [asdict(client) for client in self.clients],
        }


def plan(config: Config, draws: int = 100, model: SplitModel | None = None, classes: int | None = None) -> Plan:
    """Plan for the model a configuration names, or for ``model`` with so many ``classes``.

    >>> from splitcast.base.config import ModelConfig
    >>> plan(Config(model=ModelConfig(arch="cnn-small")), draws=3).best.cut
    1
    """
    if draws < 1:
        raise SplitcastError(f"draws: {draws}; must be at least 1")
    scenario = scenario_of(config, model, classes)
    if isinstance(scenario.channel, Trace):
        draws = min(draws, len(scenario.channel.gains))
    if config.policy.uplink_choices:
        formats = Formats.of(scenario, scenario.placements())
        scenarios, prices = list(formats.scenarios), formats.price_s
    else:
        scenarios = [scenario, *_other_formats(scenario, model, classes)]
        prices = np.zeros((len(scenarios), len(scenario.placements())))
    legal = allowed(scenarios, scenario.placements()).tolist()
    rows = [cut_plans(*each) for each in zip(scenarios, [draws] * len(scenarios), legal, prices, strict=True)]
    pairs = [row for each in rows for row in each]
    chosen = min((k for k, row in enumerate(pairs) if row.allowed), key=lambda k: pairs[k].objective)
    best, scenario = pairs[chosen], scenarios[chosen // len(rows[0])]
    cuts = [min(each, key=lambda row: (not row.allowed, row.objective)) for each in zip(*rows, strict=True)]

    placement = scenario.place(min(best.cut, scenario.model.depth - 1))
    scheme = scenario.scheme.at(placement)
    shown = min(scheme.sync_every or 1, draws)  # a round that has all kinds of stages
    stages, met = scenario.stages(placement, shown), scenario.conditions([shown])[0]
    asked, optimal, equal = (
        time_rounds([stages], scenario.cell, met, share)[0]
        for share in (scenario.allocator, ALLOCATORS["optimal"], ALLOCATORS["equal"])
    )
    clients = client_plans(scenario, asked, met.gains)
    return Plan(scheme.name, draws, cuts, pairs, best, shown, clients, optimal, equal)


def _other_formats(scenario: Scenario, model: SplitModel | None, classes: int | None) -> list[Scenario]:
    """Where privacy is measured and no format is asked for: the same with every other that was attacked. Only formats
    of splitcast: the file, which may be anybody's, names no code to run."""
    config = scenario.config
    if not config.network.leakage or config.split.uplink_codec != "auto":
        return []
    own = {codec for codec, _ in scenario.measured(scenario.placements()).values()}
    names = dict.fromkeys(leak.codec for leak in read_leakage(Path(config.network.leakage)))
    others = [name for name in names if name not in own and _is_format(name)]
    return [scenario_of(with_values(config, uplink_codec=name), model, classes) for name in others]


def _is_format(name: str) -> bool:
    try:
        with imports_allowed([]):
            return bool(codec(name))
    except SplitcastError:
        return False


def scenario_of(config: Config, model: SplitModel | None = None, classes: int | None = None) -> Scenario:
    """The scenario a configuration describes; data of your own are loaded for the shape of a sample."""
    config = open_cut(config)
    if config.data.dataset in SHAPES:
        (shape, known_classes), dtype = SHAPES[config.data.dataset], torch.float32
    else:
        found = load_data(config)
        config = with_clients(config, found)
        shape, known_classes, dtype = tuple(found.test_x.shape[1:]), found.classes, found.test_x.dtype
    classes = known_classes if classes is None else classes
    model = model or make_model(config, shape, classes, dtype, shapes_only=True)
    return Scenario.of(config, model, make_task(config.model.task, classes))


def cut_plans(scenario: Scenario, draws: int, legal: Sequence[bool], price_s: Array | float = 0.0) -> list[CutPlan]:
    """Every cut, averaged over the first ``draws`` rounds; ``legal`` says which may be taken, ``price_s`` (C,) what
    the error of the format is worth there."""
    model, net = scenario.model, scenario.config.network
    train, optimiser = scenario.config.train, scenario.optimiser
    placements = scenario.placements()
    cuts = [placement.cut for placement in placements]
    needs = [client_memory(model, p, optimiser, train.batch, recompute=train.recompute) for p in placements]
    fraction = [client_fraction(model, placement) for placement in placements]
    private = [privacy(model, placement) for placement in placements]
    leaking, measured = scenario.leaking(placements), [*scenario.measured(placements).values()]
    met = scenario.conditions(range(1, draws + 1))
    loads, parts, joules = (np.zeros((len(cuts), n)) for n in (len(LOADS), len(PARTS), scenario.cell.clients))
    seconds, equal = np.zeros((len(cuts), draws)), np.zeros((len(cuts), draws))
    for these, rounds in rhythms([scenario], placements, draws):
        mine = met[these]
        share = len(mine.state) / draws
        loads += share * np.array([_loads(stages) for stages in rounds])
        for k, timed in enumerate(time_rounds(rounds, scenario.cell, mine, scenario.allocator)):
            seconds[k, these] = timed.seconds
            parts[k] += share * timed.parts_s.mean(0)
            joules[k] += share * np.add(*timed.spent_j(scenario.cell.clients)).mean(0)
        equal[:, these] = round_seconds(rounds, scenario.cell, mine, ALLOCATORS["equal"]).T
    gamma = gamma_per_cut(net.gamma, fraction)
    latency, deadline = seconds.mean(1), scenario.config.train.deadline_s
    objective = round_cost(gamma, latency + net.energy_weight * joules.sum(1), net.gamma_weight) + price_s
    return [
        CutPlan(
            cut=cut,
            privacy=private[k],
            allowed=legal[k],
            memory=needs[k],
            **dict(zip(LOADS, loads[k].tolist(), strict=True)),
            energy_j=float(joules[k].sum()),
            most_j=float(joules[k].max()),
            latency_s=float(latency[k]),
            **{name: float(np.quantile(seconds[k], q)) for name, q in QUANTILES.items()},
            outage=float((seconds[k] > deadline).mean()) if deadline else None,
            parts_s=dict(zip(PARTS, parts[k].tolist(), strict=True)),
            equal_share_s=float(equal[k].mean()),
            gamma=float(gamma[k]),
            objective=float(objective[k]),
            codec=measured[k][0],
            ssim=leak.ssim if (leak := measured[k][1]) else None,
            attack=leak.attack if leak else "",
            leak=leaking.get(cut, ""),
        )
        for k, cut in enumerate(cuts)
    ]


def _loads(stages: Sequence[Stage]) -> tuple[float, float, float, float]:
    """`LOADS` of a round."""
    up = sum(s.total("uplink_bits") for s in stages)
    down = sum(_heard(s) + s.total("unicast_bits") for s in stages)
    first = stages[0].clients[0]  # all clients do the same
    client = sum(s.of("compute_flops", first) + s.of("backward_flops", first) for s in stages)
    server = sum(s.total("server_flops") + s.joint_flops for s in stages)
    return up, down, client, server


def _heard(stage: Stage) -> float:
    """Bits of a broadcast, which is sent once."""
    return max(stage.broadcast_bits) if isinstance(stage.broadcast_bits, tuple) else stage.broadcast_bits


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
    compute_j, air_j = timed.spent_j(count)
    return [
        ClientPlan(
            client=n,
            distance_m=None if distance is None else float(distance[n]),
            gain_db=float(10 * np.log10(gains[n])),
            power_w=float(air_j[n] / sent_s if (sent_s := parts[n, PARTS.index("uplink")]) else 0.0),
            uplink_hz=float(up[n]),
            downlink_hz=float(down[n]),
            server_flops_per_s=float(speed[n]),
            parts_s=dict(zip(PARTS, parts[n].tolist(), strict=True)),
            waiting_s=float(timed.seconds - parts[n].sum()),
            compute_j=float(compute_j[n]),
            air_j=float(air_j[n]),
        )
        for n in range(count)
    ]
