"""Rounds of any scheme with the clients elsewhere: the server's side of the protocol.

The server half, the feedback, the codecs and the ledger are those of the simulator; what differs is that messages are
packed, travel, and are checked (`engine.wire`), and that sites may fail (`engine.roster`). A site that fails is out for
the rest of the round, and rho is renormalised over the others.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splitcast.config import Config, to_toml
from splitcast.data.batches import participants
from splitcast.engine.halves import Halves
from splitcast.engine.roster import Limits, Line, NoSites, Roster
from splitcast.engine.simulator import Measured, RoundReport, evaluate
from splitcast.engine.state import Half, State
from splitcast.engine.step import Descent, server_pass
from splitcast.engine.wire import Transcript, all_finite, opened, opened_labels
from splitcast.errors import SplitcastError
from splitcast.schemes.messages import Ledger
from splitcast.schemes.noise import Noise
from splitcast.schemes.schemes import Scheme, scheme
from splitcast.split import SplitModel


class Federation:
    """An engine (`engine.engine.Engine`) whose clients are sites."""

    def __init__(
        self,
        config: Config,
        model: SplitModel,
        classes: int,
        cut: int,
        names: Sequence[str],
        line: Line,
        limits: Limits,
        *,
        run: str = "run",
        absent: Sequence[int] = (),
    ) -> None:
        """``names`` are the sites in the order of the client numbers; those in ``absent`` cannot be called."""
        refuse_what_cannot_travel(config, len(names))
        self.model, self.classes, self.train = model, classes, config.train
        self._scheme = scheme(config.split)
        self.descent = Descent(config.train.lr, config.train.momentum)
        self.roster = Roster(names, line, limits, set(range(len(names))) - set(absent))
        sizes = self._join(config, run)
        cut = model.depth if self._scheme.whole_model else model.check_cut(cut)
        momentum = config.train.momentum > 0
        state = State.start(model.initial(), cut, momentum=momentum)
        self.halves = Halves(state, model.initial(), self.roster, sizes, momentum=momentum)

    @property
    def state(self) -> State:
        """Where the cut is, the server half, and the client half where it is known."""
        return self.halves.state

    @property
    def scheme(self) -> Scheme:
        """The scheme, as it runs at the present cut."""
        return self._scheme.at(self.state.cut)

    def start(self) -> None:
        """Begin at round 1: the sites forget what an earlier run of the same name left."""
        self.halves.restore(0)

    def resume(self, state: State, t: int) -> None:
        self.halves.state = state
        self.halves.differ = not (self.scheme.sequential or self.scheme.syncs(t))
        self.halves.restore(t)

    def recut(self, cut: int, ledger: Ledger, *, charge: bool = True) -> None:
        self.model.check_cut(cut)
        if cut != self.state.cut and not self.scheme.whole_model:
            self.halves.recut(cut, ledger, charge=charge, travels=not self.scheme.sequential)

    def round(self, t: int, ledger: Ledger | None = None) -> RoundReport:
        ledger = ledger or Ledger()
        if not self.scheme.sequential:
            self.halves.refresh()
        self.halves.collected = None
        chosen = [int(n) for n in participants(self.train, len(self.roster.names), t) if n in self.roster.present]
        chosen = chosen or sorted(self.roster.present)  # those that were drawn are gone
        run = self._whole if self.scheme.whole_model else self._in_turn if self.scheme.sequential else self._in_parallel
        loss, took_part, handed_in = run(t, chosen, ledger)
        if self.scheme.sequential or self.scheme.syncs(t):
            values = self.model.client_size(self.state.cut) * (2 if self.train.momentum else 1)
            self.scheme.send_models(values, ledger, handed_in, self.halves.fresh())
        return RoundReport(loss, took_part, ledger, Measured(*self.roster.turn_page()))

    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        return evaluate(self.model, self.halves.average().params | self.state.server.params, x, y)

    def drift(self) -> float | None:
        return self.halves.drift()

    def snapshot(self, t: int) -> State:
        """The averaged client half and the server half; sites whose halves differ keep their own."""
        average = self.halves.average()
        self.halves.keep(t)
        return State(self.state.cut, average, self.state.server)

    def _join(self, config: Config, run: str) -> np.ndarray:
        """Tell the sites what is trained; returns how many rows each has, 0 for those that cannot take part."""
        about = {"clients": len(self.roster.names), "input_shape": list(self.model.input_shape)}
        about |= {"classes": self.classes, "config": to_toml(config), "run": run}
        asked = {n: about | {"client": n} for n in sorted(self.roster.present)}
        rows = self.roster.read(self.roster.ask("join", asked, "download"), lambda answer: int(answer["rows"]))
        self.roster.present &= set(rows)
        if len(rows) < self.roster.limits.min_sites:
            joined = f"{len(rows)} of {len(self.roster.names)} joined, {self.roster.limits.min_sites} needed"
            raise NoSites(f"sites: {joined}; {self.roster.why()}")
        return np.array([rows.get(n, 0) for n in range(len(self.roster.names))])

    def _in_parallel(self, t: int, ids: list[int], ledger: Ledger) -> tuple[float, list[int], list[int]]:
        """The loss, who took part, and who sent its half to be averaged."""
        tau, server, loss = self.train.local_steps, self.state.server, 0.0
        took_part, members = list[int](), list[int]()
        for i in range(tau):
            seen, labels, ids = self._forward(t, i, ids)
            if tau > 1:
                server = server.take(_positions(ids, members)) if server.stacked else server.stack(len(ids))
            share, members, server, ids = self._exchange(t, i, ids, server, seen, labels, ledger)
            loss += share / tau
            took_part = took_part or members
        self.state.server.flush(*self.descent)
        if server.stacked:
            self.state.server = server.mean(self.halves.rho(members))
        self.halves.differ = True
        return loss, took_part, self.halves.average_among(ids) if self.scheme.syncs(t) else []

    def _in_turn(self, t: int, ids: list[int], ledger: Ledger) -> tuple[float, list[int], list[int]]:
        """Vanilla split learning: the client half is handed on through the server."""
        loss, steps, done = 0.0, 0, list[int]()
        for n in ids:
            left = self.halves.give([n])
            for i in range(self.train.local_steps):
                if not left:
                    break
                try:
                    seen, labels, _ = self._forward(t, i, [n])
                except NoSites:
                    left = []
                    break
                share, _, _, left = self._exchange(t, i, [n], self.state.server, seen, labels, ledger)
                self.state.server.flush(*self.descent)
                loss, steps = loss + share, steps + 1
            for half in self.halves.hand_in(left).values():
                self.state.client = half
                done.append(n)
        if not done:
            raise NoSites(f"sites: none finished round {t}; {self.roster.why()}")
        return loss / steps, done, done

    def _whole(self, t: int, ids: list[int], ledger: Ledger) -> tuple[float, list[int], list[int]]:
        """FedAvg: the sites train the whole model."""
        answers = self.roster.ask("train", {n: {"round_": t} for n in ids}, "upload")
        came = self.roster.read(answers, lambda a: (float(a["loss"]), self.halves.opened(a["half"])))
        if not came:
            raise NoSites(f"sites: none finished round {t}; {self.roster.why()}")
        self.halves.stale |= set(ids) - set(came)
        self.halves.share({n: half for n, (_, half) in came.items()})
        loss = self.halves.rho(list(came)) @ torch.tensor([loss for loss, _ in came.values()])
        return float(loss), list(came), list(came)

    def _forward(self, t: int, i: int, ids: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Smashed data (k, b, *d), labels (k, b) and the numbers of those that answered."""
        cut, b = self.state.cut, self.train.batch
        shape = (b, *self.model.smashed_shape(cut))
        answers = self.roster.ask("forward", {n: {"cut": cut, "round_": t, "step": i} for n in ids}, "upload")
        came = self.roster.read(
            answers,
            lambda a: (
                opened(a["smashed"], "smashed data", self.scheme.uplink, shape),
                opened_labels(a["labels"], self.classes, b),
            ),
        )
        if not came:
            raise NoSites(f"sites: none answered in round {t}; {self.roster.why()}")
        return torch.stack([s for s, _ in came.values()]), torch.stack([y for _, y in came.values()]), list(came)

    def _exchange(
        self, t: int, i: int, ids: list[int], server: Half, seen: Tensor, labels: Tensor, ledger: Ledger
    ) -> tuple[float, list[int], Half, list[int]]:
        """Server pass, feedback, backward: the loss, who it was trained with, their server half, and who answered."""
        started = time.perf_counter()
        ids, server, losses, grads = self._server(ids, server, seen, labels)
        rho = self.halves.rho(ids)
        self.scheme.send_smashed(tuple(seen.shape[1:]), self.classes, ledger, ids)
        tape = Transcript(ledger.messages, ledger.truncations)
        told = len(tape.truncations)
        self.scheme.feedback.reply(grads, rho, self.scheme.downlink, tape, ids, Noise(self.train.seed, t, i))
        rank = tape.truncations[-1].rank if len(tape.truncations) > told else 0
        asked = {n: {"round_": t, "step": i, "rank": rank, "messages": tape.of(n)} for n in ids}
        self.roster.spend("server", time.perf_counter() - started)
        answered = self.roster.ask("backward", asked, "download")
        return float(rho @ losses), ids, server, [n for n in ids if n in answered]

    def _server(
        self, ids: list[int], server: Half, seen: Tensor, labels: Tensor
    ) -> tuple[list[int], Half, Tensor, Tensor]:
        """The server pass; whoever's data make it overflow is refused and leaves no trace in the server half."""
        while True:
            rho, rows = self.halves.rho(ids), slice(0, len(ids))
            losses, grads = server_pass(self.model, self.state.cut, server, seen, labels, rho, rows, self.descent)
            if all_finite(losses) and all_finite(grads):
                return ids, server, losses, grads
            good = torch.isfinite(losses) & torch.isfinite(grads.flatten(1)).all(1)
            kept = good.nonzero().flatten()
            if not len(kept):
                raise SplitcastError(f"lr: the loss is no longer finite; choose a value below {self.train.lr}")
            for n in set(ids) - {ids[position] for position in kept.tolist()}:
                self.roster.fault(n, "refused: smashed data: the server's loss or gradient on them is not finite")
            ids, server.pending = [ids[position] for position in kept.tolist()], {}
            if server.stacked:  # every copy has stepped on its own
                return ids, server.take(kept), losses[kept], grads[kept]
            seen, labels = seen[kept], labels[kept]


def refuse_what_cannot_travel(config: Config, sites: int) -> None:
    """Settings that only make sense where everything is in one process."""
    if config.split.client_update != "own":
        raise SplitcastError(f"client_update: {config.split.client_update!r} needs the simulator; sites have 'own'")
    if config.train.dtype != "float32":
        raise SplitcastError(f"dtype: {config.train.dtype!r} never travels; sites have 'float32'")
    if config.policy.gamma_draws:
        raise SplitcastError("gamma_draws: measuring needs all data in one place; give gamma instead")
    if config.data.clients != sites:
        raise SplitcastError(f"clients: {config.data.clients}, but the deployment has {sites} sites; make them equal")


def _positions(ids: Sequence[int], among: Sequence[int]) -> Tensor:
    return torch.tensor([list(among).index(n) for n in ids])
