"""The protocol between a server and sites, in one process: equal to the simulator, and what faults do to it."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from lengths import now
from splitcast import data
from splitcast.base.config import (
    Config,
    DataConfig,
    ModelConfig,
    PolicyConfig,
    SplitConfig,
    TrainConfig,
    to_toml,
    with_values,
)
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import torch_seed
from splitcast.model import build
from splitcast.remote.federation import Federation
from splitcast.remote.site import Site
from splitcast.remote.sites import Limits, NoSites, Reply
from splitcast.run.loop import train
from splitcast.run.parts import make_parts, make_simulator
from splitcast.run.records import RunFolder
from splitcast.schemes.messages import Ledger
from splitcast.studies.plan import scenario_of
from splitcast.training.weights import Weights

IMAGES = data.load("mnist-mini")
SCHEMES = ["sfl-ga", "sfl", "psl", "epsl-cut", "sfl-gb", "fl", "sl"]


class Memory:
    """A site's store, in memory."""

    def __init__(self):
        self.kept = {}

    def clear(self):
        self.kept = {}

    def save(self, weights, differences, placement, round_):
        slots = {slot: {k: v.clone() for k, v in values.items()} for slot, values in weights.slots.items()}
        self.kept[round_] = (placement, (Weights(slots), copy.deepcopy(differences)))

    def load(self, placement, round_, like):
        found = self.kept.get(round_)
        return found[1] if found and found[0] == placement else None


def rows(config, client):
    part = make_parts(config, IMAGES)[client]
    return IMAGES.train_x[part], IMAGES.train_y[part]


class Wired:
    """Sites in this process; ``spoil`` (method, site, request, answer) stands in for what goes wrong on the way."""

    def __init__(self, count, spoil=None):
        self.memories = [Memory() for _ in range(count)]
        self.sites = [Site(rows, lambda run, n=n: self.memories[n]) for n in range(count)]
        self.spoil = spoil or (lambda method, n, request, answer: answer)
        self.calls = []

    def call(self, method, requests):
        replies = {}
        for n, request in requests.items():
            self.calls.append((method, n))
            try:
                answer = getattr(self.sites[n], method)(**request)
                replies[n] = Reply(self.spoil(method, n, request, answer), "", 0.0)
            except Exception as error:
                replies[n] = Reply(None, str(error), 0.0, said=True)
        return replies


def settings(scheme, clients=3, **values):
    train = {k: v for k, v in values.items() if k in TrainConfig.__dataclass_fields__}
    split = {k: v for k, v in values.items() if k in SplitConfig.__dataclass_fields__}
    return Config(
        data=DataConfig(clients=clients, sizes="unequal"),
        model=ModelConfig(arch="cnn-small"),
        split=SplitConfig(scheme=scheme, **split),
        train=TrainConfig(**({"batch": 8, "rounds": 10} | train)),
    )


def comparable(scheme, **values):
    """Settings under which last bits stay last bits.

    Where client halves are averaged in every round, the simulator runs all clients as one, which adds in another order;
    the two-bit rounding of sfl-gb could make a step of that.
    """
    return settings(scheme, **values, **({"sync_every": 5} if scheme == "sfl-gb" else {}))


def federation(config, line, **options):
    model = build(config.model.arch, IMAGES.train_x.shape[1:], IMAGES.classes, torch_seed(config.train.seed, "model"))
    names = [f"site-{n + 1}" for n in range(config.data.clients)]
    made = Federation(config, model, IMAGES.classes, names, line, Limits(**options))
    made.start()
    return made


def at(engine, cut):
    return engine.scheme.place(cut, engine.model.depth)


def flat(engine, params):
    return torch.cat([params[k].flatten() for k in engine.model.initial() if k in params])  # one of several heads


def difference(fed, sim):
    ours = fed.halves.average().params | fed.state.server.params
    return float((flat(fed, ours) - flat(sim, sim.state.averaged(sim.weights))).abs().max())


@pytest.mark.parametrize("name", now(SCHEMES, "sfl-ga", "sfl-gb", "sl"))
@pytest.mark.parametrize("tau", now([1, 3], 3))
def test_ten_rounds_equal_the_simulator(name, tau):
    config = comparable(name, local_steps=tau, momentum=0.5 if tau == 3 else 0.0)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 11):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert difference(fed, sim) < 1e-6
    assert fed.drift() == pytest.approx(sim.drift(), abs=1e-5)


