"""P2.1 by a general convex solver (CVXPY with Clarabel): slow, for checking `splitcast.allocate.allocate`.

The Shannon rate is concave in CVXPY's eyes as b ln(1 + s/b) = −rel_entr(b, b + s). For s from 1e-5 to 1e8 this
is hopelessly scaled, so shares are counted in units of a guess b₀ and the cone is shifted by k = 1 + s/b₀,
    ln(1 + s/b) b = b₀ (β ln k − rel_entr(β, (β + s/b₀)/k)),      b = b₀ β,
which makes all its entries of order one. Times are in units of the guess's finish time. A solution serves as
the next guess, since the solver's tolerance is relative to these units. All data are parameters; the problem
is compiled once for each number of clients.
"""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from splitcast.allocate.allocate import Allocation, certify
from splitcast.allocate.problem import Problem
from splitcast.allocate.rate import Rate
from splitcast.allocate.shares import Array, rate_and_slope
from splitcast.base.errors import SplitcastError

_GOOD_ENOUGH = 1e-8


def solve_cvxpy(
    *,
    fixed_s: ArrayLike,
    uplink_bits: ArrayLike,
    server_flops: ArrayLike,
    rate: Rate,
    bandwidth_hz: ArrayLike,
    cpu_flops: ArrayLike,
    passes: int = 4,
) -> Allocation:
    """Like `allocate`, for one instance; the best of at most `passes` solves, each scaled by the one before.

    Its gap is certified in the same way and tells how well the solver did. RuntimeError if it failed outright,
    as it may on very unequal clients.
    """
    problem = Problem.of(fixed_s, uplink_bits, server_flops, rate, bandwidth_hz, cpu_flops)
    n, count = problem.x.shape
    if count != 1:
        raise SplitcastError(f"fixed_s: {count} instances; solve_cvxpy takes one at a time")
    model = _compiled(n, problem.snr is None)
    work = problem.x / rate_and_slope(np.full_like(problem.x, 1 / n), problem.snr)[0]
    b, f = _mixed(work), _mixed(problem.y)
    best: Allocation | None = None
    for _ in range(passes):
        try:
            b, f, log_price = _one_pass(model, problem, b, f)
        except RuntimeError:
            if best is None:
                raise
            break
        found = certify(problem, b, f, log_price)
        if best is None or found.value_s < best.value_s:
            best = found
        if best.gap < _GOOD_ENOUGH:
            break
    assert best is not None
    return best


def _mixed(work: Array) -> Array:
    """Half of the total in proportion to the work, half in equal shares."""
    share: Array = work / max(work.sum(), np.finfo(np.float64).tiny)
    return 0.5 / len(work) + 0.5 * share


def _one_pass(model: dict[str, Any], problem: Problem, b: Array, f: Array) -> tuple[Array, Array, Array]:
    """Solve in units of the shares b and f; return better shares and the log of the price ratio."""
    rho, _ = rate_and_slope(b, problem.snr)
    uplink, server = problem.x / rho, problem.y / f
    unit = (problem.a + uplink + server).max()
    data = {"fixed": problem.a / unit, "uplink": uplink / unit, "server": server / unit, "b_unit": b, "f_unit": f}
    if problem.snr is not None:
        snr = problem.snr / b
        data |= {"log_k": np.log1p(snr), "inverse_k": 1 / (1 + snr), "snr_by_k": snr / (1 + snr)}
    for name, value in data.items():
        model[name].value = value[:, 0]
    solve_clarabel(model["problem"])
    new_b, new_f = (
        unit_share * np.maximum(model[name].value, 1e-9)[:, None] for name, unit_share in (("b", b), ("f", f))
    )
    prices = np.maximum([model["cpu"].dual_value, model["band"].dual_value], 1e-300)
    return new_b / new_b.sum(), new_f / new_f.sum(), np.log(prices[:1] / prices[1:])


@cache
def _compiled(n: int, linear: bool) -> dict[str, Any]:
    cp = load_cvxpy()
    names = ["fixed", "uplink", "server", "b_unit", "f_unit", "log_k", "inverse_k", "snr_by_k"]
    data = {name: cp.Parameter(n, nonneg=True) for name in names}
    b, f, speed, chi = cp.Variable(n), cp.Variable(n), cp.Variable(n), cp.Variable()
    band, cpu = data["b_unit"] @ b <= 1, data["f_unit"] @ f <= 1
    if linear:
        reach = speed <= b
    else:
        cone = cp.rel_entr(b, cp.multiply(data["inverse_k"], b) + data["snr_by_k"])
        reach = cp.multiply(data["log_k"], speed) <= cp.multiply(data["log_k"], b) - cone
    finish = data["fixed"] + cp.multiply(data["uplink"], cp.inv_pos(speed))
    finish += cp.multiply(data["server"], cp.inv_pos(f))
    problem = cp.Problem(cp.Minimize(chi), [finish <= chi, reach, band, cpu])
    return data | {"b": b, "f": f, "band": band, "cpu": cpu, "problem": problem}


def load_cvxpy() -> Any:
    try:
        import_module("clarabel")
        return import_module("cvxpy")
    except ImportError:
        raise SplitcastError("solve_cvxpy: cvxpy or clarabel missing; install the extra `verify`") from None


def solve_clarabel(problem: Any) -> None:
    """Solve a compiled CVXPY problem, or say why it was not solved."""
    cp = load_cvxpy()
    try:
        problem.solve(solver=cp.CLARABEL, warm_start=False)
    except cp.SolverError as error:
        raise RuntimeError(f"Clarabel failed: {error}") from error
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        raise RuntimeError(f"Clarabel failed: {problem.status}")
