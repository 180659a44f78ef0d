"""Layers that mix a batch, buffers and frozen parameters: one client's samples at a time, and all of it moves along."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from naive import NaiveRun
from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.data.batches import draw_batches, participants
from splitcast.engine import simulator
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.schemes.messages import Ledger
from splitcast.training.task import Classification
from splitcast.training.weights import Weights
from test_engine import CLASSES, SIZES, at, close, data
from test_federation import IMAGES, Wired, difference, federation

SCHEMES = ["sfl-ga", "sfl", "psl", "fl", "sl"]


class Centred(nn.Module):
    """Subtracts the batch's mean: no BatchNorm, no buffer, and yet it mixes."""

    def forward(self, x):
        return x - x.mean(0)


def normed():
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.BatchNorm1d(7), nn.ReLU()),
        nn.Linear(7, CLASSES),
    ]


def centred():
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), Centred(), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(27, 7), nn.Tanh()),
        nn.Sequential(nn.Linear(7, 7), Centred(), nn.ReLU()),
        nn.Linear(7, CLASSES),
    ]


def frozen():
    made = normed()
    made[0][0].requires_grad_(False)
    made[2][1].weight.requires_grad_(False)
    return made


MODELS = {"normed": normed, "centred": centred, "frozen": frozen}


def sim_of(made, scheme, cut, tau, **values):
    x, y, parts = data(SIZES)
    usual = {"scheme": scheme, "cut": cut, "local_steps": tau, "batch": 6, "lr": 0.1, "dtype": "float64"}
    config = with_values(Config(), **usual | {"clients": len(SIZES)} | values)
    return Simulator(config, SplitModel(made(), (1, 6, 6)), Classification(CLASSES), x, y, parts)


def both(made, scheme, cut, tau, rounds=3, **values):
    """The engine and the naive loop on the same batches: trained weights and buffers of each."""
    sim = sim_of(made, scheme, cut, tau, **values)
    ref = NaiveRun(made(), cut, scheme, 0.1, sim.train.momentum, clients=len(SIZES))
    x, y, parts = data(SIZES)
    for t in range(1, rounds + 1):
        sim.round(t)
        ids = participants(sim.train, len(SIZES), t).tolist()
        total = sum(len(parts[n]) for n in ids)
        batches = {n: [] for n in ids}
        for i in range(tau):
            drawn = draw_batches(sim.sizes, 6, stream(0, "batch", t, i))
            for n in ids:
                rows = parts[n][drawn[n]]
                batches[n].append((x[rows], y[rows]))
        ref.round(batches, {n: len(parts[n]) / total for n in ids})
    weights, rho = sim.state.averaged(sim.weights), sim.sizes / sim.sizes.sum()
    names = [name for name, _ in nn.Sequential(*made()).named_parameters()]
    ours = torch.cat([weights[k].flatten() for k in names])
    buffers = [weights[k].flatten() for k, b in nn.Sequential(*made()).named_buffers() if b.is_floating_point()]
    theirs = torch.cat([p.flatten() for p in ref.averaged(rho)])
    their_buffers = [b.flatten() for b in ref.averaged_buffers(rho)]
    return ours, theirs, torch.cat([*buffers, ours[:0]]), torch.cat([*their_buffers, ours[:0]])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cut", now([1, 2, 3], 1, 3))
@pytest.mark.parametrize("tau", now([1, 3], 3))
def test_the_engine_equals_the_naive_loop(model, scheme, cut, tau):
    ours, theirs, buffers, their_buffers = both(MODELS[model], scheme, cut, tau)
    assert close(ours, theirs)
    assert len(buffers) == len(their_buffers) and (not len(buffers) or close(buffers, their_buffers))


@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl", "psl"])
def test_so_it_does_with_some_of_the_clients_and_momentum(scheme):
    ours, theirs, buffers, their_buffers = both(normed, scheme, 2, 1, 5, momentum=0.9, participation=0.7, dropout=0.2)
    assert close(ours, theirs) and close(buffers, their_buffers)


@pytest.mark.parametrize("budget", ["ACTIVATION_BYTES", "CHUNK_BYTES"])
@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl"])
def test_chunks_and_passes_that_run_again_change_nothing(scheme, budget, monkeypatch):
    whole = both(normed, scheme, 2, 1)
    monkeypatch.setattr(simulator, "CHUNK_BYTES", 1)
    monkeypatch.setattr(simulator, budget, 1)
    again = both(normed, scheme, 2, 1)
    assert close(again[0], whole[0]) and close(again[2], whole[2])


def test_frozen_parameters_stay_and_never_travel():
    sim = sim_of(frozen, "sfl", 1, 1)
    start = {k: v.clone() for k, v in sim.state.averaged(sim.weights).items()}
    ledger = sim.round(1).ledger
    after = sim.state.averaged(sim.weights)
    assert torch.equal(after["0.0.weight"], start["0.0.weight"]) and not torch.equal(
        after["3.weight"], start["3.weight"]
    )
    assert ledger.by_kind()["up.model"] == 4 * 4 * (
        6 + 7
    )  # weight and bias of BatchNorm, its two statistics, its count
    assert sim.model.client_size(1) == 27 + 3 + 6, "privacy counts them"


