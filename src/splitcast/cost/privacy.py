"""Privacy: how much of the model a placement keeps on the clients."""

import math
from collections.abc import Sequence

from splitcast.base.config import Config
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


ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(12, 64))
"""Of Rényi divergences, among which the best is taken."""


def gaussian_epsilon(clip: float, noise: float, releases: int, delta: float = 1e-5) -> float:
    """ε of (ε, δ)-differential privacy of a sample whose smashed data, clipped to norm ``clip``, are sent ``releases``
    times with Gaussian noise of standard deviation ``noise`` on every value. Infinite without either.

    Another sample in its place moves them by at most 2 clip, so each release costs α (2 clip)^2 / (2 noise^2) of Rényi
    divergence of order α, these add up (Mironov, CSF 2017), and (Balle et al., AISTATS 2020)

        ε = min_α  r(α) + log((α - 1)/α) - (log δ + log α)/(α - 1).

    Nothing is gained by sampling: who sends what when follows from the run's seed, which the server knows.

    >>> round(gaussian_epsilon(1.0, 4.0, 1), 3) < round(gaussian_epsilon(1.0, 2.0, 1), 3)
    True
    """
    if not clip or not noise:
        return math.inf
    cost = releases * (2 * clip / noise) ** 2 / 2
    return max(0.0, min(_spent(cost * order, order, delta) for order in ORDERS))


def run_epsilon(config: Config, rounds: int) -> float | None:
    """`gaussian_epsilon` after so many rounds of a sample that was sent in every local step, which is the most for a
    client of at least a batch of samples; None without clipping or noise."""
    spent = gaussian_epsilon(config.defence.clip, config.defence.noise, rounds * config.train.local_steps)
    return spent if math.isfinite(spent) else None


def _spent(divergence: float, order: float, delta: float) -> float:
    return divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
