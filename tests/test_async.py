"""A server that does not wait: by hand, against a plain loop, and as the scheme it is with a buffer of all."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.data.batches import draw_batches
from splitcast.engine.asynchronous import AsyncSimulator
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.schemes.messages import Ledger
from splitcast.studies.report.clients import breakdown
from splitcast.training.task import Classification
from test_engine import CLASSES, SIZES, blocks, close, data, engine
from test_federation import flat as flat_of

SECONDS = [1.0, 1.5, 4.0, 2.5]
TIMELINE = [  # round, seconds, who held it up, who delivers and how many versions late, with a buffer of two
    (1, 1.5, 1, {0: 0, 1: 0}),
    (2, 1.0, 3, {0: 0, 3: 1}),  # at 2.5 s: 0 began at 1.5 s, 3 at 0 s
    (3, 1.0, 0, {1: 1, 0: 0}),  # at 3.5 s: 1 came at 3 s, begun at 1.5 s
    (4, 1.0, 0, {2: 3, 0: 0}),  # at 4.5 s: 2 came at 4 s, begun at 0 s
    (5, 0.5, 3, {1: 1, 3: 2}),  # at 5 s: both, begun at 3.5 s and 2.5 s
]


def made(name, cut, tau, buffer, seconds=SECONDS, **values):
    x, y, parts = data(SIZES)
    settings = {"scheme": name, "cut": cut, "batch": 6, "local_steps": tau, "lr": 0.1, "dtype": "float64"}
    config = with_values(Config(), **settings, clients=len(SIZES), wait_for=buffer, **values)
    model = SplitModel(blocks(), (1, 6, 6))
    pace = lambda t: (seconds, ["compute"] * len(seconds))  # noqa: E731
    return AsyncSimulator(config, model, Classification(CLASSES), x, y, parts, pace=pace)


def flat(sim):
    return flat_of(sim, sim.averaged())


@pytest.mark.parametrize("name", ["sfl", "psl", "fl", "local-loss", "psl-personal"])
@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("optimiser", [{}, {"momentum": 0.9}])
def test_a_buffer_of_all_is_the_scheme_that_waits(name, tau, optimiser):
    cut = 1 if name == "fl" else 2
    ours, theirs = made(name, cut, tau, 4, **optimiser), engine(name, cut, tau, **optimiser)
    for t in range(1, 4):
        mine, yours = ours.round(t), theirs.round(t)
        assert mine.ledger.messages == yours.ledger.messages
        assert mine.loss == pytest.approx(yours.loss, abs=1e-12)
        assert mine.waited.seconds == pytest.approx(4)
        assert mine.waited.client == 2
    assert close(flat(ours), flat(theirs))


def test_the_clock_by_hand():
    sim = made("sfl", 2, 1, 2)
    now = 0.0
    for t, seconds, client, delivered in TIMELINE:
        before = set(sim.flights) | set(range(4))
        report = sim.round(t)
        now += seconds
        assert (report.waited.seconds, report.waited.client) == (pytest.approx(seconds), client)
        assert before - set(sim.flights) == set(delivered)
        assert report.ledger.metrics()["staleness"] == sum(delivered.values()) / 2
    assert sim.now == pytest.approx(now) == pytest.approx(5)


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
def test_weights_equal_a_plain_loop(power):
    """`sfl` is federated averaging: every client trains a copy of the whole model from the version it began with."""
    sim = made("sfl", 2, 2, 2, staleness=power)
    x, y, parts = data(SIZES)
    rho = np.array(SIZES) / sum(SIZES)
    versions, waiting, moves = [nn.Sequential(*blocks()).double()], [0, 1, 2, 3], {}
    for t, _, _, delivered in TIMELINE:
        rows = [draw_batches(np.array(SIZES), 6, stream(0, "batch", t, i)) for i in range(2)]
        for n in waiting:
            own = copy.deepcopy(versions[-1])
            for drawn in rows:
                own.zero_grad()
                nn.functional.cross_entropy(own(x[parts[n][drawn[n]]]), y[parts[n][drawn[n]]]).backward()
                with torch.no_grad():
                    for p in own.parameters():
                        p -= 0.1 * p.grad
            moves[n] = [
                a.detach() - b.detach() for a, b in zip(own.parameters(), versions[-1].parameters(), strict=True)
            ]
        new, total = copy.deepcopy(versions[-1]), sum(rho[n] for n in delivered)
        with torch.no_grad():
            for n, late in delivered.items():
                for p, d in zip(new.parameters(), moves[n], strict=True):
                    p += rho[n] / total * (1 + late) ** -power * d
        versions.append(new)
        waiting = sorted(delivered)
        sim.round(t)
        assert close(flat(sim), torch.cat([p.detach().flatten() for p in new.parameters()]))


def test_own_halves_are_seen_when_they_are_delivered():
    sim = made("psl", 2, 1, 2)
    sim.round(1)
    start = {k: v for k, v in sim.initial().params.items() if k in sim.state.client.params}
    moved = [any(bool((v[n] != start[k]).any()) for k, v in sim.state.client.params.items()) for n in range(4)]
    assert moved == [True, True, False, False]


def test_only_those_who_begin_send():
    sim = made("sfl", 2, 1, 2)
    ledgers = [Ledger() for _ in range(3)]
    for t, ledger in enumerate(ledgers, 1):
        sim.round(t, ledger)
    per_client = ledgers[0].total("up") / 4
    assert [ledger.total("up") for ledger in ledgers] == [4 * per_client, 2 * per_client, 2 * per_client]


def test_equal_clients_take_as_long_as_if_they_were_waited_for():
    settings = {"scheme": "sfl", "clients": 3, "distance_m": 100.0, "arch": "cnn-small", "batch": 4, "rounds": 3}
    config = with_values(Config(), **settings, channel="test_async:steady", allocation="equal")
    waits, goes_on = train(config), train(with_values(config, wait_for=3))
    assert [r.latency_s for r in goes_on.rounds] == pytest.approx([r.latency_s for r in waits.rounds])
    assert [r.loss for r in goes_on.rounds] == pytest.approx([r.loss for r in waits.rounds], rel=1e-5)
    early = train(with_values(config, wait_for=1, client_flops_per_s=(1e8, 1e7, 1e7)))
    assert sum(r.latency_s for r in early.rounds) < sum(r.latency_s for r in goes_on.rounds) * 1.01
    assert {r.slowest_client for r in early.rounds[:2]} == {0}


def steady(network, clients, seed):
    """A channel that never changes."""

    class Steady:
        def at(self, t):
            return np.full(clients, 1e-9)

    return Steady()


@pytest.mark.parametrize("scheme", ["psl", "sfl"])
def test_a_stopped_run_goes_on_exactly(tmp_path, scheme):
    values = {"clients": 4, "rounds": 5, "arch": "cnn-small", "batch": 4, "client_flops_per_s": (1e8, 5e7, 1e7, 2e7)}
    config = with_values(Config(), scheme=scheme, wait_for=2, **values, checkpoint_every=1, eval_every=2)
    records = resumes_exactly(config, tmp_path / "run", 3)
    assert all("staleness" in record.metrics for record in records)
    with pytest.raises(SplitcastError, match="did not wait"):
        breakdown(config, records)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scheme": "sfl-ga"}, "clients of sfl-ga with its settings wait for each other"),
        ({"scheme": "cse-fsl"}, "clients of cse-fsl"),
        ({"scheme": "sl"}, "clients of sl"),
        ({"sync_every": 2}, "averaged in every round or never"),
        ({"wait_for": 5}, "5 for 4 clients"),
        ({"participation": 0.5}, "everybody takes part"),
        ({"cut": (1, 1, 2, 1)}, "one cut for all"),
        ({"policy": "greedy"}, "moves the cut"),
        ({"client_update": "identical"}, "'identical'"),
    ],
)
def test_what_cannot_be_is_one_line(values, words):
    settings = {"scheme": "sfl", "clients": 4, "arch": "cnn-small", "wait_for": 2, "rounds": 1}
    with pytest.raises(SplitcastError, match=words):
        train(with_values(Config(), **(settings | values)))


def test_it_learns():
    config = with_values(Config(), scheme="sfl", arch="cnn-small", wait_for=3, clients=6, rounds=60, lr=0.1)
    rounds = train(with_values(config, client_flops_per_s_range=(1e7, 1e9))).rounds
    assert rounds[-1].test_accuracy > 0.5
