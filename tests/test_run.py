"""Run folders: resume bit-exactly, lose nothing, refuse what is broken."""

import gc
import json
import os
import re

import pytest
import torch
from torch import nn

from killing import killed_at_random, trained_in_a_child
from lengths import now
from splitcast import data
from splitcast.base.config import Config, DataConfig, ModelConfig, SplitConfig, TrainConfig, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.run.parts import load_data, make_simulator
from splitcast.run.records import RunFolder
from splitcast.run.verify import verify

QUICK = Config(
    data=DataConfig(clients=4, partition="dirichlet", sizes="unequal"),
    model=ModelConfig(arch="cnn-small"),
    split=SplitConfig(scheme="sfl-ga", cut=2),
    train=TrainConfig(rounds=8, batch=4, local_steps=2, lr=0.05, momentum=0.5, checkpoint_every=3, participation=0.8),
)


def losses(result):
    return [record.loss for record in result.rounds]


def unchained(folder):
    """The lines of `rounds.jsonl` without their chains, which tell runs apart."""
    return re.sub(rb', "chain": "[0-9a-f]{32}"}\n', b"}\n", (folder / "rounds.jsonl").read_bytes())


def stopped_after(config, folder, rounds):
    """A run that dies right after a round."""

    def die(record):
        if record.round == rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder, on_round=die)


