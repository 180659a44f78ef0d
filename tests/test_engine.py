"""The engine against the naive loop, and the identities between schemes, in float64 to 1e-10."""

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from naive import NaiveRun
from splitcast.base.config import Config, with_values
from splitcast.base.seeds import stream
from splitcast.data.batches import draw_batches, participants
from splitcast.engine import simulator
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.training import factored
from splitcast.training.task import Classification

SIZES = [30, 12, 5, 21]
CLASSES = 3


def blocks():
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()),
        nn.Flatten(),
        nn.Sequential(nn.Linear(36, 7), nn.ReLU()),
        nn.Linear(7, CLASSES),
    ]


def data(sizes):
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), 1, 6, 6)))
    y = torch.from_numpy(rng.integers(CLASSES, size=sum(sizes)))
    order = rng.permutation(sum(sizes))
    return x, y, np.split(order, np.cumsum(sizes)[:-1])


def engine(name, cut, tau, *, sizes=SIZES, split=None, made=blocks, **train):
    x, y, parts = data(sizes)
    settings = {"scheme": name, "cut": cut, "batch": 6, "local_steps": tau, "lr": 0.1, "dtype": "float64"}
    config = with_values(Config(), clients=len(sizes), **(settings | train), **(split or {}))
    return Simulator(config, SplitModel(made(), (1, 6, 6)), Classification(CLASSES), x, y, parts)


def at(engine, cut):
    return engine.scheme.place(cut, engine.model.depth)


def flat(sim):
    params = sim.state.averaged(sim.weights)
    return torch.cat([params[k].flatten() for k in sim.model.initial()])


def run(sim, rounds=3):
    for t in range(1, rounds + 1):
        sim.round(t)
    return flat(sim)


def naive_after(sim, cut, rounds=3, **options):
    """The naive run on the very batches the engine draws."""
    ref = NaiveRun(blocks(), cut, sim.scheme.name, 0.1, sim.train.momentum, clients=len(sim.sizes), **options)
    x, y, parts = data(sim.sizes)
    for t in range(1, rounds + 1):
        ids = participants(sim.train, len(sim.sizes), t).tolist()
        total = sum(len(parts[n]) for n in ids)
        batches = {n: [] for n in ids}
        for i in range(sim.train.local_steps):
            drawn = draw_batches(sim.sizes, sim.train.batch, stream(sim.train.seed, "batch", t, i))
            for n in ids:
                rows = parts[n][drawn[n]]
                batches[n].append((x[rows], y[rows]))
        ref.round(batches, {n: len(parts[n]) / total for n in ids})
    return torch.cat([p.flatten() for p in ref.averaged(sim.sizes / sim.sizes.sum())])


def close(a, b):
    return float((a - b).abs().max()) < 1e-10


@pytest.mark.parametrize("cut", now([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "psl", "epsl-cut", "fl", "sl"])
def test_engine_equals_the_naive_loop(name, cut, tau):
    sim = engine(name, cut, tau)
    assert close(run(sim), naive_after(sim, cut))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["sfl-ga", "fl"])
def test_few_rows_equal_the_naive_loop(name, batch):
    sim = engine(name, 4, 3, batch=batch)
    assert close(run(sim), naive_after(sim, 4))


@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "psl", "fl", "sl"])
@pytest.mark.parametrize("tau", [1, 3])
def test_momentum_participation_and_dropout_equal_the_naive_loop(name, tau):
    sim = engine(name, 2, tau, momentum=0.9, participation=0.8, dropout=0.3)
    assert close(run(sim, 5), naive_after(sim, 2, 5))


@pytest.mark.parametrize("name", ["sfl-ga", "psl", "epsl-cut", "sfl"])
@pytest.mark.parametrize("tau", [1, 3])
def test_identical_update_equals_the_naive_loop(name, tau):
    sim = engine(name, 2, tau, split={"client_update": "identical"}, momentum=0.5)
    assert close(run(sim), naive_after(sim, 2, identical=True))
    assert sim.drift() == 0


