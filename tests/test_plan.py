"""Planning: what a plan says is what a training measures, and the best legal cut is the best legal cut."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lengths import now
from splitcast import data
from splitcast.allocate.allocate import allocate, equal_share
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.bench.allocate import instances
from splitcast.cli.main import main
from splitcast.cost.objective import gamma_per_cut, round_cost
from splitcast.cost.privacy import legal
from splitcast.cost.trace import Trace
from splitcast.model import build
from splitcast.run.loop import train
from splitcast.studies.compare import rows
from splitcast.studies.plan import SHAPES, plan
from splitcast.training.placement import Placement

QUICK = with_values(Config(), arch="cnn-small", clients=4, batch=4, rounds=4, local_steps=2)


@pytest.mark.parametrize("allocation", ["optimal", "equal"])
@pytest.mark.parametrize("scheme", now(["sfl-ga", "sfl", "epsl-cut", "sfl-gb", "fl", "sl"], "sfl-ga", "sfl-gb", "sl"))
@pytest.mark.parametrize("planned_from", now([1, 2], 2))
def test_a_plan_is_what_a_training_measures(scheme, allocation, planned_from):
    config = with_values(QUICK, scheme=scheme, cut=2, allocation=allocation)
    measured = train(config).rounds
    planned = plan(with_values(config, cut=planned_from), draws=4)
    row = next(row for row in planned.cuts if row.cut == measured[0].cut)
    assert row.latency_s == pytest.approx(np.mean([r.latency_s for r in measured]), rel=1e-9)
    assert row.up_bits == pytest.approx(8 * np.mean([r.up_bytes for r in measured]))
    assert row.down_bits == pytest.approx(8 * np.mean([r.down_bytes for r in measured]))
    assert sum(row.parts_s.values()) == pytest.approx(row.latency_s)
    assert {r.slowest_part for r in measured} <= set(row.parts_s)
    assert all(0 <= r.slowest_client < 4 for r in measured)


def test_more_seconds_in_the_same_bytes_when_the_band_shrinks():
    wide, narrow = (train(with_values(QUICK, bandwidth_hz=b)).summary for b in (20e6, 1e6))
    assert narrow["latency_s"] > wide["latency_s"]
    assert narrow["up_bytes"] == wide["up_bytes"]
    assert narrow["accuracy"] == wide["accuracy"]


def test_the_cheapest_allowed_cut_is_the_best():
    free = plan(QUICK, draws=5)
    costs = {row.cut: row.gamma + row.latency_s for row in free.cuts}
    assert {row.cut: row.objective for row in free.cuts} == pytest.approx(costs)
    assert free.best.cut == min(costs, key=costs.__getitem__)
    bound = with_values(QUICK, epsilon=free.cuts[1].privacy)
    assert [row.allowed for row in plan(bound, draws=5).cuts] == [False, True, True, True]
    assert plan(bound, draws=5).best.cut == min([2, 3, 4], key=costs.__getitem__)
    forced = with_values(QUICK, gamma=[9.0, 9.0, 0.0, 9.0], gamma_weight=1000.0)
    assert plan(forced, draws=5).best.cut == 3


def test_shares_of_the_clients_add_up():
    planned = plan(with_values(QUICK, scheme="sfl"), draws=2)
    assert sum(c.uplink_hz for c in planned.clients) == pytest.approx(20e6)
    assert sum(c.downlink_hz for c in planned.clients) == pytest.approx(20e6)
    assert sum(c.server_flops_per_s for c in planned.clients) == pytest.approx(100e9)
    for client in planned.clients:
        assert sum(client.parts_s.values()) + client.waiting_s == pytest.approx(float(planned.optimal.seconds))
        assert client.waiting_s >= -1e-9
    assert float(planned.optimal.seconds) <= float(planned.equal.seconds)


def all_equal(**problem):
    """An allocator of a user's."""
    return equal_share(**problem)


def test_shares_are_those_of_the_allocator_that_was_asked():
    own, equal = (plan(with_values(QUICK, allocation=name), draws=2) for name in (f"{__name__}:all_equal", "equal"))
    assert own.clients == equal.clients != plan(QUICK, draws=2).clients
    assert own.cuts == equal.cuts


def test_privacy_by_hand():
    model = build("cnn", (1, 28, 28), 10, seed=0)
    placements = [Placement.split(cut, model.depth) for cut in model.cuts]

    def allowed_cuts(epsilon):
        kept = legal(model, placements, epsilon)
        return [placement.cut for placement, good in zip(placements, kept, strict=True) if good]

    # log(1 + 832/1725194) = 0.000482148..., log(1 + 52096/1725194) = 0.0297502...
    assert allowed_cuts(0.0) == [1, 2, 3, 4]
    assert allowed_cuts(0.00048) == [1, 2, 3, 4]
    assert allowed_cuts(0.00049) == allowed_cuts(0.02975) == [2, 3, 4]
    with pytest.raises(SplitcastError, match=r"epsilon: 0.7 leaves no cut; the largest feasible value is 0.692773"):
        allowed_cuts(0.7)
    assert allowed_cuts(0.692773) == [4]


