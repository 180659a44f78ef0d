"""Clients that are elsewhere, and the server that works for them: the parties of a scheme's program on the server."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.config import TrainConfig
from splitcast.base.errors import SplitcastError
from splitcast.engine.dry import DryParty
from splitcast.engine.party import Group, Kit, LocalParty, Sent
from splitcast.engine.values import whole
from splitcast.remote.halves import Halves, positions
from splitcast.remote.sites import NoSites
from splitcast.remote.wire import all_finite
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Batch, Values
from splitcast.training.weights import Weights

if TYPE_CHECKING:
    from splitcast.remote.link import ServerLink


class RemoteClients(DryParty):
    """Clients elsewhere: what they compute is noted here, and what they send comes over the link."""

    def __init__(
        self, kit: Kit, halves: Halves, t: int, ids: Sequence[int], train: TrainConfig, ledger: Ledger, *, in_turn: bool
    ) -> None:
        super().__init__(kit.model, kit.task, halves.state.placement, ids, train.batch, ledger)
        self.kit, self.halves, self.round, self.in_turn = kit, halves, t, in_turn
        self.steps = train.local_steps
        self.now, self.begun, self.turn = 0, False, 0
        self.losses: dict[int, float] = {}
        """what clients that take the loss themselves have said last"""
        self.half_bytes: dict[int, int] = {}
        """sizes of the client halves that came last"""
        self.server: RemoteServer | None = None

    @property
    def rho(self) -> Tensor:
        return self.halves.rho(self.ids)

    @property
    def place(self) -> tuple[int, int]:
        return self.round, self.now

    def batches(self) -> Iterator[Batch]:
        for step in range(self.steps):
            self.now = step
            yield from self.samples(0)

    def samples(self, first: int) -> Iterator[Batch]:
        yield from super().samples(first)
        if self.server:
            self.server.step()

    def only(self, ids: Sequence[int]) -> None:
        """Who is not among these has failed, and is out for the rest of the round."""
        if list(ids) != self.ids:
            if self.server:
                self.server.only(ids, self.ids)
            self.ids = list(ids)

    def receive(self, link: "ServerLink") -> None:
        self.only(self.halves.give(self.ids))
        link.models("down", self.halves.state.client.travelling(), self.ids)

    def hand_in(self, link: "ServerLink") -> None:
        for n, weights in link.exchange(self, weights=True).items() if self.ids else ():
            self.halves.state.client = weights
            link.models("up", weights.travelling(), [n])


class RemoteServer(LocalParty):
    """The server, for clients elsewhere: whoever's data make it overflow is refused and leaves no trace."""

    def __init__(self, clients: RemoteClients, weights: Weights) -> None:
        ids = clients.ids
        rho = torch.ones(1, device="cpu") if clients.in_turn else clients.rho
        group = Group(list(ids), rho, [slice(0, len(ids))], keep=True, round=clients.round)
        super().__init__(clients.kit, clients.placement, weights, group, clients.ledger)
        self.clients = clients
        self.took_part: list[int] = []
        clients.server = self

    def only(self, ids: Sequence[int], among: Sequence[int]) -> None:
        """Go on with some of the clients."""
        if self.weights.stacked:
            self.weights = self.weights.take(positions(ids, among))
        self.group.ids, self.group.spans = list(ids), [slice(0, len(ids))]
        if not self.clients.in_turn:
            self.group.rho = self.clients.halves.rho(ids) if ids else torch.empty(0, device="cpu")

    def forward(self, segment: int, x: Values | Tensor) -> Sent:
        return super().forward(segment, whole(x))  # now it is known who is there

    def backward(self, sent: Sent, received: Tensor) -> Tensor:
        if not self.group.ids:
            return received
        if sent.ids != self.group.ids:  # some have failed since
            sent = sent.only(positions(self.group.ids, sent.ids))
        return super().backward(sent, received)

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        seen, target = whole(x), whole(y)
        if not len(seen):
            return seen.new_empty(0), seen
        with self._timed():
            found = super().descend(segment, seen, target)
        if self.group.ids:
            self.took_part = self.took_part or list(self.group.ids)
        return found

    def train(self, segment: int, x: Tensor, y: Tensor, *, back: bool = False) -> Tensor:
        with self._timed():
            found = super().train(segment, x, y, back=back)
        self.took_part = self.took_part or list(self.group.ids)
        return found

    def estimate(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> Tensor:
        seen, target = whole(x), whole(y)
        with self._timed():
            return super().estimate(segment, seen, target) if len(seen) else seen

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.clients.halves.sites.spend("server", time.perf_counter() - started)

    def gradients(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(x, Tensor) and isinstance(y, Tensor)
        while True:
            losses, grads = super().gradients(segment, x, y)
            if all_finite(losses) and all_finite(grads):
                return losses, grads
            good = torch.isfinite(losses) & torch.isfinite(grads.flatten(1)).all(1)
            kept = good.nonzero().flatten()
            if not len(kept) and not self.clients.in_turn:
                raise SplitcastError("lr: the loss is no longer finite; choose a lower value")
            self.weights.pending = {}
            ids = [self.group.ids[position] for position in kept.tolist()]
            for n in set(self.group.ids) - set(ids):
                reason = "refused: smashed data: the server's loss or gradient on them is not finite"
                self.clients.halves.sites.fault(n, reason)
            self.clients.only(ids)
            if self.weights.stacked or not len(kept):  # every copy has stepped on its own
                return losses[kept], grads[kept]
            x, y = x[kept], y[kept]


class RemoteCohort:
    """The sites of a round."""

    def __init__(
        self,
        kit: Kit,
        halves: Halves,
        t: int,
        ids: Sequence[int],
        train: TrainConfig,
        ledger: Ledger,
        *,
        one_server: bool,
    ) -> None:
        self.one_server = one_server
        self.kit, self.halves, self.t, self.train, self.ledger = kit, halves, t, train, ledger
        self.chosen = list(ids)
        self.clients = self._clients(ids, in_turn=False)
        self.took_part: list[int] = []
        self._losses: list[float] = []
        self._central: LocalParty | None = None

    @property
    def loss(self) -> float:
        """sum_n rho^n F^n, mean over the local steps and, where clients take turns, over them."""
        if self._central and self._central.descents:  # the server trained on its own
            return self._central.total / self._central.descents
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def central(self, server: None) -> LocalParty:
        group = Group(list(self.clients.ids), torch.ones(1, device="cpu"), [slice(0, 1)], keep=True, round=self.t)
        state = self.halves.state
        self._central = LocalParty(self.kit, state.placement, state.server, group, self.ledger)
        return self._central

    def in_parallel(
        self, server: None, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[RemoteClients, RemoteServer]]:
        state = self.halves.state
        one = self.kit.one_copy(state.placement, "server", self.train.local_steps)
        one = self.one_server or (one and not self.kit.mixes(state.placement, "server"))
        copies = state.server if one else state.server.stack(len(self.clients.ids))
        party = RemoteServer(self.clients, copies)
        yield self.clients, party
        if party.weights.stacked:
            state.server = party.weights.mean(party.group.rho)
        self.halves.differ = self.halves.differ or not still
        self._noted(self.clients, party)

    def in_turn(self, server: None) -> Iterator[tuple[RemoteClients, RemoteServer]]:
        for n in self.chosen:
            clients = self._clients([n], in_turn=True)
            party = RemoteServer(clients, self.halves.state.server)
            yield clients, party
            self._noted(clients, party)
        if not self.took_part:
            raise NoSites(f"sites: none finished round {self.t}; {self.halves.sites.why()}")

    def average(self, link: "ServerLink", codec: Codec = FP32) -> None:
        ids = list(self.clients.ids)
        halves = link.exchange(self.clients, weights=True, sync=codec)
        self.halves.stale |= set(ids) - set(halves)
        size, alone = self.halves.share(halves, codec.at(self.t))
        sizes = [self.clients.half_bytes[n] for n in halves]
        link.count("up", "model", sizes if codec.varies or len(set(sizes)) > 1 else sizes[0], list(halves))
        fresh = [n for n in self.halves.fresh() if n not in alone]
        link.count("down", "model", size, fresh, broadcast=True)
        link.models("down", self.halves.state.client.travelling(), alone)

    def close(self) -> None:
        """The round is over: where clients take the loss themselves, they have told it by now."""
        if not self._losses and self.clients.losses:
            said = {n: loss for n, loss in self.clients.losses.items() if n in self.clients.ids}
            if said:
                told = torch.tensor(list(said.values()), dtype=torch.float64, device="cpu")
                self._losses = [float(self.halves.rho(list(said)).double() @ told)]
                self.took_part = list(said)

    def _noted(self, clients: RemoteClients, party: RemoteServer) -> None:
        """Who was there, and its loss if the server took it."""
        self.took_part += party.took_part
        if party.descents:
            self._losses.append(party.total / party.descents)
        elif clients.in_turn and clients.ids:
            self.took_part += clients.ids
            self._losses.append(clients.losses[clients.ids[0]])

    def _clients(self, ids: Sequence[int], *, in_turn: bool) -> RemoteClients:
        return RemoteClients(self.kit, self.halves, self.t, ids, self.train, self.ledger, in_turn=in_turn)
