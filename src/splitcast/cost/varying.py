"""A channel put together from processes, and client speeds that vary with a background load.

Gain of client n in round t, linear and the same up and down:

    g_t^n = path gain(d_t^n) · 10^(−X^n / 10) · |h_t^n|² · 10^(−blockage / 10 if blocked),

d from `Waypoint`, h from `GaussMarkov` or `Clarke`, blockage from `OnOff`. Round t is a function of (seed, t):
processes are followed from the first round on, each step with the generator of its round.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from splitcast.base.config import NetworkConfig, WorldConfig
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.seeds import stream
from splitcast.cost.cell import SHADOWING, Array
from splitcast.cost.conditions import Conditions
from splitcast.cost.pathloss import FARTHEST_M, PATH_LOSSES, URBAN, path_gain
from splitcast.cost.processes import Clarke, GaussMarkov, NoFading, OnOff, Process, Rng, State, Waypoint, bessel_j0

FADINGS = ("block", "gauss-markov", "jakes", "none")
WHOSE = ("none", "common", "each")
WALK, FADING, BLOCKAGE, LOAD = range(1, 5)
"""Places in a round's part of the channel's stream."""


@dataclass(frozen=True)
class Course:
    """A process over the rounds of a training."""

    process: Process
    seed: int
    place: int
    _states: list[State] = field(default_factory=list)

    def state(self, round_: int) -> State:
        """In a round, counted from 1."""
        while len(self._states) < round_:
            rng = stream(self.seed, "channel", len(self._states) + 1, self.place)
            last = self._states[-1] if self._states else None
            self._states.append(self.process.start(rng, ()) if last is None else self.process.step(last, rng))
        return self._states[round_ - 1]

    def at(self, round_: int) -> Array:
        """The value of every client, (N,)."""
        return self.process.value(self.state(round_))


def sampled(process: Process, rng: Rng, episodes: int, rounds: int, first: State | None = None) -> list[State]:
    """States of other episodes, a list over rounds; the first may be given."""
    start = process.start(rng, (episodes,)) if first is None else np.broadcast_to(first, (episodes, *first.shape))
    states = [start]
    for _ in range(rounds - 1):
        states.append(process.step(states[-1], rng))
    return states


@dataclass(frozen=True)
class Varying:
    """Path loss times fading times blockage."""

    walk: Course
    mean_gain: Callable[[Array], Array]
    """of distances (..., N) in metres"""
    fading: Course
    blockage: Course | None

    @property
    def distance_m(self) -> Array | None:
        """Distances (N,); None if they change."""
        walk = self.walk.process
        assert isinstance(walk, Waypoint)
        return None if walk.stride_m else walk.distance_m

    @property
    def chain(self) -> OnOff | None:
        """The blockage, a Markov chain whose state is seen."""
        process = self.blockage.process if self.blockage else None
        assert process is None or isinstance(process, OnOff)
        return process

    def at(self, round_: int) -> Array:
        """Linear gains (N,) in a round, counted from 1."""
        gain = self.mean_gain(self.walk.at(round_)) * self.fading.at(round_)
        return gain if self.blockage is None else gain * self.blockage.at(round_)

    def state(self, round_: int) -> int:
        """The number of the chain's state in a round."""
        return 0 if self.blockage is None or self.chain is None else int(self.chain.code(self.blockage.state(round_)))

    def sample(self, rng: Rng, episodes: int, rounds: int, first: int | None = None) -> Conditions:
        """Other rounds in the same cell, (E, T, N); the chain may be given for the first of them."""
        gains = np.ones((rounds, episodes, 1))
        state = np.zeros((rounds, episodes), dtype=np.int64)
        chain = self.chain
        if chain is not None:
            blocked = sampled(chain, rng, episodes, rounds, None if first is None else chain.decode(first))
            gains = gains * np.stack([chain.value(one) for one in blocked])
            state = np.stack([chain.code(one) for one in blocked])
        for course, meaning in ((self.walk, self.mean_gain), (self.fading, lambda faded: faded)):
            states = sampled(course.process, rng, episodes, rounds)
            gains = gains * np.stack([meaning(course.process.value(one)) for one in states])
        gains = np.ascontiguousarray(gains.swapaxes(0, 1))
        return Conditions(gains, np.ones_like(gains), state.T)


def varies(world: WorldConfig) -> bool:
    """Whether a configuration asks for more than block fading around the paper's path loss."""
    still = world.path_loss == "paper" and not world.walk_m_per_s
    return not (still and world.fading == "block" and world.blockage == "none")


def varying(network: NetworkConfig, world: WorldConfig, distance_m: Array, seed: int) -> Varying:
    """The channel that the section [world] describes, with clients at these distances unless they walk."""
    clients = len(distance_m)
    rng = stream(seed, "channel", *SHADOWING)
    shadow, sight = rng.standard_normal(clients), rng.random(clients)
    doppler = world.doppler_hz * world.interval_s
    fadings: dict[str, Callable[[], Process]] = {
        "block": lambda: GaussMarkov(clients, 0.0),
        "gauss-markov": lambda: GaussMarkov(clients, bessel_j0(2 * np.pi * doppler)),
        "jakes": lambda: Clarke(clients, doppler),
        "none": lambda: NoFading(clients),
    }
    walk = Waypoint(distance_m, network.min_distance_m, network.radius_m, world.walk_m_per_s * world.interval_s)
    if walk.stride_m and walk.inner_m > walk.outer_m:
        raise SplitcastError(f"min_distance_m: {walk.inner_m:g} is beyond radius_m, {walk.outer_m:g}")
    if walk.stride_m and network.distance_m:
        raise SplitcastError(
            "distance_m: given, but with walk_m_per_s clients are where they walk; leave one of them out"
        )
    if world.path_loss in URBAN:
        if network.shadowing_db:
            raise SplitcastError(
                f"shadowing_db: {network.shadowing_db:g}, but {world.path_loss} has shadows of its own"
            )
        if (farthest := max(walk.outer_m if walk.stride_m else 0.0, float(distance_m.max()))) > FARTHEST_M:
            raise SplitcastError(
                f"distance_m: {farthest:g}, but {world.path_loss} holds up to {FARTHEST_M:g} m; "
                "give distance_m, or a smaller radius_m"
            )

    def mean_gain(distance: Array) -> Array:
        if one_of("path_loss", world.path_loss, PATH_LOSSES) == "paper":
            return path_gain(distance) * 10.0 ** (-network.shadowing_db * shadow / 10)
        return URBAN[world.path_loss].gain(distance, world.carrier_ghz, sight, shadow)

    mean_gain(distance_m)
    blockage = on_off("blockage", world.blockage, clients, world.clear_rounds, world.blocked_rounds, -world.blockage_db)
    return Varying(
        Course(walk, seed, WALK),
        mean_gain,
        Course(fadings[one_of("fading", world.fading, FADINGS)](), seed, FADING),
        Course(blockage, seed, BLOCKAGE) if blockage else None,
    )


def on_off(field: str, whose: str, clients: int, on_rounds: float, off_rounds: float, off_db: float) -> OnOff | None:
    """A chain of all clients together or of each; None without."""
    if one_of(field, whose, WHOSE) == "none":
        return None
    return OnOff(clients, whose == "common", on_rounds, off_rounds, 10.0 ** (off_db / 10))


def background_load(world: WorldConfig, clients: int, seed: int) -> Course | None:
    """Shares of their speed that clients have left: 1, or less while they are busy with something else."""
    process = on_off("load", world.load, clients, world.idle_rounds, world.busy_rounds, 10 * np.log10(world.busy_speed))
    return Course(process, seed, LOAD) if process else None
