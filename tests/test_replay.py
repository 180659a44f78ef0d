"""Replay: the pool, the server half that trains on it, what is sent when, and the same on sites and after a stop."""

import dataclasses
import struct

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lengths import now
from resuming import resumes_exactly
from splitcast import SplitModel
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.data import from_tensors
from splitcast.data.batches import in_turn, own_order
from splitcast.engine.dry import dry_round
from splitcast.remote.sites import NoSites
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.schemes.messages import Message, Work
from splitcast.schemes.pool import Pool
from splitcast.schemes.schemes import make_scheme
from splitcast.schemes.staleness import Memory, Places
from splitcast.studies.plan import plan
from test_auxiliary import BATCH, CLIENTS, LR, blocks, tiny
from test_federation import IMAGES, Wired, difference, federation

SMALL = {"scheme": "sfl-replay", "clients": 3, "batch": 8, "arch": "cnn-small"}


def options(**values):
    return {f"sfl-replay.{name}": value for name, value in values.items()}


def kind_of(event):
    """Without the bytes, and the work on smashed data, which only the data tell."""
    if not isinstance(event, Message):
        return event
    told = {"coding": (0.0, 0.0)} if event.kind == "smashed" else {}
    return dataclasses.replace(event, nbytes=0, **told)


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
    kept = pool.tensors()
    assert kept["smashed"].dtype == torch.float16 and len(kept["smashed"]) == 3 and len(kept["on_disk"]) == 2
    assert kept["smashed"].data_ptr() == pool.tensors()["smashed"].data_ptr(), "a checkpoint takes no memory of its own"
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
            rows = part[in_turn(own_order(5, n, len(part)), (t - 1) * BATCH + np.arange(BATCH))]
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


def test_after_the_first_upload_all_code_alike_as_the_pool_tells():
    config = with_values(Config(), **SMALL, **options(samples=24, steps=1))
    sim = make_simulator(config, IMAGES)
    told, sent = [], []
    for t in range(1, 5):
        sent.append(sim.round(t).ledger.by_kind())
        told.append(sim._scheme.uplink.common)
    channels = sim.model.smashed_shape(1)[0]
    assert [sorted(each) for each in sent[:1]] == [["up.labels", "up.smashed"]] and sent[3] == {}
    for each, (basis, step) in zip(sent[1:3], told[1:3], strict=True):
        rows = basis.shape[1]
        assert each["down.columns"] == rows * (channels + 2) and each["down.step"] == 4  # int8 with a head of two bytes
        assert step > 0 and torch.allclose(basis.T @ basis, torch.eye(rows), atol=1e-5)
    assert told[0] is None and told[3] is told[2]  # nothing was sent: the format of the last that was


@pytest.mark.parametrize("rate", ["100B", "80..160B@5"])
def test_clients_that_code_alike_take_the_rate_together(rate):
    """The first common step is careful, since the pool does not tell what a finer one takes; later ones follow."""
    paper = {"scheme": "sfl-replay", "clients": 3, "batch": 32, "uplink_codec": f"transform:{rate}"}
    config = with_values(Config(), **paper, **options(samples=32 * 6, steps=1))
    sim, taken = make_simulator(config, IMAGES), []
    for t in range(1, 7):
        sent = sim.round(t).ledger.by_kind()
        taken.append(sent["up.smashed"] / sent["up.labels"] / sim._scheme.own.at(t).value)
    assert 0.9 < taken[0] <= 1 and 0.6 < taken[1] <= 1, taken
    assert all(0.9 < each < 1.1 for each in taken[2:]), taken


class Told(Wired):
    """A server that tells another common step than its own."""

    def __init__(self, step):
        super().__init__(3)
        self.step, self.sent = step, []

    def call(self, method, requests):
        for request in requests.values():
            for message in request.get("messages", []):
                if message["kind"] == "step":
                    message["data"] = struct.pack("<f", self.step)
        replies = super().call(method, requests)
        for reply in replies.values():
            self.sent += [
                len(m["data"])
                for m in (reply.answer or {}).get("messages", [])
                if isinstance(m, dict) and m["kind"] == "smashed"
            ]
        return replies


@pytest.mark.parametrize("step", [-1.0, 1e-38, 2.0**60])
def test_a_step_that_no_server_tells_is_refused(step):
    fed = federation(with_values(Config(), **SMALL, **options(samples=24, steps=1)), Told(step))
    fed.round(1)
    with pytest.raises(NoSites, match="step: .* must be 0, or from 2"):
        fed.round(2)


def test_however_fine_the_step_that_is_told_nobody_sends_far_more_than_the_rate():
    config = with_values(Config(), **SMALL, uplink_codec="transform:20B", **options(samples=24, steps=1))
    line = Told(1e-6)
    fed = federation(config, line)
    for t in (1, 2, 3):
        assert not fed.round(t).measured.failures
    assert len(line.sent) == 9 and max(line.sent) <= 20 * 8


