"""A client's side of the protocol: its rows, its half, and the graph it keeps between forward and backward.

Every method is one call of the server and answers with a dictionary, "seconds" being what it took here. Nothing of the
data leaves a site but smashed data and labels. How calls travel is none of its business: see `engine.flare`.
"""

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from splitcast.config import from_toml
from splitcast.data.batches import draw_batches
from splitcast.engine.state import Half
from splitcast.engine.step import Descent, Pass, client_backward, server_pass
from splitcast.engine.wire import Message, Refused, opened, opened_params, sealed, sealed_labels, sealed_params
from splitcast.models import build
from splitcast.schemes.feedback import Basis
from splitcast.schemes.schemes import scheme
from splitcast.seeds import stream, torch_seed
from splitcast.split import Params, block_of

Answer = dict[str, Any]
S = TypeVar("S")
P = ParamSpec("P")


class Keeper(Protocol):
    """Where a site keeps its half between jobs."""

    def clear(self) -> None:
        """A run begins anew: forget what an earlier one left."""
        ...

    def save(self, half: Half, cut: int, round_: int) -> None:
        """Keep the half after a round."""
        ...

    def load(self, cut: int, round_: int, like: Params) -> Half | None:
        """The half after a round, or None if there is none for this round and cut."""
        ...


def timed(call: Callable[Concatenate[S, P], Answer | None]) -> Callable[Concatenate[S, P], Answer]:
    """Add how long a call took."""

    @wraps(call)
    def measured(site: S, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        started = time.perf_counter()
        answer = call(site, *args, **kwargs) or {}
        return answer | {"seconds": time.perf_counter() - started}

    return measured


class Site:
    """One client."""

    def __init__(self, rows: Callable[[str, int], tuple[Tensor, Tensor]], keeper: Callable[[str], Keeper]) -> None:
        """``rows`` gives x and y for (configuration, client number), ``keeper`` the store of a run."""
        self._rows, self._make_keeper = rows, keeper
        self._sent: tuple[tuple[int, int], Pass] | None = None

    @timed
    def join(self, config: str, run: str, client: int, clients: int, input_shape: list[int], classes: int) -> Answer:
        """Take part in a run as client number ``client`` of ``clients``."""
        self.config = from_toml(config, "configuration from the server")
        self.client, self.clients, self.classes = client, clients, classes
        self.scheme, seed = scheme(self.config.split), self.config.train.seed
        self.model = build(self.config.model.arch, input_shape, classes, torch_seed(seed, "model"))
        self.x, self.y = self._rows(config, client)
        if tuple(self.x.shape[1:]) != tuple(input_shape):
            raise Refused(f"data: samples here are {tuple(self.x.shape[1:])}, the model takes {tuple(input_shape)}")
        if int(self.y.max()) >= classes:
            raise Refused(f"data: label {int(self.y.max())} here is not below {classes}, the number of classes")
        self.like = self.model.initial()
        self.descent = Descent(self.config.train.lr, self.config.train.momentum)
        self._momentum = self.descent.momentum > 0
        self.half, self.cut, self._sent = Half({}), 0, None
        self.keeper = self._make_keeper(run)
        return {"rows": len(self.y)}

    @timed
    def restore(self, cut: int, round_: int) -> Answer:
        """Go on with the half this site kept after a round; round 0 forgets what an earlier run left."""
        if round_ == 0:
            self.keeper.clear()
            return {"found": False}
        found = self.keeper.load(cut, round_, self.like)
        if found:
            self.half, self.cut = found, cut
        return {"found": found is not None}

    @timed
    def adopt(self, cut: int, half: Message) -> None:
        """Take over a half from the server."""
        names = self._names(0, cut)
        self.half = opened_params(half, "half", names, self.like, momentum=self._momentum)
        self.cut, self._sent = cut, None

    @timed
    def hand_in(self) -> Answer:
        """Send this half to the server."""
        return {"half": self._packed(self._names(0, self.cut))}

    @timed
    def keep(self, round_: int) -> None:
        """Keep this half on this site's disk."""
        self.keeper.save(self.half, self.cut, round_)

    @timed
    def forward(self, cut: int, round_: int, step: int) -> Answer:
        """Draw a batch, run this half, send smashed data and labels; the graph stays here."""
        self._expect(cut)
        sent, labels = self._pass(round_, step)
        self._sent = ((round_, step), sent)
        smashed = sealed(sent.output.detach()[0], self.scheme.at(self.cut).uplink)
        return {"smashed": smashed, "labels": sealed_labels(labels[0], self.classes)}

    @timed
    def backward(self, round_: int, step: int, rank: int, messages: list[Message]) -> None:
        """Pull what the server sent back through the graph of the same step, and move."""
        if self._sent is None or self._sent[0] != (round_, step):
            raise Refused(f"backward: round {round_} step {step} had no forward pass here")
        (_, sent), self._sent = self._sent, None
        shape = (self.config.train.batch, *self.model.smashed_shape(self.cut))
        here = self.scheme.at(self.cut)
        feedback = here.feedback
        highest = feedback.rank if isinstance(feedback, Basis) else 0
        if not 0 <= rank <= highest:
            raise Refused(f"basis: has rank {rank}, more than {highest}")
        layout = feedback.layout(shape, here.downlink, rank)
        if not isinstance(messages, list | tuple) or len(messages) != len(layout):
            raise Refused(f"feedback: is not a list of {len(layout)} messages")
        parts = [opened(m, part.kind, part.codec, part.shape) for m, part in zip(messages, layout, strict=True)]
        received = feedback.rebuilt(parts, shape)
        client_backward(sent, received[None], torch.ones(1), self.descent)
        self.half.flush(*self.descent)

    @timed
    def train(self, round_: int) -> Answer:
        """All local steps on the whole model (FedAvg)."""
        self._expect(self.model.depth)
        loss, steps, one = 0.0, self.config.train.local_steps, torch.ones(1)
        for step in range(steps):
            sent, labels = self._pass(round_, step)
            logits = sent.output.detach()
            losses, grad = server_pass(
                self.model, self.model.depth, Half({}), logits, labels, one, slice(0, 1), self.descent
            )
            client_backward(sent, grad, one, self.descent)
            self.half.flush(*self.descent)
            loss += float(losses) / steps
        return {"loss": loss, "half": self._packed(self._names(0, self.cut))}

    @timed
    def recut(self, cut: int, new_cut: int, blocks: Message | None, upload: bool) -> Answer:
        """Move the cut: take the blocks that come, or give up those that go, sending them if asked to."""
        self._expect(cut)
        self._sent = None
        if new_cut > cut:
            names = self._names(cut, new_cut)
            came = opened_params(blocks, "blocks", names, self.like, momentum=self._momentum)
            self.half.params |= came.params
            self.half.momentum |= came.momentum
            self.cut = new_cut
            return {}
        gone = self._names(new_cut, cut)
        answer = {"blocks": self._packed(gone)} if upload else {}
        for group in (self.half.params, self.half.momentum):
            for name in gone:
                group.pop(name, None)
        self.cut = new_cut
        return answer

    def _names(self, start: int, stop: int) -> list[str]:
        return [name for name in self.like if start <= block_of(name) < stop]

    def _packed(self, names: Sequence[str]) -> Message:
        return sealed_params((self.half.params, self.half.momentum), names)

    def _expect(self, cut: int) -> None:
        if cut != self.cut:
            raise Refused(f"cut: the server speaks of {cut}, this half has {self.cut}")

    def _pass(self, round_: int, step: int) -> tuple[Pass, Tensor]:
        """This half on this step's batch (1, b, ...), and the labels (1, b)."""
        train = self.config.train
        sizes = np.full(self.clients, len(self.y))  # only the own row counts
        rows = draw_batches(sizes, train.batch, stream(train.seed, "batch", round_, step))[self.client]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(train.seed, "layers", round_, step, self.client))
            return Pass(self.model, self.half, slice(0, 1), self.x[rows][None], 0, self.cut), self.y[rows][None]
