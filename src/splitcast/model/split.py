"""A model that can be cut: an ordered list of V blocks, and what each cut costs.

Cut v puts blocks 1..v on the clients and blocks v+1..V on the server, v in 1..V-1. Parameters live outside
the modules, in plain dictionaries, so that the engine can stack one copy per client, and so that moving the cut
is moving dictionary entries.
"""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitcast.base.config import LoraConfig
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import seed_torch
from splitcast.model import probe
from splitcast.model.graph import is_still, pieces
from splitcast.model.lora import LoRA
from splitcast.model.params import Params as Params
from splitcast.model.params import block_of as block_of
from splitcast.model.profile import CutProfile, profile
from splitcast.model.transformer import (
    adapted,
    example_of,
    is_transformer,
    padding_of,
    some_tokens,
    transformer_blocks,
)

Blocks = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""What a model may be given as: a module, or its parts in their order."""

ROWS_CHECKED = 4
"""Of the batch on which blocks are compared with the whole module."""


class SplitModel:
    """Blocks to be trained in two halves.

    >>> model = SplitModel([nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)], input_shape=(4,))
    >>> model.cuts, model.size, model.smashed_shape(1)
    (range(1, 3), 23, (3,))
    >>> model.check_cut(3)
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: cut: 3 is not legal; choose 1..2
    """

    def __init__(
        self,
        blocks: nn.Sequential | Sequence[nn.Module],
        input_shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        names: Sequence[str] = (),
        arch: str = "",
    ) -> None:
        """Samples are ``input_shape`` each, real numbers or, with an integer ``dtype``, tokens; ``arch`` says what made
        the blocks."""
        self.blocks = list(blocks)
        self.depth = len(self.blocks)
        """V, the number of blocks that a sample passes"""
        self.input_shape, self.input_dtype = tuple(input_shape), dtype
        self.names = tuple(names) or tuple(str(k) for k in range(len(self.blocks)))
        self.arch = arch or f"object:{type(blocks).__name__}"
        self.source: nn.Module | None = None
        """The module that the blocks were found in, if it was not given as blocks."""
        _refuse_unsplittable(self.blocks)
        whole = self._half(0, self.depth)
        self.tied: dict[str, str] = {}
        """Names of trained parameters that are another's tensor, and that other, which stands for both."""
        self._initial: Params = {}
        self._frozen: Params = {}
        self._twice: set[str] = set()
        """Names of frozen parameters that are another's tensor."""
        self.halved: set[str] = set()
        """Names of frozen parameters that are kept as bfloat16 (`halve`)."""
        first: dict[int, str] = {}
        for name, p in whole.named_parameters(remove_duplicate=False):
            if not p.requires_grad:
                self._frozen[name] = p.detach()  # one copy for everybody: it never changes
                if first.setdefault(id(p), name) != name:
                    self._twice.add(name)
            elif first.setdefault(id(p), name) != name:
                self.tied[name] = first[id(p)]
            else:
                self._initial[name] = p.detach().clone()
        self._buffers, self._still, self._constants = _buffers_of(whole)
        self.device = "meta" if any(p.is_meta for p in (self._initial | self._frozen).values()) else "cpu"
        """Where the parameters are that it was made of; meta if they have shapes only, to plan with"""
        self._mutating: set[int] = set()
        self._shapes = self._measure_shapes()
        self._counted: dict[tuple[int, bool], tuple[int, int]] = {}
        self._mixing: dict[int, bool] = {}
        self._stackable: dict[int, bool] = {}
        self._adapted: dict[tuple[int, int], bool] = {}

    @staticmethod
    def of(module: Blocks, example: Tensor, arch: str = "") -> "SplitModel":
        """Any module as blocks: the entries of an `nn.Sequential`, a list or a dictionary, else its pieces between
        places where a single tensor is alive. ``example`` is a batch of samples. The module itself stays as it is.

        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.outer(x + self.inner(x).relu())
        >>> SplitModel.of(Net(), torch.randn(1, 4)).names
        ('inner', 'outer')
        """
        shape, dtype = example.shape[1:], example.dtype if not example.is_floating_point() else torch.float32
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 1:
            return SplitModel(module, shape, dtype=dtype, names=list(module._modules), arch=arch)
        if isinstance(module, Mapping):
            return SplitModel(list(module.values()), shape, dtype=dtype, names=list(module), arch=arch)
        if not isinstance(module, nn.Module):
            return SplitModel(module, shape, dtype=dtype, arch=arch)
        if not example.is_floating_point() and is_transformer(module):
            return SplitModel.from_transformer(module, example=example, arch=arch)
        own, most = copy.deepcopy(module).float(), 2 if example.is_floating_point() else int(example.max()) + 1
        if getattr(getattr(own, "config", None), "use_cache", False):
            own.config.use_cache = False  # type: ignore[union-attr]
        state = copy.deepcopy(dict(own.named_buffers()))

        def batch(rows: int) -> Tensor:
            return torch.randn(rows, *shape) if dtype.is_floating_point else torch.randint(0, most, (rows, *shape))

        with torch.random.fork_rng(devices=[]):
            seed_torch(0)
            found = pieces(own, batch)
            for name, buffer in own.named_buffers():
                buffer.detach().copy_(state[name])
            made = SplitModel(
                found,
                shape,
                dtype=dtype,
                names=[piece.name for piece in found],
                arch=arch or f"object:{type(module).__name__}",
            )
            probe.refuse_unlike(made, own, batch(ROWS_CHECKED))
        made.source = own
        return made

    @staticmethod
    def from_transformer(
        model: nn.Module,
        lora: LoraConfig | None = None,
        *,
        example: Tensor | None = None,
        padding: int | None = None,
        arch: str = "",
    ) -> "SplitModel":
        """A decoder or encoder of transformers as front, layers and head, for any number of tokens; with ``lora`` only
        its adapters are trained. The model itself stays as it is, and weights that are frozen are not copied.

        ``example`` (rows, T) is a batch of tokens, or of images; its length is what costs are counted for. ``padding``
        is the token that stands where there is nothing. Without, encoders and models that classify sequences have
        their own; other decoders need none while padding is behind the text.
        """
        if lora and lora.side != "both":
            raise SplitcastError(f"lora.side: {lora.side!r} needs a cut; give it in the configuration, with the module")
        own = adapted(model, lora)
        example = example_of(own) if example is None else example
        padding = padding_of(own) if padding is None and not example.is_floating_point() else padding
        blocks = transformer_blocks(own, example, padding)
        dtype = torch.float32 if example.is_floating_point() else example.dtype
        names = [str(block.name) for block in blocks]
        made = SplitModel(
            blocks, example.shape[1:], dtype=dtype, names=names, arch=arch or f"object:{type(model).__name__}"
        )
        if not example.is_meta:
            with torch.random.fork_rng(devices=[]):
                seed_torch(0)
                probe.refuse_unlike(made, own, some_tokens(own, example, padding))
        made.source = own
        return made

    @property
    def cuts(self) -> range:
        """The legal cuts, 1..V-1."""
        return range(1, self.depth)

    @property
    def size(self) -> int:
        """q, the number of parameters, frozen ones included."""
        return sum(p.numel() for p in self.shapes().values())

    def check_cut(self, cut: int) -> int:
        """Return a legal cut, refuse any other by naming the legal ones."""
        if cut not in self.cuts:
            raise SplitcastError(f"cut: {cut} is not legal; choose 1..{self.depth - 1}")
        return cut

    def fingerprint(self) -> str:
        """Tells another model apart: its modules, the shapes of its weights, and what is never trained."""
        digest = hashlib.blake2b("\n".join(repr(block) for block in self.blocks).encode(), digest_size=8)
        for name, value in {**self._initial, **self._buffers}.items():
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        for name, value in {**self._frozen, **self._still, **self._constants}.items():
            digest.update(name.encode() + value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def initial(self, dtype: torch.dtype = torch.float32) -> Params:
        """A fresh copy of the parameters that are trained."""
        return {name: p.to(dtype, copy=True) for name, p in self._initial.items()}

    def frozen(self, dtype: torch.dtype = torch.float32) -> Params:
        """What is not trained: parameters, and running statistics that are used as they are. Not copied, if they are of
        that type: nobody changes them. What is halved stays so."""
        kept = self._frozen | self._still
        as_it_is = {k for k, v in kept.items() if k in self.halved or not v.is_floating_point()}
        return {k: v if k in as_it_is else v.to(dtype) for k, v in kept.items()}

    def freeze(self, gone: Callable[[str], bool]) -> None:
        """Train some parameters, none of them tied, no more."""
        for name, p in self._half(0, self.depth).named_parameters():
            if name in self._initial and gone(name):
                p.requires_grad_(False)
                self._frozen[name] = self._initial.pop(name)
        self._counted, self._stackable, self._adapted = {}, {}, {}

    def halve(self) -> None:
        """Keep frozen matrices as bfloat16: half the memory. Passes then run under torch's autocast. Of a model without
        values it is only noted."""
        for name, p in self._half(0, self.depth).named_parameters(remove_duplicate=False):
            if name in self._frozen and p.dim() > 1:
                self.halved.add(name)
                if not p.is_meta:
                    p.data = p.data.bfloat16()
                    self._frozen[name] = p.detach()

    def buffers(self, dtype: torch.dtype = torch.float32) -> Params:
        """A fresh copy of the buffers, such as running statistics; whole numbers stay whole."""
        real = {k: v.is_floating_point() for k, v in self._buffers.items()}
        return {k: v.to(dtype if real[k] else v.dtype, copy=True) for k, v in self._buffers.items()}

    def shapes(self) -> Params:
        """All parameters but those of heads, each once, to look at."""
        own = {name: p for name, p in (self._initial | self._frozen).items() if name not in self._twice}
        return {name: p for name, p in own.items() if block_of(name) < self.depth}

    def with_heads(self, make: Callable[[tuple[int, ...], tuple[int, ...]], nn.Module]) -> "SplitModel":
        """The model with an auxiliary head for every cut, ``make`` (shape that enters, shape of the output).

        The head of cut v reads what leaves block v, beside the way to the output. It is a block after all others, the
        (V + v)th, so its weights are held, averaged, sent and stored as any.

        >>> model = SplitModel([nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)], input_shape=(4,))
        >>> headed = model.with_heads(lambda enters, out: nn.Linear(*enters, *out))
        >>> headed.depth, len(headed.blocks), headed.entering(4), list(headed.initial())[-2:]
        (3, 5, (3,), ['4.weight', '4.bias'])
        """
        if len(self.blocks) > self.depth:
            return self
        made = copy.copy(self)
        out = self.smashed_shape(self.depth)
        heads = [make(self.smashed_shape(cut), out) for cut in self.cuts]
        made.blocks = [*self.blocks, *heads]
        whole = made._half(self.depth, len(made.blocks))
        made._initial = self._initial | {name: p.detach().clone() for name, p in whole.named_parameters()}
        made._shapes = [*self._shapes, *[out] * len(heads)]
        made._counted, made._mixing, made._stackable, made._adapted = {}, {}, {}, {}
        return made

    def entering(self, block: int) -> tuple[int, ...]:
        """Shape, per sample, of what enters a block, counted from 0; heads included."""
        return self._shapes[block if block < self.depth else block - self.depth + 1]

    def mixes(self, start: int, stop: int) -> bool:
        """Whether a sample's output of blocks start+1..stop depends on other samples of the batch: BatchNorm and the
        like. Such blocks see the samples of one client at a time."""
        for block in range(start, stop):
            if block not in self._mixing:
                self._mixing[block] = probe.mixes(self, block)
        return any(self._mixing[block] for block in range(start, stop))

    def client_size(self, blocks: int) -> int:
        """phi(v): parameters of the first v blocks."""
        return sum(p.numel() for name, p in self.shapes().items() if block_of(name) < blocks)

    def forward(self, params: Params, x: Tensor, start: int, stop: int) -> Tensor:
        """Run blocks start+1..stop with their share of the parameters; ``x`` is (rows, ...).

        Buffers among ``params`` are changed where a block does so; others begin as they were, and the modules' own
        never change.
        """
        if start == stop:
            return x
        mine = {name: p for name, p in params.items() if start <= block_of(name) < stop}
        for name, owner in self.tied.items():
            if owner in params and start <= block_of(name) < stop:
                mine[name] = params[owner]
        real = (p.dtype for k, p in mine.items() if p.is_floating_point() and k not in self.halved)
        dtype = next(real, x.dtype)
        for name, buffer in {**self._buffers, **self._still, **self._constants}.items():
            if name not in mine and start <= block_of(name) < stop:
                both = buffer.is_floating_point() and dtype.is_floating_point
                mine[name] = buffer.to(x.device, dtype if both else buffer.dtype, copy=name in self._buffers)
        if start in self._mutating:
            x = x.clone()
        with self._arithmetic(x.device.type):
            out: Tensor = functional_call(self._half(start, stop), mine, (x,), tie_weights=False)
        return out.float() if self.halved and out.dtype == torch.bfloat16 else out

    def _arithmetic(self, device: str) -> AbstractContextManager[Any]:
        """Autocast, where matrices are halved and nobody has asked for it around the pass."""
        needed = self.halved and device != "meta" and not torch.is_autocast_enabled(device)
        return torch.autocast(device, torch.bfloat16) if needed else nullcontext()

    def only_adapters(self, start: int, stop: int) -> bool:
        """Whether all that blocks start+1..stop train is adapters, of which a pass takes those of many clients."""
        if (start, stop) not in self._adapted:
            adapters = {
                f"{k}.{path}.{name}"
                for k in range(start, stop)
                for path, part in self.blocks[k].named_modules()
                if isinstance(part, LoRA)
                for name in ("lora_A", "lora_B")
            }
            changing = {k for k in (*self._initial, *self.tied, *self._buffers) if start <= block_of(k) < stop}
            self._adapted[start, stop] = changing <= adapters and not self.mixes(start, stop)
        return self._adapted[start, stop]

    def stackable(self, start: int, stop: int) -> bool:
        """Whether copies of blocks start+1..stop run together: torch has rules for all that they do."""
        for block in range(start, stop):
            if block not in self._stackable:
                self._stackable[block] = probe.stacks(self, block)
        return all(self._stackable[block] for block in range(start, stop))

    def smashed_shape(self, block: int) -> tuple[int, ...]:
        """Shape, per sample, of what leaves a block: the input for 0, the output for V and for every head."""
        return self._shapes[block]

    def uses(self, block: int, name: str) -> bool:
        """Whether a block has a parameter, its own or one that is tied to its own."""
        owned = (alias for alias, owner in self.tied.items() if owner == name)
        return any(block_of(each) == block for each in (name, *owned))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Blocks in evaluation mode (dropout off), then in the mode that each of their parts had."""
        modes = [(module, module.training) for block in self.blocks for module in block.modules()]
        self._half(0, self.depth).eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _measure_shapes(self) -> list[tuple[int, ...]]:
        x = torch.zeros(1, *self.input_shape, device=self.device, dtype=self.input_dtype)
        shapes = [self.input_shape]
        with torch.no_grad(), self.evaluating():
            for index in range(self.depth):
                version = x._version
                try:
                    out = self.forward(self._initial, x, index, index + 1)
                except (RuntimeError, TypeError) as error:
                    shape = f"{tuple(x.shape[1:])}, which samples of {self.input_shape} become there"
                    reason = str(error).splitlines()[0]
                    raise SplitcastError(f"blocks: entry {self.names[index]} does not take {shape}: {reason}") from None
                if not isinstance(out, Tensor):
                    kind = type(out).__name__
                    raise SplitcastError(f"blocks: entry {self.names[index]} puts out a {kind}, not a tensor")
                if x._version != version:
                    self._mutating.add(index)
                x = out
                shapes.append(tuple(x.shape[1:]))
        return shapes

    def profile(self) -> list[CutProfile]:
        """Parameters, traffic, FLOPs (a multiply-add is two) and privacy of every legal cut."""
        return profile(self)

    def flops(self, start: int, stop: int) -> tuple[int, int]:
        """Forward and backward FLOPs per sample of blocks start+1..stop; but for block 1 with the input's gradient."""
        forward = backward = 0
        trained = {block_of(name) for name in (*self._initial, *self.tied)}
        for block in range(start, stop):
            key = block, start > 0 or any(before in trained for before in range(start, block))
            if key not in self._counted:
                self._counted[key] = probe.count_flops(self, *key)
            forward, backward = forward + self._counted[key][0], backward + self._counted[key][1]
        return forward, backward

    def _half(self, start: int, stop: int) -> nn.Sequential:
        named = [(str(i), self.blocks[i]) for i in range(start, stop)]
        return nn.Sequential(OrderedDict(named))


def _refuse_unsplittable(blocks: list[nn.Module]) -> None:
    if len(blocks) < 2:
        raise SplitcastError(f"blocks: a model needs at least 2 blocks to be cut, got {len(blocks)}")
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise SplitcastError(f"blocks: entry {index} is a {type(block).__name__}, not a torch module")


def _buffers_of(whole: nn.Module) -> tuple[Params, Params, Params]:
    """Buffers that change in training; running statistics that are only used; and constants, which are no state."""
    changing: Params = {}
    still: Params = {}
    constants: Params = {}
    for path, module in whole.named_modules():
        used = is_still(module)
        for name, buffer in module.named_buffers(path, recurse=False):
            last = name.rpartition(".")[2]
            slot = constants if last in module._non_persistent_buffers_set else still if used else changing
            slot[name] = buffer.detach().clone()
    return changing, still, constants
