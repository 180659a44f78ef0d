"""A party in this process: clients that move through a round together, or the server for them.

With one copy of the weights all clients' samples go through one concatenated pass, and the weighted gradient
sum_n rho^n g^n is exact by linearity; stacked copies run together and step each along its own gradient. Clients are
taken in chunks, so that activations and gradients stay within a budget whatever their number is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.engine.values import chunked
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import JointWork, Ledger, Phase, Work
from splitcast.schemes.program import Values
from splitcast.schemes.staleness import Memory
from splitcast.training.defence import Defence
from splitcast.training.factored import Gradient
from splitcast.training.optimiser import Optimiser
from splitcast.training.passes import Pass
from splitcast.training.placement import Placed, Placement, Segment, Side
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task
from splitcast.training.weights import Weights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kit:
    """What every party of a training works with."""

    model: SplitModel
    task: Task
    optimiser: Optimiser
    runtime: Runtime
    defence: Defence | None = None

    def one_copy(self, placement: Placement, side: Side, steps: int) -> bool:
        """Whether one copy of a side's weights, moved along the mean gradient, is the mean of copies of all clients."""
        return steps == 1 and self.optimiser.linear

    def lent(self, weights: Weights, placement: Placement, side: Side, clients: int) -> Weights:
        """One copy that serves so many clients, with buffers of each where blocks mix a batch."""
        return weights.with_apart(clients) if self.mixes(placement, side) else weights

    def guard(self, placement: Placed) -> tuple[int, Defence] | None:
        """The cut behind which smashed data are defended, and how; refused where nothing is sent."""
        if self.defence is None:
            return None
        if len(placement.kinds) > 1:
            raise SplitcastError("defence: needs one cut for all clients")
        first = placement.segments[0]
        if first.stop >= self.model.depth:
            raise SplitcastError("defence: needs a scheme that sends smashed data; this one keeps the whole model")
        return first.stop, self.defence

    def mixes(self, placement: Placement, side: Side) -> bool:
        """Whether blocks of a side make a sample depend on others of its batch: then each client runs alone."""
        return any(self.model.mixes(s.start, s.stop) for s in placement.segments if s.side == side)


