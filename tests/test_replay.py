"""Replay: the pool, the server half that trains on it, what is sent when, and the same on sites and after a stop."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from resuming import resumes_exactly
from splitcast import SplitModel
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.data.batches import in_turn, own_order
from splitcast.engine.dry import dry_round
from splitcast.run.loop import make_simulator, train
from splitcast.schemes.messages import Message
from splitcast.schemes.pool import Pool
from splitcast.schemes.schemes import make_scheme
from splitcast.studies.plan import plan
from test_auxiliary import BATCH, CLIENTS, LR, blocks, tiny
from test_federation import IMAGES, Wired, difference, federation

SMALL = {"scheme": "sfl-replay", "clients": 3, "batch": 8, "arch": "cnn-small"}


def options(**values):
    return {f"sfl-replay.{name}": value for name, value in values.items()}


def kind_of(event):
    """Without the bytes, which only the data tell."""
    return dataclasses.replace(event, nbytes=0) if isinstance(event, Message) else event


def test_the_pool_is_bounded_and_the_oldest_goes_first():
    pool = Pool(memory_bytes=3 * 2 * 4, disk_bytes=2 * 2 * 4)  # three rows of four values in memory, two on disk
    rows = torch.arange(32.0).view(8, 4)
    for key in range(8):
        pool.add([key], rows[key : key + 1], torch.tensor([key]))
    x, y = pool.take(np.arange(len(pool)))
    assert pool.keys == [3, 4, 5, 6, 7] == y.tolist()
    assert torch.equal(x, rows[3:])
    pool.add([4], -rows[4:5], torch.tensor([9]))  # sent again: in place of the old one, and now the youngest
    assert pool.keys == [3, 5, 6, 7, 4] and pool.take(np.array([4]))[1].tolist() == [9]
    other = Pool(memory_bytes=100, disk_bytes=0)
    other.restore(pool.tensors())
    assert other.keys == pool.keys and torch.equal(other.take(np.arange(5))[0], pool.take(np.arange(5))[0])
    other.restore({})
    assert len(other) == 0 and other.tensors() == {}


def test_rounds_by_hand_in_float64():
    """Frozen halves, features sent once as fp32 and kept as fp16, the server's SGD steps one by one."""
    values = {"scheme": "sfl-replay", "clients": CLIENTS, "batch": BATCH, "lr": LR, "dtype": "float64", "seed": 5}
    own = options(samples=2 * BATCH, steps=3, minibatch=5)
    config = with_values(Config(), **values, uplink_codec="fp32", **own)
    sim = make_simulator(config, tiny(), SplitModel(blocks(), (1, 2, 3)))
    whole = nn.Sequential(*blocks()).double()
    server, kept, targets = whole[1:], {}, {}
    sgd = torch.optim.SGD(server.parameters(), lr=LR)
    for t in range(1, 5):
        report = sim.round(t)
        for n in range(CLIENTS) if t <= 2 else ():
            part = sim._rows[sim._first[n] : sim._first[n] + sim.sizes[n]]
            rows = part[in_turn(own_order(5, n, len(part)), (t - 1) * BATCH, BATCH)]
            for i, row in enumerate(rows):
                key = n * 2 * BATCH + (t - 1) * BATCH + i
                kept[key] = whole[:1](sim.x[row][None])[0].detach().half().double()
                targets[key] = sim.y[row]
        order, rng, keys, total = [], stream(5, "pool", t, 0), list(kept), 0.0
        for _ in range(3):
            while len(order) < 5:
                order += rng.permutation(len(keys)).tolist()
            chosen, order = order[:5], order[5:]
            x, y = (torch.stack([part[keys[k]] for k in chosen]) for part in (kept, targets))
            loss = F.cross_entropy(server(x), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            total += float(loss.detach()) / 3
        sent = {"up.smashed": CLIENTS * BATCH * 5 * 4, "up.labels": CLIENTS * BATCH}
        assert report.ledger.by_kind() == (sent if t <= 2 else {})
        assert report.loss == pytest.approx(total, abs=1e-10)
    ours = torch.cat([p.flatten() for p in sim.state.server.params.values()])
    assert torch.allclose(ours, torch.cat([p.detach().flatten() for p in server.parameters()]), rtol=0, atol=1e-10)
    before = nn.Sequential(*blocks()).double()[0][1].weight
    assert torch.equal(sim.state.client.params["0.1.weight"], before.detach())


@pytest.mark.parametrize(
    "own",
    [
        options(samples=16, steps=2, minibatch=8),
        options(samples=16, steps=2, minibatch=8, learn="local", start=1, until=3),
        options(samples=24, steps=2, minibatch=8, learn="feedback", directions=3),
    ],
)
def test_plans_sites_and_simulator_send_and_learn_the_same(own):
    config = with_values(Config(), **SMALL, momentum=0.5, **own)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 6):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
        parts = (sim.model, sim.task, sim.state.placement, sim.optimiser)
        planned = dry_round(make_scheme(config), *parts, t, range(3), batch=8, steps=1)
        assert [kind_of(event) for event in planned.events] == [kind_of(event) for event in theirs.ledger.events]
    assert difference(fed, sim) < 1e-6
    assert fed._scheme.pool.keys == sim._scheme.pool.keys


