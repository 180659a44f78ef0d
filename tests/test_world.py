"""How the cell changes: processes against their closed forms, path loss against the tables, and resume to the bit."""

import numpy as np
import pytest

from splitcast.base.config import Config, NetworkConfig, WorldConfig, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Cell
from splitcast.cost.channel import channel
from splitcast.cost.clock import time_rounds
from splitcast.cost.conditions import Conditions
from splitcast.cost.pathloss import URBAN, path_gain
from splitcast.cost.processes import Clarke, GaussMarkov, OnOff, Waypoint, bessel_j0
from splitcast.cost.stages import Stage
from splitcast.cost.varying import background_load, sampled
from splitcast.run.loop import train

QUICK = with_values(Config(), arch="cnn-small", clients=3, batch=4, rounds=6, checkpoint_every=2, eval_every=6)


def test_bessel_against_its_table():
    # Abramowitz and Stegun, Table 9.1
    assert [bessel_j0(x) for x in (0, 1, 2, 5, 10)] == pytest.approx(
        [1, 0.7651976866, 0.2238907791, -0.1775967713, -0.2459357645], abs=1e-9
    )


def lagged(process, rounds, clients=20_000):
    """E[h_t h*_1] over many clients, t = 1..T."""
    states = sampled(process, np.random.default_rng(0), 1, rounds)
    if isinstance(process, Clarke):
        states = [np.exp(1j * s[..., 0]).sum(-1) / np.sqrt(s.shape[-2]) for s in states]
    return [np.mean(states[0] * s.conj()).real for s in states]


def test_gauss_markov_forgets_geometrically():
    assert lagged(GaussMarkov(20_000, 0.9), 6) == pytest.approx([0.9**k for k in range(6)], abs=0.03)
    power = GaussMarkov(20_000, 0.9)
    first, *_, third = (power.value(s)[0] for s in sampled(power, np.random.default_rng(1), 1, 3))
    assert first.mean() == pytest.approx(1, abs=0.03) and (third > 1).mean() == pytest.approx(np.exp(-1), abs=0.015)
    assert np.corrcoef(first, third)[0, 1] == pytest.approx(0.9**4, abs=0.03)  # r^(2k), k = 2


def test_jakes_fading_has_bessels_autocorrelation():
    doppler = 0.15
    expected = [bessel_j0(2 * np.pi * doppler * k) for k in range(8)]
    assert min(expected) < -0.3  # it swings through zero, as no first-order chain does
    assert lagged(Clarke(20_000, doppler), 8) == pytest.approx(expected, abs=0.03)
    made = Clarke(20_000, doppler)
    power = made.value(made.start(np.random.default_rng(0), ()))
    assert power.mean() == pytest.approx(1, abs=0.03) and (power > 1).mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_the_fading_of_a_channel_is_correlated_as_its_doppler_says():
    world = WorldConfig(fading="gauss-markov", doppler_hz=0.05, interval_s=2.0)
    made = channel(NetworkConfig(distance_m=100.0), 20_000, 0, world)
    r = bessel_j0(2 * np.pi * 0.1)
    assert np.corrcoef(made.at(3), made.at(4))[0, 1] == pytest.approx(r**2, abs=0.03)


def test_holding_times_of_a_blockage():
    chain = OnOff(50, common=False, on_rounds=8, off_rounds=4, off=0.001)
    states = np.stack(sampled(chain, np.random.default_rng(0), 40, 600))  # (T, E, N)
    assert states.mean() == pytest.approx(4 / 12, abs=0.01)  # stationary from the first round on
    assert states[0].mean() == pytest.approx(4 / 12, abs=0.03)
    leaves = (states[:-1] & ~states[1:]).sum() / states[:-1].sum()
    enters = (~states[:-1] & states[1:]).sum() / (~states[:-1]).sum()
    assert (1 / leaves, 1 / enters) == pytest.approx((4, 8), rel=0.03)
    assert set(np.unique(chain.value(states[0]))) == {0.001, 1.0}


def test_states_have_numbers_and_their_chain_a_matrix():
    chain = OnOff(2, common=False, on_rounds=4, off_rounds=2, off=0.1)
    assert [chain.code(chain.decode(k)) for k in range(4)] == [0, 1, 2, 3]
    matrix = chain.transitions()
    assert matrix.sum(1) == pytest.approx(np.ones(4))
    assert matrix[0].tolist() == pytest.approx([0.75**2, 0.25 * 0.75, 0.75 * 0.25, 0.25**2])
    assert matrix[1, 2] == pytest.approx(0.5 * 0.25)  # client 0 is free again, client 1 blocked
    alone = OnOff(2, common=True, on_rounds=4, off_rounds=2, off=0.1)
    assert alone.value(alone.decode(1)).tolist() == [0.1, 0.1]
    drawn = np.stack([alone.code(s) for s in sampled(alone, np.random.default_rng(0), 2000, 50)])
    seen = np.array([[np.mean(drawn[1:][drawn[:-1] == a] == b) for b in (0, 1)] for a in (0, 1)])
    assert seen == pytest.approx(alone.transitions(), abs=0.01)


