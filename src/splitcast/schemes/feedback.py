"""What the server sends back: the first of the three choices that make a scheme.

Every feedback turns the smashed-data gradients of one local step, s^n for the K clients that take part, into
what each client receives, and writes what that costs into the ledger. Shapes: ``grads`` (K, b, *d),
``weights`` (K,) with sum 1, result broadcastable to (K, b, *d).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from splitcast.schemes.codec import Codec
from splitcast.schemes.messages import Ledger


class Feedback(Protocol):
    """Server to clients."""

    mixes_clients: ClassVar[bool]
    """Whether one client's reply depends on the others' gradients."""

    def reply(self, grads: Tensor, weights: Tensor, codec: Codec, ledger: Ledger, clients: Sequence[int]) -> Tensor:
        """What the clients receive."""
        ...


@dataclass(frozen=True)
class Unicast:
    """Each client gets its own gradient s^n (SplitFed, PSL)."""

    mixes_clients: ClassVar[bool] = False

    def reply(self, grads: Tensor, weights: Tensor, codec: Codec, ledger: Ledger, clients: Sequence[int]) -> Tensor:
        ledger.unicast("down", "gradient", codec.nbytes(grads.shape[1:]), clients)
        return codec.through(grads)


@dataclass(frozen=True)
class Mean:
    """All clients get s = sum_n rho^n s^n, broadcast once (SFL-GA, the paper's aggregated gradient)."""

    mixes_clients: ClassVar[bool] = True

    def reply(self, grads: Tensor, weights: Tensor, codec: Codec, ledger: Ledger, clients: Sequence[int]) -> Tensor:
        ledger.broadcast("gradient", codec.nbytes(grads.shape[1:]), clients)
        return codec.through(torch.tensordot(weights, grads, dims=1)[None])


@dataclass(frozen=True)
class Partial:
    """The first ``fraction`` of the rows aggregated and broadcast, the rest unicast (EPSL, Lin et al. 2024).

    0 is `Unicast`, 1 is `Mean`.
    """

    fraction: float
    mixes_clients: ClassVar[bool] = True

    def reply(self, grads: Tensor, weights: Tensor, codec: Codec, ledger: Ledger, clients: Sequence[int]) -> Tensor:
        rows = round(self.fraction * grads.shape[1])
        shared = Mean().reply(grads[:, :rows], weights, codec, ledger, clients)
        own = Unicast().reply(grads[:, rows:], weights, codec, ledger, clients)
        return torch.cat([shared.expand(len(grads), *shared.shape[1:]), own], dim=1)
