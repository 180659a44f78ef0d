"""Verdicts that take the spread of the seeds into account.

A claim says that something is larger than something else. Trainings with the same seed share data, batches and
channel, so the differences of each seed are what counts: it *holds* only if their mean is above 0 by more than the
half width of its 95 % interval (Student's t), it *does not hold* if it is below 0 by more than that, and else the two
*tie*. With one seed there is no spread, and no verdict but that of a tie.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from splitcast.studies.results import estimate

Verdict = Literal["holds", "ties", "holds in order, not in size", "does not hold", "one seed"]
Values = Sequence[float] | NDArray[np.float64]
"""One per seed, in the same order."""
_WEAKEST: tuple[Verdict, ...] = ("does not hold", "ties", "one seed", "holds in order, not in size", "holds")


def verdict(order: bool, size: bool = True) -> Verdict:
    """Of what has no spread. ``order``: the ordinal part is as the paper says; ``size``: so are the figures."""
    return "does not hold" if not order else "holds" if size else "holds in order, not in size"


def larger(these: Values, those: Values, *, size: bool = True) -> Verdict:
    """Whether these are larger than those, seed by seed; infinities are what never ended: they count as the largest
    that did, where others of theirs did.

    >>> larger([3.0, 3.1, 3.2], [1.0, 1.0, 1.0]), larger([3.0, 3.1, 3.2], [3.0, 3.2, 3.1])
    ('holds', 'ties')
    >>> larger([1.0, 1.0], [2.0, 2.0]), larger([1.0], [0.0]), larger([2.0, 2.0], [2.0, 2.0])
    ('does not hold', 'one seed', 'ties')
    """
    ended = [value for value in (*these, *those) if np.isfinite(value)]
    mine, others = (
        np.clip(each, -1e300, max(ended) if np.isfinite(each).any() else 1e300)
        for each in (np.asarray(these, dtype=np.float64), np.asarray(those, dtype=np.float64))
    )
    both = zip(these, those, mine, others, strict=True)
    gains = [0.0 if a == b else float(x / 2 - y / 2) for a, b, x, y in both]
    if not any(gains):
        return "ties"
    if len(gains) == 1:
        return "one seed"
    scale = max(map(abs, gains)) or 1.0
    mean, half, _ = estimate([gain / scale for gain in gains])
    if abs(mean) <= half:
        return "ties"
    return verdict(mean > 0, size)


def larger_by(these: Values, those: Values, share: float) -> Verdict:
    """Whether a ``share`` of these is still larger than those; if only all of these are, in order, not in size.

    >>> larger_by([3.0, 3.1], [1.0, 1.1], 0.5), larger_by([3.0, 3.1], [2.0, 2.1], 0.5)
    ('holds', 'holds in order, not in size')
    """
    return larger(these, those, size=larger(share * np.asarray(these, dtype=np.float64), those) == "holds")


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """A claim of several parts is as good as its weakest."""
    return min(verdicts, key=_WEAKEST.index)


def most_of(verdicts: Iterable[Verdict], count: int) -> Verdict:
    """A claim about ``count`` of several cases, whichever: the weakest of the ``count`` strongest.

    >>> most_of(["holds", "does not hold", "holds", "ties"], 2), most_of(["holds", "does not hold", "ties"], 2)
    ('holds', 'ties')
    """
    return sorted(verdicts, key=_WEAKEST.index)[-count]


def spread(values: Values, digits: int = 1) -> str:
    """A mean over seeds with the half width of its 95 % interval.

    >>> spread([94.0, 95.0, 96.0]), spread([94.0]), spread([1.0, float("inf")])
    ('95.0 ± 2.5', '94.0', 'never')
    """
    if not np.isfinite(values).all():
        return "never"
    mean, half, n = estimate(list(values))
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if n > 1 else "")
