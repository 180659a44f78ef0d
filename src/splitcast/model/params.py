"""Parameters by name: "3.weight" is the weight of the fourth block."""

from torch import Tensor

Params = dict[str, Tensor]


def block_of(name: str) -> int:
    """The block, counted from 0, that owns a parameter."""
    return int(name.split(".", 1)[0])
