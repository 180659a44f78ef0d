"""FLOPs of what runs, counted by torch's own formulas."""

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

QUESTIONS = {"dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "layout", "numel"}
QUESTIONS |= {"size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset"}
QUESTIONS |= {"sym_stride"}
"""Operators that tell something about a tensor, which the tensor answers itself."""


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of all that runs inside, a multiply-add as two, as torch's `FlopCounterMode` does.

    That one imports torch's compiler, which takes longer than a small training.

    >>> import torch
    >>> with Flops() as counted:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counted.total
    48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def _count(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name().partition("::")[2].partition(".")[0]  # type: ignore[no-untyped-call]
        if name in QUESTIONS:
            return NotImplemented
        if name != "device":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        self.total += formula(*args, **kwargs, out_val=out) if formula else 0
        return out


# not in the class, because torch makes one that it finds there import its compiler
Flops.__torch_dispatch__ = Flops._count  # type: ignore[method-assign, assignment]
