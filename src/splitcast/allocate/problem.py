"""Problem P2.1 as the solvers see it: checked, broadcast and freed of units."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from splitcast.allocate.rate import Rate, ShannonRate
from splitcast.allocate.shares import Array
from splitcast.base.errors import SplitcastError


@dataclass(frozen=True)
class Problem:
    """Instances in shares of the totals, clients first (N, I); `splitcast.allocate.shares` explains a, x, y, snr."""

    shape: tuple[int, ...]
    a: Array
    x: Array
    y: Array
    snr: Array | None
    total_hz: Array
    total_flops: Array

    @staticmethod
    def of(
        fixed_s: ArrayLike,
        uplink_bits: ArrayLike,
        server_flops: ArrayLike,
        rate: Rate,
        bandwidth_hz: ArrayLike,
        cpu_flops: ArrayLike,
    ) -> "Problem":
        clients = {
            "fixed_s": checked("fixed_s", fixed_s, zero=True),
            "uplink_bits": checked("uplink_bits", uplink_bits, zero=True),
            "server_flops": checked("server_flops", server_flops, zero=True),
        }
        totals = {
            "bandwidth_hz": checked("bandwidth_hz", bandwidth_hz),
            "cpu_flops": checked("cpu_flops", cpu_flops),
        }
        if isinstance(rate, ShannonRate):
            clients["received_power_w"] = checked("received_power_w", rate.received_power_w)
            totals["noise_w_per_hz"] = checked("noise_w_per_hz", rate.noise_w_per_hz)
        else:
            clients["bits_per_s_per_hz"] = checked("bits_per_s_per_hz", rate.bits_per_s_per_hz)
        shape = _common_shape(clients, totals)

        a, bits, flops, strength = (
            np.ascontiguousarray(np.broadcast_to(v, shape).reshape(-1, shape[-1]).T) for v in clients.values()
        )
        hz, cpu, *noise = (np.broadcast_to(v, shape[:-1]).ravel() for v in totals.values())
        if isinstance(rate, ShannonRate):
            x, snr = bits * (np.log(2) / hz), strength / (hz * noise[0])
        else:
            x, snr = bits / (strength * hz), None
        return Problem(shape, a, x, flops / cpu, snr, hz, cpu)


def _common_shape(clients: dict[str, Array], totals: dict[str, Array]) -> tuple[int, ...]:
    shapes = [v.shape for v in clients.values()] + [(*v.shape, 1) for v in totals.values()]
    named = ", ".join(f"{name} {v.shape}" for name, v in (clients | totals).items())
    try:
        shape = np.broadcast_shapes((1,), *shapes)
    except ValueError:
        raise SplitcastError(f"{named}: shapes do not fit; must broadcast to (..., N) and (...)") from None
    if 0 in shape:
        raise SplitcastError(f"{named}: empty; must have at least one client and one instance")
    return shape


def checked(field: str, value: ArrayLike, zero: bool = False) -> Array:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise SplitcastError(f"{field}: {value!r} is not a number or an array of numbers") from None
    bad = ~(np.isfinite(array) & ((array >= 0) if zero else (array > 0)))
    if bad.any():
        index = np.argwhere(bad)[0].tolist()
        where = f"{field}{index}" if index else field
        raise SplitcastError(f"{where}: {array[tuple(index)]:g}; must be finite and {'>=' if zero else '>'} 0")
    return array
