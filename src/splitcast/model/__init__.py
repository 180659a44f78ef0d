"""Models by name."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.registry import Registry
from splitcast.base.seeds import torch_seed
from splitcast.data.datasets import LAST_LABEL
from splitcast.model.cnn import paper_cnn, small_cnn
from splitcast.model.split import SplitModel

Builder = Callable[[Sequence[int], int], nn.Module | Sequence[nn.Module] | SplitModel]

OBJECT = "object:"
"""So begins the recorded name of a model that was given from Python."""
MOST_VALUES, MOST_CLASSES = 2**26, LAST_LABEL + 1
"""Most values of a sample, and most classes."""

ARCHITECTURES = Registry[Builder]("arch", takes=2, entries={"cnn": paper_cnn, "cnn-small": small_cnn})


def make_model(config: Config, input_shape: Sequence[int], classes: int) -> SplitModel:
    """The model a configuration names, with the initial weights of its seed."""
    return build(config.model.arch, input_shape, classes, torch_seed(config.train.seed, "model"))


def build(arch: str, input_shape: Sequence[int], classes: int, seed: int) -> SplitModel:
    """A split model with initial weights drawn from ``seed``, leaving torch's global generator untouched.

    ``arch`` is a known name, or ``module:function`` for a function of (input_shape, classes) that returns a module,
    blocks, or a split model.

    >>> build("cnn", (1, 28, 28), 10, seed=0).depth
    5
    """
    if not 1 <= len(input_shape) <= 8 or min(input_shape) < 1 or math.prod(input_shape) > MOST_VALUES:
        raise SplitcastError(
            f"input_shape: {shown(tuple(input_shape))}; give sizes of at least 1, as in 1 28 28, and at most "
            f"{MOST_VALUES:,} values"
        )
    if not 1 <= classes <= MOST_CLASSES:
        raise SplitcastError(f"classes: {shown(classes)}; must be at least 1 and at most {MOST_CLASSES:,}")
    if arch.startswith(OBJECT):
        raise SplitcastError(
            f"arch: {shown(arch)} was given as a Python object, which no name builds; give it from Python (model=)"
        )
    builder = ARCHITECTURES.find(arch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = builder(input_shape, classes)
            return made if isinstance(made, SplitModel) else SplitModel.of(made, torch.zeros(1, *input_shape), arch)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            raise SplitcastError(
                f"input_shape: {tuple(input_shape)} with {classes} classes makes a model beyond the memory"
            ) from None
