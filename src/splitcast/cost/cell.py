"""A cell: one server, N clients, and the radio and computing power that each of them has."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from splitcast.base.config import NetworkConfig
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream

Array = NDArray[np.float64]

# Places in the channel's stream for what is drawn once; round t >= 1 draws from place (t,).
POSITIONS, SHADOWING, SPEEDS, POWERS = ((0, k) for k in range(1, 5))
LEAST, MOST = 1e-40, 1e40
"""Of everything in a cell: seconds reckoned from it are finite."""
KAPPA = 1e-28
"""Effective switched capacitance of a CPU, J s²: the default."""


@dataclass(frozen=True)
class Cell:
    """Everything but the channel, in SI units.

    >>> cell(NetworkConfig(), clients=2, seed=0).client_power_w.round(4).tolist()
    [0.3162, 0.3162]
    """

    bandwidth_hz: float
    """B"""
    noise_w_per_hz: float
    """N0"""
    server_power_w: float
    """P"""
    server_flops_per_s: float
    """f^s_max"""
    client_power_w: Array
    """p^n_max, (N,)"""
    client_flops_per_s: Array
    """f^n_max, (N,)"""
    kappa: float = KAPPA
    """κ: a cycle at f FLOP/s takes κ f² joules"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = np.asarray(getattr(self, field.name), dtype=np.float64)
            for index in np.argwhere(~(np.isfinite(value) & (value > 0)))[:1]:
                where = field.name + (f"[{index[0]}]" if value.ndim else "")
                raise SplitcastError(f"{where}: {value[tuple(index)]:g}; must be finite and > 0")
            for index in np.argwhere((value < LEAST) | (value > MOST))[:1]:
                where = field.name + (f"[{index[0]}]" if value.ndim else "")
                raise SplitcastError(f"{where}: {value[tuple(index)]:g}; must be from {LEAST:g} to {MOST:g}")

    @property
    def clients(self) -> int:
        """N"""
        return len(self.client_power_w)


def cell(config: NetworkConfig, clients: int, seed: int) -> Cell:
    """The cell a configuration describes; a range is drawn from ``seed``."""
    power_dbm = per_client(
        "client_power_dbm", config.client_power_dbm, clients, config.client_power_dbm_range, seed, POWERS
    )
    speed = per_client(
        "client_flops_per_s", config.client_flops_per_s, clients, config.client_flops_per_s_range, seed, SPEEDS
    )
    return Cell(
        bandwidth_hz=config.bandwidth_hz,
        noise_w_per_hz=float(watts(config.noise_dbm_per_hz)),
        server_power_w=float(watts(config.server_power_dbm)),
        server_flops_per_s=config.server_flops_per_s,
        client_power_w=watts(power_dbm),
        client_flops_per_s=speed,
        kappa=config.kappa,
    )


def watts(dbm: float | Array) -> Array:
    """10^((x − 30)/10)

    >>> float(watts(30.0))
    1.0
    """
    return np.asarray(10.0 ** ((np.asarray(dbm) - 30) / 10))


def per_client(
    field: str,
    numbers: Sequence[float],
    clients: int,
    bounds: Sequence[float] = (),
    seed: int = 0,
    place: tuple[int, int] = (0, 0),
) -> Array:
    """One number for all clients, one each, or one each drawn uniformly between two bounds; (N,).

    >>> per_client("distance_m", [5.0], 3).tolist()
    [5.0, 5.0, 5.0]
    """
    if bounds:
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            raise SplitcastError(f"{field}_range: {list(bounds)}; give the lowest and the highest value")
        low, high = bounds
        return low + (high - low) * stream(seed, "channel", *place).random(clients)
    if len(numbers) not in (1, clients):
        raise SplitcastError(f"{field}: {len(numbers)} numbers for {clients} clients; give 1 or {clients}")
    return np.broadcast_to(np.asarray(numbers, dtype=np.float64), (clients,)).copy()
