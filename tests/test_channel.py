"""Cell and channel: numbers worked out by hand, traces that come back bit by bit, and one line for bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitcast.base.config import NetworkConfig
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.cost.cell import Cell, cell
from splitcast.cost.channel import channel, fade, path_gain, place, record
from splitcast.cost.trace import Trace


def test_the_default_cell_is_the_papers_in_si_units():
    made = cell(NetworkConfig(), clients=3, seed=0)
    assert made.bandwidth_hz == 20e6
    assert made.noise_w_per_hz == pytest.approx(10**-20.4)  # -174 dBm = -204 dBW
    assert made.server_power_w == pytest.approx(1.99526, rel=1e-5)
    assert made.client_power_w == pytest.approx([0.316228] * 3, rel=1e-5)
    assert made.client_flops_per_s.tolist() == [1e8] * 3
    assert made.server_flops_per_s == 1e11


def test_path_loss_by_hand():
    # 128.1 dB at 1 km, 37.6 dB less per factor of ten
    assert -10 * np.log10(path_gain(np.array([1000.0, 100.0, 10.0]))) == pytest.approx([128.1, 90.5, 52.9])


def test_clients_are_spread_evenly_over_the_disc():
    distance = place(NetworkConfig(radius_m=300, min_distance_m=100), clients=40_000, seed=1)
    assert distance.min() >= 100 and distance.max() <= 300
    # evenly by area: the ring out to 200 m holds (200^2 - 100^2) / (300^2 - 100^2) = 3/8 of them
    assert (distance < 200).mean() == pytest.approx(3 / 8, abs=0.01)


def test_fading_is_exponential_with_mean_one_and_new_every_round():
    made = channel(NetworkConfig(distance_m=(100.0,)), clients=20_000, seed=0)
    h = made.at(7) / path_gain(100.0)
    assert h.mean() == pytest.approx(1, abs=0.03)
    assert (h > 1).mean() == pytest.approx(np.exp(-1), abs=0.015)
    assert abs(np.corrcoef(made.at(7), made.at(8))[0, 1]) < 0.03
    assert fade(np.ones(2), np.random.default_rng(0), (5, 3)).shape == (5, 3, 2)


def test_a_round_is_a_pure_function_of_seed_and_round():
    one, two = (channel(NetworkConfig(), clients=4, seed=3) for _ in range(2))
    later = [one.at(t) for t in range(1, 10)][-1]
    assert np.array_equal(two.at(9), later)
    assert not np.array_equal(channel(NetworkConfig(), clients=4, seed=4).at(9), later)


def test_shadowing_moves_clients_apart_once_and_leaves_positions_alone():
    plain = channel(NetworkConfig(), clients=3000, seed=0)
    shadowed = channel(NetworkConfig(shadowing_db=8.0), clients=3000, seed=0)
    ratio_db = 10 * np.log10(shadowed.at(1) / plain.at(1))
    assert ratio_db.std() == pytest.approx(8, rel=0.05)
    assert 10 * np.log10(shadowed.at(2) / plain.at(2)) == pytest.approx(ratio_db)
    assert np.array_equal(plain.distance_m, shadowed.distance_m)


def test_clients_differ_by_list_or_by_range():
    made = cell(NetworkConfig(client_flops_per_s=(1e8, 3e8), client_power_dbm=20.0), clients=2, seed=0)
    assert made.client_flops_per_s.tolist() == [1e8, 3e8]
    assert made.client_power_w == pytest.approx([0.1, 0.1])
    drawn = cell(
        NetworkConfig(client_flops_per_s_range=(1e8, 2e8), client_power_dbm_range=(10.0, 20.0)), clients=2000, seed=0
    )
    assert drawn.client_flops_per_s.min() >= 1e8 and drawn.client_flops_per_s.max() <= 2e8
    assert drawn.client_flops_per_s.mean() == pytest.approx(1.5e8, rel=0.02)
    assert drawn.client_power_w.min() >= 0.01 and drawn.client_power_w.max() <= 0.1
    assert abs(np.corrcoef(drawn.client_flops_per_s, drawn.client_power_w)[0, 1]) < 0.06
    assert place(NetworkConfig(distance_m=(50.0, 60.0)), 2, seed=0).tolist() == [50.0, 60.0]


gains = st.floats(1e-300, 1e300)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rounds=st.integers(1, 4), clients=st.integers(1, 3))
def test_a_trace_comes_back_bit_by_bit(tmp_path_factory, data, rounds, clients):
    values = data.draw(st.lists(gains, min_size=rounds * clients, max_size=rounds * clients))
    trace = Trace(np.array(values).reshape(rounds, clients))
    file = tmp_path_factory.mktemp("trace") / "t.csv"
    trace.save(file)
    assert np.array_equal(Trace.load(file, clients).gains, trace.gains)


def test_a_recorded_channel_is_replayed(tmp_path):
    model = channel(NetworkConfig(), clients=3, seed=5)
    trace = record(model, rounds=4)
    trace.save(tmp_path / "t.csv")
    replayed = channel(NetworkConfig(trace=str(tmp_path / "t.csv")), clients=3, seed=99)
    assert np.array_equal(replayed.at(4), model.at(4))
    assert np.array_equal(trace.distance_m, model.distance_m)
    with pytest.raises(SplitcastError, match=r"trace: has rounds 1..4, not round 5"):
        replayed.at(5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,client,gain\n1,0,1e-9\n1,1,0\n", "line 3: gain 0 in round 1, client 1; must be finite and > 0"),
        ("round,client,gain\n1,0,nan\n", "line 2: gain nan in round 1, client 0"),
        ("round,client,gain\n1,0,-1e-9\n", "line 2: gain -1e-09 in round 1, client 0"),
        ("round,client,gain\n1,0,inf\n", "line 2: gain inf"),
        ("round,client,gain\n1,0,1\n1,1,1\n3,0,1\n3,1,1\n", "has no gain for round 2, client 0"),
        ("round,client,gain\n1,0,1\n1,1,1\n2,0,1\n", "has no gain for round 2, client 1"),
        ("round,client,gain\n1,0,1\n2,0,1\n", "has 1 clients, not 2"),
        ("round,client,gain\n1,0,1\n1,0,2\n", "line 3: round 1, client 0 is there twice"),
        ("round,client,gain\n0,0,1\n", "line 2: round 0, client 0; rounds start at 1"),
        ("round,client,gain\none,0,1\n", "line 2 is 'one,0,1'"),
        ("round,client,gain\n1,0\n", "line 2 is '1,0'"),
        ("client,round,gain\n", "line 1 is 'client,round,gain'; must be 'round,client,gain'"),
        ("round,client,gain\n", "has no rows"),
        ("", "has no rows"),
    ],
)
def test_bad_traces_name_the_fault(tmp_path, text, message):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(SplitcastError) as caught:
        Trace.load(file, clients=2)
    assert message in str(caught.value)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "field", ["bandwidth_hz", "noise_w_per_hz", "server_power_w", "server_flops_per_s", "client_power_w"]
)
def test_a_cell_without_resources_is_refused(field, bad):
    good = {
        "bandwidth_hz": 1e6,
        "noise_w_per_hz": 1e-20,
        "server_power_w": 1.0,
        "server_flops_per_s": 1e9,
        "client_power_w": np.ones(2),
        "client_flops_per_s": np.ones(2),
    }
    values = good | {field: np.array([1.0, bad]) if field == "client_power_w" else bad}
    with pytest.raises(SplitcastError, match=rf"{field}.*must be finite and > 0"):
        Cell(**values)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bandwidth-hz", "0"], ["bandwidth_hz", "greater than 0"]),
        (["--bandwidth-hz", "nan"], ["bandwidth_hz", "finite"]),
        (["--client-flops-per-s", "1e8", "-1"], ["client_flops_per_s", "greater than 0"]),
        (["--client-flops-per-s", "1e8", "1e8"], ["client_flops_per_s", "2 numbers for 3 clients", "1 or 3"]),
        (["--client-power-dbm", "inf"], ["client_power_dbm", "inf"]),
        (["--server-power-dbm", "nan"], ["server_power_dbm", "finite"]),
        (["--client-power-dbm-range", "30", "20"], ["client_power_dbm_range", "lowest"]),
        (["--client-flops-per-s-range", "1e8"], ["client_flops_per_s_range", "lowest"]),
        (["--min-distance-m", "600"], ["min_distance_m", "radius_m"]),
        (["--distance-m", "0"], ["distance_m", "greater than 0"]),
        (["--workload", "measured"], ["workload", "profiled, paper"]),
        (["--allocation", "best"], ["allocation", "optimal, equal"]),
        (["--epsilon", "0.7"], ["epsilon", "largest feasible value is 0.68"]),
        (["--epsilon", "0.1"], ["cut", "1", "[3, 4]"]),
        (["--trace", "absent.csv"], ["trace", "absent.csv", "No such file"]),
    ],
)
def test_bad_networks_are_one_line_and_exit_2(capsys, tmp_path, flags, words):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        main(["train", "--arch", "cnn-small", "--rounds", "2", "--clients", "3", "--out", str(out), *flags])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and not out.exists()
    assert len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_a_trace_that_is_too_short_is_refused_before_training(capsys, tmp_path):
    record(channel(NetworkConfig(), clients=3, seed=0), rounds=4).save(tmp_path / "t.csv")
    flags = ["--arch", "cnn-small", "--clients", "3", "--rounds", "5", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        main(["train", *flags, "--trace", str(tmp_path / "t.csv")])
    assert stop.value.code == 2
    assert "trace: has rounds 1..4, not round 5" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
