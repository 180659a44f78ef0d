"""A pass through some blocks, with one copy of the weights or one per client, and its graph.

Batches are (k, b, ...) for k clients. With one copy all k*b samples make one pass, and so they do where only adapters
are trained; where layers mix a batch, the samples of each client make a pass of their own. Other stacked copies are run
together by `torch.func.vmap`, or, where it has no rule for a layer, one after another.

Where clients recompute, a block keeps what enters it and runs again on the way back (Chen et al., Training deep nets
with sublinear memory cost, arXiv 1604.06174).
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

from splitcast.model.split import Params, SplitModel, block_of
from splitcast.training.factored import FactoredLinear, Factors, Gradient
from splitcast.training.optimiser import Optimiser, clipped
from splitcast.training.placement import Segment
from splitcast.training.pooling import FastPooling
from splitcast.training.runtime import Runtime
from splitcast.training.weights import BUFFERS, FROZEN, Weights

Run = Callable[[Params, Params, Tensor], Tensor]
"""leaves, buffers and samples to outputs"""


class Pass:
    """A segment on x (k, b, ...), for ``rows`` of stacked weights."""

    def __init__(
        self,
        model: SplitModel,
        segment: Segment,
        weights: Weights,
        rows: slice,
        x: Tensor,
        runtime: Runtime,
        *,
        again: bool = False,
        plain: bool = False,
    ) -> None:
        """A pass changes buffers where its layers do so, unless it is the same ``again``; a ``plain`` one can be
        differentiated twice."""
        self.weights, self.rows, self.x = weights, rows, x
        stacked, first, last = weights.stacked, segment.start, segment.stop
        elsewhere = {model.tied[k] for k in model.tied if segment.holds(k) and not segment.holds(model.tied[k])}
        self.elsewhere = elsewhere & weights.params.keys()
        """parameters that are used here and belong to another segment of this side"""
        self.leaves: Params = {
            # `.data`: versions of its own, so that no other pass minds what steps on this one's way back
            k: (v.data[rows] if stacked else v).detach().requires_grad_()
            for k, v in weights.params.items()
            if segment.holds(k) or k in elsewhere
        }
        self.linear = FactoredLinear(self.leaves)
        theirs = stacked or weights.apart
        buffers = {k: (v[rows] if theirs else v) for k, v in weights.beside(BUFFERS).items() if segment.holds(k)}
        if again:
            buffers = {k: v.clone() for k, v in buffers.items()}
        frozen = weights.beside(FROZEN)
        recompute = runtime.recompute and segment.side == "client"

        def run(leaves: Params, own: Params, xs: Tensor) -> Tensor:
            if not recompute:
                return model.forward(frozen | own | leaves, xs, first, last)
            for block in range(first, last):
                xs = checkpoint(_Again(model, block, frozen | leaves, own), xs, use_reentrant=False)
            return xs

        self.output: Tensor
        with runtime.arithmetic(), nullcontext() if plain else FastPooling():
            if weights.apart:
                together = not recompute and model.stackable(first, last)
                self.output = self._client_by_client(run, buffers, together=together)
            elif not stacked or model.only_adapters(first, last):
                flat = run(self.leaves, buffers, x.flatten(0, 1))
                self.output = flat.view(*x.shape[:2], *flat.shape[1:])
            elif not recompute and model.stackable(first, last):
                with nullcontext() if plain or runtime.autocast else self.linear:  # factors would be of two types
                    self.output = vmap(run, randomness="different")(self.leaves, buffers, x)
            else:
                each = zip(_unstacked(self.leaves, x), _unstacked(buffers, x), x, strict=True)
                self.output = torch.stack([run(*one) for one in each])
        if runtime.autocast:
            self.output = self.output.to(runtime.dtype)

    def _client_by_client(self, run: Run, buffers: Params, *, together: bool) -> Tensor:
        """Samples of each client on their own, with one copy of what is trained."""
        if together:
            found: Tensor = vmap(run, in_dims=(None, 0, 0), randomness="different")(self.leaves, buffers, self.x)
            return found
        return torch.stack(
            [run(self.leaves, own, x) for own, x in zip(_unstacked(buffers, self.x), self.x, strict=True)]
        )

    def backward(
        self, grad: Tensor, optimiser: Optimiser, scale: float = 1.0, carried: dict[str, Gradient] | None = None
    ) -> Tensor | None:
        """Pull a gradient at the output back: stacked copies step at once, one copy gathers ``scale`` times it.

        Gradients of parameters that belong elsewhere are ``carried`` there, and steps are along the sum. Returns the
        gradient at the input if the input asks for one.
        """
        if not self.output.requires_grad:
            return None
        wrt = self.leaves | ({"input": self.x} if self.x.requires_grad else {})
        step = getattr(optimiser, "affine", None) if self.weights.stacked else None
        free = self.leaves.keys() - self.elsewhere - (carried or {}).keys()
        grads = self.linear.gradients(self.output, grad, wrt, step, free)
        at_input = grads.pop("input", None)
        if self.weights.stacked and carried is not None:
            came = {k: carried.pop(k) for k in grads.keys() & carried.keys()}
            carried |= {k: grads.pop(k) for k in self.elsewhere & grads.keys()}
            grads |= {k: _formed(grads[k]) + _formed(g) for k, g in came.items()}
        self.apply(grads, optimiser, scale)
        assert not isinstance(at_input, Factors)
        return at_input

    def apply(self, grads: dict[str, Gradient], optimiser: Optimiser, scale: float = 1.0) -> None:
        """Stacked copies step along their gradients, one copy gathers ``scale`` times them."""
        if (norm := getattr(optimiser, "clip_norm", 0.0)) and grads:
            grads = clipped(grads, norm, stacked=self.weights.stacked)
        if self.weights.stacked:
            self.weights.step_rows(optimiser, grads, self.rows)
        else:
            self.weights.accumulate(grads, scale)


class _Again:
    """A block that can be run again: buffers are changed once, and begin alike."""

    def __init__(self, model: SplitModel, block: int, params: Params, buffers: Params) -> None:
        self.model, self.block, self.params, self.buffers = model, block, params, buffers
        self.before: Params | None = None

    def __call__(self, x: Tensor) -> Tensor:
        buffers = self.buffers if self.before is None else {k: v.clone() for k, v in self.before.items()}
        if self.before is None:
            self.before = {k: v.clone() for k, v in self.buffers.items() if block_of(k) == self.block}
        return self.model.forward(self.params | buffers, x, self.block, self.block + 1)


def _formed(grad: Gradient) -> Tensor:
    return grad.formed() if isinstance(grad, Factors) else grad


def _unstacked(values: Params, x: Tensor) -> list[Params]:
    """One dictionary per copy."""
    parts = {k: v.unbind() for k, v in values.items()}
    return [{k: part[n] for k, part in parts.items()} for n in range(len(x))]


def saved_bytes(model: SplitModel, start: int = 0, stop: int | None = None) -> int:
    """Bytes autograd keeps per sample for a pass through blocks start+1..stop, by default all."""
    seen: dict[int, Tensor] = {}  # by storage, which lives on with them, so that no two have one name

    def note(tensor: Tensor) -> None:
        """An output that its own graph held, hooks and all, would never be freed."""
        seen[tensor.untyped_storage()._cdata] = tensor.detach()  # meta tensors have no address

    params = {k: v.requires_grad_() for k, v in model.initial().items()}
    own = {p.untyped_storage()._cdata for p in (params | model.frozen()).values()}
    x = torch.zeros(1, *model.entering(start), device=model.device, dtype=None if start else model.input_dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda nothing: nothing)
    with torch.random.fork_rng(devices=[]), model.evaluating(), hooks:
        model.forward(params | model.frozen(), x.requires_grad_(start > 0), start, stop or model.depth)
    return sum(kept.untyped_storage().nbytes() for storage, kept in seen.items() if storage not in own) or 1
