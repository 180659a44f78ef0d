"""What clients remember of the samples that they have sent, and which of them to send again.

A sample is stale once the client half has moved its features far from those that were sent,

    m = ||w^c(x) - S|| / ||S||,    S = w'^c(x) with the half of then, before coding

(what coding loses is none of it: sent again, it would be lost again). Of S a client keeps a sketch of r = `VALUES`
numbers, with signs g drawn once for all,

    z_j(S) = sum over i = j mod r of g_i S_i,    E ||z(S)||^2 = ||S||^2,

which is linear, so that ||z(w^c(x)) - z(S)|| / ||z(S)|| is m to about 1 / sqrt(r) of it; with r features or fewer it
is m. (Alon, Matias, Szegedy, STOC 1996; with one sign for every value, Thorup and Zhang, SIAM J. Comput. 2012.)
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from splitcast.base.codec import Codec, Labels
from splitcast.base.errors import SplitcastError
from splitcast.base.rounding import Draw
from splitcast.base.seeds import stream

VALUES = 256
"""Of a sketch; a kB."""
MOST = 2**20
"""Samples of a client that are remembered."""


def sketch(features: Tensor) -> Tensor:
    """z (b, r) of features (b, *d), in float32."""
    flat = features.detach().flatten(1).to("cpu", torch.float32)
    count, size = flat.shape[1], min(VALUES, flat.shape[1])
    padded = torch.nn.functional.pad(flat * _signs(count), (0, -count % size))
    return padded.view(len(flat), -(-count // size), size).sum(1)


@cache
def _signs(count: int) -> Tensor:
    drawn = torch.from_numpy(stream(0, "pool", count).bit_generator.random_raw(count).astype("int64"))
    return (1 - 2 * (drawn & 1)).float()


class Memory:
    """Of every client, by places in its order: sketches of what was sent, and how far it has moved since.

    >>> memory, x = Memory(places=3, stale=0.5), torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    >>> memory.sent(7, torch.tensor([0, 1]), x)
    >>> memory.chosen(7, 2).tolist()
    [2, -1]
    >>> memory.measured(7, torch.tensor([0, 1]), torch.tensor([[3.0, 4.0], [0.0, 4.0]]))
    >>> memory.chosen(7, 2).tolist(), memory.chosen(7, 1).tolist()
    ([2, 1], [2])
    """

    def __init__(self, places: int, stale: float) -> None:
        self.places, self.stale = places, stale
        self._sketches: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}
        """as last measured; infinite where nothing was sent"""

    def sent(self, client: int, places: Tensor, features: Tensor) -> None:
        """Features (m, *d) went up, of the samples at these places (m,)."""
        found = sketch(features)
        if client not in self._sketches:
            self._sketches[client] = torch.zeros(self.places, found.shape[1], device="cpu")
        self._sketches[client][places] = found
        self._of(client)[places] = 0.0

    def measured(self, client: int, places: Tensor, features: Tensor) -> None:
        """The same samples have these features now."""
        moved = self._of(client)
        known = moved[places].isfinite()
        if bool(known.any()):
            then, now = self._sketches[client][places[known]], sketch(features[known])
            apart, size = (torch.linalg.vector_norm(v, dim=1) for v in (now - then, then))
            moved[places[known]] = (apart / size.clamp(min=torch.finfo(size.dtype).tiny)).nan_to_num(nan=0.0)

    def chosen(self, client: int, most: int) -> Tensor:
        """Places to send (``most``,): those that never were, and the stale ones, most stale first; -1 behind them."""
        moved = self._of(client)
        first = moved.argsort(descending=True, stable=True)[:most]
        found = torch.full((most,), -1, device="cpu")
        first = first[moved[first] > self.stale]
        found[: len(first)] = first
        return found

    def _of(self, client: int) -> Tensor:
        if client not in self._moved:
            self._moved[client] = torch.full((self.places,), math.inf, device="cpu")
        return self._moved[client]

    def tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        known = {"sketches": self._sketches, "moved": {n: self._moved[n] for n in self._sketches}}
        return {f"{name}/{n}": value for name, part in known.items() for n, value in part.items()}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`, among others."""
        self._sketches, self._moved = (
            {int(key.partition("/")[2]): value.clone() for key, value in kept.items() if key.startswith(name)}
            for name in ("sketches/", "moved/")
        )


class Places(Codec):
    """Which of ``total`` places, up to b of them, -1 behind the last: their number, and each, as integers of one size.

    >>> form = Places(300)
    >>> packed = form.encode(torch.tensor([7, 299, -1, -1]))
    >>> packed.tolist(), form.decode(packed, (4,)).tolist(), form.nbytes((4,)), form.bound((4,))
    ([2, 0, 7, 0, 43, 1], [7, 299, -1, -1], 2, 10)
    """

    varies: ClassVar[bool] = True

    def __init__(self, total: int) -> None:
        self.total, self._numbers = total, Labels(total + 1)
        self.name = f"places-{self._numbers.name}"

    def nbytes(self, shape: Sequence[int]) -> int:
        """Of none."""
        return self._numbers.nbytes((1,))

    def bound(self, shape: Sequence[int]) -> int:
        return self._numbers.nbytes((1 + math.prod(shape),))

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        told = x[x >= 0]
        return self._numbers.encode(torch.cat([torch.tensor([len(told)], device="cpu"), told.cpu()]))

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        count, rest = divmod(len(payload), self._numbers.width)
        numbers = self._numbers.decode(payload, (count,)) if not rest else torch.empty(0, device="cpu")
        found = torch.full(tuple(shape), -1, device="cpu")
        if (
            not len(numbers)
            or numbers[0] != count - 1
            or count - 1 > len(found)
            or bool((numbers[1:] >= self.total).any())
            or len(set(numbers[1:].tolist())) < count - 1
        ):
            raise SplitcastError("has places that cannot be")
        found[: count - 1] = numbers[1:]
        return found
