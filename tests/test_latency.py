"""Latency: every scheme by hand for two clients, the ledger against the stages, and what can never happen.

The hand-worked cell: B = 1 kHz and N0 = 1 nW/Hz, so B N0 = 1 uW; P = 1 W and gains 3e-6 and 1e-6, so that the server
reaches the clients with log2(1 + 3) = 2 and log2(1 + 1) = 1 bit/s/Hz; client powers 0.5 and 1.5 W, so that both are
heard with 1.5 uW, which is log2(1 + 3) = 2 bit/s/Hz over half the band and log2(2.5) over all of it; client speeds 100
and 200 FLOP/s, the server 1000. The model is Linear(4, 3), Linear(3, 2), two samples per batch, cut 1:

  client: forward 2·4·3·2 = 48 FLOP, backward (weights only) 48; server: 2·(12 + 24) = 72; all on the client: 168
  smashed data 2·3·4 = 24 bytes = 192 bit, labels 2 bytes = 16 bit; client half 15 values = 480 bit, model 23 = 736 bit
"""

from math import log2, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splitcast import data
from splitcast.base.config import Config, DataConfig, EpslConfig, NetworkConfig, SplitConfig, TrainConfig, with_values
from splitcast.cost.cell import Cell
from splitcast.cost.clock import ALLOCATORS, round_seconds, time_rounds
from splitcast.cost.latency import PARTS
from splitcast.cost.scenario import RoundClock, Scenario
from splitcast.cost.stages import Stage, fold
from splitcast.cost.trace import Trace
from splitcast.engine import simulator as engine
from splitcast.engine.dry import dry_round
from splitcast.model.split import SplitModel
from splitcast.run.parts import make_simulator
from splitcast.schemes.messages import JointWork, Ledger, Message, Work
from splitcast.studies.plan import scenario_of
from splitcast.training.optimiser import make_optimiser
from splitcast.training.placement import Placement
from splitcast.training.task import Classification
from test_ledger import simulator

ALONE = 1000 * log2(2.5)  # uplink rate over the whole band


def two_clients(tmp_path, scheme, tau=1, momentum=0.0, **network):
    file = tmp_path / "trace.csv"
    Trace(np.array([[3e-6, 1e-6]])).save(file)
    cell = {
        "bandwidth_hz": 1000,
        "noise_dbm_per_hz": -60,
        "server_power_dbm": 30,
        "client_power_dbm": (30 + 10 * np.log10(0.5), 30 + 10 * np.log10(1.5)),
        "client_flops_per_s": (100, 200),
        "server_flops_per_s": 1000,
        "trace": str(file),
        "allocation": "equal",
    }
    config = Config(
        data=DataConfig(clients=2),
        split=SplitConfig(scheme=scheme),
        epsl=EpslConfig(aggregate=0.5),
        train=TrainConfig(batch=2, local_steps=tau, momentum=momentum, rounds=1),
        network=NetworkConfig(**(cell | network)),
    )
    return Scenario.of(config, SplitModel([nn.Linear(4, 3), nn.Linear(3, 2)], (4,)), Classification(2))


def timed(scenario, stages=None):
    stages = scenario.stages(scenario.place(1), 1) if stages is None else stages
    return time_rounds([stages], scenario.cell, scenario.channel.at(1), scenario.allocator)[0]


# client 1 is the slowest in the first stage: 0.48 computing, 208 bit at 1 kbit/s, 72 FLOP at 500 FLOP/s
UP = 0.48 + 0.208 + 0.144
SL = [  # model down, step up, step down, model up; each client has everything to itself
    *(480 / 2000, 0.48 + 208 / ALONE + 0.072, 192 / 2000 + 0.48, 480 / ALONE),
    *(480 / 1000, 0.24 + 208 / ALONE + 0.072, 192 / 1000 + 0.24, 480 / ALONE),
]
BY_HAND = [
    ("sfl-ga", 1, 0.0, [UP, 192 / 2000 + 0.48]),  # client 1: 0.576, client 2: 0.192 + 0.24
    ("sfl-ga", 3, 0.0, [UP, 0.576] * 3),
    ("psl", 1, 0.0, [UP, 192 / (500 * 2) + 0.48]),  # client 1: 0.672, client 2: 192 / 500 + 0.24 = 0.624
    ("sfl", 1, 0.0, [UP, 0.672, 480 / 1000, 480 / 1000]),  # half the band up, client 2 hears 1 kbit/s
    ("sfl", 2, 0.9, [UP, 0.672] * 2 + [960 / 1000, 960 / 1000]),
    ("epsl-cut", 1, 0.0, [UP, 96 / 1000, 96 / (500 * 2) + 0.48]),  # one row broadcast, then one row unicast
    ("fl", 1, 0.0, [1.68 + 736 / 1000, 736 / 1000]),
    ("fl", 2, 0.0, [3.36 + 736 / 1000, 736 / 1000]),
    ("sl", 1, 0.0, SL),
]


