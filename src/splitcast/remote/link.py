"""The server's end of the line: what a program sends is packed and waits for the next call, which brings what the
program waits for.

A call takes along everything that was sent to a site since the last one, lets the site's program run until it waits,
and brings back what it sent. So a round of tau steps of two segments costs tau + 1 calls, however many messages it has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.rounding import Draw
from splitcast.engine.links import RoundingLink
from splitcast.remote.clients import RemoteClients
from splitcast.remote.guard import size_of
from splitcast.remote.sites import Answer, NoSites, Sites
from splitcast.remote.wire import Packed, Refused, items, number, pack, unpack
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Clients, Values
from splitcast.training.weights import Weights

MOST_LOSS = 1e30


class Awaited(Values):
    """What clients send up: here once a call has brought it."""

    def __init__(self, link: "ServerLink", kind: str, codec: Codec, who: RemoteClients, shape: tuple[int, ...]) -> None:
        super().__init__([slice(0, None)], (len(who.ids), *shape))
        self.link, self.kind, self.codec, self.who = link, kind, codec, who
        self.values: Tensor | None = None

    def chunk(self, k: int) -> Tensor:
        if self.values is None:
            self.link.exchange(self.who)
        assert self.values is not None
        return self.values


@dataclass
class _Arrived:
    values: list[Tensor]
    raw: list[bytes]
    sizes: list[int]
    loss: float
    weights: Weights | None = None


class ServerLink(RoundingLink):
    """Packs, sends, receives, checks, counts."""

    def __init__(self, sites: Sites, ledger: Ledger, seed: int) -> None:
        super().__init__(ledger, seed)
        self.sites = sites
        self._outbox: dict[int, list[Packed]] = {}
        self._awaited: list[Awaited] = []

    def up(self, kind: str, x: Values | Tensor, codec: Codec, who: Clients) -> Awaited:
        assert isinstance(who, RemoteClients)
        awaited = Awaited(self, kind, codec, who, tuple(x.shape[1:]))
        self._awaited.append(awaited)
        return awaited

    def unicast(self, kind: str, x: Tensor, codec: Codec, who: Clients) -> Tensor:
        sizes, decoded = list[int](), list[Tensor]()
        for n, one in zip(who.ids, x, strict=True):
            message, values = self._packed(kind, one, codec.at(who.place[0]), self.noise(kind, codec, who, [n]))
            if message:
                self._outbox.setdefault(n, []).append(message)
            sizes.append(len(message["data"]) if message else 0)
            decoded.append(values)
        size = sizes if codec.varies else sizes[0] if sizes else 0
        self.count("down", kind, size, who.ids, coding=codec.work(x.shape[1:]))
        return torch.stack(decoded) if decoded else x

    def broadcast(self, kind: str, x: Tensor, codec: Codec, who: Clients, *, rows: int = 0) -> Tensor:
        message, values = self._packed(kind, x[0], codec.at(who.place[0]), self.noise(kind, codec, who, None))
        if message:
            for n in who.ids:
                self._outbox.setdefault(n, []).append(message)
        size = len(message["data"]) if message else 0
        self.count("down", kind, size, who.ids, broadcast=True, coding=codec.work(x.shape[1:]))
        return values[None]

    def exchange(
        self, who: RemoteClients, *, weights: bool = False, sync: Codec = FP32, last: bool = False
    ) -> dict[int, Weights]:
        """One call of every client: deliver what waits for it, and receive all that is awaited, and with ``weights``
        its client half, in the format ``sync``. Who does not send what the program asks for is out of the round; in
        the ``last`` call of a round all may be."""
        awaited, self._awaited = self._awaited, []
        expected = [a for a in awaited if a.codec.bound(a.shape[1:])]

        def read(n: int, answer: Answer) -> _Arrived:
            messages = items(answer["messages"], "messages", len(expected) + weights)
            if len(messages) != len(expected) + weights:
                raise Refused(f"messages: {len(messages)} came, {len(expected) + weights} were expected")
            values = [unpack(m, a.kind, a.codec, a.shape[1:]) for m, a in zip(messages, expected, strict=False)]
            sizes = [len(m["data"]) for m in messages]
            loss = number(answer["loss"], "loss", -MOST_LOSS, MOST_LOSS)
            raw = [m["data"] for m in messages[: len(expected)]]
            return _Arrived(values, raw, sizes, loss, who.halves.unpacked(n, messages[-1], sync) if weights else None)

        method, part = ("proceed", "download") if who.begun else ("begin", "upload")
        place: dict[str, Any] = {"round_": who.round, "turn": who.turn}
        if not who.begun:
            place["cut"] = who.halves.state.placement.cut
        asked = {n: place | {"messages": self._outbox.pop(n, [])} for n in who.ids}
        who.begun, who.turn, who.waits = True, who.turn + 1, bool(expected) and not weights
        came = self.sites.ask(method, asked, "upload" if expected or weights else part, read)
        came = self._sound(expected, came)
        who.only(list(came))
        if not came and not who.optional and not last:
            raise NoSites(f"sites: none answered in round {who.round}; {self.sites.why()}")
        arrived = list(came.values())
        for k, a in enumerate(expected):
            one = [each.values[k] for each in arrived]
            a.values = torch.stack(one) if one else torch.empty(0, *a.shape[1:], device="cpu")
            sizes = [each.sizes[k] for each in arrived]
            size = sizes if a.codec.varies else sizes[0] if sizes else 0
            self.count("up", a.kind, size, who.ids, coding=a.codec.work(a.shape[1:]))
        for a in awaited:
            if a.values is None:
                a.values = torch.empty(len(came), *a.shape[1:], device="cpu")
        who.losses = {n: each.loss for n, each in came.items()}
        if weights:
            who.half_bytes = {n: each.sizes[-1] for n, each in came.items()}
        return who.halves.sound({n: each.weights for n, each in came.items() if each.weights is not None})

    def _sound(self, expected: list[Awaited], came: dict[int, _Arrived]) -> dict[int, _Arrived]:
        """Without those who sent something far too large. Who sends the same as before is noted: it may be true."""
        guard, bad = self.sites.guard, dict[int, str]()
        for k, a in enumerate(expected):
            if came and next(iter(came.values())).values[k].is_floating_point():
                bad |= guard.outliers(a.kind, {n: size_of(each.values[k]) for n, each in came.items()})
        for n, reason in bad.items():
            self.sites.fault(n, f"refused: {reason}")
        sound = {n: each for n, each in came.items() if n not in bad}
        for n, each in sound.items():
            if expected and guard.replayed(n, each.raw):
                self.sites.failures.setdefault(n, "noted: sent the same bytes as in an earlier step")
        return sound

    def flush(self, who: RemoteClients) -> None:
        """Deliver what is still there, and let programs run to their end."""
        waiting = not who.begun or who.waits or self._awaited or any(self._outbox.get(n) for n in who.ids)
        if who.ids and waiting:
            self.exchange(who, last=True)

    def _packed(self, kind: str, one: Tensor, codec: Codec, draw: Draw | None) -> tuple[Packed | None, Tensor]:
        """A message, and what its receiver decodes; no message if there is nothing in it."""
        if not codec.bound(one.shape):
            return None, one
        message = pack(kind, one, codec, draw)
        return message, unpack(message, kind, codec, tuple(one.shape))
