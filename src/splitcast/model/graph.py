"""Blocks of any module, found in the calls that it makes.

A module can be cut where exactly one tensor is alive: everything behind such a place is a function of that tensor. What
does not depend on the samples (masks, position tables) is computed again in every block that needs it. A block begins
with a layer that has a weight of two dimensions or more: activations, pooling and norms stay with the layer before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from splitcast.base.errors import SplitcastError
from splitcast.model.tape import ROWS, Attr, Call, Recording, RecordingError, Slot, Tape, attribute, record


class Piece(nn.Module):
    """Some calls of a module, as it was given and as it is in evaluation; its parameters keep their paths."""

    def __init__(
        self, module: nn.Module, name: str, given: Tape, evaluation: Tape, constants: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.name, self.given, self.evaluation = name, given, evaluation
        calls = (*given.calls, *evaluation.calls)
        needed = {leaf.path for call in calls for leaf in call.needs if isinstance(leaf, Attr)}
        held = [*dict(module.named_parameters()), *dict(module.named_buffers()), *constants]
        for path in (path for path in held if path in needed):  # in the module's order
            _place(self, path, module, constants)

    def forward(self, x: Tensor) -> Tensor:
        return (self.given if self.training else self.evaluation).run(self, x)

    def extra_repr(self) -> str:
        return self.name


def pieces(module: nn.Module, batch: Callable[[int], Tensor]) -> list[Piece]:
    """The blocks of a module, which share its parameters; ``batch(rows)`` makes samples. Buffers of the module change.

    In evaluation a module may make other calls; a cut is where both ways have one, with the same weights before it.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        given = record(module, batch, "constant_")
        module.eval()
        evaluation = record(module, batch, "constant_in_evaluation_")
    except RecordingError as error:
        raise _refusal(module, str(error)) from None
    except SplitcastError:
        raise
    except Exception as error:  # of many kinds: all of Python may be in a forward
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise _refusal(module, f"it does not take samples of {tuple(batch(1).shape[1:])} ({said[:200]})") from None
    finally:
        for part, training in modes:
            part.training = training
    ours, theirs = _stretches(module, given), _stretches(module, evaluation)
    common = {one.before for one in ours} & {one.before for one in theirs}
    if len(common) < 2:
        raise _refusal(module, _why(module, given))
    made: list[Piece] = []
    held: set[str] = set()
    aliases = {id(p): path for path, p in module.named_parameters(remove_duplicate=False)}  # the last name of each
    for mine, yours in zip(_merged(ours, common), _merged(theirs, common), strict=True):
        fresh = [path if path not in held else aliases[id(attribute(module, path))] for path in mine.heavy]
        held |= set(mine.heavy)
        name = _name(fresh, [one.name for one in made])
        tapes = _tape(given, mine), _tape(evaluation, yours)
        made.append(Piece(module, name, *tapes, given.constants | evaluation.constants))
    return made


@dataclass(frozen=True)
class _Stretch:
    """Calls between two tensors that are alone."""

    start: Slot
    stop: Slot
    first: int
    last: int
    heavy: tuple[str, ...]
    """paths of its weights that begin a block"""
    before: frozenset[str]
    """all weights up to its end"""

    def joined(self, other: "_Stretch") -> "_Stretch":
        """With the stretch behind it."""
        return replace(other, start=self.start, first=self.first, heavy=self.heavy + other.heavy)


def _cuts(found: Recording) -> dict[Slot, int]:
    """The tensors that are alone, in order, and the last call after which each is."""
    calls, tape = found.tape.calls, found.tape
    last = {slot: index for index, call in enumerate(calls) for slot in call.needs if slot in found.data}
    last[tape.stop] = len(calls)
    alive, cuts = {tape.start}, {}
    for index, call in enumerate(calls):
        alive |= {slot for slot in call.outs if slot in found.data}
        alive = {slot for slot in alive if last.get(slot, -1) > index}
        if len(alive) == 1:
            (slot,) = alive
            rows = all(len(shape) > 1 and shape[0] == n for shape, n in zip(found.shapes[slot], ROWS, strict=True))
            if slot != tape.start and slot in found.floating and (rows or slot == tape.stop):
                cuts[slot] = index
    return cuts