FORMATS = [
    ("transform:0.5", "transform:5%"),
    ("transform:20B", "transform:0.01"),
    ("transform:40..10B@2", "transform:200..50B@3"),
    ("rotated:4", "lloyd:2"),
    ("int4+outliers", "rotated:8+outliers"),
    ("c3sl:2", "c3sl:2"),
    ("randtopk:20%", "fp32"),
    ("fedlite:49,4", "rotated:2"),
    ("splitfc:1/4", "splitfc:2/1"),
    ("fp32", "topk:30%"),
]


@pytest.mark.parametrize("formats", now(FORMATS, *FORMATS[::2]))
def test_every_format_travels_as_the_simulator_says(formats):
    """With halves that stay apart, both add in the same order, so that no last bit becomes another level; small steps
    leave it a last bit."""
    uplink, downlink = formats
    config = settings("psl", uplink_codec=uplink, downlink_codec=downlink, local_steps=2, lr=0.005)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 4):
        assert fed.round(t).ledger.events == sim.round(t).ledger.events
    assert difference(fed, sim) < 1e-6


def test_plans_of_a_rate_that_changes_expect_that_of_the_round():
    """Eight samples of 200, 20 and again 20 bytes at most; the clock charges fewer operations for fewer bytes."""
    config = settings("psl", uplink_codec="transform:200..20B@2")
    scenario = scenario_of(config, make_simulator(config, IMAGES).model)
    dry = [scenario.dry(scenario.place(1), t).messages[0] for t in (1, 2, 3)]
    assert [message.nbytes for message in dry] == [math.ceil(8 * 200 * 0.1**0.5), 160, 160]
    assert dry[0].coding[0] > dry[1].coding[0] == dry[2].coding[0]
    assert [scenario.scheme.pattern(t) for t in (1, 2, 3)].count(scenario.scheme.pattern(2)) == 2


@pytest.mark.parametrize("name", SCHEMES)
def test_participation_and_dropout_equal_the_simulator(name):
    config = comparable(name, participation=0.7, dropout=0.3, momentum=0.9)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 11):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
    assert difference(fed, sim) < 1e-6


def test_sfl_gb_with_averaging_in_every_round_equals_the_simulator():
    config = settings("sfl-gb", sync_every=1, uplink_codec="fp32", downlink_codec="fp32")
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 11):
        assert fed.round(t).loss == pytest.approx(sim.round(t).loss, abs=1e-5)
    assert difference(fed, sim) < 1e-6


@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "sfl-gb", "sl"])
def test_moving_the_cut_equals_the_simulator(name):
    config = settings(name, momentum=0.5, downlink_codec="fp32")
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t, cut in enumerate([2, 4, 1, 3, 3, 2, 1], start=1):
        ours, theirs = Ledger(), Ledger()
        fed.place(at(fed, cut), ours, charge=t > 1)
        sim.place(at(sim, cut), theirs, charge=t > 1)
        assert fed.round(t, ours).ledger.messages == sim.round(t, theirs).ledger.messages
    assert difference(fed, sim) < 1e-6


def lie(message, **changes):
    return message | changes


SMALL = 8 * 4 * 14 * 14  # values of cnn-small at cut 1 for a batch of 8
LIES = {
    "NaN": (lambda m: lie(m, data=np.full(SMALL, np.nan, np.float32).tobytes()), "NaN"),
    "shape": (lambda m: lie(m, shape=[8, 4, 14, 13]), "shape"),
    "dtype": (lambda m: lie(m, format="fp64", data=np.zeros(SMALL).tobytes()), "'fp64', not 'fp32'"),
    "oversized": (lambda m: lie(m, data=m["data"] + bytes(4)), f"has {4 * SMALL + 4} bytes, not {4 * SMALL}"),
    "truncated": (lambda m: lie(m, data=m["data"][:-1]), f"has {4 * SMALL - 1} bytes"),
    "no bytes": (lambda m: lie(m, data=[1.0]), "a list, not bytes"),
    "no message": (lambda m: "hello", "is not a message"),
    "too large": (lambda m: lie(m, data=np.full(SMALL, 1e15, np.float32).tobytes()), "in size, where"),
    "markup": (lambda m: lie(m, shape="[/x]"), "shape"),
    "overflow": (lambda m: lie(m, data=np.full(SMALL, 3e38, np.float32).tobytes()), "in size, where"),
}


