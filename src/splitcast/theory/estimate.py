"""The constants of Assumptions 1-3, measured at given parameters: L, sigma^2 and nu, zeta^2.

They hold where they are measured. The bounds ask for them along the whole run, so measure at several rounds and take
the largest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import torch_stream
from splitcast.model.split import Params, SplitModel
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import Sfl
from splitcast.theory.passes import CHUNK, Parts, boundaries, check_draws, flat_gradient, leaves_of, shares
from splitcast.theory.probe import Watcher, probe, vectors
from splitcast.training.placement import Placement
from splitcast.training.task import Task

SFL = Sfl(Config())


@dataclass(frozen=True)
class Variance:
    """Gradient noise of a batch size."""

    per_client: float
    """sigma^2 = sum rho^n E||g^n - E g^n||^2"""
    of_mean: float
    """nu = E||sum rho^n (g^n - E g^n)||^2"""


def estimate_smoothness(
    model: SplitModel,
    task: Task,
    params: Params,
    x: Tensor,
    y: Tensor,
    seed: int,
    tolerance: float = 0.01,
    iterations: int = 50,
) -> float:
    """L at ``params``: the largest |eigenvalue| of the Hessian of the loss on ``x``, ``y``.

    Lanczos on Hessian-vector products, from a random vector, until the residual of the largest Ritz value is
    ``tolerance`` of that value. It approaches from below and knows one point only; a global L may be larger, and need
    not exist for a deep model. All rows share one graph: give some hundred.
    """
    leaves = leaves_of(params)
    loss = task.losses(boundaries(model, leaves, x)[-1], y).mean()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    gradient = torch.cat([g.flatten() for g in grads])
    v = torch.randn(len(gradient), generator=torch_stream(seed, "model", 1), dtype=x.dtype).to(x.device)
    v, before, beta = v / v.norm(), torch.zeros_like(v), torch.zeros((), device=x.device)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(iterations):
        u = flat_gradient(gradient, list(leaves.values()), v) - beta * before
        diagonal.append(u @ v)
        u -= diagonal[-1] * v
        beta = u.norm()
        side = torch.diag(torch.stack(beside), 1) if beside else torch.zeros(1, 1, device=x.device)
        ritz, vectors = torch.linalg.eigh((torch.diag(torch.stack(diagonal)) + side + side.mT).double())
        top = int(ritz.abs().argmax())
        if beta * vectors[-1, top].abs() <= tolerance * ritz[top].abs():
            return float(ritz[top].abs())
        beside.append(beta)
        before, v = v, u / beta
    raise SplitcastError(
        f"iterations: {iterations} do not reach tolerance {tolerance}; choose more, or a larger tolerance"
    )


def estimate_variance(
    model: SplitModel,
    task: Task,
    params: Params,
    x: Tensor,
    y: Tensor,
    parts: Parts,
    batch: int,
    draws: int,
    seed: int,
    placement: Placement | None = None,
    scheme: Scheme = SFL,
) -> Variance:
    """sigma^2 and nu of Assumption 2 for mini-batches of ``batch`` rows, unbiased from at least two draws.

    By default of the gradient that SFL applies, which is the same at every cut; else of what ``scheme`` applies at
    ``placement``. Holds one gradient per client.
    """
    check_draws(draws, 2)
    rho, count = shares(parts, x), len(parts)
    placement = placement or Placement.split(1, model.depth)
    each, mean = _Spread(count, model.size, x), _Spread(1, model.size, x)
    for k in range(draws):
        client, server = Watcher(vectors), Watcher(vectors)
        given = (scheme, placement, model, task, params, x, y, parts, batch, seed, k)
        probe(*given, client=client, server=server)
        grads = torch.cat([watcher.found() for watcher in (client, server) if watcher.seen], 1)
        each.add(grads)
        mean.add((rho @ grads)[None])
    return Variance(float(rho @ each.variance()), float(mean.variance()))


def estimate_heterogeneity(model: SplitModel, task: Task, params: Params, x: Tensor, y: Tensor, parts: Parts) -> float:
    """zeta^2 = sum rho^n ||grad F^n - grad F||^2 at ``params``, exactly."""
    leaves, rho = leaves_of(params), shares(parts, x)
    total, squares = torch.zeros(model.size, dtype=x.dtype, device=x.device), 0.0
    for n, part in enumerate(parts):
        local = torch.zeros_like(total)
        for rows in torch.split(torch.from_numpy(part), CHUNK):
            loss = task.losses(boundaries(model, leaves, x[rows])[-1], y[rows]).sum()
            local += flat_gradient(loss / len(part), list(leaves.values()))
        squares += float(rho[n] * local.square().sum())
        total += rho[n] * local
    return max(0.0, squares - float(total.square().sum()))


class _Spread:
    """Running mean and variance of vectors (rows, values), after Welford."""

    def __init__(self, rows: int, values: int, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros(rows, values, dtype=like.dtype, device=like.device)
        self.total = torch.zeros(rows, dtype=like.dtype, device=like.device)

    def add(self, vectors: Tensor) -> None:
        self.count += 1
        step = vectors - self.mean
        self.mean += step / self.count
        self.total += (step * (vectors - self.mean)).sum(1)

    def variance(self) -> Tensor:
        return self.total / (self.count - 1)
