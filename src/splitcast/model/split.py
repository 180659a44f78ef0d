"""A model that can be cut: an ordered list of V blocks, and what each cut costs.

Cut v puts blocks 1..v on the clients and blocks v+1..V on the server, v in 1..V-1. Parameters live outside
the modules, in plain dictionaries, so that the engine can stack one copy per client, and so that moving the cut
is moving dictionary entries.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from splitcast.base.errors import SplitcastError

Params = dict[str, Tensor]


def block_of(name: str) -> int:
    """The block, counted from 0, that owns a parameter."""
    return int(name.split(".", 1)[0])


@dataclass(frozen=True)
class CutProfile:
    """What one cut costs, per sample and in parameters."""

    cut: int
    client_parameters: int
    """phi(v)"""
    client_fraction: float
    """phi(v)/q"""
    privacy: float
    """log(1 + phi(v)/q), at least epsilon in P1"""
    smashed_values: int
    """values per sample that cross the cut, each way"""
    client_forward_flops: int
    client_backward_flops: int
    server_forward_flops: int
    server_backward_flops: int


class SplitModel:
    """Blocks to be trained in two halves.

    >>> model = SplitModel([nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)], input_shape=(4,))
    >>> model.cuts, model.size, model.smashed_shape(1)
    (range(1, 3), 23, (3,))
    >>> model.check_cut(3)
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: cut: 3 is not legal; choose 1..2
    """

    def __init__(self, blocks: nn.Sequential | Sequence[nn.Module], input_shape: Sequence[int]) -> None:
        self.blocks = list(blocks)
        self.input_shape = tuple(input_shape)
        _refuse_unsplittable(self.blocks)
        whole = self._half(0, self.depth)
        self._initial = {name: p.detach().clone() for name, p in whole.named_parameters() if p.requires_grad}
        self._frozen = {name: p.detach().clone() for name, p in whole.named_parameters() if not p.requires_grad}
        self._buffers = {name: b.detach().clone() for name, b in whole.named_buffers()}
        self._shapes = self._measure_shapes()
        self._counted: dict[tuple[int, int], tuple[int, int]] = {}
        self._mixing = [self._mixes(block) for block in range(self.depth)]

    @property
    def depth(self) -> int:
        """V, the number of blocks."""
        return len(self.blocks)

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

    def initial(self, dtype: torch.dtype = torch.float32) -> Params:
        """A fresh copy of the parameters that are trained."""
        return {name: p.to(dtype, copy=True) for name, p in self._initial.items()}

    def frozen(self, dtype: torch.dtype = torch.float32) -> Params:
        """A fresh copy of the parameters that are not trained."""
        return {name: p.to(dtype, copy=True) for name, p in self._frozen.items()}

    def buffers(self, dtype: torch.dtype = torch.float32) -> Params:
        """A fresh copy of the buffers, such as running statistics; whole numbers stay whole."""
        return {k: b.to(dtype if b.is_floating_point() else b.dtype, copy=True) for k, b in self._buffers.items()}

    def shapes(self) -> Params:
        """All parameters, to look at."""
        return self._initial | self._frozen

    def mixes(self, start: int, stop: int) -> bool:
        """Whether a sample's output of blocks start+1..stop depends on other samples of the batch: BatchNorm and the
        like. Such blocks see the samples of one client at a time."""
        return any(self._mixing[start:stop])

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
        for name, buffer in self._buffers.items():
            if name not in mine and start <= block_of(name) < stop:
                mine[name] = buffer.to(x.device, x.dtype if buffer.is_floating_point() else buffer.dtype, copy=True)
        out: Tensor = functional_call(self._half(start, stop), mine, (x,))
        return out

    def smashed_shape(self, block: int) -> tuple[int, ...]:
        """Shape, per sample, of what leaves a block: the input for 0, the logits for V."""
        return self._shapes[block]

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

    def _mixes(self, block: int) -> bool:
        """Whether the first row of a block's output changes with the second row of its input."""
        shape = (2, *self.smashed_shape(block))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            x = torch.randn(shape, device="cpu")
            other = torch.cat([x[:1], torch.randn(shape, device="cpu")[1:]])
            try:
                first, second = (self._seeded(block, rows) for rows in (x, other))
            except (RuntimeError, ValueError, IndexError):
                return True  # what cannot be asked is not trusted with two clients
        return not torch.equal(first[0], second[0])

    def _seeded(self, block: int, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return self.forward(self._initial, x, block, block + 1)

    def _measure_shapes(self) -> list[tuple[int, ...]]:
        x = torch.zeros(1, *self.input_shape, device="cpu")
        shapes = [self.input_shape]
        with torch.no_grad(), self.evaluating():
            for index in range(self.depth):
                try:
                    x = self.forward(self._initial, x, index, index + 1)
                except RuntimeError as error:
                    shape = f"{tuple(x.shape[1:])}, which samples of {self.input_shape} become there"
                    reason = str(error).splitlines()[0]
                    raise SplitcastError(f"blocks: entry {index} does not take {shape}: {reason}") from None
                shapes.append(tuple(x.shape[1:]))
        return shapes

    def profile(self) -> list[CutProfile]:
        """Parameters, traffic, FLOPs (a multiply-add is two) and privacy of every legal cut."""
        rows = []
        for cut in self.cuts:
            phi = self.client_size(cut)
            client, server = self.flops(0, cut), self.flops(cut, self.depth)
            rows.append(
                CutProfile(
                    cut=cut,
                    client_parameters=phi,
                    client_fraction=phi / self.size,
                    privacy=math.log1p(phi / self.size),
                    smashed_values=math.prod(self.smashed_shape(cut)),
                    client_forward_flops=client[0],
                    client_backward_flops=client[1],
                    server_forward_flops=server[0],
                    server_backward_flops=server[1],
                )
            )
        return rows

    def flops(self, start: int, stop: int) -> tuple[int, int]:
        """Forward and backward FLOPs per sample of blocks start+1..stop; but for block 1 with the input's gradient."""
        key = (start, stop)
        if key not in self._counted:
            self._counted[key] = self._count_flops(start, stop, start > 0)
        return self._counted[key]

    def _count_flops(self, start: int, stop: int, input_gradient: bool) -> tuple[int, int]:
        params = {k: v.requires_grad_() for k, v in self.initial().items()}
        x = torch.zeros(1, *self.smashed_shape(start), device="cpu")
        x.requires_grad_(input_gradient)
        with self.evaluating(), FlopCounterMode(display=False) as forward:
            out = self.forward(params, x, start, stop)
        if not out.requires_grad:
            return forward.get_total_flops(), 0
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()  # type: ignore[no-untyped-call]
        return forward.get_total_flops(), backward.get_total_flops()

    def _half(self, start: int, stop: int) -> nn.Sequential:
        named = [(str(i), self.blocks[i]) for i in range(start, stop)]
        return nn.Sequential(OrderedDict(named))


def as_rows(profile: Sequence[CutProfile]) -> list[dict[str, float]]:
    """The profile as JSON-ready rows."""
    return [asdict(row) for row in profile]


def _refuse_unsplittable(blocks: list[nn.Module]) -> None:
    if len(blocks) < 2:
        raise SplitcastError(f"blocks: a model needs at least 2 blocks to be cut, got {len(blocks)}")
    seen: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise SplitcastError(f"blocks: entry {index} is a {type(block).__name__}, not a torch module")
        for _, p in block.named_parameters():
            if seen.setdefault(id(p), index) != index:
                raise SplitcastError(
                    f"blocks: entries {seen[id(p)]} and {index} share a parameter; put both into one block"
                )