@pytest.mark.parametrize(("scheme", "tau", "momentum", "expected"), BY_HAND)
def test_two_clients_by_hand(tmp_path, scheme, tau, momentum, expected):
    result = timed(two_clients(tmp_path, scheme, tau, momentum))
    assert [float(stage.seconds) for stage in result.stages] == pytest.approx(expected)
    assert float(result.seconds) == pytest.approx(sum(expected))
    assert result.parts_s.sum() == pytest.approx(sum(expected))


def test_who_is_slowest_and_why(tmp_path):
    up, down = timed(two_clients(tmp_path, "psl")).stages
    assert [stage.slowest for stage in (up, down)] == [0, 0]
    assert [up.part(part).tolist() for part in PARTS] == [
        pytest.approx(seconds) for seconds in ([0.48, 0.24], [0.208, 0.208], [0.144, 0.144], [0, 0], [0, 0])
    ]
    assert [down.part(part).tolist() for part in PARTS] == [
        pytest.approx(seconds) for seconds in ([0, 0], [0, 0], [0, 0], [0.192, 0.384], [0.48, 0.24])
    ]
    assert timed(two_clients(tmp_path, "psl")).culprit() == (0, "compute")
    assert timed(two_clients(tmp_path, "psl", client_flops_per_s=(1e4, 1e4))).culprit() == (1, "downlink")


def test_optimal_unicast_by_hand(tmp_path):
    # both finish at psi: 192 / (2 (psi - 0.48)) + 192 / (psi - 0.24) = 1000; with u = psi - 0.48 this is
    # 1000 u^2 - 48 u - 23.04 = 0
    u = (48 + sqrt(48**2 + 4 * 1000 * 23.04)) / 2000
    _, down = timed(two_clients(tmp_path, "psl", allocation="optimal")).stages
    assert float(down.seconds) == pytest.approx(0.48 + u, rel=1e-9)
    assert down.client_s == pytest.approx([0.48 + u] * 2, rel=1e-9)
    assert down.bandwidth_hz == pytest.approx([96 / u, 192 / (u + 0.24)], rel=1e-6)


def test_what_the_feedback_computes_for_all_runs_once_on_the_whole_server(tmp_path):
    scenario = two_clients(tmp_path, "epsl-cut")
    placement = scenario.place(1)
    stages = [s for s in scenario.stages(placement, 1) if s.name == "feedback"]
    events = scenario.dry(placement, 1, [0, 1]).events
    first = next(k for k, event in enumerate(events) if isinstance(event, Message) and event.direction == "down")
    events.insert(first, JointWork(500.0, (0, 1)))
    busy = scenario.stages_of(events, placement)[1:]
    plain, more = time_rounds([stages, busy], scenario.cell, scenario.channel.at(1), scenario.allocator)
    assert [float(s.seconds) for s in plain.stages] == pytest.approx([0.096, 0.576])
    assert [float(s.seconds) for s in more.stages] == pytest.approx([0.5 + 0.096, 0.576])
    assert more.stages[0].server_s == pytest.approx([0.5, 0.5])


def test_the_papers_workload_does_not_depend_on_the_cut(tmp_path):
    scenario = two_clients(tmp_path, "sfl-ga", workload="paper")
    work = scenario.work(scenario.place(1))
    assert work[0, "forward"] == work[0, "backward"] == 2 * 5.6e6
    assert work[1, "both"] == 2 * 2 * 86.01e6
    fl = two_clients(tmp_path, "fl", workload="paper")
    (whole,) = fl.placements()
    assert whole == Placement.whole(2)
    assert fl.work(whole)[0, "forward"] == 2 * 91.61e6
    assert {segment for segment, _ in fl.work(whole)} == {0}, "nothing on the server"


def test_moving_the_cut_takes_time_too(tmp_path):
    scenario = two_clients(tmp_path, "sfl-ga")
    ledger = Ledger()
    ledger.broadcast("migration", 125, [0, 1])  # 1000 bit: client 2 hears 1 kbit/s
    ledger.unicast("up", "migration", 250, [0, 1])  # 2000 bit at 1 kbit/s
    stages = scenario.stages_of(ledger.events, scenario.place(1))
    assert [s.seconds for s in timed(scenario, stages).stages] == (pytest.approx([1.0, 2.0]))


