"""ResNets for small images, after He et al., CVPR 2016: a 3x3 stem without pooling, as is usual for CIFAR.

The stem, residual blocks of two 3x3 convolutions, and pooling with the classifier; a cut is between two of them. For 10
classes ResNet-18 has ten blocks and 11.2 million parameters, ResNet-8 (as in MLPerf Tiny) five and 78 thousand.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from splitcast.base.errors import SplitcastError


class BasicBlock(nn.Module):
    """relu(shortcut(x) + bn2(conv2(relu(bn1(conv1(x))))))"""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        same = stride == 1 and inner == outer
        self.shortcut: nn.Module = nn.Identity()
        if not same:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def _resnet(input_shape: Sequence[int], classes: int, *, widths: Sequence[int], depth: int) -> dict[str, nn.Module]:
    """Blocks for images (C, H, W): ``depth`` residual ones of each width."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        raise SplitcastError(
            f"input_shape: {tuple(input_shape)}; a ResNet takes channels, height and width, of 8 pixels at least"
        )
    inner = widths[0]
    stem = nn.Sequential(nn.Conv2d(input_shape[0], inner, 3, 1, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU())
    blocks: dict[str, nn.Module] = {"stem": stem}
    for layer, outer in enumerate(widths, start=1):
        for k in range(depth):
            blocks[f"layer{layer}.{k}"] = BasicBlock(inner, outer, 2 if k == 0 and layer > 1 else 1)
            inner = outer
    blocks["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))
    for module in nn.ModuleList(blocks.values()).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return blocks


resnet8 = partial(_resnet, widths=(16, 32, 64), depth=1)
resnet18 = partial(_resnet, widths=(64, 128, 256, 512), depth=2)
