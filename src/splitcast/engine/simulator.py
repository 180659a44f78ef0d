"""Rounds of any scheme in one process, vectorised over the clients.

The scheme's program (`schemes.program`) says what happens; here is only how many clients at a time, with which copies
of the weights. Where the client halves are equal and only their mean gradient matters, one copy serves all; halves
that are averaged at the end of the round have copies for the round; all others keep theirs. The server has a copy for
each client while there are several local steps, or the optimiser is not linear.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import seed_torch, stream, torch_seed
from splitcast.data.augment import find_augment
from splitcast.data.batches import draw_batches, in_turn, own_order, participants
from splitcast.engine.cohort import SimulatedCohort
from splitcast.engine.engine import RoundReport, evaluate, kept_tensors, restore_kept
from splitcast.engine.links import CountingLink, SimulatedLink
from splitcast.engine.mixed import AnyState, moved, restored, start
from splitcast.engine.party import Kit
from splitcast.engine.state import SHARES, State, check_sides, started
from splitcast.model.split import Params, SplitModel
from splitcast.schemes.choices import schemes_by_format
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import make_scheme, placed
from splitcast.training.defence import Defence
from splitcast.training.differences import Differences
from splitcast.training.factored import formed_values
from splitcast.training.optimiser import make_optimiser
from splitcast.training.passes import saved_bytes
from splitcast.training.placement import Placed, Placement
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task, headline_of
from splitcast.training.weights import Weights

ACTIVATION_BYTES = 2**29
"""Budget of the activations that are kept for the backward pass."""
CHUNK_BYTES = 2**27
"""Budget of a chunk of stacked clients, activations and formed gradients: half of it takes up to a tenth longer, since
calls are more and smaller, and twice as much is no faster."""
THROUGH = 10_000
"""Samples that are tested through the uplink's format as well, in the last test."""


