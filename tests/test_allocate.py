"""P2.1: hand-computable cases, properties, brute force, an independent look at the certificate, and CVXPY."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from splitcast.allocate import shares
from splitcast.allocate.allocate import Allocation, allocate, certify, equal_share
from splitcast.allocate.problem import Problem
from splitcast.allocate.rate import LinearRate, ShannonRate
from splitcast.allocate.reference import solve_cvxpy
from splitcast.base.errors import SplitcastError

B, F, N0, P = 20e6, 100e9, 10**-20.4, 10**-0.5  # Hz, FLOP/s, W/Hz, W
Stage = dict[str, Any]


def random_stage(rng: np.random.Generator, shape: tuple[int, ...], decades: float = 4, kinds: bool = False) -> Stage:
    """Clients between 10 m and 2 km with Rayleigh fading; some in a very deep fade, some without a load."""
    distance_km = 10 ** rng.uniform(-2, np.log10(2), shape)
    gain = 10 ** (-(128.1 + 37.6 * np.log10(distance_km)) / 10) * rng.exponential(1, shape)
    gain *= np.where(rng.random(shape) < 0.05, 1e-3, 1)
    bits, flops = (10 ** rng.uniform(mid - decades / 2, mid + decades / 2, shape) for mid in (6, 9))
    if kinds:
        bits, flops = bits * (rng.random(shape) < 0.7), flops * (rng.random(shape) < 0.7)
    fixed = 10 ** rng.uniform(-3, 1, shape) * rng.integers(0, 2, (*shape[:-1], 1))
    rate = ShannonRate(P * gain, N0)
    return {
        "fixed_s": fixed,
        "uplink_bits": bits,
        "server_flops": flops,
        "rate": rate,
        "bandwidth_hz": B,
        "cpu_flops": F,
    }


def finish_times(stage: Stage, hz: np.ndarray, flops: np.ndarray) -> np.ndarray:
    """The model written down once more, straight from its definition."""
    rate = stage["rate"]
    with np.errstate(divide="ignore", invalid="ignore"):
        if isinstance(rate, ShannonRate):
            speed = hz * np.log1p(np.asarray(rate.received_power_w) / (hz * rate.noise_w_per_hz)) / np.log(2)
        else:
            speed = np.asarray(rate.bits_per_s_per_hz) * hz
        uplink = np.where(np.asarray(stage["uplink_bits"]) > 0, stage["uplink_bits"] / speed, 0)
        server = np.where(np.asarray(stage["server_flops"]) > 0, stage["server_flops"] / flops, 0)
    return np.asarray(stage["fixed_s"] + uplink + server)


def check(stage: Stage, result: Allocation) -> None:
    """Feasible, valued as stated, and certified."""
    assert (result.bandwidth_hz.sum(-1) <= stage["bandwidth_hz"]).all()
    assert (result.cpu_flops.sum(-1) <= stage["cpu_flops"]).all()
    assert (result.bandwidth_hz >= 0).all() and (result.cpu_flops >= 0).all()
    times = finish_times(stage, result.bandwidth_hz, result.cpu_flops)
    np.testing.assert_allclose(times.max(-1), result.value_s, rtol=1e-11)
    assert (result.gap <= 1e-8).all()
    assert (result.lower_bound_s <= result.value_s * (1 + 1e-12)).all()


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    """One instance of up to eight clients, each load from nothing to very much."""
    n = draw(st.integers(1, 8))

    def each(low: float, high: float, zero: bool = False) -> np.ndarray:
        number = st.floats(low, high).map(lambda exponent: 10**exponent)
        return np.array(draw(st.lists(number | st.just(0.0) if zero else number, min_size=n, max_size=n)))

    rate = draw(st.booleans())
    return {
        "fixed_s": each(-4, 2, zero=True),
        "uplink_bits": each(2, 10, zero=True),
        "server_flops": each(5, 13, zero=True),
        "rate": ShannonRate(each(-18, -5), N0) if rate else LinearRate(each(-4, 1.5)),
        "bandwidth_hz": B,
        "cpu_flops": F,
    }


# --- by hand


def test_identical_clients_share_equally() -> None:
    n, power = 5, 1e-12
    stage = {
        "fixed_s": 0.3,
        "uplink_bits": 2e6,
        "server_flops": 4e9,
        "rate": ShannonRate(np.full(n, power), N0),
        "bandwidth_hz": B,
        "cpu_flops": F,
    }
    best = allocate(**stage)
    expected = 0.3 + 2e6 / (B / n * np.log2(1 + power * n / (B * N0))) + 4e9 * n / F
    assert best.value_s == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(best.bandwidth_hz, B / n, rtol=1e-9)
    np.testing.assert_allclose(best.cpu_flops, F / n, rtol=1e-9)
    np.testing.assert_allclose(best.client_weight, 1 / n, rtol=1e-9)
    assert best.value_s == pytest.approx(equal_share(**stage).value_s, rel=1e-12)


def test_single_client_gets_everything() -> None:
    stage = random_stage(np.random.default_rng(0), (200, 1), decades=8, kinds=True)
    best = allocate(**stage)
    check(stage, best)
    np.testing.assert_allclose(best.value_s, finish_times(stage, np.full((200, 1), B), np.full((200, 1), F))[:, 0])
    used = stage["uplink_bits"] > 0
    np.testing.assert_allclose(best.bandwidth_hz[used], B, rtol=1e-12)


def test_linear_rate_without_cpu_shares_in_proportion_to_the_airtime() -> None:
    bits, efficiency = np.array([1e6, 5e5, 3e6]), np.array([1.0, 0.1, 7.0])
    best = allocate(
        fixed_s=0.25,
        uplink_bits=bits,
        server_flops=0,
        rate=LinearRate(efficiency),
        bandwidth_hz=B,
        cpu_flops=F,
    )
    airtime = bits / efficiency
    assert best.value_s == pytest.approx(0.25 + airtime.sum() / B, rel=1e-12)
    np.testing.assert_allclose(best.bandwidth_hz, B * airtime / airtime.sum(), rtol=1e-9)
    assert best.bandwidth_binds and not best.cpu_binds and best.gap <= 1e-12
    assert best.bandwidth_price_s_per_hz == pytest.approx(airtime.sum() / B**2)


def test_cpu_only() -> None:
    flops = np.array([1e9, 4e9, 0.0])
    stage = {
        "fixed_s": 0,
        "uplink_bits": 0,
        "server_flops": flops,
        "rate": ShannonRate([1e-12] * 3, N0),
        "bandwidth_hz": B,
        "cpu_flops": F,
    }
    best = allocate(**stage)
    assert best.value_s == pytest.approx(5e9 / F, rel=1e-12)
    np.testing.assert_allclose(best.cpu_flops, [0.2 * F, 0.8 * F, 0], rtol=1e-9)
    assert best.cpu_binds and not best.bandwidth_binds and not best.bandwidth_hz.any()


def test_square_root_rule_when_both_resources_are_traded() -> None:
    """Linear rate, no fixed time: with x, y the times at full resources, χ solves two quadratics in m."""
    x, y = np.array([1.0, 0.2, 0.5]), np.array([0.1, 0.9, 0.4])
    m = optimize.brentq(lambda m: (x + m * np.sqrt(x * y)).sum() - (y + np.sqrt(x * y) / m).sum(), 1e-3, 1e3)
    best = allocate(
        fixed_s=0.0, uplink_bits=x * B, server_flops=y * F, rate=LinearRate(np.ones(3)), bandwidth_hz=B, cpu_flops=F
    )
    assert best.value_s == pytest.approx((x + m * np.sqrt(x * y)).sum(), rel=1e-10)


def test_resources_that_nobody_trades_are_solved_apart() -> None:
    sender = {"fixed_s": [0.1, 0.0], "uplink_bits": [1e6, 2e6], "server_flops": 0, "rate": LinearRate([1.0, 1.0])}
    both = {
        "fixed_s": [0.1, 0.0, 0.0],
        "uplink_bits": [1e6, 2e6, 0],
        "server_flops": [0, 0, 1e9],
        "rate": LinearRate([1.0, 1.0, 1.0]),
    }
    alone = allocate(**sender, bandwidth_hz=B, cpu_flops=F)
    slow_air = allocate(**both, bandwidth_hz=B, cpu_flops=F)
    assert slow_air.value_s == pytest.approx(alone.value_s, rel=1e-12)
    assert slow_air.bandwidth_binds and not slow_air.cpu_binds and slow_air.gap <= 1e-12
    slow_cpu = allocate(**both, bandwidth_hz=B, cpu_flops=1e9)
    assert slow_cpu.value_s == pytest.approx(1.0, rel=1e-12)
    assert slow_cpu.cpu_binds and not slow_cpu.bandwidth_binds and slow_cpu.gap <= 1e-12


def test_a_client_without_work_can_only_delay() -> None:
    stage = random_stage(np.random.default_rng(1), (6,))
    without = allocate(**stage)
    power = np.append(stage["rate"].received_power_w, 1e-12)
    for wait in (0.5 * without.value_s, 2 * without.value_s):
        longer = stage | {
            "fixed_s": np.append(stage["fixed_s"], wait),
            "uplink_bits": np.append(stage["uplink_bits"], 0),
            "server_flops": np.append(stage["server_flops"], 0),
            "rate": ShannonRate(power, N0),
        }
        best = allocate(**longer)
        check(longer, best)
        assert best.value_s == pytest.approx(max(without.value_s, wait), rel=1e-12)
        assert best.bandwidth_binds == (wait < without.value_s)


def test_no_work_at_all() -> None:
    rate = LinearRate([1.0, 1.0])
    best = allocate(fixed_s=[0.0, 2.0], uplink_bits=0, server_flops=0, rate=rate, bandwidth_hz=B, cpu_flops=F)
    assert best.value_s == 2 and best.gap == 0 and not best.bandwidth_binds and not best.cpu_binds
    none = allocate(fixed_s=[0.0, 0.0], uplink_bits=0, server_flops=0, rate=rate, bandwidth_hz=B, cpu_flops=F)
    assert none.value_s == 0 and none.gap == 0


# --- properties


@given(stages())
@settings(max_examples=200, deadline=None)
def test_certified_and_never_worse_than_equal_share(stage: Stage) -> None:
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        best, equal = allocate(**stage), equal_share(**stage)
    check(stage, best)
    assert best.value_s <= equal.value_s * (1 + 1e-12)
    assert equal.lower_bound_s <= best.value_s * (1 + 1e-12)


@given(stages(), st.floats(0.01, 3).map(lambda exponent: 10**exponent))
@settings(max_examples=80, deadline=None)
def test_more_of_anything_never_hurts(stage: Stage, more: float) -> None:
    base = allocate(**stage).value_s * (1 + 1e-9)
    assert allocate(**stage | {"bandwidth_hz": more * B}).value_s <= base
    assert allocate(**stage | {"cpu_flops": more * F}).value_s <= base
    rate = stage["rate"]
    if isinstance(rate, ShannonRate):
        louder = np.array(rate.received_power_w)
        louder[0] *= more
        assert allocate(**stage | {"rate": ShannonRate(louder, N0)}).value_s <= base


@given(stages(), st.floats(-6, 6).map(lambda exponent: 10**exponent), st.randoms())
@settings(max_examples=80, deadline=None)
def test_units_and_order_do_not_matter(stage: Stage, k: float, random: Any) -> None:
    base = allocate(**stage)
    loads = ("fixed_s", "uplink_bits", "server_flops")
    assert allocate(**stage | {name: k * stage[name] for name in loads}).value_s == pytest.approx(k * base.value_s)
    # hertz and watts together: the same signal-to-noise ratios, everything on the air k times faster
    same = stage | {"uplink_bits": k * stage["uplink_bits"], "bandwidth_hz": k * B}
    if isinstance(stage["rate"], ShannonRate):
        same["rate"] = ShannonRate(k * stage["rate"].received_power_w, N0)
    assert allocate(**same).value_s == pytest.approx(base.value_s)

    order = np.array(random.sample(range(len(stage["fixed_s"])), len(stage["fixed_s"])))
    name = dataclasses.fields(stage["rate"])[0].name
    shuffled_rate = dataclasses.replace(stage["rate"], **{name: getattr(stage["rate"], name)[order]})
    shuffled = allocate(**stage | {name: stage[name][order] for name in loads} | {"rate": shuffled_rate})
    assert shuffled.value_s == pytest.approx(base.value_s, rel=1e-9)
    if base.bandwidth_binds:
        np.testing.assert_allclose(shuffled.bandwidth_hz, base.bandwidth_hz[order], rtol=1e-4, atol=1e-6 * B)


@given(stages(), st.integers(0, 2**32 - 1), st.floats(-20, 20))
@settings(max_examples=120, deadline=None)
def test_the_lower_bound_holds_for_any_shares(stage: Stage, seed: int, log_price: float) -> None:
    """The certificate must be right about bad allocations too: it may not rely on the solver."""
    best = allocate(**stage).value_s
    problem = Problem.of(**stage)
    rng = np.random.default_rng(seed)
    b, f = 10 ** rng.uniform(-4, 0, (2, *problem.x.shape))
    bad = certify(problem, b, f, np.array([log_price]))
    assert bad.value_s >= best * (1 - 1e-12)
    assert bad.lower_bound_s <= best * (1 + 1e-12)


@pytest.mark.parametrize("shannon", [True, False])
def test_optimality_conditions(shannon: bool) -> None:
    """Everyone with work finishes together, and λ_n times everyone's marginal gain equals the price."""
    stage = random_stage(np.random.default_rng(2), (300, 7), kinds=True)
    if not shannon:
        stage["rate"] = LinearRate(np.log2(1 + stage["rate"].received_power_w / (B * N0)))
    best = allocate(**stage)
    check(stage, best)
    np.testing.assert_allclose(best.client_weight.sum(-1), 1, rtol=1e-12)
    bits, flops = stage["uplink_bits"], stage["server_flops"]
    traded = ((bits > 0) & (flops > 0)).any(-1) & (best.client_weight.max(-1) < 1)
    work = traded[:, None] & ((bits > 0) | (flops > 0))
    times = finish_times(stage, best.bandwidth_hz, best.cpu_flops)
    np.testing.assert_allclose(times[work], np.broadcast_to(best.value_s[:, None], work.shape)[work], rtol=1e-8)
    assert best.bandwidth_binds[traded].all() and best.cpu_binds[traded].all()

    def marginal(name: str, amount: np.ndarray) -> np.ndarray:
        by = {"bandwidth_hz": best.bandwidth_hz, "cpu_flops": best.cpu_flops}
        up, down = (finish_times(stage, *(by | {name: amount * k}).values()) for k in (1 + 1e-6, 1 - 1e-6))
        return (down - up) / (2e-6 * amount)

    air, server = traded[:, None] & (bits > 0), traded[:, None] & (flops > 0)
    gain = best.client_weight * marginal("bandwidth_hz", np.maximum(best.bandwidth_hz, 1e-9))
    price = np.broadcast_to(best.bandwidth_price_s_per_hz[:, None], air.shape)
    np.testing.assert_allclose(gain[air], price[air], rtol=1e-3)
    gain = best.client_weight * marginal("cpu_flops", np.maximum(best.cpu_flops, 1e-9))
    price = np.broadcast_to(best.cpu_price_s_per_flops[:, None], server.shape)
    np.testing.assert_allclose(gain[server], price[server], rtol=1e-3)