@pytest.mark.parametrize("scheme", now(["sfl-ga", "sfl", "epsl-cut", "sfl-gb", "sl", "fl"], "sfl-ga", "sfl-gb", "sl"))
@pytest.mark.parametrize("stop", now([2, 6, 7], 6))
def test_resume_is_bit_exact(tmp_path, scheme, stop):
    config = with_values(QUICK, scheme=scheme)
    whole = train(config, tmp_path / "whole")
    stopped_after(config, tmp_path / "broken", stop)
    resumed = train(config, tmp_path / "broken", resume=True)
    assert unchained(tmp_path / "whole") == unchained(tmp_path / "broken")
    assert (tmp_path / "whole" / "config.toml").read_bytes() == (tmp_path / "broken" / "config.toml").read_bytes()
    assert verify(tmp_path / "broken") == []
    a, b = whole.engine.state.tensors(), resumed.engine.state.tensors()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_models_with_dropout_layers_resume_bit_exactly(tmp_path):
    dataset = data.load("mnist-mini")

    def model():
        torch.manual_seed(0)
        blocks = [nn.Flatten(), nn.Sequential(nn.Linear(784, 16), nn.Dropout()), nn.Linear(16, 10)]
        return SplitModel(blocks, (1, 28, 28))

    train(QUICK, tmp_path / "whole", dataset=dataset, model=model())
    folder = tmp_path / "broken"

    def die(record):
        if record.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(QUICK, folder, dataset=dataset, model=model(), on_round=die)
    train(QUICK, folder, dataset=dataset, model=model(), resume=True)
    assert unchained(folder) == unchained(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("times", now([4, 10], 4))
def test_resume_after_kill_9_at_random_moments(tmp_path, times):
    config = with_values(QUICK, rounds=60, checkpoint_every=7, eval_every=20)
    train(config, tmp_path / "whole")
    killed_at_random(config, tmp_path / "victim", times)
    last = trained_in_a_child(config, tmp_path / "victim")
    assert os.waitstatus_to_exitcode(os.waitpid(last, 0)[1]) == 0
    assert unchained(tmp_path / "victim") == unchained(tmp_path / "whole")
    assert verify(tmp_path / "victim") == []


def test_resume_without_a_checkpoint_starts_over(tmp_path):
    whole = train(QUICK, tmp_path / "whole")
    stopped_after(QUICK, tmp_path / "broken", 1)
    assert not (tmp_path / "broken" / "checkpoint.safetensors").exists()
    assert train(QUICK, tmp_path / "broken", resume=True).rounds == whole.rounds
    (tmp_path / "unborn").mkdir()
    for name in ("run.json", "config.toml"):
        (tmp_path / "unborn" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    assert train(QUICK, tmp_path / "unborn", resume=True).rounds == whole.rounds


def test_a_run_goes_on_as_it_began(tmp_path):
    train(with_values(QUICK, rounds=2), str(tmp_path))
    with pytest.raises(SplitcastError, match="was begun with lr = .*, not lr = 0.5"):
        train(with_values(QUICK, lr=0.5), tmp_path, resume=True)
    with pytest.raises(SplitcastError, match="rounds = 2, not rounds = 1"):
        train(with_values(QUICK, rounds=1), tmp_path, resume=True)
    assert losses(train(QUICK, tmp_path, resume=True)) == losses(train(QUICK))
    assert RunFolder(tmp_path).config() == QUICK
    with pytest.raises(SplitcastError, match="nowhere is not a run folder"):
        train(QUICK, tmp_path / "nowhere", resume=True)


def test_a_run_of_sfl_gb_keeps_the_settings_it_chose(tmp_path):
    basis = with_values(QUICK, scheme="sfl-gb", rounds=2)
    train(with_values(basis, rank=3), tmp_path)
    kept = RunFolder(tmp_path).config()
    split = kept.split
    assert (kept.sfl_gb.rank, split.sync_every, split.uplink_codec, split.downlink_codec) == (3, 2, "int2", "int8")
    with pytest.raises(SplitcastError, match="was begun with rank = 3, not rank = 32"):
        train(basis, tmp_path, resume=True)
    moving = with_values(basis, policy="random")
    train(moving, tmp_path / "moving")
    assert RunFolder(tmp_path / "moving").config() == moving, "its settings follow the cut"


def test_a_run_goes_on_with_its_own_data_only(tmp_path):
    named = data.load("mnist-mini")
    mine = data.Dataset(-named.train_x, named.train_y, named.test_x, named.test_y, named.classes, "mine")
    train(with_values(QUICK, rounds=4), tmp_path, dataset=mine)
    assert RunFolder(tmp_path).summary()["own"] == ["dataset"]
    with pytest.raises(SplitcastError, match="was trained on other data"):
        train(QUICK, tmp_path, resume=True)
    assert RunFolder(tmp_path).summary()["rounds"] == RunFolder(tmp_path).config().train.rounds == 4
    assert losses(train(QUICK, tmp_path, resume=True, dataset=mine)) == losses(train(QUICK, dataset=mine))


def test_models_that_do_not_fit_the_data_are_refused():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    assert len(train(with_values(QUICK, rounds=1, cut=2), model=plain).rounds) == 1
    with pytest.raises(SplitcastError, match=r"model: ends in \(4,\) values, the data has 10 classes"):
        train(QUICK, model=nn.Sequential(nn.Flatten(), nn.Linear(784, 4)))
    with pytest.raises(SplitcastError, match=r"model: takes samples of \(3, 28, 28\), the data has \(1, 28, 28\)"):
        train(QUICK, model=SplitModel([nn.Flatten(), nn.Linear(3 * 784, 10)], (3, 28, 28)))
    with pytest.raises(SplitcastError, match=r"entry 1 does not take \(784,\)"):
        train(QUICK, model=nn.Sequential(nn.Flatten(), nn.Linear(100, 10)))


def test_damaged_files_of_a_run_are_named(tmp_path):
    train(with_values(QUICK, rounds=2), tmp_path)
    (tmp_path / "summary.json").write_text('{"rou')
    with pytest.raises(SplitcastError, match=r"summary.json is damaged; delete it"):
        train(with_values(QUICK, rounds=2), tmp_path, resume=True)
    (tmp_path / "rounds.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(SplitcastError, match=r"rounds.jsonl line 1 is damaged"):
        RunFolder(tmp_path).rounds()


def test_a_half_written_line_is_dropped(tmp_path):
    whole = train(QUICK, tmp_path / "whole")
    stopped_after(QUICK, tmp_path / "broken", 5)
    with (tmp_path / "broken" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 6, "cu')
    assert train(QUICK, tmp_path / "broken", resume=True).rounds == whole.rounds


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    train(QUICK, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    train(QUICK, tmp_path, resume=True)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "other"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(tmp_path, damage):
    stopped_after(QUICK, tmp_path, 7)
    file = tmp_path / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 0x40
    damaged = {"truncated": content[: len(content) // 2], "flipped": content, "empty": b"", "other": b"hello world"}
    file.write_bytes(damaged[damage])
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(SplitcastError, match="checkpoint: .* is corrupt") as caught:
        train(QUICK, tmp_path, resume=True)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    stopped_after(QUICK, tmp_path / "a", 7)
    with pytest.raises(SplitcastError, match='was begun with arch = "cnn-small", not arch = "cnn"; use another folder'):
        train(QUICK, tmp_path / "a", resume=True, model=build("cnn", (1, 28, 28), 10, seed=0))
    wide, narrow = (
        SplitModel([nn.Flatten(), nn.Linear(784, width), nn.Linear(width, 10)], (1, 28, 28)) for width in (9, 8)
    )
    train(QUICK, tmp_path / "b", model=wide)
    with pytest.raises(SplitcastError, match="trained another model"):
        train(with_values(QUICK, rounds=9), tmp_path / "b", resume=True, model=narrow)
    stored, other = (
        RunFolder(tmp_path / "a").restore(),
        make_simulator(with_values(QUICK, arch="cnn"), data.load("mnist-mini")),
    )
    with pytest.raises(SplitcastError, match=r"checkpoint: client/trained/0.0.weight has shape \(4, 4, 1, 5, 5\), not"):
        other.resume(stored.tensors, stored.about, stored.round)


def test_nan_loss_stops_with_one_line_and_keeps_the_last_checkpoint(tmp_path):
    config = with_values(QUICK, lr=1e6, momentum=0.0, rounds=50, checkpoint_every=1)
    with pytest.raises(SplitcastError, match=r"lr: the loss became (nan|inf) in round \d+; choose a value below"):
        train(config, tmp_path)
    assert RunFolder(tmp_path).restore().about["cut"] == "2"
    assert not (tmp_path / "summary.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_records_hold_what_the_run_did(tmp_path):
    result = train(QUICK, tmp_path)
    folder = RunFolder(tmp_path)
    assert folder.config() == QUICK
    assert folder.rounds() == result.rounds
    assert [r.round for r in result.rounds] == list(range(1, 9))
    assert [r.round for r in result.rounds if r.test_accuracy is not None] == [5, 8]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["up_bytes"] == sum(r.up_bytes for r in result.rounds)
    assert summary["accuracy"] == result.rounds[-1].test_accuracy


def test_training_learns():
    config = with_values(QUICK, scheme="sfl", cut=1, rounds=60, lr=0.1, local_steps=1, batch=16, partition="iid")
    assert train(config).summary["accuracy"] > 0.7


def test_a_record_says_what_the_basis_dropped(tmp_path):
    train(with_values(QUICK, scheme="sfl-gb", rounds=2, rank=1), tmp_path / "gb")
    train(with_values(QUICK, scheme="sfl", rounds=1), tmp_path / "sfl")
    for record in RunFolder(tmp_path / "gb").rounds():
        found = record.metrics
        assert found["rank"] == 1 and 0 < found["dropped_energy"] < 1 and found["gamma"] > 0
    (plain,) = RunFolder(tmp_path / "sfl").rounds()
    assert set(plain.metrics) == {"energy_j", "energy_air_j", "energy_most_j"}


def test_the_second_of_two_writers_is_refused_in_one_line(tmp_path):
    config = with_values(QUICK, rounds=4)
    other: list[str] = []

    def resume_meanwhile(record):
        if record.round == 2:
            with pytest.raises(SplitcastError) as refused:
                train(config, tmp_path / "run", resume=True)
            other.append(str(refused.value))

    whole = train(config, tmp_path / "run", on_round=resume_meanwhile)
    assert "is being written by process" in other[0] and "\n" not in other[0]
    assert RunFolder(tmp_path / "run").rounds() == whole.rounds and verify(tmp_path / "run") == []


def test_a_start_that_fails_leaves_nothing_behind(tmp_path):
    for values in ({"cut": 9}, {"scheme": "nothing-such"}, {"epsilon": 0.69}, {"workload": "measured"}):
        with pytest.raises(SplitcastError):
            train(with_values(QUICK, **values), tmp_path / "run")
        assert not (tmp_path / "run").exists(), values
    train(with_values(QUICK, rounds=1), tmp_path / "run")


def test_tests_along_the_way_may_be_of_some_samples_and_the_last_one_is_of_all():
    """A test of 100 samples moves in steps of 1 %; the same 100 are taken whatever the seed."""
    config = with_values(QUICK, rounds=4, eval_every=1, eval_samples=100, lr=0.05)
    some, all_ = train(config), train(with_values(config, eval_samples=0))
    assert [r.loss for r in some.rounds] == [r.loss for r in all_.rounds]
    assert some.rounds[-1] == all_.rounds[-1]
    rows = stream(0, "test").permutation(1000)[:100]
    data = load_data(config)
    one = train(with_values(config, rounds=1))
    tested = one.engine.evaluate(data.test_x[rows], data.test_y[rows])
    assert some.rounds[0].test_loss == tested["loss"] != all_.rounds[0].test_loss
    assert all(round(1e9 * r.test_accuracy) % 10_000_000 == 0 for r in some.rounds[:-1])


def test_a_run_that_stops_early_ends_with_a_test_of_all_samples():
    config = with_values(Config(), arch="cnn-small", rounds=60, eval_every=1, eval_samples=50, stop_at=0.4, lr=0.1)
    last = train(config).rounds[-1]
    assert last.round < 60 and last.test_accuracy >= 0.4
    again = train(with_values(config, rounds=last.round, stop_at=0.0))
    assert again.rounds[-1].test_accuracy == last.test_accuracy, "the last round is always tested on all"


def test_the_number_of_threads_is_recorded_and_another_one_is_said(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        stopped_after(QUICK, tmp_path / "run", 7)
        torch.set_num_threads(2)
        with pytest.warns(UserWarning, match="trained with 1 threads and goes on with 2: last bits differ"):
            result = train(QUICK, tmp_path / "run", resume=True)
        assert result.summary["threads"] == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", now(["sfl-ga", "fl"], "sfl-ga"))
def test_a_training_leaves_no_tensor_behind(scheme):
    """Also none that only a graph knows, which the collector of Python never sees."""

    def alive():
        gc.collect()
        return sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects())

    config = with_values(QUICK, scheme=scheme, rounds=1)
    train(config)
    before = alive()
    train(config)
    assert alive() == before