@dataclass(frozen=True)
class Coded(Defence):
    """Whatever defence there is, and then a wire format."""

    codec: Codec = FP32

    @staticmethod
    def by(codec: Codec, defence: Defence | None) -> "Coded":
        """A format behind a defence."""
        return Coded(**(vars(defence) if defence else {}), codec=codec)

    def guard(self, smashed: Tensor) -> Tensor:
        return self.codec.through(super().guard(smashed))


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
        placement: Placed | None = None,
    ) -> None:
        self._scheme, self._formats = make_scheme(config), schemes_by_format(config)
        model = self._scheme.fitted(model)
        self.config, self.train, self.model, self.task = config, config.train, model, task
        self.runtime = Runtime.of(config.train)
        (mine, theirs), exact = self._scheme.rates, self._scheme.sync.exact
        self.optimiser = make_optimiser(config.train, mine, exact=exact)
        self.server_optimiser = make_optimiser(config.train, theirs, exact=exact, server=True)
        defence = Defence.of(config.defence, config.train.seed)
        self.kit = Kit(model, task, self.optimiser, self.runtime, defence)
        self.server_kit = replace(self.kit, optimiser=self.server_optimiser)
        self.x, self.y = self._here(x), self._here(y)
        self.sizes = np.array([len(part) for part in parts])
        self._rows = np.concatenate(parts)
        self._first = np.cumsum(self.sizes) - self.sizes
        self._orders: dict[int, np.ndarray] = {}
        shares = self._scheme.shares(self.sizes)
        self.shares = torch.from_numpy(shares).to(self.runtime.dtype)
        """rho^n (N,), where reading a value does not wait for a device"""
        self.weights = self.shares.to(self.runtime.device)
        self.augment = find_augment(config.data.augment)
        self.identical = config.split.client_update == "identical"
        placement = (placement or placed(config, self._scheme, model.depth)).check(model)
        if self.identical and any(self.kit.mixes(place, "client") for place in placement.kinds):
            raise SplitcastError("client_update: 'identical' needs layers that do not mix a batch, as BatchNorm does")
        if self.identical and config.train.clip_norm:
            raise SplitcastError("client_update: 'identical' has one gradient for all; leave clip_norm out")
        if self.identical and self.optimiser.at_sync != "average":
            raise SplitcastError("client_update: 'identical' has one state for all; leave optimizer_state out")
        self.kit.guard(placement)
        check_sides(config, placement)
        self.state: AnyState = start(self.initial(placement), placement)
        self.sample_bytes = saved_bytes(model)
        self.differences = Differences()
        self.done = 0
        """the last round that was run here"""
        self.server_copies: Weights | None = None
        """the copies of the last round, whose memory the next one takes over"""

    def copies_server(self, placement: Placement) -> bool:
        """Whether every client needs a copy of the server half."""
        if self._scheme.one_server:
            return False
        return not self.server_kit.one_copy(placement, "server", self.train.local_steps)

    def keeps(self, clients: int) -> bool:
        """Whether the graphs of so many clients fit into memory together."""
        return clients * self.train.batch * self.sample_bytes <= ACTIVATION_BYTES

    @property
    def scheme(self) -> Scheme:
        """The scheme, as it runs at the present placement."""
        return self._scheme.at(self.state.placement)

    def initial(self, placement: Placed | None = None) -> Weights:
        """The weights of the whole model at the start, by default for the present placement."""
        sides = (self.optimiser, self.server_optimiser)
        return started(self.model, placement or self.state.placement, sides, self.runtime)

    def place(self, placement: Placed, ledger: Ledger, *, charge: bool = True) -> None:
        """Move blocks before a round, counting what travels unless ``charge`` is off."""
        if placement == self.state.placement:
            return
        placement.check(self.model)
        clients, link = len(self.sizes), CountingLink(ledger)
        if isinstance(self.state, State) and isinstance(placement, Placement):
            down, up = self.state.move(placement, self.weights, self.optimiser)
            sent: tuple[int | list[int], int, Sequence[int]] = down, up, range(clients)
        else:
            self.state, each = moved(self.state, placement, clients)
            sent = list(each.values()), 0, list(each)
        self.differences.moved()
        if charge:
            self._scheme.moved(link, *sent)

    def send_as(self, uplink: str) -> None:
        """Smashed data travel in this format from now on."""
        self._scheme = self._formats[uplink]

    def round(self, t: int, ledger: Ledger | None = None, who: np.ndarray | None = None) -> RoundReport:
        """Run round ``t``, counted from 1, with these clients; by default with those that the configuration draws."""
        ledger = ledger or Ledger()
        who = participants(self.train, len(self.sizes), t) if who is None else who
        self.done = t
        self.optimiser.begin(t)
        self.server_optimiser.begin(t)
        if not self.scheme.sync.exact and isinstance(self.state, State):
            self.differences.begin(self.state.client)
        cohort = SimulatedCohort(self, t, who, ledger)
        with self.runtime.fork_rng():
            seed_torch(torch_seed(self.train.seed, "layers", t))
            self.scheme.round(t, cohort, self.state, SimulatedLink(ledger, self.train.seed))
        return RoundReport(cohort.mean_loss(), cohort.ids.tolist(), ledger)

    def drift(self) -> float:
        """Mean distance of the client halves from their average."""
        return self.state.drift(self.weights)

    def averaged(self) -> Params:
        """The whole model with the averaged client half."""
        return self.state.averaged(self.weights)

    def evaluate(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """The measures of the averaged model; of clients with models of their own (`Scheme.personal`) the mean."""
        x, y = self._here(x), self._here(y)
        if not self._scheme.personal:
            params = self.averaged()
            tested = self._measures(params, x, y)
            return tested | (self._lost(params, x[:THROUGH], y[:THROUGH]) if self._ended(tested) else {})
        one, found = torch.ones_like(self.weights[:1]), list[dict[str, float]]()
        for n, (first, size) in enumerate(zip(self._first, self.sizes, strict=True)):
            own = self.y[torch.from_numpy(self._rows[first : first + size]).to(self.runtime.device)]
            labels = y.dim() == 1 and not y.is_floating_point()
            mine = torch.isin(y, own) if labels else torch.ones(len(y), dtype=torch.bool, device=y.device)
            if mine.any():
                found.append(self._measures(self.state.of(n).averaged(one), x[mine], y[mine]))
        return {name: float(np.mean([each[name] for each in found])) for name in found[0]} if found else {}

    def _measures(self, params: Params, x: Tensor, y: Tensor, codec: Codec = FP32) -> dict[str, float]:
        with self.runtime.fork_rng():
            seed_torch(torch_seed(self.train.seed, "defence"))
            guard = self.kit.guard(self.state.placement)
            if not codec.exact:
                guard = self.state.placement.segments[0].stop, Coded.by(codec, self.kit.defence)
            return evaluate(self.model, params, self.task, x, y, self.runtime, guard=guard)

    def _ended(self, found: Mapping[str, float]) -> bool:
        """Whether a test with these measures is the last."""
        judged, goal = headline_of(self.task), self.train.stop_at
        return self.done >= self.train.rounds or bool(goal and judged.reached(found.get(judged.name, math.nan), goal))

    def _lost(self, params: Params, x: Tensor, y: Tensor) -> dict[str, float]:
        """What the headline loses on some samples if their smashed data pass the uplink's format: ``..._lost``."""
        place, codec, judged = self.state.placement, self.scheme.uplink.at(self.done), headline_of(self.task)
        if codec.exact or len(place.kinds) > 1 or place.segments[0].stop >= self.model.depth:
            return {}
        plain, sent = (self._measures(params, x, y, each).get(judged.name, math.nan) for each in (FP32, codec))
        return {f"{judged.name}_lost": (sent - plain) if judged.lower else plain - sent}

    def evaluate_clients(self, most: int) -> list[dict[str, float]]:
        """The measures of every client's model, with its own half where halves differ, on up to so many of its own
        training rows."""
        found = []
        for n, (first, size) in enumerate(zip(self._first, self.sizes, strict=True)):
            rows = torch.from_numpy(self._rows[first : first + min(size, most)]).to(self.runtime.device)
            mine = self.state.of(n).averaged(torch.ones_like(self.weights[:1]))
            found.append(self._measures(mine, self.x[rows], self.y[rows]))
        return found

    def snapshot(self, t: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a checkpoint after round ``t`` holds."""
        tensors = self.state.tensors() | self.differences.tensors() | kept_tensors(self._scheme)
        return tensors | {SHARES: self.weights}, self.state.about()

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], t: int) -> None:
        """Go on after round ``t``."""
        self.state = restored(tensors, about, len(self.sizes), self._scheme, self.model.depth, self.initial)
        self.differences = Differences.from_tensors(tensors, self.runtime.device)
        restore_kept(self._scheme, tensors)

    def _here(self, samples: Tensor) -> Tensor:
        """Samples or targets where they are computed with; whole numbers (labels, tokens) stay whole."""
        dtype = self.runtime.dtype if samples.is_floating_point() else samples.dtype
        return samples.to(self.runtime.device, dtype)

    def rows(self, t: int, step: int, clients: np.ndarray) -> Tensor:
        """Rows of ``x`` (K, b) of a local step."""
        local = draw_batches(self.sizes, self.train.batch, stream(self.train.seed, "batch", t, step))
        return torch.from_numpy(self._rows[(self._first[:, None] + local)[clients]])

    def in_order(self, places: np.ndarray, clients: np.ndarray) -> Tensor:
        """Rows of ``x`` (K, b) at these places, (b,) or (K, b), of an order of each client's own."""
        for n in clients.tolist():
            if n not in self._orders:
                self._orders[n] = own_order(self.train.seed, n, int(self.sizes[n]))
        each = np.broadcast_to(places, (len(clients), places.shape[-1]))
        orders = [in_turn(self._orders[n], some) for n, some in zip(clients.tolist(), each, strict=True)]
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
            if (stacks_client if segment.side == "client" else self.copies_server(placement))
            and not self.model.only_adapters(segment.start, segment.stop)  # of which a pass takes many
            for block in self.model.blocks[segment.start : segment.stop]
        ]
        activations = self.train.batch * self.sample_bytes
        budget = CHUNK_BYTES if stacked else ACTIVATION_BYTES
        size = max(1, budget // (activations + 4 * formed_values(stacked)))
        spans = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        if mixes:
            return [(slice(0, count), spans)]
        return [(span, [slice(0, span.stop - span.start)]) for span in spans]
