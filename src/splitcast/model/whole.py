"""The module back: what was trained in blocks, as one module under its own names."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from splitcast.model.split import Params, SplitModel, block_of


class Chain(nn.Module):
    """Blocks in their order, each under its name; a name with dots is a path, as in layer1.0."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.order = tuple(blocks)
        for path, block in blocks.items():
            home, _, name = path.rpartition(".")
            holder: nn.Module = self
            for part in home.split(".") if home else ():
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(name, block)

    def forward(self, x: Tensor) -> Tensor:
        for path in self.order:
            x = self.get_submodule(path)(x)
        return x


@torch.no_grad()
def whole(model: SplitModel, values: Params) -> nn.Module:
    """A copy of the module that was split, or of its blocks in a row, with these parameters and buffers.

    Its modes are those in which it was given; what was not trained is as it was.

    >>> model = SplitModel([nn.Linear(2, 2), nn.Linear(2, 1)], input_shape=(2,), names=["into", "out"])
    >>> made = whole(model, model.initial() | {"1.bias": torch.tensor([7.0])})
    >>> list(made.state_dict()), made.out.bias.item()
    (['into.weight', 'into.bias', 'out.weight', 'out.bias'], 7.0)
    """
    if model.source is None:
        blocks = dict(zip(model.names, model.blocks[: model.depth], strict=True))
        made: nn.Module = copy.deepcopy(Chain(blocks))
    else:
        made = copy.deepcopy(model.source)
    real = (v.dtype for k, v in values.items() if v.is_floating_point() and k not in model.halved)
    made.to(next(real, torch.float32))
    own = dict(made.named_parameters(remove_duplicate=False)) | dict(made.named_buffers(remove_duplicate=False))
    for name, value in values.items():
        if block_of(name) < model.depth:  # heads are no part of it
            path = name.partition(".")[2]
            own[path if model.source else f"{model.names[block_of(name)]}.{path}"].copy_(value)
    return made
