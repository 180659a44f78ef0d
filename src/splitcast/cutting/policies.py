"""Policies: who picks the cut of a round. A policy is a function of a `Situation` that returns a legal cut.

| name           | picks                                                                                         |
|----------------|-----------------------------------------------------------------------------------------------|
| fixed, fixed:V | always the same cut                                                                            |
| random         | any legal cut, each as likely                                                                  |
| greedy         | the least w Γ + l_t of the round, by enumeration: exact for P1 while moves are free; ignores them |
| myopic         | the least w Γ + l_t + seconds of the move, of this round alone                                   |
| lookahead      | the least expected total of this and all later rounds: value iteration on the channel's chain    |
| rollout        | the same with `myopic` in all later rounds, over sampled futures (`cutting.lookahead` has both)    |
| clairvoyant    | the least total with moves over the whole training, knowing all its channels: the bound          |
| bargain        | Kalai-Smorodinsky between seconds, joules and privacy of the round (`cutting.bargain`)           |
| assign:K       | the planner's cut for every client, every K rounds (`cutting.reassign`)                          |
| ddqn:FILE      | what a learned Q-network says (Algorithm 1), among the legal cuts                               |
| module:function | a function of yours                                                                           |

Where there are formats of smashed data to choose from, a cut stands for the pair of it and the format that costs least
there (`cutting.formats`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError, shown
from splitcast.base.registry import Registry
from splitcast.base.seeds import stream
from splitcast.cost.cell import Array
from splitcast.cost.scenario import Scenario
from splitcast.cutting.bargain import bargained
from splitcast.cutting.costs import CHOICE, CutCosts, EpisodeCosts
from splitcast.cutting.ddqn import Agent
from splitcast.cutting.lookahead import make_ahead
from splitcast.training.placement import Placed, Placement


@dataclass(frozen=True)
class Situation:
    """What is known before a round. Arrays over cuts are in the order of ``cuts``."""

    round: int
    """t, from 1"""
    gains: Array
    """Of every client, linear, (N,)"""
    cuts: tuple[int, ...]
    legal: tuple[int, ...]
    """Those that keep privacy"""
    cut: int | None
    """Where the model is cut now; None before the first round, which places it for free"""
    costs: Array
    """w Γ + l_t of the round at every cut, without moves, (C,)"""
    moves: Array
    """Seconds of moving to every cut, (C,); 0 where moves are not charged"""
    spent: float
    """Cost of all rounds so far, moves included"""
    rng: np.random.Generator
    """The policy's random stream of this round"""
    state: int = 0
    """Of the channel's chain: which clients are blocked, one bit each (or one for all)"""

    def cheapest(self, costs: Array) -> int:
        """The legal cut with the least of ``costs`` (C,); the first of equals."""
        known = dict(zip(self.cuts, costs.tolist(), strict=True))
        return min(self.legal, key=known.__getitem__)


Policy = Callable[[Situation], int]


def random(here: Situation) -> int:
    return int(here.rng.choice(here.legal))


def greedy(here: Situation) -> int:
    return here.cheapest(here.costs)


def myopic(here: Situation) -> int:
    return here.cheapest(here.costs + here.moves)


POLICIES = Registry[Policy](
    "policy",
    takes=1,
    entries={"random": random, "greedy": greedy, "myopic": myopic},
    forms=("fixed", "fixed:V", "lookahead", "rollout", "clairvoyant", "bargain", "assign:K", "ddqn:FILE"),
)
"""Policies that need nothing but the situation; `make_policy` makes those of the further forms."""


def fixed(cut: int) -> Policy:
    """Always the same cut."""
    return lambda here: cut


def clairvoyant(world: CutCosts, known: EpisodeCosts) -> Policy:
    """The best path through rounds whose costs are known in advance."""
    path = best_path(np.where(world.legal, known.cost, np.inf), known.move_s)
    return lambda here: here.cuts[path[here.round - 1]]


def best_path(cost: Array, move: Array) -> NDArray[np.int64]:
    """argmin over a_1..a_T of Σ_t cost[t, a_t] + Σ_{t>1} move[t, a_{t-1}, a_t], by dynamic programming from the end.

    ``cost`` (T, C), ``move`` (T, C, C) as [from, to]; result (T,).

    >>> best_path(np.array([[0.0, 2.0], [3.0, 0.0], [0.0, 2.0]]), np.full((3, 2, 2), 9.0) * (1 - np.eye(2))).tolist()
    [0, 0, 0]
    """
    then = np.zeros((len(cost), cost.shape[1]), dtype=np.int64)  # best next position, from each
    ahead = np.zeros(cost.shape[1])  # cost of all later rounds, having used each cut in this one
    for t in range(len(cost) - 1, 0, -1):
        total = move[t] + cost[t] + ahead  # [from, to]
        then[t], ahead = total.argmin(1), total.min(1)
    path = [int((cost[0] + ahead).argmin())]
    for t in range(1, len(cost)):
        path.append(int(then[t, path[-1]]))
    return np.array(path)


