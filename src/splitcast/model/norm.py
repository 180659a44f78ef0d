"""What becomes of BatchNorm, whose statistics are those of one client's batch.

local: every client normalises by its own batch, running statistics are averaged with the weights (as it is). frozen:
running statistics are used and stay, scale and shift are trained: for models that were trained before. group: GroupNorm
in its place (Wu and He, ECCV 2018), which has no statistics to share, with gcd(32, C) groups of the C channels, or a
single group where samples are vectors (BatchNorm1d).
"""

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from splitcast.base.errors import one_of

MODES = ("local", "frozen", "group")


def set_batch_norm(holder: nn.Module, mode: str) -> None:
    """Change all BatchNorm layers below ``holder``, in place.

    >>> layers = nn.Sequential(nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48))
    >>> set_batch_norm(layers, "group")
    >>> layers[1].num_groups
    16
    """
    one_of("batch_norm", mode, MODES)
    for parent in list(holder.modules()):
        for name, norm in list(parent.named_children()):
            if not isinstance(norm, _BatchNorm):
                continue
            if mode == "frozen":
                norm.eval()
            elif mode == "group":
                setattr(parent, name, _grouped(norm))


def _grouped(norm: _BatchNorm) -> nn.GroupNorm:
    groups = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(32, norm.num_features)
    made = nn.GroupNorm(groups, norm.num_features, norm.eps, norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made
