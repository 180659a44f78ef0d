"""Privacy as it was measured: what the strongest attack got from a cut and a codec, and which pairs are ruled out."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from splitcast.base.errors import SplitcastError, shown
from splitcast.base.files import read_bounded
from splitcast.schemes.program import Scheme

MOST_BYTES = 1_000_000
MOST_PAIRS = 10_000
TOKENS = "tokens"
"""The attack on texts."""


class Leak(NamedTuple):
    """The strongest attack on one run."""

    cut: int
    codec: str
    """of the smashed data"""
    ssim: float
    """structural similarity of what it reconstructed; of texts, the share of tokens that it found"""
    attack: str
    arch: str = ""
    """the model that was attacked; "" if the file does not say"""
    defence: str = ""
    """what clients did to smashed data"""
    averaged: bool | None = None
    """whether the server averaged client halves or handed them on, and so knew them; None if the file does not say"""

    @property
    def text(self) -> str:
        """What it got, in words.

        >>> Leak(1, "fp32", 0.9, "optimise").text, Leak(1, "fp32", 0.5, TOKENS).text
        ('SSIM 0.900 by optimise', '50.0% of the tokens')
        """
        got = f"{self.ssim:.1%} of the" if self.attack == TOKENS else f"SSIM {self.ssim:.3f} by"
        return f"{got} {shown(self.attack)[1:-1]}"


def knows_halves(scheme: Scheme) -> bool:
    """Whether client halves pass through the server's hands: it averages them, or gives one client the half that
    another handed in."""
    return scheme.sync_every > 0 or not scheme.clients_keep_halves


def read_leakage(path: Path) -> list[Leak]:
    """What `splitcast attack` wrote (`attack.json`), or a list of such (`splitcast reproduce privacy`); runs on which
    nobody could mount an attack are left out."""
    try:
        found = json.loads(read_bounded(path, MOST_BYTES))
        runs = found if isinstance(found, list) else [found]
        leaks = [leak_of(run) for run in runs[:MOST_PAIRS] if _mounted(run)]
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        raise SplitcastError(f"leakage: {path} is no file of splitcast attack, or damaged") from None
    if not runs:
        raise SplitcastError(f"leakage: {path} is empty; splitcast attack RUN writes such files")
    return leaks


def leak_of(run: Any) -> Leak:
    """The attack that got furthest of those that are possible, of one run as `splitcast attack` wrote it."""
    attack, got = max(_mounted(run), key=lambda one: one[1])
    arch, defence = (str(run.get(name, ""))[:100] for name in ("arch", "defence"))
    return Leak(run["cut"], str(run["codec"])[:100], got, attack, arch, defence, run.get("averaged"))


def _mounted(run: Any) -> list[tuple[str, float]]:
    """Attacks that were possible, and what they got; tokens are found by who knows the client half."""
    rows = [row for row in run["rows"] if row["possible"] and row["attack"] != "floor"]
    found = [(str(row["attack"])[:100], float(row["ssim"])) for row in rows]
    if run.get("averaged") and TOKENS in run.get("labels", {}):
        found.append((TOKENS, float(run["labels"][TOKENS])))
    if type(run["cut"]) is not int or not all(math.isfinite(got) for _, got in found):
        raise ValueError("not a finding")
    return found


def strongest(
    leaks: Iterable[Leak], cut: int, codec: str, *, arch: str = "", defence: str = "", averaged: bool | None = None
) -> Leak | None:
    """The worst of the runs that were attacked at a cut and with a codec, of those of this model, behind this defence,
    whose server knew as much of client halves; None if there is none."""
    mine = [
        leak
        for leak in leaks
        if (leak.cut, leak.codec, leak.defence) == (cut, codec, defence)
        and leak.arch in ("", arch)
        and leak.averaged in (None, averaged)
    ]
    return max(mine, key=lambda leak: leak.ssim, default=None)


def ruled_out(worst: Leak | None, most: float) -> str:
    """Why what leaks so much may not be used, "" if it may.

    >>> ruled_out(Leak(1, "fp32", 0.9, "optimise"), 0.3), ruled_out(None, 0.3)
    ('SSIM 0.900 by optimise is above 0.3', 'was never attacked')
    """
    if worst is None:
        return "was never attacked"
    return f"{worst.text} is above {most:g}" if worst.ssim > most else ""
