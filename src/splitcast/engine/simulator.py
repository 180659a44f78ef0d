"""Rounds of any scheme in one process, vectorised over the clients.

The scheme's program (`schemes.program`) says what happens; here is only how many clients at a time, with which copies
of the weights. Where the client halves are equal and only their mean gradient matters, one copy serves all; halves
that are averaged at the end of the round have copies for the round; all others keep theirs. The server has a copy for
each client while there are several local steps, or the optimiser is not linear.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream, torch_seed
from splitcast.data.augment import Augment, augmented, find_augment
from splitcast.data.batches import draw_batches, in_turn, own_order, participants
from splitcast.engine.engine import RoundReport, evaluate, kept_tensors, restore_kept
from splitcast.engine.links import CountingLink, SimulatedLink
from splitcast.engine.party import Group, Kit, LocalParty, mean_loss
from splitcast.engine.state import State
from splitcast.engine.values import PerClient, Rows
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Batch, Scheme, Values
from splitcast.schemes.schemes import make_scheme
from splitcast.training.differences import Differences
from splitcast.training.factored import formed_values
from splitcast.training.optimiser import make_optimiser
from splitcast.training.passes import saved_bytes
from splitcast.training.placement import Placement
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task
from splitcast.training.weights import Weights

ACTIVATION_BYTES = 2**29
"""Budget of the activations that are kept for the backward pass."""
CHUNK_BYTES = 2**26
"""Budget of a chunk of stacked clients, activations and formed gradients: while single tensors stay well below 32 MB
the C library hands freed memory out again; beyond, every step pays for fresh pages, more than for the arithmetic."""


class Simulator:
    """All clients and the server in one process.

    ``x`` (rows, ...) and ``y`` (rows, ...) hold everybody's samples, ``parts[n]`` the rows that client n owns.
    """

    def __init__(
        self,
        config: Config,
        model: SplitModel,
        task: Task,
        x: Tensor,
        y: Tensor,
        parts: Sequence[np.ndarray],
        *,
        placement: Placement | None = None,
    ) -> None:
        self._scheme = make_scheme(config)
        model = self._scheme.fitted(model)
        self.config, self.train, self.model, self.task = config, config.train, model, task
        self.runtime = Runtime.of(config.train)
        self.optimiser = make_optimiser(config.train)
        self.kit = Kit(model, task, self.optimiser, self.runtime)
        self.x, self.y = self._here(x), self._here(y)
        self.sizes = np.array([len(part) for part in parts])
        self._rows = np.concatenate(parts)
        self._first = np.cumsum(self.sizes) - self.sizes
        self._orders: dict[int, np.ndarray] = {}
        self.weights = torch.from_numpy(self.sizes / self.sizes.sum()).to(self.runtime.device, self.runtime.dtype)
        self.augment = find_augment(config.data.augment)
        self.identical = config.split.client_update == "identical"
        placement = (placement or self._scheme.place(config.split.cut, model.depth)).check(model)
        if self.identical and self.kit.mixes(placement, "client"):
            raise SplitcastError("client_update: 'identical' needs layers that do not mix a batch, as BatchNorm does")
        if self.identical and config.train.clip_norm:
            raise SplitcastError("client_update: 'identical' has one gradient for all; leave clip_norm out")
        self.state = State.start(self.initial(), placement)
        self.sample_bytes = saved_bytes(model)
        self.differences = Differences()

    @property
    def copies_server(self) -> bool:
        """Whether every client needs a copy of the server half."""
        if self._scheme.one_server:
            return False
        return not self.kit.one_copy(self.state.placement, "server", self.train.local_steps)

    @property
    def scheme(self) -> Scheme:
        """The scheme, as it runs at the present placement."""
        return self._scheme.at(self.state.placement)

    def initial(self) -> Weights:
        """The weights of the whole model at the start."""
        model, dtype = self.model, self.runtime.dtype
        params, buffers, frozen = (
            {k: v.to(self.runtime.device) for k, v in part.items()}
            for part in (model.initial(dtype), model.buffers(dtype), model.frozen(dtype))
        )
        return Weights.start(params, self.optimiser, buffers, frozen)

    def place(self, placement: Placement, ledger: Ledger, *, charge: bool = True) -> None:
        """Move blocks before a round, counting what travels unless ``charge`` is off."""
        if placement == self.state.placement:
            return
        down, up = self.state.move(placement.check(self.model), self.weights)
        self.differences.moved()
        if charge:
            everyone, link = range(len(self.sizes)), CountingLink(ledger)
            self._scheme.moved(link, down, up, everyone)

    def round(self, t: int, ledger: Ledger | None = None) -> RoundReport:
        """Run round ``t``, counted from 1."""
        ledger = ledger or Ledger()
        self.optimiser.begin(t)
        if not self.scheme.sync.exact:
            self.differences.begin(self.state.client)
        cohort = SimulatedCohort(self, t, participants(self.train, len(self.sizes), t), ledger)
        with self.runtime.fork_rng():
            torch.manual_seed(torch_seed(self.train.seed, "layers", t))
            self.scheme.round(t, cohort, self.state, SimulatedLink(ledger, self.train.seed))
        return RoundReport(cohort.mean_loss(), cohort.ids.tolist(), ledger)

    def drift(self) -> float:
        """Mean distance of the client halves from their average."""
        return self.state.client.drift(self.weights)

    def evaluate(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """The measures of the averaged model."""
        return evaluate(self.model, self.state.averaged(self.weights), self.task, self._here(x), self._here(y))

    def evaluate_clients(self, most: int) -> list[dict[str, float]]:
        """The measures of every client's model, with its own half where halves differ, on up to so many of its own
        training rows."""
        found = []
        for n, (first, size) in enumerate(zip(self._first, self.sizes, strict=True)):
            rows = torch.from_numpy(self._rows[first : first + min(size, most)]).to(self.runtime.device)
            client = self.state.client.take(slice(n, n + 1)) if self.state.client.stacked else self.state.client
            mine = State(self.state.placement, client, self.state.server).averaged(torch.ones_like(self.weights[:1]))
            found.append(evaluate(self.model, mine, self.task, self.x[rows], self.y[rows]))
        return found

    def snapshot(self, t: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a checkpoint after round ``t`` holds."""
        tensors = self.state.tensors() | self.differences.tensors() | kept_tensors(self._scheme)
        return tensors, {"cut": str(self.state.placement.cut), "copies": str(self.state.client.copies)}

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], t: int) -> None:
        """Go on after round ``t``."""
        placement = self._scheme.place(min(int(about["cut"]), self.model.depth - 1), self.model.depth)
        self.state = State.from_tensors(tensors, placement, int(about["copies"]), self.initial())
        self.differences = Differences.from_tensors(tensors)
        restore_kept(self._scheme, tensors)

    def _here(self, samples: Tensor) -> Tensor:
        """Samples or targets where they are computed with; whole numbers (labels, tokens) stay whole."""
        dtype = self.runtime.dtype if samples.is_floating_point() else samples.dtype
        return samples.to(self.runtime.device, dtype)

    def rows(self, t: int, step: int, clients: np.ndarray) -> Tensor:
        """Rows of ``x`` (K, b) of a local step."""
        local = draw_batches(self.sizes, self.train.batch, stream(self.train.seed, "batch", t, step))
        return torch.from_numpy(self._rows[(self._first[:, None] + local)[clients]])

    def in_order(self, first: int, clients: np.ndarray) -> Tensor:
        """Rows of ``x`` (K, b) from place ``first`` on in an order of each client's own."""
        for n in clients.tolist():
            if n not in self._orders:
                self._orders[n] = own_order(self.train.seed, n, int(self.sizes[n]))
        orders = [in_turn(self._orders[n], first, self.train.batch) for n in clients.tolist()]
        return torch.from_numpy(self._rows[self._first[clients, None] + np.stack(orders)])

    def groups(
        self, count: int, placement: Placement, *, stacks_client: bool, mixes: bool
    ) -> list[tuple[slice, list[slice]]]:
        """Participants that must move through the round together, each with chunks, relative to its start.

        Without mixing every chunk is a group of its own, done with all its local steps before the next starts; with it
        there is one group.
        """
        stacked = [
            block
            for segment in placement.segments
            if (stacks_client if segment.side == "client" else self.copies_server)
            for block in self.model.blocks[segment.start : segment.stop]
        ]
        activations = self.train.batch * self.sample_bytes
        budget = CHUNK_BYTES if stacked else ACTIVATION_BYTES
        size = max(1, budget // (activations + 4 * formed_values(stacked)))
        spans = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        if mixes:
            return [(slice(0, count), spans)]
        return [(span, [slice(0, span.stop - span.start)]) for span in spans]


class SimulatedClients(LocalParty):
    """Clients of a group, with their samples."""

    def __init__(
        self, cohort: "SimulatedCohort", weights: Weights, group: Group, server: LocalParty, alone: bool
    ) -> None:
        sim = cohort.sim
        super().__init__(sim.kit, sim.state.placement, weights, group, cohort.ledger)
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

    def samples(self, first: int) -> Iterator[Batch]:
        sim = self.cohort.sim
        rows = sim.in_order(first, np.array(self.group.ids)).to(sim.runtime.device)
        yield from self._one(Rows(sim.x, rows, self.group.spans), rows)

    def _one(self, x: Values, rows: Tensor) -> Iterator[Batch]:
        yield Batch(x, Rows(self.cohort.sim.y, rows, self.group.spans))
        if self.alone:  # else other groups have yet to contribute
            self.step()
            self.server.step()

    def mark(self) -> None:
        state = self.cohort.sim.state
        state.marked = state.client.mean(self.cohort.sim.weights).snapshot()

    def moved(self, segment: int, x: Values | Tensor) -> Tensor:
        marked = self.cohort.sim.state.marked
        assert marked is not None
        return self.change(marked, segment, x)

    def _augmented(self, augment: Augment, step: int, x: Tensor, who: slice) -> Tensor:
        return augmented(augment, x, self.cohort.sim.train.seed, self.group.round, step, self.group.ids[who])

    def receive(self, link: CountingLink) -> None:
        link.models("down", self.weights.travelling(), self.group.ids)

    def hand_in(self, link: CountingLink) -> None:
        link.models("up", self.weights.travelling(), self.group.ids)


class SimulatedCohort:
    """The clients of a round."""

    def __init__(self, sim: Simulator, t: int, ids: np.ndarray, ledger: Ledger) -> None:
        self.sim, self.t, self.ids, self.ledger = sim, t, ids, ledger
        shares = sim.weights[torch.from_numpy(ids)]
        self.rho = shares / shares.sum()
        self.loss = 0.0
        self._central: LocalParty | None = None
        self._drawn: dict[int, Tensor] = {}

    def mean_loss(self) -> float:
        """Of the server where it trained on its own, else of the server for the clients, else of the clients."""
        own = self._central
        return float(own.total) / own.descents if own and own.descents else float(self.loss)

    def rows(self, step: int, clients: np.ndarray) -> Tensor:
        """Rows (K, b) of a local step; all are drawn at once, and kept while groups take turns."""
        if step not in self._drawn:
            self._drawn[step] = self.sim.rows(self.t, step, np.arange(len(self.sim.sizes)))
        return self._drawn[step][torch.from_numpy(clients)].to(self.sim.runtime.device)

    def in_parallel(
        self, server: State, *, mixes: bool, averaged: bool, still: bool = False
    ) -> Iterator[tuple[SimulatedClients, LocalParty]]:
        sim, state, tau = self.sim, server, self.sim.train.local_steps
        clients, optimiser = torch.from_numpy(self.ids), sim.kit.optimiser
        everyone = len(clients) == len(sim.sizes)
        alike = averaged and not sim.scheme.many_steps and sim.kit.one_copy(state.placement, "client", tau)
        alike = alike or (still and not sim.kit.mixes(state.placement, "client"))
        shared = not state.client.stacked and (sim.identical or alike)
        lasting = not shared and (state.client.stacked or not averaged)
        if lasting:
            if not state.client.stacked:
                state.client = state.client.stack(len(sim.sizes))
            copies = state.client if everyone else state.client.take(clients)
        client_mean: Weights | None = None
        server_mean: Weights | None = None
        groups = sim.groups(len(clients), state.placement, stacks_client=not shared, mixes=mixes or sim.identical)
        start = len(self.ledger.events)
        for members, spans in groups:
            self.ledger.alongside(start)
            ids = self.ids[members].tolist()
            keep = len(spans) == 1 or len(ids) * sim.train.batch * sim.sample_bytes <= ACTIVATION_BYTES
            group = Group(ids, self.rho[members], spans, keep, self.t)
            client = state.client if shared else copies.take(members) if lasting else state.client.stack(len(ids))
            theirs = state.server.stack(len(ids)) if sim.copies_server else state.server
            party = LocalParty(sim.kit, state.placement, theirs, group, self.ledger)
            some = SimulatedClients(self, client, group, party, alone=len(groups) == 1)
            yield some, party
            self.loss += mean_loss(party, some)
            if theirs.stacked:
                server_mean = theirs.mean(group.rho).plus(server_mean)
            if not shared and not lasting:
                client_mean = client.mean(group.rho).plus(client_mean)
        self.ledger.alongside(None)
        state.server.step(optimiser)
        state.server = server_mean or state.server
        if shared:
            state.client.step(optimiser)
        elif averaged:
            state.client = client_mean or copies.mean(self.rho)
        elif not everyone:
            state.client.put(clients, copies)

    def in_turn(self, server: State) -> Iterator[tuple[SimulatedClients, LocalParty]]:
        sim, state = self.sim, server
        one = torch.ones(1, dtype=sim.runtime.dtype, device=sim.runtime.device)
        for n in self.ids.tolist():
            group = Group([n], one, [slice(0, 1)], keep=True, round=self.t)
            party = LocalParty(sim.kit, state.placement, state.server, group, self.ledger)
            client = SimulatedClients(self, state.client, group, party, alone=True)
            yield client, party
            self.loss += mean_loss(party, client, len(self.ids))

    def central(self, server: State) -> LocalParty:
        one = torch.ones(1, dtype=self.sim.runtime.dtype, device=self.sim.runtime.device)
        group = Group(self.ids.tolist(), one, [slice(0, 1)], keep=True, round=self.t)
        self._central = LocalParty(self.sim.kit, server.placement, server.server, group, self.ledger)
        return self._central

    def average(self, link: CountingLink, codec: Codec = FP32) -> None:
        state, everyone = self.sim.state, range(len(self.sim.sizes))
        if state.client.stacked and not codec.exact and self.sim.differences.last is not None:
            halves, ids = state.client.take(torch.from_numpy(self.ids)), self.ids.tolist()
            state.client, sizes, size = self.sim.differences.average(halves, ids, self.rho, codec.at(self.t))
            link.count("up", "model", sizes if codec.varies else sizes[0], ids)
            link.count("down", "model", size, everyone, broadcast=True)
            return
        if state.client.stacked:
            state.client = state.client.take(torch.from_numpy(self.ids)).mean(self.rho)
        link.models("up", state.client.travelling(), self.ids.tolist())
        link.models("down", state.client.travelling(), everyone, broadcast=True)
