"""One local step on the halves: client forward, server pass, client pull-back.

Batches are (k, b, ...) for k clients. On a shared half all k*b samples make one pass and its gradient is weighted
by rho; on a stacked half each client has its own copy, and `torch.func.vmap` runs them together.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from splitcast.engine.factored import FactoredLinear, Factors
from splitcast.engine.state import Half
from splitcast.split import Params, SplitModel


class Descent(NamedTuple):
    """Step size and momentum of SGD."""

    lr: float
    momentum: float


class Pass:
    """Blocks start+1..stop on x (k, b, ...), with one copy of a half's parameters or one per client, and its graph."""

    def __init__(self, model: SplitModel, half: Half, rows: slice, x: Tensor, start: int, stop: int) -> None:
        self.half, self.rows, self.x = half, rows, x
        self.leaves: Params = {
            k: (v[rows] if half.stacked else v).detach().requires_grad_() for k, v in half.params.items()
        }
        self.linear = FactoredLinear(self.leaves)
        if half.stacked:
            run = vmap(lambda p, xs: model.forward(p, xs, start, stop), randomness="different")
            with self.linear:
                self.output: Tensor = run(self.leaves, x)
        else:
            flat = model.forward(self.leaves, x.flatten(0, 1), start, stop)
            self.output = flat.view(*x.shape[:2], *flat.shape[1:])

    def backward(self, grad: Tensor, descent: Descent) -> Tensor | None:
        """Pull a gradient at the output back; a stacked half steps at once, a shared one gathers.

        Returns the gradient at the input if the input asks for one.
        """
        if not self.output.requires_grad:
            return None
        wrt = self.leaves | ({"input": self.x} if self.x.requires_grad else {})
        grads = self.linear.gradients(self.output, grad, wrt)
        at_input = grads.pop("input", None)
        if self.half.stacked:
            self.half.descend(grads, descent.lr, descent.momentum, self.rows)
        else:
            self.half.gather(grads)
        assert not isinstance(at_input, Factors)
        return at_input


def client_backward(sent: Pass, received: Tensor, rho: Tensor, descent: Descent) -> None:
    """Pull what was received (k or 1, b, *d) back through the clients' own activations.

    A stacked half steps along each g^n; a shared half gathers sum_n rho^n g^n.
    """
    if not sent.half.stacked:
        received = received * _column(rho, received)
    sent.backward(received.expand_as(sent.output), descent)


def server_pass(
    model: SplitModel, cut: int, half: Half, seen: Tensor, y: Tensor, rho: Tensor, rows: slice, descent: Descent
) -> tuple[Tensor, Tensor]:
    """Per-client losses F^n (k,) and smashed-data gradients s^n (k, b, *d) from what the server received.

    A stacked half steps along each g^{s,n}; a shared half gathers sum_n rho^n g^{s,n}.
    """
    seen = seen.detach().requires_grad_()
    run = Pass(model, half, rows, seen, cut, model.depth)
    logits = run.output.detach().requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    total = losses.sum() if half.stacked else (rho * losses).sum()
    grad = run.backward(torch.autograd.grad(total, logits)[0], descent)
    assert grad is not None
    return losses.detach(), grad if half.stacked else grad.div(_column(rho, grad))


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