@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "epsl-cut", "sl"])
def test_fp16_on_both_links_equals_the_naive_loop(name):
    sim = engine(name, 1, 3, split={"uplink_codec": "fp16", "downlink_codec": "fp16"})
    assert close(run(sim), naive_after(sim, 1, fp16=True))


@pytest.mark.parametrize("name", now(["sfl-ga", "sfl", "psl", "epsl-cut", "fl", "sl"], "sfl-ga", "sfl", "sl"))
@pytest.mark.parametrize("tau", now([1, 3], 3))
@pytest.mark.parametrize("budget", ["ACTIVATION_BYTES", "CHUNK_BYTES"])
def test_chunks_change_nothing(name, tau, budget, monkeypatch):
    whole = run(engine(name, 2, tau))
    monkeypatch.setattr(simulator, budget, 1)
    assert close(run(engine(name, 2, tau)), whole)


@pytest.mark.parametrize("values", [{}, {"weight_decay": 0.1}, {"momentum": 0.5}, {"clip_norm": 0.1}])
@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "fl"])
def test_weights_that_step_on_the_way_back_are_the_same(name, values, monkeypatch):
    pulled, original = [], factored.Factors.pull_and_add
    monkeypatch.setattr(factored.Factors, "pull_and_add", lambda *a, **k: pulled.append(a) or original(*a, **k))
    whole, large = engine(name, 4, 3, **values), engine(name, 4, 3, **values)
    expected = run(whole)
    assert not pulled
    monkeypatch.setattr(factored, "PIECE", 100)  # not even three of the seven rows
    assert close(run(large), expected)
    assert bool(pulled) == (not values.keys() & {"momentum", "clip_norm"})
    assert large.drift() == pytest.approx(whole.drift(), rel=1e-10)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("tau", now([1, 3], 3))
def test_one_client_makes_every_split_scheme_plain_sgd(cut, tau):
    results = [run(engine(name, cut, tau, sizes=[20])) for name in ("sfl-ga", "sfl", "psl", "epsl-cut", "sl", "fl")]
    assert all(close(result, plain_sgd(blocks, tau)) for result in results)


