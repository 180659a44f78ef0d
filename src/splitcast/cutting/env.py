"""Cut selection as a Gymnasium environment: the Markov decision process of P2.2, with the slips of its reward mended.

**Observation**, float32, D = N + 1, or N + 1 + C where moves are charged

| entries        | meaning                                                                     | range   |
|----------------|-----------------------------------------------------------------------------|---------|
| 0 .. N-1       | log10 of each client's gain, minus its mean, over its standard deviation      | -8 .. 8 |
| N              | cost of the episode so far over that of T rounds at the best single cut      | 0 .. 1  |
| N+1 .. N+C     | one-hot current cut, only where moves are charged; all zero before round 1    | 0, 1    |

**Action**, Discrete(C): a = 0 .. C-1 is the cut v = a + 1 of the coming round.

**Reward**, in seconds

| case                        | reward                                                                     |
|-----------------------------|----------------------------------------------------------------------------|
| log(1 + φ(v)/q) ≥ ε          | -(w Γ(φ(v)) + l_t(v) + seconds of the move)                                 |
| else                        | -C                                                                         |

l_t = χ_t + ψ_t with bandwidth and server shared as configured (`optimal` solves P2.1 exactly). C is twice the largest
cost in a reference sample of 1024 draws unless given. The first cut of an episode is where the model is placed, not a
move. The cost so far counts what rounds really cost, never C.

**Episode**

| event   | when                                                                                             |
|---------|--------------------------------------------------------------------------------------------------|
| reset   | new gains for T + 1 rounds are drawn and the costs of all cuts are solved, in one batch             |
| end     | truncated after T rounds: the paper's return is an infinite sum, so a learner bootstraps beyond T  |
| info    | ``cost`` (seconds, without C), ``violation`` (privacy), ``cut``                                      |
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError
from splitcast.cost.conditions import Conditions
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.encoder import LIMIT, Encoder, Observation


class VectorCutEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """E episodes side by side, in step; they end together, and the caller resets."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, world: CutCosts, episodes: int, rounds: int, *, penalty: float | None = None) -> None:
        if rounds < 1 or episodes < 1:
            raise SplitcastError(f"rounds, episodes: {rounds}, {episodes}; must be at least 1")
        self.world, self.num_envs, self.rounds = world, episodes, rounds
        self.penalty = world.penalty if penalty is None else penalty
        self.encoder = Encoder.of(world, rounds)
        count, clients = len(world.cuts), world.clients
        rest = self.encoder.size - clients
        self.single_observation_space = Box(
            np.array([-LIMIT] * clients + [0.0] * rest, dtype=np.float32),
            np.array([LIMIT] * clients + [1.0] * rest, dtype=np.float32),
        )
        self.single_action_space = Discrete(count)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, episodes)
        self.action_space = MultiDiscrete([count] * episodes)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start E new episodes; with a list of seeds, each is the episode that `CutEnv` starts from that seed."""
        if isinstance(seed, list):
            assert len(seed) == self.num_envs
            each = [self.world.draw(np.random.default_rng(s), 1, self.rounds + 1) for s in seed]
            met = Conditions.join(each)
        else:
            if seed is not None:
                self._np_random = np.random.default_rng(seed)
            met = self.world.draw(self.np_random, self.num_envs, self.rounds + 1)
        return self.start(met), {}

    def start(self, met: Conditions) -> Observation:
        """Episodes with given conditions (E, T+1, N)."""
        self._costs = self.world.costs(met[:, :-1])
        self._gains, self._t = met.gains, 0
        self._spent = np.zeros(self.num_envs)
        self._current = np.full(self.num_envs, -1)
        return self._observe()

    def _observe(self) -> Observation:
        return self.encoder(self._gains[:, self._t], self._spent, self._current)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """One round of every episode."""
        actions, every, t = np.asarray(actions), np.arange(self.num_envs), self._t
        cost = self._costs.cost[every, t, actions]
        if t > 0:
            cost = cost + self._costs.move_s[every, t, self._current, actions]
        violation = ~self.world.legal[actions]
        self._t, self._spent, self._current = t + 1, self._spent + cost, actions
        ended = np.full(self.num_envs, self._t == self.rounds)
        info = {"cost": cost, "violation": violation, "cut": actions + 1}
        return self._observe(), np.where(violation, -self.penalty, -cost), np.zeros_like(ended), ended, info


class CutEnv(gym.Env[Observation, np.int64]):
    """One episode at a time.

    >>> from splitcast.cost.scenario import Scenario
    >>> from splitcast.base.config import Config
    >>> from splitcast.model import build
    >>> from splitcast.training.task import Classification
    >>> model, task = build("cnn-small", (1, 28, 28), 10, seed=0), Classification(10)
    >>> world = CutCosts(Scenario.of(Config(), model, task))
    >>> env = CutEnv(world, rounds=2)
    >>> env.reset(seed=0)[0].shape, env.step(0)[3], env.step(1)[3]
    ((15,), False, True)
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, world: CutCosts, rounds: int, *, penalty: float | None = None) -> None:
        self._one = VectorCutEnv(world, 1, rounds, penalty=penalty)
        self.observation_space = self._one.single_observation_space
        self.action_space = self._one.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start a new episode."""
        if seed is not None:
            self._np_random, self._np_random_seed = np.random.default_rng(seed), seed
        return self._one.start(self._one.world.draw(self.np_random, 1, self._one.rounds + 1))[0], {}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One round."""
        seen, reward, ended, truncated, info = self._one.step(np.array([int(action)]))
        facts = {key: value[0].item() for key, value in info.items()}
        return seen[0], float(reward[0]), bool(ended[0]), bool(truncated[0]), facts