def test_every_sample_is_sent_once_also_where_batches_do_not_divide_them():
    config = with_values(Config(), **SMALL, **options(samples=20, steps=1, minibatch=8))
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    labels = []
    for t in range(1, 5):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        labels.append(theirs.ledger.by_kind().get("up.labels", 0))
        parts = (sim.model, sim.task, sim.state.placement, sim.optimiser)
        planned = dry_round(make_scheme(config), *parts, t, range(3), batch=8, steps=1)
        assert [kind_of(event) for event in planned.events] == [kind_of(event) for event in theirs.ledger.events]
        assert planned.by_kind().get("up.labels", 0) == labels[-1]
    assert labels == [24, 24, 12, 0]
    assert sorted(sim._scheme.pool.keys) == list(range(60)) and fed._scheme.pool.keys == sim._scheme.pool.keys


def halves_of_inputs():
    """Samples that have only the first three inputs, or only the last three."""
    known = tiny()
    x = known.train_x.clone().view(-1, 6)
    x[::2, 3:], x[1::2, :3] = 0, 0
    return from_tensors(x.view(-1, 1, 2, 3), known.train_y, known.test_x, known.test_y, name="halves")


def moved_by_hand(sim, places=8):
    """Move the weights of the first three inputs; how far each sample's features move then (2, places)."""
    rows = sim.in_order(np.arange(places), np.array([0, 1]))
    weight, bias = (sim.state.client.params[f"0.1.{name}"] for name in ("weight", "bias"))
    before = torch.tanh(sim.x[rows].flatten(2) @ weight.T + bias)
    weight[:, :3] += 0.7
    after = torch.tanh(sim.x[rows].flatten(2) @ weight.T + bias)
    return before, after, (after - before).norm(dim=2) / before.norm(dim=2)


def test_only_samples_whose_features_moved_are_sent_again_the_farthest_first():
    values = {"scheme": "sfl-replay", "clients": 2, "batch": 2, "dtype": "float64", "uplink_codec": "fp32"}
    own = options(samples=8, steps=1, stale=0.05, checks=4)
    config = with_values(Config(), **values, **own)
    sim = make_simulator(config, halves_of_inputs(), SplitModel(blocks(), (1, 2, 3)))
    for t in range(1, 5):  # all samples, in order: nobody says which
        assert sim.round(t).ledger.by_kind() == {"up.smashed": 2 * 2 * 5 * 4, "up.labels": 2 * 2}
    before, after, moved = moved_by_hand(sim)
    assert bool(((moved == 0) | (moved > 0.05)).all())
    stale = [sorted((moved[n] > 0).nonzero().flatten().tolist(), key=lambda i: -moved[n, i]) for n in (0, 1)]
    assert [len(each) for each in stale] == [4, 2]
    now = [set(), set()]
    for t in range(5, 10):
        ledger = sim.round(t).ledger
        again = [each[2 * (t - 5) : 2 * (t - 4)] for each in stale]
        for n in (0, 1):
            now[n] |= set(again[n])
        count = len(again[0]) + len(again[1])
        sent = {"up.places": 2 + count, "up.smashed": count * 5 * 4, "up.labels": count}  # a number, and a byte each
        assert ledger.by_kind() == {kind: size for kind, size in sent.items() if size}
        assert ledger.metrics()["sent_again"] == count / 2
        pool = sim._scheme.pool
        kept = dict(zip(pool.keys, pool.take(np.arange(len(pool)))[0], strict=True))
        for n in (0, 1):
            for i in range(8):
                expected = (after if i in now[n] else before)[n, i]
                assert torch.equal(kept[8 * n + i], expected.half().float())
        looked = [w.share for w in ledger.events if isinstance(w, Work) and (w.segment, w.phase) == (0, "forward")]
        shares = [tuple(len(each) / 2 for each in again)] if count else []
        assert looked == ([1.0] * 4 if t == 5 else []) + shares
    assert all(now[n] == set(stale[n]) for n in (0, 1))
    assert sim.round(10).ledger.by_kind() == {}  # halves are at rest, and all were looked at: nobody asks any more


def test_who_missed_a_round_sends_what_it_has_not_sent():
    config = with_values(Config(), **SMALL, **options(samples=16, steps=1, stale=0.5))
    sim = make_simulator(config, IMAGES)
    sent = [
        sim.round(t, who=np.array(who)).ledger.by_kind() for t, who in ((1, [0, 2]), (2, [0, 1, 2]), (3, [0, 1, 2]))
    ]
    assert [each["up.labels"] for each in sent] == [16, 24, 8]
    assert sent[2]["up.places"] == 1 + (1 + 8) + 1
    assert sorted(sim._scheme.pool.keys) == list(range(48))


