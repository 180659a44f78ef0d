"""How long Algorithm 1 takes: DDQN over 500 episodes of 100 rounds, ten clients, the paper's setting.

Beside it what the same would take with a general convex solver in the loop (extra `verify`): one solve of P2.1
per round, for the cut that was chosen, as the paper describes it; projected from solves measured in the same run.
"""

import time
from functools import partial
from typing import Any

from splitcast.allocate.rate import ShannonRate
from splitcast.allocate.reference import solve_cvxpy
from splitcast.base.config import Config, LearnConfig, with_values
from splitcast.bench.allocate import instances
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.cost.scenario import Scenario
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.ddqn import learn
from splitcast.cutting.env import VectorCutEnv
from splitcast.cutting.policies import best_path
from splitcast.model import build
from splitcast.training.task import Classification

ROUNDS, SOLVES = 100, 20


def ccc(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench ccc`; learning runs once, it is long enough."""
    config = with_values(Config(), workload="paper", epsilon=1e-3)
    model, task = build("cnn", (1, 28, 28), 10, seed=0), Classification(10)
    world = CutCosts(Scenario.of(config, model, task), charge_moves=False)
    settings, clients = LearnConfig(), world.clients
    case = f"ccc.n{clients}_t{ROUNDS}_e{settings.episodes}"
    start = time.perf_counter()
    learn(world, ROUNDS, settings)
    learning = time.perf_counter() - start

    env = VectorCutEnv(world, settings.parallel, ROUNDS)
    known = world.trace(ROUNDS)
    given = instances(clients, SOLVES)
    seconds = interleaved_medians(
        {
            "costs": partial(env.reset, seed=0),
            "clairvoyant": partial(best_path, known.cost, known.move_s),
            "cvxpy": partial(_solve_each, given),
        },
        repeats,
    )
    rounds = settings.episodes * ROUNDS
    projected = rounds * seconds["cvxpy"] / SOLVES
    return [
        Row(f"{case}.ddqn", learning, "s"),
        Row(f"{case}.costs", settings.episodes / settings.parallel * seconds["costs"], "s"),
        Row(f"{case}.cvxpy_projected", projected, "s"),
        Row(f"{case}.cvxpy_projected_by_ddqn", projected / learning, "x"),
        Row(f"ccc.n{clients}.cvxpy", 1e3 * seconds["cvxpy"] / SOLVES, "ms"),
        Row(f"ccc.t{ROUNDS}.clairvoyant", 1e3 * seconds["clairvoyant"], "ms"),
    ]


def _solve_each(given: dict[str, Any]) -> None:
    powers, noise = given["rate"].received_power_w, given["rate"].noise_w_per_hz
    for power in powers:
        solve_cvxpy(**(given | {"rate": ShannonRate(power, noise)}), passes=1)
