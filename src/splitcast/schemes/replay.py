"""Send once, replay: the server keeps decoded smashed data and trains on them many times (docs/bytes.md).

Clients send every sample once, in an order of their own, b in a round; what the server decodes goes into a pool, on
which its half trains in every round, whether something came or not:

    w^s <- w^s - eta dF(w^s; S_B, y_B)/dw^s for ``steps`` minibatches B of the pool.

Once something has come, the server tells all clients which directions of the channels to keep and how finely
(`Replay.agree`), so that what coding leaves of a sample does not tell whose it is.

Pham et al., Split learning without local weight sharing (2023), keep cut-layer data for clients that come late.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.formats import CODECS, codec
from splitcast.base.seeds import stream, torch_stream
from splitcast.base.transform import Shape, Transform
from splitcast.data.augment import changed, find_augment
from splitcast.model.split import SplitModel
from splitcast.schemes.auxiliary import CLIENT, HEAD, SERVER, Headed
from splitcast.schemes.feedback import Basis
from splitcast.schemes.pool import Pool
from splitcast.schemes.program import Clients, Cohort, Link, Party, Values
from splitcast.schemes.staleness import MOST, Memory, Places
from splitcast.training.placement import Placement

LEARNING = ("none", "local", "feedback")
AGREED = 256
"""Samples of the pool from which the server learns how clients shall code."""


class Replay(Headed):
    """SFL with replay, ours.

    How client halves learn, in the rounds up to ``until``: from a ``local`` loss (tau steps with the auxiliary head),
    from true ``feedback`` on the samples that they send (a basis of the gradients, as sfl-gb), or not (``none``); they
    are averaged in every round in which they learn. Uploads begin after ``start`` rounds: b samples of each client in
    the order that both sides know, until there was a round for all ``samples``.

    With ``stale``, clients then compute the features of ``checks`` b samples in a round, one after the other, for as
    long as halves learn and until all were looked at since; each remembers how far those have moved (`staleness`). It
    says which samples it sends, up to b: those that it never sent, and those that have moved more than ``stale``, most
    first. They take the places of the older ones in the pool. Plans expect that nothing is stale.
    """

    name = "sfl-replay"
    uplink, downlink, sync = codec("transform:100B"), codec("transform:20%"), CODECS["int8"]
    one_server = True
    at_once = False
    """Whether all is sent in one round"""

    def __init__(self, config: Config) -> None:
        own = self.options(config)
        self.learn: str = one_of(f"{self.name}.learn", own["learn"], LEARNING)
        super().__init__(config)
        if config.split.sync_every >= 0:
            raise SplitcastError(f"sync_every: {config.split.sync_every}; {self.name} averages in rounds that learn")
        self.own, self.told = self.uplink, dict[str, Tensor]()
        """the format by itself; what was told last of how to code alike, and what samples took"""
        self.batch, self.seed = config.train.batch, config.train.seed
        self.start, self.until = int(own["start"]), int(own["until"])
        if self.start > (self.until or self.start if self.learn == "local" else 0):
            raise SplitcastError(
                f"{self.name}.start: {self.start}; before it halves have to learn: give learn = local, and until 0 or "
                "not below start"
            )
        self.samples = int(own["samples"])
        self.sweep = -(-self.samples // self.batch)  # uploads of all samples
        if self.learn == "feedback":  # true gradients are those of whole batches
            self.samples = self.sweep * self.batch
        self.steps, self.minibatch, self.stale = own["steps"], own["minibatch"], own["stale"]
        self.augment = find_augment(own["augment_pool"], f"{self.name}.augment_pool")
        self.feedback = Basis(own["directions"])
        if not own["memory_mb"] + own["disk_mb"]:
            raise SplitcastError(f"{self.name}.memory_mb, disk_mb: 0 and 0; leave room for what is sent")
        if self.stale and own["samples"] > MOST:
            samples = own["samples"]
            raise SplitcastError(f"{self.name}.samples: {samples}; with stale at most {MOST}, a kB of each is kept")
        self.pool = Pool(own["memory_mb"] * 2**20, own["disk_mb"] * 2**20)
        self.checks = min(own["checks"], self.sweep)
        self.memory = Memory(self.samples, self.stale)
        """what clients remember, on a site and in the simulator"""
        self.rest: float = self.start + self.sweep
        """the round after which halves and samples are as they were, but for stale ones"""
        if self.learn == "local":
            self.rest = max(self.rest, self.until or math.inf)

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

    def measures(self, t: int) -> bool:
        """Whether clients look at what they have sent."""
        return self.asks(t) and t <= self.rest - (-self.sweep // self.checks)

    def asks(self, t: int) -> bool:
        """Whether clients say in a round what they send; after the last measure all of it could be stale."""
        last = self.rest - (-self.sweep // self.checks) + self.sweep
        return bool(self.stale) and self.start + self.sweep < t <= last

    def kind(self, t: int) -> int:
        last = t == self.start + self.sweep  # which may be smaller
        known = (self.learns(t), self.fresh(t), t > self.start, self.asks(t), self.measures(t), self.agrees(t), last)
        return sum(2**k for k, each in enumerate(known) if each)

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
            for places in self.uploads(t, some, link):
                self.send(t, places, some, half, link)
                some.rows = None
            for batch in some.batches() if learns and self.learn == "local" else ():
                sent = some.forward(CLIENT, batch.x)
                some.backward(sent, some.descend(HEAD, sent.out, batch.y)[1])
        if learns:
            clients.average(link, self.sync)
        if t > self.start:
            self.train(t, clients.central(server))

    def agrees(self, t: int) -> bool:
        """Whether all clients code alike in a round: something has come, more does, and halves are at rest."""
        return isinstance(self.own, Transform) and self.fresh(t) and t > self.start + 1 and not self.learns(t)

    def agree(self, shape: Sequence[int], clients: Clients, link: Link) -> None:
        """The server tells all clients the columns of a KLT and a step, those of one message of some of the pool; a
        step of zero: each by itself. ``shape`` (b, *d) is that of their messages."""
        assert isinstance(self.own, Transform)
        own, lay = self.own.at(clients.place[0]), Shape.of(shape)
        if not lay.klt:
            return
        link.compute(own.work((AGREED, *shape[1:]))[0], clients)
        # on a site, in a plan, which expects half of the channels, or of an empty pool
        columns, step = torch.eye(lay.channels, device="cpu")[: -(-lay.channels // 2)], 0.0
        if len(self.pool):
            rows = stream(self.seed, "pool", clients.place[0], 1).choice(len(self.pool), AGREED)
            before = (float(self.told["step"]), float(self.told["size"])) if "step" in self.told else None
            columns, step = own.learned(self.pool.take(rows)[0], before) or (columns, step)
        columns = link.broadcast("columns", columns[None], CODECS["int8"], clients, rows=lay.channels)[0]
        told = link.broadcast("step", torch.tensor([[step]], device="cpu"), CODECS["fp32"], clients, rows=1)[0]
        self.uplink = own.alike(columns, float(told))
        place = torch.tensor(clients.place[0], device="cpu")
        self.told |= {"columns": columns, "step": told, "round": place}

    def send(self, t: int, places: Tensor, clients: Clients, server: Party, link: Link) -> None:
        """Samples at these places of the clients' orders, (K, b) with -1 for none, go up and into the pool."""
        whose = dict(zip(clients.ids, places, strict=True))
        for batch in clients.samples(places.clamp(min=0)):
            sent = clients.forward(CLIENT, batch.x)
            self.uplink = self.own
            if self.agrees(t):
                self.agree(sent.out.shape[1:], clients, link)
            smashed, labels = self.upload(clients, server, link, sent.out, batch.y)
            features = sent.out.whole() if self.stale else None
            if self.learns(t) and self.learn == "feedback":
                _, grads = server.descend(SERVER, smashed, labels)
                clients.backward(sent, self.feedback.reply(grads, clients, link, self.downlink))
            self.keep(clients, whose, smashed, labels, features)
            each = link.sent("smashed") / max(1, sum(counts_of(clients, self.batch)))
            self.told["size"] = torch.tensor(each, device="cpu", dtype=torch.float64)

    def keep(
        self, clients: Clients, places: Mapping[int, Tensor], x: Values, y: Values, features: Tensor | None
    ) -> None:
        """What came up, in the pool; what went up, in the memory of those who know it has arrived."""
        came, told = x.whole(), y.whole()  # before who is left is asked: who sends what it must not is out
        rows = counts_of(clients, self.batch)
        where_of = {n: places[n][:count] for n, count in zip(clients.ids, rows, strict=True)}
        for (n, where), one, targets in zip(where_of.items(), came, told, strict=True):
            if not one.is_meta:
                self.pool.add((n * self.memory.places + where).tolist(), one[: len(where)], targets[: len(where)])
        if features is not None and not features.is_meta:
            for n, one in zip(clients.ids, features, strict=True):
                self.memory.sent(n, where_of[n], one[: len(where_of[n])])

    def uploads(self, t: int, clients: Clients, link: Link) -> Iterator[Tensor]:
        """Places (K, b) from which clients send in a round, upload after upload; the last one may be smaller."""
        if self.fresh(t):
            first = t - 1 - self.start
            for k in range(first, self.sweep if self.at_once else first + 1):
                places = self.batch_at(k)
                count = int((places >= 0).sum())
                clients.rows = [count] * len(clients.ids) if count < self.batch else None
                yield places.expand(len(clients.ids), -1)
        elif self.asks(t):
            told = self.stale_places(t, clients, link)
            if not told.is_meta:
                clients.rows = (told >= 0).sum(1).tolist()
                link.note("sent_again", sum(clients.rows) / len(clients.rows))
                yield told

    def batch_at(self, k: int) -> Tensor:
        """The places of upload k of the first sweep (b,), -1 behind the last sample."""
        places = k * self.batch + torch.arange(self.batch, device="cpu")
        return torch.where(places < self.samples, places, -1)

    def stale_places(self, t: int, clients: Clients, link: Link) -> Tensor:
        """Clients look at some of what they have sent, and say what they send now (K, b)."""
        first = (t - 1 - self.start - self.sweep) * self.checks
        for k in range(first, first + self.checks) if self.measures(t) else ():
            places = self.batch_at(k % self.sweep)
            here = places[places >= 0]
            for batch in clients.samples(places.clamp(min=0)):
                seen = clients.look(CLIENT, batch.x)
                for n, one in zip(clients.ids, seen, strict=True) if not seen.is_meta else ():
                    self.memory.measured(n, here, one[: len(here)])
        chosen = clients.recall(self.memory, self.batch)
        told = link.up("places", chosen, Places(self.memory.places), clients).whole()
        return chosen if told.is_meta else told  # a site knows its own

    def train(self, t: int, server: Party) -> None:
        """Minibatches of the pool, epoch by epoch in random order, each changed at random if so wished."""
        rng, rows = stream(self.seed, "pool", t, 0), len(self.pool)
        order = np.empty(0, np.int64)
        for step in range(self.steps):
            if not rows:  # on a site, or in a plan
                server.train(SERVER, *[torch.empty(self.minibatch, device="meta")] * 2)
                continue
            while len(order) < min(self.minibatch, rows):
                order = np.concatenate([order, rng.permutation(rows)])
            chosen, order = order[: self.minibatch], order[self.minibatch :]
            x, y = self.pool.take(chosen)
            if self.augment:
                x = changed(self.augment, x, torch_stream(self.seed, "augment", t, step), f"{self.name}.augment_pool")
            server.train(SERVER, x, y)

    def kept(self) -> dict[str, Tensor]:
        return self.pool.tensors() | self.memory.tensors() | self.told

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        self.told = {name: kept[name] for name in ("columns", "step", "round", "size") if name in kept}
        self.uplink = self.own
        if "round" in self.told and isinstance(self.own, Transform):
            own = self.own.at(int(self.told["round"]))
            self.uplink = own.alike(self.told["columns"], float(self.told["step"]))
        self.pool.restore(kept)
        self.memory.restore(kept)


def counts_of(clients: Clients, batch: int) -> Sequence[int]:
    """How many samples each client sends, of a batch."""
    return [batch] * len(clients.ids) if clients.rows is None else clients.rows


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
        common = {
            name: getattr(own, name)
            for name in ("samples", "steps", "minibatch", "augment_pool", "memory_mb", "disk_mb")
        }
        rounds = own.device_rounds
        return common | {"learn": "local", "start": rounds, "until": rounds, "stale": 0.0, "checks": 1, "directions": 1}
