"""Client halves as differences: what an averaging sends when its format is not exact.

With w the half that everybody holds since the last averaging, client n sends what its own has moved, and the server
what the average has, each with what rounding left over the last time (error feedback; Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019):

    client n    d^n = w^n - w + e^n      sends q(d^n)      e^n <- d^n - q(d^n)
    server      d = mean_n(w + q(d^n)) - w + e             e <- d - q(d)
    everybody   w <- w + q(d)

Values travel in rows of up to 256, each with a grid of its own. Where somebody does not hold w, because it joined
late or missed a broadcast, or because nobody does after a move of the cut, whole halves travel as they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitcast.base.codec import Codec, counted
from splitcast.training.weights import Weights

ROW = 256


def row_shape(values: int) -> tuple[int, int]:
    """The shape of a message of so many values.

    >>> row_shape(832), row_shape(104)
    ((4, 208), (1, 104))
    """
    rows = max(1, math.ceil(values / ROW))
    return rows, math.ceil(values / rows)


def as_rows(values: Tensor) -> Tensor:
    """Values (n,) in rows, the last one filled up with zeros."""
    shape = row_shape(len(values))
    return torch.nn.functional.pad(values, (0, math.prod(shape) - len(values))).view(shape)


def from_rows(rows: Tensor, values: int) -> Tensor:
    """The inverse of `as_rows`."""
    return rows.flatten()[:values]


def difference_work(values: int, codec: Codec) -> tuple[float, float]:
    """Operations of sending a half of so many values as a difference, and of receiving it: who sends subtracts, adds
    what was left over, codes, and decodes to see what is left over now; who receives decodes and adds."""
    encode, decode = counted(codec, row_shape(values))
    return encode + decode + 3.0 * values, decode + values


@dataclass
class Differences:
    """What is remembered from one averaging to the next, as flat vectors."""

    last: Tensor | None = None
    """w, or None if nobody knows what all hold"""
    left: dict[int, Tensor] = field(default_factory=dict)
    """e^n of clients"""
    left_here: Tensor | None = None
    """e of the server"""

    def begin(self, half: Weights) -> None:
        """Before a round: if there is one copy, everybody holds it."""
        if not half.stacked:
            self.last = half.flat()

    def moved(self) -> None:
        """Halves have other values now."""
        self.last, self.left, self.left_here = None, {}, None

    def from_client(self, n: int, half: Tensor) -> Tensor:
        """What client n sends, in rows."""
        assert self.last is not None
        return as_rows(_with(half - self.last, self.left.get(n)))

    def from_server(self, average: Tensor) -> Tensor:
        """What the server sends, in rows."""
        assert self.last is not None
        return as_rows(_with(average - self.last, self.left_here))

    def arrived(self, seen: Tensor) -> Tensor:
        """A half of which this was seen, in rows."""
        assert self.last is not None
        return self.last + from_rows(seen, len(self.last))

    def shared(self, sent: Tensor, seen: Tensor) -> Tensor:
        """Everybody has seen the server's message: the half that all hold now."""
        self.last = self.arrived(seen)
        self.left_here = from_rows(sent - seen, len(self.last))
        return self.last

    def kept(self, n: int, sent: Tensor, seen: Tensor) -> None:
        """Client n's message was seen so."""
        assert self.last is not None
        self.left[n] = from_rows(sent - seen, len(self.last))

    def average(self, halves: Weights, ids: Sequence[int], rho: Tensor, codec: Codec) -> tuple[Weights, list[int], int]:
        """Average stacked halves: the new one, and the sizes of what was sent by each and by the server."""
        sizes, arrived = [], []
        for k, n in enumerate(ids):
            sent = self.from_client(n, halves.one(k).flat())
            seen, (size,) = codec.measured(sent[None])
            self.kept(n, sent, seen[0])
            arrived.append(self.arrived(seen[0]))
            sizes.append(size)
        like = halves.one(0)
        copies = Weights.stacked_of(Weights.unflat(values, like) for values in arrived)
        sent = self.from_server(copies.mean(rho).flat())
        seen, (size,) = codec.measured(sent[None])
        return Weights.unflat(self.shared(sent, seen[0]), like), sizes, size

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        known = {"last": self.last, "left_here": self.left_here} | {f"left/{n}": v for n, v in self.left.items()}
        return {f"sync/{name}": value for name, value in known.items() if value is not None}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> "Differences":
        """The inverse of `tensors`, among others."""
        own = {name.removeprefix("sync/"): v.to(device) for name, v in tensors.items() if name.startswith("sync/")}
        left = {int(name[5:]): value for name, value in own.items() if name.startswith("left/") and name[5:].isdigit()}
        return Differences(own.get("last"), left, own.get("left_here"))


def _with(values: Tensor, left: Tensor | None) -> Tensor:
    return values if left is None else values + left
