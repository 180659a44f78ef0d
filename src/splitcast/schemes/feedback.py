"""What the server sends back for the smashed-data gradients s^n of one local step, and what each client makes of it.

Shapes: ``grads`` (K, b, *d), result broadcastable to that. On a site and in planning the gradients have no values
(`is_meta`): what the link returns there is what arrived, or what has its shape.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from splitcast.base.codec import FP16, Codec
from splitcast.schemes.basis import decomposition_flops, factorise, fit
from splitcast.schemes.program import Clients, Link


class Feedback(ABC):
    """Server to clients. One of your own has a `reply`."""

    mixes_clients: ClassVar[bool] = True
    """Whether one client's reply depends on the others' gradients."""

    @abstractmethod
    def reply(self, grads: Tensor, clients: Clients, link: Link, codec: Codec) -> Tensor:
        """Send, and return what the clients receive."""


@dataclass(frozen=True)
class Unicast(Feedback):
    """Each client gets its own gradient s^n (SplitFed, PSL)."""

    mixes_clients: ClassVar[bool] = False

    def reply(self, grads: Tensor, clients: Clients, link: Link, codec: Codec) -> Tensor:
        return link.unicast("gradient", grads, codec, clients)


@dataclass(frozen=True)
class Mean(Feedback):
    """All clients get s = sum_n rho^n s^n, broadcast once (SFL-GA, the paper's aggregated gradient)."""

    def reply(self, grads: Tensor, clients: Clients, link: Link, codec: Codec) -> Tensor:
        return link.broadcast("gradient", torch.tensordot(clients.rho, grads, dims=1)[None], codec, clients)


@dataclass(frozen=True)
class Partial(Feedback):
    """The first ``fraction`` of the rows aggregated and broadcast, the rest unicast. 0 is `Unicast`, 1 is `Mean`."""

    fraction: float

    def reply(self, grads: Tensor, clients: Clients, link: Link, codec: Codec) -> Tensor:
        rows = round(self.fraction * grads.shape[1])
        shared = Mean().reply(grads[:, :rows], clients, link, codec)
        own = Unicast().reply(grads[:, rows:], clients, link, codec)
        return torch.cat([shared.expand(len(own), *shared.shape[1:]), own], dim=1)


@dataclass(frozen=True)
class Basis(Feedback):
    """A basis B of all clients' gradients broadcast once, each client's coefficients C^n unicast to it.

    Rows are samples; of sequences (T, d) they are tokens, b T of them. Row i of client n is s_i^n ~ C_i^n B with
    B (K, d): K d values on the air for all and b K for each client, against b d for each. The basis is the one with the
    least sum_n rho^n ||s^n - C^n B||^2, which is noted (`gamma`, with the `rank` and the share of the energy). ``rank``
    is K, or its greatest value when ``budget`` > 0 asks for the least K whose error is at most this share of
    sum_n rho^n ||s^n||^2. Rank min(N b, d) is `Unicast`.

    The codec rounds the basis; coefficients are then fitted to the rounded basis by least squares, and travel in
    fp16 (fp32 if the basis does), or in a format of their own.
    """

    rank: int
    budget: float = 0.0
    coefficients: Codec | None = None

    def reply(self, grads: Tensor, clients: Clients, link: Link, codec: Codec) -> Tensor:
        if grads.dim() == 4:  # sequences (T, d): tokens share a space, whole sequences do not
            return self.reply(grads.flatten(1, 2), clients, link, codec).view(grads.shape)
        n, b = grads.shape[:2]
        g = grads.flatten(0, 1).flatten(1)  # (N b, d)
        link.compute(self.flops(n, grads.shape[1:]), clients)
        if g.is_meta:
            basis = g.new_empty(min(self.rank, *g.shape), g.shape[1])
        else:
            found = factorise(g, clients.rho.repeat_interleave(b), self.rank, self.budget)
            basis = found.basis
            link.note("rank", len(basis))
            link.note("gamma", found.dropped)
            link.note("max_dropped_energy", found.dropped / found.energy if found.energy else 0.0)
        shaped = basis.view(1, -1, *grads.shape[2:])
        basis = link.broadcast("basis", shaped, codec, clients, rows=self.rank)[0].flatten(1)
        if g.is_meta:
            coefficients = g.new_empty(n * b, len(basis))
        else:
            coefficients = found.coefficients if codec.exact else fit(g, basis)
        wire = self.wire(codec)
        coefficients = link.unicast("coefficients", coefficients.view(n, b, -1), wire, clients)
        return (coefficients.flatten(0, 1) @ basis).view(-1, *grads.shape[1:])

    def wire(self, codec: Codec) -> Codec:
        """The format of coefficients where the basis has this one."""
        return self.coefficients or (codec if codec.exact else FP16)

    def flops(self, clients: int, shape: Sequence[int]) -> float:
        """Decomposition and fitting, over gradients (b, *d) of so many clients."""
        rows, columns = clients * shape[0], math.prod(shape[1:])
        fitting = 2.0 * rows * columns * min(self.rank, rows, columns)
        return decomposition_flops(rows, columns, self.rank) + fitting
