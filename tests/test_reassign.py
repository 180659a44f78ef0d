"""Cuts of single clients that move: the same training, bytes and seconds by hand, and only where it pays."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.clock import time_rounds
from splitcast.cost.stages import fold
from splitcast.cutting.reassign import Reassign, move_events, period
from splitcast.run.export import trained_model
from splitcast.run.loop import train
from splitcast.schemes.messages import Ledger
from splitcast.studies.plan import scenario_of
from splitcast.studies.report.clients import breakdown
from splitcast.training.placement import Fleet, Placement
from test_engine import SIZES, close, engine, flat, run

RNG = np.random.default_rng(21)
SPEEDS = (0.02e9, 2e9, 2e9, 2e9)
STEP = {"arch": "cnn-small", "clients": 4, "batch": 8, "bandwidth_hz": 5e6, "client_flops_per_s": SPEEDS, "rounds": 8}

FADING = {"bandwidth_hz": 2e6, "batch": 32, "client_flops_per_s": (0.05e9, 0.2e9, 1e9, 4e9)}


def fleet(cuts, depth=5):
    return Fleet.of_clients([Placement.split(int(cut), depth) for cut in cuts])


@pytest.mark.parametrize("optimiser", [{}, {"momentum": 0.9, "participation": 0.7}, {"optimizer": "adam"}])
@pytest.mark.parametrize("tau", [1, 3])
def test_moving_cuts_of_single_clients_leaves_federated_averaging(tau, optimiser):
    moving, whole = engine("sfl", 1, tau, **optimiser), engine("fl", 1, tau, **optimiser)
    for t in range(1, 7):
        before = flat(moving)
        cuts = RNG.integers(1, 5, size=len(SIZES)) if t % 3 else [2] * len(SIZES)  # from one cut for all, and back
        moving.place(fleet(cuts), Ledger())
        assert float((flat(moving) - before).abs().max()) < 1e-15
        moving.round(t)
    assert close(flat(moving), run(whole, 6))


@pytest.mark.parametrize("name", ["sl", "cpsl"])
def test_halves_that_are_handed_on_cost_nothing_to_move(name):
    moving, still = engine(name, (1, 4, 2, 2), 2, momentum=0.9), engine(name, 1, 2, momentum=0.9)
    for t in range(1, 5):
        ledger = Ledger()
        moving.place(fleet(RNG.integers(1, 5, size=len(SIZES))), ledger)
        assert not ledger.events
        moving.round(t)
    assert close(flat(moving), run(still, 4))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bytes_of_a_move_by_hand(momentum):
    """Blocks have 30, 112, 0, 259 and 24 values, twice that with momentum. From cuts 1, 1, 2, 4 to 2, 4, 4, 1 the
    second, third and fourth block go down, 371 values; the first client stops listening after 112 of them, the last
    gives blocks back that the server has."""
    sim, ledger, each = engine("sfl", (1, 1, 2, 4), 1, momentum=momentum), Ledger(), 4 * (2 if momentum else 1)
    sim.round(1)
    sim.place(fleet((2, 4, 4, 1)), ledger)
    (sent,) = ledger.messages
    assert (sent.direction, sent.kind, sent.broadcast) == ("down", "migration", True)
    assert dict(zip(sent.clients, sent.nbytes, strict=True)) == {0: 112 * each, 1: 371 * each, 2: 371 * each}
    assert ledger.by_kind() == {"down.migration": 371 * each}
    (stage,) = fold(ledger.events, sim.state.placement, {})
    assert stage.name == "re-cut"
    assert stage.clients == (0, 1, 2) and stage.broadcast_bits == (112 * 8 * each, 371 * 8 * each, 371 * 8 * each)
    free = Ledger()
    sim.place(fleet((4, 4, 4, 4)), free, charge=False)
    assert not free.events and isinstance(sim.state.placement, Placement)


def test_halves_that_differ_do_not_move():
    sim = engine("psl", (1, 1, 2, 4), 1)
    sim.round(1)
    with pytest.raises(SplitcastError, match="move only while all client halves are equal"):
        sim.place(fleet((2, 4, 4, 1)), Ledger())


@pytest.fixture
def trace(tmp_path):
    """Clients take turns, two rounds each, to be far away: 40 dB less."""
    gains = {(t, n): 1e-15 if n == 1 + (t - 1) // 2 % 3 else 1e-11 for t in range(1, 9) for n in range(4)}
    file = tmp_path / "gains.csv"
    file.write_text("round,client,gain\n" + "".join(f"{t},{n},{gain}\n" for (t, n), gain in gains.items()))
    return str(file)


def test_a_run_under_the_policy_is_fedavg_and_its_cuts_change(trace):
    config = with_values(Config(), **STEP, trace=trace, dtype="float64", momentum=0.9)
    moving = train(with_values(config, scheme="sfl", policy="assign", charge_migration=False))
    whole = train(with_values(config, scheme="fl"))
    assert [r.loss for r in moving.rounds] == pytest.approx([r.loss for r in whole.rounds], abs=1e-10)
    ours, theirs = moving.engine.averaged(), whole.engine.averaged()
    assert all(close(ours[name], theirs[name]) for name in theirs)
    cuts = [tuple(r.cuts) for r in moving.rounds]
    assert len(set(cuts)) > 1 and all(r.cut == min(r.cuts) for r in moving.rounds)
    assert moving.summary["moves"] == sum(a != b for a, b in pairwise(cuts))
    fixed = train(with_values(config, scheme="sfl", cut=cuts[0]))
    assert moving.summary["latency_s"] < fixed.summary["latency_s"]


def test_rounds_and_moves_are_charged_as_they_happen(trace):
    """The record of a round with a move has the bytes of the move, and its seconds beside those of the round."""
    config = with_values(Config(), **STEP, trace=trace, scheme="sfl", policy="assign:2")
    records, scenario = train(config).rounds, scenario_of(config)
    places = {place.cut: place for place in scenario.placements()}
    before, moves = None, 0
    for record in records:
        then, met = Fleet.of_clients([places[cut] for cut in record.cuts]), scenario.conditions([record.round])
        events = move_events(scenario, before, then) if before not in (None, then) else []
        sent = scenario.dry(then, record.round)
        (timed,) = time_rounds(
            [fold([*events, *sent.events], then, scenario.work(then))], scenario.cell, met, scenario.allocator
        )
        assert record.latency_s == pytest.approx(float(timed.seconds[0]), rel=1e-9)
        down = sum(event.on_air for event in events)
        assert record.kinds.get("down.migration", 0) == down
        moves += bool(down)
        assert not (events and record.round % 2 == 0)  # every second round
        before = then
    assert moves
    assert breakdown(config, records).mismatch < 1e-9


def test_a_move_must_pay_for_itself(trace):
    """K rounds at the new cuts against K at the old and the move, under the channel of the round."""
    config, outcomes = with_values(Config(), **STEP, scheme="sfl"), set()
    for every, channel in ((2, {"trace": trace}), (1, FADING)):
        scenario = scenario_of(with_values(config, **channel))
        policy = Reassign(scenario, f"assign:{every}")
        at = policy.choose(1, None, 0.0)
        for t in range(2, 9):
            met, found = scenario.conditions([t]), policy.choose(t, at, 0.0)
            best = policy.planner.fleet(policy.planner.best(met))
            if best != at and (t - 1) % every == 0:
                moved = scenario.stages_of(move_events(scenario, at, best), best)
                rounds = [scenario.stages(at, 1), scenario.stages(best, 1), moved]
                old, new, move = (
                    float(one.seconds[0]) if one.stages else 0.0  # giving blocks back takes no time
                    for one in time_rounds(rounds, scenario.cell, met, scenario.allocator)
                )
                pays = min(every, 9 - t) * (old - new) > move
                assert found == (best if pays else at), (every, t)
                outcomes.add((every, pays))
            else:
                assert found == at
            at = found
    assert outcomes == {(2, True), (1, True), (1, False)}


def test_resuming_is_exact_wherever_cuts_were(trace, tmp_path):
    config = with_values(Config(), **STEP, trace=trace, scheme="sfl", policy="assign:2", charge_migration=False)
    rounds = resumes_exactly(with_values(config, checkpoint_every=3, momentum=0.9), tmp_path / "run", stop_at=5)
    assert rounds[0].cuts != rounds[2].cuts
    model, whole = trained_model(tmp_path / "run"), train(with_values(config, momentum=0.9)).model()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True))


def test_averaging_now_and_then_moves_only_then(trace):
    config = with_values(Config(), **STEP, trace=trace, scheme="sfl", policy="assign:1", charge_migration=False)
    cuts = [r.cuts for r in train(with_values(config, sync_every=2)).rounds]
    assert all(cuts[k] == cuts[k + 1] for k in range(0, 8, 2)) and cuts[0] != cuts[2]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"scheme": "psl"}, "policy: 'assign:2' moves blocks when client halves are equal; those of psl stay di"),
        ({"scheme": "sfl-ga"}, "those of sfl-ga stay different"),
        ({"scheme": "local-loss"}, "policy: 'assign:2' moves the cut; local-loss needs fixed"),
        ({"scheme": "merge-sfl"}, "cut: merge-sfl with its settings needs one cut for all clients"),
        ({"scheme": "sfl", "optimizer_state": "local"}, "optimizer_state: 'local'; policy 'assign:2' needs average"),
        ({"scheme": "sfl", "gamma_draws": 2}, "gamma_draws: 2, but assign:2 weighs seconds"),
        ({"scheme": "sfl", "wait_for": 2}, "wait_for"),
        ({"scheme": "sfl", "policy": "assign:0"}, "policy: 'assign:0'; give the rounds between assignments"),
        ({"scheme": "sfl", "defence.noise": 0.1}, "defence"),
        ({"scheme": "sfl", "cut": (1, 1, 2, 2)}, "policy: 'assign:2' moves"),
    ],
)
def test_what_cannot_move_is_refused_in_one_line(values, said):
    with pytest.raises(SplitcastError, match=said):
        train(with_values(Config(), **STEP | {"policy": "assign:2"} | values))


def test_names():
    assert (period("assign"), period("assign:30"), period("fixed"), period("assigned")) == (1, 30, 0, 0)
