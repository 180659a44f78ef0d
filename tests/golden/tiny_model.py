"""A model of five blocks and 425 parameters, for images of 28 x 28."""

from collections.abc import Sequence

import torch
from torch import nn


def tiny(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Its weights start larger than usual, so that a few rounds change every block enough to compare."""
    blocks = nn.Sequential(
        nn.Sequential(nn.AvgPool2d(4), nn.Conv2d(input_shape[0], 2, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(27, 8), nn.ReLU()),
        nn.Sequential(nn.Linear(8, 6), nn.ReLU()),
        nn.Linear(6, classes),
    )
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.mul_(2)
    return blocks
