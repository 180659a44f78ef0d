"""Train stable-baselines3's DQN on splitcast's environment and compare it with the exact optimum of every round.

Needs the extra `rl`: pip install '.[rl]' in this repository. Run: python examples/sb3_dqn.py [steps]
"""

import sys

import numpy as np
from stable_baselines3 import DQN

from splitcast.base.config import Config, with_values
from splitcast.cost.scenario import Scenario
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.env import CutEnv
from splitcast.model import build
from splitcast.training.task import Classification

ROUNDS = 100


def main(steps: int = 20_000, episodes: int = 10) -> float:
    """Mean cost per round of DQN over that of enumeration, minus one."""
    config = with_values(Config(), workload="paper", epsilon=1e-4)
    model, task = build("cnn", (1, 28, 28), 10, seed=0), Classification(10)
    world = CutCosts(Scenario.of(config, model, task), charge_moves=False)
    env = CutEnv(world, ROUNDS)
    agent = DQN(
        "MlpPolicy",
        env,
        gamma=0.0,  # moves are free and gains independent: a cut changes nothing but its own round
        learning_rate=1e-3,
        learning_starts=1000,
        exploration_fraction=0.4,
        exploration_final_eps=0.0,
        target_update_interval=500,
        seed=0,
    )
    agent.learn(steps)
    cost = best = 0.0
    for seed in range(1000, 1000 + episodes):
        seen, _ = env.reset(seed=seed)
        gains = world.draw(np.random.default_rng(seed), 1, ROUNDS + 1)[:, :-1]
        best += float(np.where(world.legal, world.costs(gains).cost, np.inf).min(-1).sum())
        for _ in range(ROUNDS):
            seen, _, _, _, info = env.step(agent.predict(seen, deterministic=True)[0])
            cost += info["cost"]
    print(f"DQN {cost / episodes:.1f}, enumeration {best / episodes:.1f}: {100 * (cost / best - 1):+.2f} %")
    return cost / best - 1


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
