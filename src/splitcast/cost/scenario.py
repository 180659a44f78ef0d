"""A scheme and a model in a cell: what a round of each placement sends, computes and takes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitcast.base.config import Config, NetworkConfig, with_values
from splitcast.base.errors import SplitcastError, one_of
from splitcast.cost.cell import Array, Cell, cell
from splitcast.cost.channel import Channel, channel
from splitcast.cost.clock import ALLOCATORS, Allocator, EnergyAware, time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.latency import RoundTime
from splitcast.cost.leakage import Leak, knows_halves, read_leakage, ruled_out, strongest
from splitcast.cost.privacy import legal, privacy
from splitcast.cost.stages import WORKLOADS, Stage, Workload, fold, workload
from splitcast.cost.varying import Course, Varying, background_load
from splitcast.engine.dry import dry_round
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import Event, Ledger
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import make_scheme
from splitcast.training.defence import Defence
from splitcast.training.optimiser import Optimiser, make_optimiser
from splitcast.training.placement import Placed, Placement
from splitcast.training.task import Task


@dataclass(frozen=True)
class Scenario:
    """Everything that determines the time of a round."""

    config: Config
    model: SplitModel
    task: Task
    scheme: Scheme
    optimiser: Optimiser
    cell: Cell
    channel: Channel
    allocator: Allocator
    load: Course | None = None
    """Shares of their speed that clients have left; None: all of it"""
    _work: dict[Placed, Workload] = field(default_factory=dict)

    @staticmethod
    def of(config: Config, model: SplitModel, task: Task) -> "Scenario":
        """The scenario a configuration describes."""
        net, clients, seed = config.network, config.data.clients, config.train.seed
        one_of("workload", net.workload, WORKLOADS)
        scheme = make_scheme(config)
        return Scenario(
            config,
            scheme.fitted(model),
            task,
            scheme,
            make_optimiser(config.train, exact=scheme.sync.exact),
            cell(net, clients, seed),
            channel(net, clients, seed, config.world),
            _allocator(net),
            background_load(config.world, clients, seed),
        )

    def conditions(self, rounds: Iterable[int]) -> Conditions:
        """What these rounds of a training meet, (T, N)."""
        met = []
        for t in rounds:
            gains = self.channel.at(t)
            state = self.channel.state(t) if isinstance(self.channel, Varying) else 0
            met.append(Conditions(gains, self.load.at(t) if self.load else np.ones_like(gains), np.array(state)))
        return Conditions.join(met, stack=True)

    def sending(self, uplink: str, scheme: Scheme | None = None) -> "Scenario":
        """The same with smashed data in another format, of which this is the scheme, if there is one."""
        config = with_values(self.config, uplink_codec=uplink, uplink_choices=())
        return replace(self, config=config, scheme=scheme or make_scheme(config))

    def place(self, cut: int) -> Placement:
        """The placement that a user's cut means."""
        return self.scheme.place(cut, self.model.depth)

    def placements(self) -> list[Placement]:
        """All there are to choose from; a scheme without a cut has one."""
        return list(dict.fromkeys(self.place(cut) for cut in self.scheme.cuts(self.model.depth)))

    def work(self, placement: Placed) -> Workload:
        """FLOPs of each client in a local step."""
        if placement not in self._work:
            net, train = self.config.network, self.config.train
            self._work[placement] = workload(
                self.model, placement, train.batch, net.workload, net.multiply_add, recompute=train.recompute
            )
        return self._work[placement]

    def dry(self, placement: Placed, t: int, clients: Sequence[int] | None = None) -> Ledger:
        """What round ``t`` of these clients, all by default, would send and compute."""
        train, everyone = self.config.train, range(self.cell.clients)
        return dry_round(
            self.scheme.at(placement),
            self.model,
            self.task,
            placement,
            self.optimiser,
            t,
            everyone if clients is None else clients,
            batch=train.batch,
            steps=train.local_steps,
            everyone=everyone,
        )

    def stages(self, placement: Placed, t: int, clients: Sequence[int] | None = None) -> list[Stage]:
        """Round ``t`` of these clients, all by default."""
        return self.stages_of(self.dry(placement, t, clients).events, placement)

    def stages_of(self, events: Sequence[Event], placement: Placed) -> list[Stage]:
        """A round in which this happened."""
        return fold(events, placement, self.work(placement))

    def measured(self, placements: Sequence[Placement]) -> dict[int, tuple[str, Leak | None]]:
        """By cut, the format of smashed data and what the strongest attack got of them, None if nobody measured it."""
        net, arch, found = self.config.network, self.config.model.arch, {}
        leaks = read_leakage(Path(net.leakage)) if net.leakage else []
        made = Defence.of(self.config.defence, 0)
        guard = made.name if made else ""
        for placement in placements:
            scheme, cut = self.scheme.at(placement), placement.cut
            halves, codec = knows_halves(scheme), scheme.uplink.name
            found[cut] = codec, strongest(leaks, cut, codec, arch=arch, defence=guard, averaged=halves)
        return found

    def leaking(self, placements: Sequence[Placement]) -> dict[int, str]:
        """Cuts that measured privacy rules out, and why."""
        net = self.config.network
        found = self.measured(placements) if net.leakage else {}
        why = {cut: (codec, ruled_out(leak, net.max_ssim)) for cut, (codec, leak) in found.items()}
        return {cut: f"{codec} {reason}" for cut, (codec, reason) in why.items() if reason}

    def private(self, placements: Sequence[Placement]) -> list[bool]:
        """Which placements privacy allows as modelled (epsilon; one at least must be) and as measured (leakage)."""
        out, kept = self.leaking(placements), legal(self.model, placements, self.config.network.epsilon)
        return [good and placement.cut not in out for placement, good in zip(placements, kept, strict=True)]

    def legal(self, placements: Sequence[Placement]) -> list[bool]:
        """Which placements privacy allows; one at least must be."""
        allowed = self.private(placements)
        if not any(allowed):
            raise none_private([self.leaking(placements)])
        return allowed

    def check(self, placement: Placed, rounds: int) -> None:
        """Refuse a cut that violates privacy and a trace that is too short, before anything is trained."""
        self.channel.at(rounds)
        for cut, why in self.leaking(placement.kinds).items():
            raise SplitcastError(f"cut: {cut} is ruled out by {self.config.network.leakage}: {why}")
        epsilon = self.config.network.epsilon
        for one in placement.kinds if epsilon else ():
            if privacy(self.model, one) < epsilon:
                placements = self.placements()
                kept = legal(self.model, placements, epsilon)
                allowed = [p.cut for p, good in zip(placements, kept, strict=True) if good]
                raise SplitcastError(f"cut: {one.cut} violates epsilon {epsilon:g}; choose one of {allowed}")


