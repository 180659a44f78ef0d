"""Where arithmetic happens, and in which numbers."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitcast.base.config import TrainConfig
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.heap import keep_freed_memory

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def device_name(asked: str) -> str:
    """The device that is meant: auto is the first of cuda, mps and cpu that there is."""
    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class Runtime(NamedTuple):
    """Device, type of the weights, the type of the arithmetic where it is another, and whether clients keep what enters
    a block only and run it again on the way back."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    recompute: bool = False

    @staticmethod
    def of(train: TrainConfig) -> "Runtime":
        """What a configuration asks for.

        >>> Runtime.of(TrainConfig(dtype="float64")).dtype
        torch.float64
        >>> Runtime.of(TrainConfig(precision="bf16")).autocast
        torch.bfloat16
        """
        dtype = DTYPES[one_of("dtype", train.dtype, DTYPES)]
        autocast = PRECISIONS[one_of("precision", train.precision, PRECISIONS)]
        if autocast and dtype != torch.float32:
            raise SplitcastError(f"precision: {train.precision!r} needs dtype float32, not {train.dtype}")
        try:
            device = torch.device(device_name(train.device))
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise SplitcastError(
                f"device: {train.device!r} cannot be used here ({reason}); choose cpu or auto"
            ) from None
        keep_freed_memory()
        return Runtime(device, dtype, autocast, train.recompute)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Around every pass."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    def fork_rng(self) -> AbstractContextManager[Any]:
        """Random numbers drawn inside leave those outside as they were."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def rng_state(self) -> Tensor:
        """From where random layers draw."""
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Draw from there again."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
