"""What changes from round to round, as Markov processes over any number of clients and episodes at once.

A process has a state, an array whose leading dimensions are those asked for. Its first state is drawn from its
stationary law, each next one from the last; a round of a training draws from the generator of that round alone.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array

State = NDArray[Any]
Rng = np.random.Generator
PATHS = 32
"""Plane waves of Clarke's model."""
MIXED = 100.0
"""Radii after which it does not matter where one was."""


class Process(Protocol):
    """Something that has a value per client, (..., N)."""

    def start(self, rng: Rng, lead: tuple[int, ...]) -> State:
        """The state in a first round."""
        ...

    def step(self, state: State, rng: Rng) -> State:
        """The state one round later."""
        ...

    def value(self, state: State) -> Array:
        """What it means for every client, (..., N)."""
        ...


def bessel_j0(x: float) -> float:
    """J0(x) = mean of cos(x sin θ) over θ.

    >>> round(bessel_j0(1.0), 10), abs(bessel_j0(2.404825557695773)) < 1e-12
    (0.7651976866, True)
    """
    angles = 2 * np.pi * np.arange(64 + 2 * int(abs(x))) / (64 + 2 * int(abs(x)))
    return float(np.cos(x * np.sin(angles)).mean())


@dataclass(frozen=True)
class GaussMarkov:
    """Rayleigh fading with memory: h_t = r h_{t−1} + √(1 − r²) w_t, w ~ CN(0, 1); the value is |h|² ~ Exp(1).

    E[h_t h*_{t−k}] = r^k and corr(|h_t|², |h_{t−k}|²) = r^(2k). First-order fit of Jakes' spectrum: r = J0(2π f_D T).
    """

    clients: int
    correlation: float
    """r, 0 is a new channel every round"""

    def start(self, rng: Rng, lead: tuple[int, ...]) -> State:
        return _complex_normal(rng, (*lead, self.clients))

    def step(self, state: State, rng: Rng) -> State:
        fresh = _complex_normal(rng, state.shape)
        return np.asarray(self.correlation * state + np.sqrt(1 - self.correlation**2) * fresh)

    def value(self, state: State) -> Array:
        return np.asarray(np.abs(state) ** 2)


def _complex_normal(rng: Rng, shape: tuple[int, ...]) -> State:
    real, imaginary = rng.standard_normal((2, *shape)) * np.sqrt(0.5)
    return np.asarray(real + 1j * imaginary)


@dataclass(frozen=True)
class Clarke:
    """Fading of a moving receiver (Clarke 1968, Jakes 1974): h_t = √(1/M) Σ_m exp(i (φ_m + 2π f_D T t cos α_m)).

    Angles and phases are uniform, so E[h_t h*_{t−k}] = J0(2π f_D T k). The state holds the M phases and their steps.
    """

    clients: int
    doppler: float
    """f_D T, cycles per round"""

    def start(self, rng: Rng, lead: tuple[int, ...]) -> State:
        angle, phase = 2 * np.pi * rng.random((2, *lead, self.clients, PATHS))
        return np.stack([phase, 2 * np.pi * self.doppler * np.cos(angle)], axis=-1)

    def step(self, state: State, rng: Rng) -> State:
        phase, turn = np.moveaxis(state, -1, 0)
        return np.stack([phase + turn, turn], axis=-1)

    def value(self, state: State) -> Array:
        return np.asarray(np.abs(np.exp(1j * state[..., 0]).sum(-1)) ** 2 / PATHS)


@dataclass(frozen=True)
class NoFading:
    """|h|² = 1."""

    clients: int

    def start(self, rng: Rng, lead: tuple[int, ...]) -> State:
        return np.ones((*lead, self.clients))

    def step(self, state: State, rng: Rng) -> State:
        return state

    def value(self, state: State) -> Array:
        return np.asarray(state, dtype=np.float64)


