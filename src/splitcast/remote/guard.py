"""Against sites that send what no training makes: messages far larger than everybody else's, or sent before.

Nothing here knows what is right. A message is judged by its size beside that of the others and of earlier rounds: one
that is many times larger would move the model farther than all others together, whatever it holds.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitcast.base.registry import Registry
from splitcast.training.weights import Weights

MEMORY = 32
"""Rounds of which a site's messages are remembered."""
ENOUGH = 3
"""Sites without which no size is judged."""


def size_of(values: Tensor) -> float:
    """Root mean square."""
    flat = values.flatten().double()
    return float(torch.linalg.vector_norm(flat)) / math.sqrt(max(1, flat.numel()))


def upper_median(sizes: Sequence[float]) -> float:
    """The middle one; of two middle ones the larger.

    >>> upper_median([3.0, 1.0, 9.0]), upper_median([1.0, 9.0])
    (3.0, 9.0)
    """
    return sorted(sizes)[len(sizes) // 2]


@dataclass
class Guard:
    """What was usual so far in a job."""

    factor: float
    """How many times larger than usual a message may be; 0 lets everything pass."""
    _largest: dict[str, dict[int, float]] = field(default_factory=dict)
    """by kind and site, the largest that was accepted"""
    _seen: dict[int, deque[bytes]] = field(default_factory=dict)

    def outliers(self, kind: str, sizes: Mapping[int, float]) -> dict[int, str]:
        """Which of the sites' messages of a kind are too large, and why.

        Usual is the upper median over the sites of the largest each has sent, so that most of them decide; with fewer
        than three nobody can tell who lies, and everything passes.

        >>> guard = Guard(factor=100)
        >>> guard.outliers("smashed", {0: 1.0, 1: 1.2, 2: 1e15})
        {2: 'smashed: 1e+15 in size, where 1.2 is usual'}
        """
        largest = self._largest.setdefault(kind, {})
        known = largest | {n: max(size, largest.get(n, 0.0)) for n, size in sizes.items()}
        usual = upper_median(list(known.values())) if known else 0.0
        bound = self.factor * usual if self.factor and usual > 0 and len(known) >= ENOUGH else math.inf
        found = {
            n: f"{kind}: {size:.3g} in size, where {usual:.3g} is usual" for n, size in sizes.items() if size > bound
        }
        largest.update({n: known[n] for n in sizes if n not in found})
        return found

    def replayed(self, n: int, messages: Sequence[bytes]) -> bool:
        """Whether a site has sent these very bytes in one of its last rounds."""
        digest = hashlib.blake2b(digest_size=16)
        for message in messages:
            digest.update(message)
        past = self._seen.setdefault(n, deque(maxlen=MEMORY))
        again = digest.digest() in past
        past.append(digest.digest())
        return again


# averages of client halves: copies (n, ...), their weights (n,), and the last average


def mean(copies: Weights, rho: Tensor, last: Weights) -> Weights:
    """sum_n rho^n w^n"""
    return copies.mean(rho)


def clipped(copies: Weights, rho: Tensor, last: Weights) -> Weights:
    """The mean of the steps w^n - w, none of them longer than the median one (Karimireddy et al., ICML 2021)."""
    if not last.params:
        return copies.mean(rho)
    names = list(copies.params)
    lengths = torch.stack([(copies.params[k] - last.params[k]).flatten(1).double().square().sum(1) for k in names])
    lengths = lengths.sum(0).sqrt()
    shorten = (upper_median(lengths.tolist()) / lengths.clamp(min=1e-300)).clamp(max=1.0)

    def moved(slot: str, name: str, v: Tensor) -> Tensor:
        old = last.slots[slot][name]
        step: Tensor = torch.tensordot((rho.double() * shorten).to(v.dtype), v - old, dims=1)
        return old + step

    return copies.reduced(moved)


def median(copies: Weights, rho: Tensor, last: Weights) -> Weights:
    """The middle value of every coordinate, whatever the weights (Yin et al., ICML 2018)."""
    return copies.reduced(lambda slot, name, v: v.median(0).values if len(v) % 2 else _middle_two(v))


def trimmed(copies: Weights, rho: Tensor, last: Weights) -> Weights:
    """The mean of every coordinate without the largest and smallest fifth (Yin et al., ICML 2018)."""

    def cut(slot: str, name: str, v: Tensor) -> Tensor:
        out = len(v) // 5 or int(len(v) > 2)
        return v.sort(0).values[out : len(v) - out].mean(0)

    return copies.reduced(cut)


def _middle_two(v: Tensor) -> Tensor:
    ordered = v.sort(0).values
    return (ordered[len(v) // 2 - 1] + ordered[len(v) // 2]) / 2


AVERAGES: Registry[Callable[[Weights, Tensor, Weights], Weights]] = Registry("average", takes=3)
for _average in (mean, clipped, median, trimmed):
    AVERAGES[_average.__name__] = _average
