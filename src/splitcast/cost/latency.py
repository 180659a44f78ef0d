"""How long a stage and a round take, and who held them up.

Per client n, in the paper's names: l^F computing on the client before it sends, l^U uplink, l^s server, l^D
downlink, l^B backward on the client. A stage lasts max_n of their sum; a round is the sum of its stages. Shapes:
leading dimensions ... are channel draws, K the clients of the stage.

A client spends κ f² joules on a cycle (CMOS; the paper counts one FLOP as one cycle) and its transmit power as long as
it sends: E^n = κ f² (γ_F + γ_B) D + p l^U.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splitcast.cost.cell import Array, Cell
from splitcast.cost.stages import Stage

PARTS = ("compute", "uplink", "server", "downlink", "backward")
_TIED = 1e-6  # clients that finish within this of each other, relatively, finish together


def uplink_rate(bandwidth_hz: Array, power_w: Array, gain: Array, noise_w_per_hz: float) -> Array:
    """r^U = B_n log2(1 + p g / (B_n N0)) in bit/s."""
    return np.asarray(bandwidth_hz * np.log1p(power_w * gain / (bandwidth_hz * noise_w_per_hz)) / np.log(2))


def spectral_efficiency(cell: Cell, gain: ArrayLike) -> Array:
    """e = log2(1 + P g / (B N0)) in bit/s/Hz: of the server, whose power is spread evenly over the band.

    A broadcast fills the band, r^D = B e; a unicast gets a slice of it, r = B_n e.
    """
    snr = cell.server_power_w * np.asarray(gain) / (cell.bandwidth_hz * cell.noise_w_per_hz)
    return np.asarray(np.log1p(snr) / np.log(2))


@dataclass(frozen=True)
class StageTime:
    """Seconds of every client in one stage, (..., K) each."""

    stage: Stage
    compute_s: Array
    uplink_s: Array
    server_s: Array
    downlink_s: Array
    backward_s: Array
    bandwidth_hz: Array
    """Each client's share of the uplink or of a unicast downlink; 0 where nothing is shared."""
    server_flops_per_s: Array
    """Each client's share of the server; 0 where nothing is shared."""
    weight: Array
    """What a second saved by this client would save, in seconds; sums to 1."""
    compute_j: Array
    """Joules of computing, before it sends and after it received."""
    air_j: Array
    """Joules on the air."""
    bound_s: Array | None = None
    """Where joules have prices, no choice has less seconds + Σ price · joules than this, (...)."""

    def part(self, name: str) -> Array:
        """Seconds of one of `PARTS`."""
        seconds: Array = getattr(self, f"{name}_s")
        return seconds

    @cached_property
    def client_s(self) -> Array:
        """When each client is done, (..., K)."""
        return self.compute_s + self.uplink_s + self.server_s + self.downlink_s + self.backward_s

    @cached_property
    def seconds(self) -> Array:
        """max_n, (...)."""
        return np.asarray(self.client_s.max(-1))

    @cached_property
    def slowest(self) -> NDArray[np.int64]:
        """Position in `stage.clients` of the client that holds the stage up, (...).

        An optimal allocation lets all clients finish together; then it is the one whose time weighs most.
        """
        last = self.client_s >= self.seconds[..., None] * (1 - _TIED)
        return np.asarray(np.where(last, self.weight, -1.0).argmax(-1))

    @cached_property
    def slowest_parts_s(self) -> Array:
        """The `PARTS` of the slowest client, (..., 5)."""
        parts = np.stack([self.part(name) for name in PARTS], axis=-1)  # (..., K, 5)
        return np.asarray(np.take_along_axis(parts, self.slowest[..., None, None], axis=-2)[..., 0, :])


@dataclass(frozen=True)
class RoundTime:
    """The stages of a round, in order; a repeated stage is there as often as it runs."""

    stages: Sequence[StageTime]

    @cached_property
    def seconds(self) -> Array:
        """l_t, (...)."""
        return np.asarray(np.sum([stage.seconds for stage in self.stages], axis=0))

    @cached_property
    def parts_s(self) -> Array:
        """Where the time goes: the `PARTS` of each stage's slowest client, (..., 5); they sum to `seconds`."""
        return np.asarray(np.sum([stage.slowest_parts_s for stage in self.stages], axis=0))

    def spent_j(self, clients: int) -> tuple[Array, Array]:
        """Joules of each of all N clients for computing and on the air, (..., N) each."""
        shape = (*self.stages[0].compute_j.shape[:-1], clients)
        compute, air = np.zeros(shape), np.zeros(shape)
        for stage in self.stages:
            who = list(stage.stage.clients)
            compute[..., who] += stage.compute_j
            air[..., who] += stage.air_j
        return compute, air

    @cached_property
    def joules(self) -> Array:
        """Of all clients together, (...)."""
        return np.asarray(np.sum([(stage.compute_j + stage.air_j).sum(-1) for stage in self.stages], axis=0))

    def culprit(self, draw: tuple[int, ...] = ()) -> tuple[int, str]:
        """Which client held the round up longest under one channel draw, and with which of `PARTS`."""
        blame: dict[tuple[int, str], float] = defaultdict(float)
        for stage in self.stages:
            client = stage.stage.clients[stage.slowest[draw]]
            for part, seconds in zip(PARTS, stage.slowest_parts_s[draw].tolist(), strict=True):
                blame[client, part] += seconds
        return max(blame, key=lambda key: blame[key])