@pytest.mark.parametrize("tau", now([1, 2], 2))
@pytest.mark.parametrize("kind", LIES)
def test_a_bad_message_is_refused_and_touches_nothing_else(kind, tau):
    spoil, reason = LIES[kind]

    def spoiled(method, n, request, answer):
        if method == "begin" and n == 1 and request["round_"] == 2:
            return answer | {"messages": [spoil(answer["messages"][0]), *answer["messages"][1:]]}
        return answer

    def silent(method, n, request, answer):
        if method == "begin" and n == 1 and request["round_"] == 2:
            return None
        return answer

    config = settings("psl", local_steps=tau)
    lied, failed = federation(config, Wired(3, spoiled)), federation(config, Wired(3, silent))
    for t in (1, 2, 3):
        report = lied.round(t)
        failed.round(t)
        assert report.clients == ([0, 2] if t == 2 else [0, 1, 2])
        assert list(report.measured.failures) == (["site-2"] if t == 2 else [])
        if t == 2:
            assert reason in report.measured.failures["site-2"]
    ours, theirs = (flat(f, f.halves.average().params | f.state.server.params) for f in (lied, failed))
    assert torch.equal(ours, theirs) and torch.isfinite(ours).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": np.full(10, 200, np.uint8).tobytes()[:8]}, "200 is not below 10"),
        ({"data": bytes(9)}, "9 bytes, not 8"),
        ({"format": "int64"}, "'int64', not 'uint8'"),
    ],
)
def test_bad_labels_are_refused(change, reason):
    def spoil(method, n, request, answer):
        if method != "begin" or n != 0:
            return answer
        smashed, labels = answer["messages"]
        return answer | {"messages": [smashed, labels | change]}

    report = federation(settings("sfl-ga"), Wired(3, spoil)).round(1)
    assert report.clients == [1, 2] and reason in report.measured.failures["site-1"]


@pytest.mark.parametrize("kind", ["NaN", "shape", "dtype", "oversized", "truncated", "no bytes", "no message"])
def test_a_site_refuses_a_bad_gradient_and_stays_as_it_is(kind):
    spoil, reason = LIES[kind]
    line = Wired(2)
    fed = federation(settings("psl", clients=2), line)
    fed.round(1)
    call = line.call

    def tampered(method, requests):
        if method == "proceed":
            requests = dict(requests)
            requests[1] = requests[1] | {"messages": [spoil(requests[1]["messages"][0])]}
        return call(method, requests)

    before = {k: v.clone() for k, v in line.sites[1].weights.params.items()}
    other = {k: v.clone() for k, v in line.sites[0].weights.params.items()}
    line.call = tampered
    report = fed.round(2)
    assert list(report.measured.failures) == ["site-2"] and reason in report.measured.failures["site-2"]
    assert all(torch.equal(v, line.sites[1].weights.params[k]) for k, v in before.items())
    assert not all(torch.equal(v, line.sites[0].weights.params[k]) for k, v in other.items())


def test_a_site_that_keeps_failing_is_dropped_and_rho_renormalised():
    def dead(method, n, request, answer):
        return None if n == 2 and request.get("round_", 0) >= 2 else answer

    line = Wired(3, dead)
    fed = federation(settings("sfl-ga"), line, drop_after=2)
    reports = [fed.round(t) for t in range(1, 6)]
    assert [len(r.clients) for r in reports] == [3, 2, 2, 2, 2]
    assert [bool(r.measured.failures) for r in reports] == [False, True, True, False, False]
    assert "left alone" in reports[2].measured.failures["site-3"]
    assert [n for method, n in line.calls if method == "begin"].count(2) == 1 + 2 * 2  # a lost call is repeated once
    assert fed.halves.rho([0, 1]).sum() == pytest.approx(1)


def test_smashed_data_that_overflow_are_refused_where_sizes_are_not_judged():
    spoil, _ = LIES["overflow"]

    def spoiled(method, n, request, answer):
        if method == "begin" and n == 1:
            return answer | {"messages": [spoil(answer["messages"][0]), *answer["messages"][1:]]}
        return answer

    report = federation(settings("psl"), Wired(3, spoiled), outlier=0.0).round(1)
    assert report.clients == [0, 2] and "not finite" in report.measured.failures["site-2"]


