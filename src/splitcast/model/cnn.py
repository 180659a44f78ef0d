"""The paper's convolutional networks, after McMahan et al., AISTATS 2017.

Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, then fully connected layers. Five blocks with
parameters each, so that phi(v) grows strictly with the cut and cuts 1-4 exist as in the paper.
"""

from collections.abc import Sequence

from torch import nn

from splitcast.base.errors import SplitcastError


def cnn(
    input_shape: Sequence[int], classes: int, channels: tuple[int, int], hidden: tuple[int, int]
) -> list[nn.Module]:
    """Five blocks for images (C, H, W)."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise SplitcastError(
            f"input_shape: {tuple(input_shape)}; this model takes channels, height and width, of 4 pixels at least"
        )
    depth, height, width = input_shape
    flat = channels[1] * (height // 4) * (width // 4)
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(depth, channels[0], 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(channels[0], channels[1], 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(flat, hidden[0]), nn.ReLU()),
        nn.Sequential(nn.Linear(hidden[0], hidden[1]), nn.ReLU()),
        nn.Linear(hidden[1], classes),
    ]
    for module in nn.ModuleList(blocks).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            # He et al. 2015: torch's default start leaves plain SGD on a plateau for the first tens of rounds
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return blocks


def paper_cnn(input_shape: Sequence[int], classes: int) -> list[nn.Module]:
    """32 and 64 channels, 512 and 128 hidden units for 28x28x1; 64, 64, 384 and 192 for 32x32x3."""
    if input_shape[0] == 1:
        return cnn(input_shape, classes, (32, 64), (512, 128))
    return cnn(input_shape, classes, (64, 64), (384, 192))


def small_cnn(input_shape: Sequence[int], classes: int) -> list[nn.Module]:
    """The same five blocks, narrow: for tests and quick looks."""
    return cnn(input_shape, classes, (4, 8), (32, 16))
