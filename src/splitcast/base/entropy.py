"""Whole numbers as a code stream: groups of them, each with a scale of its own that the stream tells.

Numbers come in groups whose sizes both sides know. Those of a group are taken as independent and two-sided geometric,
P(q) ~ t^|q|, with a = E|q| = 2 t / (1 - t^2). The scale a is a power of two: class 0 means that all are zero, which
costs nothing more; class c >= 1 has a = 2^(c - 11). Beyond a = 8, or 256 in size, the lowest bits of the numbers are
nearly even and travel as they are; up to a = 1/2 runs of zeros are told by their lengths.

A stream is two bytes, then the words of an asymmetric numeral system (Duda 2013; `constriction`, Bamler 2022), whose
trailing zero bytes are left out. The first numbers in it are the classes: whether a group begins or ends a run of
silent ones, and for the others how the class differs from the one before; the two bytes are the classes of these.
Probabilities are tables of whole numbers, so that two machines never disagree on them. Every stream is complete in
itself: nothing that was sent before is needed to read it.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from constriction import stream as ans
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError

Integers = NDArray[np.int32]

LIMIT = 2**22
"""Numbers are smaller than this in size."""
_REACH = 256
"""Tables go from -256 to 255."""
_ONE = 11
"""Class with a = 1."""
_PLAIN = 14
"""Last class without bits that travel as they are: a = 8."""
_LAST = _PLAIN + 14
_SPARSE = 10
"""Last class whose zeros are counted instead of told one by one: a = 1/2."""
_GAP_BITS = 10
_EVEN = 2**24
"""Most values of an even distribution that the coder takes."""
_SUM = 2.0**30


def coded(levels: Integers, sizes: Integers) -> bytes:
    """Levels (n,), group after group of these sizes, which are positive, as a stream.

    >>> stream = coded(np.array([0, 0, 3, -1, 0, 0], np.int32), np.array([2, 3, 1], np.int32))
    >>> len(stream), decoded(stream, np.array([2, 3, 1], np.int32)).tolist()
    (8, [0, 0, 3, -1, 0, 0])
    """
    spoken = _Spoken.of(levels, sizes)
    changes, steps = _told(spoken.classes)
    heads = [_class_of(part) for part in (changes, steps)]
    coder = ans.stack.AnsCoder()
    order = _Order.of(spoken.classes, sizes)
    places = spoken.at + (order.before - order.first)[order.rank[spoken.group]]
    by_class = np.argsort(spoken.classes[spoken.group].astype(np.int8), kind="stable")  # as int8: a radix sort
    places, values = places[by_class], spoken.values[by_class]
    for own in reversed(order.classes()):
        if own.kind <= _SPARSE:
            here = slice(*np.searchsorted(places, (own.start, own.stop)))
            _push_sparse(coder, own.kind, places[here] - own.start, values[here], own.stop - own.start)
        else:
            _push(coder, own.kind, levels[order.places(own)])
    for kind, part in zip(reversed(heads), (steps, changes), strict=True):
        _push(coder, kind, part)
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return bytes(heads) + words.rstrip(b"\0")


def decoded(stream: bytes, sizes: Integers) -> Integers:
    """The levels of a stream; what cannot be one raises a `SplitcastError`."""
    if len(stream) < 2 or max(stream[:2]) > _LAST:
        raise SplitcastError("code stream: has no beginning")
    words = np.frombuffer(stream[2:] + bytes(-(len(stream) - 2) % 4), "<u4").astype(np.uint32)
    if len(words) and not words[-1]:
        raise SplitcastError("code stream: ends in zeros")
    coder = ans.stack.AnsCoder(words)
    silent = np.cumsum(_pop(coder, stream[0], len(sizes))) % 2 == 0
    classes = np.zeros(len(sizes), np.int64)
    classes[~silent] = _ONE + np.cumsum(_pop(coder, stream[1], int((~silent).sum())), dtype=np.int64)
    if classes[~silent].size and not 1 <= classes[~silent].min() <= classes[~silent].max() <= _LAST:
        raise SplitcastError("code stream: has a scale that does not exist")
    levels, order = np.zeros(int(sizes.sum()), np.int32), _Order.of(classes, sizes)
    sparse: list[tuple[NDArray[np.int64], Integers]] = []
    for own in order.classes():
        if own.kind <= _SPARSE:
            at, values = _pop_sparse(coder, own.kind, own.stop - own.start)
            sparse.append((at + own.start, values))
        else:
            levels[order.places(own)] = _pop(coder, own.kind, own.stop - own.start)
    if sparse:
        at, values = (np.concatenate(each) for each in zip(*sparse, strict=True))
        levels[order.outside(at)] = values
    if not coder.is_empty():
        raise SplitcastError("code stream: is longer than what it holds")
    return levels


def ideal_bits(sums: NDArray[Any], sizes: NDArray[Any]) -> float:
    """Bits that groups of these sums of |q| take, about; scales not counted."""
    a = np.maximum(sums / np.maximum(sizes, 1), 2.0**-20)
    t = _ratio(a)
    bits = -(sizes * np.log2((1 - t) / (1 + t)) + sums * np.log2(t))
    return float(bits[sums > 0].sum())


class _Spoken(NamedTuple):
    """Levels that are not zero, since most are, and the class of every group."""

    at: NDArray[np.intp]
    values: Integers
    group: NDArray[np.intp]
    """of each of them"""
    classes: NDArray[np.int64]
    """by the mean size in a group, and no number may be beyond its table"""

    @staticmethod
    def of(levels: Integers, sizes: NDArray[Any]) -> "_Spoken":
        at = np.flatnonzero(levels != 0)  # twice as fast as without the comparison
        values = levels[at]
        first = np.searchsorted(at, np.cumsum(sizes) - sizes)
        count = np.diff(first, append=len(at))
        sums, most = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        if len(at):
            size, some = np.abs(values), count > 0
            sums[some] = np.add.reduceat(size, first[some], dtype=np.int64)
            most[some] = np.maximum.reduceat(size, first[some])
        classes = _classes(sums, most, sizes) if len(at) else np.zeros(len(sizes), np.int64)
        return _Spoken(at, values, np.repeat(np.arange(len(sizes)), count), classes)


def _classes(sums: NDArray[Any], most: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Classes of groups of these sizes, by the sums and the greatest of their |q|."""
    classes = np.rint(np.log2(np.maximum(sums, 1) / sizes)).astype(np.int64) + _ONE
    if most.max() >= _REACH:
        shifts = np.ceil(np.log2((most + 1) / _REACH)).astype(np.int64)
        classes = np.maximum(classes, np.where(shifts > 0, _PLAIN + shifts, 1))
    return np.where(sums > 0, classes.clip(1, _LAST), 0)


