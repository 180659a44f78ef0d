"""What every estimator does: draw batches for all clients, and run the model with all its cuts laid open."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from splitcast.data.batches import draw_batches
from splitcast.errors import SplitcastError
from splitcast.seeds import stream, torch_seed
from splitcast.split import Params, SplitModel, block_of

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
    sizes = torch.tensor([len(part) for part in parts], dtype=like.dtype)
    return sizes / sizes.sum()


def batches(parts: Parts, batch: int, seed: int, draw: int) -> Tensor:
    """Rows (N, b) of a draw. The stream is that of round 0, which no training uses."""
    local = draw_batches(np.array([len(part) for part in parts]), batch, stream(seed, "batch", 0, draw))
    return torch.from_numpy(np.stack([part[rows] for part, rows in zip(parts, local, strict=True)]))


def boundaries(model: SplitModel, leaves: Params, x: Tensor, luck: int = 0) -> list[Tensor]:
    """What enters block 1, ..., block V, and the logits: V+1 tensors on one graph.

    Layers with randomness repeat themselves for the same ``luck``.
    """
    outs = [x]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(luck)
        for block in range(model.depth):
            outs.append(model.forward(leaves, outs[-1], block, block + 1))
    return outs


def luck_of(seed: int, draw: int, client: int) -> int:
    """The seed of a client's random layers in a draw."""
    return torch_seed(seed, "layers", 0, draw, client)


def smashed_gradients(
    model: SplitModel, leaves: Params, x: Tensor, y: Tensor, rows: Tensor, seed: int, draw: int
) -> list[Tensor]:
    """s^n of all clients at every cut: V-1 tensors (N, b, *d), from batches ``rows`` (N, b)."""
    per_client = []
    for n, mine in enumerate(rows):
        # a graph from the input on, even if the first blocks have no parameters
        outs = boundaries(model, leaves, x[mine].requires_grad_(), luck_of(seed, draw, n))
        per_client.append(torch.autograd.grad(F.cross_entropy(outs[-1], y[mine]), outs[1:-1]))
    return [torch.stack(grads) for grads in zip(*per_client, strict=True)]


def pull_back(leaves: Params, cut: int, smashed: Tensor, received: Tensor) -> Tensor:
    """J^T ``received``, one flat vector of phi(v) values; the graph is kept for other cuts."""
    return flat_gradient(smashed, [p for name, p in leaves.items() if block_of(name) < cut], received)


def flat_gradient(out: Tensor, leaves: list[Tensor], received: Tensor | None = None) -> Tensor:
    """The gradient as one vector; the graph is kept."""
    if not leaves:
        return out.new_zeros(0)
    grads = torch.autograd.grad(out, leaves, received, retain_graph=True)
    return torch.cat([g.flatten() for g in grads])
