"""Finished runs that differ only in the seed, shown as one: means, bands, and how many."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitcast.base.config import to_toml, with_values
from splitcast.studies.report.runs import Run

Columns = dict[str, list[Any]]
EDGES = ("low", "high")


@dataclass(frozen=True)
class Group:
    """Runs of one configuration with a seed each; at least one."""

    name: str
    runs: list[Run]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs in their order; a run that is not finished, or has a seed that is there already, stays alone."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = (to_toml(with_values(run.config, seed=0)), repr((run.summary or {}).get("own")))
        if run.summary is None or run.config.train.seed in (each.config.train.seed for each in found.get(key, ())):
            key = (str(run.path), "")
        found.setdefault(key, []).append(run)
    names = [_name([run.name for run in each]) for each in found.values()]
    often = Counter(names)
    return [
        Group(name if often[name] == 1 else each[0].name, each)
        for name, each in zip(names, found.values(), strict=True)
    ]


def _name(names: Sequence[str]) -> str:
    """What several names have in common but for the seed.

    >>> _name(["sfl", "sfl,seed=1"]), _name(["seed=0,cut=1", "seed=1,cut=1"]), _name(["a", "b"]), _name(["seed=0"])
    ('sfl', 'cut=1', 'a', 'seed=0')
    """
    bare = {re.sub(r"[,/_ -]?\bseed[= -]?\d+$|\bseed[= -]?\d+[,/_ -]", "", name) for name in names}
    return bare.pop() if len(names) > 1 and len(bare) == 1 and "" not in bare else names[0]


def merged(columns: Sequence[Columns]) -> tuple[Columns, dict[str, dict[str, list[Any]]]]:
    """Columns of several seeds as their means over the rounds that all have, and the lowest and highest values.

    >>> merged([{"rounds": [1, 2], "loss": [2.0, 1.0]}, {"rounds": [1, 2, 3], "loss": [4.0, None, 1.0]}])
    ({'rounds': [1, 2], 'loss': [3.0, None]}, {'loss': {'low': [2.0, None], 'high': [4.0, None]}})
    """
    if len(columns) == 1:
        return columns[0], {}
    where = [{t: k for k, t in enumerate(each["rounds"])} for each in columns]
    common = sorted(set.intersection(*map(set, where)))
    places = [[at[t] for t in common] for at in where]
    means: Columns = {"rounds": common}
    edges: dict[str, dict[str, list[Any]]] = {}
    for name in columns[0]:
        if name == "rounds" or not all(name in each for each in columns):
            continue
        rows = list(zip(*([each[name][k] for k in at] for each, at in zip(columns, places, strict=True)), strict=True))
        known = [None not in row for row in rows]
        means[name] = [statistics.fmean(row) if k else None for row, k in zip(rows, known, strict=True)]
        edges[name] = {
            edge: [pick(row) if k else None for row, k in zip(rows, known, strict=True)]
            for edge, pick in zip(EDGES, (min, max), strict=True)
        }
    return means, edges


def mean_kinds(kinds: Sequence[dict[str, int]]) -> dict[str, float]:
    """Bytes per kind, mean over seeds."""
    names = dict.fromkeys(name for each in kinds for name in each)
    return {name: statistics.fmean(each.get(name, 0) for each in kinds) for name in names}
