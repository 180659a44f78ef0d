"""The DDQN: learns, keeps privacy, and survives being saved."""

import numpy as np
import pytest
import torch

from splitcast.base.config import Config, LearnConfig, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.scenario import Scenario
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.ddqn import Agent, QNetwork, Replay, bootstrapped, learn
from splitcast.cutting.encoder import Encoder
from splitcast.cutting.env import VectorCutEnv
from splitcast.model import build
from splitcast.studies.learn import flat_after, judge, learn_policy
from splitcast.training.task import Classification

# Gamma and latency pull in opposite directions: the best cut depends on the channel.
CONTESTED = with_values(
    Config(),
    arch="cnn-small",
    clients=2,
    batch=16,
    bandwidth_hz=1e5,
    client_flops_per_s=1e10,
    workload="paper",
    gamma=[0.0, 0.0, 0.45, 0.6],
)
SHORT = LearnConfig(episodes=60, parallel=10, explore_episodes=20, hidden=32, learning_rate=5e-3, held_out=10)


def make_cut_costs(charge=False, **values):
    model, task = build("cnn-small", (1, 28, 28), 10, seed=0), Classification(10)
    return CutCosts(Scenario.of(with_values(CONTESTED, **values), model, task), charge_moves=charge)


def test_a_small_problem_is_learned_in_seconds():
    world = make_cut_costs(epsilon=0.01)
    assert not world.legal.all()
    rows = {row.name: row for row in judge(world, learn(world, 20, SHORT), rounds=20, episodes=10)}
    fixed = min(row.cost for name, row in rows.items() if name.startswith("fixed"))
    gap = fixed - rows["greedy"].cost
    assert gap > 0.01 * fixed  # the channel matters
    assert rows["ddqn"].cost < rows["greedy"].cost + 0.3 * gap
    assert rows["ddqn"].violations == 0
    assert rows["greedy"].cost == pytest.approx(rows["clairvoyant"].cost)


def test_a_cut_that_was_never_tried_does_not_stop_learning():
    world = make_cut_costs()
    agent = learn(world, 1, LearnConfig(episodes=2, hidden=4))  # two transitions, more cuts
    assert len(world.cuts) > 2 and np.isfinite(agent.values(VectorCutEnv(world, 3, 1).reset(seed=0)[0])).all()


