"""A scheme's own step, run to look at gradients instead of taking them: nothing moves, every client is measured.

The program is the one that trains; only what becomes of a gradient differs (`Watcher`). Messages arrive as they were
sent: codecs are left out.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from splitcast.base.seeds import torch_seed
from splitcast.engine.links import CountingLink
from splitcast.engine.party import Group, Kit, LocalParty, Sent
from splitcast.engine.values import Rows
from splitcast.model.split import Params, SplitModel
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Batch, Scheme, Values
from splitcast.theory.passes import Parts, batches, shares
from splitcast.training.factored import Gradient
from splitcast.training.passes import saved_bytes
from splitcast.training.placement import Placement
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task
from splitcast.training.weights import BUFFERS, FROZEN, TRAINED, Weights

CHUNK_BYTES = 2**27
"""Budget of the gradients of clients that are looked at together."""


class Watcher:
    """An optimiser that looks at gradients, one per client, and does nothing."""

    linear = False

    def __init__(self, look: Callable[[dict[str, Tensor]], Tensor]) -> None:
        """``look`` turns the gradients of some clients, (k, ...) by name, into what is kept of each, (k, ...)."""
        self.look, self.seen = look, list[Tensor]()

    def init(self, params: Params) -> dict[str, Params]:
        return {}

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        self.seen.append(self.look({k: g for k, g in grads.items() if isinstance(g, Tensor)}))

    def found(self) -> Tensor:
        """Of all clients."""
        return torch.cat(self.seen)


class ProbedServer(LocalParty):
    """The server; it remembers the gradients that it works out."""

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        losses, self.own = super().descend(segment, x, y)
        return losses, self.own


class ProbedClients(LocalParty):
    """The clients; what they pull back is what they received, or how far that is from their own gradient."""

    place = (0, 0)

    def __init__(self, server: ProbedServer, *parts: object, deviation: bool) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.server, self.deviation = server, deviation

    def backward(self, sent: Sent, received: Tensor) -> Tensor:
        return super().backward(sent, received - self.server.own if self.deviation else received)


def probe(
    scheme: Scheme,
    placement: Placement,
    model: SplitModel,
    task: Task,
    params: Params,
    x: Tensor,
    y: Tensor,
    parts: Parts,
    batch: int,
    seed: int,
    draw: int,
    *,
    client: Watcher,
    server: Watcher,
    deviation: bool = False,
) -> None:
    """One local step of all clients at ``params`` with the batches of a draw.

    The watchers see the gradient of each client's half and of its copy of the server half. With ``deviation`` the
    former is J_n^T (received - s^n) instead of J_n^T received.
    """
    count, runtime = len(parts), Runtime(x.device, x.dtype)
    size = max(1, CHUNK_BYTES // (x.element_size() * model.size + batch * saved_bytes(model)))
    spans = [slice(at, min(at + size, count)) for at in range(0, count, size)]
    group = Group(list(range(count)), shares(parts, x), spans, keep=len(spans) == 1)
    sides = {}
    for side in ("client", "server"):
        mine = {k: v.expand(count, *v.shape) for k, v in params.items() if placement.side(k) == side}
        own = {k: v for k, v in model.buffers(x.dtype).items() if placement.side(k) == side}
        buffers = {k: v.to(x.device).expand(count, *v.shape).clone() for k, v in own.items()}
        frozen = {k: v.to(x.device) for k, v in model.frozen(x.dtype).items()}
        sides[side] = Weights({TRAINED: mine, BUFFERS: buffers, FROZEN: frozen}, stacked=True)
    ledger = Ledger()
    here = ProbedServer(Kit(model, task, server, runtime), placement, sides["server"], group, ledger)
    there = ProbedClients(
        here, Kit(model, task, client, runtime), placement, sides["client"], group, ledger, deviation=deviation
    )
    rows = batches(parts, batch, seed, draw)
    with runtime.fork_rng():
        torch.manual_seed(torch_seed(seed, "layers", 0, draw))
        scheme.step(there, here, CountingLink(ledger), Batch(Rows(x, rows, spans), Rows(y, rows, spans)))  # type: ignore[arg-type]


def squares(grads: dict[str, Tensor]) -> Tensor:
    """||g^n||^2 (k,)."""
    return torch.stack([g.flatten(1).double().square().sum(1) for g in grads.values()]).sum(0)


def vectors(grads: dict[str, Tensor]) -> Tensor:
    """g^n as one vector (k, values)."""
    return torch.cat([g.flatten(1) for g in grads.values()], 1)


def nothing(grads: dict[str, Tensor]) -> Tensor:
    """Nobody looks."""
    return torch.empty(0, device="cpu")


def per_placement(schemes: Scheme | Sequence[Scheme], count: int) -> list[Scheme]:
    """One scheme for all placements, or one for each."""
    return list(schemes) if isinstance(schemes, Sequence) else [schemes] * count
