"""Lemma 1 and Theorem 1 of the paper, with the slips of the proof mended.

Round t starts all models at w_t: w^n_0 = w_t, w^n_{i+1} = w^n_i - eta g^n_i for i = 0..tau-1, and
w_{t+1} = sum rho^n w^n_tau. The mean of g^n_i given the past is h^n_i. Needed, each only in the rho-mean over clients:

1. every local loss F^n has an L-Lipschitz gradient;
2. sum rho^n E||g^n - h^n||^2 <= sigma^2 and E||sum rho^n (g^n - h^n)||^2 <= nu;
3. sum rho^n ||grad F^n - grad F||^2 <= zeta^2 (the paper has no Assumption 3; its proof takes zeta = 0);
4. sum rho^n ||h^n - grad F^n||^2 <= Gamma(phi(v)).

Proof, with G = ||grad F(w_t)||^2 and A = 3 L^2 eta^2 tau (tau-1):

(a) Smoothness, 2<a,b> = ||a||^2 + ||b||^2 - ||a-b||^2 and Jensen give, for eta <= 1/(2 L tau),
        E F(w_{t+1}) - F(w_t) <= -eta tau/2 G + L eta^2 tau nu + eta tau/2 A1,
        A1 = 1/tau sum_{i,n} rho^n E||grad F^n(w_t) - h^n_i||^2 <= 2 Gamma + 2 L^2/tau A2,
        A2 = sum_{i,n} rho^n E||w^n_i - w_t||^2.
(b) Before step i there were i steps, noise of different steps is uncorrelated, and sum_{i<tau} i = tau (tau-1)/2:
        A2 <= eta^2 tau (tau-1) (sigma^2 + sum_{j,n} rho^n E||h^n_j||^2).
(c) h^n_j = (h^n_j - grad F^n(w^n_j)) + (grad F^n(w^n_j) - grad F^n(w_t)) + grad F^n(w_t), three terms, so
        sum_{j,n} rho^n E||h^n_j||^2 <= 3 tau Gamma + 3 L^2 A2 + 3 tau (G + zeta^2),
        L^2/tau A2 <= (L^2 eta^2 (tau-1) sigma^2 + A (Gamma + G + zeta^2)) / (1 - A).
(d) A <= 1/5 makes 1/(1-A) <= 5/4, so
        A1 <= (2 + 5A/2) Gamma + 5/2 L^2 eta^2 (tau-1) sigma^2 + 5A/2 zeta^2 + G/2.

Put into (a), this is Lemma 1; summed over t, with F(w_{T+1}) >= F*, it is Theorem 1. Clients that all apply
sum rho^n g^n to their half are covered too: their common path is no longer than the mean of the n single ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splitcast.base.errors import SplitcastError


def at_least(field: str, value: float, least: float, *, strict: bool = False) -> None:
    """Refuse a number that is too small or not finite."""
    if not (value > least if strict else value >= least) or not math.isfinite(value):
        raise SplitcastError(f"{field}: {value}; choose a finite number {'above' if strict else 'of at least'} {least}")


@dataclass(frozen=True)
class Assumptions:
    """The constants of Assumptions 1-3."""

    smoothness: float
    """L"""
    variance: float
    """sigma^2, of one client's gradient"""
    mean_variance: float
    """nu, variance of sum_n rho^n g^n; at most sigma^2"""
    heterogeneity: float = 0.0
    """zeta^2, 0 for IID clients"""

    def __post_init__(self) -> None:
        at_least("smoothness", self.smoothness, 0, strict=True)
        for name in ("variance", "mean_variance", "heterogeneity"):
            at_least(name, getattr(self, name), 0)

    @staticmethod
    def independent(
        smoothness: float, variance: float, weights: Sequence[float], heterogeneity: float = 0.0
    ) -> "Assumptions":
        """Clients whose gradient noise is uncorrelated, nu = sigma^2 sum (rho^n)^2: true where each client is sent
        its own gradient, and what the paper takes for SFL-GA, where all clients pull back the same noise.

        >>> Assumptions.independent(1.0, 4.0, [0.25] * 4).mean_variance
        1.0
        """
        return Assumptions(smoothness, variance, variance * sum(w * w for w in weights), heterogeneity)


@dataclass(frozen=True)
class Effects:
    """The right-hand side of Theorem 1, term by term."""

    initialisation: float
    cutting_point: float
    gradient_variance: float
    heterogeneity: float

    @property
    def total(self) -> float:
        """The bound on the average of E||grad F(w_t)||^2."""
        return self.initialisation + self.cutting_point + self.gradient_variance + self.heterogeneity


