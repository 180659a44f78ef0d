"""What choices cost where a joule has a price of W seconds.

A client that pays lambda for a second, alpha for the band and beta for the server spends at least

    h = lambda a + min_tau (lambda tau + k / tau^2) + min_tb (lambda t + alpha b + n t b (e^(x / t b) - 1))
        + 2 sqrt(lambda y beta),

however long it takes. The joules of tau >= tau0 seconds of computing are worth k / tau^2 = W E0 (tau0 / tau)^2, and
those on the air the last term of the second minimum, at full power at most. `allocate.responses` has these minima; here
they are those of all choices at once, (..., N, V).
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from splitcast.allocate.responses import Loads, Response, marginal, respond
from splitcast.cost.cell import Array
from splitcast.cutting.menu import Block, Menu, saving

_LEAST = 1e-12
"""of a price, relatively: at none at all, there is no best choice"""


class Spent(NamedTuple):
    """What choices cost, and what of it is for what."""

    cost: Array
    """h"""
    band: Array
    """alpha b"""
    server: Array
    """beta f"""
    joules: Array
    """W times the energy"""
    answer: Response


def loads_of(menu: Menu, block: Block) -> Loads:
    """In shares of the whole band and the whole server, (S, N, V)."""
    cell, price, strength = menu.cell, menu.seconds_per_j, block.strength[:, :, None]
    x, snr, n = block.bits / (strength * cell.bandwidth_hz), None, np.zeros_like(strength)
    if block.sharing == "up":
        x, snr = block.bits * (np.log(2) / cell.bandwidth_hz), strength / (cell.bandwidth_hz * cell.noise_w_per_hz)
        n = price * cell.client_power_w[:, None] / snr
    k, y = price * block.busy_j * block.busy_s**2, block.flops / cell.server_flops_per_s
    return Loads(np.maximum(block.fixed_s - block.busy_s, 0.0), block.busy_s, k, x, y, snr, n)


def spent(loads: Loads, lam: Array, alpha: Array, beta: Array) -> Spent:
    """h at positive prices that broadcast to the loads."""
    got = respond(loads, lam, alpha, beta)
    joules = loads.k / np.where(got.tau > 0, got.tau, 1.0) ** 2
    air, band = 2 * np.sqrt(lam * alpha * loads.x), np.sqrt(lam * alpha * loads.x)
    if loads.snr is not None:
        W = loads.x / np.where(loads.x > 0, got.L, 1.0)  # all bits are carried, whatever the error of L
        each = np.sqrt(lam * alpha * W)
        band = np.where(got.full, alpha * got.b, each)
        air = band + np.where(got.full, lam * got.t, each)
        joules = joules + loads.n * W * np.expm1(got.L)
    server = np.sqrt(lam * loads.y * beta)
    return Spent(lam * (loads.a + got.tau) + air + joules + 2 * server, band, server, joules, got)


def prices_at(menu: Menu, block: Block, mixture: Array) -> tuple[Array, Array, Array]:
    """lambda (S, N), alpha and beta (S,) of the best allocation, if client n did a share ``mixture`` (N, V) of the work
    of each cut. Who sends has t / b = alpha / lambda, or at full power what the slope of h by b says."""
    mixed = [(part * mixture).sum(-1) for part in block.loads]  # (S, N)
    best = saving(menu, block, *(part[:, None] for part in mixed))
    lam, b, t, power = (
        part[:, 0] for part in (best.client_weight, best.bandwidth_hz, best.uplink_s, best.power_w)
    )  # (S, N)
    lam = np.maximum(lam, _LEAST)
    lam = lam / lam.sum(1, keepdims=True)
    loads = loads_of(menu, block)
    x, y = ((part * mixture).sum(-1) for part in (loads.x, loads.y))
    paid = lam * t
    if loads.snr is not None:
        b = np.where(x > 0, b / menu.cell.bandwidth_hz, 1.0)
        L = np.where(x > 0, x / np.where(x > 0, t * b, 1.0), 1.0)
        full = power >= menu.cell.client_power_w * (1 - 1e-9)
        at_most = (lam + (loads.n * loads.snr)[:, :, 0]) * x * marginal(L) / (b * L * L)
        paid = np.where(full, at_most, paid)
    least = _LEAST * np.maximum(best.value_s[:, 0], 1e-30)
    return lam, np.maximum(paid.sum(1), least), np.maximum(np.sqrt(lam * y).sum(1) ** 2, least)


def alone_at(menu: Menu, block: Block) -> Array:
    """chi + W E of each client at each cut with the whole cell to itself, (S, N, V), where no two meet in a stage."""
    value, stages = np.zeros_like(block.fixed_s), np.arange(len(block.weight))
    who = np.stack(block.loads).any((0, 3)).argmax(1)  # (S,)
    single = replace(block, strength=block.strength[stages, who][:, None])
    a, x, c, busy, joules = (part[stages, who][:, :, None] for part in block.loads)  # (S, V, 1)
    power = menu.cell.client_power_w[who][:, None, None]
    value[stages, who] = saving(menu, single, a, x, c, busy, joules, power).value_s
    return value
