"""What every wire format sends and loses, and what it costs: smashed data of the paper's CNN, MNIST's first images.

The network has made 100 steps of SGD on embedded MNIST, so that its features are features of something. Bytes are those
packed, per sample of a batch of 32; the error is the squared one, relative to the energy of what is sent. Encoding and
decoding of all clients' messages at cut 1 are timed beside a round of SFL, in seconds of the processor, and so is all
that a round of `sfl-tc` codes at every cut: smashed data of all clients, directions once, which all of them decode, and
client halves there and back, of which every second round has some where halves are averaged as often; and of
`sfl-replay` at cut 1: smashed data of clients that code alike, and what the server learns of the pool for that.
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
from splitcast.base.transform import Transform
from splitcast.bench.engine import CLASSES, LR, SHAPE
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.data import load
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.schemes.basis import factorise
from splitcast.schemes.feedback import Basis
from splitcast.schemes.replay import AGREED, Replay
from splitcast.schemes.schemes import SflTc
from splitcast.training.differences import as_rows
from splitcast.training.task import Classification

CLIENTS, BATCH, STEPS = 10, 32, 100
FORMATS = (
    *("fp32", "fp16", "int8", "int4", "int2", "rotated:4", "rotated:2", "lloyd:4", "lloyd:2"),
    *("transform:1", "transform:2.5", "transform:4", "transform:150B", "transform:100B", "transform:5%"),
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
    turns: dict[str, Callable[[], object]] = {}
    smashed = _features(model, images, 1)
    for each in made:
        turns[f"cut1.{each.name}"] = partial(_there_and_back, each, smashed)
    often = {}
    for cut in model.cuts:
        scheme = SflTc(with_values(Config(), scheme="sfl-tc", cut=cut))
        often[f"cut{cut}.sfl-tc.halves"] = 1 / scheme.sync_every
        turns |= _coded(scheme, model, images, data.train_y[: CLIENTS * BATCH], cut)
    turns |= _coded_alike(smashed)
    return rows + _timed(turns, often, model, data.train_x, data.train_y, repeats)


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


def _coded(scheme: SflTc, model: SplitModel, images: Tensor, y: Tensor, cut: int) -> dict[str, Callable[[], object]]:
    """What a round of a scheme codes and decodes."""
    smashed = _features(model, images, cut)
    flat = smashed.flatten(0, 1).requires_grad_()
    (grads,) = torch.autograd.grad(F.cross_entropy(nn.Sequential(*model.blocks[cut:])(flat), y), flat)
    assert isinstance(scheme.feedback, Basis)
    found = factorise(grads.flatten(1), torch.full((len(grads),), 1 / len(grads)), scheme.feedback.rank)
    half = torch.randn(model.profile()[cut - 1].client_parameters, generator=torch.Generator().manual_seed(0))
    return {
        f"cut{cut}.sfl-tc.smashed": partial(_there_and_back, scheme.uplink, smashed.detach()),
        f"cut{cut}.sfl-tc.directions": partial(_to_all, scheme.downlink, found.basis.view(-1, *grads.shape[1:])),
        f"cut{cut}.sfl-tc.halves": partial(_averaged, scheme.sync, as_rows(half)),
    }


def _coded_alike(smashed: Tensor) -> dict[str, Callable[[], object]]:
    """What a round of `sfl-replay` codes and decodes, and learns."""
    own = Replay.uplink
    assert isinstance(own, Transform)
    pool = own.through(smashed).flatten(0, 1)[:AGREED]
    found = own.learned(pool)
    assert found is not None
    before = (found[1], own.value)
    return {
        "cut1.sfl-replay.smashed": partial(_there_and_back, own.alike(*found), smashed),
        "cut1.sfl-replay.learned": partial(own.learned, pool, before),
    }


def _timed(
    turns: dict[str, Callable[[], object]],
    often: dict[str, float],
    model: SplitModel,
    x: Tensor,
    y: Tensor,
    repeats: int,
) -> list[Row]:
    """Seconds of each, if not in every round so ``often``, beside a round of SFL."""
    config = with_values(Config(), scheme="sfl", clients=CLIENTS, batch=BATCH, lr=LR)
    parts = np.split(np.arange(2 * CLIENTS * BATCH), CLIENTS)
    whole = partial(Simulator(config, model, Classification(CLASSES), x, y, parts).round, 1)
    seconds = interleaved_medians({"sfl": whole, **turns}, repeats, "formats", time.process_time)
    sfl = seconds.pop("sfl")
    shares = {name: 100 * often.get(name, 1.0) * value / sfl for name, value in seconds.items()}
    for own in (*(f"cut{cut}.{SflTc.name}" for cut in model.cuts), f"cut1.{Replay.name}"):
        shares[f"{own}.all"] = sum(share for name, share in shares.items() if name.startswith(f"{own}."))
    rows = [Row("codecs.sfl", 1e3 * sfl, "ms")]
    return rows + [Row(f"codecs.{name}.time", share, "% of an sfl round") for name, share in shares.items()]


def _there_and_back(each: Codec, smashed: Tensor) -> None:
    for one in smashed:
        each.decode(each.encode(one), one.shape)


def _to_all(each: Codec, message: Tensor) -> None:
    """A broadcast, decoded by all clients."""
    payload = each.encode(message)
    for _ in range(CLIENTS):
        each.decode(payload, message.shape)


def _averaged(each: Codec, half: Tensor) -> None:
    """Halves of all clients, and the average back."""
    for _ in range(CLIENTS):
        each.decode(each.encode(half), half.shape)
    _to_all(each, half)


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