def test_messages_of_different_sizes_take_different_times(tmp_path):
    """Equal shares: half the band is 1 kbit/s up for both, 1 kbit/s and 500 bit/s down; all of it is twice that."""
    scenario = two_clients(tmp_path, "psl")
    ledger, who = Ledger(), (0, 1)
    ledger.add(Work(0, "forward", who))
    ledger.unicast("up", "smashed", [25, 100], who)  # 0.2 s and 0.8 s
    ledger.add(Work(1, "both", who))
    ledger.unicast("down", "gradient", [0, 50], who)  # nothing, 0.8 s
    ledger.add(Work(0, "backward", who))
    up, down = timed(scenario, scenario.stages_of(ledger.events, scenario.place(1))).stages
    assert up.uplink_s == pytest.approx([0.2, 0.8])
    assert up.client_s == pytest.approx([0.48 + 0.2 + 0.144, 0.24 + 0.8 + 0.144])
    assert (int(up.slowest), float(up.seconds)) == (1, pytest.approx(1.184))
    assert down.downlink_s == pytest.approx([0, 0.8])
    assert down.client_s == pytest.approx([0.48, 1.04])
    ledger = Ledger()
    ledger.unicast("up", "smashed", [25, 100], who)
    optimal = two_clients(tmp_path, "psl", allocation="optimal")
    (both,) = timed(optimal, optimal.stages_of(ledger.events, optimal.place(1))).stages
    assert both.client_s[0] == pytest.approx(both.client_s[1], rel=1e-9)
    assert float(both.seconds) < 0.8


def test_a_client_lost_between_local_steps_is_in_the_first_only():
    ledger = Ledger()
    for who in ((0, 1, 2), (1, 2)):
        ledger.add(Work(0, "forward", who))
        ledger.unicast("up", "smashed", 24, who)
        ledger.unicast("up", "labels", 2, who)
        ledger.add(Work(1, "both", who))
        ledger.unicast("down", "gradient", 24, who)
        ledger.add(Work(0, "backward", who))
    stages = fold(ledger.events, Placement.split(1, 2), dict.fromkeys(WORK, 1.0))
    assert [(s.name, s.clients, s.uplink_bits, s.unicast_bits) for s in stages] == [
        ("forward", (0, 1, 2), 8 * 26, 0),
        ("feedback", (0, 1, 2), 0, 8 * 24),
        ("forward", (1, 2), 8 * 26, 0),
        ("feedback", (1, 2), 0, 8 * 24),
    ]


def test_formats_that_compute_are_charged_where_they_do():
    """Clients encode before they send and decode what they got; the server decodes for each and encodes for all."""
    who, flops = (0, 1), {(0, "forward"): 1.0, (0, "backward"): 2.0, (1, "both"): 3.0}
    events = [
        Work(0, "forward", who),
        Message("up", "smashed", 100, who, coding=(5.0, 7.0)),
        Message("up", "labels", 10, who),
        Work(1, "both", who),
        Message("down", "basis", 100, who, broadcast=True, coding=(11.0, 13.0)),
        Message("down", "coefficients", 50, who, coding=(17.0, 19.0)),
        Work(0, "backward", who),
    ]
    up, shared, down = fold(events, Placement.split(1, 2), flops)
    assert (up.compute_flops, up.uplink_bits, up.server_flops) == (1.0 + 5, 880, 7.0 + 3)
    assert (shared.joint_flops, shared.broadcast_bits, shared.backward_flops) == (11.0, 800, 0)
    assert (down.joint_flops, down.unicast_bits, down.backward_flops) == (2 * 17.0, 400, 13.0 + 19 + 2)


def test_a_slow_format_makes_rounds_longer():
    config = with_values(Config(), scheme="sfl", clients=3, batch=4, arch="cnn-small", rounds=1)
    images = data.load("mnist-mini")
    took = {}
    for name in ("fp32", "fedlite:196,2", "fedlite:196,64"):
        sim = make_simulator(with_values(config, uplink_codec=name), images)
        scenario = Scenario.of(sim.config, sim.model, sim.task)
        ledger, dry = sim.round(1).ledger, scenario.dry(scenario.place(1), 1)
        assert [m.coding for m in ledger.messages] == [m.coding for m in dry.messages]
        stage = scenario.stages_of(ledger.events, scenario.place(1))[0]
        took[name] = stage.compute_flops
    values = 4 * 4 * 14 * 14
    assert took["fedlite:196,2"] - took["fp32"] == pytest.approx(36 * values * 2)
    assert took["fedlite:196,64"] - took["fp32"] == pytest.approx(36 * values * 64)