def test_prices_are_the_slopes_of_the_optimum() -> None:
    stage = random_stage(np.random.default_rng(3), (100, 5))
    best, h = allocate(**stage), 1e-4
    for name, price in (
        ("bandwidth_hz", best.bandwidth_price_s_per_hz),
        ("cpu_flops", best.cpu_price_s_per_flops),
    ):
        up, down = (allocate(**stage | {name: stage[name] * k}).value_s for k in (1 + h, 1 - h))
        np.testing.assert_allclose((down - up) / (2 * h * stage[name]), price, rtol=1e-4, atol=1e-9 * price.max())


def test_a_batch_equals_its_instances_and_shapes_broadcast() -> None:
    stage = random_stage(np.random.default_rng(4), (3, 4, 6), kinds=True)
    bandwidth = np.linspace(1e6, 20e6, 12).reshape(3, 4)
    batch = allocate(**stage | {"bandwidth_hz": bandwidth})
    assert batch.value_s.shape == (3, 4) and batch.bandwidth_hz.shape == (3, 4, 6)
    for i in np.ndindex(3, 4):
        one = {name: stage[name][i] for name in ("fixed_s", "uplink_bits", "server_flops")}
        rate = ShannonRate(stage["rate"].received_power_w[i], N0)
        single = allocate(**one, rate=rate, bandwidth_hz=bandwidth[i], cpu_flops=F)
        assert single.value_s == pytest.approx(batch.value_s[i], rel=1e-11)
    wide = allocate(
        fixed_s=np.zeros((4, 1, 1)),
        uplink_bits=1e6,
        server_flops=np.full((5, 1), 1e9),
        rate=LinearRate(np.ones(6)),
        bandwidth_hz=B,
        cpu_flops=np.full((4, 5), F),
    )
    assert wide.value_s.shape == (4, 5) and wide.cpu_flops.shape == (4, 5, 6)


