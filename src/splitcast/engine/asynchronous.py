"""A server that does not wait: version t of the model is made as soon as K clients have delivered.

Client n, which began with version s_n, has moved its weights by d^n = w^n - w^(s_n) in its local steps. With B the
buffer, the K who deliver first,

    w^(t) = w^(t-1) + sum_{n in B} rho^n / (sum_{m in B} rho^m) (1 + a_n)^-p d^n,    a_n = t - 1 - s_n

(the buffer: Nguyen et al., FedBuff, AISTATS 2022; the weight of staleness: Xie et al., FedAsync, 2019). So are the
client halves where they are averaged (`sfl`, `local-loss`, `fl`); where they are not (`psl`) each client keeps its own.

Whoever has delivered waits for the next version and begins with it. So K = N is the scheme as it was. What is sent is
counted in the round in which it begins. Clients are at different places of their rounds, so that nothing is shared out
among them anew: each has 1/N of the band and of the server to itself.

With a deadline, B is whoever has delivered S seconds after the last version, K of them at least: who is late goes on
and counts in a later version, by its staleness. A round takes S seconds; less where all have delivered before, more
where fewer than K have.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import seed_torch, torch_seed
from splitcast.engine.cohort import SimulatedClients, SimulatedCohort
from splitcast.engine.engine import RoundReport, Waited
from splitcast.engine.links import CountingLink, SimulatedLink
from splitcast.engine.mixed import AnyState
from splitcast.engine.party import Group, LocalParty, mean_loss
from splitcast.engine.simulator import Simulator
from splitcast.engine.state import State, read
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Scheme
from splitcast.training.weights import FROZEN, Weights


class Pace(Protocol):
    """How long clients take on their own."""

    def __call__(self, t: int) -> tuple[Sequence[float], Sequence[str]]:
        """Seconds of each client that begins in round t, (N,), and what takes most of them."""
        ...


@dataclass(frozen=True)
class Flight:
    """What a client has arrived at, or will have, and has not delivered."""

    since: int
    """the version that it began with"""
    arrives_s: float
    part: str
    client: Weights
    """how far its half moved; where halves are never averaged, the half"""
    server: Weights
    """how far its copy of the server half moved"""


class AsyncSimulator(Simulator):
    """All clients and the server in one process; the server goes on with ``wait_for`` of them, or with a deadline."""

    def __init__(self, *args: Any, pace: Pace, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_waiting(self, len(self.sizes))
        self.pace, self.now = pace, 0.0
        self.flights: dict[int, Flight] = {}

    @property
    def one_state(self) -> State:
        """The weights; all clients have one placement."""
        assert isinstance(self.state, State)
        return self.state

    def round(self, t: int, ledger: Ledger | None = None, who: np.ndarray | None = None) -> RoundReport:
        """From version t - 1 to version t: those who wait begin, and the first K of all deliver."""
        assert who is None or len(who) == len(self.sizes)  # everybody takes part
        ledger, state = ledger or Ledger(), self.one_state
        self.optimiser.begin(t)
        self.server_optimiser.begin(t)
        begin = np.array(sorted(set(range(len(self.sizes))) - set(self.flights)))
        cohort, link = BeginningCohort(self, t, begin, ledger), SimulatedLink(ledger, self.train.seed)
        with self.runtime.fork_rng():
            seed_torch(torch_seed(self.train.seed, "layers", t))
            self.scheme.round(t, cohort, state, link)
        seconds, parts = self.pace(t)
        for n, (client, server) in cohort.arrived.items():
            self.flights[n] = Flight(t - 1, self.now + float(seconds[n]), parts[n], client, server)
        first, waited = self._wait()
        stale = [t - 1 - self.flights[n].since for n in first]
        ledger.note("staleness", sum(stale) / len(stale))
        if self.train.deadline_s:
            ledger.note("late", len(self.flights) - len(first))
        self._deliver(sorted(first), t)
        if self.scheme.syncs(t):
            link.models("down", state.client.travelling(), sorted(first), broadcast=True)
        return RoundReport(cohort.mean_loss(), begin.tolist(), ledger, waited=waited)

    def _wait(self) -> tuple[list[int], Waited]:
        """Until the next version: who delivers, and for whom the server waited, at a deadline for who is next."""
        order = sorted(self.flights, key=lambda n: (self.flights[n].arrives_s, n))
        taken, limit = self.train.wait_for, self.train.deadline_s
        if limit:
            done = sum(flight.arrives_s <= self.now + limit for flight in self.flights.values())
            if taken <= done < len(order):
                self.now += limit
                return order[:done], Waited(limit, order[done], self.flights[order[done]].part)
            taken = max(taken, done)
        last = self.flights[order[taken - 1]]
        waited = Waited(last.arrives_s - self.now, order[taken - 1], last.part)
        self.now = last.arrives_s
        return order[:taken], waited

    def _deliver(self, ids: Sequence[int], t: int) -> None:
        """Version t, from the moves of these clients."""
        state, flights = self.one_state, [self.flights.pop(n) for n in ids]
        rho = self.shares[list(ids)].double()
        stale = torch.tensor([t - 1 - flight.since for flight in flights], dtype=torch.float64, device="cpu")
        shares = (rho / rho.sum() * (1 + stale) ** -self.train.staleness).to(self.weights)
        state.server = _pushed(state.server, [flight.server for flight in flights], shares)
        if self.scheme.syncs(t):
            state.client = _pushed(state.client, [flight.client for flight in flights], shares)
        else:
            own = Weights.stacked_of([flight.client for flight in flights])
            state.client.put(torch.tensor(list(ids), device=self.runtime.device), own)

    def snapshot(self, t: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, about = super().snapshot(t)
        for n, flight in self.flights.items():
            for side, weights in (("client", flight.client), ("server", flight.server)):
                for slot, values in weights.slots.items():
                    if slot != FROZEN:
                        tensors |= {f"flight/{n}/{side}/{slot}/{name}": v for name, v in values.items()}
        known = {str(n): [flight.since, flight.arrives_s, flight.part] for n, flight in self.flights.items()}
        return tensors, about | {"flights": json.dumps({"now": self.now, "of": known})}

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], t: int) -> None:
        super().resume(tensors, about, t)
        told, whole = json.loads(about["flights"]), State.start(self.initial(), self.one_state.placement)
        self.now, self.flights = float(told["now"]), {}
        for key, (since, arrives_s, part) in told["of"].items():
            sides = {}
            for side in ("client", "server"):
                sides[side] = read(tensors, f"flight/{key}/{side}", getattr(whole, side))
            self.flights[int(key)] = Flight(int(since), float(arrives_s), str(part), sides["client"], sides["server"])


def _pushed(weights: Weights, moves: Sequence[Weights], shares: Tensor) -> Weights:
    """w + sum_n shares_n d^n"""
    return Weights.stacked_of(moves).mean(shares).plus(weights)


class BeginningCohort(SimulatedCohort):
    """Clients that begin together; what each arrives at is kept apart."""

    sim: AsyncSimulator

    def __init__(self, sim: AsyncSimulator, t: int, ids: np.ndarray, ledger: Ledger) -> None:
        super().__init__(sim, t, ids, ledger)
        self.arrived: dict[int, tuple[Weights, Weights]] = {}

    def in_parallel(
        self, server: AnyState, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[SimulatedClients, LocalParty]]:
        sim, state, start = self.sim, self.one_state, len(self.ledger.events)
        if not averaged and not state.client.stacked:
            state.spread(len(sim.sizes))
        groups = sim.groups(len(self.ids), state.placement, stacks_client=True, mixes=False)
        for k, (members, spans) in enumerate(groups):
            self.ledger.alongside(start if k else None)
            ids = self.ids[members].tolist()
            group = Group(ids, self.rho[members], spans, keep=True, round=self.t, device=sim.runtime.device)
            theirs = state.server.stack(len(ids))
            own = state.client.stack(len(ids)) if averaged else state.client.take(torch.tensor(ids, device="cpu"))
            party = LocalParty(sim.server_kit, state.placement, theirs, group, self.ledger)
            some = SimulatedClients(self, own, group, party, alone=True)
            yield some, party
            self.loss += mean_loss(party, some)
            moved, own = theirs.minus(state.server), own.minus(state.client) if averaged else own
            self.arrived |= {n: (own.one(i).clone(), moved.one(i).clone()) for i, n in enumerate(ids)}
        self.ledger.alongside(None)

    def average(self, link: CountingLink, codec: Codec = FP32) -> None:
        link.models("up", self.one_state.client.travelling(), self.ids.tolist())


def refuse_waiting(sim: Simulator, clients: int) -> None:
    """Settings in which clients have to wait for each other."""
    train, scheme = sim.train, sim.scheme
    alone = type(scheme).round is Scheme.round and not scheme.mixes and not scheme.one_server
    if not alone or scheme.sync_every > 1 or not scheme.sync.exact:
        raise SplitcastError(
            f"wait_for: clients of {scheme.name} with its settings wait for each other; "
            "choose sfl, psl, psl-personal, local-loss or fl, averaged in every round or never"
        )
    if not isinstance(sim.state, State):
        raise SplitcastError("wait_for: needs one cut for all clients")
    if sim.config.policy.policy != "fixed":
        raise SplitcastError(f"wait_for: policy {sim.config.policy.policy!r} moves the cut of all at once; use fixed")
    if sim.config.policy.uplink_choices:
        raise SplitcastError("wait_for: rounds overlap, and each has one format; give uplink_codec, not uplink_choices")
    if sim.identical:
        raise SplitcastError("wait_for: client_update 'identical' has one step for all; use own")
    if train.participation < 1 or train.dropout:
        raise SplitcastError("wait_for: everybody takes part; leave participation and dropout out")
    if sim.optimiser.at_sync != "average":
        raise SplitcastError("wait_for: the optimiser's state is averaged with the weights; leave optimizer_state out")
    if train.wait_for > clients:
        raise SplitcastError(f"wait_for: {train.wait_for} for {clients} clients; at most one for each")