def test_a_site_comes_back_and_takes_part_with_the_averaged_half():
    def away(method, n, request, answer):
        return None if n == 2 and 2 <= request.get("round_", 0) <= 5 else answer

    transport = Wired(3, away)
    fed = federation(settings("psl"), transport, drop_after=2)
    clients = [fed.round(t).clients for t in range(1, 9)]
    assert clients == [[0, 1, 2]] + 4 * [[0, 1]] + 3 * [[0, 1, 2]]


def test_a_site_that_is_absent_when_a_job_begins_is_in_the_record():
    config = settings("sfl-ga")
    model = build(config.model.arch, IMAGES.train_x.shape[1:], IMAGES.classes, 0)
    fed = Federation(config, model, IMAGES.classes, ["site-1", "site-2", "site-3"], Wired(3), Limits(), absent=[2])
    fed.start()
    report = fed.round(1)
    assert report.clients == [0, 1] and report.measured.failures == {
        "site-3": "absent: not connected when the job began"
    }


@pytest.mark.parametrize("classes", [10**12, 0, -1, 2.0, "10", None])
def test_a_site_reads_and_makes_nothing_for_a_number_of_classes_that_cannot_be(classes):
    def never(config, client):
        raise AssertionError("rows were read")

    asked = {"call": 1, "config": to_toml(settings("sfl-ga")), "run": "r", "client": 0, "input_shape": [1, 28, 28]}
    with pytest.raises(SplitcastError, match="classes: "):
        Site(never, lambda run: None).join(**asked, classes=classes)


@pytest.mark.long
def test_every_site_is_still_a_member_after_many_lost_calls():
    rng = np.random.default_rng(0)

    def lossy(method, n, request, answer):
        return None if rng.random() < 0.1 and method != "join" else answer

    clients = 20
    fed = federation(settings("sfl-ga", clients=clients, rounds=40, batch=2), Wired(clients, lossy))
    failed = sum(len(fed.round(t).measured.failures) for t in range(1, 41))
    assert failed > 0 and fed.sites.present == set(range(clients))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seconds": "soon"}, "seconds: 'soon'"),
        ({"seconds": -1.0}, "seconds: -1.0"),
        ({"seconds": float("nan")}, "seconds: nan"),
        ({"loss": float("inf")}, "loss: inf"),
        ({"loss": float("nan")}, "loss: nan"),
        ({"messages": "[/x]"}, "messages"),
        ({"messages": [{}] * 1000}, "messages"),
    ],
)
@pytest.mark.parametrize("name", ["sfl-ga", "fl"])
def test_plain_values_of_a_site_are_checked(changes, reason, name):
    def spoil(method, n, request, answer):
        return answer | changes if method == "begin" and n == 1 else answer

    report = federation(settings(name), Wired(3, spoil)).round(1)
    assert report.clients == [0, 2] and reason in report.measured.failures["site-2"]


@pytest.mark.parametrize("rows", [float("inf"), 10**30, 10**9, -100, 0, True, "many", None])
def test_rows_that_nobody_has_are_refused(rows):
    def spoil(method, n, request, answer):
        return answer | {"rows": rows} if method == "join" and n == 1 else answer

    fed = federation(settings("sfl-ga"), Wired(3, spoil))
    assert fed.sites.present == {0, 2} and "rows" in fed.sites.failures[1]
    assert fed.halves.rho([0, 2]).max() < 1


