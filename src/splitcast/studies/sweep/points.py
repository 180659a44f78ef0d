"""What a sweep trains: a grid over options, a list of runs, or a random draw from the grid."""

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitcast.base.config import Config, leaf_names, tables, with_values
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.files import read_bounded
from splitcast.base.seeds import stream

MOST = 100_000
"""Runs of one sweep."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=-]+")

Values = dict[str, Any]
"""Options by their names, such as {"scheme": "sfl", "seed": 0}."""


@dataclass(frozen=True)
class Point:
    """One training of a sweep."""

    values: Values
    """what it does not share with all others"""
    config: Config

    @property
    def name(self) -> str:
        """Its folder: what tells it from the others, without what file systems dislike."""
        return ",".join(_UNSAFE.sub("-", f"{name}={value}") for name, value in self.values.items())[:200]


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """An option and its values as written behind --over.

    >>> parse_axis("cut=1,2"), parse_axis("seed=0..3"), parse_axis("scheme=sfl,sfl-ga")
    (('cut', [1, 2]), ('seed', [0, 1, 2, 3]), ('scheme', ['sfl', 'sfl-ga']))
    """
    name, equals, listed = text.partition("=")
    if not equals or not listed:
        raise SplitcastError(f"over: {shown(text)}; write an option and its values, as in cut=1,2 or seed=0..4")
    return name.lstrip("-").replace("-", "_") if "." not in name else name.lstrip("-"), _values(listed)


def _values(listed: str) -> list[Any]:
    found: list[Any] = []
    for part in listed.split(","):
        if between := _RANGE.fullmatch(part):
            first, last = int(between[1]), int(between[2])
            if not first <= last < first + MOST:
                raise SplitcastError(f"over: {part} is not a range; write the smaller number first, as in 0..4")
            found += range(first, last + 1)
        else:
            found.append(_value(part))
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text


def read_plan(path: Path) -> tuple[dict[str, list[Any]], list[Values]]:
    """A sweep as TOML: ``[over]`` with a list per option, ``[[runs]]`` with the options of one run, or both."""
    plan = tables(read_bounded(path, 1_000_000).decode("utf-8", "replace"), str(path))
    over, runs = plan.pop("over", {}), plan.pop("runs", [])
    lists = isinstance(over, dict) and all(isinstance(values, list) and values for values in over.values())
    if plan or not lists or not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise SplitcastError(f"{path}: takes [over] with lists, as in seed = [0, 1], and [[runs]] with options")
    return over, runs


def points(
    config: Config, over: Mapping[str, Sequence[Any]], runs: Sequence[Values] = (), draw: int = 0
) -> list[Point]:
    """Every combination of the values of ``over``, for every one of ``runs``; of these ``draw`` at random.

    >>> [p.name for p in points(Config(), {"scheme": ["sfl", "psl"], "seed": [0]})]
    ['scheme=sfl,seed=0', 'scheme=psl,seed=0']
    """
    known = leaf_names()
    for name in [*over, *(name for run in runs for name in run)]:
        if name not in known:
            raise SplitcastError(f"over: {shown(name)} is no option; choose among {', '.join(known)}")
    count = max(1, len(runs))
    for values in over.values():
        count *= len(values)
    if not over and not runs:
        raise SplitcastError(
            "over: nothing to sweep; name options and values, as in --over scheme=sfl,sfl-ga seed=0..2"
        )
    if count > MOST:
        raise SplitcastError(f"over: {count:,} runs; at most {MOST:,} make a sweep")
    grid = [dict(zip(over, combination, strict=True)) for combination in itertools.product(*over.values())]
    chosen = [{**run, **combination} for run in runs or [{}] for combination in grid]
    if draw:
        rng = stream(config.train.seed, "sweep")
        chosen = [chosen[k] for k in sorted(rng.permutation(len(chosen))[:draw])]
    made = [Point(values, with_values(config, **values)) for values in chosen]
    names = [point.name for point in made]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SplitcastError(f"over: {twice} stands for two runs; name each value once")
    return made
