"""A small decoder for tokens, after Radford et al., 2019 (GPT-2): for tests and a quick look at texts.

Embeddings, layers of causal attention and a perceptron with the norms in front, and a head: a block each.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitcast.base.errors import SplitcastError

LAYERS, WIDTH, HEADS = 4, 64, 4


class Embedding(nn.Module):
    """Tokens (rows, T) and their places as vectors (rows, T, d)."""

    def __init__(self, tokens: int, places: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(places, width)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.token(x) + self.place.weight[: x.shape[-1]]
        return out


class Layer(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x))."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear in (self.attention, self.out, self.up, self.down):
            last = linear in (self.out, self.down)  # what is added up over the layers starts smaller
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers) if last else 0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.norm1(x)))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.attention(x).view(rows, length, 3, self.heads, width // self.heads).unbind(2)  # (rows, T, h, e)
        scores = torch.einsum("rthe,rshe->rhts", q, k) / math.sqrt(width // self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        return torch.einsum("rhts,rshe->rthe", weights, v).reshape(rows, length, width)


def small_gpt(input_shape: Sequence[int], classes: int) -> dict[str, nn.Module]:
    """Six blocks for sequences of up to T tokens, of ``classes`` kinds."""
    if len(input_shape) != 1:
        raise SplitcastError(f"input_shape: {tuple(input_shape)}; this model takes rows of tokens, as texts give")
    head = nn.Linear(WIDTH, classes, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    return {
        "embedding": Embedding(classes, input_shape[0], WIDTH),
        **{f"layer{k}": Layer(WIDTH, HEADS, LAYERS) for k in range(LAYERS)},
        "head": nn.Sequential(nn.LayerNorm(WIDTH), head),
    }