def test_mixing_is_found_by_asking():
    assert [SplitModel(normed(), (1, 6, 6)).mixes(k, k + 1) for k in range(4)] == [True, False, True, False]
    assert [SplitModel(centred(), (1, 6, 6)).mixes(k, k + 1) for k in range(4)] == [True, False, True, False]
    dropping = [nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(36, CLASSES)]
    assert not SplitModel(dropping, (1, 6, 6)).mixes(0, 2)


def test_modules_are_left_as_they_were_given():
    made = normed()
    made[2][2].eval()
    before = copy.deepcopy(nn.Sequential(*made).state_dict())
    sim = sim_of(lambda: made, "psl", 1, 1)
    sim.round(1)
    sim.evaluate(sim.x[:5], sim.y[:5])
    assert not made[2][2].training and made[0][1].training
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), nn.Sequential(*made).state_dict().values(), strict=True)
    )


def test_moving_the_cut_changes_no_logit():
    sim = sim_of(frozen, "sfl-ga", 1, 1)
    sim.round(1)

    def logits():
        with sim.model.evaluating():
            return sim.model.forward(sim.state.averaged(sim.weights), sim.x, 0, 4)

    for cut in (3, 1, 2):
        before = logits()
        sim.place(at(sim, cut), Ledger())
        assert close(logits(), before)
    sim.round(2)


def net(input_shape, classes):
    """For the round loop: BatchNorm on both sides, a frozen layer."""
    blocks = [
        nn.Sequential(nn.Conv2d(1, 4, 5, 2, 2), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(196, 16), nn.ReLU()),
        nn.Linear(16, classes),
    ]
    blocks[2][0].bias.requires_grad_(False)
    return blocks


def settings(**values):
    usual = {"arch": "test_buffers:net", "clients": 3, "batch": 8, "rounds": 6, "sizes": "unequal", "lr": 0.05}
    return with_values(Config(), **usual | values)


@pytest.mark.parametrize("scheme", now([*SCHEMES, "epsl-cut"], *SCHEMES[::2]))
@pytest.mark.parametrize("tau", now([1, 2], 2))
def test_sites_do_what_the_simulator_does(scheme, tau):
    config = settings(scheme=scheme, local_steps=tau, cut=2, momentum=0.5)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 6):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
    assert difference(fed, sim) < 1e-5
    tested = [engine.evaluate(IMAGES.test_x[:200], IMAGES.test_y[:200])["loss"] for engine in (fed, sim)]
    assert tested[0] == pytest.approx(tested[1], abs=1e-4), "with the same running statistics"


@pytest.mark.parametrize("scheme", now(SCHEMES, "sfl-ga", "sl"))
def test_a_stopped_run_resumes_exactly(scheme, tmp_path):
    config = settings(scheme=scheme, checkpoint_every=2, participation=0.7, eval_every=1)

    assert resumes_exactly(config, tmp_path / "run", stop_at=5)


def test_the_trained_model_loads_into_plain_torch():
    result = train(settings(rounds=3))
    whole = nn.Sequential(*net((1, 28, 28), 10))
    whole.load_state_dict(result.engine.state.averaged(result.engine.weights))
    logits = whole.eval()(IMAGES.test_x)
    assert float((logits.argmax(1) == IMAGES.test_y).float().mean()) == pytest.approx(result.summary["accuracy"])


def test_identical_updates_need_layers_that_do_not_mix():
    with pytest.raises(SplitcastError, match="client_update"):
        sim_of(normed, "sfl-ga", 1, 1, client_update="identical")


def test_statistics_of_one_client_never_reach_another():
    """The first client's features are the same whoever else takes part."""
    alone, together = (sim_of(normed, "psl", 1, 1) for _ in range(2))
    rows = alone.rows(1, 0, np.arange(4))
    together.round(1)
    module = nn.Sequential(*normed()).double()
    module(alone.x[rows[0]])
    mine = {k: v[0] for k, v in together.state.client.slots["buffers"].items()}
    assert torch.allclose(mine["0.1.running_mean"], module[0][1].running_mean, atol=1e-12)


def test_a_clone_shares_what_is_frozen_and_nothing_else():
    slots = {"trained": {"0.a": torch.ones(2)}, "buffers": {"0.b": torch.ones(1)}, "frozen": {"0.c": torch.ones(3)}}
    made = Weights(slots, pending={"0.a": torch.ones(2)})
    other = made.clone()
    made.params["0.a"].zero_()
    made.beside("buffers")["0.b"].zero_()
    assert other.params["0.a"].tolist() == [1, 1] and other.beside("buffers")["0.b"].tolist() == [1]
    assert other.beside("frozen")["0.c"] is made.beside("frozen")["0.c"] and other.pending == {}


def test_a_client_half_of_buffers_alone_resumes_and_is_counted(tmp_path):
    """Nothing is trained there; running statistics of 4 channels, their mean, variance and count, travel."""

    def made():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).requires_grad_(False)
        return [first, nn.Linear(144, 10)]

    def stop(record):
        if record.round == 3:
            raise KeyboardInterrupt

    config = with_values(Config(), scheme="sfl", sync_every=2, clients=3, batch=8, rounds=4, checkpoint_every=1)
    whole = train(config, model=made()).rounds
    assert whole[1].kinds["up.model"] == 3 * 4 * (4 + 4 + 1) and "up.model" not in whole[0].kinds
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", model=made(), on_round=stop)
    assert train(config, tmp_path / "run", resume=True, model=made()).rounds == whole
