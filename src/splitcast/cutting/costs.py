"""What every cut, and every move of the cut, costs under any channel: the numbers that cut selection works on.

A round at cut v costs w Γ(φ(v)) + l_t(v), and where joules have a price, that of all clients' joules; where there are
formats to choose from (`cutting.formats`), in the one that costs least. Moving there from cut u before it costs further
seconds. Both come from the clock, for all cuts and all channel draws in one
batched call, as if all clients took part; a training knows who does.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.cell import Array
from splitcast.cost.channel import Rayleigh, fade, record
from splitcast.cost.clock import round_prices
from splitcast.cost.conditions import Conditions
from splitcast.cost.deadline import taking_part
from splitcast.cost.objective import gamma_per_cut, round_cost
from splitcast.cost.privacy import client_fraction
from splitcast.cost.scenario import Scenario, rhythms
from splitcast.cost.stages import Stage
from splitcast.cost.trace import Trace
from splitcast.cost.varying import Varying, sampled
from splitcast.cutting.formats import Formats
from splitcast.engine.dry import client_values
from splitcast.engine.links import CountingLink
from splitcast.schemes.messages import Ledger
from splitcast.training.placement import Placement

REFERENCE_DRAWS = 1024
REFERENCE, TRAINING, EXPLORING, HELD_OUT, CHOICE, FUTURES = range(6)
"""Places in the policy's stream."""
_CLIENT_DRAWS = 2**20  # clients × cuts × draws that are timed at once


@dataclass(frozen=True)
class EpisodeCosts:
    """Everything a cut selection can be charged; leading dimensions ... are episodes, T rounds, N clients, C cuts."""

    met: Conditions
    """(..., T, N)"""
    cost: Array
    """w Γ(φ(v)) + l_t(v), (..., T, C)"""
    move_s: Array
    """Seconds of moving [from, to] before the round, (..., T, C, C); 0 throughout where moves are not charged."""
    format: NDArray[np.int64]
    """Position of the format that costs least at every cut (`cutting.formats`), (..., T, C)"""

    @property
    def gains(self) -> Array:
        """(..., T, N), linear"""
        return self.met.gains

    def __getitem__(self, episode: int) -> "EpisodeCosts":
        return EpisodeCosts(self.met[episode], self.cost[episode], self.move_s[episode], self.format[episode])


