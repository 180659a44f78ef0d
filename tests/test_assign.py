"""Cuts for every client: against brute force, the clock, and limits of single clients."""

from itertools import product

import numpy as np
import pytest

from splitcast.allocate.allocate import allocate
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.bench.assign import SCHEMES
from splitcast.cost.cell import Cell
from splitcast.cost.clock import EnergyAware, time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.memory import GB, client_memory
from splitcast.cost.stages import Stage
from splitcast.cutting.assign import assign
from splitcast.cutting.deadlines import Boxes
from splitcast.cutting.fleet import FleetPlanner, mean_round
from splitcast.cutting.menu import Menu, timed
from splitcast.cutting.prices import bound, prices_of
from splitcast.model import build
from splitcast.studies.per_client import plan_batches, plan_per_client, regulated
from splitcast.studies.plan import scenario_of
from splitcast.training.placement import Fleet, Placement

CUTS = 4
MODEL = build("cnn", (1, 28, 28), 10, seed=0)


def menu_of(scheme, n, seed, band=5e6, low=0.1e9, high=10e9, draws=1, weight=0.0):
    settings = {"clients": n, "seed": seed, "bandwidth_hz": band, "client_flops_per_s_range": (low, high)}
    scenario = scenario_of(with_values(Config(), scheme=scheme, **settings), MODEL)
    met = scenario.conditions(range(1, draws + 1))
    rounds = [scenario.stages(place, 1) for place in scenario.placements()]
    allowed = np.ones((n, CUTS), dtype=bool)
    return scenario, Menu.of(scenario.cell, rounds, met, allowed, seconds_per_j=weight), met


