"""Sweeps: what is trained, that it goes on after kill -9, and its tables."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest

import splitcast
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from splitcast.studies.results import Estimate, as_latex, as_markdown, estimate, over_seeds, read_rows
from splitcast.studies.sweep.points import parse_axis, points, read_plan
from splitcast.studies.sweep.sweep import sweep
from waiting import wait_for

SMALL = with_values(Config(), arch="cnn-small", rounds=3, clients=3, batch=4, eval_every=3)
FLAGS = ["--arch", "cnn-small", "--clients", "3", "--batch", "4", "--eval-every", "1000"]


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(["sweep", *map(str, args)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def test_a_grid_is_every_combination_in_its_order():
    made = points(SMALL, dict(parse_axis(a) for a in ("scheme=sfl,psl", "seed=0..1", "sfl-gb.rank=4")))
    assert [p.name for p in made] == [
        "scheme=sfl,seed=0,sfl-gb.rank=4",
        "scheme=sfl,seed=1,sfl-gb.rank=4",
        "scheme=psl,seed=0,sfl-gb.rank=4",
        "scheme=psl,seed=1,sfl-gb.rank=4",
    ]
    assert made[3].config == with_values(SMALL, scheme="psl", seed=1, **{"sfl-gb.rank": 4})


def test_a_list_of_runs_and_a_grid_multiply_and_a_draw_takes_some(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text('[over]\nseed = [0, 1]\n[[runs]]\nscheme = "sfl"\nlr = 0.1\n[[runs]]\nscheme = "psl"\nlr = 0.2\n')
    over, runs = read_plan(file)
    made = points(SMALL, over, runs)
    assert [(p.config.split.scheme, p.config.train.lr, p.config.train.seed) for p in made] == [
        ("sfl", 0.1, 0),
        ("sfl", 0.1, 1),
        ("psl", 0.2, 0),
        ("psl", 0.2, 1),
    ]
    drawn = points(SMALL, {"seed": list(range(100))}, draw=5)
    assert len(drawn) == 5 and drawn == points(SMALL, {"seed": list(range(100))}, draw=5)
    assert drawn != points(with_values(SMALL, seed=1), {"seed": list(range(100))}, draw=5)


def test_bad_sweeps_are_refused_in_one_line(tmp_path, capsys):
    out = ["--out", tmp_path / "sweep"]
    assert "over: nothing to sweep" in refused(capsys, *out)
    assert "over: 'cut'; write an option and its values" in refused(capsys, "--over", "cut", *out)
    assert "over: 'depth' is no option; choose among dataset" in refused(capsys, "--over", "depth=1", *out)
    assert "lr: input should be greater than 0, got -1" in refused(capsys, "--over", "lr=-1", *out)
    assert "over: 4..1 is not a range" in refused(capsys, "--over", "seed=4..1", *out)
    assert "over: seed=1 stands for two runs" in refused(capsys, "--over", "seed=1,1", *out)
    assert "over: 1,000,000 runs; at most 100,000" in refused(capsys, "--over", "seed=0..999", "cut=0..999", *out)
    assert "on: unknown 'moon'" in refused(capsys, "--over", "seed=1", "--on", "moon", *out)
    bad = tmp_path / "bad.toml"
    bad.write_text("[over]\nseed = 3\n")
    assert "takes [over] with lists" in refused(capsys, "--plan", bad, *out)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.long
def test_runs_equal_single_trainings_and_a_failure_is_a_row(tmp_path):
    chosen = points(SMALL, {"scheme": ["sfl", "no-such"], "seed": [0, 1]})
    failed = sweep(chosen, tmp_path / "s", jobs=2)
    assert set(failed) == {"scheme=no-such,seed=0", "scheme=no-such,seed=1"}
    assert all("scheme: unknown 'no-such'" in reason for reason in failed.values())
    for point in chosen[:2]:
        alone = train(point.config).rounds
        assert RunFolder(tmp_path / "s" / point.name).rounds() == alone
    rows = read_rows(tmp_path / "s")
    assert [row["status"][:7] for row in rows] == ["done", "done", "scheme:", "scheme:"]
    merged = over_seeds(rows)
    assert [row["n"] for row in merged] == [2, 2]
    both = [row["accuracy"] for row in rows[:2]]
    assert merged[0]["accuracy"].mean == pytest.approx(sum(both) / 2)
    assert merged[0]["megabytes"].half == 0 and merged[1]["accuracy"] is None


@pytest.mark.long
def test_a_killed_sweep_ends_with_the_same_table(tmp_path, capsys):
    """kill -9 twice, at different times; nobody trains on behind its back."""
    over = ["--over", "scheme=sfl,sfl-ga", "seed=0..1", "--rounds", "15", "--checkpoint-every", "5", *FLAGS]
    command = [sys.executable, "-m", "splitcast", "sweep", *over, "--out", tmp_path / "killed", "--quiet"]
    for least, jobs in ((3, 2), (18, 1)):
        running = subprocess.Popen([*map(str, command), "--jobs", str(jobs)], stdout=subprocess.DEVNULL)
        wait_for(lambda n=least, p=running: _rounds(tmp_path / "killed") >= n or p.poll() is not None, 0.05)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        wait_for(lambda: not any(_locked(tmp_path / "killed" / name) for name in _runs()), 0.05)
    main([*map(str, command[3:]), "--jobs", "1"])
    capsys.readouterr()
    main(["sweep", *over, "--out", str(tmp_path / "whole"), "--quiet", "--jobs", "1"])
    for name in _runs():
        killed, whole = (tmp_path / folder / name / "rounds.jsonl" for folder in ("killed", "whole"))
        assert [r.loss for r in RunFolder(killed.parent).rounds()] == [r.loss for r in RunFolder(whole.parent).rounds()]
    for file in ("results.csv", "table.md", "table.tex"):
        assert (tmp_path / "killed" / file).read_text() == (tmp_path / "whole" / file).read_text()


def _runs():
    return [f"scheme={scheme},seed={seed}" for scheme in ("sfl", "sfl-ga") for seed in (0, 1)]


def _rounds(folder):
    return sum(len(file.read_bytes().splitlines()) for file in folder.glob("*/rounds.jsonl"))


def _locked(folder):
    if not folder.exists():
        return False
    try:
        with RunFolder(folder).lock():
            return False
    except SplitcastError:
        return True


def test_a_finished_sweep_trains_nothing_and_a_larger_one_only_what_is_new(tmp_path):
    out = tmp_path / "s"
    sweep(points(SMALL, {"seed": [0]}), out, jobs=1)
    before = (out / "seed=0/summary.json").stat().st_mtime_ns
    seen = []
    sweep(points(SMALL, {"seed": [0, 1]}), out, progress=lambda point, done: seen.append((point.name, done)))
    assert (out / "seed=0/summary.json").stat().st_mtime_ns == before
    assert ("seed=0", 3) in seen and len(read_rows(out)) == 2
    with pytest.raises(SplitcastError, match="seed=0 holds a run with another configuration"):
        sweep(points(with_values(SMALL, lr=0.5), {"seed": [0]}), out)


def test_pandas_frame_equals_the_csv_and_latex_compiles(tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    main(
        ["sweep", "--over", "seed=0..1", "--rounds", "2", *FLAGS, "--jobs", "1", "--out", str(tmp_path / "s"), "--json"]
    )
    told = json.loads(capsys.readouterr().out)
    frame = splitcast.results(tmp_path / "s")
    pandas.testing.assert_frame_equal(frame, pandas.read_csv(tmp_path / "s/results.csv"))
    assert frame["megabytes"].tolist() == [row["megabytes"] for row in told["rows"]]
    table = (tmp_path / "s/table.tex").read_text()
    assert table.startswith("\\begin{tabular}{") and table.count(r"\\") == 2
    if shutil.which("pdflatex"):
        page = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + table + "\\end{document}\n"
        (tmp_path / "page.tex").write_text(page)
        subprocess.run(["pdflatex", "-interaction=batchmode", "page"], cwd=tmp_path, check=True, capture_output=True)


def test_tables_by_hand():
    rows = [
        {"scheme": "a_b", "seed": 0, "status": "done", "accuracy": 0.5},
        {"scheme": "a_b", "seed": 1, "status": "done", "accuracy": 0.7},
    ]
    (merged,) = over_seeds(rows)
    assert merged == {"scheme": "a_b", "status": "done", "n": 2, "accuracy": estimate([0.5, 0.7])}
    assert merged["accuracy"].half == pytest.approx(12.7062 * 0.1)  # s = 0.1414, / sqrt 2
    assert (
        as_markdown([merged])
        == "| scheme | status | n | accuracy |\n| --- | --- | --- | --- |\n| a_b | done | 2 | 0.6 ± 1.3 |\n"
    )
    assert r"a\_b & done & 2 & 0.6 $\pm$ 1.3 \\" in as_latex([merged])
    assert math.isnan(estimate([1.0]).half) and estimate([2.0, 2.0]) == Estimate(2.0, 0.0, 2)


@pytest.mark.long
def test_ray_gives_identical_rounds(tmp_path):
    pytest.importorskip("ray")
    chosen = points(SMALL, {"scheme": ["sfl-ga", "no-such"], "seed": [0]})
    assert list(sweep(chosen, tmp_path / "ray", on="ray")) == ["scheme=no-such,seed=0"]
    sweep(chosen[:1], tmp_path / "here")
    ours, theirs = (RunFolder(tmp_path / where / chosen[0].name).rounds() for where in ("here", "ray"))
    assert ours == theirs and len(ours) == 3


def test_a_comparison_is_read_too(tmp_path):
    for scheme in ("sfl", "psl"):
        train(with_values(SMALL, scheme=scheme), tmp_path / "c" / scheme)
    rows = read_rows(tmp_path / "c")
    assert [row["scheme"] for row in rows] == ["psl", "sfl"] and all(row["status"] == "done" for row in rows)
    with pytest.raises(SplitcastError, match="no runs in"):
        read_rows(tmp_path / "nothing")
