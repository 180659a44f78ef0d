"""What is found out about blocks by running them: whether they mix a batch, stack, cost, and equal the whole."""

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import seed_torch
from splitcast.model.flops import Flops
from splitcast.model.params import Params, block_of
from splitcast.model.tape import answer

if TYPE_CHECKING:
    from splitcast.model.split import SplitModel


def mixes(model: "SplitModel", block: int) -> bool:
    """Whether the first row of a block's output changes with the second row of its input."""
    if model.device == "meta":
        return False  # no values to be asked, and nothing is trained
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        seed_torch(0)
        x = _samples(model, 2, block)
        other = torch.cat([x[:1], _samples(model, 2, block)[1:]])
        try:
            first, second = (_seeded(model, block, rows) for rows in (x, other))
        except (RuntimeError, ValueError, IndexError):
            return True  # what cannot be asked is not trusted with two clients
    return not torch.equal(first[0], second[0])


def stacks(model: "SplitModel", block: int) -> bool:
    """Whether torch can run two copies of a block together, forward and back."""
    params = {k: torch.stack([v, v]).requires_grad_() for k, v in model._initial.items() if model.uses(block, k)}
    buffers = {k: torch.stack([v, v]) for k, v in model._buffers.items() if block_of(k) == block}

    def run(leaves: Params, own: Params, x: Tensor) -> Tensor:
        return model.forward(own | leaves, x, block, block + 1)

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        seed_torch(0)
        x = torch.stack([_samples(model, 2, block), _samples(model, 2, block)])
        try:
            out = vmap(run, randomness="different")(params, buffers, x)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), list(params.values()), allow_unused=True)
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            return False
    return True


def count_flops(model: "SplitModel", block: int, input_gradient: bool) -> tuple[int, int]:
    """FLOPs of a block per sample, forward and backward, with the gradient of its input or without."""
    params = {k: v.requires_grad_() for k, v in model.initial().items() if model.uses(block, k)}
    x = torch.zeros(1, *model.entering(block), device=model.device, dtype=model.input_dtype if not block else None)
    x.requires_grad_(input_gradient)
    attention = sdpa_kernel(SDPBackend.MATH)  # fused ones are not counted on every device
    with model.evaluating(), attention, Flops() as forward:
        out = model.forward(params, x, block, block + 1)
    if not out.requires_grad:
        return forward.total, 0
    with Flops() as backward:
        out.sum().backward()  # type: ignore[no-untyped-call]
    return forward.total, backward.total


def refuse_unlike(model: "SplitModel", module: nn.Module, x: Tensor) -> None:
    """Refuse blocks that do not together do what the module does, on a random input: output and gradients."""
    params = {name: p.clone().requires_grad_() for name, p in model._initial.items()}
    theirs = dict(module.named_parameters())
    pairs = [(p, theirs[name.split(".", 1)[1]]) for name, p in params.items()]
    seed_torch(1)
    ours = model.forward(params, x, 0, model.depth)
    seed_torch(1)
    out = answer(functional_call(module, copy.deepcopy(dict(module.named_buffers())), (x,)))
    for mine, given in [(ours, out), *_gradients(ours, out, pairs)]:
        if not torch.allclose(mine, given, rtol=1e-3, atol=1e-4 * float(given.detach().abs().max())):
            raise SplitcastError(
                f"model: {type(module).__name__} cannot be cut: its blocks put out something else than the whole"
            )


def _samples(model: "SplitModel", rows: int, block: int) -> Tensor:
    """Random input of a block; of tokens only the first two, which every model has."""
    if block == 0 and not model.input_dtype.is_floating_point:
        return torch.randint(0, 2, (rows, *model.input_shape), dtype=model.input_dtype, device=model.device)
    return torch.randn(rows, *model.entering(block), device=model.device)


def _seeded(model: "SplitModel", block: int, x: Tensor) -> Tensor:
    seed_torch(1)
    return model.forward(model._initial, x, block, block + 1)


def _gradients(ours: Tensor, out: Tensor, pairs: list[tuple[Tensor, nn.Parameter]]) -> list[tuple[Tensor, Tensor]]:
    """Gradients of the sum of squares of both outputs, of parameters that it depends on."""
    mine, given = (list(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
    if not mine or not ours.requires_grad:
        return []
    both = zip(
        torch.autograd.grad(ours.square().mean(), mine, allow_unused=True),
        torch.autograd.grad(out.square().mean(), given, allow_unused=True),
        strict=True,
    )
    return [(a, b) for a, b in both if a is not None and b is not None]
