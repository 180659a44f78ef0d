"""Gamma(phi(v)) of Assumption 4: how far the client gradient of SFL-GA is from that of SFL, measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.errors import SplitcastError
from splitcast.schemes.codec import FP32
from splitcast.schemes.feedback import Feedback, Mean
from splitcast.schemes.messages import Ledger
from splitcast.split import Params, SplitModel
from splitcast.theory.passes import (
    CHUNK,
    Parts,
    batches,
    boundaries,
    check_draws,
    leaves_of,
    luck_of,
    pull_back,
    shares,
    smashed_gradients,
)

MEAN = Mean()


@dataclass(frozen=True)
class GammaEstimate:
    """Gamma at every cut 1..V-1."""

    phi: tuple[int, ...]
    """phi(v), parameters on the client"""
    raw: tuple[float, ...]
    """mean over the draws"""
    error: tuple[float, ...]
    """standard error of that mean; 0 for a single draw"""
    fitted: tuple[float, ...]
    """the nearest function of phi that never falls, which is what Assumption 4 asks for"""

    def at(self, cut: int) -> float:
        """The fitted value of a cut."""
        if not 1 <= cut <= len(self.fitted):
            raise SplitcastError(f"cut: {cut} is not legal; choose 1..{len(self.fitted)}")
        return self.fitted[cut - 1]


def estimate_gamma(
    model: SplitModel,
    params: Params,
    x: Tensor,
    y: Tensor,
    parts: Parts,
    batch: int,
    draws: int,
    seed: int,
    feedback: Feedback | Sequence[Feedback] = MEAN,
) -> GammaEstimate:
    """Mini-batch Gamma at ``params``: the mean over draws of sum_n rho^n ||J_n^T s - J_n^T s^n||^2.

    J_n^T pulls a smashed-data gradient back through the batch of client n, s^n is what SFL sends it, and s is what
    ``feedback``, one for all cuts or one for each, sends instead (`Mean`: the paper's s = sum rho^n s^n). The expected
    gradients, h and grad F of Assumption 4, are at most as far apart (Jensen); `full_batch_gamma` gives that distance
    exactly.
    """
    check_draws(draws, 1)
    leaves, rho, clients = leaves_of(params), shares(parts, x), range(len(parts))
    found = torch.zeros(draws, len(model.cuts), dtype=torch.float64)
    by_cut = feedback if isinstance(feedback, Sequence) else [feedback] * len(model.cuts)
    for k in range(draws):
        rows = batches(parts, batch, seed, k)
        away = [
            own.reply(s, rho, FP32, Ledger(), clients) - s
            for own, s in zip(by_cut, smashed_gradients(model, leaves, x, y, rows, seed, k), strict=True)
        ]
        for n in clients:
            outs = boundaries(model, leaves, x[rows[n]], luck_of(seed, k, n))
            for at, cut in enumerate(model.cuts):
                found[k, at] += rho[n] * pull_back(leaves, cut, outs[cut], away[at][n]).square().sum()
    raw = found.mean(0)
    error = found.std(0) / draws**0.5 if draws > 1 else torch.zeros_like(raw)
    phi = tuple(model.client_size(cut) for cut in model.cuts)
    return GammaEstimate(phi, tuple(raw.tolist()), tuple(error.tolist()), tuple(monotone(phi, raw.tolist())))


def full_batch_gamma(model: SplitModel, params: Params, x: Tensor, y: Tensor, parts: Parts) -> list[float]:
    """Gamma of Assumption 4 to the letter, for `Mean`: sum_n rho^n ||h^n - grad F^n||^2 at every cut, exactly.

    Row j of one client meets row j of another by chance alone, so E(J^T s) splits for two different clients, and
    h^n - grad F^n = E_n[J^T (sum_{m != n} rho^m E_m[s] - (1 - rho^n) s)], s the smashed-data gradient of one sample,
    whatever the batch size. For IID clients this is (1 - 1/N) times the covariance of J and s: what averaging loses.
    """
    leaves, rho = leaves_of(params), shares(parts, x)

    def opened(rows: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Boundaries, and at every cut the gradient s of each sample (rows, *d)."""
        outs = boundaries(model, leaves, x[rows].requires_grad_())
        loss = F.cross_entropy(outs[-1], y[rows], reduction="sum")
        return outs, torch.autograd.grad(loss, outs[1:-1], retain_graph=True)

    chunked = [torch.split(torch.from_numpy(part), CHUNK) for part in parts]
    means = [[torch.zeros(model.smashed_shape(cut), dtype=x.dtype) for cut in model.cuts] for _ in parts]  # E_n[s]
    for part, chunks, mean in zip(parts, chunked, means, strict=True):
        for rows in chunks:
            for total, s in zip(mean, opened(rows)[1], strict=True):
                total += s.sum(0) / len(part)
    gammas = [0.0 for _ in model.cuts]
    for n, chunks in enumerate(chunked):
        off = [torch.zeros(model.client_size(cut), dtype=x.dtype) for cut in model.cuts]
        for rows in chunks:
            outs, grads = opened(rows)
            for at, cut in enumerate(model.cuts):
                others = sum(rho[m] * mean[at] for m, mean in enumerate(means) if m != n)
                off[at] += pull_back(leaves, cut, outs[cut], (others - (1 - rho[n]) * grads[at]) / len(parts[n]))
        gammas = [gamma + float(rho[n] * d.square().sum()) for gamma, d in zip(gammas, off, strict=True)]
    return gammas


def monotone(phi: Sequence[int], values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing function of phi (ascending), least squares; equal phi get equal values.

    >>> monotone([10, 10, 30, 40], [1.0, 3.0, 6.0, 5.0])
    [2.0, 2.0, 5.5, 5.5]
    """
    groups = [
        [value for _, value in pairs] for _, pairs in groupby(zip(phi, values, strict=True), lambda pair: pair[0])
    ]
    fit = isotonic([sum(group) / len(group) for group in groups], [len(group) for group in groups])
    return [value for value, group in zip(fit, groups, strict=True) for _ in group]


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """argmin sum_i w_i (f_i - y_i)^2 over f_1 <= f_2 <= ..., by pooling adjacent violators.

    >>> isotonic([1.0, 3.0, 2.0, 2.0], [1, 1, 1, 2])
    [1.0, 2.25, 2.25, 2.25]
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, u, m), (b, v, n) = pools[-2:]
            pools[-2:] = [(a + (b - a) * v / (u + v), u + v, m + n)]
    return [mean for mean, _, length in pools for _ in range(length)]
