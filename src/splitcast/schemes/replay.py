"""Send once, replay: the server keeps decoded smashed data and trains on them many times (docs/bytes.md).

Clients send every sample once, in an order of their own, b in a round; what the server decodes goes into a pool, on
which its half trains in every round, whether something came or not:

    w^s <- w^s - eta dF(w^s; S_B, y_B)/dw^s for ``steps`` minibatches B of the pool.

Pham et al., Split learning without local weight sharing (2023), keep cut-layer data for clients that come late.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import FP16, Labels
from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.formats import CODECS, codec
from splitcast.base.seeds import stream
from splitcast.model.split import SplitModel
from splitcast.schemes.auxiliary import CLIENT, HEAD, SERVER, Headed
from splitcast.schemes.feedback import Basis
from splitcast.schemes.pool import Pool
from splitcast.schemes.program import Clients, Cohort, Link, Party
from splitcast.training.placement import Placement

LEARNING = ("none", "local", "feedback")
PLACES = Labels(2**32)
"""Where in their order clients send from: four bytes."""


class Replay(Headed):
    """SFL with replay, ours.

    How client halves learn, in the rounds up to ``until``: from a ``local`` loss (tau steps with the auxiliary head),
    from true ``feedback`` on the samples that they send (a basis of the gradients, as sfl-gb), or not (``none``); they
    are averaged in every round in which they learn. Uploads begin after ``start`` rounds. When all ``samples`` of every
    client were sent, clients measure how far their half has moved the features of those sent first,

        m^n = ||w^c(x^n) - w_0^c(x^n)|| / ||w_0^c(x^n)||,

    w_0^c being the half when sending began, and all are sent again once sum_n rho^n m^n > ``stale``.
    """

    name = "sfl-replay"
    uplink, downlink, sync = codec("transform:80B"), codec("transform:20%"), CODECS["int8"]
    one_server = True
    at_once = False
    """Whether all is sent in one round"""

    def __init__(self, config: Config) -> None:
        own = self.options(config)
        self.learn: str = one_of(f"{self.name}.learn", own["learn"], LEARNING)
        super().__init__(config)
        if config.split.sync_every >= 0:
            raise SplitcastError(f"sync_every: {config.split.sync_every}; {self.name} averages in rounds that learn")
        self.batch, self.seed = config.train.batch, config.train.seed
        self.start, self.until = int(own["start"]), int(own["until"])
        self.sweep = -(-int(own["samples"]) // self.batch)  # uploads of all samples
        self.steps, self.minibatch, self.stale = own["steps"], own["minibatch"], own["stale"]
        self.feedback = Basis(own["directions"])
        self.pool = Pool(own["memory_mb"] * 2**20, own["disk_mb"] * 2**20)
        self.begun = self.start + 1
        """the round in which the present sweep over the samples began"""

    def options(self, config: Config) -> dict[str, Any]:
        """Its section."""
        own = config.sfl_replay
        return {name: getattr(own, name) for name in own.__dataclass_fields__}

    def syncs(self, t: int) -> bool:
        return self.learns(t)

    def learns(self, t: int) -> bool:
        """Whether client halves learn in a round."""
        if self.until and t > self.until:
            return False
        return self.learn == "local" or (self.learn == "feedback" and self.fresh(t))

    def fresh(self, t: int) -> bool:
        """Whether the first sweep is under way in a round."""
        return 0 <= t - 1 - self.start < (1 if self.at_once else self.sweep)

    def kind(self, t: int) -> int:
        return int(self.learns(t)) + 2 * int(self.fresh(t)) + 4 * int(t > self.start)

    def equal_after(self, t: int) -> bool:
        return True

    def place(self, cut: int, depth: int) -> Placement:
        return super().place(cut, depth) if self.learn == "local" else Placement.split(cut, depth)

    def fitted(self, model: SplitModel) -> SplitModel:
        return super().fitted(model) if self.learn == "local" else model

    def round(self, t: int, clients: Cohort, server: Any, link: Link) -> None:
        learns = self.learns(t)
        alike = self.sync.exact or not learns
        for some, half in clients.in_parallel(server, mixes=True, averaged=alike, still=not learns):
            for place in self.places(t, some, link):
                self.send(t, place, some, half, link)
            for batch in some.batches() if learns and self.learn == "local" else ():
                sent = some.forward(CLIENT, batch.x)
                some.backward(sent, some.descend(HEAD, sent.out, batch.y)[1])
        if learns:
            clients.average(link, self.sync)
        if t > self.start:
            self.train(t, clients.central(server))

    def send(self, t: int, place: int, clients: Clients, server: Party, link: Link) -> None:
        """Samples from a place in the clients' orders go up and into the pool."""
        if place == 0:
            clients.mark()
        for batch in clients.samples(place):
            sent = clients.forward(CLIENT, batch.x)
            smashed, labels = self.upload(clients, server, link, sent.out, batch.y)
            if self.learns(t) and self.learn == "feedback":
                _, grads = server.descend(SERVER, smashed, labels)
                clients.backward(sent, self.feedback.reply(grads, clients, link, self.downlink))
            x, y = smashed.whole(), labels.whole()
            for n, one, targets in zip(clients.ids, x, y, strict=True):
                if not one.is_meta:
                    first = n * self.sweep * self.batch + place
                    self.pool.add(range(first, first + len(one)), one, targets)

    def places(self, t: int, clients: Clients, link: Link) -> Iterator[int]:
        """From where clients send in a round: known to both sides while nothing is sent twice, else the server says."""
        if t <= self.start:
            return
        if self.at_once:
            yield from range(0, self.sweep * self.batch if t == self.begun else 0, self.batch)
            return
        if not self.stale:
            if self.fresh(t):
                yield (t - 1 - self.start) * self.batch
            return
        done = t - self.begun
        told = self.say(1 + done * self.batch if done < self.sweep else 0, clients, link)
        if not told:
            for oldest in clients.samples(0):
                moved = link.up("moved", clients.moved(CLIENT, oldest.x)[:, None], FP16, clients).whole()[:, 0]
            again = False
            if not moved.is_meta:
                mean = float(clients.rho @ moved.to(clients.rho))
                link.note("moved", mean)
                again = mean > self.stale
            self.begun = t if again else self.begun
            told = self.say(int(again), clients, link)
        if told:
            yield told - 1

    def say(self, place: int, clients: Clients, link: Link) -> int:
        """Tell clients from where to send, plus one; 0 is nothing. A site knows what it was told and nothing else."""
        said = torch.tensor([[place]], device="cpu")
        return int(link.broadcast("place", said, PLACES, clients)[0, 0])

    def train(self, t: int, server: Party) -> None:
        """Minibatches of the pool, epoch by epoch in random order."""
        rng, rows = stream(self.seed, "pool", t, 0), len(self.pool)
        order = np.empty(0, np.int64)
        for _ in range(self.steps):
            if not rows:  # on a site, or in a plan
                server.train(SERVER, *[torch.empty(self.minibatch, device="meta")] * 2)
                continue
            while len(order) < min(self.minibatch, rows):
                order = np.concatenate([order, rng.permutation(rows)])
            chosen, order = order[: self.minibatch], order[self.minibatch :]
            server.train(SERVER, *self.pool.take(chosen))

    def kept(self) -> dict[str, Tensor]:
        return {**self.pool.tensors(), "begun": torch.tensor(self.begun, device="cpu")}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        self.pool.restore(kept)
        self.begun = int(kept["begun"]) if "begun" in kept else self.start + 1


class Ampere(Replay):
    """Ampere (Zhang et al. 2025): client halves learn alone by federated averaging of a local loss, tau steps a round
    for ``device_rounds`` rounds; then their activations are sent, once, and the server half trains on those of all.

    Not in the paper: a head of one layer, where theirs is the next layer, narrowed, and the last; and so many
    ``samples`` of each client instead of all.
    """

    name = "ampere"
    uplink = sync = CODECS["fp32"]
    at_once = True

    def options(self, config: Config) -> dict[str, Any]:
        own = config.ampere
        common = {name: getattr(own, name) for name in ("samples", "steps", "minibatch", "memory_mb", "disk_mb")}
        rounds = own.device_rounds
        return common | {"learn": "local", "start": rounds, "until": rounds, "stale": 0.0, "directions": 1}
