"""Whole numbers as a code stream: groups of them, each with a scale of its own that the stream tells.

Numbers come in groups whose sizes both sides know. Those of a group are taken as independent and two-sided geometric,
P(q) ~ t^|q|, with a = E|q| = 2 t / (1 - t^2). The scale a is a power of two: class 0 means that all are zero, which
costs nothing more; class c >= 4 has a = 2^(c - 11), class 4 also less. Beyond a = 8, or 256 in size, the lowest bits of
the numbers are nearly even and travel as they are; up to a = 1/2 runs of zeros are told by their lengths. Of such a
class the stream tells how many are not zero and of how many bits the longest run is; and of every class, of how many
the largest number is. So tables are no longer than need be: a decoder looks through them.

A stream is two bytes, then the words of an asymmetric numeral system (Duda 2013; `constriction`, Bamler 2022), whose
trailing zero bytes are left out. The first numbers in it are the classes: whether a group begins or ends a run of
silent ones, and for the others how the class differs from the one before; the two bytes are the classes of these. Then
comes what is told of classes with runs, and last the numbers, class after class.

Probabilities are tables of whole numbers, so that two machines never disagree on them. Every stream is complete in
itself: nothing that was sent before is needed to read it.
"""

import math
import operator
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, repeat
from typing import Any

import numpy as np
from constriction import stream as ans
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError
from splitcast.base.scales import (
    LAST,
    ONE,
    PLAIN,
    RARE,
    WIDEST,
    Class,
    Integers,
    Order,
    Spoken,
    changes,
    class_of,
    digits,
    even_bits,
    ratio,
    told_of,
)

LIMIT = 2**22
"""Numbers are smaller than this in size."""
_WIDTHS = ans.model.Uniform(WIDEST + 1)
_GAP_BITS = 10
_SUM = 2.0**30


def coded(levels: Integers, sizes: Integers) -> bytes:
    """Levels (n,), group after group of these sizes, which are positive, as a stream.

    >>> stream = coded(np.array([0, 0, 3, -1, 0, 0], np.int32), np.array([2, 3, 1], np.int32))
    >>> len(stream), decoded(stream, np.array([2, 3, 1], np.int32)).tolist()
    (8, [0, 0, 3, -1, 0, 0])
    """
    spoken = Spoken.of(levels, sizes)
    told = told_of(spoken.classes)
    heads = [class_of(part) for part in told]
    coder = ans.stack.AnsCoder()
    order = Order.of(spoken.classes, sizes)
    runs, others = order.classes()
    if others:
        some = levels[order.places(others)]
        for own in reversed(others):
            _push(coder, own.kind, some[own.start - others[0].start : own.stop - others[0].start])
    if runs:
        places = spoken.at + (order.before - order.first)[order.rank[spoken.group]]
        by_class = np.argsort(spoken.classes[spoken.group].astype(np.int8), kind="stable")  # as int8: a radix sort
        by_class = by_class[: np.searchsorted(places[by_class], runs[-1].stop)]
        _push_runs(coder, runs, places[by_class], spoken.values[by_class])
    for kind, part in zip(reversed(heads), reversed(told), strict=True):
        _push(coder, kind, part)
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return bytes(heads) + words.rstrip(b"\0")


def decoded(stream: bytes, sizes: Integers) -> Integers:
    """The levels of a stream; what cannot be one raises a `SplitcastError`."""
    if len(stream) < 2 or max(stream[:2]) > LAST:
        raise SplitcastError("code stream: has no beginning")
    words = np.frombuffer(stream[2:] + bytes(-(len(stream) - 2) % 4), "<u4").astype(np.uint32)
    if len(words) and not words[-1]:
        raise SplitcastError("code stream: ends in zeros")
    coder = ans.stack.AnsCoder(words)
    silent = np.cumsum(_pop(coder, stream[0], len(sizes))) % 2 == 0
    classes = np.zeros(len(sizes), np.int64)
    classes[~silent] = ONE + np.cumsum(_pop(coder, stream[1], int((~silent).sum())), dtype=np.int64)
    if classes[~silent].size and not RARE <= classes[~silent].min() <= classes[~silent].max() <= LAST:
        raise SplitcastError("code stream: has a scale that does not exist")
    levels, order = np.zeros(int(sizes.sum()), np.int32), Order.of(classes, sizes)
    runs, others = order.classes()
    if runs:
        at, values = _pop_runs(coder, runs)
        levels[order.outside(at)] = values
    if others:
        some = [_pop(coder, own.kind, own.stop - own.start) for own in others]
        levels[order.places(others)] = np.concatenate(some)
    if not coder.is_empty():
        raise SplitcastError("code stream: is longer than what it holds")
    return levels


def ideal_bits(sums: NDArray[Any], sizes: NDArray[Any]) -> float:
    """Bits that groups of these sums of |q| take, about; scales not counted."""
    a = np.maximum(sums / np.maximum(sizes, 1), 2.0**-20)
    t = ratio(a)
    bits = -(sizes * np.log2((1 - t) / (1 + t)) + sums * np.log2(t))
    return float(bits[sums > 0].sum())


def _push(coder: Any, kind: int, levels: Integers) -> None:
    if not kind or not len(levels):
        return
    shift = even_bits(kind)
    if shift:
        coder.encode_reverse(levels & (2**shift - 1), ans.model.Uniform(2**shift))
        levels = levels >> shift
    wide = int(np.maximum(levels, ~levels).max()).bit_length()
    coder.encode_reverse(levels + np.int32(2**wide), _all(kind, wide))
    coder.encode_reverse(np.array([wide], np.int32), _WIDTHS)


