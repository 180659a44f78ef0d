"""The command line: every bad input is one line that names the field, with exit code 2 and nothing written."""

import json
import re
import subprocess
import sys

import pytest

from splitcast.base.codec import Labels
from splitcast.base.config import Config, leaf_names, load, with_values
from splitcast.cli.main import COMMANDS, main
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from splitcast.run.verify import verify
from splitcast.studies import compare as comparison

TINY = ["--arch", "cnn-small", "--rounds", "2", "--batch", "4", "--clients", "3"]


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(args)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheme", "slf"], ["scheme", "'slf'", "sfl-ga, sfl, psl, epsl, sfl-gb, fl, sl"]),
        (["--cut", "0"], ["cut", "0", "1..4"]),
        (["--cut", "5"], ["cut", "5", "1..4"]),
        (["--lr", "-1"], ["lr", "greater than 0", "-1"]),
        (["--lr", "nan"], ["lr", "finite", "nan"]),
        (["--alpha", "0", "--partition", "dirichlet"], ["alpha", "greater than 0"]),
        (["--clients", "6000"], ["clients", "6000", "5000"]),
        (["--clients", "0"], ["clients", "greater than or equal to 1"]),
        (["--dataset", "imagenet"], ["dataset", "'imagenet'", "mnist-mini"]),
        (["--partition", "sorted"], ["partition", "'sorted'", "iid, dirichlet, shards"]),
        (["--sizes", "big"], ["sizes", "'big'", "equal, unequal"]),
        (["--uplink-codec", "int3"], ["uplink_codec", "'int3'", "fp32"]),
        (["--downlink-codec", "int16"], ["downlink_codec", "'int16'", "fp32, fp16, int8, int4, int2", "auto"]),
        (["--sfl-gb.rank", "-1"], ["rank", "greater than or equal to 0"]),
        (["--sfl-gb.drop", "1"], ["drop", "less than 1"]),
        (["--epsl.aggregate", "1.5"], ["aggregate", "less than or equal to 1"]),
        (["--rank", "3"], ["--rank is now --sfl-gb.rank"]),
        (["--drop=0.5"], ["--drop is now --sfl-gb.drop"]),
        (["--sync-every", "-2"], ["sync_every", "greater than or equal to -1"]),
        (["--scheme", "sl", "--sync-every", "3"], ["sync_every", "3", "sl"]),
        (["--client-update", "mean"], ["client_update", "'mean'", "own, identical"]),
        (["--scheme", "fl", "--client-update", "identical"], ["client_update", "fl"]),
        (["--dtype", "int8"], ["dtype", "'int8'", "float32, float64"]),
        (["--participation", "1.5"], ["participation", "less than or equal to 1"]),
        (["--dropout", "1"], ["dropout", "less than 1"]),
        (["--arch", "resnet"], ["arch", "'resnet'", "cnn, cnn-small"]),
        (["--classes-per-client", "11", "--partition", "shards"], ["classes_per_client", "11", "10"]),
        (["--arch", "math:pi"], ["arch", "'math:pi'", "2 argument"]),
        (["--arch", ":f"], ["arch", "':f'"]),
        (["--rouds", "4"], ["--rouds", "--rounds"]),
        (["--rounds", "1e2"], ["--rounds", "'1e2'"]),
    ],
)
def test_bad_values_are_one_line(capsys, tmp_path, flags, words):
    out = tmp_path / "run"
    line = refused(capsys, "train", *TINY, *flags, "--out", str(out))
    for word in words:
        assert word in line
    assert not out.exists()


def test_missing_data_names_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITCAST_DATA", str(tmp_path / "nothing"))
    line = refused(capsys, "train", "--dataset", "mnist", "--out", str(tmp_path / "run"))
    assert "splitcast data get mnist" in line
    assert not (tmp_path / "run").exists()