def test_stale_samples_are_sent_again():
    config = with_values(Config(), **SMALL, **options(samples=16, steps=1, learn="local", stale=0.01), lr=0.1)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    sent = []
    for t in range(1, 9):
        report = sim.round(t)
        assert fed.round(t).ledger.messages == report.ledger.messages
        sent.append("up.smashed" in report.ledger.by_kind())
        if t > 2 and sent[-2] and not sent[-1]:  # measured just now: the features are not stale yet
            assert report.ledger.metrics()["moved"] <= 0.01
    assert sent[:2] == [True, True] and not sent[2] and any(sent[3:])
    assert len(sim._scheme.pool) == 3 * 16  # in place of the old ones
    again = sent.index(True, 2)
    assert sent[again + 1]  # all of them


def test_how_far_features_moved_by_hand():
    config = with_values(Config(), scheme="sfl-replay", clients=2, batch=4, **options(learn="local", stale=0.5))
    sim = make_simulator(config, tiny(), SplitModel(blocks(), (1, 2, 3)))
    for t in (1, 2, 3):
        sim.round(t)
    first, now = nn.Sequential(*blocks())[0], nn.Sequential(*blocks())[0]
    with torch.no_grad():
        now[1].weight.copy_(sim.state.client.params["0.1.weight"])
        now[1].bias.copy_(sim.state.client.params["0.1.bias"])
        x = sim.x[sim.in_order(0, np.array([1]))][0]
        expected = (now(x) - first(x)).norm() / first(x).norm()
    assert sim.state.marked is not None and float(expected) > 0
    found = []

    class Looking(type(sim._scheme)):
        def round(self, t, clients, server, link):
            for some, _ in clients.in_parallel(server, mixes=True, averaged=True, still=True):
                found.extend(some.moved(0, batch.x) for batch in some.samples(0))

    sim._scheme = Looking(config)
    sim.round(4)
    assert float(found[0][1]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("learn", ["none", "local", "feedback"])
def test_a_stopped_run_goes_on_exactly(tmp_path, learn):
    own = options(samples=16, steps=2, learn=learn, stale=0.02 if learn == "local" else 0.0)
    config = with_values(Config(), **SMALL, **own, momentum=0.9, rounds=6, checkpoint_every=2, eval_every=3)
    resumes_exactly(config, tmp_path / "run", 5)


def test_ampere_learns_alone_sends_once_and_then_only_the_server_works():
    own = {"ampere.device_rounds": 2, "ampere.samples": 16, "ampere.steps": 3}
    config = with_values(Config(), **SMALL | {"scheme": "ampere"}, local_steps=2, **own)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    half, values = 4 * (104 + 4 * 16 * 10 + 10), 4 * 14 * 14
    server = {k: v.clone() for k, v in sim.state.server.params.items()}
    for t in range(1, 5):
        report = sim.round(t)
        assert fed.round(t).ledger.messages == report.ledger.messages
        sent = report.ledger.by_kind()
        if t <= 2:
            assert sent == {"up.model": 3 * half, "down.model": half}
            assert all(torch.equal(v, server[k]) for k, v in sim.state.server.params.items())
        else:
            assert sent == ({"up.smashed": 3 * 16 * values * 4, "up.labels": 3 * 16} if t == 3 else {})
    assert difference(fed, sim) < 1e-6
    assert len(sim._scheme.pool) == 48


def test_the_clock_charges_what_the_server_does_alone():
    config = with_values(Config(), **SMALL, rounds=4, **options(samples=8, steps=5, minibatch=16))
    result = train(config)
    per_sample = sum(result.engine.model.flops(1, 5))
    for record in result.rounds[1:]:
        assert record.bytes == 0
        assert record.latency_s == pytest.approx(5 * 16 * per_sample / 100e9)
    assert len(plan(config, draws=4).cuts) == 4


@pytest.mark.parametrize(
    "values, said",
    [
        (options(learn="guess"), "sfl-replay.learn: unknown 'guess'"),
        ({"sync_every": 2}, "sync_every: 2; sfl-replay averages in rounds that learn"),
        ({"policy": "greedy"}, "sfl-replay needs fixed"),
        ({"client_update": "identical"}, "client_update: 'identical' needs a feedback"),
    ],
)
def test_refusals(values, said):
    with pytest.raises(SplitcastError, match=said):
        train(with_values(Config(), **SMALL, rounds=1, **values))
