"""A scheme and a model in a cell: what a round of each cut sends, computes and takes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splitcast.ccc.clock import ALLOCATORS, Allocator, time_rounds
from splitcast.config import Config
from splitcast.errors import SplitcastError, one_of
from splitcast.network.cell import Cell, cell
from splitcast.network.channel import Channel, channel
from splitcast.network.latency import RoundTime
from splitcast.network.privacy import allowed_cuts
from splitcast.schemes.messages import Ledger, Message
from splitcast.schemes.schemes import Scheme, scheme
from splitcast.schemes.stages import Stage, Work, dry_ledger, round_stages, workloads
from splitcast.split import SplitModel


@dataclass(frozen=True)
class Scenario:
    """Everything that determines the time of a round."""

    config: Config
    model: SplitModel
    scheme: Scheme
    classes: int
    cell: Cell
    channel: Channel
    work: Mapping[int, Work]
    """Per cut, without the feedback; a scheme without a cut has one entry, for the cut V."""
    allocator: Allocator

    @staticmethod
    def of(config: Config, model: SplitModel, classes: int) -> "Scenario":
        """The scenario a configuration describes."""
        net, clients, seed = config.network, config.data.clients, config.train.seed
        chosen = scheme(config.split)
        return Scenario(
            config,
            model,
            chosen,
            classes,
            cell(net, clients, seed),
            channel(net, clients, seed),
            workloads(model, chosen, config.train.batch, net.workload),
            ALLOCATORS[one_of("allocation", net.allocation, ALLOCATORS)],
        )

    def messages(self, cut: int, *, syncs: bool, clients: Sequence[int] | None = None) -> list[Message]:
        """What a round of these clients, all by default, sends; with ``syncs``, client halves are averaged in it."""
        train = self.config.train
        shape = (train.batch, *self.model.smashed_shape(cut))
        values = self.model.client_size(cut) * (2 if train.momentum else 1)
        everyone = range(self.cell.clients)
        return dry_ledger(
            self.scheme.at(cut),
            shape,
            self.classes,
            values,
            everyone if clients is None else clients,
            local_steps=train.local_steps,
            syncs=syncs,
            everyone=everyone,
        ).messages

    def stages(self, cut: int, *, syncs: bool, clients: Sequence[int] | None = None) -> list[Stage]:
        """A round with these clients, all by default; with ``syncs``, client halves are averaged in it."""
        who = range(self.cell.clients) if clients is None else clients
        return self.stages_of(self.messages(cut, syncs=syncs, clients=who), cut, who)

    def stages_of(self, messages: Sequence[Message], cut: int, clients: Sequence[int]) -> list[Stage]:
        """A round in which these clients took part and this was sent."""
        train, scheme, work = self.config.train, self.scheme.at(cut), self.work[cut]
        if not scheme.whole_model:
            together = scheme.feedback.flops(len(clients), (train.batch, *self.model.smashed_shape(cut)))
            work = replace(work, feedback=together)
        return round_stages(messages, scheme, work, clients, train.local_steps)

    def rhythms(self, cuts: Sequence[int], rounds: int) -> Iterator[tuple[NDArray[np.bool_], list[list[Stage]]]]:
        """Rounds 1..T by which cuts average their halves in them: which rounds (T,), and the stages of each cut."""
        schemes = [self.scheme.at(cut) for cut in cuts]
        syncing = np.array([[scheme.syncs(t) for scheme in schemes] for t in range(1, rounds + 1)])
        for kind in np.unique(syncing, axis=0):
            stages = [self.stages(cut, syncs=bool(syncs)) for cut, syncs in zip(cuts, kind, strict=True)]
            yield (syncing == kind).all(1), stages

    def check(self, cut: int, rounds: int) -> None:
        """Refuse a cut that violates privacy and a trace that is too short, before anything is trained."""
        self.channel.at(rounds)
        epsilon = self.config.network.epsilon
        if epsilon and not self.scheme.whole_model:
            allowed = allowed_cuts(self.model.profile(), epsilon)
            if cut not in allowed:
                raise SplitcastError(f"cut: {cut} violates epsilon {epsilon:g}; choose one of {allowed}")


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

    def round(self, t: int, cut: int, ledger: Ledger, clients: Sequence[int]) -> tuple[float, int, str]:
        """Seconds of round ``t``, which sent what the ledger says; who held it up longest, and with what."""
        here, train = self.scenario, self.scenario.config.train
        stages = here.stages_of(ledger.messages, cut, clients)
        first = t - (t - 1) % self._block
        block = range(first, min(first + self._block, train.rounds + 1))
        if self._known != (block, stages):
            gains = np.stack([here.channel.at(k) for k in block])
            self._known, self._timed = (block, stages), time_rounds([stages], here.cell, gains, here.allocator)[0]
        at = (t - first,)
        return float(self._timed.seconds[at]), *self._timed.culprit(at)