def test_unknown_keys_and_sections_are_named(capsys, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[train]\nlearning_rate = 0.1\n")
    line = refused(capsys, "train", "--config", str(file))
    assert "'learning_rate'" in line and "lr" in line and "[train]" in line
    file.write_text("[training]\nlr = 0.1\n")
    assert "[training]" in refused(capsys, "train", "--config", str(file))
    file.write_text("lr = 0.1\n")
    assert "'lr' belongs into the section [train]" in refused(capsys, "train", "--config", str(file))
    file.write_text("[train]\nlr = -1\n")
    line = refused(capsys, "train", f"--config={file}")
    assert str(file) in line and "lr" in line and "-1" in line
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(capsys, "train", "--config", str(file))
    file.write_text("lr = [")
    assert "not valid TOML" in refused(capsys, "train", "--config", str(file))
    file.write_text("[train]\nlr = 'fast'\n")
    assert "lr" in refused(capsys, "train", "--config", str(file))
    assert "absent.toml" in refused(capsys, "train", "--config", str(tmp_path / "absent.toml"))


def test_folders_that_are_no_new_run_are_refused(capsys, tmp_path):
    (tmp_path / "precious.txt").write_text("keep me")
    assert "not empty" in refused(capsys, "train", *TINY, "--out", str(tmp_path))
    assert (tmp_path / "precious.txt").read_text() == "keep me"
    assert "not a run folder" in refused(capsys, "train", "--resume", str(tmp_path))


def test_a_run_goes_on_with_its_own_settings_and_may_be_asked_for_more_rounds(capsys, tmp_path):
    run = tmp_path / "run"
    main(["train", *TINY, "--lr", "0.05", "--out", str(run), "--quiet"])
    capsys.readouterr()
    assert "was begun with lr = 0.05, not lr = 1.0" in refused(capsys, "train", "--resume", str(run), "--lr", "1")
    assert "leave --out out" in refused(capsys, "train", "--resume", str(run), "--out", str(tmp_path / "other"))
    assert "leave --config out" in refused(capsys, "train", "--resume", str(run), "--config", str(run / "config.toml"))
    assert "rounds = 2, not rounds = 1" in refused(capsys, "train", f"--resume={run}", "--rounds", "1")
    main(["train", "--resume", str(run), "--rounds", "4", "--quiet"])
    once = train(with_values(RunFolder(run).config(), rounds=4)).rounds
    assert [r.loss for r in RunFolder(run).rounds()] == [r.loss for r in once]
    assert RunFolder(run).summary()["rounds"] == 4 and verify(run) == []
    main(["train", *TINY, "--schedule", "cosine", "--out", str(tmp_path / "cosine"), "--quiet"])
    capsys.readouterr()
    said = refused(capsys, "train", "--resume", str(tmp_path / "cosine"), "--rounds", "4")
    assert "rounds = 2, not rounds = 4" in said, "its rates follow from the number of rounds"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["profile", "--input-shape", "28"], ["input_shape", "(28,)"]),
        (["profile", "--input-shape", "0", "28", "28"], ["input_shape", "(0, 28, 28)"]),
        (["profile", "--classes", "-1"], ["classes", "-1", "at least 1"]),
        (["plan", "--classes", "0"], ["classes", "0", "at least 1"]),
        (["plan", "--input-shape", "784"], ["input_shape", "(784,)"]),
        (["compare", "--to", "95"], ["target", "95", "between 0 and 1"]),
        (["compare", "sfl", "--scheme", "psl"], ["scheme", "compare sfl-ga sfl psl"]),
        (["reproduce", "fig8", "--quick", "--seeds", "-1"], ["seeds", "-1", "at least 1"]),
        (["bench", "engine", "--repeats", "0"], ["repeats", "0", "at least 1"]),
        (["learn", "--out", "FILE"], ["FILE", "exists"]),
        (["train", "--out", "FILE"], ["FILE", "is a file"]),
    ],
)
def test_bad_options_of_other_commands_are_one_line(capsys, tmp_path, args, words):
    (tmp_path / "FILE").touch()
    line = refused(capsys, *[str(tmp_path / arg) if arg == "FILE" else arg for arg in args])
    for word in words:
        assert word in line


