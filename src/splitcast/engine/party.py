"""A party in this process: clients that move through a round together, or the server for them.

With one copy of the weights all clients' samples go through one concatenated pass, and the weighted gradient
sum_n rho^n g^n is exact by linearity; stacked copies run together and step each along its own gradient. Clients are
taken in chunks, so that activations and gradients stay within a budget whatever their number is.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitcast.engine.values import chunked
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import Ledger, Phase, Work
from splitcast.schemes.program import Values
from splitcast.training.optimiser import Optimiser
from splitcast.training.passes import Pass
from splitcast.training.placement import Placement, Segment, Side
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task
from splitcast.training.weights import Weights


@dataclass(frozen=True)
class Kit:
    """What every party of a training works with."""

    model: SplitModel
    task: Task
    optimiser: Optimiser
    runtime: Runtime

    def one_copy(self, placement: Placement, side: Side, steps: int) -> bool:
        """Whether one copy of a side's weights, moved along the mean gradient, is the mean of copies of all clients."""
        return steps == 1 and self.optimiser.linear and not self.mixes(placement, side)

    def mixes(self, placement: Placement, side: Side) -> bool:
        """Whether blocks of a side make a sample depend on others of its batch: then each client runs a copy."""
        return any(self.model.mixes(s.start, s.stop) for s in placement.segments if s.side == side)


@dataclass
class Group:
    """Clients that move through a round together."""

    ids: list[int]
    rho: Tensor
    """(K,)"""
    spans: list[slice]
    """its chunks"""
    keep: bool
    """whether the graphs of all chunks fit into memory together"""
    round: int = 0
    step: int = 0
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    """sum over the local steps of sum_n rho^n F^n"""

    @property
    def even(self) -> float | None:
        """rho^n where it is the same for all."""
        first = float(self.rho[0])
        return first if bool((self.rho == first).all()) else None


class Sent(Values):
    """What a segment puts out, and the graphs to pull gradients back through.

    Where the graphs do not fit into memory together, a pass runs again on the way back, with the same random numbers.
    """

    def __init__(self, party: "LocalParty", number: int, x: Values | Tensor) -> None:
        self.party, self.number, self.segment = party, number, party.placement.segments[number]
        self.x = chunked(x, party.group.spans)
        shape = party.kit.model.smashed_shape(self.segment.stop)
        super().__init__(party.group.spans, (*self.x.shape[:2], *shape))
        self.ids, self.again = list(party.group.ids), False
        self.kept: dict[int, Pass] = {}
        self.rng_states: dict[int, Tensor] = {}

    @property
    def out(self) -> "Sent":
        """The values."""
        return self

    def chunk(self, k: int) -> Tensor:
        if k in self.kept:
            return self.kept[k].output.detach()
        if self.party.group.keep:
            self.kept[k] = self.party.run(self.segment, k, self.x.chunk(k), again=self.again)
            return self.kept[k].output.detach()
        with torch.no_grad():
            return self._repeated(k).output

    def graph(self, k: int) -> Pass:
        """The pass of a chunk with its graph, to be used once."""
        return self.kept.pop(k) if k in self.kept else self._repeated(k)

    def _repeated(self, k: int) -> Pass:
        runtime, values = self.party.kit.runtime, self.x.chunk(k)  # first: what was before may draw too
        if k not in self.rng_states:
            self.rng_states[k] = runtime.rng_state()
            return self.party.run(self.segment, k, values, again=self.again)
        with runtime.fork_rng():
            runtime.set_rng_state(self.rng_states[k])
            return self.party.run(self.segment, k, values, again=True)

    def only(self, rows: Tensor) -> "Sent":
        """The same for some of its clients, run again."""
        some = Sent(self.party, self.number, self.x.whole()[rows])
        some.again = True
        return some


class LocalParty:
    """Runs segments with its weights for the clients of a group."""

    def __init__(self, kit: Kit, placement: Placement, weights: Weights, group: Group, ledger: Ledger) -> None:
        self.kit, self.placement, self.weights, self.group, self.ledger = kit, placement, weights, group, ledger
        self.task = kit.task

    @property
    def ids(self) -> list[int]:
        return self.group.ids

    @property
    def rho(self) -> Tensor:
        return self.group.rho

    def forward(self, segment: int, x: Values | Tensor) -> Sent:
        self._did(segment, "forward")
        return Sent(self, segment, x)

    def backward(self, sent: Sent, received: Tensor) -> Tensor:
        self._did(sent.number, "backward")
        scale, shares = self._weighting()
        at_input = []
        for k, span in enumerate(self.group.spans):
            run = sent.graph(k)
            back = received[span] if len(received) > 1 else received
            if shares is not None:
                back = back * _column(shares[span], back)
            grad = run.backward(back.expand_as(run.output), self.kit.optimiser, scale)
            if grad is not None:
                at_input.append(grad if shares is None else grad.div(_column(shares[span], grad)))
        return _joined(at_input)

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        losses, grads = self.gradients(segment, x, y)
        if len(losses):  # else all were refused
            self._did(segment, "both")
            self.group.loss += (self.group.rho @ losses).to(self.group.loss)
        return losses, grads

    def gradients(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        """Losses (K,) and gradients at the input (K, b, *d); stacked copies step, one copy gathers."""
        scale, shares = self._weighting()
        place = self.placement.segments[segment]
        xs, ys = chunked(x, self.group.spans), chunked(y, self.group.spans)
        losses, grads = [], []
        for k, span in enumerate(self.group.spans):
            run, target = self.run(place, k, xs.chunk(k)), ys.chunk(k)
            output = run.output.detach().requires_grad_()
            each = self.task.losses(output.flatten(0, 1), target.flatten(0, 1)).view(output.shape[:2]).mean(1)
            total = each.sum() if shares is None else (shares[span] * each).sum()
            grad = run.backward(torch.autograd.grad(total, output)[0], self.kit.optimiser, scale)
            losses.append(each.detach())
            if grad is not None:
                grads.append(grad if shares is None else grad.div(_column(shares[span], grad)))
        return _joined(losses), _joined(grads)

    def run(self, segment: Segment, k: int, values: Tensor, *, again: bool = False) -> Pass:
        """A segment on chunk k; who was before it is told the gradient at its input. Run ``again``, buffers stay."""
        if segment.start > 0:
            values = values.detach().requires_grad_()
        return Pass(self.kit.model, segment, self.weights, self.group.spans[k], values, self.kit.runtime, again=again)

    def step(self) -> None:
        """Step along what all clients have contributed."""
        self.weights.step(self.kit.optimiser)

    def _did(self, segment: int, phase: Phase) -> None:
        self.ledger.add(Work(segment, phase, tuple(self.group.ids)))

    def _weighting(self) -> tuple[float, Tensor | None]:
        """How one copy weighs its clients' gradients: by a number for all, or by shares (K,)."""
        if self.weights.stacked:
            return 1.0, None
        even = self.group.even
        return (1.0, self.group.rho) if even is None else (even, None)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, device="meta")


def _column(weights: Tensor, like: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (like.dim() - 1))
