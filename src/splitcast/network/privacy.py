"""Privacy: how much of the model a cut must keep on the clients."""

import math
from collections.abc import Sequence

from splitcast.errors import SplitcastError
from splitcast.split import CutProfile


def allowed_cuts(profile: Sequence[CutProfile], epsilon: float) -> list[int]:
    """The cuts v with log(1 + φ(v)/q) ≥ ε, natural logarithm; at most log 2 can be asked for."""
    allowed = [row.cut for row in profile if row.privacy >= epsilon]
    if not allowed:
        best = math.floor(1e6 * max(row.privacy for row in profile)) / 1e6
        raise SplitcastError(f"epsilon: {epsilon:g} leaves no cut; the largest feasible value is {best:g}")
    return allowed
