"""The trained model of a run folder, without the data it was trained on, for use in plain PyTorch."""

import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.files import write_atomically
from splitcast.engine.mixed import AnyState, restored
from splitcast.engine.state import SHARES, started
from splitcast.model import make_model
from splitcast.model.lora import merge_lora
from splitcast.model.split import SplitModel
from splitcast.model.whole import whole
from splitcast.run.records import Checkpoint, RunFolder
from splitcast.run.strict import count, parsed
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import make_scheme
from splitcast.training.optimiser import make_optimiser
from splitcast.training.runtime import Runtime

ABOUT = "inputs"
"""Name in a checkpoint's metadata of what a model is made for."""


def inputs_of(model: SplitModel, classes: int) -> dict[str, str]:
    """What a checkpoint says about the samples and classes of its model."""
    dtype = str(model.input_dtype).removeprefix("torch.")
    return {ABOUT: json.dumps({"shape": list(model.input_shape), "dtype": dtype, "classes": classes})}


def trained_model(folder: Path) -> nn.Module:
    """The module of a run's last checkpoint, with buffers, client halves averaged, in the mode it was made in."""
    run = RunFolder(folder)
    config = with_values(run.config(), device="cpu")
    if not run.checkpoint_file.is_file():
        raise SplitcastError(f"run: {folder} has no checkpoint yet; train it further with --resume")
    stored = run.restore()
    try:
        inputs = parsed(stored.about[ABOUT].encode())
        kinds = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}
        shape, classes = [count(size) for size in inputs["shape"]], count(inputs["classes"])
        made = make_model(config, shape, classes, kinds[inputs["dtype"]])
    except (KeyError, ValueError, TypeError):
        raise SplitcastError(f"run: {folder} does not say what its model takes; resume it once, then export") from None
    scheme, dtype = make_scheme(config), Runtime.of(config.train).dtype
    model = scheme.fitted(made)
    if stored.about.get("model") != model.fingerprint():
        raise SplitcastError(f"run: {folder} trained another model than arch {config.model.arch!r} makes now")
    state = _state(config, stored, scheme, model)
    shares = stored.tensors.get(SHARES, torch.ones(config.data.clients, dtype=dtype) / config.data.clients)
    if shares.shape != (config.data.clients,):
        raise SplitcastError(f"checkpoint: {SHARES} of {len(shares)} clients, not {config.data.clients}")
    return whole(model, state.averaged(shares))


def _state(config: Config, stored: Checkpoint, scheme: Scheme, model: SplitModel) -> AnyState:
    """The weights of all, where blocks were in the end."""
    exact = scheme.sync.exact
    sides = [make_optimiser(config.train, exact=exact, server=server) for server in (False, True)]
    runtime = Runtime.of(config.train)
    return restored(
        stored.tensors,
        stored.about,
        config.data.clients,
        scheme,
        model.depth,
        lambda placement: started(model, placement, sides, runtime),
    )


def export(folder: Path, file: Path) -> int:
    """Write the parameters and buffers of a run's model, adapters merged, as safetensors; returns how many values."""
    if file.suffix != ".safetensors":
        raise SplitcastError(f"file: {file} must end in .safetensors")
    if file.exists():
        raise SplitcastError(f"file: {file} exists; choose another name")
    if not file.absolute().parent.is_dir():
        raise SplitcastError(f"file: {file.parent} is no folder")
    model = trained_model(folder)
    merge_lora(model)
    tensors = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    write_atomically(file, save(tensors, {"format": "pt"}))
    return sum(value.numel() for value in tensors.values())