@pytest.mark.parametrize("weight", [0.0, 3.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounds_cost_what_the_clock_says(scheme, weight):
    scenario, menu, met = menu_of(scheme, 5, seed=3, draws=2, weight=weight)
    places, rng = scenario.placements(), np.random.default_rng(0)
    for cuts in rng.integers(CUTS, size=(4, 5)):
        stages = scenario.stages(Fleet.of_clients([places[k] for k in cuts]), 1)
        (clock,) = time_rounds([stages], scenario.cell, met, EnergyAware(weight) if weight else allocate)
        cost = clock.seconds + weight * clock.joules
        assert timed(menu, cuts[None])[0] == pytest.approx(cost.mean(), rel=1e-7 if weight else 1e-9)


def every(n):
    """All assignments."""
    return np.array(list(product(range(CUTS), repeat=n)))


def drawn(count, most):
    rng = np.random.default_rng(18)
    for seed in range(count):
        scheme = (*SCHEMES, "epsl-cut", "sfl-ga")[seed % 11]
        low = float(10 ** rng.uniform(7.5, 9.5))
        n = int(rng.integers(2, most + 1)) if seed % 20 else most + 2
        yield scheme, n, seed, float(rng.choice([1e6, 5e6, 20e6])), low


@pytest.mark.parametrize("fleets", [45, pytest.param(300, marks=pytest.mark.long)])
def test_never_above_brute_force_by_more_than_the_certified_gap(fleets):
    """Of up to 6 clients."""
    missed = []
    for scheme, n, seed, band, low in drawn(fleets, most=4):
        _, menu, _ = menu_of(scheme, n, seed, band, low, 10 * low)
        best = float(timed(menu, every(n)).min())
        found = assign(menu)
        where = (scheme, n, seed)
        assert found.lower_bound_s <= best * (1 + 1e-9), where
        assert best <= found.seconds * (1 + 1e-9), where
        assert found.seconds <= best / (1 - found.gap) * (1 + 1e-9), where
        assert found.seconds <= found.common_s, where
        assert found.seconds == pytest.approx(float(timed(menu, found.cuts[None])[0])), where
        missed.append(found.seconds / best - 1)
    assert np.median(missed) < 1e-9 and max(missed) < 0.03  # what is found is the best, or nearly


@pytest.mark.parametrize("fleets", [11, pytest.param(105, marks=pytest.mark.long)])
def test_joules_never_above_brute_force_by_more_than_the_certified_gap(fleets):
    """Of fleets of up to 5 clients, at prices from almost none to one that only joules matter at."""
    missed, gaps, rng = [], [], np.random.default_rng(19)
    for scheme, n, seed, band, low in drawn(fleets, most=3):
        _, menu, _ = menu_of(scheme, n, seed, band, low, 10 * low, weight=float(10 ** rng.uniform(-2.5, 2.5)))
        best, found, where = float(timed(menu, every(n)).min()), assign(menu), (scheme, n, seed)
        assert found.lower_bound_s <= best * (1 + 1e-8), where
        assert best <= found.seconds * (1 + 1e-8), where
        assert found.seconds <= best / (1 - found.gap) * (1 + 1e-8), where
        assert found.seconds <= found.common_s, where
        missed.append(found.seconds / best - 1)
        gaps.append(found.gap)
    assert np.median(missed) < 1e-9 and max(missed) < 0.03
    assert np.median(gaps) < 0.01


@pytest.mark.parametrize("weight", [0.0, 3.0])
@pytest.mark.parametrize("scheme", ["psl", "sfl-ga", "local-loss"])
def test_boxes_bound_all_assignments_whatever_their_prices(scheme, weight):
    _, menu, _ = menu_of(scheme, 4, seed=5, weight=weight)
    best, rng = float(timed(menu, every(4)).min()), np.random.default_rng(2)
    for _ in range(3 if weight else 10):
        boxes = Boxes(menu, (best * 10 ** rng.uniform(-4, 2, size=(menu.stages, 2))).tolist(), 1.3 * best)
        levels = [boxes.least]
        for _ in range(6):
            boxes.refine(50, 1 / 1.3)
            levels.append(boxes.least)
        assert levels == sorted(levels)
        assert levels[-1] <= best * (1 + 1e-9)
        assert levels[-1] > 0.6 * best or weight


def test_half_as_many_averagings_are_half_the_stages():
    """A round of `sfl` that averages every second time is the mean of one that does and one that does not."""
    config = with_values(Config(), scheme="sfl", clients=3, seed=4, client_flops_per_s=(1e9, 3e9, 9e9))
    scenarios = [scenario_of(with_values(config, sync_every=k), MODEL) for k in (2, 1, 0)]
    both, always, never = (FleetPlanner(each).menu(each.conditions([1])) for each in scenarios)
    assert timed(both, every(3)) == pytest.approx((timed(always, every(3)) + timed(never, every(3))) / 2)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_any_prices_bound_all_assignments(weight):
    _, menu, _ = menu_of("sfl", 4, seed=7, weight=weight)
    best, rng = float(timed(menu, every(4)).min()), np.random.default_rng(1)
    for _ in range(20):
        mixture = rng.dirichlet(np.ones(CUTS), size=4)
        prices = [
            (rng.dirichlet(np.ones(4), size=len(w)), a * rng.uniform(0.2, 3), b * rng.uniform(0.2, 3))
            for w, a, b in prices_of(menu, mixture)
        ]
        assert bound(menu, prices).seconds <= best


def test_a_fleet_by_hand():
    """Two clients at 1 bit/s/Hz share 1 MHz, computing at 1 and 10 FLOP/s; deep cuts compute more and send less.

    At the first cut both compute 1 FLOP and send 1 Mbit, at the second 8 FLOP and 0.1 Mbit. The slow one at the first,
    the fast one at the second: 1 s + x and 0.8 s + y with 1/x + 0.1/y = 1 end together.
    """
    cell = Cell(1e6, 1e-12, 1.0, 1e9, np.ones(2), np.array([1.0, 10.0]))
    rounds = [
        [Stage("feedback", (0, 1), unicast_bits=bits, backward_flops=flops)] for bits, flops in ((1e6, 1.0), (1e5, 8.0))
    ]
    menu = Menu.of(cell, rounds, Conditions.of(np.full((1, 2), 1e-6)), np.ones((2, 2), dtype=bool))
    x = (1.0 - 0.2 + 0.1 + np.sqrt((0.2 - 1.1) ** 2 + 4 * 0.2)) / 2  # x^2 - (1.1 - 0.2) x - 0.2 = 0, y = x + 0.2
    assert 1 / x + 0.1 / (x + 0.2) == pytest.approx(1)
    found = assign(menu)
    assert found.cuts.tolist() == [0, 1]
    assert found.seconds == pytest.approx(1 + x)
    assert found.common == 0
    assert found.common_s == pytest.approx((3.1 + np.sqrt(3.1**2 - 4.8)) / 2)  # 1/(t - 1) + 1/(t - 0.1) = 1


def test_a_thrifty_client_by_hand():
    """A client of 1 FLOP/s that only computes, at a joule a cycle, and one that does next to nothing.

    C FLOP in chi seconds take C^3/chi^2 joules: chi + W C^3/chi^2 is least at chi = C cbrt(2 W), 1.5 times that.
    With W = 4, 3 C: the first cut has C = 2 and a broadcast of 1 s, the second C = 3 and none, so 7 s and 9 s. With W =
    32, 6 C: 13 s and 18 s; without a price, 3 s and 3 s less a millionth.
    """
    cell = Cell(1e6, 1e-12, 1.0, 1e9, np.ones(1), np.ones(1), kappa=1.0)
    efficiency = np.log2(1 + 1e-6 / (1e6 * 1e-12))
    rounds = [
        [Stage("feedback", (0,), broadcast_bits=bits, backward_flops=flops)]
        for bits, flops in ((1e6 * efficiency, 2.0), (0, 3.0 - 1e-6))
    ]
    for weight, cut, cost in ((0.0, 1, 3.0), (4.0, 0, 7.0), (32.0, 0, 13.0)):
        met, allowed = Conditions.of(np.full((1, 1), 1e-6)), np.ones((1, 2), dtype=bool)
        found = assign(Menu.of(cell, rounds, met, allowed, seconds_per_j=weight))
        assert found.cuts.tolist() == [cut]
        assert found.seconds == pytest.approx(cost, rel=1e-5)


def test_a_joule_worth_nothing_changes_nothing_and_one_worth_all_takes_the_least():
    config = with_values(Config(), scheme="psl", clients=3, client_flops_per_s=(1e9, 3e9, 9e9), bandwidth_hz=5e6)
    fast, almost, saving, least = (
        plan_per_client(with_values(config, energy_weight=weight), 1, MODEL) for weight in (0.0, 1e-7, 1.0, 1e6)
    )
    assert fast.objective == pytest.approx(fast.seconds)
    assert almost.objective == pytest.approx(fast.objective, rel=1e-4)
    assert fast.energy_j > saving.energy_j > least.energy_j and fast.seconds < saving.seconds < least.seconds
    assert saving.objective == pytest.approx(saving.seconds + saving.energy_j, rel=1e-7)
    assert saving.energy_j / 3 < saving.most_j < saving.energy_j
    scenario = scenario_of(with_values(config, energy_weight=1e6), MODEL)
    places, met, spent = scenario.placements(), scenario.conditions([1]), {}
    for cuts in product(range(CUTS), repeat=3):
        spent[cuts] = mean_round(scenario, Fleet.of_clients([places[k] for k in cuts]), met)[1].sum()
    cuts = min(spent, key=spent.get)
    assert least.energy_j == pytest.approx(spent[cuts], rel=1e-3)
    assert least.cuts == [places[k].cut for k in cuts]


def test_a_hundred_clients_in_turn_each_take_what_is_cheapest_for_themselves():
    """`sl` at a price of joules, 300 stages of one client: the cost of a round is a sum over clients."""
    config = with_values(Config(), scheme="sl", clients=100, energy_weight=1.0, client_flops_per_s_range=(1e7, 1e10))
    found = plan_per_client(config, 1, MODEL)
    scenario = scenario_of(config, MODEL)
    places, met = scenario.placements(), scenario.conditions([1])

    def cost(cuts):
        seconds, joules = mean_round(scenario, Fleet.of_clients([places[k] for k in cuts]), met)
        return seconds + joules.sum()

    common = [cost([k] * 100) for k in range(CUTS)]
    assert found.lower_bound_s == pytest.approx(found.objective) and found.objective <= min(common) * (1 + 1e-9)
    assert found.objective == pytest.approx(cost([cut - 1 for cut in found.cuts]), rel=1e-6)
    for client in (0, 37, 99):
        others = [cut - 1 for cut in found.cuts]
        each = [cost([*others[:client], k, *others[client + 1 :]]) for k in range(CUTS)]
        assert each[others[client]] <= min(each) * (1 + 1e-9)


def test_limits_of_single_clients():
    config = with_values(Config(), scheme="psl", clients=4, client_flops_per_s=(5e9,))
    free = plan_per_client(config, 1, MODEL)
    scenario = scenario_of(config, MODEL)
    needs = [client_memory(MODEL, place, scenario.optimiser, config.train.batch) for place in scenario.placements()]
    held = [need.total / GB for need in needs]
    assert held[0] < held[-1]
    tight = with_values(config, client_memory_gb=(held[0] * 1.001, 1e3, 1e3, 1e3))
    found = plan_per_client(tight, 1, MODEL)
    assert found.cuts[0] == 1
    assert found.memory_gb[0] == pytest.approx(held[0])
    assert found.seconds >= free.seconds * (1 - 1e-9)
    private = plan_per_client(with_values(config, epsilon=0.01), 1, MODEL)
    assert min(private.cuts) > 1
    with pytest.raises(SplitcastError, match="cut: none is left for client 0; lower epsilon or raise its memory"):
        plan_per_client(with_values(tight, epsilon=0.01), 1, MODEL)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"scheme": "fl"}, "fl has no cut"),
        ({"client_memory_gb": (1, 2)}, "2 nu"),
        ({"energy_cap_j": 5.0}, "energy_cap_j: 5; must be 0 for cuts of each client"),
        ({"scheme": "epsl"}, "cut: epsl with its settings needs one cut for all clients"),
        ({"scheme": "fed-pairing"}, "scheme: what a client of fed-pairing does depends on the cuts of others"),
    ],
)
def test_one_line_says_what_is_wrong(values, said):
    with pytest.raises(SplitcastError, match=said):
        plan_per_client(with_values(Config(), **values), draws=1)