@pytest.mark.parametrize("value", [1e15, 3e38])
@pytest.mark.parametrize("name", ["sfl", "fl"])
def test_a_half_far_from_all_others_never_enters(name, value):
    def spoil(method, n, request, answer):
        if n != 1 or method not in ("begin", "proceed") or request["round_"] != 2:
            return answer
        half = [m for m in answer["messages"] if m["kind"] == "model"]
        if not half:
            return answer
        huge = np.full(len(half[0]["data"]) // 4, value, np.float32).tobytes()
        return answer | {"messages": [m | {"data": huge} if m["kind"] == "model" else m for m in answer["messages"]]}

    fed, honest = federation(settings(name), Wired(3, spoil)), federation(settings(name), Wired(3))
    for t in range(1, 6):
        report, usual = fed.round(t), honest.round(t)
        assert list(report.measured.failures) == (["site-2"] if t == 2 else []), report.measured.failures
        assert report.loss == pytest.approx(usual.loss, abs=0.5)
    assert torch.isfinite(flat(fed, fed.state.client.params | fed.state.server.params)).all()


def test_a_replayed_round_is_noticed():
    old = {}

    def replay(method, n, request, answer):
        if method == "begin" and n == 1:
            old.setdefault("messages", answer["messages"])
            return answer | {"messages": old["messages"]}
        return answer

    fed = federation(settings("psl"), Wired(3, replay))
    assert fed.round(1).clients == [0, 1, 2]
    report = fed.round(2)
    assert report.clients == [0, 1, 2] and "same bytes" in report.measured.failures["site-2"]
    assert fed.sites.strikes == {}, "noted, not punished: where nothing moves any more it is the truth"


@pytest.mark.parametrize("average", ["clipped", "median", "trimmed"])
def test_robust_averages_bound_what_one_site_can_do(average):
    def push(method, n, request, answer):
        if n != 1 or not isinstance(answer.get("messages"), list):
            return answer
        shifted = [
            m | {"data": (np.frombuffer(m["data"], np.float32) + 1).tobytes()} if m["kind"] == "model" else m
            for m in answer["messages"]
        ]
        return answer | {"messages": shifted}

    moved = {}
    for how in ("mean", average):
        attacked, honest = (federation(settings("sfl"), Wired(3, s), average=how, outlier=0.0) for s in (push, None))
        for fed in (attacked, honest):
            fed.round(1)
        ours, theirs = (flat(f, f.state.client.params | f.state.server.params) for f in (attacked, honest))
        moved[how] = float((ours - theirs).abs().max())
    assert moved[average] < moved["mean"] / 5


def test_training_stops_when_too_few_sites_are_left():
    def dead(method, n, request, answer):
        return None if n and request.get("round_", 0) >= 2 else answer

    fed = federation(settings("sfl"), Wired(3, dead), drop_after=1, min_sites=2)
    fed.round(1)
    with pytest.raises(NoSites, match="1 of 3 left, 2 needed"):
        fed.round(2)


def resumed(first, line, t, lost=()):
    """Server and sites anew after round ``t``, with what they have on their disks, but for the sites that lost it."""
    kept, again = first.snapshot(t), Wired(3)
    for n in lost:
        line.memories[n].clear()
    again.memories[:] = line.memories
    second = Federation(first.config, first.model, IMAGES.classes, first.sites.names, again, Limits())
    second.resume(*kept, t)
    return second


ROUNDED = [("sfl", {"sync_codec": "int8"}), ("sfl", {"sync_codec": "int4", "sync_every": 2}), ("sfl-tc", {})]
RESUMED = [*((name, {"sync_every": 2} if name == "sfl-gb" else {}) for name in SCHEMES), *ROUNDED]


@pytest.mark.parametrize("case", now(RESUMED, *RESUMED[:7:2], *ROUNDED), ids=str)
def test_a_resumed_federation_goes_on_exactly(case):
    """With what rounding left over, too, of halves that travel as differences."""
    name, values = case
    config = settings(name, momentum=0.5, **values)
    whole, line = federation(config, Wired(3)), Wired(3)
    first = federation(config, line)
    for t in (1, 2, 3):
        whole.round(t)
        first.round(t)
    second = resumed(first, line, 3)
    for t in (4, 5):
        ours, theirs = second.round(t), whole.round(t)
        assert ours.loss == theirs.loss and ours.ledger.messages == theirs.ledger.messages
    ours, theirs = (flat(f, f.halves.average().params | f.state.server.params) for f in (second, whole))
    assert torch.equal(ours, theirs)


def test_who_lost_what_it_kept_is_given_the_whole_half_also_where_differences_travel():
    config, line = settings("sfl", sync_codec="int8", sync_every=2), Wired(3)
    first = federation(config, line)
    for t in (1, 2, 3):
        first.round(t)
    second = resumed(first, line, 3, lost=[1])
    assert second.halves.stale == {1}
    report = second.round(4)
    assert report.clients == [0, 1, 2] and not report.measured.failures
    held = [site.weights.flat() for site in second.sites.transport.sites]
    assert all(torch.equal(half, second.state.client.flat()) for half in held)


def test_an_empty_site_joins_with_the_averaged_half():
    config, line = settings("psl"), Wired(3)
    first = federation(config, line)
    first.round(1)
    second = resumed(first, line, 1, lost=[1])
    again = second.sites.transport
    assert second.halves.stale == {1}
    second.halves.refresh()
    own = first.sites.transport.sites
    halves = torch.stack([torch.cat([v.flatten() for v in own[n].weights.params.values()]) for n in (0, 2)])
    expected = second.halves.rho([0, 2]) @ halves
    got = torch.cat([v.flatten() for v in again.sites[1].weights.params.values()])
    assert torch.allclose(got, expected, atol=1e-7)
    second.round(2)


@pytest.mark.parametrize("name", ["psl", "sfl-ga", "epsl-cut", "sfl-gb", "sfl", "fl", "sl"])
@pytest.mark.parametrize("cut", now([1, 2], 2))
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_messages_are_exactly_the_bytes_of_the_ledger(name, cut, participation):
    config = settings(name, participation=participation)
    fed = federation(with_values(config, sync_every=1) if name == "sfl-gb" else config, Wired(3))
    fed.round(1)
    fed.sites.traffic.clear()
    ledger = Ledger()
    fed.place(at(fed, cut), ledger)
    ledger = fed.round(2, ledger).ledger
    each = sum(m.of(n) for m in ledger.messages for n in m.clients)  # on wires a broadcast is sent to each
    assert sum(fed.sites.traffic.values()) == each


def test_byte_limits():
    fed = federation(settings("psl"), Wired(3), site_bytes=60_000)
    assert len(fed.round(1).clients) == 3
    with pytest.raises(NoSites, match="site_bytes = 60000"):
        fed.round(2)
    fed = federation(settings("psl"), Wired(3), total_bytes=100_000)
    with pytest.raises(SplitcastError, match="total_bytes"):
        fed.round(1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"client_update": "identical"}, "client_update"),
        ({"dtype": "float64"}, "dtype"),
        ({"clients": 2}, "2, but the deployment has 3 sites"),
    ],
)
def test_what_cannot_travel_is_refused(values, words):
    config = settings("sfl-ga", **values)
    names = ["a", "b", "c"]
    model = build("cnn-small", (1, 28, 28), 10, 0)
    with pytest.raises(SplitcastError, match=words):
        Federation(config, model, 10, names, Wired(3), Limits())