def test_objective_by_hand():
    gamma = gamma_per_cut([0.5, 2.0], [0.1, 0.9])
    assert round_cost(gamma, np.array([[3.0, 1.0], [0.0, 0.0]]), 2.0).tolist() == [[4.0, 5.0], [1.0, 4.0]]
    assert gamma_per_cut([], [0.1, 0.9]).tolist() == [0.1, 0.9]
    with pytest.raises(SplitcastError, match="gamma: 3 numbers for 2 cuts; give 2"):
        gamma_per_cut([1.0, 2.0, 3.0], [0.1, 0.9])


def test_a_trace_stands_in_for_the_channel(tmp_path):
    Trace(np.full((3, 4), 1e-10)).save(tmp_path / "t.csv")
    planned = plan(with_values(QUICK, trace=str(tmp_path / "t.csv")), draws=100)
    assert planned.draws == 3
    assert [c.gain_db for c in planned.clients] == pytest.approx([-100] * 4)
    assert planned.clients[0].distance_m is None
    assert planned.best.latency_s == pytest.approx(float(planned.optimal.seconds))


def test_shapes_are_those_of_the_data():
    images = data.load("mnist-mini")
    assert SHAPES["mnist-mini"] == (tuple(images.train_x.shape[1:]), images.classes)
    assert list(SHAPES) == list(data.NAMES)


def test_the_bench_solves_the_papers_first_cut():
    up, _ = plan(Config(), draws=1).optimal.stages
    given = instances(clients=10, count=1)
    assert up.stage.uplink_bits == given["uplink_bits"]
    assert up.stage.server_flops == pytest.approx(given["server_flops"])
    assert float(up.seconds) == pytest.approx(float(allocate(**given).value_s[0]), rel=1e-9)


def quick_flags(*more):
    return ["--arch", "cnn-small", "--clients", "4", "--batch", "4", "--draws", "3", *more]


def test_plan_on_the_command_line(capsys, tmp_path, monkeypatch):
    main(["plan", *quick_flags("--json", "--input-shape", "1", "16", "16", "--classes", "3", "--out", str(tmp_path))])
    made = json.loads(capsys.readouterr().out)
    model = build("cnn-small", (1, 16, 16), 3, seed=0)
    assert made["best_cut"] == plan(with_values(QUICK, local_steps=1), 3, model, classes=3).best.cut
    assert made["cuts"][0]["up_bits"] == 4 * 8 * (4 * 4 * (4 * 8 * 8) + 4)
    assert [row["cut"] for row in made["cuts"]] == [1, 2, 3, 4] and len(made["clients"]) == 4
    assert (tmp_path / "gantt.png").stat().st_size > 10_000
    assert "</svg>" in (tmp_path / "gantt.svg").read_text()
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", *quick_flags("--scheme", "fl", "--out", str(tmp_path))])
    shown = capsys.readouterr().out
    assert "→ all" in shown and max(map(len, shown.splitlines())) <= 80


def test_a_cut_that_does_not_fit_is_named_with_what_it_needs(capsys, tmp_path):
    """Two of the four, by the second least of what they need; also where a terminal has no styles."""
    main(["plan", *quick_flags("--json", "--out", str(tmp_path))])
    needs = {row["cut"]: sum(row["memory"].values()) / 1e9 for row in json.loads(capsys.readouterr().out)["cuts"]}
    room = sorted(needs.values())[1]
    main(["plan", *quick_flags("--client-memory-gb", str(room), "--out", str(tmp_path))])
    shown = capsys.readouterr().out
    for cut, need in needs.items():
        said = f"ruled out: cut {cut}, needs {need:.3g} GB of the {room:g} GB of a client"
        assert (said in shown) == (f"✗ {cut}" in shown) == (need > room)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--epsilon", "0.7"], "epsilon: 0.7 leaves no cut"),
        (["--draws", "0"], "draws: 0"),
        (["--gamma", "1", "2"], "gamma: 2 numbers for 4 cuts"),
        (["--bandwidth-hz", "-5"], "bandwidth_hz"),
        (["--dataset", "imagenet"], "dataset: unknown 'imagenet'"),
        (["--out", "/dev/null/x"], "out: cannot write to /dev/null/x"),
    ],
)
def test_bad_plans_are_one_line(capsys, tmp_path, flags, words):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *quick_flags("--out", str(tmp_path / "p"), *flags)])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1 and words in captured.err


def test_comparisons_know_the_seconds_to_the_target():
    records = train(with_values(QUICK, eval_every=2)).rounds
    target, (row,) = rows({"sfl-ga": [records]})
    assert row.seconds == pytest.approx(sum(r.latency_s for r in records))
    hit = next(k for k, r in enumerate(records) if (r.test_accuracy or 0) >= target)
    assert row.seconds_to_target == pytest.approx(sum(r.latency_s for r in records[: hit + 1]))
    assert rows({"sfl-ga": [records]}, target=1.0)[1][0].seconds_to_target is None
    assert rows({"sfl-ga": [[replace(r, test_accuracy=0.29) for r in records]]})[0] == 0.29
