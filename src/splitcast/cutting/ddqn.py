"""Algorithm 1 of the paper: cut selection by a double deep Q-network, on one page.

    y = r_t + γ Q(s_{t+1}, argmax_a Q(s_{t+1}, a; θ); θ̂),        θ ← θ − η ∇ huber(Q(s_t, a_t; θ) − y)

after van Hasselt et al., AAAI 2016: θ picks the next cut, the target network θ̂, a copy of θ now and then, values it.
What makes Q precise enough to tell cuts apart whose costs differ by a few per cent, or by the penalty C:

- rewards are shifted and scaled, r̃ = (r − r̄)/σ, with r̄ the median of the best cut and σ the widest quartile range
  of any cut, both from a first batch of random episodes; a constant shift leaves the best policy as it is;
- the last layer starts at the median of each cut, so that penalties and constant parts need not be learned;
- the Huber loss, because in deep fades a round takes a thousand times as long as usual. Without a discount a round's
  cost is known from what is seen, and it is linear beyond σ. With one, Q is a mean over what may come, of which a loss
  that is linear so soon finds the median: rare blockages would count for nothing. It is quadratic up to 15 σ then;
- a learning rate that falls to zero.
"""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from splitcast.base.config import LearnConfig
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.files import write_atomically
from splitcast.base.seeds import stream, torch_seed
from splitcast.cost.cell import Array
from splitcast.cutting.costs import EXPLORING, TRAINING, CutCosts
from splitcast.cutting.encoder import Encoder, Observation

FORMAT = "splitcast-ddqn-1"
FACTS = {
    "format": FORMAT,
    "clients": "[1-9][0-9]{0,7}",
    "cuts": "[1-9][0-9]{0,4}",
    "shows_cut": "[01]",
    "hidden": "[1-9][0-9]{0,5}",
    "scenario": "[0-9a-f]{0,64}",
}
"""Metadata of a policy's file, and what they look like."""
HEADER_BYTES = 100_000
FILE_BYTES = 2**31
LINEAR_BEYOND = 15.0
"""Scaled errors of returns, where there is a discount."""
OnEpisodes = Callable[[int, float], None]


