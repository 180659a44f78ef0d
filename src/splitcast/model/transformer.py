"""Decoders and encoders of transformers as blocks: a front (embeddings), the layers of the stack, a head.

What a model gives each of its layers beside the hidden states (masks, positions, rotary tables) follows from the shape
of the tokens and from where there is padding. So every block works it out again, with the model's own code: it runs a
shell of the model, whose weights are zeros that take no memory, on a batch of the same shape, and takes what arrives at
its layer. Nothing is recorded for one length.

Padding passes from block to block with the hidden states: at a padded position they are zero, and zero nowhere else.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from splitcast.base.config import LoraConfig
from splitcast.base.errors import SplitcastError
from splitcast.model.lora import add_lora
from splitcast.model.tape import answer

CONTEXTS = 4
"""Shapes of which what layers are given is remembered."""
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer is given beside the hidden states."""


class Front(nn.Module):
    """Everything before the first layer: tokens (rows, T) or images to hidden states (rows, T, d)."""

    def __init__(self, shell: "Shell", name: str) -> None:
        super().__init__()
        self.name = name
        object.__setattr__(self, "shell", shell)
        for path, child in shell.model.named_children():
            self.add_module(path, child)
        for path, p in shell.model.named_parameters(recurse=False):
            self.register_parameter(path, p)

    def forward(self, x: Tensor) -> Tensor:
        shell: Shell = self.shell  # type: ignore[assignment]
        mask = None if shell.padding is None or x.is_meta else x != shell.padding
        hidden = shell.entering(x, mask)
        hidden = hidden.float() if hidden.dtype == torch.bfloat16 else hidden  # sums over layers stay exact
        if mask is None:
            return hidden
        mute = (mask & hidden.eq(0).all(-1))[..., None]  # a token that is embedded as zero is no padding
        return _padded(torch.where(mute, torch.finfo(hidden.dtype).tiny, hidden), mask)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"  # its modules may lack what theirs would tell


class Layer(nn.Module):
    """One layer of the stack."""

    def __init__(self, shell: "Shell", number: int, path: str, layer: nn.Module) -> None:
        super().__init__()
        self.number, self.name = number, path
        object.__setattr__(self, "shell", shell)
        object.__setattr__(self, "layer", layer)
        _hang(self, path, layer)

    def forward(self, x: Tensor) -> Tensor:
        shell: Shell = self.shell  # type: ignore[assignment]
        mask = shell.mask_of(x)
        args, kwargs = shell.given(x, mask)[self.number]
        out = self.layer(x, *args, **kwargs)  # type: ignore[operator]
        return _padded(out[0] if isinstance(out, tuple) else out, mask)


class Head(Front):
    """Everything behind the last layer: hidden states to the output."""

    def forward(self, x: Tensor) -> Tensor:
        shell: Shell = self.shell  # type: ignore[assignment]
        out: Tensor = shell.leaving(x, shell.mask_of(x))
        return out

    def train(self, mode: bool = True) -> "Head":
        super().train(mode)
        shell: Shell = self.shell  # type: ignore[assignment]
        for part in shell.idle:
            part.training = False
        return self


