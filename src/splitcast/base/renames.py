"""Keys that have moved since earlier versions. Old files are read; old flags are refused by their new name."""

import warnings
from typing import Any

from splitcast.base.errors import SplitcastError

MOVED = {
    "split.aggregate": "epsl.aggregate",
    "split.rank": "sfl-gb.rank",
    "split.drop": "sfl-gb.drop",
}
"""Old and new place, as section.key."""


COMPLETE = {"data", "model", "split", "train", "network", "policy"}
"""Sections that a configuration has which a run wrote."""


def _older_scheme(new: dict[str, Any]) -> list[str]:
    """What was called epsl until there was [cpsl] is now epsl-cut; who wrote a few lines by hand means the new one."""
    split = new.get("split")
    if isinstance(split, dict) and split.get("scheme") == "epsl" and new.keys() >= COMPLETE and "cpsl" not in new:
        split["scheme"] = "epsl-cut"
        return ["the scheme epsl is now epsl-cut"]
    return []


def moved(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """The tables of a TOML file with every key where it is now; one warning says what was moved.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     moved({"split": {"cut": 2, "rank": 8}}, "old.toml")
    {'split': {'cut': 2}, 'sfl-gb': {'rank': 8}}
    >>> print(caught[0].message)
    old.toml: split.rank is now sfl-gb.rank
    """
    new = {name: dict(table) if isinstance(table, dict) else table for name, table in raw.items()}
    said = []
    for name, table in raw.items():
        for key in table if isinstance(table, dict) else ():
            if (to := MOVED.get(f"{name}.{key}")) is None:
                continue
            home, _, leaf = to.partition(".")
            there = new.setdefault(home, {})
            if not isinstance(there, dict) or leaf in there:
                raise SplitcastError(f"{source}: {name}.{key} is now {to}, which is given too; leave the old one out")
            there[leaf] = new[name].pop(key)
            said.append(f"{name}.{key} is now {to}")
    said += _older_scheme(new)
    if said:
        warnings.warn(f"{source}: {', '.join(said)}", stacklevel=3)
    return new


def moved_flag(flag: str) -> str | None:
    """The flag that a flag of earlier versions is now.

    >>> moved_flag("--rank"), moved_flag("--lr")
    ('--sfl-gb.rank', None)
    """
    old = {f"--{old.partition('.')[2]}": f"--{new}" for old, new in MOVED.items()}
    old["--tensorboard"] = "--track tensorboard"
    return old.get(flag)
