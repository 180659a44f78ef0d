"""What splitcast trains: models and tasks of many kinds under every scheme, each trained or refused in one line."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitcast import data
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.files import write_atomically
from splitcast.data import Dataset
from splitcast.run.loop import train
from splitcast.schemes.schemes import SCHEMES
from splitcast.studies.zoo import networks

SIDE, TOKENS, LENGTH, FEATURES = 14, 24, 12, 8
ROUNDS = 6


@dataclass(frozen=True)
class Entry:
    """A model with its data."""

    dataset: str
    """one of `DATA`"""
    values: dict[str, Any] = field(default_factory=dict)
    """settings beside the usual"""
    module: Callable[[], nn.Module] | None = None
    """a network of ours, or"""
    hf: dict[str, Any] | None = None
    """a configuration of transformers, or the arch among the settings"""


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Handwritten digits of 14 x 14 pixels."""
    found = data.load("mnist-mini")
    train_x, test_x = (F.avg_pool2d(x, 2) for x in (found.train_x, found.test_x[:200]))
    return train_x, found.train_y, test_x, found.test_y[:200]


def pixels() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noisy digits; the target is ink or paper, for every pixel."""
    noise = torch.Generator().manual_seed(0)
    train_x, _, test_x, _ = images()
    train_y, test_y = ((x[:, 0] > 0).long() for x in (train_x, test_x))
    train_x, test_x = (x + 0.5 * torch.randn(x.shape, generator=noise) for x in (train_x, test_x))
    return train_x, train_y, test_x, test_y


def table() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eight numbers, and a smooth function of them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1000, FEATURES, generator=draw)
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()) + 0.1 * torch.randn(1000, 1, generator=draw)
    return x[:800], y[:800], x[800:], y[800:]


def sentences() -> Tensor:
    """Walks over the tokens: each is the last one plus a step that the sentence keeps, now and then plus one more."""
    draw = torch.Generator().manual_seed(0)
    first, step = (torch.randint(0, high, (1000, 1), generator=draw) for high in (TOKENS, 4))
    steps = step + (torch.rand(1000, LENGTH, generator=draw) < 0.1).long()
    return (first + steps.cumsum(1)) % TOKENS


def text() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next token of every position."""
    x = sentences()
    return x[:800, :-1], x[:800, 1:], x[800:, :-1], x[800:, 1:]


