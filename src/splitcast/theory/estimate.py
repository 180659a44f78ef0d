"""The constants of Assumptions 1-3, measured at given parameters: L, sigma^2 and nu, zeta^2.

They hold where they are measured. The bounds ask for them along the whole run, so measure at several rounds and take
the largest.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.errors import SplitcastError
from splitcast.schemes.codec import FP32
from splitcast.schemes.feedback import Feedback, Unicast
from splitcast.schemes.messages import Ledger
from splitcast.seeds import torch_stream
from splitcast.split import Params, SplitModel, block_of
from splitcast.theory.passes import (
    CHUNK,
    Parts,
    batches,
    boundaries,
    check_draws,
    flat_gradient,
    leaves_of,
    luck_of,
    pull_back,
    shares,
    smashed_gradients,
)

UNICAST = Unicast()


@dataclass(frozen=True)
class Variance:
    """Gradient noise of a batch size."""

    per_client: float
    """sigma^2 = sum rho^n E||g^n - E g^n||^2"""
    of_mean: float
    """nu = E||sum rho^n (g^n - E g^n)||^2"""


def estimate_smoothness(
    model: SplitModel, params: Params, x: Tensor, y: Tensor, seed: int, tolerance: float = 0.01, iterations: int = 50
) -> float:
    """L at ``params``: the largest |eigenvalue| of the Hessian of the loss on ``x``, ``y``.

    Lanczos on Hessian-vector products, from a random vector, until the residual of the largest Ritz value is
    ``tolerance`` of that value. It approaches from below and knows one point only; a global L may be larger, and need
    not exist for a deep model. All rows share one graph: give some hundred.
    """
    leaves = leaves_of(params)
    loss = F.cross_entropy(boundaries(model, leaves, x)[-1], y)
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    gradient = torch.cat([g.flatten() for g in grads])
    v = torch.randn(len(gradient), generator=torch_stream(seed, "model", 1), dtype=x.dtype)
    v, before, beta = v / v.norm(), torch.zeros_like(v), torch.zeros(())
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(iterations):
        u = flat_gradient(gradient, list(leaves.values()), v) - beta * before
        diagonal.append(u @ v)
        u -= diagonal[-1] * v
        beta = u.norm()
        side = torch.diag(torch.stack(beside), 1) if beside else torch.zeros(1, 1)
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
    params: Params,
    x: Tensor,
    y: Tensor,
    parts: Parts,
    batch: int,
    draws: int,
    seed: int,
    cut: int = 1,
    feedback: Feedback = UNICAST,
) -> Variance:
    """sigma^2 and nu of Assumption 2 for mini-batches of ``batch`` rows, unbiased from at least two draws.

    By default of the gradient that SFL applies, which is the same at every cut; with ``feedback`` = `Mean` of what
    SFL-GA applies at ``cut``. Holds one gradient per client.
    """
    check_draws(draws, 2)
    model.check_cut(cut)
    leaves, rho = leaves_of(params), shares(parts, x)
    server = [p for name, p in leaves.items() if block_of(name) >= cut]
    each, mean = _Spread(len(parts), model.size, x.dtype), _Spread(1, model.size, x.dtype)
    for k in range(draws):
        rows = batches(parts, batch, seed, k)
        sent = smashed_gradients(model, leaves, x, y, rows, seed, k)[cut - 1]
        received = feedback.reply(sent, rho, FP32, Ledger(), range(len(parts))).expand_as(sent)
        grads = []
        for n, mine in enumerate(rows):
            outs = boundaries(model, leaves, x[mine], luck_of(seed, k, n))
            on_client = pull_back(leaves, cut, outs[cut], received[n])
            grads.append(torch.cat([on_client, flat_gradient(F.cross_entropy(outs[-1], y[mine]), server)]))
        each.add(torch.stack(grads))
        mean.add((rho @ torch.stack(grads))[None])
    return Variance(float(rho @ each.variance()), float(mean.variance()))


def estimate_heterogeneity(model: SplitModel, params: Params, x: Tensor, y: Tensor, parts: Parts) -> float:
    """zeta^2 = sum rho^n ||grad F^n - grad F||^2 at ``params``, exactly."""
    leaves, rho = leaves_of(params), shares(parts, x)
    total, squares = torch.zeros(model.size, dtype=x.dtype), 0.0
    for n, part in enumerate(parts):
        local = torch.zeros_like(total)
        for rows in torch.split(torch.from_numpy(part), CHUNK):
            loss = F.cross_entropy(boundaries(model, leaves, x[rows])[-1], y[rows], reduction="sum")
            local += flat_gradient(loss / len(part), list(leaves.values()))
        squares += float(rho[n] * local.square().sum())
        total += rho[n] * local
    return max(0.0, squares - float(total.square().sum()))


class _Spread:
    """Running mean and variance of vectors (rows, values), after Welford."""

    def __init__(self, rows: int, values: int, dtype: torch.dtype) -> None:
        self.count = 0
        self.mean = torch.zeros(rows, values, dtype=dtype)
        self.total = torch.zeros(rows, dtype=dtype)

    def add(self, vectors: Tensor) -> None:
        self.count += 1
        step = vectors - self.mean
        self.mean += step / self.count
        self.total += (step * (vectors - self.mean)).sum(1)

    def variance(self) -> Tensor:
        return self.total / (self.count - 1)
