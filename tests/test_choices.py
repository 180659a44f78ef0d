"""The format of smashed data as a further decision of a round: by hand, by brute force, and in trainings."""

import dataclasses
import json
import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from lengths import now
from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.cost.conditions import Conditions
from splitcast.cost.deadline import taking_part
from splitcast.cutting.bargain import energies
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.lookahead import values_ahead
from splitcast.cutting.policies import CutSelector, make_policy, rollout
from splitcast.deploy.sizes import largest_messages
from splitcast.model import build
from splitcast.run.loop import train
from splitcast.run.parts import make_parts, make_simulator
from splitcast.run.records import RunFolder
from splitcast.run.selecting import measure_errors
from splitcast.studies.plan import plan, scenario_of
from splitcast.studies.report.clients import breakdown
from splitcast.studies.weights import error_weight
from test_cli import refused
from test_federation import IMAGES, Wired, federation
from test_policies import trained

QUICK = with_values(
    Config(), scheme="psl", arch="cnn-small", clients=3, batch=4, rounds=6, eval_every=3, checkpoint_every=2
)
BLOCKED = with_values(QUICK, blockage="common", fading="none", blocked_rounds=2.0, clear_rounds=2.0, gamma_weight=0.0)


# ---- by hand

BATCH, GAMMA = 8, (0.0, 0.02, 0.04, 0.06)
ERRORS = {"int2": (1.0, 1.0, 0.1, 0.1), "int8": (0.0, 0.0, 0.0, 0.0)}
SECONDS = 0.005
"""of a unit of error"""
ALONE = with_values(
    BLOCKED,
    clients=1,
    batch=BATCH,
    rounds=16,
    distance_m=(100.0,),
    blockage_db=50.0,
    bandwidth_hz=1e6,
    workload="paper",
    gamma=GAMMA,
    gamma_weight=1.0,
    uplink_choices="int2,int8",
    uplink_errors=ERRORS["int2"] + ERRORS["int8"],
    error_weight=SECONDS,
)


