"""Optimisers are those of torch: one client is plain PyTorch, copies step each on its own, and sites do the same."""

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from resuming import resumes_exactly
from splitcast.base.config import Config, TrainConfig, with_values
from splitcast.base.errors import SplitcastError
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.training.factored import Factors
from splitcast.training.optimiser import Scheduled, make_optimiser
from splitcast.training.task import Classification
from splitcast.training.weights import Weights
from test_engine import CLASSES, blocks, data, flat
from test_federation import IMAGES, Wired, difference, federation

TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}


def ours(name, scheme, cut, tau, *, sizes=(20,), rounds=4, **values):
    x, y, parts = data(list(sizes))
    usual = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "batch": 6, "dtype": "float64"}
    config = with_values(
        Config(),
        scheme=scheme,
        cut=cut,
        local_steps=tau,
        rounds=rounds,
        optimizer=name,
        clients=len(sizes),
        **usual | values,
    )
    sim = Simulator(config, SplitModel(blocks(), (1, 6, 6)), Classification(CLASSES), x, y, parts)
    for t in range(1, rounds + 1):
        sim.round(t)
    return sim


def plain(name, sim, cut, tau, rounds=4, *, clip=0.0, rate=lambda t: 1.0):
    """The same training of a single client in plain PyTorch; each half is clipped on its own."""
    x, y, _ = data([20])
    module = nn.Sequential(*blocks()).double()
    optimiser = TORCH[name](module.parameters())
    for t in range(1, rounds + 1):
        for group in optimiser.param_groups:
            group["lr"] = 0.05 * rate(t)
        for i in range(tau):
            rows = sim.rows(t, i, np.array([0]))[0]
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            for half in (module[:cut], module[cut:]) if clip else ():
                nn.utils.clip_grad_norm_(half.parameters(), clip)
            optimiser.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl", "psl", "fl", "sl"])
@pytest.mark.parametrize("tau", now([1, 3], 3))
def test_one_client_is_plain_pytorch(name, scheme, tau):
    sim = ours(name, scheme, 2, tau)
    assert float((flat(sim) - plain(name, sim, 2, tau)).abs().max()) < 1e-8


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_clipping_is_that_of_torch_for_each_half(name):
    sim = ours(name, "psl", 2, 3, clip_norm=0.05)
    assert float((flat(sim) - plain(name, sim, 2, 3, clip=0.05)).abs().max()) < 1e-8


@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_schedules_change_the_rate_of_every_round(schedule):
    expected = {
        "cosine": [1 / 3, 2 / 3, 1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4],
        "step": [1 / 3, 2 / 3, 1, 1, 0.1, 0.01],
    }
    sim = ours("adam", "psl", 2, 1, rounds=6, schedule=schedule, warmup=2)
    reference = plain("adam", sim, 2, 1, rounds=6, rate=lambda t: expected[schedule][t - 1])
    assert float((flat(sim) - reference).abs().max()) < 1e-8


@pytest.mark.parametrize("name", ["nesterov", "adam", "adamw"])
@pytest.mark.parametrize("tau", [1, 3])
def test_sfl_is_fedavg_with_every_optimiser_that_steps_each_client(name, tau):
    several = (30, 12, 5, 21)
    a, b = (ours(name, scheme, 2, tau, sizes=several) for scheme in ("sfl", "fl"))
    assert float((flat(a) - flat(b)).abs().max()) < 1e-8


@pytest.mark.parametrize("name", now(["nesterov", "adam", "adamw"], "adamw"))
@pytest.mark.parametrize("scheme", now(["sfl-ga", "sfl", "fl", "sl"], "sfl", "sl"))
def test_sites_do_what_the_simulator_does(name, scheme):
    config = with_values(
        Config(), clients=3, arch="cnn-small", batch=8, rounds=6, scheme=scheme, local_steps=2, optimizer=name,
        lr=0.002, momentum=0.9, weight_decay=0.01, schedule="cosine", warmup=2, clip_norm=0.5,
    )  # fmt: skip
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 7):
        mine, theirs = fed.round(t), sim.round(t)
        assert mine.ledger.messages == theirs.ledger.messages
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-4)
    assert difference(fed, sim) < 1e-3  # sqrt(v) magnifies last bits of tiny gradients


