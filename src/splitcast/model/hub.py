"""Models of other libraries, without their weights: transformers by a configuration, timm by a name.

A configuration is data: it names one of the library's own classes, and nothing that it says is run.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitcast.base.errors import SplitcastError, imported, shown
from splitcast.base.files import read_bounded
from splitcast.data.loading import cache_folder
from splitcast.data.text.gguf import CONFIG
from splitcast.data.text.located import HF, located
from splitcast.data.text.packages import MODELS

FILE_BYTES = 1_000_000
MOST_PARAMETERS = 2**31
"""Of a model that a file describes."""
PLANNED_LENGTH = 512
"""Tokens of a text, where no data say it."""
HEADS = {"next-token": "CausalLM", "pixel": "SemanticSegmentation"}
"""The kind of model for a task; else it classifies images or sequences."""
_IGNORED = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")


def from_transformers(
    arch: str, input_shape: Sequence[int], classes: int, task: str, *, shapes_only: bool = False
) -> tuple[nn.Module, Tensor]:
    """The model that a configuration of transformers describes, fitted to samples and classes, and an example.

    The head is the task's; channels, image size and labels are those of the data. With ``shapes_only`` it has no
    values, so that any size can be planned.
    """
    field = f"arch: {arch}"
    automatic, values = _described(arch)
    kind = values["model_type"]
    images = len(input_shape) == 3
    head = HEADS.get(task, "ImageClassification" if images else "SequenceClassification")
    maker = imported("arch", f"transformers:AutoModelFor{head}", takes=0)
    try:
        config = automatic.for_model(kind, **{k: v for k, v in values.items() if k not in _IGNORED})
        _fit(config, input_shape, classes, images)
        with torch.device("meta"):
            empty = maker.from_config(config)
        if shapes_only:
            return empty.train(), torch.zeros(1, *input_shape, dtype=torch.int64, device="meta")
        size = sum(p.numel() for p in empty.parameters())
        if size > MOST_PARAMETERS:
            raise SplitcastError(f"{field} describes {size:,} parameters; at most {MOST_PARAMETERS:,} are allowed")
        made = maker.from_config(config).float().train()
    except SplitcastError:
        raise
    except Exception as error:  # of many kinds: the values are the file's
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SplitcastError(f"{field} makes no {head} model: {said[:300]}") from None
    if images:
        return made, torch.zeros(1, *input_shape)
    refuse_long(config.get_text_config(), input_shape, arch)
    return made, torch.full((1, *input_shape), config.get_text_config().vocab_size - 1)


def text_shape(arch: str) -> tuple[int, bool] | None:
    """Of a model of transformers for texts: the length to plan with, and whether its configuration says that the next
    token is predicted; None of other models."""
    if not is_described(arch):
        return None
    automatic, values = _described(arch)
    try:
        config = automatic.for_model(values["model_type"])
    except (ValueError, KeyError):
        raise SplitcastError(f"arch: {arch} is of no known model_type: {shown(values['model_type'])}") from None
    if hasattr(config, "image_size") or not hasattr(config.get_text_config(), "vocab_size"):
        return None
    most = values.get("max_position_embeddings", values.get("n_positions"))
    causal = any(f"{name}".endswith(("CausalLM", "LMHeadModel")) for name in values.get("architectures") or [])
    return min(PLANNED_LENGTH, most) if isinstance(most, int) and most > 0 else PLANNED_LENGTH, causal


def from_timm(name: str, input_shape: Sequence[int], classes: int) -> nn.Module:
    """A model of timm."""
    needed("timm", "timm:", "install timm and a torchvision that fits your torch")
    create = imported("arch", "timm:create_model", takes=1)
    try:
        made: nn.Module = create(name, pretrained=False, num_classes=classes, in_chans=input_shape[0])
    except Exception as error:  # of many kinds
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SplitcastError(f"arch: timm:{name} cannot be made: {said[:300]}") from None
    return made


def refuse_long(config: Any, input_shape: Sequence[int], arch: str) -> None:
    """Refuse rows of more tokens than a model has places for."""
    most = getattr(config, "max_position_embeddings", None)
    if most and input_shape[0] > most:
        raise SplitcastError(f"sequence_length: {input_shape[0]}; {arch} takes at most {most} tokens")


def needed(package: str, arch: str, remedy: str) -> None:
    """Refuse a model whose library is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SplitcastError(f"arch: {arch} needs {package}, which is not installed; {remedy}")


def is_described(arch: str) -> bool:
    """Whether a model has a configuration of transformers."""
    return arch in MODELS or arch.startswith(HF)


def source_of(arch: str, *, weights: bool) -> Path:
    """The folder of a model of transformers, or its configuration file alone."""
    if arch not in MODELS:
        return located(arch, weights=weights)
    folder = cache_folder() / arch
    if not MODELS[arch].is_whole(folder):
        raise SplitcastError(f"arch: {arch} is not in {folder.parent}; get it with: splitcast data get {arch}")
    return folder


def _described(arch: str) -> tuple[Any, dict[str, Any]]:
    """The library's maker of configurations, and what a model's says."""
    needed("transformers", arch, "pip install 'splitcast[models]'")
    automatic = imported("arch", "transformers:AutoConfig", takes=0)
    source = source_of(arch, weights=False)
    values = _read(source / CONFIG if source.is_dir() else source, f"arch: {arch}")
    if not isinstance(values.get("model_type"), str):
        raise SplitcastError(f"arch: {arch} has no model_type, such as resnet or vit")
    return automatic, values


def _read(file: Path, field: str) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(file, FILE_BYTES))
    except SplitcastError as error:
        raise SplitcastError(f"{field}: {str(error).removeprefix('run: ')}") from None
    except (ValueError, RecursionError):
        raise SplitcastError(f"{field} is not JSON") from None
    if not isinstance(found, dict):
        raise SplitcastError(f"{field} holds {shown(found)}; allowed is a table of settings")
    return found


def _fit(config: Any, input_shape: Sequence[int], classes: int, images: bool) -> None:
    config.num_labels = classes
    if images:
        config.num_channels = input_shape[0]
        if hasattr(config, "image_size"):
            high, wide = input_shape[1:]
            config.image_size = high if high == wide else (high, wide)
    if hasattr(config, "use_cache"):
        config.use_cache = False
