"""Trackers: the numbers of a run, in each of the places."""

import csv
import json
import sys

import pytest

from splitcast.base.config import Config, with_values
from splitcast.cli.main import main
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from splitcast.run.track import tracking, values_of
from waiting import wait_for

SMALL = with_values(Config(), arch="cnn-small", rounds=4, clients=2, batch=4, eval_every=2, checkpoint_every=2)
FLAGS = ["--arch", "cnn-small", "--rounds", "2", "--clients", "2", "--batch", "4", "--quiet"]


def tracked(name, folder, config=SMALL, resume=False):
    with tracking([name], folder, config) as on_round:
        return train(config, folder, resume=resume, on_round=on_round).rounds


def read_csv(path):
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["round", "name", "value"]
    return {(int(t), name): float(value) for t, name, value in rows}, len(rows)


def test_csv_has_every_number_once_also_when_rounds_come_again(tmp_path):
    records = tracked("csv", tmp_path / "run")
    expected = {(r.round, name): value for r in records for name, value in values_of(r).items()}
    assert read_csv(tmp_path / "run.csv") == (expected, len(expected))
    longer = with_values(SMALL, rounds=6)
    records = tracked("csv", tmp_path / "run", longer, resume=True)
    expected = {(r.round, name): value for r in records for name, value in values_of(r).items()}
    assert read_csv(tmp_path / "run.csv") == (expected, len(expected)) and len(records) == 6


def test_mlflow_and_a_run_that_goes_on(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked("mlflow", tmp_path / "run")
    records = tracked("mlflow", tmp_path / "run", with_values(SMALL, rounds=6), resume=True)
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("splitcast").experiment_id])
    assert run.info.run_name == "run" and run.data.params["scheme"] == "sfl-ga"
    losses = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    assert losses == {r.round: r.loss for r in records}


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked("wandb", tmp_path / "run")
    (events,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert RunFolder(tmp_path / "run").rounds()
    wait_for(lambda: b"test_accuracy" in events.read_bytes())  # another process writes it


def test_your_own_in_every_command_and_bad_ones_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_tracker.py").write_text(
        "import json\n"
        "class Mine:\n"
        "    def __init__(self, folder, config):\n"
        "        self.file = open(str(folder) + '.jsonl', 'w')\n"
        "    def log(self, round, values):\n"
        "        print(json.dumps([round, values['loss']]), file=self.file)\n"
        "    def close(self):\n"
        "        self.file.close()\n"
        "def none(folder, config):\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    main(["train", *FLAGS, "--out", "a", "--track", "my_tracker:Mine", "csv"])
    main(["compare", "sfl", "psl", *FLAGS, "--out", "b", "--track", "my_tracker:Mine"])
    main(["sweep", "--over", "seed=3", *FLAGS, "--out", "c", "--jobs", "1", "--track", "my_tracker:Mine"])
    for run in ("a", "b/sfl", "b/psl", "c/seed=3"):
        lines = [json.loads(line) for line in (tmp_path / f"{run}.jsonl").read_text().splitlines()]
        assert lines == [[r.round, r.loss] for r in RunFolder(tmp_path / run).rounds()]
    assert (tmp_path / "a.csv").is_file()
    capsys.readouterr()
    for name, said in (
        ("moon", "track: unknown 'moon'; choose one of tensorboard"),
        ("my_tracker:none", "gives a int"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["train", *FLAGS, "--out", "d", "--track", name])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
    sys.modules.pop("my_tracker")