@dataclass
class Group:
    """Clients that move through a round together."""

    ids: list[int]
    shares: Tensor
    """rho^n (K,), where reading a value does not wait for a device"""
    spans: list[slice]
    """its chunks"""
    keep: bool
    """whether the graphs of all chunks fit into memory together"""
    round: int = 0
    step: int = 0
    device: torch.device = CPU

    @cached_property
    def rho(self) -> Tensor:
        """rho^n (K,), where it is computed with."""
        return self.shares.to(self.device)

    @cached_property
    def even(self) -> float | None:
        """rho^n where it is the same for all."""
        first = float(self.shares[0])
        return first if bool((self.shares == first).all()) else None


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
        self.guarded = party.guarding(self.segment)
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
        self.rows: Sequence[int] | None = None
        self.helped: Mapping[int, Sequence[int]] = {}
        self.batch_rows = 1
        """b, where ``rows`` count"""
        self.lost: list[Tensor] = []
        """sum_n rho^n F^n of every descent of this party; read when the round is over, since reading waits"""
        self.carried: dict[int, dict[str, Gradient]] = {k: {} for k in range(len(group.spans))}
        """by chunk: gradients of tied parameters, on their way from one segment to another"""

    @property
    def ids(self) -> list[int]:
        return self.group.ids

    @property
    def descents(self) -> int:
        """How often it descended."""
        return len(self.lost)

    @property
    def total(self) -> float:
        """sum_n rho^n F^n, summed over the descents."""
        return sum(torch.stack(self.lost).tolist()) if self.lost else 0.0

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
            if sent.guarded and sent.guarded.nopeek:
                back = back + sent.guarded.pull(run.x, run.output)
            if shares is not None:
                back = back * _column(shares[span], back)
            grad = run.backward(back.expand_as(run.output), self.kit.optimiser, scale, self.carried[k])
            if grad is not None:
                at_input.append(grad if shares is None else grad.div(_column(shares[span], grad)))
        return _joined(at_input)

    def descend(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        losses, grads = self.gradients(segment, x, y)
        if len(losses):  # else all were refused
            self._did(segment, "both")
            self.lost.append(self.group.rho @ losses)
        return losses, grads

    def train(self, segment: int, x: Tensor, y: Tensor, *, back: bool = False) -> Tensor:
        """One copy of the weights steps along the gradient of the mean loss of samples of anybody's, (B, *d); the
        whole server works on it."""
        place = self.placement.segments[segment]
        runtime = self.kit.runtime
        x, y = x.to(runtime.device, runtime.dtype), y.to(runtime.device)
        run = Pass(self.kit.model, place, self.weights, slice(None), x[None].requires_grad_(back), runtime)
        output = run.output.detach().requires_grad_()
        (loss,) = self._losses(output, y[None])
        found = run.backward(torch.autograd.grad(loss, output)[0], self.kit.optimiser)
        self.step()
        self.lost.append(loss.detach())
        flops = sum(self.kit.model.flops(place.start, place.stop))
        self.ledger.add(JointWork(float(len(x) * flops), tuple(self.group.ids)))
        return torch.empty(0, device="meta") if found is None else found[0]

    def aggregate(self, segment: int, x: Values | Tensor, y: Values | Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Gradients at the output averaged over the clients for the first ``rows``, which go back once, through the
        averaged input; see `schemes.merged.Epsl`."""
        place, rho, optimiser = self.placement.segments[segment], self.group.rho, self.kit.optimiser
        ys, share = chunked(y, self.group.spans), 1 - rows / x.shape[1]
        self._did(segment, "forward")
        inputs, outputs, own, lost = [], [], [], []
        for k, values in self._chunks(x):
            span = self.group.spans[k]
            with torch.no_grad():
                first = self.run(place, k, values[:, :rows]).output if rows else None
            run = self.run(place, k, values[:, rows:])
            output = run.output.detach() if first is None else torch.cat([first, run.output.detach()], dim=1)
            each = self._losses(output.requires_grad_(), ys.chunk(k))
            (z,) = torch.autograd.grad(each.sum(), output)
            lost.append(each.detach())
            inputs.append(torch.tensordot(rho[span], values[:, :rows], dims=1))
            outputs.append(torch.tensordot(rho[span], z[:, :rows], dims=1))
            back = run.backward(z[:, rows:] * _column(rho[span], z), optimiser)
            own.append(values[:, rows:] if back is None else back / _column(rho[span], back))
        self._did(segment, "backward", share)
        together = sum(inputs)[None]
        if rows:
            values = together.detach().requires_grad_()
            run = Pass(self.kit.model, place, self.weights, slice(None), values, self.kit.runtime, again=True)
            found = run.backward(sum(outputs)[None], optimiser)
            together = together if found is None else found
            flops = sum(self.kit.model.flops(place.start, place.stop))
            self.ledger.add(JointWork(float(rows * flops), tuple(self.group.ids)))
        self.step()
        self.lost.append(rho @ _joined(lost))
        return together, _joined(own)

    def estimate(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> Tensor:
        """The gradients at the input (K, b, *d) that `descend` would give, without a step."""
        self._did(segment, "both")
        place, ys = self.placement.segments[segment], chunked(y, self.group.spans)
        found = []
        for k, values in self._chunks(x):
            run = self.run(place, k, values, again=True, plain=True)
            found.append(torch.autograd.grad(self._losses(run.output, ys.chunk(k)).sum(), run.x)[0])
        return _joined(found)

    def align(self, segment: int, x: Values | Tensor, y: Values | Tensor, grads: Tensor) -> None:
        """A step along dA^n/dw, A^n = 1/b sum_i ||b (dF^n/dx_i - grads_i)||^2: on their input x the weights learn to
        have the gradients (K, b, *d) that they are told."""
        self._did(segment, "both")
        self._did(segment, "both")  # once more through what was differentiated
        place, ys = self.placement.segments[segment], chunked(y, self.group.spans)
        for k, values in self._chunks(x):
            span = self.group.spans[k]
            run = self.run(place, k, values, again=True, plain=True)
            total = self._losses(run.output, ys.chunk(k)).sum()
            (own,) = torch.autograd.grad(total, run.x, create_graph=True)
            apart = x.shape[1] * (own - grads[span]).flatten(1).square().sum(1)
            apart = apart if self.weights.stacked else self.group.rho[span] * apart
            steps = torch.autograd.grad(apart.sum(), list(run.leaves.values()), materialize_grads=True)
            run.apply(dict(zip(run.leaves, steps, strict=True)), self.kit.optimiser)

    @torch.no_grad()
    def look(self, segment: int, x: Values | Tensor) -> Tensor:
        """What a segment puts out (K, b, *d), without a way back; buffers stay."""
        self._did(segment, "forward")
        place = self.placement.segments[segment]
        return _joined([self.run(place, k, values, again=True).output for k, values in self._chunks(x)])

    def recall(self, memory: Memory, most: int) -> Tensor:
        return torch.stack([memory.chosen(n, most) for n in self.group.ids])

    def gradients(self, segment: int, x: Values | Tensor, y: Values | Tensor) -> tuple[Tensor, Tensor]:
        """Losses (K,) and gradients at the input (K, b, *d); stacked copies step, one copy gathers."""
        scale, shares = self._weighting()
        place = self.placement.segments[segment]
        xs, ys = chunked(x, self.group.spans), chunked(y, self.group.spans)
        losses, grads = [], []
        for k, span in enumerate(self.group.spans):
            run = self.run(place, k, xs.chunk(k))
            output = run.output.detach().requires_grad_()
            each = self._losses(output, ys.chunk(k))
            total = each.sum() if shares is None else (shares[span] * each).sum()
            grad = run.backward(torch.autograd.grad(total, output)[0], self.kit.optimiser, scale, self.carried[k])
            losses.append(each.detach())
            if grad is not None:
                grads.append(grad if shares is None else grad.div(_column(shares[span], grad)))
        return _joined(losses), _joined(grads)

    def run(self, segment: Segment, k: int, values: Tensor, *, again: bool = False, plain: bool = False) -> Pass:
        """A segment on chunk k; who was before it is told the gradient at its input. Run ``again``, buffers stay."""
        if segment.start > 0:
            values = values.detach().requires_grad_()
        rows, runtime = self.group.spans[k], self.kit.runtime
        made = Pass(self.kit.model, segment, self.weights, rows, values, runtime, again=again, plain=plain)
        if defence := self.guarding(segment):
            made.output = defence.guard(made.output)
        return made

    def guarding(self, segment: Segment) -> Defence | None:
        """The defence, where a segment of the clients ends and another's begins."""
        cut = segment.side == "client" and segment.stop < self.kit.model.depth
        return self.kit.defence if cut else None

    def step(self) -> None:
        """Step along what all clients have contributed."""
        self.weights.step(self.kit.optimiser)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """F^n (k,) of outputs (k, b, ...)."""
        return self.task.losses(output.flatten(0, 1), target.flatten(0, 1)).view(output.shape[:2]).mean(1)

    def _chunks(self, x: Values | Tensor) -> Iterator[tuple[int, Tensor]]:
        values = chunked(x, self.group.spans)
        return ((k, values.chunk(k)) for k in range(len(self.group.spans)))

    def _did(self, segment: int, phase: Phase, share: float = 1.0) -> None:
        if self.rows is not None and not any(self.rows):
            return
        each = share if self.rows is None else tuple(n / self.batch_rows for n in self.rows)
        self.ledger.add(Work(segment, phase, tuple(self.group.ids), each, tuple(self.helped.get(segment, ()))))

    def _weighting(self) -> tuple[float, Tensor | None]:
        """How one copy weighs its clients' gradients: by a number for all, or by shares (K,)."""
        if self.weights.stacked:
            return 1.0, None
        even = self.group.even
        return (1.0, self.group.rho) if even is None else (even, None)


def mean_loss(server: LocalParty, clients: LocalParty, turns: int = 1) -> float:
    """sum_n rho^n F^n, mean over the local steps: the server's, or the clients' where the server took none; as the
    part of one of several ``turns``."""
    whose = server if server.descents else clients
    return whose.total / (turns * whose.descents) if whose.descents else 0.0


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, device="meta")


def _column(weights: Tensor, like: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (like.dim() - 1))