def _pop(coder: Any, kind: int, count: int) -> Integers:
    if not kind or not count:
        return np.zeros(count, np.int32)
    shift, wide = even_bits(kind), int(coder.decode(_WIDTHS, 1)[0])
    levels: Integers = coder.decode(_all(kind, wide), count) - np.int32(2**wide)
    return (levels << shift) + coder.decode(ans.model.Uniform(2**shift), count) if shift else levels


def _push_runs(coder: Any, classes: Sequence[Class], at: NDArray[Any], values: Integers) -> None:
    """Of every class, whose levels lie between its start and stop: how many are not zero, of how many bits are the
    longest run of zeros before one and the largest, then all runs and all of them; the same bits in fewer numbers."""
    first = np.searchsorted(at, [own.start for own in classes])
    gaps = changes(at, -1)
    gaps[first] = at[first] - [own.start - 1 for own in classes]
    gaps = gaps.astype(np.int32) - np.int32(1)
    longest = np.maximum.reduceat(gaps, first).tolist()
    largest = np.maximum.reduceat(np.abs(values), first).tolist()
    edges, told = [*first.tolist(), len(at)], []
    for own, begin, end, gap, size in zip(classes, edges[:-1], edges[1:], longest, largest, strict=True):
        told += own.told(end - begin, gap.bit_length(), size.bit_length())
    for k in range(len(classes) - 1, -1, -1):
        own, here = classes[k], slice(edges[k], edges[k + 1])
        bits, wide = longest[k].bit_length(), largest[k].bit_length()
        coder.encode_reverse(values[here] + np.int32(2**wide - 1), _nonzero(own.kind, wide))
        low = max(0, bits - _GAP_BITS)
        if low:
            coder.encode_reverse(gaps[here] & (2**low - 1), ans.model.Uniform(2**low))
        if bits:
            coder.encode_reverse(gaps[here] >> low, _gaps(own.stop - own.start, edges[k + 1] - edges[k], bits))
    numbers, of = (np.array(part, np.int32) for part in zip(*told, strict=True))
    coder.encode_reverse(numbers, ans.model.Uniform(), of)


def _pop_runs(coder: Any, classes: Sequence[Class]) -> tuple[NDArray[np.int64], Integers]:
    """Where levels of these classes are not zero, and what they are."""
    of = np.array([size for own in classes for _, size in own.told()], np.int32)
    told = iter(coder.decode(ans.model.Uniform(), of).tolist())
    gaps, values, counts = [], [], []
    for own in classes:
        size = own.stop - own.start
        found = sum(next(told) << 16 * place for place in range(len(digits(size))))
        bits, wide = next(told), next(told) + 1
        if not 0 < found <= size or bits > size.bit_length():
            raise SplitcastError("code stream: has a group that cannot be")
        counts.append((found, bits, wide))
    for own, (found, bits, wide) in zip(classes, counts, strict=True):
        low = max(0, bits - _GAP_BITS)
        zeros = np.zeros(found, np.int64)
        if bits:
            zeros += coder.decode(_gaps(own.stop - own.start, found, bits), found)
        if low:
            zeros = (zeros << low) + coder.decode(ans.model.Uniform(2**low), found)
        gaps.append(zeros)
        values.append(coder.decode(_nonzero(own.kind, wide), found) - np.int32(2**wide - 1))
    counted = np.array([found for found, _, _ in counts])
    ends = np.cumsum(counted)
    at: NDArray[np.int64] = np.cumsum(np.concatenate(gaps) + 1)
    before = np.concatenate([np.zeros(1, np.int64), at[ends[:-1] - 1]])
    at += np.repeat([own.start - 1 for own in classes] - before, counted)
    if (at[ends - 1] >= [own.stop for own in classes]).any():
        raise SplitcastError("code stream: has a level behind its group")
    return at, np.concatenate(values)


@cache
def _all(kind: int, wide: int) -> Any:
    """The table for levels of up to so many bits, without the even ones."""
    up = _powers(ratio(2.0 ** (min(kind, PLAIN) - ONE)), 2**wide + 1)
    return _table([up[abs(q)] for q in range(-(2**wide), 2**wide)])


@cache
def _nonzero(kind: int, wide: int) -> Any:
    """The table for levels that are not zero, of up to so many bits."""
    most = 2**wide - 1
    up = _powers(ratio(2.0 ** (kind - ONE)), most + 1)
    return _table([up[abs(q)] if q else 0.0 for q in range(-most, most + 1)])


def _gaps(count: int, found: int, bits: int) -> Any:
    """The table for zeros before a level, of which ``found`` among ``count`` are not zero, without the last bits."""
    low = max(0, bits - _GAP_BITS)
    return _one_sided(round(2 * math.log2((1 + count - found) / (found * 2**low))), bits - low)


@cache
def _one_sided(rung: int, bits: int) -> Any:
    """Geometric, with a mean of 2^(rung / 2)."""
    mean = 2.0 ** (rung // 2) * (math.sqrt(2.0) if rung % 2 else 1.0)
    return _table(_powers(mean / (1 + mean), 2**bits))


def _powers(t: float, count: int) -> list[float]:
    """1, t, t^2, ... by products: these, roots and quotients are the same on every machine, ``pow`` is not."""
    return list(accumulate(repeat(t, count - 1), operator.mul, initial=1.0))


def _table(chances: list[float]) -> Any:
    """Probabilities as whole numbers, from a sum that no order of adding changes."""
    whole = np.maximum(np.rint(_SUM * np.array(chances) / math.fsum(chances)), 1)
    return ans.model.Categorical(whole, perfect=False)
