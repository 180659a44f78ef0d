"""Rounds of any scheme in one process, vectorised over the clients.

Where the client halves are equal, and on the server when there is one local step, all clients' samples go through
one concatenated pass, and the weighted gradient is exact by linearity. Where copies differ they are stacked and
run together. Clients are taken in chunks, so that activations and gradients stay within a budget
whatever N is.

A round, for i = 1..tau: each client draws b rows, runs its half, uploads codec(S^n) and labels; the server runs
its copy w^{s,n}, takes g^{s,n} and s^n, and steps; the feedback returns; client n pulls what it received back
through its own activations and steps. Then w^s = sum rho^n w^{s,n}, and the client halves are averaged if the
scheme says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.config import TrainConfig
from splitcast.data.batches import draw_batches, participants
from splitcast.engine.factored import formed_values
from splitcast.engine.state import Half, State
from splitcast.engine.step import Descent, Pass, client_backward, saved_bytes, server_pass
from splitcast.schemes.messages import Ledger
from splitcast.schemes.noise import Noise
from splitcast.schemes.schemes import Scheme
from splitcast.seeds import stream, torch_seed
from splitcast.split import Params, SplitModel

ACTIVATION_BYTES = 2**29
"""Budget of the activations that are kept for the backward pass."""
CHUNK_BYTES = 2**26
"""Budget of a chunk of stacked clients, activations and formed gradients: while single tensors stay well below 32 MB
the C library hands freed memory out again; beyond, every step pays for fresh pages, more than for the arithmetic."""


@dataclass(frozen=True)
class Measured:
    """A round that really travelled."""

    seconds: dict[str, float]
    """wall-clock seconds of its parts: upload, server, download, client"""
    failures: dict[str, str]
    """sites that failed in it, each with its last reason"""


@dataclass(frozen=True)
class RoundReport:
    """What a round did."""

    loss: float
    """Training loss, sum_n rho^n F^n, averaged over the local steps."""
    clients: list[int]
    """Who took part."""
    ledger: Ledger
    measured: "Measured | None" = None
    """Where sites are elsewhere: what really happened on the way."""

    @property
    def rank(self) -> float | None:
        """Directions in the broadcast basis, averaged over the local steps; None without one."""
        cuts = self.ledger.truncations
        return sum(cut.rank for cut in cuts) / len(cuts) if cuts else None

    @property
    def gamma(self) -> float | None:
        """sum_n rho^n ||s^n - sent^n||^2 that the rank dropped, before rounding, averaged over the local steps."""
        cuts = self.ledger.truncations
        return sum(cut.dropped for cut in cuts) / len(cuts) if cuts else None

    @property
    def dropped_energy(self) -> float | None:
        """The same as a share of sum_n rho^n ||s^n||^2, the greatest of the local steps."""
        cuts = self.ledger.truncations
        return max(cut.dropped / cut.energy if cut.energy else 0.0 for cut in cuts) if cuts else None


@torch.no_grad()
def evaluate(model: SplitModel, params: Params, x: Tensor, y: Tensor, batch: int = 50) -> tuple[float, float]:
    """Loss and accuracy of a whole model."""
    loss, right = 0.0, 0
    with model.evaluating():
        for xs, ys in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
            logits = model.forward(params, xs, 0, model.depth)
            loss += float(F.cross_entropy(logits, ys, reduction="sum"))
            right += int((logits.argmax(1) == ys).sum())
    return loss / len(y), right / len(y)


class Simulator:
    """All clients and the server in one process.

    ``x`` (rows, ...) and ``y`` (rows,) hold everybody's samples, ``parts[n]`` the rows that client n owns.
    """

    def __init__(
        self,
        model: SplitModel,
        scheme: Scheme,
        cut: int,
        x: Tensor,
        y: Tensor,
        parts: Sequence[np.ndarray],
        train: TrainConfig,
    ) -> None:
        self.model, self._scheme, self.train = model, scheme, train
        self.x, self.y = x, y
        self.classes = int(y.max()) + 1
        self.sizes = np.array([len(part) for part in parts])
        self._rows = np.concatenate(parts)
        self._first = np.cumsum(self.sizes) - self.sizes
        self.weights = torch.from_numpy(self.sizes / self.sizes.sum()).to(x.dtype)
        cut = model.depth if scheme.whole_model else model.check_cut(cut)
        self.state = State.start(model.initial(x.dtype), cut, momentum=train.momentum > 0)
        self._descent = Descent(train.lr, train.momentum)
        self._sample_bytes = saved_bytes(model)

    @property
    def scheme(self) -> Scheme:
        """The scheme, as it runs at the present cut."""
        return self._scheme.at(self.state.cut)

    def recut(self, cut: int, ledger: Ledger, *, charge: bool = True) -> None:
        """Move the cut before a round, counting what travels unless ``charge`` is off."""
        self.model.check_cut(cut)
        if cut == self.state.cut or self.scheme.whole_model:
            return
        down, up = self.state.recut(cut, self.weights)
        if charge and not self.scheme.sequential:  # who is next is handed the whole half anyway
            everyone = range(len(self.sizes))
            ledger.broadcast("migration", 4 * down, everyone)
            ledger.unicast("up", "migration", 4 * up, everyone)

    def round(self, t: int, ledger: Ledger | None = None) -> RoundReport:
        """Run round ``t``, counted from 1."""
        ledger = ledger or Ledger()
        clients = self._participants(t)
        rows = self._batches(t, clients)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(self.train.seed, "layers", t))
            if self.scheme.sequential:
                loss = self._in_turn(t, clients, rows, ledger)
            else:
                loss = self._in_parallel(t, clients, rows, ledger, averages=self.scheme.syncs(t))
        if self.scheme.sequential or self.scheme.syncs(t):
            values = self.model.client_size(self.state.cut) * (2 if self.train.momentum else 1)
            self.scheme.send_models(values, ledger, clients.tolist(), range(len(self.sizes)))
        return RoundReport(loss, clients.tolist(), ledger)

    def drift(self) -> float:
        """Mean distance of the client halves from their average."""
        return self.state.client.drift(self.weights)

    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy of the averaged model."""
        return evaluate(self.model, self.state.averaged(self.weights), x, y)

    def snapshot(self, t: int) -> State:
        """What a checkpoint after round ``t`` holds."""
        return self.state

    def resume(self, state: State, t: int) -> None:
        """Go on after round ``t``."""
        self.state = state

    def _participants(self, t: int) -> Tensor:
        return torch.from_numpy(participants(self.train, len(self.sizes), t))

    def _batches(self, t: int, clients: Tensor) -> Tensor:
        """Rows of ``x`` for every step and client (tau, K, b)."""
        steps = []
        for i in range(self.train.local_steps):
            local = draw_batches(self.sizes, self.train.batch, stream(self.train.seed, "batch", t, i))
            steps.append(self._rows[self._first[:, None] + local][clients.numpy()])
        return torch.from_numpy(np.stack(steps))

    def _in_parallel(self, t: int, clients: Tensor, rows: Tensor, ledger: Ledger, *, averages: bool) -> float:
        state, tau, identical = self.state, self.train.local_steps, self.scheme.identical
        rho = self.weights[clients] / self.weights[clients].sum()
        everyone = len(clients) == len(self.sizes)
        # Equal halves of which only the mean gradient matters need no copies; halves that are averaged at the
        # end need them for the round only; all others keep theirs.
        shared = not state.client.stacked and (identical or (averages and tau == 1))
        lasting = not shared and (state.client.stacked or not averages)
        if lasting:
            if not state.client.stacked:
                state.client = state.client.stack(len(self.sizes))
            copies = state.client if everyone else state.client.take(clients)

        mixes = self.scheme.feedback.mixes_clients or identical
        client_mean: Half | None = None
        server_mean: Half | None = None
        loss = 0.0
        for members, chunks in self._groups(len(clients), stacks_client=not shared, mixes=mixes):
            share, ids = rho[members], clients[members].tolist()
            client = state.client if shared else copies.take(members) if lasting else state.client.stack(len(ids))
            server = state.server if tau == 1 else state.server.stack(len(ids))
            for i in range(tau):
                noise = Noise(self.train.seed, t, i)
                loss += self._step(client, server, rows[i, members], share, ids, chunks, ledger, noise) / tau
                if identical:
                    client.flush(*self._descent)
            if server.stacked:
                server_mean = server.mean(share).plus(server_mean)
            if not shared and not lasting:
                client_mean = client.mean(share).plus(client_mean)

        state.server.flush(*self._descent)
        state.server = server_mean or state.server
        if shared:
            state.client.flush(*self._descent)
        elif averages:
            state.client = client_mean or copies.mean(rho)
        elif not everyone:
            state.client.put(clients, copies)
        return loss

    def _in_turn(self, t: int, clients: Tensor, rows: Tensor, ledger: Ledger) -> float:
        """Vanilla split learning: one server half, one client half handed from client to client."""
        one, state, loss = torch.ones(1, dtype=self.x.dtype), self.state, 0.0
        for position, client in enumerate(clients.tolist()):
            for i in range(self.train.local_steps):
                batch = rows[i, position : position + 1]
                noise = Noise(self.train.seed, t, i)
                loss += self._step(state.client, state.server, batch, one, [client], [slice(0, 1)], ledger, noise)
                state.client.flush(*self._descent)
                state.server.flush(*self._descent)
        return loss / (len(clients) * self.train.local_steps)

    def _step(
        self,
        client: Half,
        server: Half,
        rows: Tensor,
        rho: Tensor,
        ids: Sequence[int],
        chunks: list[slice],
        ledger: Ledger,
        noise: Noise,
    ) -> float:
        """One local step of the clients ``ids``; returns their share of the loss, sum_n rho^n F^n."""
        model, scheme, cut = self.model, self.scheme, self.state.cut
        keep = rows.numel() * self._sample_bytes <= ACTIVATION_BYTES or len(chunks) == 1
        kept: list[Pass] = []
        luck: list[Tensor] = []
        grads: list[Tensor] = []
        loss = 0.0
        for chunk in chunks:
            luck.append(torch.get_rng_state())
            sent = Pass(model, client, chunk, self.x[rows[chunk]], 0, cut)
            smashed = sent.output.detach()
            # to the nearest grid point: what comes next is not linear, so being right on average would not help
            seen = smashed if scheme.whole_model else scheme.uplink.through(smashed)
            labels = self.y[rows[chunk]]
            losses, grad = server_pass(model, cut, server, seen, labels, rho[chunk], chunk, self._descent)
            loss += float(rho[chunk] @ losses)
            grads.append(grad)
            if keep:
                kept.append(sent)
        scheme.send_smashed((self.train.batch, *model.smashed_shape(cut)), self.classes, ledger, ids)
        all_grads = grads[0] if len(grads) == 1 else torch.cat(grads)
        del grads
        if scheme.whole_model:
            received = all_grads
        else:
            received = scheme.feedback.reply(all_grads, rho, scheme.downlink, ledger, ids, noise)
        for chunk, state in zip(chunks, luck, strict=True):
            if keep:
                sent = kept.pop(0)
            else:  # the graphs do not fit into memory together: the clients' half runs again, with the same luck
                with torch.random.fork_rng(devices=[]):
                    torch.set_rng_state(state)
                    sent = Pass(model, client, chunk, self.x[rows[chunk]], 0, cut)
            back = received[chunk] if len(received) > 1 else received
            client_backward(sent, back, rho[chunk], self._descent)
        return loss

    def _groups(self, count: int, *, stacks_client: bool, mixes: bool) -> list[tuple[slice, list[slice]]]:
        """Participants that must move through the round together, each with chunks, relative to its start.

        Without mixing feedback every chunk is a group of its own, done with all its local steps before the next
        starts; with it there is one group.
        """
        blocks, cut = self.model.blocks, self.state.cut
        stacked = (blocks[:cut] if stacks_client else []) + (blocks[cut:] if self.train.local_steps > 1 else [])
        activations = self.train.batch * self._sample_bytes
        budget = CHUNK_BYTES if stacked else ACTIVATION_BYTES
        size = max(1, budget // (activations + 4 * formed_values(stacked)))
        spans = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        if mixes:
            return [(slice(0, count), spans)]
        return [(span, [slice(0, span.stop - span.start)]) for span in spans]