def test_halves_as_differences_are_coded_by_somebody():
    """Who sends takes 9 + 4 operations of int4 and 3 of its own a value, who receives 4 + 1; fp32 takes none."""
    config = with_values(Config(), scheme="sfl", clients=3, batch=4, arch="cnn-small", rounds=1, local_steps=2)
    images, half = data.load("mnist-mini"), 104
    for name, each in (("fp32", (0, 0)), ("int4", (16 * half, 5 * half))):
        sim = make_simulator(with_values(config, sync_codec=name), images)
        scenario = Scenario.of(sim.config, sim.model, sim.task)
        ledger, dry = sim.round(1).ledger, scenario.dry(scenario.place(1), 1)
        assert ledger.messages == dry.messages
        assert [m.coding for m in ledger.messages if m.kind == "model"] == [each] * 2
        *_, up, down = scenario.stages_of(ledger.events, scenario.place(1))
        assert (up.compute_flops, up.server_flops) == each == (down.joint_flops, down.backward_flops)


def test_the_feedback_computes_for_those_who_take_part():
    config = with_values(Config(), scheme="sfl-gb", arch="cnn-small", clients=8, batch=4)
    here = scenario_of(config)
    placement = here.place(1)
    shape = (4, *here.model.smashed_shape(1))
    for who in ([3], [1, 5, 6], range(8)):
        stages = here.stages(placement, 1, who)
        assert sum(s.joint_flops for s in stages) == here.scheme.at(placement).feedback.flops(len(who), shape) > 0


def test_everyone_hears_the_averaged_half():
    here = scenario_of(with_values(Config(), scheme="sfl", arch="cnn-small", clients=3, batch=4))
    *_, upload, broadcast = here.stages(here.place(1), 1, [1])
    assert (upload.clients, broadcast.clients) == ((1,), (0, 1, 2))


def bits(stages, client=None):
    """Per direction: on the air, or of one client without broadcasts."""
    if client is None:
        up = sum(s.total("uplink_bits") for s in stages)
        return up, sum(s.total("unicast_bits") + s.broadcast_bits for s in stages)
    return sum(s.of("uplink_bits", client) + s.of("unicast_bits", client) for s in stages)


WORK = {(0, "forward"): 3.0, (0, "backward"): 5.0, (0, "both"): 8.0, (1, "both"): 7.0}


def check_stages(sim, report):
    stages = fold(report.ledger.events, sim.state.placement, WORK)
    assert bits(stages) == (8 * report.ledger.total("up"), 8 * report.ledger.total("down"))
    for n in range(len(sim.sizes)):
        assert bits(stages, n) == 8 * report.ledger.of_client(n)
    return stages


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["sfl-ga", "sfl", "psl", "epsl-cut", "sfl-gb", "fl", "sl"]),
    cut=st.integers(1, 3),
    clients=st.integers(1, 6),
    batch=st.integers(1, 5),
    tau=st.integers(1, 3),
    up=st.sampled_from(["auto", "fp32", "fp16", "int4"]),
    down=st.sampled_from(["auto", "fp32", "fp16", "int8"]),
    fraction=st.floats(0, 1),
    participation=st.floats(0.1, 1),
    momentum=st.sampled_from([0.0, 0.9]),
    chunk=st.sampled_from([2**25, 300]),
    recut=st.integers(1, 3),
)
def test_stages_carry_exactly_the_bytes_of_the_ledger(
    name, cut, clients, batch, tau, up, down, fraction, participation, momentum, chunk, recut
):
    sim = simulator(
        name, cut, clients, batch, tau, up, down, fraction=fraction, participation=participation, momentum=momentum
    )
    scheme, placement = sim.scheme, sim.state.placement
    whole = engine.CHUNK_BYTES
    try:
        engine.CHUNK_BYTES = chunk  # 300 bytes: clients go in several chunks
        report = sim.round(1)
        stages = check_stages(sim, report)
        ledger = Ledger()
        sim.place(sim.scheme.place(recut, sim.model.depth), ledger)
        moved = check_stages(sim, sim.round(2, ledger))
    finally:
        engine.CHUNK_BYTES = whole
    assert {s.name for s in moved} <= {"re-cut", "forward", "feedback", "model"}

    # what a round would send is what it sends
    dry = dry_round(
        scheme,
        sim.model,
        sim.task,
        placement,
        make_optimiser(sim.config.train),
        1,
        report.clients,
        batch=batch,
        steps=tau,
        everyone=range(clients),
    )
    assert dry.by_kind() == report.ledger.by_kind()
    assert dry.events == report.ledger.events
    assert fold(dry.events, placement, WORK) == stages

    # computing, by hand: every client does tau steps, the server works for each of them
    k = len(report.clients)
    by_hand = (
        {"compute_flops": 3.0, "server_flops": 7.0, "backward_flops": 5.0} if name != "fl" else {"compute_flops": 8.0}
    )
    for load in ("compute_flops", "server_flops", "backward_flops"):
        assert sum(s.total(load) for s in stages) == tau * k * by_hand.get(load, 0.0)


