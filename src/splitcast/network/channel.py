"""The channel between the clients and the server: path loss, shadowing, and fading that changes every round.

Gain of client n in round t, linear and the same up and down:
    g_t^n = 10^(−(PL(d^n) + X^n) / 10) · |h_t^n|²,      PL(d) = 128.1 + 37.6 log10(d / 1 km)  dB,
with Rayleigh block fading |h|² ~ Exp(1), constant within a round, and optional log-normal shadowing
X^n ~ N(0, σ²) dB, drawn once. The paper gives no distances; here clients are spread evenly over a disc of 500 m with
none closer than 10 m unless configured otherwise. Round t is a pure function of (seed, t), so that a resumed run
meets the channel it would have met.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from splitcast.config import NetworkConfig
from splitcast.errors import SplitcastError
from splitcast.network.cell import POSITIONS, SHADOWING, Array, per_client
from splitcast.network.trace import Trace
from splitcast.seeds import stream


class Channel(Protocol):
    """Where gains come from: the model, or a trace."""

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


def path_gain(distance_m: Array | float) -> Array:
    """10^(−PL/10) with PL = 128.1 + 37.6 log10(d_km) dB.

    >>> float((-10 * np.log10(path_gain(1000.0))).round(6))
    128.1
    """
    return np.asarray(10.0 ** (-(128.1 + 37.6 * np.log10(np.asarray(distance_m) / 1000)) / 10))


def place(config: NetworkConfig, clients: int, seed: int) -> Array:
    """Distances (N,) in metres: given, or evenly over the ring r0 ≤ d ≤ R: d = √(r0² + u (R² − r0²)), u ~ U(0, 1)."""
    if config.distance_m:
        return per_client("distance_m", config.distance_m, clients)
    inner, outer = config.min_distance_m, config.radius_m
    if inner > outer:
        raise SplitcastError(f"min_distance_m: {inner:g} is beyond radius_m, {outer:g}")
    u = stream(seed, "channel", *POSITIONS).random(clients)
    return np.asarray(np.sqrt(inner**2 + u * (outer**2 - inner**2)))


def channel(config: NetworkConfig, clients: int, seed: int) -> Channel:
    """The channel a configuration describes: its trace if it names one, else the model above."""
    if config.trace:
        return Trace.load(Path(config.trace), clients)
    distance = place(config, clients, seed)
    shadow = config.shadowing_db * stream(seed, "channel", *SHADOWING).standard_normal(clients)
    return Rayleigh(path_gain(distance) * 10.0 ** (-shadow / 10), seed, distance)


def record(source: Channel, rounds: int) -> Trace:
    """The first rounds of a channel as a trace, to keep or to replay."""
    return Trace(np.stack([source.at(t) for t in range(1, rounds + 1)]), source.distance_m)