class QNetwork(nn.Module):
    """Q(s, ·; θ) in scaled rewards, (..., D) to (..., C)."""

    def __init__(self, inputs: int, hidden: int, cuts: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.head = nn.Linear(hidden, cuts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Replay:
    """Transitions (s, a, r, s'); the oldest are forgotten."""

    def __init__(self, size: int, inputs: int) -> None:
        self.seen, self.then = torch.zeros(size, inputs), torch.zeros(size, inputs)
        self.cut, self.reward = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.float64)
        self.size, self.count = size, 0

    def add(self, seen: Observation, cut: NDArray[np.int64], reward: Array, then: Observation) -> None:
        """Remember one transition of every episode."""
        at = torch.arange(self.count, self.count + len(cut)) % self.size
        self.seen[at], self.then[at] = torch.from_numpy(seen), torch.from_numpy(then)
        self.cut[at], self.reward[at] = torch.from_numpy(cut), torch.from_numpy(reward)
        self.count += len(cut)

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A minibatch, with replacement."""
        at = torch.from_numpy(rng.integers(min(self.count, self.size), size=count))
        return self.seen[at], self.cut[at], self.reward[at], self.then[at]


@dataclass(frozen=True)
class Agent:
    """A learned policy: the Q-network and how to make its input."""

    network: QNetwork
    encoder: Encoder
    scenario: str
    """Digest of the world it was learned in."""

    @torch.no_grad()
    def act(self, seen: Observation) -> NDArray[np.int64]:
        """The position 0..C-1 of the best cut; ``seen`` (..., D)."""
        return np.asarray(self.network(torch.from_numpy(seen)).argmax(-1).numpy())

    @torch.no_grad()
    def values(self, seen: Observation) -> NDArray[np.float32]:
        """Q in scaled rewards, (..., C)."""
        return np.asarray(self.network(torch.from_numpy(seen)).numpy())

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        code, network = self.encoder, self.network
        scales = {"log_gain_mean": code.mean, "log_gain_deviation": code.deviation, "budget_s": [code.budget_s]}
        tensors = {f"scale/{name}": torch.tensor(np.asarray(value)) for name, value in scales.items()}
        tensors |= {f"network/{name}": value.contiguous() for name, value in network.state_dict().items()}
        facts = {
            "format": FORMAT,
            "clients": len(code.mean),
            "cuts": code.cuts,
            "shows_cut": int(code.shows_cut),
            "hidden": network.head.in_features,
            "scenario": self.scenario,
        }
        write_atomically(path, save(tensors, {name: str(value) for name, value in facts.items()}))

    @staticmethod
    def load(path: Path) -> "Agent":
        """Read what `save` wrote; types, shapes and metadata are compared before any tensor is read."""
        if not path.exists():
            raise SplitcastError(f"policy: no file {path}; learn one with splitcast learn")
        try:
            _check_size(path)
            with safe_open(path, framework="pt") as opened:
                facts = _checked_facts(path, opened.metadata() or {})
                expected = _expected(facts)
                slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
                _compare(path, expected, {k: (s.get_dtype(), tuple(s.get_shape())) for k, s in slices.items()})
                tensors = {key: opened.get_tensor(key) for key in expected}
        except SplitcastError:
            raise
        except Exception as error:  # of many kinds: the header is foreign
            said = shown(" ".join(str(error).split()))
            raise SplitcastError(f"policy: cannot read {path}: {said}") from None
        for name, value in tensors.items():
            if not value.isfinite().all():
                raise SplitcastError(f"policy: {path} holds NaN or infinite values in {name}; allowed are finite ones")
            if name in ("scale/log_gain_deviation", "scale/budget_s") and not (value > 0).all():
                raise SplitcastError(f"policy: {path} has {name} {value.min():g}; allowed are numbers above 0")
        mean, deviation, budget = (tensors.pop(f"scale/{name}") for name in SCALES)
        code = Encoder(mean.numpy(), deviation.numpy(), float(budget), int(facts["cuts"]), facts["shows_cut"] == "1")
        network = QNetwork(code.size, int(facts["hidden"]), code.cuts)
        network.load_state_dict({name.removeprefix("network/"): value for name, value in tensors.items()})
        return Agent(network, code, facts["scenario"])

    def check(self, world: CutCosts, path: Path) -> None:
        """Refuse a world that the network has no inputs or outputs for."""
        for name, mine, theirs in (
            ("clients", len(self.encoder.mean), world.clients),
            ("cuts", self.encoder.cuts, len(world.cuts)),
        ):
            if mine != theirs:
                raise SplitcastError(f"policy: {path} was learned for {mine} {name}, not {theirs}")
        if self.scenario != world.digest():
            warnings.warn(
                f"policy: {path} was learned for another scenario (cell, scheme, model, batch, seed or Gamma); its "
                "choices are legal but may be poor: learn one with the same options",
                stacklevel=2,
            )


SCALES = ("log_gain_mean", "log_gain_deviation", "budget_s")
Outline = tuple[str, tuple[int, ...]]
"""Type, as safetensors names it, and shape."""


def _check_size(path: Path) -> None:
    if not path.is_file():
        raise SplitcastError(f"policy: cannot read {path}: it is not a file")
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        size = file.seek(0, 2)
    if header > HEADER_BYTES:
        raise SplitcastError(f"policy: cannot read {path}: a header of {header:,} bytes; allowed are {HEADER_BYTES:,}")
    if size > FILE_BYTES:
        raise SplitcastError(f"policy: cannot read {path}: it has {size:,} bytes; allowed are {FILE_BYTES:,}")


def _checked_facts(path: Path, facts: dict[str, str]) -> dict[str, str]:
    if facts.get("format") != FORMAT:
        raise SplitcastError(
            f"policy: {path} is not a learned policy (format {shown(facts.get('format'))}, not {FORMAT})"
        )
    for name in {**FACTS, **facts}:
        if name not in FACTS or name not in facts:
            raise SplitcastError(f"policy: {path} has other metadata than {', '.join(FACTS)}: see {shown(name)}")
        if not re.fullmatch(FACTS[name], facts[name]):
            raise SplitcastError(
                f"policy: {path} has {name} {shown(facts[name])}; allowed is what splitcast learn writes"
            )
    return facts


def _expected(facts: dict[str, str]) -> dict[str, Outline]:
    """The tensors that go with these metadata."""
    clients, cuts, hidden = (int(facts[name]) for name in ("clients", "cuts", "hidden"))
    with torch.device("meta"):
        network = QNetwork(clients + 1 + cuts * int(facts["shows_cut"]), hidden, cuts)
    outlines: dict[str, Outline] = {f"scale/{name}": ("F64", (clients,)) for name in SCALES[:2]}
    outlines[f"scale/{SCALES[2]}"] = ("F64", (1,))
    return outlines | {f"network/{name}": ("F32", tuple(v.shape)) for name, v in network.state_dict().items()}


def _compare(path: Path, expected: dict[str, Outline], found: dict[str, Outline]) -> None:
    for name in {**expected, **found}:
        has, wants = (_told(side.get(name)) for side in (found, expected))
        if has != wants:
            raise SplitcastError(f"policy: {path} has {has} as {shown(name)}; allowed is {wants}")


def _told(outline: Outline | None) -> str:
    return f"{outline[0]} {list(outline[1])}" if outline else "nothing"


def learn(
    world: CutCosts, rounds: int, settings: LearnConfig, on_episodes: OnEpisodes = lambda done, reward: None
) -> Agent:
    """Learn to cut in ``world`` over episodes of ``rounds``; reports episodes done and their mean reward per round."""
    from splitcast.cutting.env import VectorCutEnv  # loads Gymnasium, which only learning needs

    gamma = settings.discount if settings.discount is not None else 0.9 if world.charge_moves else 0.0
    env = VectorCutEnv(world, min(settings.parallel, settings.episodes), rounds)
    env.reset(seed=int(stream(world.seed, "policy", TRAINING).integers(2**31)))
    rng, count = stream(world.seed, "policy", EXPLORING), len(world.cuts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(world.seed, "policy", TRAINING))
        online = QNetwork(env.encoder.size, settings.hidden, count)
    replay = Replay(max(settings.buffer, env.num_envs * rounds), env.encoder.size)
    target, agent = copy.deepcopy(online), Agent(online, env.encoder, world.digest())
    adam = torch.optim.Adam(online.parameters(), lr=settings.learning_rate, eps=1e-5, fused=True)

    batches = -(-settings.episodes // env.num_envs)
    steps, centre, scale = 0, 0.0, 1.0
    for batch in range(batches):
        seen, _ = env.reset()
        done, total = min((batch + 1) * env.num_envs, settings.episodes), 0.0
        fade = min(1.0, batch * env.num_envs / settings.explore_episodes)
        chance = 1.0 + fade * (settings.explore_end - 1.0)
        for _ in range(rounds):
            random = rng.random(env.num_envs) < chance
            cuts = np.where(random, rng.integers(count, size=env.num_envs), agent.act(seen))
            then, reward, _, _, _ = env.step(cuts)
            replay.add(seen, cuts, reward, then)
            seen, total = then, total + float(reward.mean())
            if batch == 0:
                continue
            for group in adam.param_groups:
                group["lr"] = settings.learning_rate * (1 - steps / ((batches - 1) * rounds))
            s, a, r, after = replay.sample(rng, settings.minibatch)
            y = bootstrapped(online, target, ((r - centre) / scale).float(), after, gamma)
            loss = F.huber_loss(online(s).gather(1, a[:, None])[:, 0], y, delta=LINEAR_BEYOND if gamma else 1.0)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            steps += 1
            if steps % settings.target_every == 0:
                target.load_state_dict(online.state_dict())
        if batch == 0:
            centre, scale = _centred(online, replay, count)
            target.load_state_dict(online.state_dict())
        on_episodes(done, total / rounds)
    return agent


@torch.no_grad()
def bootstrapped(online: QNetwork, target: QNetwork, reward: Tensor, after: Tensor, gamma: float) -> Tensor:
    """y = r + γ Q(s', argmax_a Q(s', a; θ); θ̂), (B,)."""
    if gamma == 0:
        return reward
    choice: Tensor = online(after).argmax(1, keepdim=True)
    value: Tensor = target(after).gather(1, choice)[:, 0]
    return reward + gamma * value


@torch.no_grad()
def _centred(network: QNetwork, replay: Replay, cuts: int) -> tuple[float, float]:
    """r̄ and σ from random episodes; starts the last layer at the median of each cut."""
    seen, cut = replay.reward[: replay.count], replay.cut[: replay.count]
    rewards = [seen[cut == a] if (cut == a).any() else seen for a in range(cuts)]  # one never tried is like all others
    low, middle, high = torch.stack([r.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=r.dtype)) for r in rewards]).T
    centre, scale = float(middle.max()), float((high - low).max()) or 1.0
    network.head.bias.copy_((middle - centre) / scale)
    network.head.weight.mul_(0.1)
    return centre, scale
