"""Product quantisation: fedlite:Q,L sends a codebook of L vectors, and Q numbers for every sample.

The d values of a sample are Q pieces of d / Q values. L centroids of all b Q pieces of a message are found by k-means,

    min over c_1..c_L    sum over pieces ||piece - c_nearest||^2

and the message is the codebook, L d / Q values as fp32, and the number of the nearest centroid of every piece,
ceil(log2 L) bits each.

Wang, Qi, Rawat, Reddi, Waghmare, Yu, Joshi: FedLite: a scalable approach for federated learning on resource-constrained
clients, arXiv 2201.11865. All pieces share one codebook (R = 1 of the paper, its best). Its gradient correction, which
is no part of what is sent, is `gradient_correction` (`schemes.split`). Not in the paper: where Q does not divide d, the
last piece is filled up with zeros; ten steps of k-means, from centroids drawn as in k-means++.
"""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from splitcast.base.codec import EMPTY, FP32, Codec
from splitcast.base.comparators.bits import flat, pack_wide, packed_size, unpack_wide, width_of
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.rounding import Draw
from splitcast.base.seeds import stream

STEPS = 10
"""Of k-means."""
SEEDED = 4096
"""Most pieces among which first centroids are drawn."""
_FORM = re.compile(r"([1-9][0-9]{0,6}),([1-9][0-9]{0,3})")


class ProductQuantised(Codec):
    """A codebook, and numbers of its entries."""

    def __init__(self, pieces: int, centroids: int) -> None:
        self.pieces, self.centroids, self.name = pieces, centroids, f"fedlite:{pieces},{centroids}"

    @staticmethod
    def named(text: str, field: str = "codec") -> "ProductQuantised":
        """fedlite:Q,L, without the first part."""
        found = _FORM.fullmatch(text)
        if not found:
            raise SplitcastError(
                f"{field}: unknown {shown(f'fedlite:{text}')}; give pieces of a sample, up to 9999999, and centroids, "
                "up to 9999: fedlite:1568,16"
            )
        return ProductQuantised(int(found[1]), int(found[2]))

    def nbytes(self, shape: Sequence[int]) -> int:
        b, pieces, length = self._layout(shape)
        count = b * pieces
        return 4 * self.centroids * length + packed_size(count, width_of(self.centroids)) if count * length else 0

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        if not x.numel():
            return EMPTY
        b, pieces, length = self._layout(x.shape)
        rows = x.detach().to("cpu", torch.float32).reshape(b, -1)
        points = torch.nn.functional.pad(rows, (0, pieces * length - rows.shape[1])).view(-1, length)
        book, numbers = clustered(points, self.centroids)
        return torch.cat([FP32.encode(book), pack_wide(numbers.numpy(), width_of(self.centroids))])

    def decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        b, pieces, length = self._layout(shape)
        if not b * pieces * length:
            return torch.empty(*shape, device=payload.device)
        size = 4 * self.centroids * length
        book = FP32.decode(payload[:size].clone(), (self.centroids, length))
        numbers = torch.from_numpy(unpack_wide(payload[size:], width_of(self.centroids), b * pieces))
        if int(numbers.max()) >= self.centroids:
            raise SplitcastError("has a centroid that does not exist")
        return book[numbers].view(b, -1)[:, : math.prod(shape[1:])].reshape(*shape)

    def work(self, shape: Sequence[int]) -> tuple[float, float]:
        return 3.0 * (STEPS + 2) * math.prod(shape) * self.centroids, float(math.prod(shape))

    def _layout(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Samples, pieces of each, values of a piece."""
        b, d = flat(shape)
        length = -(-d // min(self.pieces, d)) if d else 0
        return b, -(-d // length) if length else 0, length


def clustered(points: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Centroids (L, n) of points (m, n), and the number of the nearest one (m,); of points that are not finite, NaN."""
    if not bool(points.isfinite().all()):
        return torch.full((count, points.shape[1]), torch.nan, device="cpu"), torch.zeros(
            len(points), dtype=torch.int64
        )
    book = _first(points, count)
    nearest = _nearest(points, book)
    for _ in range(STEPS):
        sums = torch.zeros_like(book).index_add_(0, nearest, points)
        members = torch.bincount(nearest, minlength=count)[:, None]
        book = torch.where(members > 0, sums / members.clamp(min=1), book)
        nearest = _nearest(points, book)
    return book, nearest


def _nearest(points: Tensor, book: Tensor) -> Tensor:
    """argmin ||p - c||^2 = argmin ||c||^2 - 2 p c"""
    return torch.addmm(book.square().sum(1), points, book.T, alpha=-2).argmin(1)


def _first(points: Tensor, count: int) -> Tensor:
    """As in k-means++: each centroid is a point, drawn in proportion to its squared distance to those before it."""
    rng = stream(0, "codec", len(points), count)
    some = points[:: -(-len(points) // SEEDED)].double()
    chosen = [int(rng.integers(len(some)))]
    distance = (some - some[chosen[0]]).square().sum(1)
    for _ in range(count - 1):
        within = distance.cumsum(0)
        at = int(torch.searchsorted(within, float(rng.random()) * float(within[-1])))
        chosen.append(min(at, len(some) - 1))
        distance = torch.minimum(distance, (some - some[chosen[-1]]).square().sum(1))
    return some[chosen].float()
