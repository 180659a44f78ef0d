"""What a run is judged by, as far as its folder and its configuration tell."""

from collections.abc import Mapping, Sequence
from typing import Any

from splitcast.base.config import Config
from splitcast.run.lines import RoundRecord
from splitcast.training.measure import Measure, measure
from splitcast.training.task import headline_of, make_task


def headline(config: Config, records: Sequence[RoundRecord] = (), summary: Mapping[str, Any] | None = None) -> Measure:
    """The measure that the task of a run names; where a task of somebody's may not be imported, what the summary says,
    or else the first that was measured."""
    try:
        return headline_of(make_task(config.model.task, classes=2))
    except Exception:  # a task of somebody's may raise anything, and a folder is to be shown all the same
        measured = (name for r in records for name in r.tests() if name != "loss")
        return _told(summary or {}) or measure(next(measured, "loss"))


def _told(summary: Mapping[str, Any]) -> Measure | None:
    told = summary.get("headline")  # the file may be anybody's
    if not isinstance(told, dict):
        return None
    name, unit, lower = (told.get(key) for key in ("name", "unit", "lower"))
    fits = isinstance(name, str) and isinstance(unit, str) and isinstance(lower, bool) and len(name) + len(unit) < 100
    return Measure(str(name), str(unit), lower=bool(lower)) if fits else None
