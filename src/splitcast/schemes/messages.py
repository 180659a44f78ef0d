"""The ledger: every event of a round in its order. What was sent, with packed sizes, and who computed what in between.

Bytes are counted from it, and the clock turns it into seconds (`cost.stages`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Direction = Literal["up", "down"]
Phase = Literal["forward", "backward", "both"]
Coding = tuple[float, float]
"""FLOPs of encoding a message of one client, and of decoding it."""


@dataclass(frozen=True)
class Message:
    """One transmission to or from each of ``clients``; a broadcast is one transmission heard by all of them."""

    direction: Direction
    kind: str
    nbytes: int | tuple[int, ...]
    """of each client; one number if all are alike"""
    clients: tuple[int, ...]
    broadcast: bool = False
    coding: Coding = (0.0, 0.0)

    @property
    def on_air(self) -> int:
        """Bytes on the air: a broadcast counts once, up to where the last client stops listening."""
        if isinstance(self.nbytes, tuple):
            return max(self.nbytes) if self.broadcast else sum(self.nbytes)
        return self.nbytes * (1 if self.broadcast else len(self.clients))

    def of(self, client: int) -> int:
        """Bytes to or from one of the clients."""
        return self.nbytes[self.clients.index(client)] if isinstance(self.nbytes, tuple) else self.nbytes

    def joined(self, other: "Message", *, further: bool = False) -> "Message":
        """The same message of further clients; a ``further`` broadcast has a part of the band that lets both last as
        long, which is as long as both one after the other."""
        if self.broadcast and further:
            assert isinstance(self.nbytes, int) and isinstance(other.nbytes, int)
            return replace(self, nbytes=self.nbytes + other.nbytes, clients=self.clients + other.clients)
        sizes: int | tuple[int, ...] = self.nbytes
        if isinstance(self.nbytes, tuple) or self.nbytes != other.nbytes:
            sizes = (*self._sizes(), *other._sizes())
        return replace(self, nbytes=sizes, clients=self.clients + other.clients)

    def _sizes(self) -> tuple[int, ...]:
        return self.nbytes if isinstance(self.nbytes, tuple) else (self.nbytes,) * len(self.clients)


@dataclass(frozen=True)
class Work:
    """A pass of each of ``clients``, or of the server for each of them, through a segment of the model."""

    segment: int
    phase: Phase
    clients: tuple[int, ...]
    """whose samples they are"""
    share: float | tuple[float, ...] = 1.0
    """of the samples of a local step, for all or of each"""
    by: tuple[int, ...] = ()
    """who does it, if that is another client"""

    def joined(self, other: "Work") -> "Work":
        """The same work of further clients."""
        share: float | tuple[float, ...] = self.share
        if isinstance(self.share, tuple) or self.share != other.share:
            share = (*self.shares(), *other.shares())
        return replace(self, clients=self.clients + other.clients, share=share, by=self.by + other.by)

    def shares(self) -> tuple[float, ...]:
        """One for each."""
        return self.share if isinstance(self.share, tuple) else (self.share,) * len(self.clients)


@dataclass(frozen=True)
class JointWork:
    """FLOPs that the server spends once for all ``clients`` together."""

    flops: float
    clients: tuple[int, ...]

    def joined(self, other: "JointWork") -> "JointWork":
        """Work for one group after the other."""
        return JointWork(self.flops + other.flops, self.clients + other.clients)


Event = Message | Work | JointWork


@dataclass
class Ledger:
    """What happened in a round.

    >>> ledger = Ledger()
    >>> ledger.unicast("up", "smashed", 100, clients=[0, 1])
    >>> ledger.broadcast("gradient", 100, clients=[0, 1])
    >>> ledger.total("up"), ledger.total("down"), ledger.of_client(0)
    (200, 100, 100)
    """

    events: list[Event] = field(default_factory=list)
    notes: dict[str, list[float]] = field(default_factory=dict)
    """what programs noted, one number a local step"""
    _at: int | None = None
    _further: bool = False

    @property
    def messages(self) -> list[Message]:
        """What was sent."""
        return [event for event in self.events if isinstance(event, Message)]

    def add(self, event: Event) -> None:
        """Note an event; where clients work side by side (`alongside`), it is the same event of further clients."""
        if not event.clients:
            return
        if self._at is None or self._at >= len(self.events):
            self.events.append(event)
        else:
            known = self.events[self._at]
            assert type(known) is type(event)
            if isinstance(known, Message) and isinstance(event, Message):
                self.events[self._at] = known.joined(event, further=self._further)
            else:
                self.events[self._at] = known.joined(event)  # type: ignore[arg-type]
        if self._at is not None:
            self._at += 1

    def alongside(self, start: int | None, *, further: bool = False) -> None:
        """What follows happens at the same time as what was noted since event ``start``; None: after all of it. Of a
        ``further`` cohort, broadcasts are other ones."""
        self._at, self._further = start, further

    def unicast(
        self,
        direction: Direction,
        kind: str,
        nbytes: int | Sequence[int],
        clients: Sequence[int],
        coding: Coding = (0.0, 0.0),
    ) -> None:
        """``nbytes`` to or from each client."""
        sizes = nbytes if isinstance(nbytes, int) else tuple(nbytes)
        if (any(sizes) if isinstance(sizes, tuple) else sizes) and clients:
            self.add(Message(direction, kind, sizes, tuple(clients), coding=coding))

    def broadcast(
        self, kind: str, nbytes: int | Sequence[int], clients: Sequence[int], coding: Coding = (0.0, 0.0)
    ) -> None:
        """``nbytes`` once from the server, heard by all ``clients``; or by each up to its number of them."""
        sizes = nbytes if isinstance(nbytes, int) else tuple(nbytes)
        if sizes and clients:
            self.add(Message("down", kind, sizes, tuple(clients), broadcast=True, coding=coding))

    def joint(self, flops: float, clients: Sequence[int]) -> None:
        """The server works for all ``clients`` together."""
        if flops:
            self.add(JointWork(flops, tuple(clients)))

    def note(self, name: str, value: float) -> None:
        """A number of this local step, for the round's record."""
        self.notes.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        """What was noted, mean over the local steps; of names that begin with ``max_`` the greatest."""
        return {
            name.removeprefix("max_"): max(values) if name.startswith("max_") else sum(values) / len(values)
            for name, values in self.notes.items()
        }

    def total(self, direction: Direction | None = None) -> int:
        """Bytes on the air, in one direction or both."""
        return sum(m.on_air for m in self.messages if direction in (None, m.direction))

    def by_kind(self) -> dict[str, int]:
        """Bytes on the air per direction and kind, e.g. ``{"up.smashed": ...}``."""
        counts: Counter[str] = Counter()
        for m in self.messages:
            counts[f"{m.direction}.{m.kind}"] += m.on_air
        return dict(counts)

    def of_client(self, client: int) -> int:
        """Bytes sent to or from one client alone; broadcasts belong to none."""
        return sum(m.of(client) for m in self.messages if not m.broadcast and client in m.clients)

    def broadcasts(self) -> int:
        """Bytes that were broadcast."""
        return sum(m.on_air for m in self.messages if m.broadcast)
