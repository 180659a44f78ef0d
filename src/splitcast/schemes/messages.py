"""The byte ledger: every message of a round with its direction, kind, clients and packed size."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:  # they speak of messages too
    from splitcast.schemes.codec import Codec
    from splitcast.schemes.noise import Noise

Direction = Literal["up", "down"]
Kind = Literal["smashed", "labels", "gradient", "basis", "coefficients", "model", "migration"]


@dataclass(frozen=True)
class Message:
    """One transmission to or from each of ``clients``; a broadcast is one transmission heard by all of them."""

    direction: Direction
    kind: Kind
    nbytes: int
    clients: tuple[int, ...]
    broadcast: bool = False

    @property
    def on_air(self) -> int:
        """Bytes on the air: a broadcast counts once."""
        return self.nbytes * (1 if self.broadcast else len(self.clients))


@dataclass(frozen=True)
class Truncation:
    """What a basis broadcast left out in one local step."""

    rank: int
    energy: float
    """sum_n rho^n ||s^n||^2"""
    dropped: float
    """sum_n rho^n ||s^n - received^n||^2 before rounding on the wire"""


@dataclass
class Ledger:
    """What a round sent.

    >>> ledger = Ledger()
    >>> ledger.unicast("up", "smashed", 100, clients=[0, 1])
    >>> ledger.broadcast("gradient", 100, clients=[0, 1])
    >>> ledger.total("up"), ledger.total("down"), ledger.of_client(0)
    (200, 100, 100)
    """

    messages: list[Message] = field(default_factory=list)
    truncations: list[Truncation] = field(default_factory=list)

    def unicast(self, direction: Direction, kind: Kind, nbytes: int, clients: Sequence[int]) -> None:
        """``nbytes`` to or from each client."""
        if nbytes and clients:
            self.messages.append(Message(direction, kind, nbytes, tuple(clients)))

    def broadcast(self, kind: Kind, nbytes: int, clients: Sequence[int]) -> None:
        """``nbytes`` once from the server, heard by all ``clients``."""
        if nbytes and clients:
            self.messages.append(Message("down", kind, nbytes, tuple(clients), broadcast=True))

    def carry(
        self, kind: Kind, x: Tensor, codec: "Codec", noise: "Noise", clients: Sequence[int] | None = None
    ) -> Tensor:
        """Messages x (k, b, *d) from the server, one to each client or one broadcast, as their receivers decode them.

        Here they only pass through the codec; where sites are elsewhere they are packed as well (`engine.wire`).
        """
        return codec.through(x, noise.of(kind, clients))

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
        return sum(m.nbytes for m in self.messages if not m.broadcast and client in m.clients)

    def broadcasts(self) -> int:
        """Bytes that were broadcast."""
        return sum(m.nbytes for m in self.messages if m.broadcast)
