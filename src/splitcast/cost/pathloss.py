"""Path loss: the paper's, and the urban cells of 3GPP TR 38.901 (Table 7.4.1-1) with its line of sight (Table 7.4.2-1).

Distances in metres, horizontal (d2) unless said otherwise; carrier in GHz; loss in dB. The 3GPP models hold from 10 m
to 5 km and 0.5 to 100 GHz, here with a terminal at 1.5 m and the heights of the base station that the tables assume.
With d3 = √(d2² + (h_BS − 1.5)²) and the break point d_BP = 4 (h_BS − 1)(0.5) f/c:

    LOS   d2 ≤ d_BP:  A + S log10 d3 + 20 log10 f,        beyond:  A + 40 log10 d3 + 20 log10 f − K log10(d_BP² + Δh²)
    NLOS  max(LOS,  A' + S' log10 d3 + F' log10 f).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitcast.cost.cell import Array

LIGHT_M_PER_S = 3e8
TERMINAL_M = 1.5
NEAREST_M, FARTHEST_M = 10.0, 5000.0
"""Closer than this a 3GPP loss is that of 10 m."""


def path_gain(distance_m: Array | float) -> Array:
    """10^(−PL/10) with PL = 128.1 + 37.6 log10(d_km) dB: the paper's.

    >>> float((-10 * np.log10(path_gain(1000.0))).round(6))
    128.1
    """
    return np.asarray(10.0 ** (-(128.1 + 37.6 * np.log10(np.asarray(distance_m) / 1000)) / 10))


@dataclass(frozen=True)
class Urban:
    """A row pair (LOS, NLOS) of Table 7.4.1-1."""

    height_m: float
    """h_BS"""
    los: tuple[float, float, float]
    """A, S, K"""
    nlos: tuple[float, float, float]
    """A', S', F'"""
    shadowing_db: tuple[float, float]
    """σ of LOS and NLOS"""
    reach_m: float
    """Of the probability of a line of sight"""

    def los_db(self, d2: Array, ghz: float) -> Array:
        constant, slope, bend = self.los
        rise = self.height_m - TERMINAL_M
        d3 = np.hypot(d2, rise)
        break_m = 4 * (self.height_m - 1) * (TERMINAL_M - 1) * ghz * 1e9 / LIGHT_M_PER_S
        near = constant + slope * np.log10(d3) + 20 * np.log10(ghz)
        far = constant + 40 * np.log10(d3) + 20 * np.log10(ghz) - bend * np.log10(break_m**2 + rise**2)
        return np.asarray(np.where(d2 <= break_m, near, far))

    def nlos_db(self, d2: Array, ghz: float) -> Array:
        constant, slope, tone = self.nlos
        d3 = np.hypot(d2, self.height_m - TERMINAL_M)
        beyond = constant + slope * np.log10(d3) + tone * np.log10(ghz)
        return np.asarray(np.maximum(self.los_db(d2, ghz), beyond))

    def sight(self, d2: Array) -> Array:
        """P(line of sight) = 1 up to 18 m, then 18/d + e^(−d/reach) (1 − 18/d)."""
        near = 18 / np.maximum(d2, 18.0)
        return np.asarray(near + np.exp(-d2 / self.reach_m) * (1 - near))

    def gain(self, d2: Array, ghz: float, sight: Array, shadow: Array) -> Array:
        """Linear; ``sight`` uniform and ``shadow`` standard normal draws decide who sees the server, and how well."""
        d2 = np.maximum(d2, NEAREST_M)
        seen: NDArray[np.bool_] = sight < self.sight(d2)
        loss = np.where(seen, self.los_db(d2, ghz), self.nlos_db(d2, ghz))
        return np.asarray(10.0 ** (-(loss + np.where(seen, *self.shadowing_db) * shadow) / 10))


URBAN = {
    "uma": Urban(25.0, (28.0, 22.0, 9.0), (13.54, 39.08, 20.0), (4.0, 6.0), 63.0),
    "umi": Urban(10.0, (32.4, 21.0, 9.5), (22.4, 35.3, 21.3), (4.0, 7.82), 36.0),
}
"""Urban macro and urban micro (street canyon)."""
PATH_LOSSES = ("paper", *URBAN)