def none_private(ruled_out: Iterable[Mapping[int, str]]) -> SplitcastError:
    """That measured privacy leaves no cut, and why, for every format that was asked for."""
    said = "; ".join(f"cut {cut}: {reason}" for out in ruled_out for cut, reason in out.items())
    return SplitcastError(f"leakage: leaves no cut ({said}); raise max_ssim, or measure other codecs")


def _allocator(net: NetworkConfig) -> Allocator:
    if not (net.energy_weight or net.energy_cap_j):
        return ALLOCATORS.find(net.allocation)
    if net.allocation != "optimal":
        field = "energy_weight" if net.energy_weight else "energy_cap_j"
        raise SplitcastError(f"{field}: {getattr(net, field):g} needs allocation 'optimal', not {net.allocation!r}")
    return EnergyAware(net.energy_weight, net.energy_cap_j)


@dataclass(frozen=True)
class RoundCost:
    """What a round took."""

    latency_s: float
    slowest_client: int
    slowest_part: str
    energy_j: dict[str, float]
    """of all clients (energy_j), the part of it on the air (energy_air_j), of the client with most (energy_most_j)"""


def energy_of(compute: Array, air: Array) -> dict[str, float]:
    """`RoundCost.energy_j`, of the joules of clients for computing and on the air, (N,) each."""
    each = compute + air
    return {
        "energy_j": float(each.sum()),
        "energy_air_j": float(air.sum()),
        "energy_most_j": float(each.max(initial=0)),
    }


class RoundClock:
    """Times the rounds of a training as they happen.

    The channel of coming rounds is known and what they send is mostly the same, so a block of rounds is solved at
    once and kept. Blocks start at fixed rounds: a resumed run solves the same ones and gets the same bits.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._block = max(1, min(32, 1024 // scenario.cell.clients))
        self._known: tuple[range, list[Stage]] = (range(0), [])
        self._timed = RoundTime([])
        self._spent = (np.zeros(0), np.zeros(0))

    def round(self, t: int, placement: Placed, ledger: Ledger) -> RoundCost:
        """Seconds and joules of round ``t``, in which this happened; who held it up longest, and with what."""
        here, train = self.scenario, self.scenario.config.train
        stages = here.stages_of(ledger.events, placement)
        first = t - (t - 1) % self._block
        block = range(first, min(first + self._block, train.rounds + 1))
        if self._known != (block, stages):
            met = here.conditions(block)
            self._known, self._timed = (block, stages), time_rounds([stages], here.cell, met, here.allocator)[0]
            self._spent = self._timed.spent_j(here.cell.clients)
        at = (t - first,)
        compute, air = (spent[at] for spent in self._spent)  # (N,)
        return RoundCost(float(self._timed.seconds[at]), *self._timed.culprit(at), energy_of(compute, air))


def rhythms(
    scenarios: Sequence[Scenario], placements: Sequence[Placement], rounds: int
) -> Iterator[tuple[NDArray[np.bool_], list[list[Stage]]]]:
    """Rounds 1..T by what they send and compute: which rounds (T,), and the stages of every placement in each scenario,
    scenario after scenario."""
    schemes = [each.scheme.at(placement) for each in scenarios for placement in placements]
    patterns = [tuple(scheme.pattern(t) for scheme in schemes) for t in range(1, rounds + 1)]
    for pattern in sorted(set(patterns)):
        t = patterns.index(pattern) + 1
        these = np.array([each == pattern for each in patterns])
        yield these, [each.stages(placement, t) for each in scenarios for placement in placements]
