"""BatchNorm, frozen and tied parameters, adapters, AdamW, clipping, a schedule and three local steps, all at once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from killing import killed_at_random
from lengths import now
from splitcast.base.config import Config, with_values
from splitcast.base.seeds import stream
from splitcast.data import Dataset
from splitcast.data.batches import draw_batches
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.run.verify import verify
from test_engine import CLASSES, SIZES, data
from test_models import distance, sim_of, weights_of
from test_run import unchained

BUSY = {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "warmup": 1, "rounds": 4}
RATES = [0.5, 1.0, 0.75, 0.25]
"""of a round with one of warm-up and three along a cosine"""


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.still = nn.Linear(27, 9).requires_grad_(False)
        self.first, self.again = nn.Linear(9, 9), nn.Linear(9, 9)
        self.again.weight = self.first.weight
        self.last, self.head = nn.BatchNorm1d(9), nn.Linear(9, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2).flatten(1)
        x = torch.tanh(self.still(x))
        return self.head(self.last(torch.tanh(self.again(torch.tanh(self.first(x))))))


def everything():
    torch.manual_seed(7)
    return Everything()


def naive(sizes, clip, halves):
    """Every client a module and an optimiser of its own; both are averaged, running statistics too, after each round.

    ``halves`` says which part a parameter is clipped with."""
    x, y, parts = data(sizes)
    rho = [size / sum(sizes) for size in sizes]
    module = everything().double()
    steps = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for t in range(1, 5):
        copies = [copy.deepcopy((module, steps)) for _ in sizes]
        for n, (mine, own) in enumerate(copies):
            own.param_groups[0]["lr"] = 0.1 * RATES[t - 1]
            for i in range(3):
                rows = parts[n][draw_batches(sizes, 6, stream(0, "batch", t, i))[n]]
                own.zero_grad()
                F.cross_entropy(mine(x[rows]), y[rows]).backward()
                named = [(k, p) for k, p in mine.named_parameters() if p.grad is not None]
                for half in {halves(k) for k, _ in named} if clip else ():
                    nn.utils.clip_grad_norm_([p for k, p in named if halves(k) == half], clip)
                own.step()
        for k, v in module.state_dict().items():
            values = [mine.state_dict()[k] for mine, _ in copies]
            v.copy_(values[0] if k.endswith("tracked") else sum(r * w for r, w in zip(rho, values, strict=True)))
        states = [own.state_dict()["state"] for _, own in copies]
        mean = {
            p: {s: sum(r * each[p][s] for r, each in zip(rho, states, strict=True)) for s in states[0][p]}
            for p in states[0]
        }
        steps.load_state_dict(steps.state_dict() | {"state": mean})
    return module.state_dict()


def in_stem(name):
    return name.startswith(("stem", "norm"))


@pytest.mark.parametrize("sizes", [[40], SIZES])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("scheme", ["sfl", "fl"])
def test_all_at_once_is_plain_pytorch(scheme, clip, sizes):
    model = SplitModel.of(everything(), torch.randn(4, 1, 6, 6))
    sim = sim_of(model, scheme, 1, 3, sizes, clip_norm=clip, **BUSY)
    for t in range(1, 5):
        sim.round(t)
    theirs = naive(sizes, clip, in_stem if scheme == "sfl" else lambda name: 0)
    assert distance(weights_of(sim), theirs) < 1e-8
    assert torch.equal(weights_of(sim)["still.weight"], everything().double().still.weight)


KINDS = {
    "all": {},
    "adapters": {"lora.rank": 2, "lora.modules": ("still", "head"), "optimizer_state": "local", "sync_every": 2},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", now(KINDS, "all"))
def test_all_at_once_resumes_exactly_after_kill_9(kind, tmp_path):
    x, y, _ = data([90])
    dataset = Dataset(x[:60].float(), y[:60], x[60:].float(), y[60:], CLASSES, "noise")
    settings = BUSY | {"rounds": 30, "checkpoint_every": 4, "eval_every": 10, "clip_norm": 0.5, "local_steps": 3}
    config = with_values(
        Config(), scheme="sfl", cut=1, clients=4, batch=6, lr=0.02, participation=0.8, **settings | KINDS[kind]
    )
    whole = train(config, tmp_path / "whole", dataset=dataset, model=everything())
    killed_at_random(config, tmp_path / "victim", 5, dataset=dataset, model=everything())
    again = train(config, tmp_path / "victim", resume=True, dataset=dataset, model=everything())
    assert unchained(tmp_path / "victim") == unchained(tmp_path / "whole")
    assert verify(tmp_path / "victim") == []
    ours, theirs = (result.model().state_dict() for result in (again, whole))
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())
