"""Lookahead and rollout: against brute force on a small chain, and beside the policies that do not look ahead."""

import json
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.cost.conditions import Conditions
from splitcast.cost.objective import weight_of_gamma
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.lookahead import chain_of, values_ahead
from splitcast.cutting.policies import CutSelector, make_policy, rollout
from splitcast.run.loop import train
from splitcast.studies.plan import scenario_of

ROUNDS = 5
BLOCKED = with_values(
    Config(),
    scheme="psl",
    clients=3,
    batch=8,
    rounds=ROUNDS,
    client_flops_per_s=1e9,
    bandwidth_hz=5e6,
    blockage="common",
    fading="none",
    clear_rounds=4.0,
    blocked_rounds=2.5,
    gamma_weight=0.0,
    distance_m=(100.0, 200.0, 300.0),
)
CHAIN = np.array([[0.75, 0.25], [0.4, 0.6]])


@pytest.fixture(scope="module")
def world():
    return CutCosts(scenario_of(BLOCKED))


@cache
def paths(world):
    """Every path of the chain with its probability, from the stationary law on, and its costs."""
    start = np.array([4.0, 2.5]) / 6.5
    gains = [world.scenario.channel.mean_gain(np.array([100.0, 200.0, 300.0])) * value for value in (1.0, 1e-3)]
    found = []
    for states in product((0, 1), repeat=ROUNDS):
        chance = start[states[0]] * np.prod([CHAIN[a, b] for a, b in pairwise(states)])
        met = np.stack([gains[s] for s in states])
        found.append((chance, world.costs(Conditions(met, np.ones_like(met), np.array(states)))))
    return found


def expected(world, name):
    """Mean cost of a policy over all paths, without sampling."""
    policy = None if name == "clairvoyant" else make_policy(name, world, paths(world)[0][1], 1)
    return sum(
        chance * rollout(CutSelector(world, policy or make_policy(name, world, known, 1), known, name)).cost
        for chance, known in paths(world)
    )


def test_value_iteration_is_what_brute_force_finds(world):
    """Expectimax over every history, from costs of the two states."""
    assert chain_of(world) == pytest.approx(CHAIN)
    calm, blocked = (next(known for _, known in paths(world) if set(known.met.state.tolist()) == {s}) for s in (0, 1))
    known, cuts = (calm, blocked), range(len(world.cuts))

    @cache
    def value(t, s, u):  # cost of rounds t.. (from 0), in state s, coming from cut u
        if t == ROUNDS:
            return 0.0
        return min(
            known[s].cost[t, a]
            + (0.0 if u is None else known[s].move_s[t, u, a])
            + sum(CHAIN[s, then] * value(t + 1, then, a) for then in (0, 1))
            for a in cuts
        )

    ahead = values_ahead(world, ROUNDS)
    for t, s, a in np.ndindex(ahead.shape):
        assert ahead[t, s, a] == pytest.approx(
            sum(CHAIN[s, then] * value(t + 1, then, a) for then in (0, 1)), rel=1e-12
        )
    best = 4 / 6.5 * value(0, 0, None) + 2.5 / 6.5 * value(0, 1, None)
    assert expected(world, "lookahead") == pytest.approx(best, rel=1e-12)


def test_nobody_without_knowledge_of_the_future_is_better(world):
    cost = {name: expected(world, name) for name in ("clairvoyant", "lookahead", "rollout", "myopic", "greedy")}
    fixed = min(expected(world, f"fixed:{cut}") for cut in world.cuts)
    others = [cost["rollout"], cost["myopic"], cost["greedy"], fixed]
    assert cost["clairvoyant"] < cost["lookahead"] <= min(others) * (1 + 1e-12)
    assert cost["lookahead"] < 0.95 * fixed, "or the test is about nothing"


def test_both_train_with_fading_and_charge_their_moves():
    config = with_values(BLOCKED, fading="block", arch="cnn-small", rounds=8, epsilon=0.01)
    for name in ("lookahead", "rollout"):
        records = train(with_values(config, policy=name)).rounds
        assert {r.cut for r in records} <= set(CutSelector.of(CutCosts(scenario_of(config)), "myopic", 8).legal)
    plain = train(with_values(config, blockage="none", policy="lookahead", rounds=3)).rounds
    assert len(plain) == 3


def test_a_resumed_run_chooses_the_same_cuts(tmp_path):
    config = with_values(BLOCKED, fading="block", arch="cnn-small", rounds=6, policy="lookahead", checkpoint_every=3)
    resumes_exactly(config, tmp_path / "run", stop_at=4)


def test_too_many_states_are_refused_in_one_line():
    many = with_values(BLOCKED, blockage="each", clients=11, distance_m=())
    with pytest.raises(SplitcastError, match=r"lookahead has 11 clients blocked one by one.*rollout"):
        chain_of(CutCosts(scenario_of(many)))


def test_the_weight_of_gamma_from_rounds():
    """Rounds 50 + 20 Γ at 2 s: a unit of Γ is 20 · 2 / 50 = 0.8 s of a round."""
    assert weight_of_gamma([0.5, 1.0, 3.0], [60.0, 70.0, 110.0], latency_s=2.0) == pytest.approx(0.8)
    assert weight_of_gamma([1.0, 2.0], [80.0, 70.0], latency_s=2.0) == 0, "gamma does not help"
    with pytest.raises(SplitcastError, match="at least two"):
        weight_of_gamma([1.0, 1.0], [80.0, 70.0], latency_s=2.0)
    with pytest.raises(SplitcastError, match="steeply"):
        weight_of_gamma([0.0, 1.0], [-1.0, 70.0], latency_s=2.0)


def test_a_quick_policy_is_usable(tmp_path, capsys):
    """It costs hardly more than the best path through channels known in advance; the best fixed cut costs much more."""
    cell = "--scheme psl --arch cnn-small --client-flops-per-s 2e7 --blockage common --blockage-db 35 --fading none"
    options = f"{cell} --clear-rounds 8 --blocked-rounds 4 --gamma-weight 0 --rounds 20 --clients 4"
    main(["learn", "--quick", "--json", *options.split(), "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert found["curve"][-1][0] == 300 and found["held_out"] == 10
    cost = {row["name"]: row["cost"] for row in found["rows"]}
    fixed = min(value for name, value in cost.items() if name.startswith("fixed"))
    assert cost["ddqn"] <= 1.1 * cost["lookahead"] < fixed