class CutCosts:
    """Placements to choose from, their costs and the channel of a scenario; counted by position 0..C-1 in arrays."""

    def __init__(self, scenario: Scenario, *, charge_moves: bool = True) -> None:
        self.placements = scenario.placements()
        if len(self.placements) < 2 < scenario.model.depth:
            raise SplitcastError(f"policy: {scenario.scheme.name} has no cut to choose; use fixed")
        net, model = scenario.config.network, scenario.model
        self.scenario, self.charge_moves = scenario, charge_moves
        self.cuts = tuple(placement.cut for placement in self.placements)
        self.formats = Formats.of(scenario, self.placements)
        self.legal: NDArray[np.bool_] = np.asarray(self.formats.legal.any(0))
        """(C,): allowed by privacy, modelled and measured, in one of the formats, and by the memory of clients"""
        self._fraction = np.array([client_fraction(model, placement) for placement in self.placements])
        self.weighted_gamma = net.gamma_weight * gamma_per_cut(net.gamma, self._fraction.tolist())

    @property
    def clients(self) -> int:
        """N"""
        return self.scenario.cell.clients

    @property
    def seed(self) -> int:
        """The seed of the configuration."""
        return self.scenario.config.train.seed

    @property
    def seconds_per_j(self) -> float:
        """What a joule of a client is worth."""
        return self.scenario.config.network.energy_weight

    def costs(self, gains: Array | Conditions) -> EpisodeCosts:
        """Costs of rounds 1..T with given gains or conditions (..., T, N)."""
        met = Conditions.of(gains)
        lead, count, formats = met.shape, len(self.cuts), len(self.formats.names)
        flat = met.flat()
        rounds = np.broadcast_to(np.arange(1, lead[-1] + 1), lead).ravel()
        seconds, down, up = (np.zeros((flat.state.size, *n)) for n in ((formats, count), (), ()))
        step = max(1, _CLIENT_DRAWS // (self.clients * count * formats))
        whole = self._whole_model()
        for these, stages in rhythms(self.formats.scenarios, self.placements, lead[-1]):
            who = np.flatnonzero(these[rounds - 1])
            for part in (who[at : at + step] for at in range(0, len(who), step)):
                timed = self._seconds([*stages, *whole], flat[part])
                seconds[part] = timed[:, : len(stages)].reshape(-1, formats, count)
                if whole:
                    down[part], up[part] = timed[:, len(stages)], timed[:, len(stages) + 1]
        diverged = np.array([self._diverged(t) for t in range(1, lead[-1] + 1)])[rounds - 1]  # [draw, from]
        share = self._fraction[None, :] - self._fraction[:, None]  # [from, to]
        move = down[:, None, None] * share.clip(min=0) + (up[:, None] * diverged)[..., None] * (-share).clip(min=0)
        least, which = self.formats.best(seconds)
        cost = round_cost(self.weighted_gamma, least, weight=1.0).reshape(*lead, count)
        move = move.reshape(*lead, count, count) * self.charge_moves
        return EpisodeCosts(met, cost, move, which.reshape(*lead, count))

    def _seconds(self, rounds: Sequence[Sequence[Stage]], met: Conditions) -> Array:
        return round_prices(rounds, self.scenario.cell, met, self.scenario.allocator)

    def _whole_model(self) -> list[list[Stage]]:
        """A move that broadcasts, and one that uploads, the whole model; others take their share of its seconds.

        Empty for a scheme whose moves cost nothing.
        """
        here, everyone = self.scenario, range(self.clients)
        values = client_values(here.model, Placement.whole(here.model.depth), here.optimiser)
        moves = []
        for down, up in ((values, 0), (0, values)):
            ledger = Ledger()
            here.scheme.moved(CountingLink(ledger), down, up, everyone)
            moves.append(here.stages_of(ledger.events, self.placements[0]))
        return moves if all(moves) else []

    def _diverged(self, t: int) -> list[bool]:
        """Whether halves differ after round t - 1, for each cut it ran at; equal ones are known to the server."""
        identical = self.scenario.config.split.client_update == "identical"
        schemes = [self.scenario.scheme.at(placement) for placement in self.placements]
        return [not (identical or scheme.equal_after(t - 1)) for scheme in schemes]

    def trace(self, rounds: int) -> EpisodeCosts:
        """The rounds that a training with this configuration meets, each with those who take part in it."""
        known, train = self.costs(self.scenario.conditions(range(1, rounds + 1))), self.scenario.config.train
        for t in range(1, rounds + 1) if train.participation < 1 or train.dropout or train.deadline_s else ():
            pairs = [(each, place) for each in self.formats.scenarios for place in self.placements]
            stages = [each.stages(place, t, taking_part(each, place, t).tolist()) for each, place in pairs]
            seconds = self._seconds(stages, known.met[t - 1 : t]).reshape(-1, *self.formats.legal.shape)
            least, known.format[t - 1] = (found[0] for found in self.formats.best(seconds))
            known.cost[t - 1] = round_cost(self.weighted_gamma, least, weight=1.0)
        return known

    def draw(self, rng: np.random.Generator, episodes: int, rounds: int, first: int | None = None) -> Conditions:
        """Other rounds in the same cell, (E, T, N); the channel's chain, if it has one, may be given for the first.

        Of a trace, pieces that start anywhere and wrap around; so too of a channel of the user's, which nobody can draw
        anew, but within the rounds of a training: it need not know any further ones.
        """
        met = self._draw_gains(rng, episodes, rounds, first)
        if (load := self.scenario.load) is None:
            return met
        speed = np.stack([load.process.value(one) for one in sampled(load.process, rng, episodes, rounds)], axis=1)
        return Conditions(met.gains, speed, met.state)

    def _draw_gains(self, rng: np.random.Generator, episodes: int, rounds: int, first: int | None) -> Conditions:
        source = self.scenario.channel
        if isinstance(source, Varying):
            return source.sample(rng, episodes, rounds, first)
        if isinstance(source, Rayleigh):
            return Conditions.of(fade(source.mean_gain, rng, (episodes, rounds)))
        gains = source.gains if isinstance(source, Trace) else self._own_gains
        start = rng.integers(len(gains), size=(episodes, 1))
        return Conditions.of(np.asarray(gains[(start + np.arange(rounds)) % len(gains)]))

    @cached_property
    def _own_gains(self) -> Array:
        return record(self.scenario.channel, self.scenario.config.train.rounds).gains

    @cached_property
    def reference(self) -> EpisodeCosts:
        """A sample of single draws, from which scales are taken."""
        return self.costs(self.draw(stream(self.seed, "policy", REFERENCE), 1, REFERENCE_DRAWS)[0])

    @property
    def penalty(self) -> float:
        """C: twice the largest cost of any cut and draw in the reference sample."""
        return 2 * float(self.reference.cost.max())

    def digest(self) -> str:
        """What the costs depend on, in a few letters."""
        config = self.scenario.config
        parts = [asdict(part) for part in (config.network, config.split, config.model, config.epsl, config.sfl_gb)]
        parts += [asdict(config.world), asdict(config.merge_sfl), asdict(config.cpsl)]
        parts[1].pop("cut")
        train = [config.train.batch, config.train.local_steps, config.train.optimizer, config.train.momentum, self.seed]
        if config.train.optimizer_state in ("local", "reset"):
            train.append(config.train.optimizer_state)
        if config.train.recompute:
            train.append("recompute")
        if config.policy.uplink_choices:
            train += [config.policy.uplink_choices, self.formats.price_s.tolist()]
        text = json.dumps([*parts, train, self.clients, config.data.dataset, self.charge_moves])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
