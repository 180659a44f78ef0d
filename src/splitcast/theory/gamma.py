"""Gamma(phi(v)) of Assumption 4: how far the client gradient of SFL-GA is from that of SFL, measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.model.split import Params, SplitModel, block_of
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import SflGa
from splitcast.theory.passes import CHUNK, Parts, boundaries, check_draws, flat_gradient, leaves_of, shares
from splitcast.theory.probe import Watcher, nothing, per_placement, probe, squares
from splitcast.training.task import Task

SFL_GA = SflGa(Config())


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
    task: Task,
    params: Params,
    x: Tensor,
    y: Tensor,
    parts: Parts,
    batch: int,
    draws: int,
    seed: int,
    scheme: Scheme | Sequence[Scheme] = SFL_GA,
) -> GammaEstimate:
    """Mini-batch Gamma at ``params``: the mean over draws of sum_n rho^n ||J_n^T s - J_n^T s^n||^2.

    J_n^T pulls a smashed-data gradient back through the batch of client n, s^n is what SFL sends it, and s is what
    ``scheme``, one for all cuts or one for each, sends instead (SFL-GA: s = sum rho^n s^n). The expected gradients, h
    and grad F of Assumption 4, are at most as far apart (Jensen); `full_batch_gamma` gives that distance exactly.
    """
    check_draws(draws, 1)
    rho = shares(parts, x).double()
    found = torch.zeros(draws, len(model.cuts), dtype=torch.float64, device="cpu")
    for at, (cut, own) in enumerate(zip(model.cuts, per_placement(scheme, len(model.cuts)), strict=True)):
        placement = own.place(cut, model.depth)
        if len(placement.segments) != 2:
            raise SplitcastError(f"gamma: is measured for schemes of two segments; {own.name} has another placement")
        if model.client_size(cut) == 0:
            continue
        for k in range(draws):
            client, server = Watcher(squares), Watcher(nothing)
            given = (own, placement, model, task, params, x, y, parts, batch, seed, k)
            probe(*given, client=client, server=server, deviation=True)
            found[k, at] = rho @ client.found()
    raw = found.mean(0)
    error = found.std(0) / draws**0.5 if draws > 1 else torch.zeros_like(raw)
    phi = tuple(model.client_size(cut) for cut in model.cuts)
    return GammaEstimate(phi, tuple(raw.tolist()), tuple(error.tolist()), tuple(monotone(phi, raw.tolist())))


def full_batch_gamma(model: SplitModel, task: Task, params: Params, x: Tensor, y: Tensor, parts: Parts) -> list[float]:
    """Gamma of Assumption 4 to the letter, for SFL-GA: sum_n rho^n ||h^n - grad F^n||^2 at every cut, exactly.

    Row j of one client meets row j of another by chance alone, so E(J^T s) splits for two different clients, and
    h^n - grad F^n = E_n[J^T (sum_{m != n} rho^m E_m[s] - (1 - rho^n) s)], s the smashed-data gradient of one sample,
    whatever the batch size. For IID clients this is (1 - 1/N) times the covariance of J and s: what averaging loses.
    """
    leaves, rho = leaves_of(params), shares(parts, x)
    below = {cut: [p for name, p in leaves.items() if block_of(name) < cut] for cut in model.cuts}

    def opened(rows: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Boundaries, and at every cut the gradient s of each sample (rows, *d)."""
        outs = boundaries(model, leaves, x[rows].requires_grad_())
        loss = task.losses(outs[-1], y[rows]).sum()
        return outs, torch.autograd.grad(loss, outs[1:-1], retain_graph=True)

    chunked = [torch.split(torch.from_numpy(part), CHUNK) for part in parts]
    means = [
        [torch.zeros(model.smashed_shape(cut), dtype=x.dtype, device=x.device) for cut in model.cuts] for _ in parts
    ]  # E_n[s]
    for part, chunks, mean in zip(parts, chunked, means, strict=True):
        for rows in chunks:
            for total, s in zip(mean, opened(rows)[1], strict=True):
                total += s.sum(0) / len(part)
    gammas = [0.0 for _ in model.cuts]
    for n, chunks in enumerate(chunked):
        off = [torch.zeros(model.client_size(cut), dtype=x.dtype, device=x.device) for cut in model.cuts]
        for rows in chunks:
            outs, grads = opened(rows)
            for at, cut in enumerate(model.cuts):
                others = sum(rho[m] * mean[at] for m, mean in enumerate(means) if m != n)
                off[at] += flat_gradient(outs[cut], below[cut], (others - (1 - rho[n]) * grads[at]) / len(parts[n]))
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
