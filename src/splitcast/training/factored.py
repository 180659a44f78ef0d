"""Weight gradients of stacked linear layers, kept as their two factors and applied without being formed.

Client n's gradient of a linear layer is s^T x, of rank b at most, with s (b, o) the gradient at the output and
x (b, i) the input. Forming it for k clients writes k*o*i values only to read them once again; `Tensor.baddbmm_`
adds the product straight to the weights. With wide layers this is most of a round's cost beyond one SGD step.
A weight that is computed from parameters (weight normalisation, a slice, a transpose) gets an ordinary gradient.

Weights of many clients are larger than any cache, and a round takes as long as they are read. Where a step is
w = a w + c g, a large weight that a pass uses once steps on the way back, when the gradient at its input is there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitcast.model.split import Params

PIECE = 2**17
"""Values of a weight that stay in the cache between two uses"""
FEW = 8
"""rows of a batch up to which reading weights takes longer than computing with them"""

Affine = tuple[float, float]
"""(a, c) of a step w = a w + c g"""


@dataclass(frozen=True)
class Factors:
    """The gradient sum_r left_r^T right_r (k, o, i) from left (k, r, o) and right (k, r, i)."""

    left: Tensor
    right: Tensor

    def add_to(self, target: Tensor, *, scale: float, keep: float = 1.0) -> None:
        """target = keep * target + scale * gradient, in place."""
        target.baddbmm_(self.left.transpose(1, 2), self.right, beta=keep, alpha=scale)

    def pull_and_add(self, target: Tensor, *, scale: float, keep: float = 1.0) -> Tensor:
        """left @ target (k, r, i), and then `add_to`: one piece of ``target`` after another, read once for both."""
        pulled = torch.zeros_like(self.right)
        rows = max(1, PIECE // target.shape[2])
        for left, right, whole, out in zip(self.left, self.right, target, pulled, strict=True):
            for s, w in zip(left.split(rows, 1), whole.split(rows), strict=True):
                out.addmm_(s, w)
                w.addmm_(s.T, right, beta=keep, alpha=scale)
        return pulled

    def formed(self) -> Tensor:
        """The gradient itself."""
        return torch.bmm(self.left.transpose(1, 2), self.right)

    def each(self) -> Iterator[Tensor]:
        """The gradient of one client after the other, (o, i), in memory that the next one takes over."""
        held = self.left.new_empty(self.left.shape[2], self.right.shape[2])
        for left, right in zip(self.left, self.right, strict=True):
            yield torch.mm(left.T, right, out=held)


Gradient = Tensor | Factors


def formed_values(blocks: Sequence[nn.Module]) -> int:
    """Values of a client's gradient that are formed after all: of all that is trained but linear weights."""
    modules = [module for block in blocks for module in block.modules()]
    return sum(
        p.numel()
        for module in modules
        for name, p in module.named_parameters(recurse=False)
        if p.requires_grad and not (isinstance(module, nn.Linear) and name == "weight")
    )


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]


def _place(tensor: Tensor) -> _Place:
    """Where a tensor's values are: a slice or transpose of a parameter has its address, but is another tensor."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


class _Sink:
    """Where backward passes leave factors of the gradients of ``leaves``; opaque to torch, unlike a dictionary."""

    def __init__(self, leaves: Params) -> None:
        self.factors: dict[_Place, list[Factors]] = {_place(leaf): [] for leaf in leaves.values()}
        self.at_once: set[_Place] = set()
        """weights that step on the way back,"""
        self.step: Affine = 1.0, 0.0
        """and how"""


class FactoredLinear(TorchFunctionMode):
    """While active, linear layers under vmap whose weights are leaves leave the factors of their gradients here."""

    def __init__(self, leaves: Params) -> None:
        super().__init__()
        self.sink = _Sink(leaves)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) == 3:
            return _Linear.apply(*args, self.sink)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def gradients(
        self,
        output: Tensor,
        grad_output: Tensor,
        leaves: Params,
        step: Affine | None = None,
        free: Iterable[str] = (),
    ) -> dict[str, Gradient]:
        """The gradient of every leaf, factored where it was left here; but leaves that are ``free`` to ``step`` on the
        way back may have done so, and are left out."""
        large = {_place(leaves[k]) for k in free if leaves[k].is_cpu and leaves[k][0].numel() > PIECE} if step else {}
        if step and large:
            uses = _uses(output)
            self.sink.at_once, self.sink.step = {place for place in large if uses[place] == 1}, step
        grads = torch.autograd.grad(output, list(leaves.values()), grad_output, allow_unused=True)
        named: dict[str, Gradient] = {}
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            found = self.sink.factors.pop(_place(leaf), [])
            if found:
                left, right = torch.cat([f.left for f in found], 1), torch.cat([f.right for f in found], 1)
                # with a gradient of its own, the weight is of use elsewhere too
                named[name] = Factors(left, right) if grad is None else grad.baddbmm(left.transpose(1, 2), right)
            elif grad is not None:
                named[name] = grad
        return named


def _uses(output: Tensor) -> Counter[_Place]:
    """How often each leaf enters the graph of ``output``."""
    seen: set[Any] = set()
    found, ahead = Counter[_Place](), list[Any]([output.grad_fn])
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if hasattr(node, "variable"):
                found[_place(node.variable)] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return found


class _Linear(torch.autograd.Function):
    """F.linear, except under vmap over clients."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sink: _Sink) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: _Sink) -> Any:
        stacked = in_dims[0] is not None and in_dims[1] == 0 and (bias is None or in_dims[2] == 0)
        if not stacked or not weight.requires_grad or _place(weight) not in sink.factors:
            return torch.func.vmap(F.linear, in_dims=in_dims[:3])(x, weight, bias), 0
        x = x.movedim(in_dims[0], 0)  # (k, ..., i)
        rows = x.flatten(1, -2).contiguous()  # clients may be between samples: rows far apart are slow
        out: Tensor = _StackedLinear.apply(rows, weight, bias, sink)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1), 0


class _StackedLinear(torch.autograd.Function):
    """x (k, r, i), weight (k, o, i), bias (k, o) -> (k, r, o)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: _Sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        if x.shape[1] == 4:  # in 3/4 of the time with MKL; with 1 to 3 or 6 to 12 rows this way would be slower
            out = torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2).contiguous()
            return out if bias is None else out.add_(bias[:, None])
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (s,) = grads
        factors, sink = Factors(s, x.detach()), ctx.sink
        grad_bias = s.sum(1) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0] and s.shape[1] <= FEW and _place(weight) in sink.at_once:
            keep, scale = sink.step
            return factors.pull_and_add(weight, scale=scale, keep=keep), None, grad_bias, None
        sink.factors[_place(weight)].append(factors)
        return torch.bmm(s, weight) if ctx.needs_input_grad[0] else None, None, grad_bias, None
