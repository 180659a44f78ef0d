"""The server's end of the line: what a program sends is packed and waits for the next call, which brings what the
program waits for.

A call takes along everything that was sent to a site since the last one, lets the site's program run until it waits,
and brings back what it sent. So a round of tau steps of two segments costs tau + 1 calls, however many messages it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.rounding import Draw
from splitcast.engine.links import RoundingLink, coding_of
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
        self.rows = None if who.rows is None else dict(zip(who.ids, who.rows, strict=True))
        """of each client, where they differ"""
        self.coding = coding_of(codec, self.shape, who)
        self.values: Tensor | None = None

    def of(self, n: int) -> tuple[int, ...]:
        """The shape of a client's message."""
        return self.shape[1:] if self.rows is None else (self.rows[n], *self.shape[2:])

    def arrived(self, messages: Sequence[Tensor]) -> None:
        """Those of all clients that are left; of fewer rows, the others are zero."""
        if self.rows is not None:
            dtype = next((one.dtype for one in messages if one.numel()), torch.float32)
            padded = torch.zeros(len(messages), *self.shape[1:], dtype=dtype, device="cpu")
            for one, row in zip(messages, padded, strict=True):
                row[: len(one)] = one
            self.values = padded
            return
        self.values = torch.stack(list(messages)) if messages else torch.empty(0, *self.shape[1:], device="cpu")

    def chunk(self, k: int) -> Tensor:
        if self.values is None:
            self.link.exchange(self.who)
        assert self.values is not None
        return self.values


@dataclass
class _Arrived:
    """What a client has sent: of everything that was awaited, also of what is empty for it."""

    values: list[Tensor]
    raw: list[bytes]
    loss: float
    weights: Weights | None = None
    half_bytes: int = 0


class ServerLink(RoundingLink):
    """Packs, sends, receives, checks, counts."""

    def __init__(self, sites: Sites, ledger: Ledger, seed: int, uplink: str = "") -> None:
        """``uplink`` is the format of smashed data in this round, where it changes."""
        super().__init__(ledger, seed)
        self.sites, self.uplink = sites, uplink
        self._outbox: dict[int, list[Packed]] = {}
        self._awaited: list[Awaited] = []

    def up(self, kind: str, x: Values | Tensor, codec: Codec, who: Clients) -> Awaited:
        assert isinstance(who, RemoteClients)
        awaited = Awaited(self, kind, codec.at(who.place[0]), who, tuple(x.shape[1:]))
        self._awaited.append(awaited)
        return awaited

    def unicast(self, kind: str, x: Tensor, codec: Codec, who: Clients) -> Tensor:
        codec, sizes, decoded = codec.at(who.place[0]), list[int](), list[Tensor]()
        for n, one in zip(who.ids, x, strict=True):
            message, values = self._packed(kind, one, codec, self.noise(kind, codec, who, [n]))
            if message:
                self._outbox.setdefault(n, []).append(message)
            sizes.append(len(message["data"]) if message else 0)
            decoded.append(values)
        size = sizes if codec.varies else sizes[0] if sizes else 0
        self.count("down", kind, size, who.ids, coding=codec.work(x.shape[1:]))
        return torch.stack(decoded) if decoded else x

    def broadcast(self, kind: str, x: Tensor, codec: Codec, who: Clients, *, rows: int = 0) -> Tensor:
        codec = codec.at(who.place[0])
        message, values = self._packed(kind, x[0], codec, self.noise(kind, codec, who, None))
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

        def read(n: int, answer: Answer) -> _Arrived:
            expected = [a for a in awaited if a.codec.bound(a.of(n))]
            messages = items(answer["messages"], "messages", len(expected) + weights)
            if len(messages) != len(expected) + weights:
                raise Refused(f"messages: {len(messages)} came, {len(expected) + weights} were expected")
            sent = dict(zip(map(id, expected), messages, strict=False))
            values = [
                unpack(sent[id(a)], a.kind, a.codec, a.of(n)) if id(a) in sent else torch.empty(a.of(n), device="cpu")
                for a in awaited
            ]
            raw = [sent[id(a)]["data"] if id(a) in sent else b"" for a in awaited]
            found = _Arrived(values, raw, number(answer["loss"], "loss", -MOST_LOSS, MOST_LOSS))
            if weights:
                found.weights = who.halves.unpacked(n, messages[-1], sync)
                found.half_bytes = len(messages[-1]["data"])
            return found

        method, part = ("proceed", "download") if who.begun else ("begin", "upload")
        place: dict[str, Any] = {"round_": who.round, "turn": who.turn}
        if not who.begun:
            place["cut"] = who.halves.state.placement.cut
            place |= {"uplink": self.uplink} if self.uplink else {}
        asked = {n: place | {"messages": self._outbox.pop(n, [])} for n in who.ids}
        who.begun, who.turn, who.waits = True, who.turn + 1, bool(awaited) and not weights
        came = self.sites.ask(method, asked, "upload" if awaited or weights else part, read)
        came = self._sound(awaited, came)
        who.only(list(came))
        if not came and not who.optional and not last:
            raise NoSites(f"sites: none answered in round {who.round}; {self.sites.why()}")
        arrived = list(came.values())
        for k, a in enumerate(awaited):
            a.arrived([each.values[k] for each in arrived])
            sizes = [len(each.raw[k]) for each in arrived]
            size = sizes if a.codec.varies or a.rows is not None else sizes[0] if sizes else 0
            self.count("up", a.kind, size, who.ids, coding=a.coding)
        who.losses = {n: each.loss for n, each in came.items()}
        if weights:
            who.half_bytes = {n: each.half_bytes for n, each in came.items()}
        return who.halves.sound({n: each.weights for n, each in came.items() if each.weights is not None})

    def _sound(self, awaited: list[Awaited], came: dict[int, _Arrived]) -> dict[int, _Arrived]:
        """Without those who sent something far too large. Who sends the same as before is noted: it may be true."""
        guard, bad = self.sites.guard, dict[int, str]()
        for k, a in enumerate(awaited):
            real = {n: each.values[k] for n, each in came.items() if each.raw[k]}
            bad |= guard.outliers(a.kind, {n: size_of(v) for n, v in real.items() if v.is_floating_point()})
        for n, reason in bad.items():
            self.sites.fault(n, f"refused: {reason}")
        sound = {n: each for n, each in came.items() if n not in bad}
        for n, each in sound.items():
            told = any(raw and v.is_floating_point() for raw, v in zip(each.raw, each.values, strict=True))
            if told and guard.replayed(n, each.raw):  # whole numbers alone, such as places, may well be the same
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
