"""What the server sends back: the first of the three choices that make a scheme.

Every feedback turns the smashed-data gradients of one local step, s^n for the K clients that take part, into
what each client receives, and writes what that costs into the ledger. Shapes: ``grads`` (K, b, *d),
``weights`` (K,) with sum 1, result broadcastable to (K, b, *d). `layout` and `rebuilt` are the client's side of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from splitcast.schemes.basis import decomposition_flops, factorise, fit
from splitcast.schemes.codec import FP16, Codec
from splitcast.schemes.messages import Kind, Ledger, Truncation
from splitcast.schemes.noise import NEAREST, Noise


class Part(NamedTuple):
    """One message of a feedback as a client expects it."""

    kind: Kind
    codec: Codec
    shape: tuple[int, ...]


class Feedback(Protocol):
    """Server to clients."""

    mixes_clients: ClassVar[bool]
    """Whether one client's reply depends on the others' gradients."""

    def reply(
        self,
        grads: Tensor,
        weights: Tensor,
        codec: Codec,
        ledger: Ledger,
        clients: Sequence[int],
        noise: Noise = NEAREST,
    ) -> Tensor:
        """What the clients receive."""
        ...

    def layout(self, shape: Sequence[int], codec: Codec, rank: int = 0) -> list[Part]:
        """The messages, in their order, from which a client gets its gradients (b, *d); ``rank`` that of a basis."""
        ...

    def rebuilt(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The gradients (b, *d) from the decoded messages."""
        return parts[0]

    def flops(self, clients: int, shape: Sequence[int]) -> float:
        """What the server computes for a step over gradients (b, *d) of so many clients; averaging is not counted."""
        return 0.0


@dataclass(frozen=True)
class Unicast(Feedback):
    """Each client gets its own gradient s^n (SplitFed, PSL)."""

    mixes_clients: ClassVar[bool] = False

    def reply(
        self,
        grads: Tensor,
        weights: Tensor,
        codec: Codec,
        ledger: Ledger,
        clients: Sequence[int],
        noise: Noise = NEAREST,
    ) -> Tensor:
        ledger.unicast("down", "gradient", codec.nbytes(grads.shape[1:]), clients)
        return ledger.carry("gradient", grads, codec, noise, clients)

    def layout(self, shape: Sequence[int], codec: Codec, rank: int = 0) -> list[Part]:
        return [Part("gradient", codec, tuple(shape))]


@dataclass(frozen=True)
class Mean(Feedback):
    """All clients get s = sum_n rho^n s^n, broadcast once (SFL-GA, the paper's aggregated gradient)."""

    mixes_clients: ClassVar[bool] = True

    def reply(
        self,
        grads: Tensor,
        weights: Tensor,
        codec: Codec,
        ledger: Ledger,
        clients: Sequence[int],
        noise: Noise = NEAREST,
    ) -> Tensor:
        ledger.broadcast("gradient", codec.nbytes(grads.shape[1:]), clients)
        return ledger.carry("gradient", torch.tensordot(weights, grads, dims=1)[None], codec, noise)

    def layout(self, shape: Sequence[int], codec: Codec, rank: int = 0) -> list[Part]:
        return [Part("gradient", codec, tuple(shape))]


@dataclass(frozen=True)
class Partial(Feedback):
    """The first ``fraction`` of the rows aggregated and broadcast, the rest unicast (EPSL, Lin et al. 2024).

    0 is `Unicast`, 1 is `Mean`.
    """

    fraction: float
    mixes_clients: ClassVar[bool] = True

    def reply(
        self,
        grads: Tensor,
        weights: Tensor,
        codec: Codec,
        ledger: Ledger,
        clients: Sequence[int],
        noise: Noise = NEAREST,
    ) -> Tensor:
        rows = self._shared_rows(grads.shape[1])
        shared = Mean().reply(grads[:, :rows], weights, codec, ledger, clients, noise)
        own = Unicast().reply(grads[:, rows:], weights, codec, ledger, clients, noise)
        return torch.cat([shared.expand(len(grads), *shared.shape[1:]), own], dim=1)

    def layout(self, shape: Sequence[int], codec: Codec, rank: int = 0) -> list[Part]:
        rows = self._shared_rows(shape[0])
        return [Part("gradient", codec, (part, *shape[1:])) for part in (rows, shape[0] - rows)]

    def rebuilt(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return torch.cat(list(parts))

    def _shared_rows(self, batch: int) -> int:
        return round(self.fraction * batch)


@dataclass(frozen=True)
class Basis(Feedback):
    """A basis B of all clients' gradients broadcast once, each client's coefficients C^n unicast to it.

    Row i of client n, s_i^n ~ C_i^n B with B (K, d): K d values on the air for all and b K for each client, against
    b d for each. The basis is the one with the least sum_n rho^n ||s^n - C^n B||^2, and that error is written into the
    ledger. ``rank`` is K, or its greatest value when ``budget`` > 0 asks for the least K whose error is at most this
    share of sum_n rho^n ||s^n||^2. Rank min(N b, d) is `Unicast`.

    The codec rounds the basis; coefficients are then fitted to the rounded basis by least squares, and travel in
    fp16 (fp32 if the basis does).
    """

    rank: int
    budget: float = 0.0
    mixes_clients: ClassVar[bool] = True

    def reply(
        self,
        grads: Tensor,
        weights: Tensor,
        codec: Codec,
        ledger: Ledger,
        clients: Sequence[int],
        noise: Noise = NEAREST,
    ) -> Tensor:
        n, b = grads.shape[:2]
        g = grads.flatten(0, 1).flatten(1)  # (N b, d)
        if g.is_meta:  # only sizes are asked for
            self._send(min(self.rank, *g.shape), grads.shape[1:], codec, ledger, clients)
            return grads
        found = factorise(g, weights.repeat_interleave(b), self.rank, self.budget)
        rank = len(found.basis)
        ledger.truncations.append(Truncation(rank, found.energy, found.dropped))
        wire = self._send(rank, grads.shape[1:], codec, ledger, clients)
        shaped = found.basis.view(1, rank, *grads.shape[2:])
        basis = ledger.carry("basis", shaped, codec, noise).view_as(found.basis)
        coefficients = found.coefficients if codec.exact else fit(g, basis)
        coefficients = ledger.carry("coefficients", coefficients.view(n, b, rank), wire, noise, clients)
        return (coefficients.flatten(0, 1) @ basis).view_as(grads)

    def layout(self, shape: Sequence[int], codec: Codec, rank: int = 0) -> list[Part]:
        return [
            Part("basis", codec, (rank, *shape[1:])),
            Part("coefficients", _coefficient_codec(codec), (shape[0], rank)),
        ]

    def rebuilt(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        basis, coefficients = parts
        return (coefficients @ basis.flatten(1)).view(*shape)

    def flops(self, clients: int, shape: Sequence[int]) -> float:
        rows, columns = clients * shape[0], math.prod(shape[1:])
        fitting = 2.0 * rows * columns * min(self.rank, rows, columns)
        return decomposition_flops(rows, columns, self.rank) + fitting

    def _send(self, rank: int, shape: Sequence[int], codec: Codec, ledger: Ledger, clients: Sequence[int]) -> Codec:
        """Count both messages for gradients (b, *d); returns the codec of the coefficients."""
        wire = _coefficient_codec(codec)
        ledger.broadcast("basis", codec.nbytes((rank, *shape[1:])), clients)
        ledger.unicast("down", "coefficients", wire.nbytes((shape[0], rank)), clients)
        return wire


def _coefficient_codec(codec: Codec) -> Codec:
    return codec if codec.exact else FP16
