"""Learn a cut policy for a scenario (Algorithm 1), and judge it on channels it has not seen."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitcast.base.config import Config, LearnConfig, with_values
from splitcast.base.seeds import stream
from splitcast.cost.cell import Array
from splitcast.cutting.costs import HELD_OUT, CutCosts
from splitcast.cutting.ddqn import Agent, OnEpisodes, learn
from splitcast.cutting.env import VectorCutEnv
from splitcast.cutting.formats import measures
from splitcast.cutting.policies import CutSelector, make_policy, rollout
from splitcast.run.parts import load_data, make_simulator, with_clients
from splitcast.run.selecting import measure_errors, measure_gamma
from splitcast.studies.plan import scenario_of

QUICK = {"episodes": 300, "explore_episodes": 60, "held_out": 10}
"""Settings of a policy that is learned in less than a minute."""


@dataclass(frozen=True)
class Judged:
    """A policy on held-out episodes."""

    name: str
    cost: float
    """Σ w Γ + l_t + moves of an episode, mean"""
    median: float
    p95: float
    """of the costs of episodes: a few deep fades carry their mean"""
    above_best: float
    """cost / cost of the clairvoyant - 1"""
    moves: float
    """per episode, mean"""
    rounds_per_cut: tuple[int, ...]
    """over all episodes, cuts 1..C"""
    violations: int
    """rounds that break privacy, over all episodes"""


@dataclass(frozen=True)
class Learned:
    """A policy, how it was learned, and what it is worth."""

    agent: Agent
    seconds: float
    curve: list[tuple[int, float]]
    """episodes done, mean reward per round of the latest"""
    rows: list[Judged]
    rounds: int
    held_out: int
    penalty: float
    legal: tuple[int, ...]
    moves_charged: bool
    gamma: tuple[float, ...]
    """w Γ of every cut"""

    def row(self, name: str) -> Judged:
        """The judgement of one policy."""
        return next(row for row in self.rows if row.name == name)

    @property
    def regret(self) -> float:
        """Cost of the learned policy over that of greedy enumeration - 1; the latter is exact while moves are free."""
        return self.row("ddqn").cost / self.row("greedy").cost - 1

    def as_json(self) -> dict[str, Any]:
        """Everything but the network."""
        facts = asdict(replace(self, agent=None))  # type: ignore[arg-type]
        del facts["agent"]
        return facts | {"scenario": self.agent.scenario, "regret_to_greedy": self.regret}


def learn_policy(config: Config, settings: LearnConfig, on_episodes: OnEpisodes = lambda done, reward: None) -> Learned:
    """Learn for the cell, model and scheme of a configuration; an episode has as many rounds as a training."""
    world, rounds = make_cut_costs(config), config.train.rounds
    curve: list[tuple[int, float]] = []

    def watch(done: int, reward: float) -> None:
        curve.append((done, reward))
        on_episodes(done, reward)

    started = time.perf_counter()
    agent = learn(world, rounds, settings, watch)
    seconds = time.perf_counter() - started
    legal = tuple(cut for cut, good in zip(world.cuts, world.legal, strict=True) if good)
    rows = judge(world, agent, rounds, settings.held_out)
    gamma = tuple(world.weighted_gamma.tolist())
    return Learned(
        agent, seconds, curve, rows, rounds, settings.held_out, world.penalty, legal, world.charge_moves, gamma
    )


def make_cut_costs(config: Config) -> CutCosts:
    """The world of a configuration, with Gamma, and errors of formats, measured if it says so."""
    if config.policy.gamma_draws or measures(config.policy):
        dataset = load_data(config)
        config = with_clients(config, dataset)
        simulator = make_simulator(with_values(config, policy="fixed"), dataset)
        if config.policy.gamma_draws:
            config = with_values(config, gamma=measure_gamma(config, simulator, dataset))
        if measures(config.policy):
            config = with_values(config, uplink_errors=measure_errors(config, simulator, dataset))
    return CutCosts(scenario_of(config), charge_moves=config.policy.charge_migration)


def judge(world: CutCosts, agent: Agent, rounds: int, episodes: int) -> list[Judged]:
    """The learned policy, without the guard that it has in use, beside all others on the same held-out episodes.

    A privacy violation costs C, as it does while the policy learns.
    """
    met = world.draw(stream(world.seed, "policy", HELD_OUT), episodes, rounds + 1)
    env = VectorCutEnv(world, episodes, rounds)
    seen, costs, cuts, violations = env.start(met), np.zeros(episodes), [], 0
    for _ in range(rounds):
        seen, reward, _, _, info = env.step(agent.act(seen))
        costs -= reward
        cuts.append(info["cut"])
        violations += int(info["violation"].sum())

    every = world.costs(met[:, :-1])
    known = [every[e] for e in range(episodes)]
    fixed = [f"fixed:{cut}" for cut, good in zip(world.cuts, world.legal, strict=True) if good]
    flown = {}
    planned = [name for name in ("lookahead", "rollout") if world.charge_moves]  # else greedy is the optimum
    for name in ("clairvoyant", *planned, "greedy", "myopic", "random", *fixed):
        once = None if name == "clairvoyant" else make_policy(name, world, known[0], 1)
        flights = [rollout(CutSelector(world, once or make_policy(name, world, k, 1), k, name)) for k in known]
        flown[name] = np.array([f.cost for f in flights]), np.stack([f.cuts for f in flights])
    best = float(flown["clairvoyant"][0].mean())
    rows = [_judged("ddqn", costs, np.stack(cuts, axis=1), best, world, violations)]
    return rows + [_judged(name, total, where, best, world, 0) for name, (total, where) in flown.items()]


def _judged(name: str, costs: Array, cuts: NDArray[np.int64], best: float, world: CutCosts, violations: int) -> Judged:
    cost, used = float(costs.mean()), np.bincount(cuts.ravel(), minlength=len(world.cuts) + 1)[1:]
    moves = float((np.diff(cuts, axis=1) != 0).sum(1).mean())
    median, p95 = np.quantile(costs, (0.5, 0.95)).tolist()
    return Judged(name, cost, median, p95, cost / best - 1, moves, tuple(used.tolist()), violations)


def flat_after(curve: Sequence[tuple[int, float]], tolerance: float = 0.05) -> int | None:
    """The episode from which on the reward stays within ``tolerance`` of its final level.

    Running medians of five points, since single deep fades dominate means; the final level is the median of the last
    quarter.
    """
    rewards = np.array([reward for _, reward in curve])
    if len(rewards) < 8:
        return None
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(rewards, 5), axis=-1)
    final = float(np.median(rewards[-(len(rewards) // 4) :]))
    off = np.flatnonzero(np.abs(smooth - final) > tolerance * abs(final))
    first = 0 if len(off) == 0 else int(off[-1]) + 3  # the middle of the first window after the last that is off
    return None if first >= len(smooth) else curve[first][0]