@pytest.mark.parametrize("shape", [(1, 100_000), (20_000, 3), (30, 2_000)])
def test_large_batches_and_many_clients(shape: tuple[int, int]) -> None:
    stage = random_stage(np.random.default_rng(5), shape, decades=6, kinds=True)
    check(stage, allocate(**stage))


def test_very_unequal_clients() -> None:
    """Twelve decades of loads, deep fades, huge and tiny offsets: still certified."""
    rng = np.random.default_rng(6)
    for n in (2, 3, 10, 40):
        stage = random_stage(rng, (8000 // n, n), decades=12, kinds=True)
        stage["rate"] = ShannonRate(stage["rate"].received_power_w * 10 ** rng.uniform(-5, 5, (8000 // n, n)), N0)
        stage["fixed_s"] = stage["fixed_s"] * 10 ** rng.uniform(-6, 4, (8000 // n, 1))
        check(stage, allocate(**stage))


# --- against brute force


def brute_force(stage: Stage) -> float:
    """Two clients, nested bounded line searches over who gets how much: slow, but hard to get wrong."""

    def worst(share_b: float, share_f: float) -> float:
        hz, flops = np.array([share_b, 1 - share_b]) * B, np.array([share_f, 1 - share_f]) * F
        return float(finish_times(stage, hz, flops).max())

    def line(function: Any) -> float:  # over the logit: shares may be tiny
        found = [
            optimize.minimize_scalar(lambda z: function(1 / (1 + np.exp(-z))), bounds=(lo, hi), options={"xatol": 1e-9})
            for lo, hi in ((-25, 0), (0, 25))
        ]
        return min(float(r.fun) for r in found)

    return line(lambda share_b: line(lambda share_f: worst(share_b, share_f)))


def test_two_clients_by_brute_force() -> None:
    rng = np.random.default_rng(7)
    for _ in range(6):
        stage = random_stage(rng, (2,), decades=3)
        best, slow = allocate(**stage), brute_force(stage)
        assert best.value_s == pytest.approx(slow, rel=1e-6)
        assert best.value_s <= slow * (1 + 1e-9)
        assert best.lower_bound_s <= slow * (1 + 1e-12)


def least_air_cost(weight: float, bits: float, power: float, price: float) -> float:
    """min over B_n of λ X/r(B_n) + α B_n, on a grid and then by line search."""

    def cost(log_hz: float) -> float:
        hz = np.exp(log_hz)
        return float(weight * bits * np.log(2) / (hz * np.log1p(power / (hz * N0))) + price * hz)

    grid = np.linspace(-10, 40, 1001)
    start = grid[np.argmin([cost(z) for z in grid])]
    search = optimize.minimize_scalar(cost, bounds=(start - 0.1, start + 0.1), options={"xatol": 1e-10})
    return float(search.fun)


def test_the_lower_bound_is_the_lagrangian_dual() -> None:
    """Evaluate the dual function afresh from the returned multipliers alone."""
    stage = random_stage(np.random.default_rng(8), (40, 4), kinds=True)
    best = allocate(**stage)
    for i in range(40):
        weight, price = best.client_weight[i], float(best.bandwidth_price_s_per_hz[i])
        server = np.sqrt(weight * stage["server_flops"][i]).sum() ** 2 / F
        dual = weight @ stage["fixed_s"][i] - price * B + server
        for n in np.flatnonzero((stage["uplink_bits"][i] > 0) & (weight > 0)):
            dual += least_air_cost(weight[n], stage["uplink_bits"][i, n], stage["rate"].received_power_w[i, n], price)
        assert dual == pytest.approx(best.lower_bound_s[i], rel=1e-9)


# --- against CVXPY


def compare_with_cvxpy(instances: int, seed: int) -> tuple[int, float]:
    """How many instances the reference itself could solve, and the largest difference among them."""
    rng, solved, worst = np.random.default_rng(seed), 0, 0.0
    for _ in range(instances):
        stage = random_stage(rng, (int(rng.integers(1, 51)),), kinds=bool(rng.integers(0, 2)))
        ours = allocate(**stage)
        check(stage, ours)
        try:
            theirs = solve_cvxpy(**stage)
        except RuntimeError:
            continue
        assert ours.value_s <= theirs.value_s * (1 + 1e-7)
        if theirs.gap <= 1e-6:
            solved += 1
            worst = max(worst, abs(float(ours.value_s / theirs.value_s) - 1))
    return solved, worst


@pytest.mark.parametrize("instances", [50, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_agrees_with_cvxpy(instances: int) -> None:
    solved, worst = compare_with_cvxpy(instances, seed=10)
    assert solved >= 0.7 * instances and worst <= 1e-6


def test_cvxpy_linear_rate() -> None:
    stage = random_stage(np.random.default_rng(11), (5,))
    stage["rate"] = LinearRate(np.log2(1 + stage["rate"].received_power_w / (B * N0)))
    ours, theirs = allocate(**stage), solve_cvxpy(**stage)
    assert ours.value_s == pytest.approx(theirs.value_s, rel=1e-6)
    with pytest.raises(SplitcastError, match="2 instances"):
        solve_cvxpy(**stage | {"fixed_s": np.zeros((2, 5))})


def test_cvxpy_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import splitcast.allocate.reference as reference

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(reference, "import_module", missing)
    with pytest.raises(SplitcastError, match=r"extra `verify`"):
        solve_cvxpy(**random_stage(np.random.default_rng(12), (51,)))


# --- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed_s": [0, -1.0, 0]}, r"fixed_s\[1\]: -1; must be finite and >= 0"),
        ({"uplink_bits": [[1, 1, 1], [1, 1, np.nan]]}, r"uplink_bits\[1, 2\]: nan; must be finite and >= 0"),
        ({"server_flops": [np.inf, 1, 1]}, r"server_flops\[0\]: inf; must be finite and >= 0"),
        ({"rate": ShannonRate([1e-9, 0, 1e-9], N0)}, r"received_power_w\[1\]: 0; must be finite and > 0"),
        ({"rate": ShannonRate([1e-9, 1e-9, np.nan], N0)}, r"received_power_w\[2\]: nan"),
        ({"rate": ShannonRate([np.inf, 1e-9, 1e-9], N0)}, r"received_power_w\[0\]: inf"),
        ({"rate": ShannonRate([1e-9] * 3, 0.0)}, r"noise_w_per_hz: 0; must be finite and > 0"),
        ({"rate": LinearRate([1, 1, -2.0])}, r"bits_per_s_per_hz\[2\]: -2; must be finite and > 0"),
        ({"bandwidth_hz": 0}, r"bandwidth_hz: 0; must be finite and > 0"),
        ({"cpu_flops": [1e9, -1e9]}, r"cpu_flops\[1\]: -1e\+09; must be finite and > 0"),
        ({"fixed_s": "soon"}, r"fixed_s: 'soon' is not a number"),
        ({"fixed_s": [0, 0]}, r"fixed_s \(2,\).*shapes do not fit"),
        ({"fixed_s": [], "uplink_bits": [], "server_flops": [], "rate": LinearRate([])}, "at least one client"),
    ],
)
@pytest.mark.parametrize("solver", [allocate, equal_share])
def test_bad_input_is_named(solver: Any, change: Stage, message: str) -> None:
    good = {
        "fixed_s": np.zeros(3),
        "uplink_bits": np.ones(3),
        "server_flops": np.ones(3),
        "rate": ShannonRate([1e-9] * 3, N0),
        "bandwidth_hz": B,
        "cpu_flops": F,
    }
    with pytest.raises(SplitcastError, match=message) as error:
        solver(**good | change)
    assert "\n" not in str(error.value)


def test_a_price_that_vanishes_is_no_warning():
    """2 q κ_b s / root underflows where one resource is far too scarce: the price falls as far as a step may."""
    numbers = {"b": 1e160, "f": 1.0, "b_slack": 1.0, "f_slack": 1e30, "price": 1e-150}
    total = shares._Totals(**{name: np.array([value]) for name, value in numbers.items()})
    with np.errstate(all="raise", under="ignore", over="ignore"):
        _, log_m, _ = shares._joint_step([total], np.ones(1))
    assert log_m.tolist() == [-8]