def learned(agent: Agent) -> Policy:
    """What a Q-network says among the legal cuts: in use, no mistake of it may cost privacy."""

    def choose(here: Situation) -> int:
        at = -1 if here.cut is None else here.cuts.index(here.cut)
        seen = agent.encoder(here.gains, np.array(here.spent), np.array(at))
        return here.cheapest(-agent.values(seen).astype(np.float64))

    return choose


def make_policy(name: str, world: CutCosts, known: EpisodeCosts, default_cut: int) -> Policy:
    """The policy a name stands for; ``known`` are the costs of the rounds to come."""
    kind, _, rest = name.partition(":")
    if kind == "fixed":
        cut = fixed_cut(name, default_cut)
        assert cut is not None
        return fixed(cut)
    if name == "clairvoyant":
        return clairvoyant(world, known)
    if name in ("lookahead", "rollout"):
        ahead = make_ahead(name, world, len(known.cost))
        return lambda here: here.cheapest(here.costs + here.moves + ahead(here.round, here.state))
    if name == "bargain":
        agreed = bargained(world, known)
        return lambda here: here.cuts[int(agreed[here.round - 1])]
    if kind == "ddqn":
        if not rest:
            raise POLICIES.unknown(name)
        agent = Agent.load(Path(rest))
        agent.check(world, Path(rest))
        return learned(agent)
    return POLICIES.find(name)


def fixed_cut(name: str, default_cut: int) -> int | None:
    """The cut of a fixed policy; None for the others."""
    kind, colon, rest = name.partition(":")
    if kind != "fixed":
        return None
    if not colon:
        return default_cut
    if not re.fullmatch(r"-?[0-9]{1,9}", rest):
        raise SplitcastError(f"policy: {shown(name)}; give the cut as a number, fixed:1")
    return int(rest)


class CutSelector:
    """Asks a policy for the cut of every round and holds it to the legal ones."""

    def __init__(self, world: CutCosts, policy: Policy, known: EpisodeCosts, name: str = "policy") -> None:
        self.world, self.policy, self.known, self.name = world, policy, known, name
        self.legal = tuple(cut for cut, good in zip(world.cuts, world.legal, strict=True) if good)

    @staticmethod
    def of(world: CutCosts, name: str, rounds: int, default_cut: int = 1) -> "CutSelector":
        """For the training of the world's configuration."""
        known = world.trace(rounds)
        return CutSelector(world, make_policy(name, world, known, default_cut), known, name)

    def choose(self, t: int, now: Placed | None, spent: float) -> Placement:
        """The placement of round ``t``, coming from another one."""
        cut = now.cut if now else None
        moves = np.zeros(len(self.world.cuts))
        if cut is not None:
            moves = self.known.move_s[t - 1, self.world.cuts.index(cut)]
        rng = stream(self.world.seed, "policy", CHOICE, t)
        known = (self.known.gains[t - 1], self.world.cuts, self.legal, cut, self.known.cost[t - 1], moves)
        chosen = self.policy(Situation(t, *known, spent, rng, int(self.known.met.state[t - 1])))
        if chosen not in self.legal:
            raise SplitcastError(f"policy: {self.name} chose cut {chosen!r} in round {t}; legal are {list(self.legal)}")
        return self.world.placements[self.world.cuts.index(int(chosen))]

    def format(self, t: int, placed: Placed) -> tuple[str, Scenario]:
        """The format of smashed data that costs least in round ``t`` there, empty where there is no choice; and the
        scenario with it."""
        at, formats = self.known.format[t - 1, self.world.cuts.index(placed.cut)], self.world.formats
        return formats.names[at], formats.scenarios[at]

    def cost(self, cut: int, latency_s: float, joules: float = 0.0, uplink: str = "") -> float:
        """w Γ + l_t of a recorded round, and the price of its joules and of the error of its format."""
        at, formats = self.world.cuts.index(cut), self.world.formats
        error = float(formats.price_s[formats.names.index(uplink), at])
        return float(self.world.weighted_gamma[at]) + latency_s + self.world.seconds_per_j * joules + error


@dataclass(frozen=True)
class Rollout:
    """What a policy did in one episode."""

    cost: float
    """Σ w Γ + l_t + moves"""
    cuts: NDArray[np.int64]
    """(T,)"""

    @property
    def moves(self) -> int:
        """How often the cut changed."""
        return int((np.diff(self.cuts) != 0).sum())


def rollout(selector: CutSelector) -> Rollout:
    """An episode as the costs predict it, without training."""
    world, now = selector.world, None
    spent, cuts = 0.0, list[int]()
    for t in range(1, len(selector.known.cost) + 1):
        chosen = selector.choose(t, now, spent)
        at = world.placements.index(chosen)
        spent += float(selector.known.cost[t - 1, at])
        if now is not None:
            spent += float(selector.known.move_s[t - 1, world.placements.index(now), at])
        now = chosen
        cuts.append(chosen.cut)
    return Rollout(spent, np.array(cuts))
