"""The clients of a round in one process: who moves together, with which copies of the weights.

Clients of equal placements form a cohort (`training.placement`); cohorts run one after another, noted side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.data.augment import Augment, augmented
from splitcast.engine.links import CountingLink
from splitcast.engine.mixed import AnyState, MixedState
from splitcast.engine.party import Group, LocalParty, mean_loss
from splitcast.engine.state import State
from splitcast.engine.values import PerClient, Rows
from splitcast.model.split import Params
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Batch, Values
from splitcast.training.differences import difference_work
from splitcast.training.weights import BUFFERS, Weights

if TYPE_CHECKING:
    from splitcast.engine.simulator import Simulator


class SimulatedClients(LocalParty):
    """Clients of a group, with their samples."""

    def __init__(
        self, cohort: "SimulatedCohort", weights: Weights, group: Group, server: LocalParty, alone: bool
    ) -> None:
        sim = cohort.sim
        super().__init__(sim.kit, server.placement, weights, group, cohort.ledger)
        self.batch_rows = sim.train.batch
        self.cohort, self.server, self.alone = cohort, server, alone

    @property
    def place(self) -> tuple[int, int]:
        return self.group.round, self.group.step

    def batches(self) -> Iterator[Batch]:
        sim, clients = self.cohort.sim, np.array(self.group.ids)
        for self.group.step in range(sim.train.local_steps):
            rows = self.cohort.rows(self.group.step, clients)
            x: Values = Rows(sim.x, rows, self.group.spans)
            if sim.augment:
                x = PerClient(x, partial(self._augmented, sim.augment, self.group.step))
            yield from self._one(x, rows)

    def samples(self, places: Tensor) -> Iterator[Batch]:
        sim = self.cohort.sim
        rows = sim.in_order(places.numpy(), np.array(self.group.ids)).to(sim.runtime.device)
        yield from self._one(Rows(sim.x, rows, self.group.spans), rows)

    def _one(self, x: Values, rows: Tensor) -> Iterator[Batch]:
        yield Batch(x, Rows(self.cohort.sim.y, rows, self.group.spans))
        if self.alone:  # else other groups have yet to contribute
            self.step()
            self.server.step()

    def _augmented(self, augment: Augment, step: int, x: Tensor, who: slice) -> Tensor:
        return augmented(augment, x, self.cohort.sim.train.seed, self.group.round, step, self.group.ids[who])

    def receive(self, link: CountingLink) -> None:
        link.models("down", self.weights.travelling(), self.group.ids)

    def hand_in(self, link: CountingLink) -> None:
        link.models("up", self.weights.travelling(), self.group.ids)


class SimulatedCohort:
    """The clients of a round."""

    def __init__(self, sim: "Simulator", t: int, ids: np.ndarray, ledger: Ledger) -> None:
        self.sim, self.t, self.ids, self.ledger = sim, t, ids, ledger
        shares = sim.shares[torch.from_numpy(ids)]
        self.rho = shares / shares.sum()
        self.loss = 0.0
        self._central: LocalParty | None = None
        self._drawn: dict[int, Tensor] = {}
        self.everyone: Sequence[int] = range(len(sim.sizes))
        self._parts: list[tuple[float, SimulatedCohort]] = []

    def part(self, ids: Sequence[int]) -> "SimulatedCohort":
        some = SimulatedCohort(self.sim, self.t, np.array(ids), self.ledger)
        some._drawn, some.everyone = self._drawn, ()
        self._parts.append((float(self.rho[np.flatnonzero(np.isin(self.ids, ids))].sum()), some))
        return some

    def receive(self, link: CountingLink) -> None:
        ids, state = self.ids.tolist(), self.sim.state
        held = state.travelling() if isinstance(state, MixedState) else state.client.travelling()
        link.models("down", held if isinstance(held, int) else [held[n] for n in ids], ids, broadcast=True)

    def mean_loss(self) -> float:
        """Of the server where it trained on its own, else of the server for the clients, else of the clients."""
        own = self._central
        if own and own.descents:
            return own.total / own.descents
        return self.loss + sum(weight * part.mean_loss() for weight, part in self._parts)

    def rows(self, step: int, clients: np.ndarray) -> Tensor:
        """Rows (K, b) of a local step; all are drawn at once, and kept while groups take turns."""
        if step not in self._drawn:
            self._drawn[step] = self.sim.rows(self.t, step, np.arange(len(self.sim.sizes)))
        return self._drawn[step][torch.from_numpy(clients)].to(self.sim.runtime.device)

    @property
    def one_state(self) -> State:
        """The weights, where all clients have one placement."""
        assert isinstance(self.sim.state, State)
        return self.sim.state

    def in_parallel(
        self, server: AnyState, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[SimulatedClients, LocalParty]]:
        start = len(self.ledger.events)
        shares = list(self._shares(server))
        for k, share in enumerate(shares):
            self.ledger.alongside(start, further=k > 0)
            yield from self._side_by_side(share, start, mixes=mixes, averaged=averaged, still=still)
        self.ledger.alongside(None)
        if isinstance(server, MixedState):
            server.join([(share.cohort, share.weight) for share in shares])

    def _shares(self, state: AnyState) -> Iterator["Share"]:
        """Those who take part, cohort by cohort."""
        if isinstance(state, State):
            yield Share(0, state, self.ids, torch.from_numpy(self.ids), self.rho, len(self.sim.sizes), 1.0)
            return
        for k, members in enumerate(state.members):
            here = np.isin(self.ids, members)
            if here.any():
                rho = self.rho[np.flatnonzero(here)]
                places = torch.from_numpy(np.searchsorted(members, self.ids[here]))
                weight = float(rho.sum())
                yield Share(k, state.states[k], self.ids[here], places, rho / rho.sum(), len(members), weight)

    def _side_by_side(
        self, share: "Share", start: int, *, mixes: bool, averaged: bool, still: bool
    ) -> Iterator[tuple[SimulatedClients, LocalParty]]:
        sim, state, tau, clients = self.sim, share.state, self.sim.train.local_steps, share.places
        optimiser, everyone = sim.kit.optimiser, len(share.ids) == share.members
        if sim.optimiser.at_sync == "local" and state.client.home().slots and not still:
            averaged = False  # their states last, whatever becomes of the weights
        alike = averaged and not sim.scheme.many_steps and sim.kit.one_copy(state.placement, "client", tau)
        alike = alike or (still and not sim.kit.mixes(state.placement, "client"))
        shared = not state.client.stacked and (sim.identical or alike)
        lasting = not shared and (state.client.stacked or not averaged)
        if lasting:
            if not state.client.stacked:
                state.spread(share.members)
            copies = state.client if everyone else state.client.take(clients)
        client_mean: Weights | None = None
        server_mean: Weights | None = None
        client_apart, server_apart = Params(), Params()
        groups = sim.groups(len(clients), state.placement, stacks_client=not shared, mixes=mixes or sim.identical)
        for k, (members, spans) in enumerate(groups):
            if k:
                self.ledger.alongside(start)
            ids = share.ids[members].tolist()
            keep = len(spans) == 1 or sim.keeps(len(ids))
            group = Group(ids, share.rho[members], spans, keep, self.t, device=sim.runtime.device)
            if shared:
                client = sim.kit.lent(state.client, state.placement, "client", len(ids))
            else:
                client = copies.take(members) if lasting else state.client.stack(len(ids))
            if sim.copies_server(state.placement):
                theirs = sim.server_copies = state.server.stack(len(ids), sim.server_copies)
            elif sim.scheme.one_server:
                theirs = state.server
            else:
                theirs = sim.server_kit.lent(state.server, state.placement, "server", len(ids))
            party = LocalParty(sim.server_kit, state.placement, theirs, group, self.ledger)
            some = SimulatedClients(self, client, group, party, alone=len(groups) == 1)
            yield some, party
            self.loss += share.weight * mean_loss(party, some)
            if theirs.stacked:
                server_mean = theirs.mean(group.rho).plus(server_mean)
            if not shared and not lasting:
                client_mean = client.mean(group.rho).plus(client_mean)
            for weights, apart in ((client, client_apart), (theirs, server_apart)):
                if weights.apart:
                    apart |= weights.joined(group.rho, apart)
        state.server.step(sim.server_kit.optimiser)
        state.server = server_mean or state.server
        for weights, apart in ((state.client, client_apart), (state.server, server_apart)):
            if apart:
                weights.slots[BUFFERS] = apart
        if shared:
            state.client.step(optimiser)
        elif averaged:
            state.client = client_mean or copies.mean(share.rho)
        elif not everyone:
            state.client.put(clients, copies)

    def in_turn(self, server: AnyState) -> Iterator[tuple[SimulatedClients, LocalParty]]:
        sim = self.sim
        for n in self.ids.tolist():
            state = server.handed_to(n) if isinstance(server, MixedState) else server
            state.hand_to(n, len(sim.sizes), sim.optimiser)
            group = self._alone([n])
            party = LocalParty(sim.server_kit, state.placement, state.server, group, self.ledger)
            client = SimulatedClients(self, state.client, group, party, alone=True)
            yield client, party
            self.loss += mean_loss(party, client, len(self.ids))

    def central(self, server: AnyState) -> LocalParty:
        group = self._alone(self.ids.tolist())
        state = self.one_state
        self._central = LocalParty(self.sim.server_kit, state.placement, state.server, group, self.ledger)
        return self._central

    def _alone(self, ids: list[int]) -> Group:
        """A group that counts as one."""
        share = torch.ones(1, dtype=self.sim.runtime.dtype)
        return Group(ids, share, [slice(0, 1)], keep=True, round=self.t, device=self.sim.runtime.device)

    def average(self, link: CountingLink, codec: Codec = FP32) -> None:
        everyone, ids = self.everyone, self.ids.tolist()
        if isinstance(mixed := self.sim.state, MixedState):
            taking_part = [(share.cohort, share.weight, share.places, share.rho) for share in self._shares(mixed)]
            mixed.average(taking_part, self.sim.optimiser, by_side=self.sim.scheme.by_side)
            held = mixed.travelling()
            link.models("up", [held[n] for n in ids], ids)
            link.models("down", [held[n] for n in everyone], everyone, broadcast=True)
            return
        state = self.one_state
        if state.client.stacked and not codec.exact and self.sim.differences.last is not None:
            halves = state.client.take(torch.from_numpy(self.ids))
            half, sizes, size = self.sim.differences.average(halves, ids, self.rho, codec.at(self.t))
            state.share(half, self.sim.optimiser)
            coding = difference_work(half.travelling(), codec.at(self.t))
            link.count("up", "model", sizes if codec.varies else sizes[0], ids, coding=coding)
            link.count("down", "model", size, everyone, broadcast=True, coding=coding)
            return
        half = state.client.take(torch.from_numpy(self.ids)).mean(self.rho) if state.client.stacked else state.client
        state.share(half, self.sim.optimiser)
        link.models("up", state.client.travelling(), ids)
        link.models("down", state.client.travelling(), everyone, broadcast=True)


@dataclass(frozen=True)
class Share:
    """Those of a cohort who take part in a round."""

    cohort: int
    state: State
    ids: np.ndarray
    places: Tensor
    """where they are among its members"""
    rho: Tensor
    """among themselves"""
    members: int
    """who take part or not"""
    weight: float
    """sum of rho^n over all who take part"""
