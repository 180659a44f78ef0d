"""Privacy: how much of the model a placement keeps on the clients."""

import math
from collections.abc import Sequence

from splitcast.base.errors import SplitcastError
from splitcast.model.split import SplitModel
from splitcast.training.placement import Placement


def client_fraction(model: SplitModel, placement: Placement) -> float:
    """φ(v)/q: the clients' share of all parameters."""
    held = sum(p.numel() for name, p in model.shapes().items() if placement.side(name) == "client")
    return held / model.size


def privacy(model: SplitModel, placement: Placement) -> float:
    """log(1 + φ(v)/q), natural logarithm; at least ε in P1, at most log 2."""
    return math.log1p(client_fraction(model, placement))


def legal(model: SplitModel, placements: Sequence[Placement], epsilon: float) -> list[bool]:
    """Which placements keep privacy of at least ε, and tied parameters together; one at least must."""
    whole = [placement for placement in placements if placement.keeps_ties(model)]
    if not whole:
        placements[0].check(model)
    kept = [privacy(model, placement) for placement in whole]
    if max(kept) < epsilon:
        best = math.floor(1e6 * max(kept)) / 1e6
        raise SplitcastError(f"epsilon: {epsilon:g} leaves no cut; the largest feasible value is {best:g}")
    return [placement in whole and privacy(model, placement) >= epsilon for placement in placements]
