"""What every estimator does: draw batches for all clients, and run the model with all its cuts laid open."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.data.batches import draw_batches
from splitcast.model.split import Params, SplitModel

Parts = Sequence[np.ndarray]
CHUNK = 500
"""Rows of a full-batch pass that are on one graph."""


def check_draws(draws: int, least: int) -> None:
    """Refuse too few repetitions."""
    if draws < least:
        raise SplitcastError(f"draws: {draws}; choose at least {least}")


def leaves_of(params: Params) -> Params:
    """The parameters, ready to be differentiated; they share their memory."""
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def shares(parts: Parts, like: Tensor) -> Tensor:
    """rho^n = D^n / D (N,)."""
    sizes = torch.tensor([len(part) for part in parts], dtype=like.dtype, device=like.device)
    return sizes / sizes.sum()


def batches(parts: Parts, batch: int, seed: int, draw: int) -> Tensor:
    """Rows (N, b) of a draw. The stream is that of round 0, which no training uses."""
    local = draw_batches(np.array([len(part) for part in parts]), batch, stream(seed, "batch", 0, draw))
    return torch.from_numpy(np.stack([part[rows] for part, rows in zip(parts, local, strict=True)]))


def boundaries(model: SplitModel, leaves: Params, x: Tensor) -> list[Tensor]:
    """What enters block 1, ..., block V, and the logits: V+1 tensors on one graph."""
    outs = [x]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for block in range(model.depth):
            outs.append(model.forward(leaves, outs[-1], block, block + 1))
    return outs


def flat_gradient(out: Tensor, leaves: list[Tensor], received: Tensor | None = None) -> Tensor:
    """The gradient as one vector; the graph is kept."""
    if not leaves:
        return out.new_zeros(0)
    grads = torch.autograd.grad(out, leaves, received, retain_graph=True)
    return torch.cat([g.flatten() for g in grads])