def test_batches_regulated_to_speed():
    distances = {"distance_m": (100.0,), "client_flops_per_s": (1e6, 2e6, 4e6)}  # computing is all that counts
    config = with_values(Config(), scheme="merge-sfl", clients=3, batch=32, arch="cnn-small", **distances)
    scenario = scenario_of(config)
    sizes = regulated(scenario, Placement.split(1, scenario.model.depth))
    assert sizes == (8, 16, 32)


def test_a_round_of_regulated_batches():
    """Computing is all that counts: rounds take as long as the batch of the fastest client, and four times that."""
    cell = {"distance_m": (10.0,), "client_flops_per_s": (1e6, 2e6, 4e6), "server_flops_per_s": 1e15}
    config = with_values(Config(), scheme="merge-sfl", clients=3, batch=32, arch="cnn-small", cut=1, **cell)
    made = plan_batches(with_values(config, bandwidth_hz=1e12), draws=2)
    assert made.batches == [8, 16, 32]
    flops = scenario_of(config).stages(Placement.split(1, 4), 1)
    cycles = sum(stage.of("compute_flops", 0) + stage.of("backward_flops", 0) for stage in flops)
    assert made.seconds == pytest.approx(cycles / 4e6, rel=1e-3)
    assert made.equal_s == pytest.approx(cycles / 1e6, rel=1e-3)
    assert made.samples_per_s == pytest.approx(56 / made.seconds)
    assert made.equal_samples_per_s == pytest.approx(96 / made.equal_s)
    half = plan_batches(with_values(config, bandwidth_hz=1e12, deadline_s=made.equal_s / 2), draws=1)
    assert half.batches in ([16, 32, 32], [15, 31, 32], [15, 32, 32])


def test_regulated_rounds_are_shorter_and_batches_are_in_their_limits():
    for seed in range(3):
        cell = {"client_flops_per_s_range": (0.02e9, 5e9), "bandwidth_hz": 2e6, "seed": seed}
        config = with_values(Config(), scheme="merge-sfl", clients=8, batch=16, arch="cnn-small", **cell)
        made = plan_batches(config, draws=2)
        assert made.seconds < made.equal_s
        assert min(made.batches) >= 1 and max(made.batches) == 16
        within = plan_batches(with_values(config, deadline_s=0.7 * made.equal_s), draws=2)
        assert within.seconds <= 0.7 * made.equal_s
        assert min(within.batches) >= 1 and max(within.batches) <= 16
    with pytest.raises(SplitcastError, match="deadline_s: 1e-06; must be at least"):
        plan_batches(with_values(config, deadline_s=1e-6), draws=1)
