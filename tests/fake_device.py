"""Rounds on an accelerator that has no values, in a process of its own: prints what each scheme did, as JSON.

`FakeTensorMode` knows the device of every tensor and refuses to mix two. A build of torch without CUDA cannot
differentiate tensors on "cuda", not even fake ones, so the device is one that torch lets Python register, called gpu.
"""

import copy
import json
import sys
import warnings
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from splitcast.base.config import Config, with_values
from splitcast.base.transform import Transform
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import Ledger
from splitcast.schemes.schemes import SCHEMES, make_scheme
from splitcast.training.task import Classification

ROWS, CLIENTS = 60, 3
CNN = build("cnn-small", (1, 28, 28), 10, seed=0)
NORMED = SplitModel(
    [
        nn.Sequential(nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)),
        nn.Linear(16, 10).requires_grad_(False),
        nn.Linear(10, 10),
    ],
    (1, 28, 28),
)
BUSY = {"optimizer": "adamw", "clip_norm": 1.0, "local_steps": 2, "participation": 0.7, "schedule": "cosine"}
CODED = {"uplink_codec": "int4", "downlink_codec": "int8", "sync_codec": "int8", "momentum": 0.9}
reads: list[str] = []


@contextmanager
def values():
    """Where a value is asked for, there is one; on the device that makes the host wait, and is counted."""

    def read(made):
        def asked(self, *_):
            if self.device.type != "cpu":
                reads.append(sys._getframe(1).f_code.co_name)
            return made(self)

        return asked

    names = {"__float__": lambda t: 1.0, "__bool__": lambda t: True, "__int__": lambda t: 1, "item": lambda t: 1.0}
    names["tolist"] = lambda t: np.ones(t.shape).tolist()

    def numpy(self):
        if self.device.type != "cpu":
            raise TypeError(f"two devices: numpy has no {self.device.type}; .cpu() is missing")
        return np.ones(self.shape, str(self.dtype).removeprefix("torch."))

    patches = [mock.patch.object(FakeTensor, name, read(made), create=True) for name, made in names.items()]
    patches.append(mock.patch.object(FakeTensor, "numpy", numpy))
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


def rounds(scheme, model=CNN, **settings):
    """Two rounds, a move of the cut where there is one, a test, a checkpoint; returns the reads of the first round."""
    if scheme in ("sfl-replay", "sfl-tc"):  # with a step, since without values none can be searched for
        codecs = dict.fromkeys(("uplink_codec", "downlink_codec"), "transform:0.5")
        settings = codecs | {"sfl-replay.steps": 2} | settings
    given = {"scheme": scheme, "clients": CLIENTS, "batch": 4, "device": "gpu:0", "rounds": 2, "cut": 1}
    config = with_values(Config(), **given | settings)
    model = make_scheme(config).fitted(model)
    for block in range(len(model.blocks)):  # asked of values, so before they are gone
        model.stackable(block, block + 1)
        model.mixes(block, block + 1)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = copy.copy(model)
    for slot in ("_initial", "_frozen", "_buffers", "_still", "_constants"):
        setattr(model, slot, {name: mode.from_tensor(held) for name, held in getattr(model, slot).items()})
    x, y = mode.from_tensor(torch.zeros(ROWS, 1, 28, 28)), mode.from_tensor(torch.zeros(ROWS, dtype=torch.long))
    with mode, values():
        sim = Simulator(config, model, Classification(10), x, y, np.split(np.arange(ROWS), CLIENTS))
        reads.clear()
        sim.round(1)
        first = list(reads)
        if not sim.scheme.fixed_cut:
            sim.place(sim.scheme.place(2, model.depth), Ledger())
        sim.round(2)
        sim.drift()
        if not sim.scheme.personal:  # else each client is tested on its own labels, which are values
            sim.evaluate(x, y)
        stored, about = sim.snapshot(2)
        sim.resume({name: held.cpu() for name, held in stored.items()}, about, 2)
        sim.round(3)
    return first


def told(scheme, **settings):
    try:
        return rounds(scheme, **settings)
    except Exception as error:  # of any kind: it is what the test looks at
        return f"{type(error).__name__}: {error}".splitlines()[0]


def left_on_the_host(method, change):
    """A round of sfl-ga with one tensor where it should not be."""
    kept = getattr(Simulator, method)
    with mock.patch.object(Simulator, method, lambda self, *args: change(kept(self, *args))):
        return told("sfl-ga")


def left_on_the_device():
    """A codec that works on the host, and does not fetch what it codes."""
    with mock.patch.object(Transform, "_sent", lambda self, x: (x.numpy().tobytes(), None)):
        return told("psl", uplink_codec="transform:0.5")


def one_weight(weights):
    name = list(weights.params)[-1]
    weights.params[name] = weights.params[name].cpu()
    return weights


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # addresses of fake tensors mean nothing, and nothing is made of them
    _setup_privateuseone_for_python_backend("gpu")
    found = {scheme: told(scheme) for scheme in sys.argv[1:] or SCHEMES}
    found |= {f"{scheme}, busy": told(scheme, model=NORMED, **BUSY) for scheme in ("sfl-ga", "sfl", "fl", "sl")}
    found |= {f"{scheme}, coded": told(scheme, **CODED) for scheme in ("sfl", "psl", "sfl-gb")}
    for codec in ("rotated:4", "c3sl:2"):  # others decide by values, of which there are none
        found[f"psl, {codec}"] = told("psl", uplink_codec=codec, downlink_codec=codec, sync_every=2)
    found["sfl, in turns"] = told("sfl-ga", partition="dirichlet", sync_every=2)
    lost = {
        "samples": left_on_the_host("_here", lambda tensor: tensor.cpu()),
        "a weight": left_on_the_host("initial", one_weight),
        "a message": left_on_the_device(),
    }
    print(json.dumps({"found": found, "lost": lost}))
