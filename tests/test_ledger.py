"""The ledger against the closed form of every scheme, and the stages that hand-made events fold into."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splitcast.base.codec import FP32
from splitcast.base.config import Config, with_values
from splitcast.cost.stages import Stage, fold
from splitcast.engine.links import CountingLink, SimulatedLink
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import JointWork, Ledger, Message, Work
from splitcast.training.placement import Placement, Segment
from splitcast.training.task import Classification
from stand_in import Nonzero, StandIn

WIDTHS = [5, 4, 3, 2, 3]  # input and the outputs of four linear blocks
VALUES = {"fp32": 4, "fp16": 2}


def simulator(name, cut, clients, batch, tau, up="fp32", down="fp32", **options):
    torch.manual_seed(0)
    blocks = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    rows = 4 * clients
    x, y = torch.randn(rows, WIDTHS[0]), torch.arange(rows) % 3
    settings = {"scheme": name, "cut": cut, "clients": clients, "batch": batch, "local_steps": tau}
    codecs = {"uplink_codec": up, "downlink_codec": down, "epsl.aggregate": options.pop("fraction", 0.5)}
    config = with_values(Config(), **settings, **codecs, **options)
    parts = np.split(np.arange(rows), clients)
    return Simulator(config, SplitModel(blocks, (WIDTHS[0],)), Classification(3), x, y, parts)


def closed_form(name, cut, k, b, tau, up, down, fraction, momentum):
    """Bytes up and down per round for k clients, written out per scheme."""
    d = WIDTHS[cut]
    phi = sum(WIDTHS[i] * WIDTHS[i + 1] + WIDTHS[i + 1] for i in range(cut))
    q = sum(WIDTHS[i] * WIDTHS[i + 1] + WIDTHS[i + 1] for i in range(4))
    model = 4 * (2 if momentum else 1)
    u, g = VALUES[up] * b * d, VALUES[down] * d
    smashed = tau * k * (u + b)  # labels: one byte each
    m = round(fraction * b)
    return {
        "sfl-ga": (smashed, tau * g * b),
        "sfl": (smashed + k * model * phi, tau * k * g * b + model * phi),
        "psl": (smashed, tau * k * g * b),
        "epsl-cut": (smashed, tau * g * (m + k * (b - m))),
        "fl": (k * model * q, model * q),
        "sl": (smashed + k * model * phi, tau * k * g * b + k * model * phi),
    }[name]


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["sfl-ga", "sfl", "psl", "epsl-cut", "fl", "sl"]),
    cut=st.integers(1, 3),
    clients=st.integers(1, 6),
    batch=st.integers(1, 7),
    tau=st.integers(1, 3),
    up=st.sampled_from(["fp32", "fp16"]),
    down=st.sampled_from(["fp32", "fp16"]),
    fraction=st.floats(0, 1),
    participation=st.floats(0.1, 1),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_ledger_is_the_closed_form(name, cut, clients, batch, tau, up, down, fraction, participation, momentum):
    sim = simulator(
        name,
        cut,
        clients,
        batch,
        tau,
        up,
        down,
        fraction=fraction,
        participation=participation,
        momentum=momentum,
    )
    report = sim.round(1)
    k = len(report.clients)
    assert k == max(1, round(participation * clients))
    expected = closed_form(name, cut, k, batch, tau, up, down, fraction, momentum)
    assert (report.ledger.total("up"), report.ledger.total("down")) == expected
    # every byte belongs to one client or was broadcast, and none to an absent client
    apart = {n: report.ledger.of_client(n) for n in range(clients)}
    assert sum(apart.values()) + report.ledger.broadcasts() == report.ledger.total()
    assert all(apart[n] == 0 for n in apart if n not in report.clients)
    assert sum(report.ledger.by_kind().values()) == report.ledger.total()


def test_a_broadcast_counts_once_and_a_unicast_per_client():
    ledger = Ledger()
    ledger.broadcast("gradient", 10, [0, 1, 2])
    ledger.unicast("up", "smashed", 7, [0, 2])
    assert (ledger.total("down"), ledger.total("up"), ledger.of_client(1), ledger.of_client(2)) == (
        10,
        14,
        0,
        7,
    )


def test_dropout_leaves_out_about_its_share_and_never_all():
    sim = simulator("sfl", 1, 6, 2, 1, dropout=0.5)
    counts = [len(sim.round(t).clients) for t in range(1, 201)]
    assert min(counts) >= 1
    assert sum(counts) / 200 == pytest.approx(3, abs=0.3)
    lonely = simulator("sfl", 1, 6, 2, 1, dropout=0.99)
    assert {len(lonely.round(t).clients) for t in range(1, 21)} == {1}


def sparse(*counts):
    """One message of (2, 2) values for each client, with so many that are not zero."""
    x = torch.zeros(len(counts), 2, 2)
    for one, count in zip(x, counts, strict=True):
        one.view(-1)[:count] = torch.arange(1.0, count + 1)
    return x


def test_a_message_whose_size_varies_is_counted_for_each_client():
    ledger, clients = Ledger(), StandIn([4, 7, 2])
    link = SimulatedLink(ledger, seed=0)
    x = sparse(3, 0, 1)  # five bytes a value
    assert torch.equal(link.up("smashed", x, Nonzero(), clients).whole(), x)
    assert torch.equal(link.unicast("gradient", x, Nonzero(), clients), x)
    assert torch.equal(link.broadcast("basis", sparse(2), Nonzero(), clients), sparse(2))
    assert ledger.messages == [
        Message("up", "smashed", (15, 0, 5), (4, 7, 2)),
        Message("down", "gradient", (15, 0, 5), (4, 7, 2)),
        Message("down", "basis", 10, (4, 7, 2), broadcast=True),
    ]
    assert (ledger.total("up"), ledger.total("down"), ledger.broadcasts()) == (20, 30, 10)
    assert [ledger.of_client(n) for n in (4, 7, 2, 0)] == [30, 0, 10, 0]
    assert ledger.by_kind() == {"up.smashed": 20, "down.gradient": 20, "down.basis": 10}


def test_a_plan_counts_what_such_a_message_is_expected_to_have():
    ledger = Ledger()
    CountingLink(ledger).up("smashed", sparse(3, 0, 1), Nonzero(), StandIn([4, 7, 2]))
    assert ledger.messages == [Message("up", "smashed", 10, (4, 7, 2))]


@pytest.mark.parametrize("chunk", [2**26, 1])
def test_a_training_counts_such_messages_too(chunk, monkeypatch):
    """Of 3 x 4 smashed values a linear client half sends all, one with a ReLU some; also from clients in chunks."""
    monkeypatch.setattr("splitcast.engine.simulator.CHUNK_BYTES", chunk)
    config = with_values(Config(), scheme="psl", uplink_codec="stand_in:Nonzero", clients=2, batch=3)
    torch.manual_seed(0)
    x, y, parts = torch.randn(8, 5), torch.arange(8) % 3, np.split(np.arange(8), 2)
    sent = {}
    for block in (nn.Linear(5, 4), nn.Sequential(nn.Linear(5, 4), nn.ReLU())):
        sim = Simulator(config, SplitModel([block, nn.Linear(4, 3)], (5,)), Classification(3), x, y, parts)
        smashed = sim.round(1).ledger.messages[0]
        assert (smashed.kind, smashed.clients) == ("smashed", (0, 1))
        batches = x[sim.rows(1, 0, np.arange(2))]
        assert smashed.nbytes == tuple(5 * int((block(batch) != 0).sum()) for batch in batches)
        sent[type(block)] = smashed.on_air
    assert sent[nn.Linear] == 2 * 5 * 12 > sent[nn.Sequential]


def test_groups_side_by_side_are_one_event_each():
    """Two groups, two steps each: the events of the second join those of the first, sizes and clients in order."""
    ledger = Ledger()
    ledger.broadcast("migration", 9, [0, 1, 2, 3])
    start = len(ledger.events)
    for ids, first in (([0, 1], 6), ([3], 6)):
        ledger.alongside(start)
        for step in range(2):
            ledger.add(Work(0, "forward", tuple(ids)))
            ledger.unicast("up", "smashed", first if step == 0 else [10 + n for n in ids], ids)
            ledger.joint(100.0, ids)
    ledger.alongside(None)
    ledger.unicast("up", "model", 5, [0, 1, 3])
    everyone = (0, 1, 3)
    assert ledger.events == [
        Message("down", "migration", 9, (0, 1, 2, 3), broadcast=True),
        Work(0, "forward", everyone),
        Message("up", "smashed", 6, everyone),
        JointWork(200.0, everyone),
        Work(0, "forward", everyone),
        Message("up", "smashed", (10, 11, 13), everyone),
        JointWork(200.0, everyone),
        Message("up", "model", 5, everyone),
    ]
    assert ledger.total("up") == 3 * 6 + 34 + 3 * 5


def test_sizes_of_groups_that_differ_are_kept_apart():
    ledger = Ledger()
    for ids, size in (([0, 1], 6), ([2], 7), ([3, 4], [1, 2])):
        ledger.alongside(0)
        ledger.unicast("up", "smashed", size, ids)
    assert ledger.messages == [Message("up", "smashed", (6, 6, 7, 1, 2), (0, 1, 2, 3, 4))]
    assert [ledger.of_client(n) for n in range(5)] == [6, 6, 7, 1, 2]


@pytest.mark.parametrize("name", ["psl", "sfl", "fl"])
def test_chunks_of_clients_leave_the_events_of_all_at_once(name, monkeypatch):
    whole = simulator(name, 2, 5, 3, 2).round(1).ledger
    monkeypatch.setattr("splitcast.engine.simulator.CHUNK_BYTES", 1)
    assert simulator(name, 2, 5, 3, 2).round(1).ledger.events == whole.events


FLOPS = {(0, "forward"): 1.0, (0, "backward"): 2.0, (0, "both"): 3.0, (1, "both"): 40.0}
WHO, PHASES = (0, 1), ("forward", "backward")


def up(nbytes, kind="smashed", who=WHO):
    return Message("up", kind, nbytes, who)


def down(nbytes, kind="gradient", who=WHO, *, broadcast=False):
    return Message("down", kind, nbytes, who, broadcast)


def test_a_local_step_folds_into_two_stages():
    events = [Work(0, "forward", WHO), up(10), up(2, "labels"), Work(1, "both", WHO)]
    events += [JointWork(500.0, WHO), down(7, broadcast=True), Work(0, "backward", WHO)]
    assert fold(events, Placement.split(1, 2), FLOPS) == [
        Stage("forward", WHO, compute_flops=1.0, uplink_bits=96, server_flops=40.0),
        Stage("feedback", WHO, joint_flops=500.0, broadcast_bits=56, backward_flops=2.0),
    ]


def test_bytes_of_each_client_become_bits_of_each():
    events = [Work(0, "forward", WHO), up((10, 3)), up(2, "labels"), Work(1, "both", WHO)]
    events += [down((0, 5)), down((1, 1)), Work(0, "backward", WHO)]
    first, second = fold(events, Placement.split(1, 2), FLOPS)
    assert first == Stage("forward", WHO, compute_flops=1.0, uplink_bits=(96, 40), server_flops=40.0)
    assert second == Stage("feedback", WHO, unicast_bits=(8, 48), backward_flops=2.0)
    assert (first.total("uplink_bits"), first.of("uplink_bits", 1), first.of("uplink_bits", 9)) == (136, 40, 0)
    assert (first.total("server_flops"), first.of("server_flops", 1)) == (80.0, 40.0)


def test_a_broadcast_and_a_unicast_are_stages_apart():
    """They use the band in different ways; whoever heard the broadcast waits for all others."""
    events = [JointWork(9.0, WHO), down(4, "basis", broadcast=True), down(3), down(2, "more"), Work(0, "backward", WHO)]
    placement = Placement.split(1, 2)
    assert fold(events, placement, FLOPS) == [
        Stage("feedback", WHO, joint_flops=9.0, broadcast_bits=32),
        Stage("feedback", WHO, unicast_bits=40, backward_flops=2.0),
    ]
    assert fold([down(3), down(4, broadcast=True)], placement, FLOPS) == [
        Stage("feedback", WHO, unicast_bits=24),
        Stage("feedback", WHO, broadcast_bits=32),
    ]


def test_three_segments_go_to_and_fro():
    """Labels stay at home: the clients hold the last block too, and the gradient travels both ways."""
    segments = (Segment("client", 0, 1), Segment("server", 1, 3), Segment("client", 3, 4))
    flops = {(k, phase): float(10**k * (2 if phase == "backward" else 1)) for k in range(3) for phase in PHASES}
    flops[2, "both"] = 300.0
    events = [Work(0, "forward", WHO), up(10), Work(1, "forward", WHO), down(6, "features"), Work(2, "both", WHO)]
    events += [up(6, "gradient"), Work(1, "backward", WHO), down(10), Work(0, "backward", WHO)]
    assert fold(2 * events, Placement(segments), flops) == 2 * [
        Stage("forward", WHO, compute_flops=1.0, uplink_bits=80, server_flops=10.0),
        Stage("feedback", WHO, unicast_bits=48, backward_flops=300.0),
        Stage("forward", WHO, uplink_bits=48, server_flops=20.0),
        Stage("feedback", WHO, unicast_bits=80, backward_flops=2.0),
    ]


def test_all_local_steps_of_fl_and_the_upload_are_one_stage():
    everyone = (0, 1, 2)
    events = [*[Work(0, "both", WHO)] * 3, up(100, "model"), down(100, "model", everyone, broadcast=True)]
    assert fold(events, Placement.whole(4), FLOPS) == [
        Stage("model", WHO, compute_flops=9.0, uplink_bits=800),
        Stage("model", everyone, broadcast_bits=800),
    ]


def test_a_cut_that_moves_and_clients_in_turn_are_stages_of_their_own():
    events = [down(5, "migration", broadcast=True), up(6, "migration"), Work(0, "forward", WHO), up(1)]
    assert fold(events, Placement.split(1, 2), FLOPS) == [
        Stage("re-cut", WHO, broadcast_bits=40),
        Stage("re-cut", WHO, uplink_bits=48),
        Stage("forward", WHO, compute_flops=1.0, uplink_bits=8),
    ]
    turns = [[down(5, "model", (n,)), Work(0, "forward", (n,)), up(1, who=(n,)), Work(1, "both", (n,))] for n in WHO]
    assert fold([*turns[0], *turns[1]], Placement.split(1, 2), FLOPS) == [
        stage
        for n in WHO
        for stage in (
            Stage("model", (n,), unicast_bits=40),
            Stage("forward", (n,), compute_flops=1.0, uplink_bits=8, server_flops=40.0),
        )
    ]


def test_clients_of_one_stage_may_do_different_things():
    """One computes, two send: who has no part in a load has 0 of it."""
    events = [Work(0, "forward", (0,)), up(3, who=(0, 1)), Work(1, "both", (1,))]
    (stage,) = fold(events, Placement.split(1, 2), FLOPS)
    assert stage == Stage("forward", WHO, compute_flops=(1.0, 0.0), uplink_bits=(24, 24), server_flops=(0.0, 40.0))
    assert [stage.total(load) for load in ("compute_flops", "uplink_bits", "server_flops")] == [1.0, 48, 40.0]


def test_groups_side_by_side_fold_as_all_at_once():
    together, apart = Ledger(), Ledger()
    for ledger, groups in ((together, [[0, 1, 2]]), (apart, [[0, 1], [2]])):
        for ids in groups:
            ledger.alongside(0)
            for _ in range(2):
                ledger.add(Work(0, "forward", tuple(ids)))
                ledger.unicast("up", "smashed", FP32.nbytes((3, 2)), ids)
                ledger.add(Work(1, "both", tuple(ids)))
                ledger.unicast("down", "gradient", [10 + n for n in ids], ids)
                ledger.add(Work(0, "backward", tuple(ids)))
        ledger.alongside(None)
        ledger.unicast("up", "model", 5, [0, 1, 2])
    folded = [fold(ledger.events, Placement.split(1, 2), FLOPS) for ledger in (together, apart)]
    who = (0, 1, 2)
    step = [
        Stage("forward", who, compute_flops=1.0, uplink_bits=192, server_flops=40.0),
        Stage("feedback", who, unicast_bits=(80, 88, 96), backward_flops=2.0),
    ]
    assert folded == [[*step, *step, Stage("model", who, uplink_bits=40)]] * 2