@dataclass(frozen=True)
class LossChange:
    """The right-hand side of Lemma 1, term by term; only `descent` is negative."""

    descent: float
    cutting_point: float
    gradient_variance: float
    heterogeneity: float

    @property
    def total(self) -> float:
        """The bound on E(F(w_{t+1}) - F(w_t))."""
        return self.descent + self.cutting_point + self.gradient_variance + self.heterogeneity


def largest_lr(smoothness: float, steps: int, *, as_printed: bool = False) -> float:
    """The largest eta of Lemma 1 and Theorem 1: 2 L eta tau <= 1 and 3 L^2 eta^2 tau (tau-1) <= 1/5.

    The first binds for tau = 1, the second for tau >= 2. As printed the condition is 2 L^2 eta^2 tau (tau-1) <= 1/5
    alone, which for tau = 1 allows any eta.

    >>> largest_lr(2.0, 1), largest_lr(2.0, 1, as_printed=True)
    (0.25, inf)
    """
    at_least("smoothness", smoothness, 0, strict=True)
    at_least("steps", steps, 1)
    factor = 2 if as_printed else 3
    by_drift = 1 / (smoothness * math.sqrt(5 * factor * steps * (steps - 1))) if steps > 1 else math.inf
    return by_drift if as_printed else min(1 / (2 * smoothness * steps), by_drift)


def lemma1(
    known: Assumptions, *, lr: float, steps: int, gradient: float, gamma: float, as_printed: bool = False
) -> LossChange:
    """Lemma 1, with A = 3 L^2 eta^2 tau (tau-1) and ``gradient`` = ||grad F(w_t)||^2:

    E(F(w_{t+1}) - F(w_t)) <= -eta tau/4 ||grad F(w_t)||^2 + eta tau (1 + 5A/4) Gamma
    + L eta^2 tau nu + 5/4 L^2 eta^3 tau (tau-1) sigma^2 + 5/4 eta tau A zeta^2

    As printed, Gamma has no 5A/4, nu is sigma^2 sum (rho^n)^2, and there is no last term.
    """
    cut, noise, spread = _per_round(known, lr, steps, as_printed)
    quarter = lr * steps / 4
    return LossChange(-quarter * gradient, quarter * cut * gamma, quarter * noise, quarter * spread)


def theorem1(
    known: Assumptions,
    *,
    lr: float,
    steps: int,
    rounds: int,
    gap: float,
    gamma: float | Sequence[float],
    as_printed: bool = False,
) -> Effects:
    """Theorem 1, with A = 3 L^2 eta^2 tau (tau-1), ``gap`` = F(w_1) - F*, and one Gamma or one per round:

    1/T sum_t E||grad F(w_t)||^2 <= 4 (F(w_1) - F*) / (eta tau T) + (4 + 5A)/T sum_t Gamma(phi_t(v))
    + 4 L eta nu + 5 L^2 eta^2 (tau-1) sigma^2 + 5 A zeta^2

    As printed, Gamma has no 5A, nu is sigma^2 sum (rho^n)^2, there is no last term, and the gap is F(w_T) - F*.

    >>> known = Assumptions.independent(smoothness=1.0, variance=1.0, weights=[0.125] * 8)
    >>> bound = theorem1(known, lr=0.5, steps=1, rounds=100, gap=2.0, gamma=0.01)
    >>> bound.initialisation, bound.cutting_point, bound.gradient_variance
    (0.16, 0.04, 0.25)
    """
    at_least("rounds", rounds, 1)
    at_least("gap", gap, 0)
    gammas = [float(gamma)] * rounds if isinstance(gamma, int | float) else list(gamma)
    if len(gammas) != rounds:
        raise SplitcastError(f"gamma: {len(gammas)} values for {rounds} rounds; give one, or one per round")
    at_least("gamma", min(gammas), 0)
    cut, noise, spread = _per_round(known, lr, steps, as_printed)
    return Effects(4 * gap / (lr * steps * rounds), cut * math.fsum(gammas) / rounds, noise, spread)


class _PerRound(NamedTuple):
    cut: float
    """factor of Gamma"""
    noise: float
    spread: float


def _per_round(known: Assumptions, lr: float, steps: int, as_printed: bool) -> _PerRound:
    """The terms of Theorem 1 that do not depend on T; Lemma 1 has them times eta tau / 4."""
    smooth = known.smoothness
    limit = largest_lr(smooth, steps, as_printed=as_printed)
    if not 0 < lr <= limit:
        raise SplitcastError(f"lr: {lr} is outside Lemma 1 for L = {smooth:g}, tau = {steps}; choose at most {limit!r}")
    drift = 0.0 if as_printed else 3 * (smooth * lr) ** 2 * steps * (steps - 1)
    noise = 4 * smooth * lr * known.mean_variance + 5 * (smooth * lr) ** 2 * (steps - 1) * known.variance
    return _PerRound(4 + 5 * drift, noise, 5 * drift * known.heterogeneity)
