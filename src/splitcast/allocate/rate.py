"""Rate models: how many bits per second a client gets from its slice of the band."""

from dataclasses import dataclass

from numpy.typing import ArrayLike


@dataclass(frozen=True)
class ShannonRate:
    """r(B) = B log2(1 + s / (B N0)): a client sends with its full power s whatever its slice (uplink)."""

    received_power_w: ArrayLike
    """s = p·g, transmit power times channel gain, shape (..., N)."""
    noise_w_per_hz: ArrayLike
    """N0, a number or one per instance, shape (...)."""


@dataclass(frozen=True)
class LinearRate:
    """r(B) = e·B: power is spread evenly over the band, so every hertz is worth the same (unicast downlink).

    A server of power P that fills the band B reaches client n with e = log2(1 + P g / (B N0)).
    """

    bits_per_s_per_hz: ArrayLike
    """e, shape (..., N)."""


Rate = ShannonRate | LinearRate
