"""Groups of whole numbers by their scales, for `base.entropy`: the class of each, and their order in a stream.

The scale a = E|q| of a group is a power of two, 2^(c - 11) in class c; class 0 means that all are zero.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]

WIDEST = 8
REACH = 2**WIDEST
"""Tables go from -256 to 255 at most."""
ONE = 11
"""Class with a = 1."""
PLAIN = 14
"""Last class without bits that travel as they are: a = 8."""
LAST = PLAIN + 14
SPARSE = 10
"""Last class whose zeros are counted instead of told one by one: a = 1/2."""
RARE = 4
"""First class with runs: whatever is rarer than a = 1/128 is told with it, since a class of its own takes 30 bits."""
EVEN = 2**24
"""Most values of an even distribution that the coder takes."""


class Spoken(NamedTuple):
    """Levels that are not zero, since most are, and the class of every group."""

    at: NDArray[np.intp]
    values: Integers
    group: NDArray[np.intp]
    """of each of them"""
    classes: NDArray[np.int64]
    """by the mean size in a group, and no number may be beyond its table"""

    @staticmethod
    def of(levels: Integers, sizes: NDArray[Any]) -> "Spoken":
        at = np.flatnonzero(levels != 0)  # twice as fast as without the comparison
        values = levels[at]
        edges = np.searchsorted(at, np.cumsum(sizes))
        count = changes(edges, 0)
        first = edges - count
        sums, most = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        if len(at):
            size, some = np.abs(values), count > 0
            sums[some] = np.add.reduceat(size, first[some], dtype=np.int64)
            most[some] = np.maximum.reduceat(size, first[some])
        classes = _classes(sums, most, sizes) if len(at) else np.zeros(len(sizes), np.int64)
        return Spoken(at, values, np.repeat(np.arange(len(sizes)), count), classes)


def _classes(sums: NDArray[Any], most: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Classes of groups of these sizes, by the sums and the greatest of their |q|."""
    classes = np.rint(np.log2(np.maximum(sums, 1) / sizes)).astype(np.int64) + ONE
    if most.max() >= REACH:
        shifts = np.ceil(np.log2((most + 1) / REACH)).astype(np.int64)
        classes = np.maximum(classes, np.where(shifts > 0, PLAIN + shifts, 1))
    return np.where(sums > 0, classes.clip(RARE, LAST), 0)


def class_of(levels: Integers) -> int:
    """The class of a single group of numbers within the tables."""
    total = int(np.abs(levels).sum())
    return min(max(RARE, round(math.log2(total / len(levels))) + ONE), LAST) if total else 0


def told_of(classes: NDArray[np.int64]) -> tuple[Integers, Integers]:
    """How classes travel: 1 where groups begin or cease to be silent, and the steps from one class to the next."""
    spoken = classes > 0
    edges = spoken.astype(np.int32)
    edges[1:] = spoken[1:] != spoken[:-1]
    return edges, changes(classes[spoken].astype(np.int32), ONE)


class Class(NamedTuple):
    """Groups of one class, one behind the other."""

    kind: int
    groups: slice
    """in the order of classes"""
    start: int
    """of their levels, in that order"""
    stop: int

    def told(self, found: int = 0, bits: int = 0, wide: int = 1) -> list[tuple[int, int]]:
        """What the stream tells of a class with runs, and how many values each number has."""
        sizes = digits(self.stop - self.start)
        return [
            *(((found >> 16 * place) % size, size) for place, size in enumerate(sizes)),
            (bits, 32),
            (wide - 1, WIDEST),
        ]


class Order(NamedTuple):
    """Groups in the order of their classes: how levels are coded."""

    counts: NDArray[np.intp]
    """groups of every class"""
    rank: NDArray[np.intp]
    """where each group is in that order; all below are in it"""
    sizes: NDArray[Any]
    first: NDArray[np.int64]
    """where each begins among all levels as they are"""
    before: NDArray[np.int64]
    """and in the order of classes"""

    @staticmethod
    def of(classes: NDArray[np.int64], sizes: NDArray[Any]) -> "Order":
        order = np.argsort(classes.astype(np.int8), kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        own, starts = sizes[order], (np.cumsum(sizes, dtype=np.int64) - sizes)[order]
        return Order(np.bincount(classes, minlength=1), rank, own, starts, np.cumsum(own, dtype=np.int64) - own)

    def classes(self) -> tuple[list[Class], list[Class]]:
        """Every class but the silent one: those with runs of zeros, and the others."""
        last, counts = np.cumsum(self.counts).tolist(), self.counts.tolist()
        edges, sparse, found = [*self.before.tolist(), int(self.sizes.sum())], 0, []
        for kind in range(1, len(counts)):
            if counts[kind]:
                groups = slice(last[kind - 1], last[kind])
                found.append(Class(kind, groups, edges[groups.start], edges[groups.stop]))
                sparse += kind <= SPARSE
        return found[:sparse], found[sparse:]

    def places(self, classes: Sequence[Class]) -> NDArray[np.int64]:
        """Of all levels of classes that follow one another, as they are."""
        groups = slice(classes[0].groups.start, classes[-1].groups.stop)
        shifts = self.first[groups] - self.before[groups]
        return np.repeat(shifts, self.sizes[groups]) + np.arange(classes[0].start, classes[-1].stop)

    def outside(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the order of classes as they are."""
        k = np.searchsorted(self.before, at, side="right") - 1
        places: NDArray[np.int64] = at + (self.first - self.before)[k]
        return places


def digits(most: int) -> list[int]:
    """How many values each digit of numbers up to ``most`` has, the lowest first: the coder takes up to 2^24."""
    return [most + 1] if most < EVEN else [2**16, (most >> 16) + 1]


def even_bits(kind: int) -> int:
    """Bits of a number that travel as they are."""
    return max(0, kind - PLAIN)


def changes(numbers: NDArray[Any], before: int) -> NDArray[Any]:
    """From each number to the next; the first one from ``before``.

    >>> changes(np.array([3, 5, 4]), 2).tolist()
    [1, 2, -1]
    """
    found = numbers.copy()
    found[1:] -= numbers[:-1]
    found[:1] -= before
    return found


def ratio(a: Any) -> Any:
    """t of the two-sided geometric distribution with E|q| = a."""
    return (np.sqrt(1 + a * a) - 1) / a
