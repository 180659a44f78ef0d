"""P1 with energy by a general convex solver (CVXPY with Clarabel): slow, for checking `splitcast.allocate.energy`.

In logarithms of times and shares it is a geometric programme but for the energy on the air, n x (e^L − 1)/L with
L = x/(t b). By Gauss–Legendre quadrature (e^L − 1)/L = ∫ e^(sL) ds over [0, 1] is Σ ω_j e^(s_j L), to 1e-13 for L ≤ 20,
and all that is left are exponential cones. Data are parameters: compiled once for each number of clients.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from splitcast.allocate.problem import Problem
from splitcast.allocate.rate import ShannonRate
from splitcast.allocate.reference import load_cvxpy, solve_clarabel
from splitcast.allocate.responses import Array

_NODES, _WEIGHTS = (np.asarray(each) for each in np.polynomial.legendre.leggauss(12))


def solve_cvxpy_energy(
    *,
    fixed_s: ArrayLike,
    compute_s: ArrayLike,
    compute_j: ArrayLike,
    uplink_bits: ArrayLike,
    server_flops: ArrayLike,
    rate: ShannonRate,
    power_w: ArrayLike,
    bandwidth_hz: ArrayLike,
    cpu_flops: ArrayLike,
    seconds_per_j: ArrayLike,
    cap_j: ArrayLike | None = None,
) -> tuple[float, Array]:
    """χ + Σ w_n E_n of one instance at the point that the solver returns, moved into the feasible set but for caps on
    E_n, which it meets to its own tolerance; and the E_n (N,) of that point, J.

    RuntimeError if it failed.
    """
    problem = Problem.of(fixed_s, uplink_bits, server_flops, rate, bandwidth_hz, cpu_flops)
    a, x, y = (part[:, 0] for part in (problem.a, problem.x, problem.y))
    assert problem.snr is not None
    snr, clients = problem.snr[:, 0], len(a)
    tau0, e0, power, w = (
        np.broadcast_to(np.asarray(part, dtype=np.float64), (clients,))
        for part in (compute_s, compute_j, power_w, seconds_per_j)
    )
    n = w * power / snr
    share = np.zeros(clients) if cap_j is None else 1 / np.asarray(cap_j, dtype=np.float64)
    equal = np.log1p(clients * snr) / clients
    unit = float((a + tau0 + x / equal + clients * y).max())
    sends, computes, serves = x > 0, tau0 > 0, y > 0
    some_x = np.where(sends, x / unit, 1.0)
    model = _compiled(clients)
    values = {
        "a": a / unit,
        "log_x": np.log(some_x),
        "n_x": np.where(sends, n * some_x, 0.0),
        "log_snr_by_x": np.log(snr / some_x),
        "log_tau0": np.log(np.where(computes, tau0 / unit, 1.0)),
        "k": w * e0 * np.where(computes, tau0 / unit, 0.0) ** 2 / unit,
        "air_of_cap": share * power / snr * np.where(sends, x, 0.0),
        "cpu_of_cap": share * e0 * np.where(computes, tau0 / unit, 0.0) ** 2,
        "y": y / unit,
        "sends": sends.astype(float),
        "computes": computes.astype(float),
        "serves": serves.astype(float),
    }
    for name, value in values.items():
        model[name].value = value
    solve_clarabel(model["problem"])
    tau, t, b, s = (np.exp(model[name].value) for name in ("log_tau", "log_t", "log_b", "log_s"))
    chi, spent = _taken(a, x, y, snr, tau0, e0, power / snr, tau * unit, t * unit, b, s * unit)
    return float(chi + w @ spent), spent


def _taken(
    a: Array,
    x: Array,
    y: Array,
    snr: Array,
    tau0: Array,
    joules: Array,
    noise_w: Array,
    tau: Array,
    t: Array,
    b: Array,
    s: Array,
) -> tuple[float, Array]:
    """Seconds χ and joules E_n of a point moved into the feasible set."""
    sends, computes, serves = x > 0, tau0 > 0, y > 0
    b = np.where(sends, b, 0.0)
    b = np.where(sends, b / max(b.sum(), 1e-300), 1.0)
    phi = np.where(serves, y / s, 0.0)
    phi = np.where(serves, phi / max(phi.sum(), 1e-300), 1.0)
    t = np.where(sends, np.maximum(t, x / (b * np.log1p(snr / b))), 0.0)
    tau = np.where(computes, np.maximum(tau, tau0), 0.0)
    chi = (a + tau + t + y / phi).max()
    W = np.where(sends, t * b, 1.0)
    air = np.where(sends, noise_w * W * np.expm1(x / W), 0.0)
    computing = joules * np.where(computes, tau0 / np.where(computes, tau, 1.0), 0.0) ** 2
    return float(chi), air + computing


@cache
def _compiled(clients: int) -> dict[str, Any]:
    cp = load_cvxpy()
    positive = ["a", "n_x", "k", "air_of_cap", "cpu_of_cap", "y", "sends", "computes", "serves"]
    data: dict[str, Any] = {name: cp.Parameter(clients, nonneg=True) for name in positive}
    data |= {name: cp.Parameter(clients) for name in ("log_x", "log_snr_by_x", "log_tau0")}
    tau, t, b, s, L, z = (cp.Variable(clients) for _ in range(6))
    chi = cp.Variable()
    nodes, weights = (1 + _NODES) / 2, np.log(_WEIGHTS / 2)
    energy = [cp.log_sum_exp(weights + nodes * L[i]) <= z[i] for i in range(clients)]
    took = cp.multiply(data["computes"], cp.exp(tau)) + cp.multiply(data["sends"], cp.exp(t))
    took = took + cp.multiply(data["serves"], cp.exp(s))
    problem = cp.Problem(
        cp.Minimize(
            chi + cp.sum(cp.multiply(data["k"], cp.exp(-2 * tau))) + cp.sum(cp.multiply(data["n_x"], cp.exp(z)))
        ),
        [
            *energy,
            cp.exp(data["log_x"] - t - b) <= L,
            z - t <= data["log_snr_by_x"],
            cp.multiply(data["air_of_cap"], cp.exp(z)) + cp.multiply(data["cpu_of_cap"], cp.exp(-2 * tau)) <= 1,
            data["a"] + took <= chi,
            tau >= data["log_tau0"],
            cp.sum(cp.multiply(data["sends"], cp.exp(b))) <= 1,
            cp.sum(cp.multiply(data["y"], cp.exp(-s))) <= 1,
            b <= 0,
            cp.abs(s) <= 60,
            tau <= 60,
            t <= 60,
        ],
    )
    return data | {"log_tau": tau, "log_t": t, "log_b": b, "log_s": s, "problem": problem}
