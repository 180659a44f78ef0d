"""Rounds with a deadline: who is admitted, what is recorded, what it does to a training."""

import json
from itertools import combinations

import numpy as np
import pytest

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.cost.clock import time_rounds
from splitcast.cost.deadline import taking_part
from splitcast.run.loop import train
from splitcast.run.parts import load_data, make_simulator
from splitcast.run.records import RunFolder
from splitcast.studies.compare import rows
from splitcast.studies.plan import plan, scenario_of
from splitcast.studies.report.clients import breakdown
from splitcast.studies.results import read_rows

CELL = {"clients": 5, "arch": "cnn-small", "batch": 8, "rounds": 4, "eval_every": 2, "fading": "none"}
FAR = with_values(Config(), **CELL, bandwidth_hz=2e6, distance_m=(40, 400, 80, 1500, 2500))


def seconds(scenario, t, who):
    stages = scenario.stages(scenario.place(1), t, list(who))
    return float(time_rounds([stages], scenario.cell, scenario.conditions([t])[0], scenario.allocator)[0].seconds)


@pytest.mark.parametrize("allocation", ["optimal", "equal"])
@pytest.mark.parametrize("share", [0.15, 0.4, 0.8])
def test_as_many_as_can_be_done_in_time_are_admitted(allocation, share):
    everyone = scenario_of(with_values(FAR, allocation=allocation))
    limit = share * seconds(everyone, 1, range(5))
    scenario = scenario_of(with_values(FAR, allocation=allocation, deadline_s=limit))
    sets = [who for k in range(1, 6) for who in combinations(range(5), k) if seconds(scenario, 1, who) <= limit]
    found = taking_part(scenario, scenario.place(1), 1).tolist()
    assert len(found) == max(len(who) for who in sets) < 5
    assert tuple(found) in sets


def test_a_generous_deadline_changes_nothing_and_one_client_always_stays():
    plain, generous, hopeless = (train(with_values(FAR, deadline_s=limit)) for limit in (0.0, 1e9, 1e-9))
    assert [r.latency_s for r in plain.rounds] == [r.latency_s for r in generous.rounds]
    assert [r.loss for r in plain.rounds] == [r.loss for r in generous.rounds]
    assert {r.metrics["late"] for r in generous.rounds} == {0} and generous.summary["outage"] == 0
    assert "late" not in plain.rounds[0].metrics and "outage" not in plain.summary
    assert [r.clients for r in hopeless.rounds] == [1] * 4 and hopeless.summary["outage"] == 1
    assert hopeless.summary["late"] == 4


def test_a_training_leaves_the_late_out_and_scales_the_others_up(tmp_path):
    scenario = scenario_of(FAR)
    limit = 0.5 * seconds(scenario, 1, range(5))
    config = with_values(FAR, deadline_s=limit)
    result = train(config, tmp_path / "run")
    who = taking_part(scenario_of(config), scenario.place(1), 1)
    assert 1 <= len(who) < 5
    assert all(r.latency_s <= limit and r.clients == len(who) for r in result.rounds)  # without fading rounds are alike
    by_hand = make_simulator(FAR, load_data(FAR))
    losses = [by_hand.round(t, who=who).loss for t in range(1, 5)]
    assert [r.loss for r in result.rounds] == losses
    assert result.rounds[0].metrics["late"] == 5 - len(who)
    parts = breakdown(config, RunFolder(tmp_path / "run").rounds())
    assert parts.mismatch < 1e-9
    assert [n for n in range(5) if parts.joules[n] > 0] == who.tolist()


def test_comparisons_and_tables_tell_the_outage(tmp_path, capsys):
    """A deadline between the seconds of two clients and of one: rounds of one client that is late are missed."""
    words = f"--arch cnn-small --clients 2 --batch 4 --rounds 3 --deadline-s 1e-9 --out {tmp_path}"
    main(["compare", "psl", "--quiet", *words.split()])
    said = capsys.readouterr().out
    assert "outage" in said and "100.0%" in said
    (row,) = read_rows(tmp_path)
    assert row["outage"] == 1 and row["round_median_s"] <= row["round_p95_s"] <= row["seconds"]
    records = RunFolder(tmp_path / "psl").rounds()
    assert row["joules"] == pytest.approx(sum(r.metrics["energy_j"] for r in records)) and row["client_mb"] > 0
    ((found,), (free,)) = (rows({"psl": [records]}, 0.1, deadline_s=s)[1] for s in (records[0].latency_s, 0.0))
    assert found.outage == sum(r.latency_s > records[0].latency_s for r in records) / 3 and free.outage is None


def test_a_resumed_run_leaves_out_the_same_clients(tmp_path):
    fading = with_values(FAR, fading="block", rounds=6)
    config = with_values(fading, deadline_s=plan(fading, draws=6).cuts[0].median_s)
    whole = train(config).rounds
    train(with_values(config, rounds=3), tmp_path / "run")
    again = train(config, tmp_path / "run", resume=True).rounds
    assert [(r.clients, r.loss, r.metrics) for r in again] == [(r.clients, r.loss, r.metrics) for r in whole]
    assert len({r.clients for r in whole}) > 1


def test_a_plan_counts_the_rounds_that_would_be_late():
    config = with_values(FAR, fading="block")
    free = plan(config, draws=60).cuts[0]
    assert free.outage is None
    found = plan(with_values(config, deadline_s=free.median_s), draws=60)
    assert found.cuts[0].outage == pytest.approx(0.5)
    assert free.median_s < free.p95_s and free.median_s < free.latency_s
    json.dumps(found.as_json())


def test_a_bad_deadline_is_refused():
    with pytest.raises(SplitcastError, match="deadline_s"):
        with_values(FAR, deadline_s=-1.0)


def test_a_policy_knows_who_will_be_late():
    limit = 0.5 * seconds(scenario_of(FAR), 1, range(5))
    records = train(with_values(FAR, deadline_s=limit, policy="greedy", rounds=3)).rounds
    assert all(r.latency_s <= limit * (1 + 1e-9) for r in records)
    assert np.ptp([r.cut for r in records]) == 0
