"""FLOPs of what runs, counted by torch's own formulas."""

from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Adds up the FLOPs of all that runs inside, a multiply-add as two, as torch's `FlopCounterMode` does.

    That one imports torch's compiler, which takes longer than a small training.

    >>> import torch
    >>> with Flops() as counted:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counted.total
    48
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def _count(self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        self.total += formula(*args, **kwargs, out_val=out) if formula else 0
        return out


Flops.__torch_dispatch__ = Flops._count  # set here: torch makes one that it finds in the class import its compiler