def test_sites_send_stale_samples_as_the_simulator_does():
    own = options(samples=24, steps=1, learn="local", stale=0.014, checks=2, until=7)
    config = with_values(Config(), **SMALL, **own, lr=0.05)
    line = Wired(3)
    fed, sim = federation(config, line), make_simulator(config, IMAGES)
    sent = []
    for t in range(1, 12):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert not ours.measured.failures
        sent.append(
            [next((m.nbytes for m in theirs.ledger.messages if m.kind == kind), 0) for kind in ("places", "labels")]
        )
    assert difference(fed, sim) < 1e-5
    assert fed._scheme.pool.keys == sim._scheme.pool.keys
    assert [places for places, _ in sent[:3]] == [0] * 3 and all(places for places, _ in sent[3:])
    rows = [labels for _, labels in sent[3:] if labels]
    assert any(len(set(each)) > 1 for each in rows)  # not the same number for all
    line.sites[1].scheme.memory.restore({})  # a site that was started anew knows nothing: it sends all again
    again = [m for m in fed.round(12).ledger.messages if m.kind == "labels"]
    assert [m.nbytes for m in again] == [(0, 8, 0)]


def test_what_was_sent_before_the_last_feedback_is_sent_again_on_sites_too():
    own = options(samples=16, steps=1, learn="feedback", stale=1e-4, checks=2)
    config = with_values(Config(), **SMALL, **own, lr=0.05)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    sent = []
    for t in range(1, 7):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages and not ours.measured.failures
        sent.append(theirs.ledger.by_kind().get("up.labels", 0))
    assert sent == [24, 24, 24, 24, 0, 0]  # halves learned in rounds 1 and 2
    assert fed._scheme.pool.keys == sim._scheme.pool.keys


def test_plans_expect_that_nothing_is_stale():
    own = options(samples=16, steps=1, minibatch=8, learn="local", stale=1e9, checks=1)
    config = with_values(Config(), **SMALL, **own)
    sim = make_simulator(config, IMAGES)
    for t in range(1, 6):
        theirs = sim.round(t)
        parts = (sim.model, sim.task, sim.state.placement, sim.optimiser)
        planned = dry_round(make_scheme(config), *parts, t, range(3), batch=8, steps=1)
        assert [kind_of(event) for event in planned.events] == [kind_of(event) for event in theirs.ledger.events]
        assert (
            planned.by_kind().get("up.places", 0) == (3 if t > 2 else 0) == theirs.ledger.by_kind().get("up.places", 0)
        )


def test_a_sketch_tells_how_far_features_moved():
    rng = torch.Generator().manual_seed(0)
    then = torch.randn(200, 3000, generator=rng)
    now = then + 0.3 * torch.randn(200, 3000, generator=rng)
    memory = Memory(200, 0.0)
    memory.sent(0, torch.arange(200), then)
    memory.measured(0, torch.arange(200), now)
    exact = (now - then).norm(dim=1) / then.norm(dim=1)
    ratio = memory.tensors()["moved/0"] / exact
    assert abs(float(ratio.mean()) - 1) < 0.02 and float(ratio.std()) < 0.08  # 1/16 expected
    few = Memory(200, 0.0)  # no more features than a sketch has values: exact
    few.sent(0, torch.arange(200), then[:, :100])
    few.measured(0, torch.arange(200), now[:, :100])
    exact = (now - then)[:, :100].norm(dim=1) / then[:, :100].norm(dim=1)
    assert torch.allclose(few.tensors()["moved/0"], exact)


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\1\0\0", b"\2\0\1\0", b"\1\0\54\1", b"\2\0\7\0\7\0", b"\3\0\0\0\1\0\2\0"]
)
def test_places_that_nobody_sends_are_refused(data):
    payload = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(SplitcastError):
        Places(300).decode(payload, (2,))


@pytest.mark.parametrize("learn", now(["none", "local", "feedback"], "local"))
def test_a_stopped_run_goes_on_exactly(tmp_path, learn):
    own = options(samples=16, steps=2, learn=learn, stale=0.01 if learn == "local" else 0.0, checks=1)
    config = with_values(Config(), **SMALL, **own, momentum=0.9, lr=0.1, rounds=6, checkpoint_every=2, eval_every=3)
    rounds = resumes_exactly(config, tmp_path / "run", 5)
    assert learn != "local" or rounds[-1].kinds["up.smashed"]  # stale by what was measured before the stop


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
        (options(steps=0), "sfl-replay.steps: input should be greater than or equal to 1, got 0"),
        (options(start=1), "sfl-replay.start: 1; before it halves have to learn: give learn = local"),
        (options(start=3, learn="feedback"), "sfl-replay.start: 3; before it"),
        (options(start=3, learn="local", until=2), "sfl-replay.start: 3; before it .* until 0 or not below"),
        (options(samples=99_999_999_999, stale=0.1), "sfl-replay.samples: 99999999999; with stale at most 1048576"),
        (options(memory_mb=0, disk_mb=0), "sfl-replay.memory_mb, disk_mb: 0 and 0; leave room"),
        ({"sync_every": 2}, "sync_every: 2; sfl-replay averages in rounds that learn"),
        ({"policy": "greedy"}, "sfl-replay needs fixed"),
        ({"client_update": "identical"}, "client_update: 'identical' needs a feedback"),
    ],
)
def test_refusals(values, said):
    with pytest.raises(SplitcastError, match=said):
        train(with_values(Config(), **SMALL, rounds=1, **values))