def topics() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The step of a sentence."""
    x = sentences()
    y = ((x[:, 1:] - x[:, :-1]) % TOKENS).median(1).values.clamp(max=4)
    return x[:800], y[:800], x[800:], y[800:]


DATA: dict[str, tuple[Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]], str, int]] = {
    "images": (images, "classification", 10),
    "pixels": (pixels, "pixel", 2),
    "table": (table, "regression", 1),
    "text": (text, "next-token", TOKENS),
    "topics": (topics, "classification", 5),
}
"""Data, task and classes by name."""

_VIT = {"model_type": "vit", "patch_size": 7, "hidden_size": 16, "num_hidden_layers": 2}
_VIT |= {"num_attention_heads": 2, "intermediate_size": 32}
_GPT = {"model_type": "gpt2", "vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
_GPT |= {"bos_token_id": 0, "eos_token_id": 0}
_BERT = {"model_type": "bert", "vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2}
_BERT |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": LENGTH}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "layer_type": "basic", "hidden_sizes": [8, 16]}
_RESNET |= {"depths": [1, 1]}
_MOBILENET = {"model_type": "mobilenet_v2", "depth_multiplier": 0.25}
_CONVNEXT = {"model_type": "convnext", "patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}

_DEEP = {"cut": 3, "batch": 4, "lr": 0.0005}

ENTRIES: dict[str, Entry] = {
    "ResNet-18, BatchNorm": Entry("images", {"arch": "resnet18"} | _DEEP),
    "ResNet-18, GroupNorm": Entry("images", {"arch": "resnet18", "batch_norm": "group"} | _DEEP),
    "ResNet (transformers)": Entry("images", {"cut": 2}, hf=_RESNET),
    "MobileNetV2 (transformers)": Entry("images", {"cut": 4}, hf=_MOBILENET),
    "ConvNeXt (transformers)": Entry("images", {"cut": 2}, hf=_CONVNEXT),
    "ViT (transformers)": Entry("images", {"cut": 2}, hf=_VIT),
    "ViT with LoRA": Entry("images", {"cut": 2, "lora.rank": 4, "lora.modules": ("q_proj", "v_proj", "fc1")}, hf=_VIT),
    "residual CNN, GroupNorm": Entry("images", {"cut": 2}, lambda: networks.ResidualCNN(10)),
    "frozen backbone": Entry("images", {"cut": 2}, lambda: networks.Backbone(10)),
    "tied layers, one side": Entry("images", {"cut": 1}, lambda: networks.TiedMLP(SIDE * SIDE, 10)),
    "tied layers, across the cut": Entry("images", {"cut": 2}, lambda: networks.TiedMLP(SIDE * SIDE, 10)),
    "LSTM": Entry("images", {}, lambda: networks.LSTM(SIDE, 10)),
    "TransformerEncoder": Entry("images", {"cut": 2}, lambda: networks.Transformer(SIDE, SIDE, 10)),
    "segmentation network": Entry("pixels", {"cut": 1}, lambda: networks.Segmenter(2)),
    "MLP on a table": Entry("table", {"cut": 1}, lambda: networks.MLP(FEATURES, 1)),
    "GPT-2 (transformers)": Entry("text", {"cut": 2}, hf=_GPT | {"tie_word_embeddings": False}),
    "GPT-2, tied embeddings": Entry("text", {"cut": 2}, hf=_GPT),
    "GPT-2, tied, with LoRA": Entry("text", {"cut": 2, "lora.rank": 4, "lora.modules": ("c_attn", "c_fc")}, hf=_GPT),
    "GRU, tied embeddings": Entry("text", {"cut": 1}, lambda: networks.Language(TOKENS)),
    "BERT (transformers)": Entry("topics", {"cut": 3}, hf=_BERT),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    model: str
    scheme: str
    task: str
    first: float | None = None
    """training loss of the first round"""
    last: float | None = None
    """of the last one"""
    reason: str = ""
    """why it does not train"""

    def __str__(self) -> str:
        return f"{self.model}, {self.scheme}: {self.reason or f'{self.first:.3f} to {self.last:.3f}'}"


def try_all(
    folder: Path,
    models: list[str] | None = None,
    schemes: list[str] | None = None,
    watch: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Every model under every scheme, three clients and `ROUNDS` rounds each."""
    cells = []
    for name in models or ENTRIES:
        for scheme in schemes or SCHEMES:
            cells.append(_tried(name, scheme, folder))
            watch(cells[-1])
    return cells


def _tried(name: str, scheme: str, folder: Path) -> Cell:
    entry = ENTRIES[name]
    load, task, classes = DATA[entry.dataset]
    usual: dict[str, Any] = {
        "scheme": scheme,
        "task": task,
        "clients": 3,
        "batch": 8,
        "rounds": ROUNDS,
        "eval_every": ROUNDS,
    }
    usual |= {"optimizer": "adam", "lr": 0.003}
    try:
        arch = {"arch": _written(entry.hf, name, folder)} if entry.hf else {}
        config = with_values(Config(), **usual | arch | entry.values)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = entry.module() if entry.module else None
        records = train(config, dataset=Dataset(*load(), classes, entry.dataset), model=module).rounds
    except SplitcastError as error:
        return Cell(name, scheme, task, reason=str(error))
    except Exception as error:  # what must not be
        traceback.print_exc()
        return Cell(name, scheme, task, reason=f"TRACEBACK {type(error).__name__}: {error}".splitlines()[0])
    return Cell(name, scheme, task, records[0].loss, records[-1].loss)


def _written(values: dict[str, Any], name: str, folder: Path) -> str:
    file = folder / f"{''.join(letter for letter in name if letter.isalnum())}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(values, indent=1).encode())
    return f"hf:{file}"


def markdown(cells: list[Cell]) -> str:
    """Models by schemes: the training loss of the first and the last round, or a number that stands for a reason."""
    schemes = list(dict.fromkeys(cell.scheme for cell in cells))
    reasons: list[str] = []
    lines = ["| model | task | " + " | ".join(schemes) + " |", "|---" * (len(schemes) + 2) + "|"]
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = [cell for cell in cells if cell.model == model]
        for cell in mine:
            if cell.reason and cell.reason not in reasons:
                reasons.append(cell.reason)
        texts = [_text(cell, reasons) for cell in mine]
        lines.append(f"| {model} | {mine[0].task} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", *(f"{k}. {reason}" for k, reason in enumerate(reasons, 1))]) + "\n"


def _text(cell: Cell, reasons: list[str]) -> str:
    if cell.reason:
        return f"refused ({reasons.index(cell.reason) + 1})"
    return f"{cell.first:.2f} → {cell.last:.2f}"