# Random rounds in random cells; powers of ten keep a shrunk example readable.
positive = st.floats(-2, 2).map(lambda x: 10.0**x)


@st.composite
def worlds(draw):
    n = draw(st.integers(1, 5))
    many = st.lists(positive, min_size=n, max_size=n).map(np.array)
    cell = Cell(draw(positive), draw(positive), draw(positive), draw(positive), draw(many), draw(many))
    everyone = tuple(range(n))
    amount = st.one_of(st.just(0), st.integers(1, 1000))
    stages = [
        Stage("forward", everyone, draw(amount), draw(amount), draw(amount)),
        Stage("feedback", everyone, broadcast_bits=draw(amount), joint_flops=draw(amount)),
        Stage("feedback", everyone, unicast_bits=draw(amount), backward_flops=draw(amount)),
    ]
    return cell, stages, draw(many)


@settings(max_examples=40, deadline=None)
@given(world=worlds(), more=st.floats(1, 10))
def test_optimal_is_never_slower_than_equal_and_more_never_hurts(world, more):
    cell, stages, gains = world
    seconds = {
        name: float(round_seconds([stages], cell, gains, allocator)[0]) for name, allocator in ALLOCATORS.items()
    }
    assert seconds["optimal"] <= seconds["equal"] * (1 + 1e-9)
    for field in vars(cell):
        if field != "noise_w_per_hz":
            better = Cell(**(vars(cell) | {field: getattr(cell, field) * more}))
            for name, allocator in ALLOCATORS.items():
                assert round_seconds([stages], better, gains, allocator)[0] <= seconds[name] * (1 + 1e-9), field


def test_all_cuts_and_draws_at_once_equal_one_at_a_time():
    torch.manual_seed(0)
    model = SplitModel([nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)], (6,))
    scenario = Scenario.of(with_values(Config(), scheme="sfl", clients=4, batch=4), model, Classification(3))
    rounds = [scenario.stages(placement, 1) for placement in scenario.placements()]
    gains = np.stack([scenario.channel.at(t) for t in range(1, 7)]).reshape(3, 2, 4)
    together = round_seconds(rounds, scenario.cell, gains)
    assert together.shape == (3, 2, 2)
    for k, stages in enumerate(rounds):
        for at in np.ndindex(3, 2):
            (alone,) = time_rounds([stages], scenario.cell, gains[at])
            assert together[(*at, k)] == pytest.approx(float(alone.seconds), rel=1e-9)


def test_one_call_of_the_allocator_per_way_of_sharing():
    model = SplitModel([nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)], (6,))
    scenario = Scenario.of(with_values(Config(), scheme="sfl", clients=4, local_steps=3), model, Classification(3))
    calls = []

    def count(**arguments):
        calls.append(type(arguments["rate"]).__name__)
        return ALLOCATORS["equal"](**arguments)

    rounds = [scenario.stages(placement, 1) for placement in scenario.placements()]
    round_seconds(rounds, scenario.cell, np.stack([scenario.channel.at(t) for t in range(1, 9)]), count)
    assert sorted(calls) == ["LinearRate", "ShannonRate"]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_clock_started_late_shows_the_same_bits(participation):
    config = with_values(Config(), arch="cnn-small", clients=6, rounds=36, batch=2, participation=participation)
    sim = make_simulator(config, data.load("mnist-mini"))
    scenario = Scenario.of(config, sim.model, sim.task)
    placement = sim.state.placement
    reports = [sim.round(t) for t in range(1, 37)]

    def run(first):
        clock = RoundClock(scenario)
        return [clock.round(t, placement, reports[t - 1].ledger) for t in range(first, 37)]

    assert run(1)[20:] == run(21)
    assert run(1)[33:] == run(34)
    alone = time_rounds([scenario.stages(placement, 1)], scenario.cell, scenario.channel.at(1))[0]
    if participation == 1:
        assert run(1)[0].latency_s == pytest.approx(float(alone.seconds), rel=1e-9)
