"""Curves of runs as figures and pages draw them: the mean over seeds with a band, and one look for every scheme.

Readable in print and by the colour-blind: Okabe-Ito colours, and markers and line styles that differ too.
"""

import statistics
from collections.abc import Sequence
from itertools import accumulate, count
from typing import NamedTuple

import matplotlib

from splitcast.run.records import RoundRecord
from splitcast.schemes.schemes import SCHEMES
from splitcast.training.measure import ACCURACY, Measure

matplotlib.use("Agg")  # figures are files

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))
PLACES = tuple(SCHEMES)
"""Schemes with a look of their own."""

Curve = tuple[list[float], list[float]]
Runs = Sequence[Sequence[RoundRecord]]
"""Runs that differ only in the seed."""


class Look(NamedTuple):
    """How a line is drawn: positions in COLOURS, and in MARKERS and DASHES."""

    colour: int
    mark: int


def looks(schemes: Sequence[str]) -> list[Look]:
    """How lines of these schemes are drawn: a scheme looks the same wherever it is.

    Another line of the same scheme keeps the colour and has another marker; where all are of one scheme, colours differ
    too. What is not in PLACES takes the places that are left.

    >>> [look.colour for look in looks(["psl", "sfl-ga", "mine"])], looks(["sl", "sl"])[1], looks(["sl", "sl", "fl"])[1]
    ([2, 0, 1], Look(colour=1, mark=1), Look(colour=6, mark=7))
    """
    if len(set(schemes)) == 1:
        return [_look(k) for k in range(len(schemes))]
    free = (k for k in count() if k >= len(PLACES) or PLACES[k] not in schemes)
    places = {name: PLACES.index(name) if name in PLACES else next(free) for name in dict.fromkeys(schemes)}
    found, drawn = [], dict.fromkeys(schemes, 0)
    for name in schemes:
        look = _look(places[name])
        found.append(look._replace(mark=(look.mark + drawn[name]) % len(MARKERS)))
        drawn[name] += 1
    return found


def _look(place: int) -> Look:
    return Look(place % len(COLOURS), (place + place // len(COLOURS)) % len(MARKERS))


def curves_of(records: Sequence[RoundRecord], judged: Measure = ACCURACY) -> dict[str, Curve]:
    """What tests found, accuracy in %, against rounds, cumulative MB (10^6 bytes) and simulated seconds."""
    costs = {
        "rounds": [float(r.round) for r in records],
        "MB": list(accumulate(r.bytes / 1e6 for r in records)),
        "seconds": list(accumulate(r.latency_s for r in records)),
    }
    tested = {k: value for k, r in enumerate(records) if (value := r.test(judged.name)) is not None}
    values = [judged.scale * value for value in tested.values()]
    return {name: ([cost[k] for k in tested], values) for name, cost in costs.items()}


class Band(NamedTuple):
    """Curves of several seeds as one: means, and the lowest and highest value at each point."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(runs: Runs, against: str, judged: Measure = ACCURACY) -> Band:
    """What tests found, over the rounds in which all of these runs were tested."""
    curves = [curves_of(records, judged) for records in runs]
    rounds = sorted(set.intersection(*(set(curve["rounds"][0]) for curve in curves)))
    at = [dict(zip(curve["rounds"][0], zip(*curve[against], strict=True), strict=True)) for curve in curves]
    points = [list(zip(*(each[t] for each in at), strict=True)) for t in rounds]  # per round (x of all, y of all)
    return Band(
        [statistics.fmean(x) for x, _ in points],
        [statistics.fmean(y) for _, y in points],
        [min(y) for _, y in points],
        [max(y) for _, y in points],
    )
