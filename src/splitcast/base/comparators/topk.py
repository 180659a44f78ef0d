"""The largest values of every sample, and some others at random.

    topk:SHARE       of the d values of a sample, the k = ceil(SHARE d) of greatest size
    randtopk:SHARE   k values: each of them is, with chance a = 0.1, one that is not among those k, else one that is

Zheng, Chen, Lyu, Yao: Reducing communication for split learning by randomized top-k sparsification, IJCAI 2023. The
message is k values of every sample as fp32 and the places they have, ceil(log2 d) bits each. Gradients come back for
the values that were sent, without places. Not in the paper: places are a bit for every value where that takes fewer
bytes.
"""

import math
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import EMPTY, FP32
from splitcast.base.comparators.bits import flat, pack_wide, packed_size, unpack_wide, width_of
from splitcast.base.comparators.sparse import Sparse, first_of
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.packing import pack, unpack
from splitcast.base.rounding import Draw, generator

ALPHA = 0.1
"""Share of values that are not among the largest, as in most of the paper's experiments."""
_SHARE = re.compile(r"(?P<share>[0-9]{1,3}(?:\.[0-9]{1,6})?)%(?:@(?P<alpha>[01](?:\.[0-9]{1,6})?))?")


class TopK(Sparse):
    """k values of every sample and their places."""

    draws: ClassVar[bool] = True

    def __init__(self, share: float, alpha: float, name: str) -> None:
        self.share, self.alpha, self.name = share, alpha, name

    @staticmethod
    def plain(text: str, field: str = "codec") -> "TopK":
        """topk:SHARE, without the first part."""
        share, alpha = _parsed("topk", text, field)
        if alpha:
            raise _refusal("topk", text, field)
        return TopK(share, 0.0, f"topk:{text}")

    @staticmethod
    def randomised(text: str, field: str = "codec") -> "TopK":
        """randtopk:SHARE or randtopk:SHARE@ALPHA, without the first part."""
        share, alpha = _parsed("randtopk", text, field)
        return TopK(share, ALPHA if alpha is None else alpha, f"randtopk:{text}")

    def kept(self, values: int) -> int:
        """k of so many values."""
        return min(values, math.ceil(self.share * values))

    def places(self, seen: Tensor) -> Tensor:
        return first_of(seen == 0, self.kept(seen.shape[2]))

    def nbytes(self, shape: Sequence[int]) -> int:
        b, d = flat(shape)
        k = self.kept(d)
        return 4 * b * k + min(packed_size(b * k, width_of(d)), packed_size(b * d, 1))

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        b, d = flat(x.shape)
        rows = x.detach().to("cpu", torch.float32).reshape(b, d)
        at = self._chosen(rows, draw).sort(1).values
        if _by_places(b, d, at.shape[1]):
            where = pack_wide(at.flatten().numpy(), width_of(d))
        else:
            where = pack(torch.zeros(b, d, dtype=torch.uint8, device="cpu").scatter_(1, at, 1).flatten(), 1)
        return torch.cat([FP32.encode(rows.gather(1, at)), where])

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        b, d = flat(shape)
        if not b * d:
            return torch.empty(*shape, device=payload.device)
        k = self.kept(d)
        values, where = FP32.decode(payload[: 4 * b * k].clone(), (b, k)), payload[4 * b * k :]
        if _by_places(b, d, k):
            at = torch.from_numpy(unpack_wide(where, width_of(d), b * k)).view(b, k)
            if int(at.max()) >= d:
                raise SplitcastError("has a place that does not exist")
        else:
            set_ = unpack(where, 1, b * d).view(b, d)
            if bool((set_.sum(1) != k).any()):
                raise SplitcastError(f"does not have {k} places in every sample")
            at = set_.nonzero()[:, 1].view(b, k)
        return torch.zeros(b, d, device=values.device).scatter_(1, at, values).view(*shape)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        return 2.0 * math.prod(shape), float(math.prod(shape))

    def _chosen(self, rows: Tensor, draw: Draw | None) -> Tensor:
        """Places (b, k)."""
        (b, d), k = rows.shape, self.kept(rows.shape[1])
        top = rows.abs().topk(k, dim=1).indices
        if not draw or not self.alpha or k == d:
            return top
        rng = generator(draw)
        others = np.minimum((rng.random((b, k)) < self.alpha).sum(1), d - k)  # of each sample
        chance = torch.from_numpy(rng.random((b, d))).scatter_(1, top, 2.0)
        rest = chance.topk(k if k <= d - k else d - k, dim=1, largest=False).indices
        shuffled = top.gather(1, torch.from_numpy(rng.random((b, k))).argsort(1))
        # the first m of the rest in the place of the last m of the shuffled top
        take = torch.arange(rest.shape[1], device="cpu") < torch.from_numpy(others)[:, None]
        chosen = shuffled.flip(1)
        chosen[:, : rest.shape[1]] = torch.where(take, rest, chosen[:, : rest.shape[1]])
        return chosen


def _by_places(b: int, d: int, k: int) -> bool:
    return packed_size(b * k, width_of(d)) <= packed_size(b * d, 1)


def _parsed(family: str, text: str, field: str) -> tuple[float, float | None]:
    found = _SHARE.fullmatch(text)
    share = float(found["share"]) / 100 if found else 0.0
    alpha = float(found["alpha"]) if found and found["alpha"] else None
    if not 0 < share <= 1 or (alpha or 0) > 1:
        raise _refusal(family, text, field)
    return share, alpha


def _refusal(family: str, text: str, field: str) -> SplitcastError:
    forms = "topk:3%" if family == "topk" else "randtopk:3% or randtopk:3%@0.1 (chance of others)"
    return SplitcastError(
        f"{field}: unknown {shown(f'{family}:{text}')}; give the share of values that are sent, above 0 and up to "
        f"100 %: {forms}"
    )
