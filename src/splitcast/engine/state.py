"""The weights of a running training: the client half, shared or one copy per client, and the server half."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitcast.engine.factored import Factors, Gradient
from splitcast.errors import SplitcastError
from splitcast.split import Params, block_of


@dataclass
class Half:
    """Parameters and SGD momentum (empty when none is used) of one half.

    A ``stacked`` half carries one copy per client in a leading dimension. Otherwise one copy serves all, and
    ``pending`` gathers its weighted gradient over the clients until `flush`.
    """

    params: Params
    momentum: Params = field(default_factory=dict)
    stacked: bool = False
    pending: Params = field(default_factory=dict)

    def gather(self, grads: Mapping[str, Gradient]) -> None:
        """Add to the gradient of a shared half."""
        for name, g in grads.items():
            assert isinstance(g, Tensor)  # only stacked layers leave factors
            self.pending[name] = self.pending[name].add_(g) if name in self.pending else g

    def flush(self, lr: float, momentum: float) -> None:
        """Step along the gathered gradient."""
        self.descend(self.pending, lr, momentum)
        self.pending = {}

    def descend(self, grads: Mapping[str, Gradient], lr: float, momentum: float, rows: slice = slice(None)) -> None:
        """One SGD step in place, w -= lr * m with m = momentum * m + g, on ``rows`` of a stacked half."""
        for name, g in grads.items():
            if momentum:
                m = self._rows(self.momentum[name], rows)
                g = _add(g, m, scale=1.0, keep=momentum)
            _add(g, self._rows(self.params[name], rows), scale=-lr)

    def _rows(self, value: Tensor, rows: slice) -> Tensor:
        # `.data` has a version counter of its own: other clients' graphs on the same storage stay valid
        return value.data[rows] if self.stacked else value.data

    def stack(self, copies: int) -> "Half":
        """One copy per client of a shared half."""
        return Half(_repeat(self.params, copies), _repeat(self.momentum, copies), stacked=True)

    def take(self, clients: Tensor | slice) -> "Half":
        """The copies of some clients of a stacked half: views for a slice, else copies."""
        return Half(
            {k: v[clients] for k, v in self.params.items()},
            {k: v[clients] for k, v in self.momentum.items()},
            stacked=True,
        )

    def put(self, clients: Tensor, other: "Half") -> None:
        """Write the copies of some clients back."""
        for mine, theirs in ((self.params, other.params), (self.momentum, other.momentum)):
            for name, value in theirs.items():
                mine[name][clients] = value

    def mean(self, weights: Tensor) -> "Half":
        """The weighted sum over clients as a shared half; a shared half is its own average."""
        if not self.stacked:
            return self
        return Half(
            {k: torch.tensordot(weights, v, dims=1) for k, v in self.params.items()},
            {k: torch.tensordot(weights, v, dims=1) for k, v in self.momentum.items()},
        )

    def plus(self, other: "Half | None") -> "Half":
        """This shared half with another one added in place."""
        if other:
            for mine, theirs in ((self.params, other.params), (self.momentum, other.momentum)):
                for name, value in theirs.items():
                    mine[name].add_(value)
        return self

    def drift(self, weights: Tensor) -> float:
        """Mean over clients of the distance ||w^n - mean|| of a half from the average half."""
        if not self.stacked or not self.params:
            return 0.0
        squares = torch.zeros(len(weights), dtype=torch.float64)
        columns = max(1, 2**20 // len(weights))
        for value in self.params.values():
            for part in torch.split(value.flatten(1), columns, dim=1):  # cache-sized, so memory is read once
                squares += torch.linalg.vector_norm(part - weights @ part, dim=1).double().square()
        return float(squares.sqrt().mean())


@dataclass
class State:
    """Where the model is cut, and both halves; the server half is always shared between rounds."""

    cut: int
    client: Half
    server: Half

    @staticmethod
    def start(params: Params, cut: int, momentum: bool) -> "State":
        """Both halves of an initial model, momentum at zero."""
        zeros = {k: torch.zeros_like(v) for k, v in params.items()} if momentum else {}
        halves = [
            Half(
                {k: v for k, v in params.items() if (block_of(k) < cut) == on_client},
                {k: v for k, v in zeros.items() if (block_of(k) < cut) == on_client},
            )
            for on_client in (True, False)
        ]
        return State(cut, *halves)

    def averaged(self, weights: Tensor) -> Params:
        """The whole model with the averaged client half."""
        return self.client.mean(weights).params | self.server.params

    def recut(self, cut: int, weights: Tensor) -> tuple[int, int]:
        """Move the cut without changing a logit of the averaged model.

        Blocks moving to the clients are copied to each; blocks moving to the server become the weighted average
        of the clients' copies; momentum moves along. Returns the values (broadcast to the clients, uploaded by
        each client). Nothing is uploaded when the clients' copies are equal: the server made that copy itself.
        """
        down = up = 0
        average = self.client.mean(weights)
        for mine, theirs, mean in (
            (self.client.params, self.server.params, average.params),
            (self.client.momentum, self.server.momentum, average.momentum),
        ):
            for name in [k for k in theirs if block_of(k) < cut]:
                value = theirs.pop(name)
                down += value.numel()
                mine[name] = _repeat({name: value}, len(weights))[name] if self.client.stacked else value
            for name in [k for k in mine if block_of(k) >= cut]:
                theirs[name] = mean[name]
                del mine[name]
                up += theirs[name].numel() if self.client.stacked else 0
        for half in (self.client, self.server):  # the model's order again: sums over names depend on it
            half.params = dict(sorted(half.params.items(), key=lambda item: block_of(item[0])))
            half.momentum = dict(sorted(half.momentum.items(), key=lambda item: block_of(item[0])))
        self.cut = cut
        return down, up

    @property
    def copies(self) -> int:
        """Copies of the client half; 0 when one is shared."""
        return len(next(iter(self.client.params.values()), ())) if self.client.stacked else 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a flat name, for a checkpoint."""
        parts = {
            "client": self.client.params,
            "client_momentum": self.client.momentum,
            "server": self.server.params,
            "server_momentum": self.server.momentum,
        }
        return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor], cut: int, copies: int, like: Params) -> "State":
        """The inverse of `tensors` for a model with the parameters ``like``; ``copies`` is 0 for a shared client half.

        Names come in the order of ``like``, so that sums over them do not depend on how they were stored.
        """
        halves = []
        for side, on_client in (("client", True), ("server", False)):
            names = [name for name in like if (block_of(name) < cut) == on_client]
            lead = (copies,) if on_client and copies else ()
            params, momentum = (
                {name: _expected(tensors, f"{part}/{name}", (*lead, *like[name].shape)) for name in names}
                if any(key.startswith(f"{part}/") for key in tensors)
                else {}
                for part in (side, f"{side}_momentum")
            )
            halves.append(Half(params, momentum, stacked=bool(lead)))
        return State(cut, *halves)


def _expected(tensors: dict[str, Tensor], key: str, shape: tuple[int, ...]) -> Tensor:
    if key not in tensors:
        raise SplitcastError(f"checkpoint: has no {key}; it belongs to another model or scheme")
    if tensors[key].shape != shape:
        found = tuple(tensors[key].shape)
        raise SplitcastError(f"checkpoint: {key} has shape {found}, not {shape}; it belongs to another model")
    return tensors[key]


def _add(grad: Gradient, target: Tensor, *, scale: float, keep: float = 1.0) -> Tensor:
    """target = keep * target + scale * grad, in place."""
    if isinstance(grad, Factors):
        grad.add_to(target, scale=scale, keep=keep)
        return target
    return (target.mul_(keep) if keep != 1 else target).add_(grad, alpha=scale)


def _repeat(params: Params, copies: int) -> Params:
    return {k: v.expand(copies, *v.shape).clone() for k, v in params.items()}
