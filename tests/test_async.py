"""A server that does not wait: by hand, against a plain loop, and as the scheme it is with a buffer of all."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from resuming import resumes_exactly
from splitcast.allocate.allocate import equal_share
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.clock import time_rounds
from splitcast.cost.pace import EqualShares
from splitcast.data.batches import draw_batches
from splitcast.engine.asynchronous import AsyncSimulator
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.schemes.messages import Ledger
from splitcast.studies.plan import scenario_of
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


WITH_DEADLINE = [  # at 1.9, 3.8 ... 9.5 s whoever has delivered, one at least; held up by who would have come next
    (1, 1.9, 3, {0: 0, 1: 0}),  # late: 3, until 2.5 s, and 2, until 4 s
    (2, 1.9, 2, {0: 0, 1: 0, 3: 1}),
    (3, 1.9, 3, {0: 0, 1: 0, 2: 2}),  # 3 began at 3.8 s
    (4, 1.9, 2, {0: 0, 1: 0, 3: 1}),  # 2 began at 5.7 s
    (5, 1.9, 2, {0: 0, 1: 0}),
]
TWO = [  # clients of 1 and 2.5 s, a deadline of 2 s
    (1, 2.0, 1, {0: 0}),
    (2, 1.0, 0, {0: 0, 1: 1}),  # both are in at 3 s: 1 came at 2.5 s, 0 began at 2 s
    (3, 2.0, 1, {0: 0}),
    (4, 1.0, 0, {0: 0, 1: 1}),
]


def made(name, cut, tau, buffer, seconds=SECONDS, sizes=SIZES, **values):
    x, y, parts = data(sizes)
    settings = {"scheme": name, "cut": cut, "batch": 6, "local_steps": tau, "lr": 0.1, "dtype": "float64"}
    config = with_values(Config(), **settings, clients=len(sizes), wait_for=buffer, **values)
    model = SplitModel(blocks(), (1, 6, 6))
    pace = lambda t: (seconds, ["compute"] * len(seconds))  # noqa: E731
    return AsyncSimulator(config, model, Classification(CLASSES), x, y, parts, pace=pace)


def flat(sim):
    return flat_of(sim, sim.averaged())


@pytest.mark.parametrize("name", ["sfl", "psl", "fl", "local-loss", "psl-personal"])
@pytest.mark.parametrize("tau", now([1, 3], 3))
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


CLOCKS = {
    "a buffer": (TIMELINE, 2, {}),
    "a deadline": (WITH_DEADLINE, 1, {"deadline_s": 1.9}),
    "two clients, one late": (TWO, 1, {"deadline_s": 2.0, "seconds": [1.0, 2.5], "sizes": SIZES[:2]}),
}


@pytest.mark.parametrize("which", CLOCKS)
def test_the_clock_by_hand(which):
    timeline, buffer, values = CLOCKS[which]
    sim, now = made("sfl", 2, 1, buffer, **values), 0.0
    for t, seconds, client, delivered in timeline:
        before = set(range(len(sim.sizes)))
        report = sim.round(t)
        now += seconds
        assert (report.waited.seconds, report.waited.client) == (pytest.approx(seconds), client)
        assert before - set(sim.flights) == set(delivered)
        assert report.ledger.metrics()["staleness"] == sum(delivered.values()) / len(delivered)
        if "deadline_s" in values:
            assert report.ledger.metrics()["late"] == len(before) - len(delivered)
    assert sim.now == pytest.approx(now)


def test_a_deadline_that_too_few_meet_is_missed():
    """Of 1, 1.5, 2.5 and 4 s: the second is waited for beyond 1.2 s."""
    sim = made("sfl", 2, 1, 2, deadline_s=1.2)
    report = sim.round(1)
    assert (report.waited.seconds, report.waited.client) == (1.5, 1) and set(sim.flights) == {2, 3}


def test_a_training_with_a_deadline_counts_the_late_and_the_missed_rounds():
    """A client of a third of the speed takes longer than a deadline that others meet, and counts in a later round."""
    speeds = {"client_flops_per_s": (1e7, 1e7, 3e6), "arch": "cnn-small", "batch": 4, "rounds": 6, "clients": 3}
    config = with_values(Config(), scheme="sfl", channel="test_async:steady", distance_m=100.0, wait_for=1, **speeds)
    (fast, _, slow), _ = EqualShares(scenario_of(config))(1)
    limit = 1.05 * fast
    result = train(with_values(config, deadline_s=limit))
    after = int(slow // limit)  # so many rounds are over before the slow one delivers
    assert 2 <= after < 5
    late = [r.metrics["late"] for r in result.rounds]
    assert late == [0 if t % (after + 1) == 0 else 1 for t in range(1, 7)] and result.summary["outage"] == 0
    assert all(r.latency_s == limit for r in result.rounds if r.metrics["late"])
    assert all(r.latency_s < limit for r in result.rounds if not r.metrics["late"])
    assert result.summary["late"] == pytest.approx(np.mean(late))


@pytest.mark.parametrize("which", CLOCKS)
@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
def test_weights_equal_a_plain_loop(power, which):
    """`sfl` is federated averaging: every client trains a copy of the whole model from the version it began with."""
    timeline, buffer, values = CLOCKS[which]
    sim, sizes = made("sfl", 2, 2, buffer, staleness=power, **values), values.get("sizes", SIZES)
    x, y, parts = data(sizes)
    rho = np.array(sizes) / sum(sizes)
    versions, waiting, moves = [nn.Sequential(*blocks()).double()], range(len(sizes)), {}
    for t, _, _, delivered in timeline:
        rows = [draw_batches(np.array(sizes), 6, stream(0, "batch", t, i)) for i in range(2)]
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


def test_whoever_begins_spends_the_energy_of_its_round():
    """All begin in round 1, then those who were waited for: joules of an equal share, by hand from the stages."""
    values = {"arch": "cnn-small", "clients": 4, "batch": 4, "rounds": 4, "scheme": "sfl", "wait_for": 2}
    config = with_values(Config(), **values)
    scenario, records = scenario_of(config), train(config).rounds
    for t, record in enumerate(records, 1):
        met = scenario.conditions([t])[0]
        (timed,) = time_rounds([scenario.stages(scenario.place(1), t)], scenario.cell, met, equal_share)
        compute, air = timed.spent_j(4)
        each = np.sort(compute + air)
        joules = record.metrics["energy_j"]
        if t == 1:
            assert joules == pytest.approx(each.sum()) and record.metrics["energy_most_j"] == pytest.approx(each[-1])
        else:  # two of four
            pairs = [a + b for k, a in enumerate(each) for b in each[k + 1 :]]
            assert min(abs(joules / pair - 1) for pair in pairs) < 1e-9


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


@pytest.mark.parametrize("limit", now([0.0, 0.3], 0.3))
@pytest.mark.parametrize("scheme", now(["psl", "sfl"], "sfl"))
def test_a_stopped_run_goes_on_exactly(tmp_path, scheme, limit):
    values = {"clients": 4, "rounds": 5, "arch": "cnn-small", "batch": 4, "client_flops_per_s": (1e8, 5e7, 1e7, 2e7)}
    values |= {"deadline_s": limit, "checkpoint_every": 1, "eval_every": 2}
    config = with_values(Config(), scheme=scheme, wait_for=2, **values)
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


@pytest.mark.long
def test_it_learns():
    """Three times better than guessing; single tests go up and down by twenty points, on every machine otherwise."""
    config = with_values(Config(), scheme="sfl", arch="cnn-small", wait_for=3, clients=6, rounds=60, lr=0.05)
    rounds = train(with_values(config, client_flops_per_s_range=(1e7, 1e9))).rounds
    assert np.mean([r.test_accuracy for r in rounds if r.test_accuracy is not None][-3:]) > 0.3