def test_an_interrupted_training_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    def stopped(config, folder, **options):
        RunFolder(folder).create(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("splitcast.cli.show.train", stopped)
    with pytest.raises(SystemExit) as stop:
        main(["train", *TINY, "--out", str(tmp_path / "run")])
    assert stop.value.code == 130
    assert f"go on with: splitcast train --resume {tmp_path / 'run'}" in capsys.readouterr().err


def test_an_interrupted_comparison_goes_on_with_the_same_command(capsys, tmp_path, monkeypatch):
    real, out = comparison.train, tmp_path / "runs"

    def stopped(config, folder, **options):
        def watched(record):
            if config.split.scheme == "psl":
                raise KeyboardInterrupt

        return real(config, folder, **options | {"on_round": watched})

    command = ["compare", "sfl", "psl", *TINY, "--quiet", "--out", str(out)]
    monkeypatch.setattr(comparison, "train", stopped)
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 130
    said = capsys.readouterr().err.strip()
    assert said == f"splitcast: interrupted; go on with the same command; {out} keeps what is done"
    monkeypatch.setattr(comparison, "train", real)
    main(command)
    assert all(RunFolder(out / name).summary()["rounds"] == 2 for name in ("sfl", "psl"))


def test_who_stops_reading_is_not_told_of_it(tmp_path):
    command = [sys.executable, "-c", "from splitcast.cli.main import main; main()", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_version_is_known(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("splitcast ")


def test_unknown_commands_and_benches(capsys):
    assert "train, compare" in refused(capsys, "trian")
    assert "engine" in refused(capsys, "bench", "everything")
    assert "get, list" in refused(capsys, "data", "got", "mnist")
    assert "mnist" in refused(capsys, "data", "get", "imagenet")


def test_train_with_flags_over_a_config_file(capsys, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[model]\narch = "cnn-small"\n[train]\nrounds = 9\nbatch = 4\n')
    main(["train", "--config", str(file), "--rounds", "2", "--json", "--out", str(tmp_path / "run")])
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] == 2
    assert "batch = 4" in (tmp_path / "run" / "config.toml").read_text()


def test_compare_writes_runs_and_figure_and_skips_finished_ones(capsys, tmp_path):
    args = ["compare", "sfl-gb", "sfl", "fl", *TINY, "--out", str(tmp_path), "--json"]
    main(args)
    first = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in first["rows"]] == ["sfl-gb", "sfl", "fl"]
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    stamp = (tmp_path / "sfl" / "summary.json").stat().st_mtime_ns
    (tmp_path / "fl" / "summary.json").unlink()
    for file in (tmp_path / "sfl-gb").iterdir():
        if file.name != "run.json":
            file.unlink()  # as if killed in its first moments
    main(args)
    assert json.loads(capsys.readouterr().out) == first
    assert (tmp_path / "sfl" / "summary.json").stat().st_mtime_ns == stamp
    assert "another configuration" in refused(capsys, *args, "--lr", "0.3")


class Guess:
    """A task of a user's, without accuracy: which number it is, within one."""

    headline = "near"

    def __init__(self, classes):
        self.target_codec = Labels(classes)

    def check(self, output_shape):
        pass

    def losses(self, output, target):
        return (output.mean(1) - target).square()

    def metrics(self, output, target):
        return {
            "loss": float(self.losses(output, target).sum()),
            "near": float((self.losses(output, target) < 1).sum()),
        }


def test_tasks_without_accuracy_are_told_by_their_measures(capsys, tmp_path):
    task = ["--task", f"{__name__}:Guess", "--lr", "0.001"]
    main(["train", *TINY, *task, "--quiet", "--out", str(tmp_path / "run")])
    near = RunFolder(tmp_path / "run").summary()["test"]["near"]
    line = capsys.readouterr().out
    assert line.startswith(f"sfl-ga: near {near:.4g}, loss ") and " after 2 rounds, " in line and "%" not in line
    main(["compare", "sfl", *TINY, *task, "--json", "--out", str(tmp_path / "c")])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["near"] == RunFolder(tmp_path / "c" / "sfl").summary()["test"]["near"] and "accuracy" not in row


def test_compare_refuses_bad_schemes_before_training(capsys, tmp_path):
    assert "'nope'" in refused(capsys, "compare", "sfl", "nope", *TINY, "--out", str(tmp_path / "c"))
    assert "once" in refused(capsys, "compare", "sfl", "sfl", *TINY, "--out", str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def test_resuming_drops_what_follows_the_checkpoint_whatever_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("splitcast.cli.progress.EVERY_S", 0.0)
    config = with_values(Config(), arch="cnn-small", rounds=4, batch=4, clients=3, checkpoint_every=2)

    def stop(record):
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", on_round=stop)
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write("broken\n")
    main(["train", "--resume", str(tmp_path / "run")])
    assert RunFolder(tmp_path / "run").rounds() == train(config).rounds
    assert verify(tmp_path / "run") == []
    sent = sum(record.bytes for record in RunFolder(tmp_path / "run").rounds()) / 1e6
    assert f"{sent:.1f} MB" in capsys.readouterr().err, "progress counts from the start of the run"


def test_verify_says_what_is_wrong_with_a_run(capsys, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for run in (good, bad):
        main(["train", *TINY, "--quiet", "--out", str(run)])
    capsys.readouterr()
    main(["verify", str(good), str(bad)])
    assert capsys.readouterr().out == f"{good}: ok\n{bad}: ok\n"
    lines = (bad / "rounds.jsonl").read_text()
    (bad / "rounds.jsonl").write_text(lines.replace('"clients": 3', '"clients": 2'))
    (bad / "config.toml").write_text((bad / "config.toml").read_text().replace("rounds = 2", "rounds = 3"))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(bad), str(good), str(tmp_path / "absent")])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (1, "")
    *problems, last, absent = captured.out.splitlines()
    assert problems == verify(bad) and len(problems) >= 3
    assert any("config.toml was edited" in line for line in problems)
    assert any("rounds.jsonl line 1 does not follow" in line for line in problems)
    assert (last, absent) == (f"{good}: ok", f"run: {tmp_path / 'absent'} is not a folder")
    assert "name a run folder" in refused(capsys, "verify")


def test_profile_as_table_and_json(capsys, monkeypatch):
    main(["profile", "--json"])
    profile = json.loads(capsys.readouterr().out)
    assert profile["parameters"] == 1725194
    assert [cut["client_parameters"] for cut in profile["cuts"]] == [832, 52096, 1658240, 1723904]
    monkeypatch.setenv("COLUMNS", "120")
    main(["profile"])
    assert "1,658,240" in capsys.readouterr().out


def test_tensorboard_events_are_written(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    main(["train", *TINY, "--quiet", "--track", "tensorboard", "--out", str(tmp_path / "run")])
    assert list((tmp_path / "run-events").glob("events*"))


def test_every_command_explains_itself(capsys):
    main(["--help"])
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in overview
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"splitcast {command}" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_of_train_fits_a_screen_and_help_all_has_everything(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    brief = capsys.readouterr().out
    assert len(brief.splitlines()) <= 60 and max(map(len, brief.splitlines())) <= width
    assert "--help-all lists every one; --config FILE reads them from TOML" in brief
    assert re.findall(r"^  (--[\w-]+)", brief, flags=re.MULTILINE) == [  # first what a stranger looks for
        *("--scheme", "--cut", "--arch", "--task", "--dataset", "--clients", "--partition", "--rounds", "--batch"),
        *("--local-steps", "--lr", "--optimizer", "--uplink-codec", "--eval-every", "--seed", "--device", "--policy"),
        *("--bandwidth-hz", "--out", "--resume", "--track", "--quiet", "--json"),
    ]
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    full = capsys.readouterr().out
    for name in leaf_names():
        assert f"--{name.replace('_', '-')}\n" in full or f"--{name.replace('_', '-')} " in full


def test_a_command_refuses_settings_that_it_has_no_use_for(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--checkpoint-every", "3"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "splitcast: --checkpoint-every: plan has no use for it; leave it out\n"
    with pytest.raises(SystemExit):
        main(["plan", "--help-all"])
    assert "--checkpoint-every" not in capsys.readouterr().out


def test_init_writes_a_commented_configuration_that_says_nothing_new(tmp_path, capsys):
    file = tmp_path / "my.toml"
    main(["init", str(file)])
    assert load(file) == Config() and "# Communication rounds T." in file.read_text()
    with pytest.raises(SystemExit) as stopped:
        main(["init", str(file)])
    assert stopped.value.code == 2 and "exists; choose another name" in capsys.readouterr().err


def test_completion_works_in_bash(capsys, tmp_path):
    main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = 'COMP_WORDS=(splitcast {words}); COMP_CWORD={at}; _splitcast; echo "${{COMPREPLY[*]}}"'
    for words, at, found in (("comp", 1, "compare completion"), ("train --chec", 2, "--checkpoint-every")):
        command = script + ask.format(words=words, at=at)
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert said.strip() == found
