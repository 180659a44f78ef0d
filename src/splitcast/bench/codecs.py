"""What every wire format sends and loses, and what it costs: smashed data of the paper's CNN, MNIST's first images.

The network has made 100 steps of SGD on embedded MNIST, so that its features are features of something. Bytes are those
packed, per sample of a batch of 32; the error is the squared one, relative to the energy of what is sent. Encoding and
decoding of all clients' messages at cut 1 are timed beside a round of SFL, in seconds of the processor.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitcast.base.codec import Codec
from splitcast.base.config import Config, with_values
from splitcast.base.formats import codec
from splitcast.base.rounding import RoundingNoise
from splitcast.bench.engine import CLASSES, LR, SHAPE
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.data import load
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.training.task import Classification

CLIENTS, BATCH, STEPS = 10, 32, 100
FORMATS = (
    *("fp32", "fp16", "int8", "int4", "int2", "rotated:4", "rotated:2", "lloyd:4", "lloyd:2"),
    *("transform:1", "transform:2.5", "transform:4", "transform:150B", "transform:80B", "transform:5%"),
    *("topk:3%", "randtopk:3%", "c3sl:8", "fedlite:1568,16", "fedlite:98,32", "splitfc:0.4/8", "splitfc:0.2/16"),
)


def codecs(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench codecs`."""
    data = load("mnist-mini")
    model = _trained(data.train_x, data.train_y)
    images = data.train_x[: CLIENTS * BATCH]
    rows: list[Row] = []
    made = [codec(name) for name in FORMATS]
    for cut in model.cuts:
        smashed = _features(model, images, cut)
        for each in made:
            rows += _sent(each, smashed, cut)
        if cut == model.cuts[0]:
            rows += _timed(made, smashed, model, data.train_x, data.train_y, repeats)
    return rows


def _sent(each: Codec, smashed: Tensor, cut: int) -> list[Row]:
    """Bytes and error of three clients' messages."""
    some, draw = smashed[:3], RoundingNoise(0, 1, 0).of("smashed", [0, 1, 2], always=True)
    seen, sizes = each.measured(some, draw if each.draws else None)
    error = float((seen - some).square().sum() / some.square().sum())
    name = f"codecs.cut{cut}.{each.name}"
    return [
        Row(f"{name}.bytes", sum(sizes) / (3 * BATCH), "bytes per sample"),
        Row(f"{name}.error", 100 * error, "% squared error"),
    ]


def _timed(made: list[Codec], smashed: Tensor, model: SplitModel, x: Tensor, y: Tensor, repeats: int) -> list[Row]:
    """Seconds of all clients' messages, packed and unpacked, beside a round of SFL."""
    config = with_values(Config(), scheme="sfl", clients=CLIENTS, batch=BATCH, lr=LR)
    parts = np.split(np.arange(2 * CLIENTS * BATCH), CLIENTS)
    turns: dict[str, Callable[[], object]] = {
        "sfl": partial(Simulator(config, model, Classification(CLASSES), x, y, parts).round, 1)
    }
    for each in made:
        turns[each.name] = partial(_there_and_back, each, smashed)
    seconds = interleaved_medians(turns, repeats, "formats", time.process_time)
    sfl = seconds.pop("sfl")
    return [Row("codecs.sfl", 1e3 * sfl, "ms")] + [
        Row(f"codecs.cut1.{name}.time", 100 * value / sfl, "% of an sfl round") for name, value in seconds.items()
    ]


def _there_and_back(each: Codec, smashed: Tensor) -> None:
    for one in smashed:
        each.decode(each.encode(one), one.shape)


def _trained(x: Tensor, y: Tensor) -> SplitModel:
    """The paper's CNN after some steps of SGD with batches of 64, in the order of the data."""
    model = build("cnn", SHAPE, CLASSES, seed=0)
    module = nn.Sequential(*model.blocks)
    params = list(module.parameters())
    for step in range(STEPS):
        rows = torch.arange(64 * step, 64 * (step + 1)) % len(y)
        grads = torch.autograd.grad(F.cross_entropy(module(x[rows]), y[rows]), params)
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.sub_(0.05 * g)
    return model


def _features(model: SplitModel, images: Tensor, cut: int) -> Tensor:
    """Smashed data of all clients (N, b, *d)."""
    with torch.no_grad():
        features: Tensor = nn.Sequential(*model.blocks[:cut])(images)
    return features.view(CLIENTS, BATCH, *features.shape[1:])