def is_transformer(model: nn.Module) -> bool:
    """Whether a module is a model of transformers, perhaps wrapped by peft."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def adapted(model: nn.Module, lora: LoraConfig | None) -> nn.Module:
    """A model of the same values in float32, with adapters where these are asked for."""
    memo = {id(p): nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in model.parameters()}
    own = copy.deepcopy(model, memo)
    if getattr(own.config, "use_cache", False):
        own.config.use_cache = False  # type: ignore[union-attr]
    if lora and lora.rank:
        add_lora(own, lora.rank, lora.modules, lora.alpha)
    return own


def example_of(model: Any) -> Tensor:
    """A sample for a model: tokens of up to 128 positions, or an image."""
    config = model.config
    if model.main_input_name != "input_ids":
        size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        return torch.zeros(1, config.num_channels, *size)
    most = getattr(config.get_text_config(), "max_position_embeddings", 128)
    return torch.zeros(1, min(128, most), dtype=torch.int64)


def padding_of(model: Any) -> int | None:
    """The token that stands where there is nothing: with a causal model, what is behind the text changes nothing before
    it, so only one that looks for the last token needs it."""
    config = model.config.get_text_config()
    finds_last = hasattr(model, "num_labels") and "SequenceClassification" in type(model).__name__
    causal = any(getattr(part, "is_causal", False) is True for part in model.modules())
    return config.pad_token_id if finds_last or not causal else None


def some_tokens(model: Any, example: Tensor, padding: int | None) -> Tensor:
    """A few random samples, short ones."""
    if example.is_floating_point():
        return torch.randn(2, *example.shape[1:])
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, min(8, example.shape[1])))
    return tokens.masked_fill(tokens == padding, 1 if padding == 0 else 0) if padding is not None else tokens


def transformer_blocks(model: nn.Module, example: Tensor, padding: int | None) -> list[nn.Module]:
    """Front, layers and head of a model, which share its parameters; ``example`` is a batch of samples.

    ``padding`` is the token that stands where there is nothing.
    """
    name = type(model).__name__
    found = _stack(model)
    if found is None:
        raise SplitcastError(f"model: {name} has no list of layers to be cut between")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise SplitcastError(f"model: {name} has an encoder and a decoder; allowed are models with one stack of layers")
    path, stack = found
    before, after, tuples = _calls(model, stack, example[:1])
    front, middle, head = (
        Shell(model, path, example, padding, keep, tuples=tuples) for keep in (before, set[str](), after)
    )
    middle.model.eval()
    head.idle = [part for name, part in head.model.named_modules() if name in before - after]
    layers = [Layer(middle, k, f"{path}.{k}", layer) for k, layer in enumerate(stack)]
    return [Front(front, "front"), *layers, Head(head, "head").train(model.training)]


class Shell:
    """A model without its layers, and only with the weights of the modules to ``keep``; the others are zeros."""

    def __init__(
        self, model: nn.Module, path: str, example: Tensor, padding: int | None, keep: set[str], *, tuples: bool
    ) -> None:
        stack = model.get_submodule(path)
        layers = list(stack.children())
        self.stations = [_Station(layer, tuples=tuples) for layer in layers]
        memo: dict[int, Any] = {id(p): p for p in model.parameters()}
        memo[id(stack)] = nn.ModuleList(self.stations)
        self.model, self.padding = copy.deepcopy(model, memo), padding
        self.input = getattr(model, "main_input_name", "input_ids")
        self.like = example[:1]
        self.idle: list[nn.Module] = []
        """what comes before the layers and here is given a batch of nothing: it draws no random numbers"""
        self.ghosts = [
            (part, name, p.shape)
            for owner, part in self.model.named_modules()
            if owner not in keep
            for name, p in part.named_parameters(recurse=False)
        ]
        for part, name, shape in self.ghosts:
            del part._parameters[name]
            part.__dict__[name] = torch.zeros(()).expand(shape)  # also for whoever prints the model
        self._known: dict[Any, list[Given]] = {}

    def mask_of(self, x: Tensor) -> Tensor | None:
        """Where hidden states (rows, T, d) are those of tokens."""
        return None if self.padding is None or x.is_meta else x.ne(0).any(-1)

    def entering(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What arrives at the first layer."""
        hidden: Tensor = self._run(x, mask, self.stations[0])
        return hidden

    def given(self, x: Tensor, mask: Tensor | None) -> list[Given]:
        """What every layer is given beside hidden states x (rows, T, d)."""
        key = (tuple(x.shape[:2]), x.dtype, x.device, type(x))
        if mask is None and key in self._known:
            return self._known[key]
        with torch.no_grad():
            self._run(*self._nothing(x, mask), self.stations[-1])
        found = [station.given for station in self.stations]
        if mask is None:
            if len(self._known) >= CONTEXTS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = found
        return found

    def leaving(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The output for hidden states behind the last layer."""
        self.stations[-1].inject = x
        try:
            out = answer(self._run(*self._nothing(x, mask)))
        finally:
            self.stations[-1].inject = None
        assert isinstance(out, Tensor)
        return out

    def _run(self, x: Tensor, mask: Tensor | None, until: "_Station | None" = None) -> Any:
        masked = {} if mask is None else {"attention_mask": mask.to(torch.int64)}
        masked = shapes_of_masks(x) or masked
        if until:
            until.stops = True
        try:
            return self.model(**{self.input: x}, **masked)
        except _Reached as reached:
            return reached.args[0]
        finally:
            if until:
                until.stops = False

    def _nothing(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Samples of the shape that made hidden states x, without a meaning."""
        for part, name, shape in self.ghosts:
            ghost = part.__dict__[name]
            if (ghost.device, ghost.dtype, type(ghost)) != (x.device, x.dtype, type(x)):
                part.__dict__[name] = torch.zeros((), device=x.device, dtype=x.dtype).expand(shape)
        for part in self.model.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.device != x.device:
                    part._buffers[name] = buffer.to(x.device)
        if self.like.is_floating_point():
            return torch.zeros(len(x), *self.like.shape[1:], device=x.device, dtype=x.dtype), mask
        token = 1 if self.padding == 0 else 0
        tokens = torch.full(x.shape[:2], token, device=x.device, dtype=self.like.dtype)
        return (tokens, None) if mask is None else (tokens.masked_fill(~mask, self.padding or 0), mask)


class _Reached(Exception):  # noqa: N818, it is no error
    """The model is where it should stop."""


class _Station(nn.Module):
    """Stands in for a layer: notes what it is given, and lets hidden states pass."""

    def __init__(self, layer: nn.Module, *, tuples: bool) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)
        self.tuples, self.stops = tuples, False
        self.inject: Tensor | None = None
        self.given: Given = ((), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = (args, kwargs)
        if self.stops:
            raise _Reached(x)
        x = x if self.inject is None else self.inject
        return (x,) if self.tuples else x


def _stack(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The longest list of layers of one class, with its path."""
    lists = [
        (path, part)
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) and len({type(layer) for layer in part}) == 1
    ]
    return max(lists, key=lambda found: (len(found[1]), -found[0].count(".")), default=None)


def _calls(model: nn.Module, stack: nn.ModuleList, x: Tensor) -> tuple[set[str], set[str], bool]:
    """Modules that are used before the layers, those behind, and whether layers put out tuples."""
    called: tuple[set[str], set[str]] = (set(), set())
    seen: list[Any] = []
    inside = {id(part) for part in stack.modules()}
    parts = {name: part for name, part in model.named_modules() if id(part) not in inside}
    hooks = [stack[0].register_forward_hook(lambda *given: seen.append(given[-1]))]
    for name, part in parts.items():
        hooks.append(part.register_forward_pre_hook(lambda *_, name=name: called[bool(seen)].add(name)))
    try:
        with torch.no_grad():
            model(x, **shapes_of_masks(x))
    finally:
        for hook in hooks:
            hook.remove()
    for used in called:  # a part that is not called itself belongs to whoever holds it
        for name, part in parts.items():
            parent = name.rpartition(".")[0]
            if parent in used and name not in called[0] | called[1] and not any(p is stack for p in part.modules()):
                used.add(name)
    return *called, isinstance(seen[0], tuple)


def shapes_of_masks(x: Tensor) -> dict[str, Tensor]:
    """For tokens (rows, T) without values: a mask for all layers, since the library decides by values which to make."""
    if not x.is_meta or x.is_floating_point():
        return {}
    return {"attention_mask": torch.empty(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool, device="meta")}


def _hang(holder: nn.Module, path: str, part: nn.Module) -> None:
    """Put a module at a path."""
    *above, name = path.split(".")
    for one in above:
        if one not in holder._modules:
            holder.add_module(one, nn.Module())
        holder = holder.get_submodule(one)
    holder.add_module(name, part)


def _padded(hidden: Tensor, mask: Tensor | None) -> Tensor:
    return hidden if mask is None else torch.where(mask[..., None], hidden, 0)
