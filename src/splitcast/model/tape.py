"""The calls that a module makes on the way from a batch to its output, recorded so that parts of them can run alone.

The module runs as it is, on two batches of different numbers of rows. A number that differs between the two follows
from the number of rows, a tensor that no call made is a constant. What decides by the values of samples is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from splitcast.base.seeds import seed_torch

ROWS = (2, 3)
"""Of the two batches."""
DECISIONS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__"}
DECISIONS |= {"__index__", "__set__"}


class RecordingError(Exception):
    """Why a module cannot be recorded."""


@dataclass(frozen=True)
class Slot:
    """A tensor that a call made; 0 is the input."""

    index: int


@dataclass(frozen=True)
class Attr:
    """A parameter, a buffer or a constant."""

    path: str


@dataclass(frozen=True)
class Rows:
    """slope * rows + offset"""

    slope: int
    offset: int


@dataclass(frozen=True)
class Device:
    """Where the input is."""


@dataclass(frozen=True)
class Real:
    """The type of the weights, which is float32 while recording."""


@dataclass(frozen=True)
class Call:
    """``outs`` = func(*args, **kwargs), where tensors and what depends on the batch are named by the above."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Slot | None, ...]
    """of the leaves of its output that are new tensors"""
    changed: frozenset[Slot | Attr]
    """what it changes in place"""
    grad: bool
    """whether gradients are asked for"""
    done: tuple[Slot, ...] = ()
    """what nobody needs after it"""

    @property
    def needs(self) -> set[Slot | Attr]:
        """What it reads."""
        return {leaf for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, Slot | Attr)}


@dataclass(frozen=True)
class Tape:
    """Calls from ``start`` to ``stop``."""

    calls: tuple[Call, ...]
    start: Slot
    stop: Slot

    def run(self, holder: nn.Module, x: Tensor) -> Tensor:
        """The tensor at ``stop`` for ``x`` at ``start``, with the parameters of ``holder``."""
        made: dict[Slot, Tensor] = {self.start: x}
        rows = len(x)

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return made[leaf]
            if isinstance(leaf, Attr):
                return attribute(holder, leaf.path)
            if isinstance(leaf, Rows):
                return leaf.slope * rows + leaf.offset
            if isinstance(leaf, Real):
                return next((p.dtype for p in holder.parameters()), x.dtype)
            return x.device if isinstance(leaf, Device) else leaf

        for call in self.calls:
            with nullcontext() if call.grad else torch.no_grad():
                out = call.func(*mapped(call.args, value), **mapped(call.kwargs, value))
            outs = zip(call.outs, _tensors(out), strict=True)
            made |= {slot: tensor for slot, tensor in outs if slot is not None}
            for slot in call.done:
                del made[slot]
        return made[self.stop]

    def tidied(self) -> "Tape":
        """The same, forgetting what is no longer needed on the way."""
        last: dict[Slot, int] = {}
        for index, call in enumerate(self.calls):
            last |= {one: index for one in (*call.needs, *call.outs) if isinstance(one, Slot)}
        last.pop(self.stop, None)
        done = {index: tuple(slot for slot, at in last.items() if at == index) for index in set(last.values())}
        calls = tuple(replace(call, done=done.get(index, ())) for index, call in enumerate(self.calls))
        return replace(self, calls=calls)


@dataclass(frozen=True)
class Recording:
    """A whole module as a tape, with what is known of its tensors."""

    tape: Tape
    shapes: dict[Slot, tuple[torch.Size, ...]]
    """at each number of rows"""
    floating: frozenset[Slot]
    data: frozenset[Slot]
    """what depends on the samples"""
    constants: dict[str, Tensor]


def record(module: nn.Module, batch: Callable[[int], Tensor], tag: str) -> Recording:
    """Run a module on ``batch(rows)``; names of its constants begin with ``tag``. Its buffers change as they do in a
    forward pass, so give it a copy."""
    runs = []
    for rows in ROWS:
        x = batch(rows)
        recorder = _Recorder(module, x.requires_grad_() if x.is_floating_point() else x, tag)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), recorder:
            seed_torch(0)
            runs.append((recorder, recorder.slot(answer(module(x)))))
    (first, stop), (second, other) = runs
    same = len(first.calls) == len(second.calls) and stop == other and first.constants.keys() == second.constants.keys()
    if not same:
        raise RecordingError(f"it does something else for {ROWS[0]} rows than for {ROWS[1]}")
    for name, value in first.constants.items():
        if not (value.shape == second.constants[name].shape and torch.equal(value, second.constants[name])):
            raise RecordingError("it has a tensor that follows from the samples in a way that is not seen")
    calls = tuple(_joined(a, b) for a, b in zip(first.calls, second.calls, strict=True))
    made = first.made
    return Recording(
        Tape(calls, Slot(0), stop),
        {slot: (made[slot].shape, second.made[slot].shape) for slot in made},
        frozenset(slot for slot, tensor in made.items() if tensor.is_floating_point()),
        frozenset(first.data),
        {path: value.detach() for path, value in first.constants.items()},
    )


