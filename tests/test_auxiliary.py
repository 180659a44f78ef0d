"""Schemes with auxiliary heads: each against a plain loop over clients in float64, and its bytes in closed form."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengths import now
from resuming import resumes_exactly
from splitcast import SplitModel
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.data import from_tensors
from splitcast.engine.dry import dry_round
from splitcast.model.heads import linear_head
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.studies.plan import plan
from test_federation import IMAGES, Wired, difference, federation

CLIENTS, BATCH, LR = 3, 4, 0.1
SCHEMES = {
    "local-loss": {},
    "cse-fsl": {"cse-fsl.every": 2},
    "fsl-sage": {"fsl-sage.every": 1, "fsl-sage.align_every": 2, "fsl-sage.fits": 2},
}


def blocks():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh())
    return [first, nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3)]


def tiny():
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=rng, dtype=torch.float64)
    y = (x[:, :3] + 0.1 * torch.randn(40, 3, generator=rng)).argmax(1)
    x = x.view(40, 1, 2, 3)
    return from_tensors(x[:30], y[:30], x[30:], y[30:], name="tiny")


def simulator(scheme, tau, **values):
    settings = {"scheme": scheme, "clients": CLIENTS, "batch": BATCH, "lr": LR, "local_steps": tau, "dtype": "float64"}
    config = with_values(Config(), **settings, **SCHEMES[scheme], **values)
    return make_simulator(config, tiny(), SplitModel(blocks(), (1, 2, 3)))


class Naive:
    """One client after another, with modules and autograd only."""

    def __init__(self, scheme):
        whole = nn.Sequential(*blocks()).double()
        head = nn.Linear(5, 3).double()
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.scheme, self.server = scheme, whole[1:]
        self.clients = [(copy.deepcopy(whole[:1]), copy.deepcopy(head)) for _ in range(CLIENTS)]

    def round(self, t, batches):
        copies = [copy.deepcopy(self.server) for _ in self.clients]
        for i in range(len(batches[0])):
            done = (t - 1) * len(batches[0]) + i
            smashed = [half(batches[n][i][0]) for n, (half, _) in enumerate(self.clients)]
            if self.scheme == "local-loss":
                for n, server in enumerate(copies):
                    descend(server, smashed[n].detach(), batches[n][i][1])
            elif done % (2 if self.scheme == "cse-fsl" else 1) == 0:
                for n, out in enumerate(smashed):
                    descend(self.server, out.detach(), batches[n][i][1])
            for n, (half, head) in enumerate(self.clients):
                y, out = batches[n][i][1], smashed[n].detach().requires_grad_()
                if self.scheme == "fsl-sage":
                    if done % 2 == 0:
                        told = gradient(self.server, out, y).detach()
                        for _ in range(2):
                            apart = BATCH * (gradient(head, out, y) - told).square().sum()
                            step(head, torch.autograd.grad(apart, list(head.parameters())))
                    back = gradient(head, out, y).detach()
                else:
                    back = descend(head, out, y)
                step(half, torch.autograd.grad(smashed[n], list(half.parameters()), back))
        if self.scheme == "local-loss":
            average(copies, [self.server])
        average([half for half, _ in self.clients], [half for half, _ in self.clients])
        average([head for _, head in self.clients], [head for _, head in self.clients])

    def params(self):
        half, head = self.clients[0]
        return torch.cat([p.detach().flatten() for part in (half, self.server, head) for p in part.parameters()])


def gradient(module, x, y):
    (found,) = torch.autograd.grad(F.cross_entropy(module(x), y), x, create_graph=True)
    return found


def descend(module, x, y):
    x = x.detach().requires_grad_()
    *grads, at_input = torch.autograd.grad(F.cross_entropy(module(x), y), [*module.parameters(), x])
    step(module, grads)
    return at_input


@torch.no_grad()
def step(module, grads):
    for p, g in zip(module.parameters(), grads, strict=True):
        p.sub_(LR * g)


@torch.no_grad()
def average(modules, targets):
    for params in zip(*(m.parameters() for m in modules), strict=True):
        mean = sum(params) / len(params)
        for target in targets:
            dict(target.named_parameters())[name_of(modules[0], params[0])].copy_(mean)


def name_of(module, parameter):
    return next(name for name, p in module.named_parameters() if p is parameter)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tau", [1, 3])
def test_equal_to_a_loop_over_clients(scheme, tau):
    sim, naive = simulator(scheme, tau), Naive(scheme)
    for t in range(1, 5):
        rows = [sim.rows(t, i, range(CLIENTS)) for i in range(tau)]
        naive.round(t, [[(sim.x[r[n]], sim.y[r[n]]) for r in rows] for n in range(CLIENTS)])
        sim.round(t)
    held = sim.state.averaged(sim.weights)
    ours = torch.cat([held[k].flatten() for k in [*(k for k in held if k[0] in "012"), "3.1.weight", "3.1.bias"]])
    assert torch.allclose(ours, naive.params(), rtol=0, atol=1e-10)
    assert float(ours[-18:].norm()) > 0.01  # heads began at zero


SMASHED, MODEL = 4 * BATCH * 5, 4 * (35 + 18)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_in_closed_form_and_in_the_dry_round(scheme):
    sim = simulator(scheme, 1)
    for t in (1, 2, 3):
        uploads = scheme != "cse-fsl" or t % 2 == 1
        expected = {"up.model": CLIENTS * MODEL, "down.model": MODEL}
        if uploads:
            expected |= {"up.smashed": CLIENTS * SMASHED, "up.labels": CLIENTS * BATCH}
        if scheme == "fsl-sage" and t % 2 == 1:
            expected["down.gradient"] = CLIENTS * SMASHED
        report = sim.round(t)
        assert report.ledger.by_kind() == expected
        dry = dry_round(
            sim.scheme, sim.model, sim.task, sim.state.placement, sim.optimiser, t, [0, 1, 2], batch=BATCH, steps=1
        )
        assert dry.events == report.ledger.events


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_sites_as_in_the_simulator(scheme):
    config = with_values(
        Config(), scheme=scheme, clients=3, batch=8, arch="cnn-small", local_steps=2, momentum=0.5, **SCHEMES[scheme]
    )
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 5):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert difference(fed, sim) < 1e-6


def test_a_stopped_run_goes_on_exactly(tmp_path):
    config = with_values(Config(), scheme="cse-fsl", clients=3, batch=8, arch="cnn-small", momentum=0.9, rounds=4)
    resumes_exactly(with_values(config, checkpoint_every=2), tmp_path / "run", 3)


def test_heads_by_shape():
    assert sum(p.numel() for p in linear_head(0)((8,), (3,)).parameters()) == 27
    assert linear_head(2)((4, 7, 7), (10,))(torch.zeros(5, 4, 7, 7)).shape == (5, 10)
    assert linear_head(0)((4, 3, 3), (10,))(torch.zeros(5, 4, 3, 3)).shape == (5, 10)
    assert linear_head(0)((6, 16), (6, 50))(torch.zeros(5, 6, 16)).shape == (5, 6, 50)
    with pytest.raises(SplitcastError, match="to one vector"):
        linear_head(0)((4, 3, 3), (2, 10))


def test_plans_at_every_cut_and_a_policy_that_moves_is_refused():
    config = with_values(Config(), scheme="cse-fsl", arch="cnn-small")
    assert len(plan(config, draws=5).cuts) == 4
    with pytest.raises(SplitcastError, match="cse-fsl needs fixed"):
        train(with_values(config, policy="greedy", rounds=1))
    with pytest.raises(SplitcastError, match="no multiple of every = 3"):
        train(with_values(config, scheme="fsl-sage", rounds=1, **{"fsl-sage.every": 3}))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tau", now([1, 2], 2))
def test_sites_step_in_rounds_that_end_with_an_upload(scheme, tau):
    """Nothing comes back after the last upload of a round without averaging; a site steps all the same."""
    config = with_values(Config(), scheme=scheme, clients=3, batch=8, arch="cnn-small", sync_every=0, local_steps=tau)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    before = fed.halves.average().params
    for t in range(1, 4):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
        assert difference(fed, sim) < 1e-5
    moved = fed.halves.average().params
    assert all(not torch.equal(moved[name], weight) for name, weight in before.items())