def _stretches(module: nn.Module, found: Recording) -> list[_Stretch]:
    made: list[_Stretch] = []
    start, first, before = found.tape.start, 0, frozenset[str]()
    for stop, last in _cuts(found).items():
        weights = [(path, p) for call in found.tape.calls[first : last + 1] for path, p in _weights(module, call)]
        before = before | {path for path, _ in weights}
        one = _Stretch(start, stop, first, last, tuple(path for path, p in weights if _is_heavy(p)), before)
        if made and not (one.heavy and made[-1].heavy):
            one = made.pop().joined(one)
        made.append(one)
        start, first = stop, last + 1
    return made


def _merged(stretches: list[_Stretch], common: set[frozenset[str]]) -> list[_Stretch]:
    """Only the cuts of which the weights before them are among ``common``."""
    made: list[_Stretch] = []
    for one in stretches:
        open_ = made and made[-1].before not in common
        made.append(made.pop().joined(one) if open_ else one)
    return made


def _tape(found: Recording, stretch: _Stretch) -> Tape:
    """A stretch alone: its calls on samples, and all others that they need, in their order."""
    calls = found.tape.calls
    mine = range(stretch.first, stretch.last + 1)

    def about_samples(call: Call) -> bool:
        return bool((call.needs | set(call.outs)) & found.data)

    wanted = {k for k in mine if about_samples(calls[k]) or any(isinstance(one, Attr) for one in calls[k].changed)}
    needed: set[Any] = {one for k in wanted for one in calls[k].needs} | {stretch.stop}
    for k in reversed(range(stretch.last + 1)):
        call = calls[k]
        if k in wanted or about_samples(call) or any(isinstance(one, Attr) for one in call.changed):
            continue  # state changes once, where it does
        if needed & {*call.outs, *call.changed} - {None}:
            wanted.add(k)
            needed |= call.needs
    return Tape(tuple(calls[k] for k in sorted(wanted)), stretch.start, stretch.stop).tidied()


def _weights(module: nn.Module, call: Call) -> list[tuple[str, Tensor]]:
    paths = sorted(leaf.path for leaf in call.needs if isinstance(leaf, Attr))
    held = [(path, attribute(module, path)) for path in paths if not path.startswith("constant_")]
    return [(path, value) for path, value in held if isinstance(value, nn.Parameter)]


def _is_heavy(p: Tensor) -> bool:
    """Whether a parameter is a matrix or the like, and not a token or a table of positions that is added to samples."""
    return p.dim() > 1 and (p.dim() != 3 or len(p) > 1)


def _name(weights: list[str], taken: list[str]) -> str:
    """The module that has all these weights; if that name is taken, or there is none, the owner of the first."""
    if not weights:
        return "input"
    owners = [path.split(".")[:-1] for path in weights]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))]
    name = ".".join(shared)
    return name if name and name not in taken else ".".join(owners[0])


def _why(module: nn.Module, found: Recording) -> str:
    calls = found.tape.calls
    heavy = [k for k, call in enumerate(calls) if any(_is_heavy(p) for _, p in _weights(module, call))]
    if len(heavy) < 2:
        return f"it has {len(heavy)} layer with a weight matrix"
    at = heavy[len(heavy) // 2]
    made = {slot for call in calls[:at] for slot in call.outs} | {found.tape.start}
    alive = made & found.data & {one for call in calls[at:] for one in call.needs}
    where = _weights(module, calls[at])[0][0].rpartition(".")[0]
    return f"at {where} {len(alive)} tensors are alive, and nowhere between its layers just one of one row per sample"


def is_still(module: nn.Module) -> bool:
    """Whether a module uses its running statistics and leaves them as they are."""
    return bool(getattr(module, "still", isinstance(module, _NormBase) and not module.training))


def _refusal(module: nn.Module, reason: str) -> SplitcastError:
    name = type(module).__name__
    return SplitcastError(f"model: {name} cannot be cut: {reason}; give its parts as a list of modules")


def _place(piece: nn.Module, path: str, module: nn.Module, constants: dict[str, Tensor]) -> None:
    """Put what the module has at a path there."""
    home, _, name = path.rpartition(".")
    holder = piece
    for part in home.split(".") if home else ():
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    source = module.get_submodule(home)
    value = constants[path] if path in constants else getattr(source, name)
    if isinstance(value, nn.Parameter):
        holder.register_parameter(name, value)
    else:
        lasts = path not in constants and name not in source._non_persistent_buffers_set
        holder.register_buffer(name, value, persistent=lasts)
        holder.still = is_still(source)  # type: ignore[assignment]