def by_hand(cut, bits, lost_db):
    """One client, which has all of the band and of the server: seconds of computing, sending, the server, the gradient
    in fp32, and computing again."""
    rows, values = {1: (4, 4 * 14 * 14), 2: (8, 8 * 7 * 7), 3: (1, 32), 4: (1, 16)}[cut]
    gain = 10 ** ((-128.1 - 37.6 * math.log10(0.1) - lost_db) / 10)
    noise_w = 10 ** (-174 / 10) / 1000 * 1e6
    up, down = (1e6 * math.log2(1 + 10 ** (dbm / 10) / 1000 * gain / noise_w) for dbm in (25, 33))
    sent = 8 * BATCH * (2 * rows + bits * values // 8 + 1)  # two bytes a row, one a label
    client, server = 2 * 5.6e6 / 0.1e9, 2 * 86.01e6 / 100e9  # the paper's, forward and backward
    return BATCH * (client + server) + sent / up + 32 * BATCH * values / down


@pytest.mark.parametrize("policy", ["greedy", "fixed:1", "fixed:4"])
def test_two_states_by_hand(policy):
    """Of the eight pairs greedy takes the finer one at cut 1 while nothing is blocked, and else the coarser at cut 3;
    with a fixed cut the format alone is chosen."""
    cuts = range(1, 5) if policy == "greedy" else [int(policy[-1])]
    pairs = [(cut, f"int{bits}") for cut in cuts for bits in (2, 8)]

    def cost(lost_db, pair):
        cut, name = pair
        return GAMMA[cut - 1] + by_hand(cut, int(name[3:]), lost_db) + SECONDS * ERRORS[name][cut - 1]

    best = {lost: min(pairs, key=lambda pair: cost(lost, pair)) for lost in (0.0, 50.0)}
    expected = {"greedy": (1, "int8", 3, "int2"), "fixed:1": (1, "int8", 1, "int2"), "fixed:4": (4, "int8", 4, "int2")}
    assert (*best[0.0], *best[50.0]) == expected[policy]
    config = with_values(ALONE, policy=policy, charge_migration=False)
    states, found = scenario_of(config).conditions(range(1, 17)).state, train(config).rounds
    assert set(states.tolist()) == {0, 1}
    for state, record in zip(states, found, strict=True):
        lost = 50.0 * state
        assert (record.cut, record.uplink) == best[lost]
        assert record.latency_s == pytest.approx(by_hand(record.cut, int(record.uplink[3:]), lost), rel=1e-9)
    selector = CutSelector.of(CutCosts(scenario_of(config), charge_moves=False), policy, 16)
    assert rollout(selector).cost == pytest.approx(sum(cost(50.0 * s, best[50.0 * s]) for s in states), rel=1e-9)


# ---- by brute force

CHAIN = np.array([[0.5, 0.5], [0.5, 0.5]])
PRICE = 0.4
PAIRS = with_values(
    BLOCKED,
    rounds=4,
    batch=8,
    client_flops_per_s=1e9,
    bandwidth_hz=5e6,
    distance_m=(100.0, 200.0, 300.0),
    uplink_choices="int2,int8,fp32",
    uplink_errors=(0.3, 0.01, 0.0),
    error_weight=PRICE,
    arch="cnn",
)


@cache
def world():
    return CutCosts(scenario_of(PAIRS))


@cache
def pair_costs():
    """Costs of every pair and moves of the cut in both states: of three worlds without a choice, [state][f, v]."""
    plain = [
        CutCosts(scenario_of(with_values(PAIRS, uplink_choices=(), uplink_errors=(), uplink_codec=name)))
        for name in PAIRS.policy.uplink_choices
    ]
    mean = world().scenario.channel.mean_gain(np.array(PAIRS.network.distance_m))
    found = []
    for state, share in enumerate((1.0, 1e-3)):
        met = np.tile(mean * share, (4, 1))
        known = [each.costs(Conditions(met, np.ones_like(met), np.full(4, state))) for each in plain]
        priced = [k.cost[0] + PRICE * e for k, e in zip(known, PAIRS.policy.uplink_errors, strict=True)]
        found.append((np.stack(priced), known[0].move_s))
    return found


def test_a_rate_that_changes_is_priced_as_it_is_in_every_round():
    """Beside a format whose rate does not change, with which all rounds are alike."""
    cell = with_values(Config(), arch="cnn-small", clients=3, scheme="psl", fading="none", allocation="equal")
    both = ("transform:100..10B@3", "transform:40B")
    alone = [
        CutCosts(scenario_of(with_values(cell, uplink_codec=name))).costs(np.full((4, 3), 1e-9)).cost for name in both
    ]
    given = with_values(cell, uplink_choices=both, error_weight=0.0)
    chosen = CutCosts(scenario_of(given)).costs(np.full((4, 3), 1e-9))
    assert np.allclose(chosen.cost, np.minimum(*alone), rtol=1e-12)
    assert chosen.format[:, 0].tolist() == [1, 0, 0, 0]  # 46, 22, 10 and 10 B against 40


def test_value_iteration_is_what_brute_force_over_pairs_finds():
    """Expectimax in which a state of the decision is the whole pair, and every next pair is tried."""
    costs = pair_costs()
    pairs = list(product(range(3), range(4)))

    @cache
    def value(t, s, u):  # rounds t.. (from 0), in state s, coming from pair u
        if t == 4:
            return 0.0
        cost, move = costs[s]
        return min(
            cost[a] + (0.0 if u is None else move[t, u[1], a[1]]) + sum(0.5 * value(t + 1, then, a) for then in (0, 1))
            for a in pairs
        )

    ahead = values_ahead(world(), 4)
    for t, s, v in np.ndindex(ahead.shape):
        for f in range(3):
            later = sum(CHAIN[s, then] * value(t + 1, then, (f, v)) for then in (0, 1))
            assert ahead[t, s, v] == pytest.approx(later, rel=1e-12)
    gains = world().scenario.channel.mean_gain(np.array(PAIRS.network.distance_m))
    total = 0.0
    for states in product((0, 1), repeat=4):
        met = np.stack([gains * (1.0, 1e-3)[s] for s in states])
        known = world().costs(Conditions(met, np.ones_like(met), np.array(states)))
        total += rollout(CutSelector(world(), make_policy("lookahead", world(), known, 1), known)).cost / 16
    assert total == pytest.approx(sum(0.5 * value(0, s, None) for s in (0, 1)), rel=1e-12)


def test_the_clairvoyant_finds_the_best_of_all_paths_of_pairs():
    costs, states = pair_costs(), (0, 1, 1, 0)
    gains = world().scenario.channel.mean_gain(np.array(PAIRS.network.distance_m))
    met = np.stack([gains * (1.0, 1e-3)[s] for s in states])
    known = world().costs(Conditions(met, np.ones_like(met), np.array(states)))
    selector = CutSelector(world(), make_policy("clairvoyant", world(), known, 1), known)
    pairs, least = list(product(range(3), range(4))), math.inf
    for path in product(pairs, repeat=4):
        spent = sum(costs[s][0][pair] for s, pair in zip(states, path, strict=True))
        moved = sum(costs[states[t]][1][t, path[t - 1][1], path[t][1]] for t in range(1, 4))
        least = min(least, spent + moved)
    assert rollout(selector).cost == pytest.approx(least, rel=1e-12)
    used = {selector.format(t, world().placements[0])[0] for t in range(1, 5)}
    assert used == {"int2", "int8"}, "or the test is about nothing"


def test_measured_privacy_rules_out_pairs(tmp_path):
    """A format that leaks at a cut is not taken there, whatever it saves."""
    file = tmp_path / "attack.json"
    pairs = [
        (cut, name, 0.9 if (cut, name) == (1, "int2") else 0.1) for cut in (1, 2, 3, 4) for name in ("int2", "fp32")
    ]
    row = {"possible": True, "attack": "optimise"}
    file.write_text(json.dumps([{"cut": cut, "codec": name, "rows": [row | {"ssim": s}]} for cut, name, s in pairs]))
    config = with_values(PAIRS, arch="cnn-small", uplink_choices="int2,fp32", error_weight=0.0, uplink_errors=())
    for leakage, expected in (("", {"int2"}), (str(file), {"fp32"})):
        found = CutCosts(scenario_of(with_values(config, leakage=leakage)))
        selector = CutSelector.of(found, "fixed:1", 4)
        assert {selector.format(t, found.placements[0])[0] for t in range(1, 5)} == expected


# ---- in trainings


def same(one, other):
    """Rounds that are the same but for the name of the format."""
    return [dataclasses.replace(r, uplink=None) for r in one] == [dataclasses.replace(r, uplink=None) for r in other]


@pytest.mark.parametrize("policy", now(["fixed", "greedy", "random", "bargain"], "greedy"))
@pytest.mark.parametrize("scheme", ["psl", "sfl-gb"])
def test_one_choice_is_none(scheme, policy):
    config = with_values(BLOCKED, scheme=scheme, policy=policy, client_flops_per_s=2e7, blockage_db=35.0)
    alone, named = (train(with_values(config, **{key: "int4"})) for key in ("uplink_choices", "uplink_codec"))
    assert same(alone.rounds, named.rounds)
    assert [r.uplink for r in alone.rounds] == ["int4"] * 6 and named.rounds[0].uplink is None
    for name, value in named.engine.averaged().items():
        assert torch.equal(value, alone.engine.averaged()[name])


def test_a_choice_that_never_pays_changes_nothing():
    config = with_values(BLOCKED, policy="myopic", client_flops_per_s=2e7, blockage_db=35.0)
    with_it = train(with_values(config, uplink_choices="fp32,int4", uplink_errors=(0.5, 0.1), gamma_weight=0.0))
    assert same(with_it.rounds, train(with_values(config, uplink_codec="int4")).rounds)


FREE = {"uplink_choices": "int2,transform:20%,fp32", "error_weight": 2.0, "blockage_db": 60.0, "bandwidth_hz": 1e5}


def test_every_round_is_the_round_of_its_format():
    """Step by step beside simulators that have one format each, all brought to the same weights before a round."""
    config = with_values(BLOCKED, **FREE, rounds=8)
    found = train(config)
    used = {r.uplink for r in found.rounds}
    assert len(used) == 2 and found.summary["rounds_per_uplink"].keys() == used
    plain = {name: make_simulator(with_values(config, uplink_choices=(), uplink_codec=name), IMAGES) for name in used}
    tensors, about = next(iter(plain.values())).snapshot(0)
    for record in found.rounds:
        engine = plain[record.uplink]
        engine.resume({k: v.clone() for k, v in tensors.items()}, about, record.round - 1)
        report = engine.round(record.round)
        assert (report.loss, report.ledger.by_kind()) == (record.loss, record.kinds)
        tensors, about = engine.snapshot(record.round)


@pytest.mark.parametrize("policy", now(["fixed", "lookahead"], "lookahead"))
def test_a_resumed_run_has_the_same_formats_and_measures_them_once(tmp_path, monkeypatch, policy):
    config = with_values(BLOCKED, **FREE, rounds=8, policy=policy, checkpoint_every=3)
    whole = resumes_exactly(config, tmp_path / "run", stop_at=5)
    assert len({r.uplink for r in whole}) == 2
    kept = RunFolder(tmp_path / "run").measured("errors")
    simulator = make_simulator(config, IMAGES)
    assert kept == measure_errors(config, simulator, IMAGES) and len(kept) == 12
    monkeypatch.setattr("splitcast.run.selecting.relative_errors", None)
    longer = train(with_values(config, rounds=9), tmp_path / "run", resume=True).rounds
    assert longer[:8] == whole or policy == "lookahead"  # which knows how long it has


def test_errors_are_those_of_what_is_sent():
    """Mean over clients and draws of ||Q(S) - S||^2 / ||S||^2, with S from the plain module."""
    config = with_values(QUICK, uplink_choices="int2,fp32", error_draws=2, batch=500, sizes="unequal")
    simulator, parts = make_simulator(config, IMAGES), make_parts(config, IMAGES)
    found = np.array(measure_errors(config, simulator, IMAGES)).reshape(2, 4)
    assert (found[1] == 0).all()
    share, params = [len(part) / sum(map(len, parts)) for part in parts], simulator.initial().everything()
    for cut in (1, 4):
        each = []
        for part in parts:  # batches are most of a client's rows
            smashed = simulator.model.forward(params, IMAGES.train_x[torch.from_numpy(part)], 0, cut)
            decoded = codec("int2").decode(codec("int2").encode(smashed), smashed.shape)
            each.append(float((decoded - smashed).square().sum() / smashed.square().sum()))
        assert found[0, cut - 1] == pytest.approx(float(np.dot(share, each)), rel=0.03)


def test_sites_are_told_the_format_of_every_round(tmp_path):
    config = with_values(
        BLOCKED, **FREE | {"uplink_errors": (0.2, 0.1, 0.0)}, policy="greedy", sizes="unequal", rounds=8
    )
    here = train(config)
    line = Wired(3)
    there = train(config, tmp_path / "run", engine=federation(config, line), dataset=IMAGES)
    assert len({(record.cut, record.uplink) for record in here.rounds}) > 1
    for ours, theirs in zip(there.rounds, here.rounds, strict=True):
        plain = dataclasses.replace(ours, wall_s=None, loss=theirs.loss, drift=theirs.drift, test_loss=theirs.test_loss)
        assert plain == theirs and ours.loss == pytest.approx(theirs.loss, rel=1e-5)


@pytest.mark.parametrize("uplink", ["", "int4", 3, "x" * 5000])
def test_a_site_refuses_a_format_that_was_not_agreed_on(uplink):
    config = with_values(BLOCKED, uplink_choices="int2,fp32", uplink_errors=(0.1, 0.0), sizes="unequal")
    line = Wired(3)
    engine = federation(config, line)
    engine.send_as("int2")
    engine.round(1)
    before = {k: v.clone() for k, v in line.sites[0].weights.params.items()}
    request = {"call": 10**6, "cut": 1, "round_": 2, "turn": 0, "messages": [], "uplink": uplink}
    with pytest.raises(Exception, match=r"^uplink: .* (none of the formats of this run|not a text)") as caught:
        line.sites[0].begin(**request)
    assert len(str(caught.value)) < 300
    assert all(torch.equal(v, line.sites[0].weights.params[k]) for k, v in before.items())


def test_the_largest_message_is_that_of_the_largest_format():
    model = build("cnn-small", (1, 28, 28), 10, 0)
    plain, choices = (with_values(QUICK, **more) for more in ({}, {"uplink_choices": "int2,fp32"}))
    assert largest_messages(choices, model, 10) == largest_messages(plain, model, 10)


def test_bargain_has_the_joules_of_the_chosen_formats():
    config = with_values(PAIRS, arch="cnn-small")
    here = CutCosts(scenario_of(config))
    known, seen = here.trace(4), []
    for t, at in enumerate(known.format):
        each = [energies(scenario, known.met[t : t + 1])[0] for scenario in here.formats.scenarios]
        seen.append([each[f][v] for v, f in enumerate(at)])
    assert len({tuple(row) for row in seen}) > 1
    assert CutSelector.of(here, "bargain", 4).policy is not None


def test_deadlines_are_met_in_the_format_that_is_sent():
    """Whom a round has room for is known from what they send in its format."""
    config = with_values(BLOCKED, **FREE, rounds=8, deadline_s=2.0)
    found = train(config).rounds
    assert len({r.uplink for r in found}) == 2 and {r.clients for r in found} != {3}
    for record in found:
        plain = scenario_of(with_values(config, uplink_choices=(), uplink_codec=record.uplink))
        assert record.clients == len(taking_part(plain, plain.place(1), record.round))


def test_a_report_times_rounds_in_their_formats():
    config = with_values(BLOCKED, **FREE | {"uplink_choices": "int2,fp32"}, rounds=8)
    found = train(config)
    assert len({r.uplink for r in found.rounds}) == 2
    assert breakdown(config, found.rounds).mismatch < 1e-6


def test_a_plan_takes_the_pair_of_least_cost():
    config = with_values(PAIRS, arch="cnn-small")
    made = plan(config, draws=4)
    assert len(made.pairs) == 12 and made.best.codec in config.policy.uplink_choices
    for k, name in enumerate(config.policy.uplink_choices):
        alone = plan(with_values(config, uplink_choices=(), uplink_errors=(), uplink_codec=name), draws=4)
        for mine, theirs in zip(made.pairs[4 * k : 4 * k + 4], alone.pairs, strict=True):
            assert (mine.codec, mine.latency_s) == (name, theirs.latency_s)
            assert mine.objective == pytest.approx(theirs.objective + PRICE * (0.3, 0.01, 0.0)[k])
    assert made.best.objective == min(pair.objective for pair in made.pairs)


def test_the_price_of_an_error_from_run_folders(tmp_path):
    """Errors 0.2, 0.1 and 0 took 14, 12 and (9 + 11) / 2 rounds, 10 + 20 e, of 2, 2, 1 and 3 s: p = 20 · 2 / 10."""
    rounds = {("int2", 0): (14, 2.0), ("int4", 0): (12, 2.0), ("fp32", 0): (9, 1.0), ("fp32", 1): (11, 3.0)}
    runs = [
        trained(tmp_path / f"{name}-{seed}", *each, cut=1, seed=seed, uplink_codec=name)
        for (name, seed), each in rounds.items()
    ]
    errors = {"int2": 0.2, "int4": 0.1, "fp32": 0.0}
    assert error_weight(runs, errors=errors) == error_weight(runs, 0.5, errors) == pytest.approx(4.0)
    measured = error_weight(runs[::2], 0.5)  # int2, which took 5 rounds of 1.5 s more than 9
    simulator = make_simulator(with_values(Config(), arch="cnn-small", clients=4), IMAGES)
    choices = with_values(RunFolder(runs[0]).config(), uplink_codec="auto", uplink_choices="int2,fp32")
    error = measure_errors(choices, simulator, IMAGES)[0]
    assert measured == pytest.approx(5 / error * 1.5 / 9, rel=1e-6)
    for which, said in (([], "differ in uplink_codec and seed only"), (runs[2:], "errors: 1 values for 1 trainings")):
        with pytest.raises(SplitcastError, match=said):
            error_weight(which, errors=errors)
    with pytest.raises(SplitcastError, match="errors: none for 'int4'"):
        error_weight(runs, errors={"int2": 0.2, "fp32": 0.0})


# ---- what is refused

TINY = ["--arch", "cnn-small", "--rounds", "2", "--batch", "4", "--clients", "3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--uplink-choices int2,int9", "uplink_choices: unknown 'int9'"),
        ("--uplink-choices transform:fast,int8", "uplink_choices: "),
        ("--uplink-choices int8,int8", "uplink_choices: 'int8' is given twice"),
        ("--uplink-choices auto,int8", "uplink_choices: 'auto' is no format"),
        ("--uplink-choices int2,int8 --uplink-codec int4", "uplink_codec: 'int4', but uplink_choices are given"),
        ("--uplink-choices int2,int8 --cut 1,1,2", "uplink_choices: need one cut for all clients"),
        ("--uplink-choices int2,int8 --scheme fl", "uplink_choices: fl sends no smashed data"),
        ("--uplink-choices int2,int8 --scheme sfl-replay", "uplink_choices: sfl-replay sends in one format"),
        ("--uplink-choices int2,int8 --scheme sfl --wait-for 2", "wait_for: rounds overlap"),
        ("--uplink-choices int2,int8 --uplink-errors 0.1 0.2 0.3", "uplink_errors: 3 numbers for 2 uplink_choices"),
        ("--uplink-errors 0.1 --policy greedy", "uplink_errors: 1 numbers for 0 uplink_choices"),
        ("--uplink-choices int2,int8 --error-weight -1", "error_weight"),
        ("--uplink-choices int2,int8 --error-draws 0", "error_draws"),
    ],
)
def test_bad_choices_are_one_line(capsys, tmp_path, flags, words):
    assert words in refused(capsys, "train", *TINY, *flags.split(), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_errors_are_not_guessed_where_there_are_no_data(capsys, tmp_path):
    flags = ["--uplink-choices", "int2,int8", "--arch", "cnn-small"]
    assert "uplink_errors: there are no data" in refused(capsys, "plan", *flags, "--out", str(tmp_path))
    assert "needs one format" in refused(capsys, "plan", "--per-client", *flags, "--scheme", "psl")
    config = with_values(BLOCKED, uplink_choices="int2,int8")
    with pytest.raises(SplitcastError, match="give uplink_errors"):
        federation(config, Wired(3))
