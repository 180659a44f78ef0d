"""The integer formats of version 0.1.0: 2^n points evenly from 0 to h, or from -h to h, where zero is none of them."""

import math

import torch
from torch import Tensor

from splitcast.base.codec import Integer, as_rows, rounded_up
from splitcast.base.rounding import Draw


class FirstGrid(Integer):
    """What a receiver decodes; the sizes of messages are the same."""

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        rows = as_rows(x)
        least, most = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        h = rounded_up(torch.maximum(-least, most).float().clamp(max=2.0**126)).view(torch.bfloat16).float()
        low, step = torch.where(least < 0, -h, 0.0), h * torch.where(least < 0, 2 / self.top, 1 / self.top)
        levels = (rows - low).div_(torch.where(step > 0, step, 1))
        if draw:
            levels += draw(math.prod(rows.shape[1:])).to(levels).mul_(2**-16).view_as(levels)
        return levels.round_().clamp_(0, self.top).mul_(step).add_(low).view(x.shape)