def _class_of(levels: Integers) -> int:
    """The class of a single group."""
    if not len(levels):
        return 0
    size = np.abs(levels)
    return int(_classes(size.sum(keepdims=True, dtype=np.int64), size.max(keepdims=True), np.array([len(size)]))[0])


def _told(classes: NDArray[np.int64]) -> tuple[Integers, Integers]:
    """How classes travel: 1 where groups begin or cease to be silent, and the steps from one class to the next."""
    spoken = classes > 0
    changes = spoken.astype(np.int32)
    changes[1:] = spoken[1:] != spoken[:-1]
    steps = classes[spoken].astype(np.int32)
    return changes, steps - np.concatenate([np.array([_ONE], np.int32), steps[:-1]])[: len(steps)]


class _Class(NamedTuple):
    """Groups of one class, one behind the other."""

    kind: int
    groups: slice
    """in the order of classes"""
    start: int
    """of their levels, in that order"""
    stop: int


class _Order(NamedTuple):
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
    def of(classes: NDArray[np.int64], sizes: NDArray[Any]) -> "_Order":
        order = np.argsort(classes.astype(np.int8), kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        own, starts = sizes[order], (np.cumsum(sizes, dtype=np.int64) - sizes)[order]
        return _Order(np.bincount(classes, minlength=1), rank, own, starts, np.cumsum(own, dtype=np.int64) - own)

    def classes(self) -> list[_Class]:
        """Every class but the silent one."""
        last, found = np.cumsum(self.counts).tolist(), []
        for kind in (np.flatnonzero(self.counts[1:]) + 1).tolist():
            groups = slice(last[kind - 1], last[kind])
            stop = int(self.before[groups.stop - 1] + self.sizes[groups.stop - 1])
            found.append(_Class(kind, groups, int(self.before[groups.start]), stop))
        return found

    def places(self, own: _Class) -> NDArray[np.int64]:
        """Of all levels of a class, as they are."""
        shifts = self.first[own.groups] - self.before[own.groups]
        return np.repeat(shifts, self.sizes[own.groups]) + np.arange(own.start, own.stop)

    def outside(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the order of classes as they are."""
        k = np.searchsorted(self.before, at, side="right") - 1
        places: NDArray[np.int64] = at + (self.first - self.before)[k]
        return places


def _push(coder: Any, kind: int, levels: Integers) -> None:
    if not kind or not len(levels):
        return
    if kind <= _SPARSE:
        at = np.flatnonzero(levels)
        _push_sparse(coder, kind, at, levels[at], len(levels))
        return
    shift, table = _model(kind)
    if shift:
        coder.encode_reverse(levels & (2**shift - 1), ans.model.Uniform(2**shift))
    coder.encode_reverse((levels >> shift) + np.int32(_REACH), table)


def _pop(coder: Any, kind: int, count: int) -> Integers:
    levels = np.zeros(count, np.int32)
    if not kind or not count:
        return levels
    if kind <= _SPARSE:
        at, values = _pop_sparse(coder, kind, count)
        levels[at] = values
        return levels
    shift, table = _model(kind)
    levels[:] = coder.decode(table, count) - np.int32(_REACH)
    return (levels << shift) + coder.decode(ans.model.Uniform(2**shift), count) if shift else levels


def _push_sparse(coder: Any, kind: int, at: NDArray[Any], values: Integers, count: int) -> None:
    """How many of ``count`` are not zero, the zeros before each of them, and what they are: the same bits in fewer
    numbers."""
    gaps = at.astype(np.int32)
    gaps[1:] -= gaps[:-1].copy() + np.int32(1)
    shift = max(0, int(gaps.max()).bit_length() - _GAP_BITS)
    coder.encode_reverse(values + np.int32(_REACH), _nonzero(kind))
    if shift:
        coder.encode_reverse(gaps & (2**shift - 1), ans.model.Uniform(2**shift))
    coder.encode_reverse(gaps >> shift, _gaps(count, len(at), shift))
    coder.encode_reverse(np.array([shift], np.int32), ans.model.Uniform(32))
    for place, size in reversed(_digits(count)):
        coder.encode_reverse(np.array([(len(at) >> place) % size], np.int32), ans.model.Uniform(size))


def _digits(most: int) -> list[tuple[int, int]]:
    """Bits below each digit of numbers up to ``most``, and its values: the coder takes up to 2^24 of them."""
    return [(0, most + 1)] if most < _EVEN else [(0, 2**16), (16, (most >> 16) + 1)]


def _pop_sparse(coder: Any, kind: int, count: int) -> tuple[NDArray[np.int64], Integers]:
    """Where levels are not zero, and what they are."""
    found = sum(int(coder.decode(ans.model.Uniform(size), 1)[0]) << place for place, size in _digits(count))
    shift = int(coder.decode(ans.model.Uniform(32), 1)[0])
    if not 0 < found <= count or shift > max(0, int(count).bit_length() - _GAP_BITS):
        raise SplitcastError("code stream: has a group that cannot be")
    gaps = coder.decode(_gaps(count, found, shift), found).astype(np.int64) << shift
    if shift:
        gaps += coder.decode(ans.model.Uniform(2**shift), found)
    at: NDArray[np.int64] = np.cumsum(gaps + 1) - 1
    if at[-1] >= count:
        raise SplitcastError("code stream: has a level behind its group")
    return at, coder.decode(_nonzero(kind), found) - np.int32(_REACH)


@cache
def _model(kind: int) -> tuple[int, Any]:
    """Bits that travel as they are, and the table for the rest."""
    shift = max(0, kind - _PLAIN)
    t = _ratio(2.0 ** (kind - shift - _ONE))
    return shift, _table([t ** abs(q) for q in range(-_REACH, _REACH)])


@cache
def _nonzero(kind: int) -> Any:
    """The table for levels that are not zero."""
    t = _ratio(2.0 ** (kind - _ONE))
    return _table([t ** abs(q) if q else 0.0 for q in range(-_REACH, _REACH)])


def _gaps(count: int, found: int, shift: int) -> Any:
    """The table for zeros before a level, of which ``found`` among ``count`` are not zero, without the last bits."""
    return _one_sided(round(2 * math.log2((1 + count - found) / (found * 2**shift))))


@cache
def _one_sided(rung: int) -> Any:
    """Geometric, with a mean of 2^(rung / 2)."""
    mean = 2 ** (rung / 2)
    return _table([(mean / (1 + mean)) ** q for q in range(2**_GAP_BITS)])


def _table(chances: list[float]) -> Any:
    """Probabilities as whole numbers."""
    whole = np.maximum(np.rint(_SUM * np.array(chances) / sum(chances)), 1)
    return ans.model.Categorical(whole, perfect=False)


def _ratio(a: Any) -> Any:
    """t of the two-sided geometric distribution with E|q| = a."""
    return (np.sqrt(1 + a * a) - 1) / a
