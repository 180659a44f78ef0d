"""Lemma 1 and Theorem 1 of the paper, and the constants they need, measured."""

from splitcast.theory.bounds import (
    Assumptions,
    Effects,
    LossChange,
    largest_lr,
    lemma1,
    theorem1,
)
from splitcast.theory.estimate import (
    Variance,
    estimate_heterogeneity,
    estimate_smoothness,
    estimate_variance,
)
from splitcast.theory.gamma import GammaEstimate, estimate_gamma, full_batch_gamma, isotonic, monotone
from splitcast.theory.scalability import Scalability, Scaling

__all__ = [
    "Assumptions",
    "Effects",
    "GammaEstimate",
    "LossChange",
    "Scalability",
    "Scaling",
    "Variance",
    "estimate_gamma",
    "estimate_heterogeneity",
    "estimate_smoothness",
    "estimate_variance",
    "full_batch_gamma",
    "isotonic",
    "largest_lr",
    "lemma1",
    "monotone",
    "theorem1",
]