@dataclass(frozen=True)
class OnOff:
    """Two states with geometric holding times, of all clients together or of each: the Gilbert–Elliott chain.

    Mean holding times of 1/p rounds make a share off/(on + off) of rounds off in the long run.
    """

    clients: int
    common: bool
    on_rounds: float
    """Mean rounds that value 1 lasts"""
    off_rounds: float
    """Mean rounds that value ``off`` lasts"""
    off: float

    @property
    def chains(self) -> int:
        return 1 if self.common else self.clients

    def start(self, rng: Rng, lead: tuple[int, ...]) -> State:
        share = self.off_rounds / (self.on_rounds + self.off_rounds)
        return np.asarray(rng.random((*lead, self.chains)) < share)

    def step(self, state: State, rng: Rng) -> State:
        leave = np.where(state, 1 / self.off_rounds, 1 / self.on_rounds)
        return np.asarray(state ^ (rng.random(state.shape) < leave))

    def value(self, state: State) -> Array:
        each = np.where(state, self.off, 1.0)
        return np.asarray(np.broadcast_to(each, (*state.shape[:-1], self.clients)))

    def code(self, state: State) -> NDArray[np.int64]:
        """The state as a number: bit n is chain n."""
        return np.asarray(state @ (1 << np.arange(self.chains)), dtype=np.int64)

    def decode(self, code: int) -> State:
        return np.asarray((code >> np.arange(self.chains)) & 1, dtype=np.bool_)

    def transitions(self) -> Array:
        """P[from, to] over the 2^chains states."""
        one = np.array([[1 - 1 / self.on_rounds, 1 / self.on_rounds], [1 / self.off_rounds, 1 - 1 / self.off_rounds]])
        matrix = np.ones((1, 1))
        for _ in range(self.chains):
            matrix = np.kron(one, matrix)  # the last chain is the highest bit
        return matrix


@dataclass(frozen=True)
class Waypoint:
    """Random waypoint (Johnson and Maltz 1996): walk to a point of the disc, then at once on to another one.

    Points are uniform over the ring r0 ≤ d ≤ R at any angle; the value is the distance from the server, at least r0.
    The state is (x, y) and the point aimed at. In the long run one is anywhere, evenly, on a way from A to B whose
    density is that of two points times |AB| (Navidi and Camp, IEEE Trans. Mobile Computing 2004); so it begins. Who
    does not move stays at the distances given.
    """

    distance_m: Array
    """(N,): where those start who do not move"""
    inner_m: float
    outer_m: float
    stride_m: float
    """Metres walked between two rounds"""

    def start(self, rng: Rng, lead: tuple[int, ...]) -> State:
        shape = (*lead, len(self.distance_m))
        if not self.stride_m:
            there = np.broadcast_to(self.distance_m, shape)
            return np.stack([there, *np.zeros((3, *shape))], axis=-1)
        begun, aim = self._points(rng, shape), self._points(rng, shape)
        short = np.ones(shape, dtype=np.bool_)
        while short.any():  # ways are kept with a chance of |AB| / 2R
            count = int(short.sum())
            begun[short], aim[short] = self._points(rng, (count,)), self._points(rng, (count,))
            far = np.linalg.norm(aim - begun, axis=-1)
            short &= 2 * self.outer_m * rng.random(shape) > far
        return np.concatenate([begun + rng.random((*shape, 1)) * (aim - begun), aim], axis=-1)

    def step(self, state: State, rng: Rng) -> State:
        if not self.stride_m:
            return state
        if self.stride_m > MIXED * self.outer_m:
            return self.start(rng, state.shape[:-2])
        here, aim = np.split(state, 2, axis=-1)
        left = np.full((*state.shape[:-1], 1), self.stride_m)
        while (left > 0).any():
            way = aim - here
            far = np.linalg.norm(way, axis=-1, keepdims=True)
            arrived, walked = far <= left, np.minimum(far, left)
            here = np.where(arrived, aim, here + way * (walked / np.maximum(far, 1e-9)))
            aim = np.where(arrived, self._points(rng, state.shape[:-1]), aim)
            left = left - walked
        return np.concatenate([here, aim], axis=-1)

    def _points(self, rng: Rng, shape: tuple[int, ...]) -> Array:
        radius = np.sqrt(self.inner_m**2 + rng.random(shape) * (self.outer_m**2 - self.inner_m**2))
        angle = 2 * np.pi * rng.random(shape)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)

    def value(self, state: State) -> Array:
        distance = np.hypot(state[..., 0], state[..., 1])
        return np.asarray(np.maximum(distance, self.inner_m) if self.stride_m else distance)
