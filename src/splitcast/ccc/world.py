"""What every cut, and every move of the cut, costs under any channel: the numbers that cut selection works on.

A round at cut v costs w Γ(φ(v)) + l_t(v); moving there from cut u before it costs further seconds. Both come from the
clock, for all cuts and all channel draws in one batched call, as if all clients took part; a training knows who does.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splitcast.ccc.clock import round_seconds
from splitcast.ccc.scenario import Scenario
from splitcast.data.batches import participants
from splitcast.errors import SplitcastError
from splitcast.network.cell import Array
from splitcast.network.channel import Rayleigh, fade, record
from splitcast.network.objective import gamma_per_cut, round_cost
from splitcast.network.privacy import allowed_cuts
from splitcast.network.trace import Trace
from splitcast.schemes.stages import Stage
from splitcast.seeds import stream

REFERENCE_DRAWS = 1024
REFERENCE, TRAINING, EXPLORING, HELD_OUT, CHOICE = range(5)
"""Places in the policy's stream."""
_CLIENT_DRAWS = 2**20  # clients × cuts × draws that are timed at once


@dataclass(frozen=True)
class Costs:
    """Everything a cut selection can be charged; leading dimensions ... are episodes, T rounds, N clients, C cuts."""

    gains: Array
    """(..., T, N), linear"""
    cost: Array
    """w Γ(φ(v)) + l_t(v), (..., T, C)"""
    move_s: Array
    """Seconds of moving [from, to] before the round, (..., T, C, C); 0 throughout where moves are not charged."""


class World:
    """Cuts, their costs and the channel of a scenario; cuts are counted by position 0..C-1 in arrays."""

    def __init__(self, scenario: Scenario, *, charge_moves: bool = True) -> None:
        if scenario.scheme.whole_model:
            raise SplitcastError(f"policy: {scenario.scheme.name} has no cut to choose; use fixed")
        net, profile = scenario.config.network, scenario.model.profile()
        self.scenario, self.charge_moves = scenario, charge_moves
        self.cuts = tuple(row.cut for row in profile)
        allowed = allowed_cuts(profile, net.epsilon)
        self.legal: NDArray[np.bool_] = np.array([cut in allowed for cut in self.cuts])
        """(C,): privacy log(1 + φ(v)/q) is at least ε"""
        self.weighted_gamma = net.gamma_weight * gamma_per_cut(net.gamma, [row.client_fraction for row in profile])
        self._phi = np.array([row.client_parameters for row in profile], dtype=np.float64)

    @property
    def clients(self) -> int:
        """N"""
        return self.scenario.cell.clients

    @property
    def seed(self) -> int:
        """The seed of the configuration."""
        return self.scenario.config.train.seed

    def costs(self, gains: Array) -> Costs:
        """Costs of rounds 1..T with given gains (..., T, N)."""
        lead, count = gains.shape[:-1], len(self.cuts)
        flat = gains.reshape(-1, self.clients)
        rounds = np.broadcast_to(np.arange(1, lead[-1] + 1), lead).ravel()
        seconds, down, up = np.zeros((len(flat), count)), np.zeros(len(flat)), np.zeros(len(flat))
        step = max(1, _CLIENT_DRAWS // (self.clients * count))
        for these, stages in self.scenario.rhythms(self.cuts, lead[-1]):
            who = np.flatnonzero(these[rounds - 1])
            for part in (who[at : at + step] for at in range(0, len(who), step)):
                timed = self._seconds([*stages, *self._whole_model()], flat[part])
                seconds[part], down[part], up[part] = timed[:, :count], timed[:, count], timed[:, count + 1]
        diverged = np.array([self._diverged(t) for t in range(1, lead[-1] + 1)])[rounds - 1]  # [draw, from]
        share = (self._phi[None, :] - self._phi[:, None]) / self.scenario.model.size  # [from, to]
        move = down[:, None, None] * share.clip(min=0) + (up[:, None] * diverged)[..., None] * (-share).clip(min=0)
        if self.scenario.scheme.sequential:  # every client is handed the whole half anyway
            move[:] = 0
        cost = round_cost(self.weighted_gamma, seconds, weight=1.0)
        return Costs(gains, cost.reshape(*lead, count), move.reshape(*lead, count, count) * self.charge_moves)

    def _seconds(self, rounds: Sequence[Sequence[Stage]], gains: Array) -> Array:
        return round_seconds(rounds, self.scenario.cell, gains, self.scenario.allocator)

    def _whole_model(self) -> list[list[Stage]]:
        """A move that broadcasts, and one that uploads, the whole model; others take their share of its seconds."""
        bits = 32 * self.scenario.model.size * (2 if self.scenario.config.train.momentum else 1)
        everyone = tuple(range(self.clients))
        return [[Stage("re-cut", everyone, broadcast_bits=bits)], [Stage("re-cut", everyone, uplink_bits=bits)]]

    def _diverged(self, t: int) -> list[bool]:
        """Whether halves differ after round t - 1, for each cut it ran at; equal ones are known to the server."""
        schemes = [self.scenario.scheme.at(cut) for cut in self.cuts]
        return [t > 1 and not (scheme.identical or scheme.syncs(t - 1)) for scheme in schemes]

    def trace(self, rounds: int) -> Costs:
        """The rounds that a training with this configuration meets, each with those who take part in it."""
        known, train = self.costs(record(self.scenario.channel, rounds).gains), self.scenario.config.train
        schemes = {cut: self.scenario.scheme.at(cut) for cut in self.cuts}
        for t in range(1, rounds + 1) if train.participation < 1 or train.dropout else ():
            who = participants(train, self.clients, t).tolist()
            stages = [self.scenario.stages(cut, syncs=each.syncs(t), clients=who) for cut, each in schemes.items()]
            seconds = self._seconds(stages, known.gains[t - 1 : t])
            known.cost[t - 1] = round_cost(self.weighted_gamma, seconds, weight=1.0)[0]
        return known

    def draw(self, rng: np.random.Generator, episodes: int, rounds: int) -> Array:
        """Gains (E, T, N) of other rounds in the same cell; of a trace, pieces that start anywhere and wrap around."""
        source = self.scenario.channel
        if isinstance(source, Rayleigh):
            return fade(source.mean_gain, rng, (episodes, rounds))
        assert isinstance(source, Trace)
        start = rng.integers(len(source.gains), size=(episodes, 1))
        return np.asarray(source.gains[(start + np.arange(rounds)) % len(source.gains)])

    @cached_property
    def reference(self) -> Costs:
        """A sample of single draws, from which scales are taken."""
        return self.costs(self.draw(stream(self.seed, "policy", REFERENCE), 1, REFERENCE_DRAWS)[0])

    @property
    def penalty(self) -> float:
        """C: twice the largest cost of any cut and draw in the reference sample."""
        return 2 * float(self.reference.cost.max())

    def digest(self) -> str:
        """What the costs depend on, in a few letters."""
        config = self.scenario.config
        parts = [asdict(part) for part in (config.network, config.split, config.model)]
        parts[1].pop("cut")
        train = [config.train.batch, config.train.local_steps, config.train.momentum, self.seed]
        text = json.dumps([*parts, train, self.clients, config.data.dataset, self.charge_moves])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