class Unusual(nn.Module):
    """A linear layer whose weight is not simply a parameter of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.w, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        x, linear = x[:, 0], nn.functional.linear
        if self.kind == "scaled":
            return linear(x, 0.1 * self.w, self.b)
        if self.kind == "transposed":
            return linear(x, self.w.T, self.b)
        if self.kind == "sliced":
            return linear(x, self.w[:4], self.b[:4])
        if self.kind == "tied":
            return linear((x @ self.w).relu(), self.w, self.b)
        if self.kind == "constant input":
            return x + linear(torch.ones_like(self.w), self.w, self.b)
        if self.kind == "fixed":
            return linear(linear(x, self.w, self.b).relu(), self.w.detach(), self.b)
        return linear(linear(x, self.w, self.b).relu(), self.w, self.b)


@pytest.mark.parametrize("kind", ["scaled", "transposed", "sliced", "tied", "constant input", "fixed", "used twice"])
@pytest.mark.parametrize(("name", "tau"), [("psl", 1), ("sfl", 3), ("fl", 3)])
@pytest.mark.parametrize("piece", [factored.PIECE, 7])
def test_linear_layers_of_any_kind_are_trained(kind, name, tau, piece, monkeypatch):
    monkeypatch.setattr(factored, "PIECE", piece)
    monkeypatch.setattr(factored, "FEW", 36)

    def made():
        torch.manual_seed(4)
        return [Unusual(kind), nn.Flatten(), nn.Linear(24 if kind == "sliced" else 36, CLASSES)]

    assert close(run(engine(name, 1, tau, sizes=[20], made=made)), plain_sgd(made, tau))


def test_weight_normalisation_is_trained():
    def made():
        torch.manual_seed(4)
        return [nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(36, 7)), nn.Linear(7, CLASSES)]

    assert close(run(engine("psl", 2, 1, sizes=[20], made=made)), plain_sgd(made, 1))


def test_a_half_that_runs_again_has_the_same_luck(monkeypatch):
    def made():
        return [nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(36, 7), nn.Linear(7, CLASSES)]

    monkeypatch.setattr(simulator, "CHUNK_BYTES", 1)
    torch.manual_seed(6)
    kept = run(engine("sfl-ga", 2, 1, made=made))
    monkeypatch.setattr(simulator, "ACTIVATION_BYTES", 1)
    torch.manual_seed(6)
    assert torch.equal(run(engine("sfl-ga", 2, 1, made=made)), kept)


def plain_sgd(made, tau):
    """The parameters after three rounds of a single client, by hand."""
    x, y, parts = data([20])
    module = nn.Sequential(*made()).double()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    for t in range(1, 4):
        for i in range(tau):
            rows = parts[0][draw_batches(np.array([20]), 6, stream(0, "batch", t, i))[0]]
            sgd.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            sgd.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("tau", [1, 3])
def test_sfl_is_fedavg_at_every_cut(cut, tau):
    assert close(run(engine("sfl", cut, tau)), run(engine("fl", cut, tau)))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize(("fraction", "other"), [(0.0, "psl"), (1.0, "sfl-ga")])
def test_epsl_spans_psl_and_sfl_ga(cut, tau, fraction, other):
    assert close(run(engine("epsl-cut", cut, tau, split={"epsl.aggregate": fraction})), run(engine(other, cut, tau)))


def test_clients_of_sfl_ga_drift_apart():
    sim = engine("sfl-ga", 2, 1)
    run(sim, 1)
    halves = torch.cat([p.flatten(1) for p in sim.state.client.params.values()], 1)
    by_hand = (halves - sim.weights @ halves).norm(dim=1).mean()
    assert sim.drift() == pytest.approx(float(by_hand), rel=1e-12)
    assert sim.drift() > 1e-3


@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "psl", "epsl-cut", "sl"])
def test_moving_the_cut_changes_no_logit_and_keeps_momentum(name):
    from splitcast.schemes.messages import Ledger

    sim = engine(name, 2, 1, momentum=0.9)
    run(sim, 2)
    x, _, _ = data(SIZES)

    def logits():
        return sim.model.forward(sim.state.averaged(sim.weights), x, 0, sim.model.depth)

    def momentum():
        both = sim.state.client.mean(sim.weights).slots["opt/momentum"] | sim.state.server.slots["opt/momentum"]
        return torch.cat([both[k].flatten() for k in sorted(both)])

    for cut in (4, 1, 3, 2):
        before, m_before = logits(), momentum()
        sim.place(at(sim, cut), Ledger())
        assert sim.state.placement.cut == cut
        assert close(logits(), before)
        assert close(momentum(), m_before)
        halves = [*sim.state.client.params, *sim.state.server.params]
        assert halves == list(sim.model.initial()), "sums over names are those of a resumed run"
    sim.round(3)


def test_a_cut_moved_there_and_back_in_sfl_changes_nothing():
    from splitcast.schemes.messages import Ledger

    moved, still = engine("sfl", 1, 1), engine("sfl", 1, 1)
    for t in range(1, 5):
        moved.place(at(moved, 1 + t % 4), Ledger())
        moved.round(t)
        still.round(t)
    assert close(flat(moved), flat(still))


def test_migration_bytes_by_hand():
    from splitcast.schemes.messages import Ledger

    sim = engine("sfl-ga", 1, 1)
    sim.round(1)
    ledger = Ledger()
    sim.place(at(sim, 2), ledger)  # block 2: 4*3*9 + 4 values broadcast
    assert ledger.by_kind() == {"down.migration": 4 * 112}
    ledger = Ledger()
    sim.place(at(sim, 1), ledger)  # and uploaded by each of the four clients, whose copies may differ
    assert ledger.by_kind() == {"up.migration": 4 * 4 * 112}
