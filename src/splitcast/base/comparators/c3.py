"""Samples bound to keys and added up: c3sl:R sends one vector for R samples.

    sent        S = sum_i k_i (*) z_i           (*) circular convolution, over the R samples of a group
    received    z'_i = k_i (.) S                circular correlation: z_i, and noise from the others

with fixed random keys k_i of length one, nearly orthogonal to each other. A gradient comes back through the same:
convolution and correlation are each other's adjoint, so that `--downlink-codec c3sl:R` is the chain rule of the paper.

Hsieh, Chuang, Wu: C3-SL: circular convolution-based batch-wise compression for communication-efficient split learning,
MLSP 2022. Not in the paper: a batch that R does not divide has a smaller last group.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from splitcast.base.codec import EMPTY, FP32, Codec
from splitcast.base.comparators.bits import flat
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.rounding import Draw
from splitcast.base.seeds import stream

MOST = 1024


class Bound(Codec):
    """Groups of R samples as one vector each, fp32."""

    def __init__(self, ratio: int) -> None:
        self.ratio, self.name = ratio, f"c3sl:{ratio}"

    @staticmethod
    def named(text: str, field: str = "codec") -> "Bound":
        """c3sl:R, without the first part."""
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MOST):
            raise SplitcastError(
                f"{field}: unknown {shown(f'c3sl:{text}')}; give the samples that share a vector, c3sl:4, up to {MOST}"
            )
        return Bound(int(text))

    def nbytes(self, shape: Sequence[int]) -> int:
        b, d = flat(shape)
        return 4 * -(-b // self.ratio) * d

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        b, d = flat(x.shape)
        rows = x.detach().to("cpu", torch.float32).reshape(b, d).clamp(-(2.0**100), 2.0**100)
        groups = torch.nn.functional.pad(rows, (0, 0, 0, -b % self.ratio)).view(-1, self.ratio, d)
        bound = torch.fft.irfft((torch.fft.rfft(groups) * _keys(self.ratio, d)).sum(1), n=d)
        return FP32.encode(bound)

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        b, d = flat(shape)
        if not b * d:
            return torch.empty(*shape, device=payload.device)
        bound = FP32.decode(payload.clone(), (-(-b // self.ratio), 1, d))
        rows: Tensor = torch.fft.irfft(torch.fft.rfft(bound) * _keys(self.ratio, d).conj(), n=d)
        return rows.reshape(-1, d)[:b].view(*shape)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        b, d = flat(shape)
        each = 2.5 * d * math.log2(max(2, d))  # of a real transform
        groups = -(-b // self.ratio)
        return (b + groups) * each + 8.0 * b * d, (b + groups) * each + 6.0 * b * d


@cache
def _keys(ratio: int, d: int) -> Tensor:
    """The transforms of the keys (R, d/2 + 1), the same everywhere."""
    drawn = torch.from_numpy(stream(0, "rotation", d, ratio).standard_normal((ratio, d)))
    keys: Tensor = torch.fft.rfft((drawn / drawn.norm(dim=1, keepdim=True)).float())
    return keys
