"""One local step on the halves: client forward, server pass, client pull-back.

Batches are (k, b, ...) for k clients. On a shared half all k*b samples make one pass and its gradient is weighted
by rho; on a stacked half each client has its own copy, and `torch.func.vmap` runs them together.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from splitcast.engine.state import Half
from splitcast.split import Params, SplitModel


class Descent(NamedTuple):
    """Step size and momentum of SGD."""

    lr: float
    momentum: float


def run_half(model: SplitModel, params: Params, x: Tensor, start: int, stop: int, *, stacked: bool) -> Tensor:
    """Blocks start+1..stop on x (k, b, ...), with one copy of the parameters or one per client."""
    if stacked:
        run = vmap(lambda p, xs: model.forward(p, xs, start, stop), randomness="different")
        out: Tensor = run(params, x)
        return out
    flat = model.forward(params, x.flatten(0, 1), start, stop)
    return flat.view(*x.shape[:2], *flat.shape[1:])


def leaves_of(half: Half, rows: slice) -> Params:
    """The parameters of a half, ready to be differentiated; they share its memory."""
    return {k: (v[rows] if half.stacked else v).detach().requires_grad_() for k, v in half.params.items()}


def client_forward(model: SplitModel, cut: int, half: Half, x: Tensor, rows: slice) -> tuple[Tensor, Params]:
    """Smashed data S (k, b, *d) with its graph, and the leaves of that graph."""
    leaves = leaves_of(half, rows)
    return run_half(model, leaves, x, 0, cut, stacked=half.stacked), leaves


def client_backward(
    half: Half, smashed: Tensor, leaves: Params, received: Tensor, rho: Tensor, rows: slice, descent: Descent
) -> None:
    """Pull what was received (k or 1, b, *d) back through the clients' own activations.

    A stacked half steps at once; a shared half gathers sum_n rho^n g^n.
    """
    if not leaves:
        return
    if not half.stacked:
        received = received * _column(rho, received)
    grads = torch.autograd.grad(smashed, list(leaves.values()), received.expand_as(smashed))
    named = dict(zip(leaves, grads, strict=True))
    if half.stacked:
        half.descend(named, descent.lr, descent.momentum, rows)
    else:
        half.gather(named)


def server_pass(
    model: SplitModel,
    cut: int,
    half: Half,
    seen: Tensor,
    y: Tensor,
    rho: Tensor,
    rows: slice,
    descent: Descent,
) -> tuple[Tensor, Tensor]:
    """Per-client losses F^n (k,) and smashed-data gradients s^n (k, b, *d) from what the server received.

    A stacked half steps at once; a shared half gathers sum_n rho^n g^{s,n}.
    """
    seen = seen.detach().requires_grad_()
    leaves = leaves_of(half, rows)
    logits = run_half(model, leaves, seen, cut, model.depth, stacked=half.stacked)
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    total = losses.sum() if half.stacked else (rho * losses).sum()
    smashed_grad, *grads = torch.autograd.grad(total, [seen, *leaves.values()])
    named = dict(zip(leaves, grads, strict=True))
    if half.stacked:
        half.descend(named, descent.lr, descent.momentum, rows)
        return losses.detach(), smashed_grad
    half.gather(named)
    return losses.detach(), smashed_grad.div_(_column(rho, smashed_grad))


def saved_bytes(model: SplitModel) -> int:
    """Bytes autograd keeps per sample for a pass through the whole model."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    params = {k: v.requires_grad_() for k, v in model.initial().items()}
    own = {p.untyped_storage().data_ptr() for p in params.values()}
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.forward(params, torch.zeros(1, *model.input_shape), 0, model.depth)
    return sum(size for storage, size in seen.items() if storage not in own) or 1


def _column(weights: Tensor, like: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (like.dim() - 1))