def test_learning_is_a_function_of_the_seed():
    few = LearnConfig(episodes=30, parallel=10, explore_episodes=10, hidden=8)
    first, again, other = (learn(make_cut_costs(seed=seed), 5, few).network.head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_saving_and_loading_keeps_every_action(tmp_path):
    world = make_cut_costs(charge=True)
    agent = learn(world, 5, LearnConfig(episodes=20, hidden=16))
    agent.save(tmp_path / "policy.safetensors")
    loaded = Agent.load(tmp_path / "policy.safetensors")
    seen = VectorCutEnv(world, 200, 1).reset(seed=0)[0]
    np.testing.assert_array_equal(agent.values(seen), loaded.values(seen))
    np.testing.assert_array_equal(agent.act(seen), loaded.act(seen))
    assert loaded.scenario == world.digest() != make_cut_costs(charge=False).digest()
    assert loaded.encoder.budget_s == agent.encoder.budget_s


def test_the_target_is_double():
    """The online network picks, the target network values: r + γ Q̂(s', argmax Q(s'))."""
    online, target = QNetwork(1, 2, 3), QNetwork(1, 2, 3)
    with torch.no_grad():
        for network, values in ((online, [0.0, 5.0, 1.0]), (target, [7.0, 2.0, 9.0])):
            network.head.weight.zero_()
            network.head.bias.copy_(torch.tensor(values))
    y = bootstrapped(online, target, torch.tensor([1.0, -1.0]), torch.zeros(2, 1), gamma=0.5)
    assert y.tolist() == [2.0, 0.0]
    assert bootstrapped(online, target, torch.tensor([1.0]), torch.zeros(1, 1), gamma=0.0).tolist() == [1.0]


def test_the_oldest_transitions_are_forgotten():
    replay = Replay(4, 1)
    replay.add(np.ones((6, 1), np.float32), np.arange(6), np.arange(6.0), np.zeros((6, 1), np.float32))
    assert replay.cut.tolist() == [4, 5, 2, 3]
    assert replay.reward.tolist() == [4, 5, 2, 3]
    assert set(replay.sample(np.random.default_rng(0), 100)[1].tolist()) == {2, 3, 4, 5}


@pytest.mark.parametrize("content", [b"", b"hello world", None])
def test_files_that_are_no_policy_are_refused(tmp_path, content):
    file = tmp_path / "p.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SplitcastError, match=r"policy: (no file|cannot read) .*p.safetensors"):
        Agent.load(file)


def test_a_checkpoint_is_not_a_policy(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "c.safetensors", {"format": "splitcast-checkpoint-1"})
    with pytest.raises(SplitcastError, match="is not a learned policy"):
        Agent.load(tmp_path / "c.safetensors")


def test_other_numbers_of_clients_and_cuts_are_refused(tmp_path):
    world = make_cut_costs()
    code = Encoder.of(make_cut_costs(clients=3), 5)
    agent = Agent(QNetwork(code.size, 4, code.cuts), code, "")
    with pytest.raises(SplitcastError, match="learned for 3 clients, not 2"):
        agent.check(world, tmp_path)
    code = Encoder(code.mean[:2], code.deviation[:2], 1.0, 3, False)
    with pytest.raises(SplitcastError, match="learned for 3 cuts, not 4"):
        Agent(QNetwork(code.size, 4, 3), code, "").check(world, tmp_path)


def test_flatness_of_a_curve():
    steep = [(10 * k, -100.0 if k < 10 else -10.0) for k in range(40)]
    assert flat_after(steep) == 100
    assert flat_after(steep[:5]) is None
    assert flat_after([(k, -10.0) for k in range(20)]) == 0


def test_breaking_privacy_does_not_pay():
    world = make_cut_costs(epsilon=0.3)
    assert not world.legal[0] and world.legal[-1]

    class Lawless:
        def act(self, seen):
            return np.zeros(len(seen), dtype=np.int64)

    ddqn, *others = judge(world, Lawless(), rounds=5, episodes=3)
    assert ddqn.violations == 15
    assert ddqn.cost == pytest.approx(5 * world.penalty)
    assert ddqn.cost > max(row.cost for row in others)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1e-4, 1e-3, 1e-2])
def test_the_papers_setting_is_within_two_per_cent_of_the_optimum(epsilon):
    config = with_values(Config(), workload="paper", epsilon=epsilon, charge_migration=False, rounds=40)
    learned = learn_policy(config, LearnConfig())
    assert learned.regret < 0.02
    assert learned.row("ddqn").violations == 0
    assert (flat_after(learned.curve) or 500) < 300


@pytest.mark.slow
@pytest.mark.long
def test_blockages_that_end_soon_are_not_followed():
    """A move costs more than a short blockage: what may come has to be weighed by its chance, not by its median."""
    cell = {"blockage": "common", "blockage_db": 35.0, "blocked_rounds": 2.5, "clear_rounds": 8.0, "fading": "none"}
    config = with_values(
        Config(), scheme="psl", batch=16, client_flops_per_s=1e8, gamma_weight=0.0, rounds=100, dataset="mnist", **cell
    )
    found = learn_policy(config, LearnConfig(episodes=200, explore_episodes=60))
    ddqn, greedy, lookahead = (found.row(name).cost for name in ("ddqn", "greedy", "lookahead"))
    assert ddqn < 1.1 * lookahead < 0.9 * greedy


@pytest.mark.slow
@pytest.mark.long
def test_with_moves_charged_it_beats_greedy_which_ignores_them():
    learned = learn_policy(with_values(Config(), workload="paper", epsilon=1e-4, rounds=40), LearnConfig())
    assert learned.row("clairvoyant").cost <= learned.row("ddqn").cost < 0.95 * learned.row("greedy").cost