@pytest.mark.parametrize("name", now(["nesterov", "adamw"], "adamw"))
def test_a_stopped_run_resumes_exactly(name, tmp_path):
    config = with_values(
        Config(), arch="cnn-small", rounds=8, checkpoint_every=3, optimizer=name, momentum=0.9, schedule="cosine",
        lr=0.003, participation=0.7, clip_norm=1.0, policy="random",
    )  # fmt: skip

    assert resumes_exactly(config, tmp_path / "run", stop_at=5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("how", ["in one pass", "step by step", "from factors"])
def test_copies_that_have_made_different_numbers_of_steps(name, how):
    """Three clients, the second of whom stays away once; memory in another order has no pass of its own."""
    draw = torch.Generator().manual_seed(4)
    start = torch.randn(3, 4, 5, generator=draw, dtype=torch.float64)
    factors = torch.randn(3, 3, 2, 9, generator=draw, dtype=torch.float64)  # steps, clients, rows, 4 + 5
    mine = start.transpose(1, 2).contiguous().transpose(1, 2) if how == "step by step" else start.clone()
    optimiser = make_optimiser(TrainConfig(optimizer=name, lr=0.05, weight_decay=0.1))
    state = {"opt/mean": torch.zeros_like(mine), "opt/square": torch.zeros_like(mine), "opt/steps": mine.new_zeros(3)}
    weights = Weights({slot: {"0.w": v} for slot, v in ({"trained": mine} | state).items()}, stacked=True)
    for k, step in enumerate(factors):
        gradient = Factors(step[..., :4].contiguous(), step[..., 4:].contiguous())
        for rows in (slice(0, 1), slice(2, 3)) if k == 1 else (slice(0, 3),):
            some = Factors(gradient.left[rows], gradient.right[rows])
            weights.step_rows(optimiser, {"0.w": some if how == "from factors" else some.formed()}, rows)
    for n in range(3):
        p = start[n].clone().requires_grad_()
        reference = TORCH[name]([p])
        for k, step in enumerate(factors):
            if (n, k) != (1, 1):
                p.grad = step[n, :, :4].T @ step[n, :, 4:]
                reference.step()
        assert torch.allclose(weights.params["0.w"][n], p, atol=1e-12, rtol=0)
    assert weights.slots["opt/steps"]["0.w"].tolist() == [3, 2, 3]


def test_state_travels_and_is_counted():
    config = with_values(Config(), arch="cnn-small", scheme="sfl", rounds=1, optimizer="adam")
    half = 4 * 25 + 4
    assert train(config).rounds[0].kinds["up.model"] == 10 * 4 * (3 * half + 2)  # weights, two moments, two step counts


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimizer": "nesterov"}, "momentum: nesterov needs one above 0"),
        ({"schedule": "cosin"}, "schedule: unknown 'cosin'"),
        ({"optimizer": "test_optimiser:rateless", "schedule": "step"}, "schedule: Rateless has no lr"),
        ({"optimizer": "test_optimiser:rateless", "weight_decay": 0.1}, "weight_decay: 0.1 is not known"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"clip_norm": -1.0}, "clip_norm"),
    ],
)
def test_bad_settings_are_one_line(values, words):
    with pytest.raises(SplitcastError, match=words):
        make_optimiser(TrainConfig(**values))


class Rateless:
    linear = True


def rateless(lr, momentum):
    return Rateless()


def test_constant_rates_are_left_alone():
    made = make_optimiser(TrainConfig(lr=0.3))
    assert isinstance(made, Scheduled) and made.begin(7).lr == 0.3
    assert SplitModel(blocks(), (1, 6, 6)).depth == 5


def test_state_that_rounding_would_spoil_stays_at_home():
    """Squares of gradients, where halves travel as rounded differences; what is asked for is done."""
    found = {
        (name, state, exact): make_optimiser(TrainConfig(optimizer=name, optimizer_state=state), exact=exact).at_sync
        for name in ("sgd", "adamw")
        for state in ("auto", "average")
        for exact in (True, False)
    }
    assert [key for key, at_sync in found.items() if at_sync != "average"] == [("adamw", "auto", False)]
    assert found["adamw", "auto", False] == "local"