def test_who_walks_stays_in_the_disc_and_strides_as_fast_as_told():
    walk = Waypoint(np.full(500, 100.0), 10.0, 200.0, stride_m=5.0)
    states = np.stack(sampled(walk, np.random.default_rng(0), 1, 300))[:, 0]
    steps = np.linalg.norm(np.diff(states[..., :2], axis=0), axis=-1)
    assert steps.max() <= 5 + 1e-9 and np.median(steps) == pytest.approx(5)
    distance = walk.value(states)
    assert distance.min() >= 10 and distance.max() <= 200
    # the waypoint's density vanishes at the rim: nearer to the centre than evenly spread points, whose mean is 2/3 R
    assert distance[100:].mean() < 0.9 * 2 / 3 * 200


@pytest.mark.parametrize("stride", [50.0, 3e4])
def test_a_walk_begins_as_it_goes_on(stride):
    """Where 20,000 are in the first round and where they are in the fifth have the same law; with long strides too."""
    walk = Waypoint(np.full(20_000, 100.0), 10.0, 200.0, stride_m=stride)
    distance = [np.sort(walk.value(one)[0]) for one in sampled(walk, np.random.default_rng(0), 1, 5)]
    assert distance[0].mean() == pytest.approx(distance[4].mean(), rel=0.02)
    assert np.abs(distance[0] - distance[4]).max() < 6  # quantile by quantile


def test_a_stride_goes_on_beyond_the_point_that_was_aimed_at():
    """Ways between points of a disc are 128 R / 45π long in the mean, so that one in 181 m / 50 m strides ends one."""
    walk = Waypoint(np.full(4000, 100.0), 1e-3, 200.0, stride_m=50.0)
    aims = np.stack(sampled(walk, np.random.default_rng(0), 1, 60))[:, 0, :, 2:]
    ended = (np.abs(np.diff(aims, axis=0)).max(-1) > 0).mean()
    assert ended == pytest.approx(50 / (128 * 200 / (45 * np.pi)), rel=0.03)


@pytest.mark.parametrize(
    ("network", "world", "words"),
    [
        ({"shadowing_db": 8.0}, {"path_loss": "uma"}, "shadowing_db: 8, but uma has shadows of its own"),
        ({"distance_m": (100.0,)}, {"walk_m_per_s": 1.0}, "distance_m: given, but with walk_m_per_s"),
        ({"distance_m": (6000.0,)}, {"path_loss": "umi"}, "distance_m: 6000, but umi holds up to 5000 m"),
        ({"radius_m": 9000.0}, {"path_loss": "umi", "walk_m_per_s": 1.0}, "distance_m: 9000, but umi holds"),
    ],
)
def test_what_would_be_ignored_is_refused(network, world, words):
    with pytest.raises(SplitcastError, match=words):
        channel(NetworkConfig(**network), 3, 0, WorldConfig(**world))


@pytest.mark.parametrize(
    ("cell", "distance", "los", "nlos", "sight"),
    [
        # by hand from Tables 7.4.1-1 and 7.4.2-1 at 3.5 GHz, terminal at 1.5 m.
        # uma: d3 = hypot(100, 23.5) = 102.724; 28 + 22 log10 d3 + 20 log10 3.5; 13.54 + 39.08 log10 d3 + 10.881
        ("uma", 100.0, 83.137, 103.037, 0.18 + 0.82 * np.exp(-100 / 63)),
        # beyond d_BP = 4·24·0.5·3.5e9/3e8 = 560 m: 28 + 40 log10 1000.276 + 10.881 − 9 log10(560² + 23.5²)
        ("uma", 1000.0, 109.411, 141.666, 0.018 + 0.982 * np.exp(-1000 / 63)),
        # umi: d3 = hypot(100, 8.5) = 100.361; 32.4 + 21 log10 d3 + 10.881; 22.4 + 35.3 log10 d3 + 21.3 log10 3.5
        ("umi", 100.0, 85.314, 104.644, 0.18 + 0.82 * np.exp(-100 / 36)),
        # beyond d_BP = 4·9·0.5·3.5e9/3e8 = 210 m: 32.4 + 40 log10 500.072 + 10.881 − 9.5 log10(210² + 8.5²)
        ("umi", 500.0, 107.114, 129.264, 0.036 + 0.964 * np.exp(-500 / 36)),
        ("umi", 15.0, 32.4 + 21 * np.log10(np.hypot(15, 8.5)) + 10.8814, None, 1.0),
    ],
)
def test_urban_path_loss_by_hand(cell, distance, los, nlos, sight):
    model, d = URBAN[cell], np.array([distance])
    assert model.los_db(d, 3.5) == pytest.approx([los], abs=2e-3)
    assert nlos is None or model.nlos_db(d, 3.5) == pytest.approx([nlos], abs=2e-3)
    assert model.sight(d) == pytest.approx([sight])
    middle = model.gain(d, 3.5, np.array([0.0]), np.array([0.0]))  # sees the server, no shadow
    assert -10 * np.log10(middle) == pytest.approx([los], abs=2e-3)