def answer(out: Any) -> Any:
    """The tensor that a module's output is about: the logits where there are several things, else the first of them."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, dict):
        return out["logits"] if "logits" in out else next(iter(out.values()), None)
    return getattr(out, "logits", out[0] if isinstance(out, tuple | list) and out else None)


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, x: Tensor, tag: str) -> None:
        super().__init__()
        held = [*module.named_parameters(), *module.named_buffers()]
        self.known: dict[int, Slot | Attr] = {id(value): Attr(path) for path, value in held}
        self.kept = [value for _, value in held]  # an id is a name only while its tensor lives
        self.made: dict[Slot, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.calls: list[Call] = []
        self.data: set[Slot] = set()
        self.data.add(self._new(x))
        self.tag, self.last = tag, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]
        grad = torch.is_grad_enabled()
        out = func(*args, **kwargs)
        outs = _tensors(out)
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        name = getattr(func, "__name__", str(func))
        if name in DECISIONS and any(self.known.get(id(tensor)) in self.data for tensor in given):
            raise RecordingError(f"behind {self.last or 'its input'} it decides by the values of samples ({name})")
        fresh = [tensor for tensor in outs if id(tensor) not in self.known]
        if not changed and not fresh and name != "contiguous":
            return out
        named = mapped((tuple(args), dict(kwargs)), self._named)
        needs = {leaf for leaf in leaves_of(named) if isinstance(leaf, Slot)}
        paths = [leaf.path for leaf in leaves_of(named) if isinstance(leaf, Attr)]
        self.last = paths[0].rpartition(".")[0] if paths else self.last
        places = tuple(self._new(tensor) if id(tensor) not in self.known else None for tensor in outs)
        if needs & self.data:
            self.data |= {slot for slot in places if slot is not None}
            self.data |= self._sharing(changed)
        told = frozenset(self.known[id(tensor)] for tensor in changed)
        self.calls.append(Call(func, named[0], named[1], places, told | self._sharing(changed), grad))
        return out

    def slot(self, out: Any) -> Slot:
        """The slot of the module's output."""
        found = self.known.get(id(out)) if isinstance(out, Tensor) else None
        if not isinstance(found, Slot) or found not in self.data:
            raise RecordingError("its output does not follow from its input by calls of torch")
        return found

    def _new(self, tensor: Tensor) -> Slot:
        slot = Slot(len(self.made))
        self.made[slot] = tensor
        self.known[id(tensor)] = slot
        return slot

    def _sharing(self, changed: list[Tensor]) -> set[Slot]:
        """Every tensor that was made and has the memory of one of these."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in changed}
        if not memory:
            return set()
        return {slot for slot, made in self.made.items() if made.untyped_storage().data_ptr() in memory}

    def _named(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return Device()
        if not isinstance(leaf, Tensor):
            return Real() if leaf is torch.float32 else leaf
        if id(leaf) not in self.known:
            if leaf.grad_fn is not None:
                raise RecordingError(f"behind {self.last or 'its input'} a tensor comes from what is not seen")
            path = f"{self.tag}{len(self.constants)}"
            self.constants[path] = leaf
            self.known[id(leaf)] = Attr(path)
        return self.known[id(leaf)]


def _joined(first: Call, second: Call) -> Call:
    """A call of both runs."""
    if first.func != second.func or first.outs != second.outs or first.changed != second.changed:
        raise RecordingError(f"it does something else for {ROWS[0]} rows than for {ROWS[1]}")
    args, kwargs = _even((first.args, first.kwargs), (second.args, second.kwargs))
    return replace(first, args=args, kwargs=kwargs)


def _even(first: Any, second: Any) -> Any:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list) and len(first) == len(second):
        return tuple(_even(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: _even(first[key], second[key]) for key in first}
    if isinstance(first, slice) and isinstance(second, slice):
        parts = ("start", "stop", "step")
        return slice(*(_even(getattr(first, part), getattr(second, part)) for part in parts))
    if type(first) is not type(second):
        raise RecordingError(f"it does something else for {ROWS[0]} rows than for {ROWS[1]}")
    if isinstance(first, int) and not isinstance(first, bool) and first != second:
        slope = (second - first) // (ROWS[1] - ROWS[0])
        return Rows(slope, first - slope * ROWS[0])
    if first is not second and first != second:
        raise RecordingError(f"a number in it is {first} for {ROWS[0]} rows and {second} for {ROWS[1]}")
    return first


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest of tuples, lists, dictionaries and slices, with its leaves changed."""
    if isinstance(value, tuple):
        return tuple(mapped(one, change) for one in value)
    if isinstance(value, list):
        return [mapped(one, change) for one in value]
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of such a nest."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from leaves_of(one)
    elif isinstance(value, dict):
        yield from leaves_of(list(value.values()))
    elif isinstance(value, slice):
        yield from leaves_of((value.start, value.stop, value.step))
    else:
        yield value


def attribute(holder: nn.Module, path: str) -> Any:
    """What is at a path."""
    home, _, name = path.rpartition(".")
    return getattr(holder.get_submodule(home), name)


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