def test_measuring_gamma_needs_the_simulator():
    config = dataclasses.replace(settings("sfl-ga"), policy=PolicyConfig(policy="greedy", gamma_draws=3))
    with pytest.raises(SplitcastError, match="gamma_draws"):
        federation(config, Wired(3))


def test_the_round_loop_over_sites_with_a_policy_equals_the_simulator(tmp_path):
    config = dataclasses.replace(settings("sfl-ga", rounds=6, checkpoint_every=3), policy=PolicyConfig(policy="random"))
    here = train(config)
    there = train(config, tmp_path / "run", engine=federation(config, Wired(3)), dataset=IMAGES)
    assert len({record.cut for record in here.rounds}) > 1
    for ours, theirs in zip(there.rounds, here.rounds, strict=True):
        plain = dataclasses.replace(ours, wall_s=None, loss=theirs.loss, drift=theirs.drift, test_loss=theirs.test_loss)
        assert plain == theirs
    assert RunFolder(tmp_path / "run").restore().round == 6
    assert there.rounds[-1].drift == pytest.approx(here.rounds[-1].drift, abs=1e-5)
    assert there.rounds[0].drift is None  # nobody asked for the halves


@pytest.mark.parametrize("name", ["psl", "sfl-ga", "sfl-gb"])
def test_messages_of_any_size_equal_the_simulator(name):
    """Client halves stay apart, so that nothing adds in another order and no level hangs on a last bit."""
    codecs = {"uplink_codec": "transform:2..1@5", "downlink_codec": "int8" if name == "sfl-gb" else "transform:1%"}
    config = settings(name, sync_every=5, momentum=0.5, **codecs)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 11):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert len(set(ours.ledger.messages[0].nbytes)) > 1
    assert difference(fed, sim) < 1e-6
