"""Low-rank adapters, after Hu et al., ICLR 2022: W x + (alpha / r) B A x, of which only A (r, in), B (out, r) learn.

A is drawn, B is zero: a model with fresh adapters does what it did without.

With adapters of k clients, A (k, r, in) and B (k, out, r), the rows of x are those of one client after another: the
base layer sees all of them at once, and each client's rows its own adapter.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from splitcast.base.errors import SplitcastError


class LoRA(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        inner, outer = _sizes(base)
        self.base, self.scale = base, alpha / rank
        device = next(base.parameters()).device
        self.lora_A = nn.Parameter(torch.empty(rank, inner, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outer, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.lora_A.dim() == 2:
            return out + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)
        rows = x.reshape(len(self.lora_A), -1, x.shape[-1])
        added = rows @ self.lora_A.transpose(1, 2) @ self.lora_B.transpose(1, 2)
        return out + self.scale * added.view(out.shape)


def add_lora(holder: nn.Module, rank: int, modules: Sequence[str], alpha: float = 0.0) -> None:
    """Give the linear layers whose path ends in one of ``modules`` an adapter, and freeze everything else, in place.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> add_lora(net, 2, ["2"])
    >>> [name for name, p in net.named_parameters() if p.requires_grad]
    ['2.lora_A', '2.lora_B']
    """
    found = {path: module for path, module in holder.named_modules() if _is_linear(module)}
    for name in modules:
        if not any(_ends(path, name) for path in found):
            names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in found)) or "none"
            raise SplitcastError(f"lora.modules: no linear layer is called {name!r}; there are {names}")
    if not modules:
        names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in found)) or "none"
        raise SplitcastError(f"lora.modules: none given; choose from the linear layers {names}")
    holder.requires_grad_(False)
    for path, module in found.items():
        if any(_ends(path, name) for name in modules):
            parent, _, name = path.rpartition(".")
            setattr(holder.get_submodule(parent), name, LoRA(module, rank, alpha or rank))


@torch.no_grad()
def merge_lora(holder: nn.Module) -> None:
    """Put W + (alpha / r) B A in the place of every layer with an adapter: the same function without adapters."""
    owners = Counter(id(p) for _, p in holder.named_parameters(remove_duplicate=False))
    for path, module in list(holder.named_modules()):
        if isinstance(module, LoRA):
            weight, change = module.base.weight, module.scale * module.lora_B @ module.lora_A
            assert isinstance(weight, Tensor)
            if owners[id(weight)] > 1:
                raise SplitcastError(f"lora.modules: {path} shares its matrix with another layer, which has no adapter")
            weight.add_(change if isinstance(module.base, nn.Linear) else change.T)
            parent, _, name = path.rpartition(".")
            setattr(holder.get_submodule(parent), name, module.base)


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _is_linear(module: nn.Module) -> bool:
    """`nn.Linear`, and the Conv1D of transformers, whose weight is (in, out); of attention, only what it calls."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _sizes(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    outer, inner = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]
    return int(inner), int(outer)
