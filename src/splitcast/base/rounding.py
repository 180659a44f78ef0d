"""Random numbers for stochastic rounding, and for formats that choose at random what they send.

They are a pure function of seed, round, step, kind of message and client. A client's numbers do not depend on who else
takes part or how clients are grouped, so that a client on another machine rounds exactly as its twin in the simulator.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitcast.base.seeds import stream

Draw = Callable[[int], Tensor]
"""count -> (messages, count) odd int16 numbers r, evenly spread and symmetric: r / 2^16 is noise in (-1/2, 1/2)."""

_KINDS = ("gradient", "basis", "coefficients")
"""Messages that are linear in what the clients apply: right on average is right for them. Others round to nearest."""
_PER_WORD = 4
_ODD = np.uint64(0x0001000100010001)


@dataclass(frozen=True)
class RoundingNoise:
    """The noise of one local step; without a seed there is none, and codecs round to nearest."""

    seed: int | None = None
    round: int = 0
    step: int = 0

    def of(self, kind: str, clients: Sequence[int] | None = None, *, always: bool = False) -> Draw | None:
        """The noise in one message to each of ``clients``; by default in one broadcast. With ``always`` there is some,
        whatever the kind."""
        if self.seed is None or not (always or kind in _KINDS):
            return None
        role = _KINDS.index(kind) if kind in _KINDS else zlib.crc32(kind.encode())
        seed, where = self.seed, (self.round, self.step, role, int(clients is None))
        ids = [0] if clients is None else clients

        def draw(count: int) -> Tensor:
            # odd, so that a grid point plus noise is never half way to the next
            words = -(-count // _PER_WORD)
            bits = stream(seed, "codec", *where).bit_generator
            assert isinstance(bits, np.random.PCG64)
            parts, at = [], 0
            for first, length in _runs(ids):
                bits.advance(first * words - at)
                parts.append(bits.random_raw(length * words))
                at = (first + length) * words
            noise = (np.concatenate(parts) if len(parts) > 1 else parts[0]) | _ODD
            return torch.from_numpy(noise.view(np.int16).reshape(len(ids), -1)[:, :count])

        return draw


def generator(draw: Draw) -> np.random.Generator:
    """The generator of one message, from its draw."""
    return np.random.default_rng(draw(8)[0].to(torch.int64).numpy() & 0xFFFF)


def _runs(clients: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of successive numbers as (first, length).

    >>> _runs([2, 3, 4, 7])
    [(2, 3), (7, 1)]
    """
    ids = np.asarray(clients)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ids))
    return list(zip(ids[starts].tolist(), lengths.tolist(), strict=True))
