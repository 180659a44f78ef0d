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
from splitcast.remote.mixed import AnyHalves, MixedHalves
from splitcast.remote.sites import NoSites
from splitcast.remote.wire import all_finite
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Batch, Values
from splitcast.training.differences import difference_work
from splitcast.training.weights import Weights

if TYPE_CHECKING:
    from splitcast.remote.link import ServerLink


class RemoteClients(DryParty):
    """Clients elsewhere: what they compute is noted here, and what they send comes over the link."""

    def __init__(
        self,
        kit: Kit,
        halves: Halves,
        t: int,
        ids: Sequence[int],
        train: TrainConfig,
        ledger: Ledger,
        *,
        in_turn: bool,
        optional: bool,
    ) -> None:
        """``optional``: whether the round goes on without them, if all of them fail."""
        super().__init__(kit.model, kit.task, halves.state.placement, ids, train.batch, ledger)
        self.kit, self.halves, self.round, self.in_turn, self.optional = kit, halves, t, in_turn, optional
        self.steps = train.local_steps
        self.now, self.begun, self.turn = 0, False, 0
        self.waits = False
        """whether their programs stand where the server has what they sent last"""
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
            yield from self.samples(torch.arange(self.batch, device="cpu"))

    def samples(self, places: Tensor) -> Iterator[Batch]:
        yield from super().samples(places)
        if self.server:
            self.server.step()

    def only(self, ids: Sequence[int]) -> None:
        """Who is not among these has failed, and is out for the rest of the round."""
        if list(ids) != self.ids:
            if self.server:
                self.server.only(ids, self.ids)
            if self.rows is not None:
                self.rows = [self.rows[k] for k in positions(ids, self.ids).tolist()]
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
            if not len(kept) and not self.clients.optional:
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
        halves: AnyHalves,
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
        shares = halves.among(ids)
        self.parts = [self._clients(cohort, some, in_turn=False, optional=len(shares) > 1) for cohort, some in shares]
        """cohort by cohort"""
        self.took_part: list[int] = []
        self._losses: list[tuple[float, float]] = []
        """weights, and the losses themselves"""
        self._central: LocalParty | None = None

    @property
    def loss(self) -> float:
        """sum_n rho^n F^n, mean over the local steps and, where clients take turns, over them."""
        if self._central and self._central.descents:  # the server trained on its own
            return self._central.total / self._central.descents
        total = sum(weight for weight, _ in self._losses)
        return sum(weight * loss for weight, loss in self._losses) / total if total else math.nan

    def central(self, server: None) -> LocalParty:
        (clients,) = self.parts
        group = Group(list(clients.ids), torch.ones(1, device="cpu"), [slice(0, 1)], keep=True, round=self.t)
        state = clients.halves.state
        self._central = LocalParty(self.kit, state.placement, state.server, group, self.ledger)
        return self._central

    def in_parallel(
        self, server: None, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[RemoteClients, RemoteServer]]:
        start, worked = len(self.ledger.events), list[tuple[Halves, float]]()
        for k, clients in enumerate(self.parts):
            if len(self.parts) > 1:
                self.ledger.alongside(start, further=k > 0)
            state = clients.halves.state
            one = self.kit.one_copy(state.placement, "server", self.train.local_steps)
            one = self.one_server or (one and not self.kit.mixes(state.placement, "server"))
            copies = state.server if one else state.server.stack(len(clients.ids))
            party = RemoteServer(clients, copies)
            yield clients, party
            if not clients.ids:  # nobody of this cohort is left
                continue
            if party.weights.stacked:
                state.server = party.weights.mean(party.group.rho)
            clients.halves.differ = clients.halves.differ or not still
            weight = float(self.halves.sizes[clients.ids].sum())
            worked.append((clients.halves, weight))
            self._noted(clients, party, weight)
        self.ledger.alongside(None)
        if not worked:
            raise NoSites(f"sites: none finished round {self.t}; {self.halves.sites.why()}")
        if isinstance(self.halves, MixedHalves):
            self.halves.join(worked)

    def in_turn(self, server: None) -> Iterator[tuple[RemoteClients, RemoteServer]]:
        mixed = self.halves if isinstance(self.halves, MixedHalves) else None
        for n in self.chosen:
            cohort = mixed.handed_to(n) if mixed else self.parts[0].halves
            clients = self._clients(cohort, [n], in_turn=True, optional=True)
            party = RemoteServer(clients, cohort.state.server)
            yield clients, party
            self._noted(clients, party, 1.0)
        if mixed:
            mixed.handed_to(self.chosen[-1])
        if not self.took_part:
            raise NoSites(f"sites: none finished round {self.t}; {self.halves.sites.why()}")

    def average(self, link: "ServerLink", codec: Codec = FP32) -> None:
        if isinstance(self.halves, MixedHalves):
            self._average_blocks(link, self.halves)
            return
        (clients,) = self.parts
        ids = list(clients.ids)
        halves = link.exchange(clients, weights=True, sync=codec)
        self.halves.stale |= set(ids) - set(halves)
        differ = not codec.exact and self.halves.differences.last is not None
        size, alone = self.halves.share(halves, codec.at(self.t))
        sizes = [clients.half_bytes[n] for n in halves]
        values = self.halves.state.client.travelling()
        coding = difference_work(values, codec.at(self.t)) if differ else (0.0, 0.0)
        sent = sizes if codec.varies or len(set(sizes)) > 1 else sizes[0]
        link.count("up", "model", sent, list(halves), coding=coding)
        fresh = [n for n in self.halves.fresh() if n not in alone]
        link.count("down", "model", size, fresh, broadcast=True, coding=coding)
        link.models("down", self.halves.state.client.travelling(), alone)

    def _average_blocks(self, link: "ServerLink", mixed: MixedHalves) -> None:
        """Every block over all copies of it."""
        came, sizes = list[tuple[Halves, dict[int, Weights]]](), dict[int, int]()
        for clients in self.parts:
            ids = list(clients.ids)
            halves = link.exchange(clients, weights=True) if ids else {}
            clients.halves.stale |= set(ids) - set(halves)
            came.append((clients.halves, halves))
            sizes |= {n: clients.half_bytes[n] for n in halves}
        mixed.share(came)
        up, fresh, held = sorted(sizes), mixed.fresh(), mixed.state.travelling()
        link.count("up", "model", [sizes[n] for n in up], up)
        link.models("down", [held[n] for n in fresh], fresh, broadcast=True)

    def close(self) -> None:
        """The round is over: where clients take the loss themselves, they have told it by now."""
        if self._losses:
            return
        for clients in self.parts:
            said = {n: loss for n, loss in clients.losses.items() if n in clients.ids}
            self._losses += [(float(self.halves.sizes[n]), loss) for n, loss in said.items()]
            self.took_part += said

    def _noted(self, clients: RemoteClients, party: RemoteServer, weight: float) -> None:
        """Who was there, and its loss if the server took it."""
        self.took_part += party.took_part
        if party.descents:
            self._losses.append((weight, party.total / party.descents))
        elif clients.in_turn and clients.ids:
            self.took_part += clients.ids
            self._losses.append((weight, clients.losses[clients.ids[0]]))

    def _clients(self, cohort: Halves, ids: Sequence[int], *, in_turn: bool, optional: bool) -> RemoteClients:
        turns = {"in_turn": in_turn, "optional": optional}
        return RemoteClients(self.kit, cohort, self.t, ids, self.train, self.ledger, **turns)
