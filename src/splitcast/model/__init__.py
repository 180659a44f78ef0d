"""Models by name."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitcast.base.config import Config, LoraConfig, ModelConfig
from splitcast.base.errors import SplitcastError, one_of, shown
from splitcast.base.registry import Registry
from splitcast.base.seeds import seed_torch, torch_seed
from splitcast.data.datasets import LAST_LABEL
from splitcast.data.text.packages import MODELS
from splitcast.model.cnn import paper_cnn, small_cnn
from splitcast.model.gpt import small_gpt
from splitcast.model.hub import from_timm, from_transformers, is_described
from splitcast.model.lora import add_lora
from splitcast.model.norm import set_batch_norm
from splitcast.model.pretrained import is_pretrained, pretrained
from splitcast.model.resnet import resnet8, resnet18
from splitcast.model.split import Blocks, SplitModel, block_of
from splitcast.model.transformer import is_transformer

Builder = Callable[[Sequence[int], int], Blocks | SplitModel]

OBJECT = "object:"
"""So begins the recorded name of a model that was given from Python."""
MOST_VALUES, MOST_CLASSES = 2**26, LAST_LABEL + 1
"""Most values of a sample, and most classes."""

ARCHITECTURES = Registry[Builder](
    "arch",
    takes=2,
    entries={
        "cnn": paper_cnn,
        "cnn-small": small_cnn,
        "resnet8": resnet8,
        "resnet18": resnet18,
        "gpt-small": small_gpt,
    },
    forms=(*MODELS, "hf:FOLDER", "hf:CONFIG.json", "timm:NAME"),
)


def make_model(
    config: Config,
    input_shape: Sequence[int],
    classes: int,
    dtype: torch.dtype = torch.float32,
    *,
    shapes_only: bool = False,
) -> SplitModel:
    """The model a configuration names, with the initial weights of its seed, for samples of that type.

    With ``shapes_only``, as planning needs it, text models of transformers have no values and no limit of size.
    """
    arch = config.model.arch
    if shapes_only and len(input_shape) == 1 and is_described(arch):
        module, example = from_transformers(arch, input_shape, classes, config.model.task, shapes_only=True)
        lora = replace(config.lora, side="both")
        made = SplitModel.from_transformer(module, lora, example=example, arch=arch)
        return prepared(made, config, every_cut=True)
    seed = torch_seed(config.train.seed, "model")
    return prepared(build(arch, input_shape, classes, seed, config.model, config.lora, dtype), config)


def prepared(model: SplitModel, config: Config, *, every_cut: bool = False) -> SplitModel:
    """A model with its adapters on the side that is asked for, and what is frozen beside adapters in the precision.

    To plan ``every_cut`` only what clients train matters: all adapters, or none if these are the server's.
    """
    side = one_of("lora.side", config.lora.side, ("client", "server", "both"))
    if side != "both":
        cuts, home = config.split.cuts, config.split.labels_at_home
        if not config.lora.rank or config.policy.policy != "fixed":
            given = f"policy {config.policy.policy!r}" if config.lora.rank else "lora.rank 0"
            raise SplitcastError(f"lora.side: {side!r}, but with {given}; it needs adapters, and blocks that stay")

        def is_there(name: str) -> bool:
            if every_cut:
                return side == "client"
            if home and block_of(name) == model.depth - 1:
                return side == "client"
            return block_of(name) < min(cuts) if side == "client" else block_of(name) >= max(cuts)

        model.freeze(lambda name: not is_there(name))
        if not every_cut and not model.initial():
            raise SplitcastError(f"lora.side: {side!r} has no layer of lora.modules with cut = {config.split.cut}")
    if config.lora.rank and config.train.precision == "bf16":
        model.halve()
    return model


def build(
    arch: str,
    input_shape: Sequence[int],
    classes: int,
    seed: int,
    options: ModelConfig | None = None,
    lora: LoraConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> SplitModel:
    """A split model with initial weights drawn from ``seed``, leaving torch's global generator untouched.

    ``arch`` is a known name, hf:NAME, hf:FOLDER, hf:CONFIG.json, timm:NAME, or ``module:function`` for a function of
    (input_shape, classes) that returns a module, blocks, or a split model.

    >>> build("cnn", (1, 28, 28), 10, seed=0).depth
    5
    """
    options = options or ModelConfig()
    if not 1 <= len(input_shape) <= 8 or min(input_shape) < 1 or math.prod(input_shape) > MOST_VALUES:
        raise SplitcastError(
            f"input_shape: {shown(tuple(input_shape))}; give sizes of at least 1, as in 1 28 28, and at most "
            f"{MOST_VALUES:,} values"
        )
    if not 1 <= classes <= MOST_CLASSES:
        raise SplitcastError(f"classes: {shown(classes)}; must be at least 1 and at most {MOST_CLASSES:,}")
    if arch.startswith(OBJECT):
        raise SplitcastError(
            f"arch: {shown(arch)} was given as a Python object, which no name builds; give it from Python (model=)"
        )
    with torch.random.fork_rng(devices=[]):
        seed_torch(seed)
        try:
            made, example = _made(arch, input_shape, classes, options.task, dtype)
            return split(made, example, options, lora or LoraConfig(), arch)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error):
                raise
            raise SplitcastError(
                f"input_shape: {tuple(input_shape)} with {classes} classes makes a model beyond the memory"
            ) from None


def split(
    model: Blocks | SplitModel, example: Tensor, options: ModelConfig, lora: LoraConfig, arch: str = ""
) -> SplitModel:
    """A model cut for samples like ``example``, its BatchNorm and adapters, on both sides, as the options say; what is
    given stays."""
    if options.batch_norm == "local" and not lora.rank:
        return model if isinstance(model, SplitModel) else SplitModel.of(model, example, arch)
    if isinstance(model, SplitModel):
        raise SplitcastError(
            "model: is split already; batch_norm and lora need the module itself, or are applied before it is split"
        )
    if isinstance(model, nn.Module) and is_transformer(model) and not example.is_floating_point():
        return SplitModel.from_transformer(model, replace(lora, side="both"), example=example, arch=arch)
    whole, names = isinstance(model, nn.Module), list(model) if isinstance(model, Mapping) else []
    parts = [model] if isinstance(model, nn.Module) else list(model.values() if isinstance(model, Mapping) else model)
    held = nn.ModuleList(copy.deepcopy(nn.ModuleList(parts)))
    set_batch_norm(held, options.batch_norm)
    if lora.rank:
        add_lora(held, lora.rank, lora.modules, lora.alpha)
    if whole:
        return SplitModel.of(held[0], example, arch or f"{OBJECT}{type(model).__name__}")
    return SplitModel.of(dict(zip(names, held, strict=True)) if names else list(held), example, arch)


def _made(
    arch: str, input_shape: Sequence[int], classes: int, task: str, dtype: torch.dtype
) -> tuple[Blocks | SplitModel, Tensor]:
    kind, _, name = arch.partition(":")
    example = torch.zeros(1, *input_shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
    if arch not in ARCHITECTURES and is_pretrained(arch):
        return pretrained(arch, input_shape, classes, task)
    if arch not in ARCHITECTURES and kind == "hf":
        return from_transformers(arch, input_shape, classes, task)
    if arch not in ARCHITECTURES and kind == "timm":
        return from_timm(name, input_shape, classes), example
    return ARCHITECTURES.find(arch)(input_shape, classes), example
