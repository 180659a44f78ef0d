"""Policies that weigh what a cut means for later rounds, without knowing them.

**lookahead**: value iteration on the channel's chain. Blockage is a Markov chain with a known transition matrix P
over S states, which a policy sees; what varies beside it (fading, walking, load) is drawn anew in every round. With u
the cut so far and a the next one, from the last round back,

    V_t(s, u) = E[ min_a  cost_t(a) + move_t(u, a) + Σ_s' P(s, s') V_{t+1}(s', a) | s ],      V_{T+1} = 0,

and in use the round's own cost and moves, which are known, take the place of the expectation's. Without fading, walk
and load this is the optimum over all policies that do not know the future; with block fading too, up to the sample of
draws that stands for the expectation. Channels without a chain have one state.

**rollout**: for every cut, the round's cost and the mean of sampled futures in which `myopic` goes on (Bertsekas). It
needs futures to draw from, and no matrix.
"""

from collections.abc import Callable

import numpy as np

from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.cell import Array
from splitcast.cost.conditions import Conditions
from splitcast.cost.varying import Varying
from splitcast.cutting.costs import FUTURES, CutCosts

DRAWS = 64
"""Of what varies beside the chain, for every state."""
MOST_STATES = 1024
HORIZON, SAMPLES = 30, 32
"""Rounds that a rollout looks ahead, and futures it looks at."""


def chain_of(world: CutCosts) -> Array:
    """P[from, to] of the channel's chain, (S, S)."""
    source = world.scenario.channel
    chain = source.chain if isinstance(source, Varying) else None
    if chain is None:
        return np.ones((1, 1))
    if 2**chain.chains > MOST_STATES:
        raise SplitcastError(
            f"policy: lookahead has {chain.chains} clients blocked one by one, 2^{chain.chains} states; allowed are "
            f"{MOST_STATES}: use rollout, or blockage common"
        )
    return chain.transitions()


def rhythm(world: CutCosts, rounds: int) -> tuple[list[int], int]:
    """For every round 1..T the first one (from 0) that sends, computes and moves alike; and how many to work out."""
    here = world.scenario
    schemes = [here.scheme.at(placement) for placement in world.placements]
    first: dict[tuple[object, ...], int] = {}
    alike = [
        first.setdefault(tuple((s.pattern(t), s.equal_after(t - 1)) for s in schemes), t - 1)
        for t in range(1, rounds + 1)
    ]
    return alike, max(first.values()) + 1


def values_ahead(world: CutCosts, rounds: int) -> Array:
    """Expected cost of all rounds after t, in state s having used cut a in round t: (T, S, C)."""
    chain = chain_of(world)
    alike, length = rhythm(world, rounds)
    rng = stream(world.seed, "policy", FUTURES)
    drawn = [world.draw(rng, DRAWS, 1, first=s) for s in range(len(chain))]  # (M, 1, N) each
    met = Conditions.join(drawn, stack=True)[:, :, [0] * length]  # (S, M, R, N)
    known = world.costs(met)
    cost = np.where(world.legal, known.cost, np.inf)  # (S, M, R, C)
    ahead = np.zeros((rounds, len(chain), len(world.cuts)))
    for t in range(rounds - 1, 0, -1):
        k = alike[t]
        total = known.move_s[:, :, k] + (cost[:, :, k] + ahead[t, :, None])[:, :, None]  # (S, M, from, to)
        ahead[t - 1] = chain @ total.min(-1).mean(1)
    return ahead


class Futures:
    """Sampled futures of every state of the chain, drawn when they are first needed."""

    def __init__(self, world: CutCosts, rounds: int) -> None:
        self.world, self.rounds = world, rounds
        self._known: dict[int, Array] = {}

    def ahead(self, t: int, state: int) -> Array:
        """Mean cost of the rounds after round ``t``, up to the horizon, having used each cut in it: (C,)."""
        left = min(HORIZON, self.rounds - t)
        if not left:
            return np.zeros(len(self.world.cuts))
        if state not in self._known:
            self._known[state] = self._flown(state)
        found: Array = self._known[state][left - 1]
        return found

    def _flown(self, state: int) -> Array:
        """Cost of following `myopic` for 1..H rounds from each cut, (H, C)."""
        world, count = self.world, len(self.world.cuts)
        source = world.scenario.channel
        first = state if isinstance(source, Varying) and source.chain else None
        met = world.draw(stream(world.seed, "policy", FUTURES, state), SAMPLES, HORIZON + 1, first)
        known = world.costs(met)
        cost = np.where(world.legal, known.cost, np.inf)  # (E, H + 1, C)
        every = np.arange(SAMPLES)[:, None]
        at = np.broadcast_to(np.arange(count), (SAMPLES, count))  # where each starting cut has gone
        spent, totals = np.zeros((SAMPLES, count)), []
        for h in range(1, HORIZON + 1):
            price = known.move_s[:, h][every, at] + cost[:, h][:, None]  # (E, C, to)
            at, spent = price.argmin(-1), spent + price.min(-1)
            totals.append(spent.mean(0))
        return np.stack(totals)


Ahead = Callable[[int, int], Array]
"""Of a round and the chain's state in it: expected cost of what follows, for every cut used in it, (C,)."""


def make_ahead(name: str, world: CutCosts, rounds: int) -> Ahead:
    """What `lookahead` or `rollout` adds to the round's own cost."""
    if name == "rollout":
        return Futures(world, rounds).ahead
    ahead = values_ahead(world, rounds)
    return lambda t, state: ahead[t - 1, state]