def test_urban_channels_see_the_server_as_often_as_the_table_says():
    made = channel(NetworkConfig(distance_m=100.0), 20_000, 0, WorldConfig(path_loss="umi", fading="none"))
    loss = -10 * np.log10(made.at(1))
    sight = float(URBAN["umi"].sight(np.array(100.0)))
    mean = sight * 85.314 + (1 - sight) * 104.644
    assert loss.mean() == pytest.approx(mean, abs=0.3) and np.array_equal(made.at(1), made.at(7))


def test_blockage_is_so_many_decibels():
    world = WorldConfig(fading="none", blockage="common", blockage_db=20, blocked_rounds=2, clear_rounds=2)
    made = channel(NetworkConfig(distance_m=(100.0, 200.0)), 2, 1, world)
    gains = np.stack([made.at(t) for t in range(1, 40)])
    clear = path_gain(np.array([100.0, 200.0]))
    blocked = np.array([made.state(t) for t in range(1, 40)])
    assert set(blocked) == {0, 1}
    assert gains == pytest.approx(clear * 0.01 ** blocked[:, None])


def test_rounds_are_functions_of_seed_and_round():
    world = WorldConfig(path_loss="uma", fading="jakes", walk_m_per_s=2, blockage="each", load="each")
    one, two = (channel(NetworkConfig(), 4, 3, world) for _ in range(2))
    later = [one.at(t) for t in range(1, 10)][-1]
    assert np.array_equal(two.at(9), later)
    assert np.array_equal(two.at(2), one.at(2)) and not np.array_equal(one.at(2), later)
    assert not np.array_equal(channel(NetworkConfig(), 4, 4, world).at(9), later)
    assert one.distance_m is None
    load, again = (background_load(world, 4, 3) for _ in range(2))
    assert np.array_equal(again.at(30), [load.at(t) for t in range(1, 31)][-1])


def test_sampled_rounds_are_as_those_of_a_training():
    world = WorldConfig(fading="gauss-markov", blockage="common", blockage_db=10)
    made = channel(NetworkConfig(distance_m=100.0), 2, 0, world)
    met = made.sample(np.random.default_rng(0), 4000, 3, first=1)
    assert met.gains.shape == (4000, 3, 2) and (met.state[:, 0] == 1).all()
    assert met.state[:, 1].mean() == pytest.approx(0.9, abs=0.02)
    assert met.gains[:, 0].mean() / path_gain(100.0) == pytest.approx(0.1, rel=0.05)


def test_a_busy_client_takes_longer():
    cell = Cell(1e6, 1e-12, 1.0, 1e9, np.ones(2), np.full(2, 1e6))
    met = Conditions(np.ones((2, 2)), np.array([[1.0, 1.0], [1.0, 0.25]]), np.zeros(2, dtype=int))
    (timed,) = time_rounds([[Stage("forward", (0, 1), compute_flops=2e6)]], cell, met)
    assert timed.seconds.tolist() == [2.0, 8.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fading": "slow"}, "fading: unknown 'slow'"),
        ({"blockage": "some"}, "blockage: unknown 'some'"),
        ({"path_loss": "rural"}, "path_loss: unknown 'rural'"),
        ({"load": "heavy"}, "load: unknown 'heavy'"),
        ({"blockage": "common", "trace": "x.csv"}, "channel: a trace says how gains change"),
    ],
)
def test_what_is_not_there_is_refused(values, message):
    with pytest.raises(SplitcastError, match=message):
        train(with_values(QUICK, **values))


def test_a_training_in_a_changing_world_resumes_to_the_bit(tmp_path):
    config = with_values(
        QUICK, fading="gauss-markov", blockage="each", blocked_rounds=2, clear_rounds=2, walk_m_per_s=3, load="each"
    )
    whole = train(config)
    train(with_values(config, rounds=4), tmp_path / "run")
    resumed = train(config, tmp_path / "run", resume=True)
    assert [r.latency_s for r in resumed.rounds] == [r.latency_s for r in whole.rounds]
    assert len({r.latency_s for r in whole.rounds}) == 6
