"""Weights of one side of a model: what is trained, what is frozen, buffers, and the optimiser's state.

Each of these is a slot, a dictionary of tensors by parameter name. What can be done to weights (take, put, average,
move, count) is written once, over all slots.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitcast.model.split import Params, block_of
from splitcast.training.factored import Factors, Gradient
from splitcast.training.optimiser import Optimiser, at_sync

TRAINED = "trained"
FROZEN = "frozen"
"""The same for all clients for ever: never stacked, averaged or sent with the others."""
BUFFERS = "buffers"
"""Running statistics and the like: averaged, moved and sent with what is trained; of whole numbers the first counts."""
STATE = "opt/"
"""Slots of the optimiser begin so,"""
HOME = "home/"
"""or so, where its state stays with who has it and is never sent (`TrainConfig.optimizer_state`)."""

Slots = dict[str, Params]


@dataclass
class Weights:
    """One copy that serves all clients, or, ``stacked``, one copy per client in a leading dimension.

    One copy gathers the weighted gradients of all clients in ``pending`` until `step`; stacked copies step at once.
    One copy may have buffers ``apart``, of each client in a leading dimension: what mixes a batch then sees the samples
    of one client only.
    """

    slots: Slots
    stacked: bool = False
    pending: Params = field(default_factory=dict)
    apart: bool = False

    @staticmethod
    def start(
        params: Params, optimiser: Optimiser, buffers: Params | None = None, frozen: Params | None = None
    ) -> "Weights":
        """Initial parameters with the optimiser's state, buffers and frozen parameters."""
        prefix = STATE if at_sync(optimiser) == "average" else HOME
        state = {prefix + name: slot for name, slot in optimiser.init(params).items()}
        further = {BUFFERS: buffers, FROZEN: frozen}
        return Weights({TRAINED: params, **state, **{slot: values for slot, values in further.items() if values}})

    @property
    def params(self) -> Params:
        """What is trained."""
        return self.slots[TRAINED]

    def beside(self, slot: str) -> Params:
        """Frozen parameters or buffers; empty if there are none."""
        return self.slots.get(slot, {})

    def everything(self) -> Params:
        """What a model needs to run."""
        return self.params | self.beside(FROZEN) | self.beside(BUFFERS)

    @property
    def copies(self) -> int:
        """Number of copies; 0 when one serves all."""
        values = (value for _, slot in self._moving() for value in slot.values())  # buffers may be all that there is
        return len(next(values, ())) if self.stacked else 0

    def travelling(self) -> int:
        """Values of one copy that are sent when weights are exchanged: all but the frozen, and state that stays."""
        return self._count(self.sent())

    def held(self) -> int:
        """Values of one copy that change: all but the frozen."""
        return self._count(self._moving())

    # gradients

    def accumulate(self, grads: Mapping[str, Gradient], scale: float = 1.0) -> None:
        """Add ``scale`` times a gradient to that of the one copy."""
        for name, g in grads.items():
            assert isinstance(g, Tensor)  # only stacked layers leave factors
            if name in self.pending:
                self.pending[name].add_(g, alpha=scale)
            else:
                self.pending[name] = g * scale  # not in place: two parameters may share a gradient

    def step(self, optimiser: Optimiser) -> None:
        """Step along the gathered gradient."""
        if self.pending:
            self._step(optimiser, self.pending, lambda v: v.data)
            self.pending.clear()

    def step_rows(self, optimiser: Optimiser, grads: Mapping[str, Gradient], rows: slice) -> None:
        """Step some of the stacked copies, each along its own gradient."""
        # `.data` has a version counter of its own: other clients' graphs on the same storage stay valid
        self._step(optimiser, grads, lambda v: v.data[rows])

    def _step(self, optimiser: Optimiser, grads: Mapping[str, Gradient], part: Callable[[Tensor], Tensor]) -> None:
        if not getattr(optimiser, "takes_factors", optimiser.linear):
            grads = {k: g.formed() if isinstance(g, Factors) else g for k, g in grads.items()}
        state = {
            slot.partition("/")[2]: {k: part(values[k]) for k in grads if k in values}
            for slot, values in self.slots.items()
            if slot.startswith((STATE, HOME))
        }
        optimiser.step({k: part(self.params[k]) for k in grads}, state, grads)

    # copies

    def clone(self) -> "Weights":
        """The same values elsewhere, without what is pending; what is frozen never changes and is shared."""
        return self._map(Tensor.clone, stacked=self.stacked)

    def stack(self, copies: int, spent: "Weights | None" = None) -> "Weights":
        """One copy per client; in the memory of copies that are ``spent``, if they are as many of the same: fresh pages
        would cost as much as the arithmetic on them."""
        if spent is None or spent._shapes() != {k: (copies, *shape) for k, shape in self._shapes().items()}:
            return self._map(lambda v: _repeated(v, copies), stacked=True)
        for slot, values in self._moving():
            for name, value in values.items():
                spent.slots[slot][name].copy_(value)
        return Weights(dict(spent._moving()) | self._still(), stacked=True)

    def with_apart(self, copies: int) -> "Weights":
        """This very copy, with buffers for each client."""
        each = {k: _repeated(v, copies) for k, v in self.beside(BUFFERS).items()}
        return Weights(self.slots | {BUFFERS: each}, pending=self.pending, apart=True)

    def joined(self, weights: Tensor, before: Params | None) -> Params:
        """sum_n weights_n of the buffers that are apart, added to what other clients had ``before``."""
        mine = Weights({BUFFERS: self.beside(BUFFERS)}, stacked=True).mean(weights)
        return mine.plus(Weights({BUFFERS: before}) if before else None).beside(BUFFERS)

    def take(self, clients: Tensor | slice) -> "Weights":
        """The copies of some clients: views for a slice, else copies."""
        return self._map(lambda v: v[clients], stacked=True)

    def one(self, k: int) -> "Weights":
        """One of the copies, alone."""
        return self._map(lambda v: v[k], stacked=False)

    def put(self, clients: Tensor, other: "Weights") -> None:
        """Write the copies of some clients back."""
        for slot, values in other._moving():
            for name, value in values.items():
                self.slots[slot][name][clients] = value

    def mean(self, weights: Tensor) -> "Weights":
        """sum_n weights_n w^n as one copy; one copy is its own average."""

        if not self.stacked:
            return self
        return self.reduced(lambda slot, name, v: torch.tensordot(weights.to(v), v, dims=1))

    def reduced(self, change: Callable[[str, str, Tensor], Tensor]) -> "Weights":
        """Stacked copies (n, ...) made one, given slot, name and value; of whole numbers the first counts."""
        slots = {
            slot: {k: change(slot, k, v) if v.is_floating_point() else v[0].clone() for k, v in values.items()}
            for slot, values in self._moving()
        }
        return Weights(slots | self._still())

    def plus(self, other: "Weights | None") -> "Weights":
        """One copy with another one added in place."""
        if other:
            for slot, values in other._moving():
                for name, value in values.items():
                    if value.is_floating_point():
                        self.slots[slot][name].add_(value)
        return self

    def minus(self, other: "Weights") -> "Weights":
        """How far these are from one copy; counters, which have no distance, as they are."""
        slots = {
            slot: {k: v - other.slots[slot][k] if v.is_floating_point() else v for k, v in values.items()}
            for slot, values in self._moving()
        }
        return Weights(slots | self._still(), self.stacked)

    @staticmethod
    def stacked_of(ones: Iterable["Weights"]) -> "Weights":
        """Single copies as stacked ones."""
        first, *rest = ones
        if not rest:
            return first._map(lambda v: v[None].clone(), stacked=True)
        each = [first, *rest]
        slots = {
            slot: {name: torch.stack([one.slots[slot][name] for one in each]) for name in values}
            for slot, values in first._moving()
        }
        return Weights(first._still() | slots, stacked=True)

    def drift(self, weights: Tensor) -> float:
        """Mean over clients of the distance ||w^n - mean|| of trained weights from their average."""
        if not self.stacked or not self.params:
            return 0.0
        squares = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        columns = max(1, 2**19 // len(weights))
        for value in self.params.values():
            for part in torch.split(value.flatten(1), columns, dim=1):  # cache-sized, so memory is read once
                squares += torch.linalg.vector_norm(part - weights @ part, dim=1).double().square()
        return float(squares.sqrt().mean())

    # state that stays

    def home(self) -> "Weights":
        """The state that is not sent, by reference."""
        return Weights({slot: values for slot, values in self.slots.items() if slot.startswith(HOME)}, self.stacked)

    def renewed(self, optimiser: Optimiser) -> "Weights":
        """The same, with state that is not sent as at the start."""
        fresh = optimiser.init(self.params) if at_sync(optimiser) != "average" else {}
        return Weights(self.slots | {HOME + name: values for name, values in fresh.items()}, self.stacked)

    def keeping(self, own: "Weights | None") -> "Weights":
        """The same, with this state that is not sent, for those parameters that it has."""
        kept = own.home().slots if own else {}
        slots = {s: {k: kept.get(s, {}).get(k, v) for k, v in values.items()} for s, values in self.slots.items()}
        return Weights(slots, self.stacked)

    # parts of the model

    def only(self, keep: Callable[[str], bool]) -> "Weights":
        """The parameters whose names are kept, by reference."""
        slots = {s: {k: v for k, v in values.items() if keep(k)} for s, values in self.slots.items()}
        return Weights(slots, self.stacked)

    def drop(self, gone: Callable[[str], bool]) -> None:
        """Forget some parameters."""
        self.slots = {s: {k: v for k, v in values.items() if not gone(k)} for s, values in self.slots.items()}

    def adopt(self, other: "Weights") -> None:
        """Add the parameters of other weights, in the model's order: sums over names depend on it."""
        for slot, values in other.slots.items():
            joined = self.slots.get(slot, {}) | values
            self.slots[slot] = dict(sorted(joined.items(), key=lambda item: block_of(item[0])))

    # on the wire and on disk

    def flat(self) -> Tensor:
        """All that is sent of one copy, slot after slot, as one vector."""
        values = [v.detach().flatten().float() for _, slot in self.sent() for v in slot.values()]
        return torch.cat(values) if values else torch.empty(0, device="cpu")

    @staticmethod
    def unflat(values: Tensor, like: "Weights") -> "Weights":
        """The inverse of `flat`, for weights of the slots and shapes of ``like``, with its state that is not sent."""
        slots: Slots = {slot: {k: v.clone() for k, v in values.items()} for slot, values in like.home().slots.items()}
        at = 0
        for slot, shapes in like.sent():
            slots[slot] = {}
            for name, shape in shapes.items():
                slots[slot][name] = values[at : at + shape.numel()].view(shape.shape).to(shape.dtype, copy=True)
                at += shape.numel()
        return Weights(slots | like._still())

    def sent(self) -> list[tuple[str, Params]]:
        """The slots that are sent when weights are exchanged."""
        return [(slot, values) for slot, values in self._moving() if not slot.startswith(HOME)]

    def _count(self, slots: Iterable[tuple[str, Params]]) -> int:
        return sum(v.numel() for _, values in slots for v in values.values()) // max(1, self.copies)

    def _moving(self) -> list[tuple[str, Params]]:
        return [(slot, values) for slot, values in self.slots.items() if slot != FROZEN]

    def _shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(slot, name): tuple(v.shape) for slot, values in self._moving() for name, v in values.items()}

    def _still(self) -> Slots:
        return {slot: values for slot, values in self.slots.items() if slot == FROZEN}

    def _map(self, change: Callable[[Tensor], Tensor], *, stacked: bool) -> "Weights":
        slots = {slot: {k: change(v) for k, v in values.items()} for slot, values in self._moving()}
        return Weights(slots | self._still(), stacked)


def _repeated(value: Tensor, copies: int) -> Tensor:
    return value.expand(copies, *value.shape).clone(memory_format=torch.contiguous_format)
