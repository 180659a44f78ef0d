"""Models by name."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.model.cnn import paper_cnn, small_cnn
from splitcast.model.split import SplitModel

Builder = Callable[[Sequence[int], int], nn.Sequential | Sequence[nn.Module]]

ARCHITECTURES = Registry[Builder]("arch", takes=2, entries={"cnn": paper_cnn, "cnn-small": small_cnn})


def build(arch: str, input_shape: Sequence[int], classes: int, seed: int) -> SplitModel:
    """A split model with initial weights drawn from ``seed``, leaving torch's global generator untouched.

    ``arch`` is a known name, or ``module:function`` for a function of (input_shape, classes) that returns
    blocks.

    >>> build("cnn", (1, 28, 28), 10, seed=0).depth
    5
    """
    if not input_shape or min(input_shape) < 1:
        raise SplitcastError(f"input_shape: {tuple(input_shape)}; give sizes of at least 1, as in 1 28 28")
    if classes < 2:
        raise SplitcastError(f"classes: {classes}; must be at least 2")
    builder = ARCHITECTURES.find(arch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SplitModel(builder(input_shape, classes), input_shape)
