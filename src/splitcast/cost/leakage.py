"""Privacy as it was measured: what the strongest attack got from a cut and a codec, and which pairs are ruled out."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from splitcast.base.errors import SplitcastError, shown
from splitcast.base.files import read_bounded

MOST_BYTES = 1_000_000
MOST_PAIRS = 10_000


class Leak(NamedTuple):
    """The strongest attack on one run."""

    cut: int
    codec: str
    """of the smashed data"""
    ssim: float
    """structural similarity of what it reconstructed"""
    attack: str


def read_leakage(path: Path) -> list[Leak]:
    """What `splitcast attack` wrote (`attack.json`), or a list of such (`splitcast reproduce privacy`)."""
    try:
        found = json.loads(read_bounded(path, MOST_BYTES))
        runs = found if isinstance(found, list) else [found]
        leaks = [leak_of(run) for run in runs[:MOST_PAIRS]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SplitcastError(f"leakage: {path} is no file of splitcast attack, or damaged") from None
    if not leaks:
        raise SplitcastError(f"leakage: {path} is empty; splitcast attack RUN writes such files")
    return leaks


def leak_of(run: Any) -> Leak:
    """The attack that got furthest of those that are possible, of one run as `splitcast attack` wrote it."""
    rows = [row for row in run["rows"] if row["possible"] and row["attack"] != "floor"]
    worst = max(rows, key=lambda row: float(row["ssim"]))
    cut, ssim = run["cut"], float(worst["ssim"])
    if type(cut) is not int or not math.isfinite(ssim):
        raise ValueError("not a finding")
    return Leak(cut, str(run["codec"])[:100], ssim, str(worst["attack"])[:100])


def ruled_out(leaks: Iterable[Leak], cut: int, codec: str, most: float) -> str:
    """Why a cut and codec may not be used, "" if they may: the worst of the runs that were attacked counts.

    >>> ruled_out([Leak(1, "fp32", 0.9, "optimise")], 1, "fp32", 0.3)
    'SSIM 0.900 by optimise is above 0.3'
    >>> ruled_out([Leak(1, "fp32", 0.9, "optimise")], 2, "fp32", 0.3)
    'was never attacked'
    """
    mine = [leak for leak in leaks if (leak.cut, leak.codec) == (cut, codec)]
    if not mine:
        return "was never attacked"
    worst = max(mine, key=lambda leak: leak.ssim)
    return f"SSIM {worst.ssim:.3f} by {shown(worst.attack)[1:-1]} is above {most:g}" if worst.ssim > most else ""
