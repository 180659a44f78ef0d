"""The channel between the clients and the server: path loss, shadowing, and fading that changes every round.

Gain of client n in round t, linear and the same up and down:
    g_t^n = 10^(−(PL(d^n) + X^n) / 10) · |h_t^n|²,      PL(d) = 128.1 + 37.6 log10(d / 1 km)  dB,
with Rayleigh block fading |h|² ~ Exp(1), constant within a round, and optional log-normal shadowing
X^n ~ N(0, σ²) dB, drawn once. The paper gives no distances; here clients are spread evenly over a disc of 500 m with
none closer than 10 m unless configured otherwise. The section [world] asks for more (`cost/varying.py`). Round t is a
pure function of (seed, t), so that a resumed run meets the channel it would have met.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from splitcast.base.config import NetworkConfig, WorldConfig
from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.base.seeds import stream
from splitcast.cost.cell import POSITIONS, SHADOWING, Array, per_client
from splitcast.cost.pathloss import path_gain
from splitcast.cost.trace import Trace
from splitcast.cost.varying import varies, varying

LEAST_GAIN, MOST_GAIN = 1e-200, 1e200
"""Of a mean gain, or of one that is not faded: seconds reckoned from it are finite."""


class Channel(Protocol):
    """Where gains come from: the model, a trace, or something of the user's."""

    @property
    def distance_m(self) -> Array | None:
        """Distances (N,), if known."""
        ...

    def at(self, round_: int) -> Array:
        """Linear gains (N,) in a round, counted from 1."""
        ...


@dataclass(frozen=True)
class Rayleigh:
    """Block fading around each client's mean gain."""

    mean_gain: Array
    """(N,)"""
    seed: int
    distance_m: Array | None = None

    def at(self, round_: int) -> Array:
        return fade(self.mean_gain, stream(self.seed, "channel", round_))


def fade(mean_gain: Array, rng: np.random.Generator, shape: tuple[int, ...] = ()) -> Array:
    """Independent draws of g = mean gain · |h|², |h|² ~ Exp(1); (*shape, N)."""
    return mean_gain * rng.exponential(size=(*shape, len(mean_gain)))


def place(config: NetworkConfig, clients: int, seed: int) -> Array:
    """Distances (N,) in metres: given, or evenly over the ring r0 ≤ d ≤ R: d = √(r0² + u (R² − r0²)), u ~ U(0, 1)."""
    if config.distance_m:
        return per_client("distance_m", config.distance_m, clients)
    inner, outer = config.min_distance_m, config.radius_m
    if inner > outer:
        raise SplitcastError(f"min_distance_m: {inner:g} is beyond radius_m, {outer:g}")
    u = stream(seed, "channel", *POSITIONS).random(clients)
    return np.asarray(np.sqrt(inner**2 + u * (outer**2 - inner**2)))


def rayleigh(config: NetworkConfig, clients: int, seed: int) -> Rayleigh:
    """The model above."""
    distance = place(config, clients, seed)
    shadow = config.shadowing_db * stream(seed, "channel", *SHADOWING).standard_normal(clients)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):  # what comes of it is checked
        mean = path_gain(distance) * 10.0 ** (-shadow / 10)
    return Rayleigh(checked(mean, clients, "mean gain (of distance_m and shadowing_db)"), seed, distance)


Maker = Callable[[NetworkConfig, int, int], Channel]
CHANNELS = Registry[Maker]("channel", takes=3, entries={"rayleigh": rayleigh})
"""Functions of (network configuration, number of clients, seed)."""


@dataclass(frozen=True)
class Checked:
    """A channel of the user's, whose every answer is checked."""

    source: Any
    clients: int
    name: str

    @property
    def distance_m(self) -> Array | None:
        known = getattr(self.source, "distance_m", None)
        return None if known is None else checked(known, self.clients, f"distance_m of {self.name}")

    def at(self, round_: int) -> Array:
        return checked(self.source.at(round_), self.clients, f"gain of {self.name} in round {round_}")


def checked(values: Any, clients: int, what: str) -> Array:
    """One finite number > 0 per client, (N,)."""
    try:
        given = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise SplitcastError(f"channel: {what} is {type(values).__name__}; must be an array of numbers") from None
    if given.shape != (clients,):
        raise SplitcastError(f"channel: {what} has shape {given.shape}; must be ({clients},), one per client")
    for n in np.flatnonzero(~(np.isfinite(given) & (given > 0)))[:1]:
        raise SplitcastError(f"channel: {what} is {given[n]:g} for client {n}; must be finite and > 0")
    for n in np.flatnonzero((given < LEAST_GAIN) | (given > MOST_GAIN))[:1]:
        raise SplitcastError(
            f"channel: {what} is {given[n]:g} for client {n}; must be from {LEAST_GAIN:g} to {MOST_GAIN:g}"
        )
    return given


def channel(config: NetworkConfig, clients: int, seed: int, world: WorldConfig | None = None) -> Channel:
    """The channel a configuration describes: its trace if it names one, else what its `channel` makes.

    The built-in one is `Rayleigh`, or `Varying` where the section [world] says how the cell changes.
    """
    world = world or WorldConfig()
    if varies(world) and (config.trace or config.channel != "rayleigh"):
        other = "a trace" if config.trace else config.channel
        raise SplitcastError(f"channel: {other} says how gains change; leave the fading options of [world] out")
    if config.trace:
        return _ranged(Trace.load(Path(config.trace), clients))
    if varies(world):
        rich = varying(config, world, place(config, clients, seed), seed)
        checked(rich.at(1), clients, "gain (of distance_m, path_loss and blockage_db)")
        return rich
    made = CHANNELS.find(config.channel)(config, clients, seed)
    if isinstance(made, Rayleigh):
        checked(made.mean_gain, clients, f"mean gain of {config.channel}")
        return made
    if isinstance(made, Trace):
        checked(made.gains[0], clients, f"gain of {config.channel} in round 1")
        return _ranged(made)
    if not callable(getattr(made, "at", None)):
        raise SplitcastError(f"channel: {config.channel} made {type(made).__name__}; it must have at(round) -> gains")
    return Checked(made, clients, config.channel)


def _ranged(trace: Trace) -> Trace:
    for t, n in np.argwhere((trace.gains < LEAST_GAIN) | (trace.gains > MOST_GAIN))[:1]:
        raise SplitcastError(
            f"trace: gain {trace.gains[t, n]:g} in round {t + 1}, client {n}; "
            f"must be from {LEAST_GAIN:g} to {MOST_GAIN:g}"
        )
    return trace


def record(source: Channel, rounds: int) -> Trace:
    """The first rounds of a channel as a trace, to keep or to replay."""
    return Trace(np.stack([source.at(t) for t in range(1, rounds + 1)]), source.distance_m)
