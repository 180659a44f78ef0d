"""The environment: its contract, and that its rewards are the clock's and P1's."""

import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.clock import round_seconds
from splitcast.cost.scenario import Scenario
from splitcast.cost.stages import Stage
from splitcast.cost.trace import Trace
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.encoder import Encoder
from splitcast.cutting.env import CutEnv, VectorCutEnv
from splitcast.model import build
from splitcast.training.task import Classification

QUICK = with_values(Config(), clients=4, batch=4, workload="paper")
MODEL, TASK = build("cnn-small", (1, 28, 28), 10, seed=0), Classification(10)


def make_cut_costs(charge=True, **values):
    return CutCosts(Scenario.of(with_values(QUICK, **values), MODEL, TASK), charge_moves=charge)


@pytest.mark.parametrize("charge", [True, False])
def test_gymnasium_accepts_the_environment(charge):
    env = CutEnv(make_cut_costs(charge), rounds=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    assert env.observation_space.shape == (4 + 1 + (4 if charge else 0),)
    assert env.action_space.n == 4


def test_rewards_are_the_negated_cost_of_p1_or_the_penalty():
    world = make_cut_costs(epsilon=0.05, gamma=[0.1, 0.2, 0.3, 0.4], gamma_weight=2.0)
    legal = [row.privacy >= 0.05 for row in MODEL.profile()]
    assert world.legal.tolist() == legal and not all(legal)
    env = CutEnv(world, rounds=4)
    env.reset(seed=3)
    gains = world.draw(np.random.default_rng(3), 1, 5)[0].gains
    here, spent = world.scenario, 0.0
    before = None
    for t, action in enumerate([0, 3, 1, 3]):
        seen, reward, ended, truncated, info = env.step(action)
        cut = action + 1
        cost = float(round_seconds([here.stages(here.place(cut), t + 1)], here.cell, gains[t])[0]) + 2 * 0.1 * cut
        if before is not None:
            values = abs(MODEL.client_size(cut) - MODEL.client_size(before))
            kind = "broadcast_bits" if cut > before else "uplink_bits"
            move = [Stage("re-cut", (0, 1, 2, 3), **{kind: 32 * values})]
            cost += float(round_seconds([move], here.cell, gains[t])[0])
        spent, before = spent + cost, cut
        assert info["cost"] == pytest.approx(cost, rel=1e-6)
        assert reward == pytest.approx(-cost if legal[action] else -world.penalty, rel=1e-6)
        assert info["violation"] == (not legal[action]) and info["cut"] == cut
        assert seen[4] == pytest.approx(min(1, spent / Encoder.of(world, 4).budget_s), rel=1e-5)
        assert seen[5:].tolist() == [float(k == action) for k in range(4)]
        assert (ended, truncated) == (False, t == 3)


def test_the_penalty_exceeds_what_cuts_cost():
    world = make_cut_costs()
    assert world.penalty == 2 * world.reference.cost.max()
    assert CutEnv(world, 3, penalty=7.0)._one.penalty == 7.0


def test_many_episodes_side_by_side_are_single_episodes():
    world = make_cut_costs(epsilon=0.05)
    together, rounds = VectorCutEnv(world, 3, 6), 6
    seen, _ = together.reset(seed=[11, 12, 13])
    actions = np.random.default_rng(0).integers(4, size=(rounds, 3))
    alone = [CutEnv(world, rounds) for _ in range(3)]
    for k, env in enumerate(alone):
        np.testing.assert_array_equal(env.reset(seed=11 + k)[0], seen[k])
    for row in actions:
        seen, rewards, ended, truncated, info = together.step(row)
        for k, env in enumerate(alone):
            mine = env.step(int(row[k]))
            np.testing.assert_allclose(mine[0], seen[k], rtol=1e-5)
            assert mine[1] == pytest.approx(rewards[k], rel=1e-7)
            assert (mine[2], mine[3]) == (ended[k], truncated[k])
            assert mine[4]["cost"] == pytest.approx(info["cost"][k], rel=1e-7)


def test_gains_are_seen_standardised_and_clipped():
    world = make_cut_costs(charge=False)
    code = Encoder.of(world, 10)
    seen = code(world.reference.gains, np.zeros(1024), np.full(1024, -1))
    assert seen.shape == (1024, 5) and seen.dtype == np.float32
    np.testing.assert_allclose(seen[:, :4].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(seen[:, :4].std(0), 1, atol=1e-4)
    assert code(np.full(4, 1e-300), np.array(1e9), np.array(-1)).tolist() == [-8, -8, -8, -8, 1]


def test_moves_cost_nothing_when_not_charged_and_nothing_up_when_halves_are_equal():
    assert not make_cut_costs(charge=False).reference.move_s.any()
    move = make_cut_costs(scheme="sfl").reference.move_s.mean(0)
    assert (move[np.triu_indices(4, 1)] > 0).all() and not move[np.tril_indices(4)].any()
    drifting = make_cut_costs(scheme="psl").trace(3).move_s
    assert not drifting[0][np.tril_indices(4)].any()  # before the first round all halves are equal
    assert (drifting[1][np.tril_indices(4, -1)] > 0).all()
    twice = make_cut_costs(momentum=0.5).trace(3).move_s
    np.testing.assert_allclose(twice, 2 * make_cut_costs().trace(3).move_s, rtol=1e-6)


def test_a_trace_is_replayed_in_pieces_that_wrap_around(tmp_path):
    Trace(np.arange(1.0, 13.0).reshape(3, 4) * 1e-9).save(tmp_path / "t.csv")
    world = make_cut_costs(trace=str(tmp_path / "t.csv"))
    drawn = world.draw(np.random.default_rng(0), 20, 5).gains
    first = np.round(drawn[:, :, 0] * 1e9).astype(int)
    assert {1, 5, 9} == set(first[:, 0])
    assert all(((row[1:] - row[:-1]) % 12 == 4).all() for row in first)
    assert (world.trace(3).gains == world.scenario.channel.gains).all()


class Walk:
    """A channel of a user's: clients that walk away, and leave after five rounds."""

    def __init__(self, network, clients, seed):
        self.clients = clients

    def at(self, round_):
        return {t: np.full(self.clients, 1e-9 / t) for t in range(1, 6)}[round_]


def test_pieces_of_a_channel_of_the_users_are_rounds_of_a_training():
    world = make_cut_costs(channel=f"{__name__}:Walk", rounds=5)
    drawn = np.round(1e-9 / world.draw(np.random.default_rng(0), 50, 7).gains).astype(int)
    assert drawn.shape == (50, 7, 4) and set(drawn[:, 0, 0]) == {1, 2, 3, 4, 5}
    assert ((drawn[:, 1:] - drawn[:, :-1]) % 5 == 1).all()
    again = world.draw(np.random.default_rng(0), 50, 7).gains
    np.testing.assert_array_equal(np.round(1e-9 / again), drawn)
    env = CutEnv(world, rounds=3)
    env.reset(seed=1)
    assert env.step(0)[1] < 0


def test_rounds_that_sync_cost_more():
    cost = make_cut_costs(scheme="sfl", sync_every=2).trace(4).cost
    plain, synced = (make_cut_costs(scheme="sfl", sync_every=k).trace(4).cost for k in (0, 1))
    np.testing.assert_allclose(cost[[0, 2]], plain[[0, 2]], rtol=1e-7)
    np.testing.assert_allclose(cost[[1, 3]], synced[[1, 3]], rtol=1e-7)
    assert (synced > plain).all()


def test_schemes_without_a_cut_are_refused():
    with pytest.raises(SplitcastError, match="policy: fl has no cut to choose; use fixed"):
        make_cut_costs(scheme="fl")


@pytest.mark.slow
def test_stable_baselines_learns_on_the_environment():
    pytest.importorskip("stable_baselines3")
    example = Path(__file__).parents[1] / "examples" / "sb3_dqn.py"
    assert runpy.run_path(str(example))["main"](steps=10_000, episodes=3) < 0.15
