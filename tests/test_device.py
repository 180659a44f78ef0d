"""Where arithmetic happens and in which numbers: no tensor stays behind, and nothing waits that need not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lengths import now
from splitcast.base.config import Config, TrainConfig, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.run.loop import train
from splitcast.run.parts import resolved
from splitcast.schemes.schemes import SCHEMES
from splitcast.training.runtime import Runtime

FEW = with_values(Config(), arch="cnn-small", rounds=3, clients=3, batch=8, eval_every=1)


PLAIN = ("sfl-ga", "sfl", "psl", "epsl", "fl", "local-loss", "cse-fsl")


def fake(*schemes):
    """What a process without a device says of rounds on one."""
    script = Path(__file__).with_name("fake_device.py")
    done = subprocess.run([sys.executable, script, *schemes], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def faked():
    return fake(*PLAIN, "sl", "sfl-gb", "sfl-tc", "sfl-replay")


def test_schemes_keep_to_their_device(faked):
    assert {name: told for name, told in faked["found"].items() if isinstance(told, str)} == {}


@pytest.mark.long
def test_every_scheme_keeps_to_its_device():
    found = fake()["found"]
    assert set(SCHEMES) <= set(found) and not [told for told in found.values() if isinstance(told, str)]


@pytest.mark.parametrize("what", ["samples", "a weight", "a message"])
def test_a_tensor_that_stays_behind_is_found(faked, what):
    assert "two devices" in faked["lost"][what]


def test_a_round_waits_for_its_loss_only(faked):
    """Turns of sl end with a loss each; sfl-gb decides about ranks and checks what it sends."""
    for scheme in PLAIN:
        assert faked["found"][scheme] == ["total"], scheme
    assert set(faked["found"]["sl"]) == {"total"}


@pytest.mark.parametrize("scheme", now(["sfl-ga", "sfl", "fl", "local-loss"], "sfl-ga", "local-loss"))
@pytest.mark.parametrize("tau", now([1, 2], 1))
def test_bf16_is_close_to_fp32(scheme, tau):
    runs = [train(with_values(FEW, scheme=scheme, local_steps=tau, precision=p)) for p in ("fp32", "bf16")]
    exact, coarse = (run.rounds[-1] for run in runs)
    assert coarse.loss != exact.loss and coarse.loss == pytest.approx(exact.loss, rel=0.05)
    assert coarse.test_loss == pytest.approx(exact.test_loss, rel=0.05)
    assert coarse.kinds == exact.kinds, "what travels stays float32"
    assert all(p.dtype == torch.float32 for p in runs[1].model().parameters())


def test_bf16_multiplies_in_bf16_and_takes_batch_norm():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x

    blocks = [nn.Sequential(nn.Conv2d(1, 4, 5, 4), Spy(), nn.BatchNorm2d(4), nn.ReLU()), nn.Flatten()]
    blocks += [nn.Linear(144, 10), Spy()]
    config = with_values(FEW, scheme="sfl", precision="bf16", rounds=1, optimizer="adamw", cut=1)
    seen.clear()
    result = train(config, model=blocks)
    assert torch.bfloat16 in seen and result.model().get_submodule("0.2").running_mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision": "fp16"}, "precision: unknown 'fp16'; choose one of fp32, bf16"),
        ({"precision": "bf16", "dtype": "float64"}, "precision: 'bf16' needs dtype float32, not float64"),
        ({"device": "gpu"}, "device: 'gpu' cannot be used here"),
        ({"device": "cuda:7"}, "device: 'cuda:7' cannot be used here"),
    ],
)
def test_what_cannot_be_used_is_one_line(values, words, tmp_path):
    with pytest.raises(SplitcastError, match=words):
        train(with_values(FEW, **values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_auto_is_what_there_is(monkeypatch):
    assert Runtime.of(TrainConfig(device="auto")).device.type == "cpu"
    assert resolved(with_values(Config(), device="auto")).train.device == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolved(with_values(Config(), device="auto")).train.device == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolved(with_values(Config(), device="auto")).train.device == "cuda"


def test_the_doctor_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPLITCAST_DATA", str(tmp_path))
    main(["doctor", "--json"])
    found = {(each["topic"], each["name"]): each for each in json.loads(capsys.readouterr().out)}
    assert found["version", "torch"]["found"] == torch.__version__
    assert found["data", "mnist"] == {
        "topic": "data",
        "name": "mnist",
        "found": "",
        "remedy": "splitcast data get mnist",
    }
    assert found["data", "mnist-mini"]["found"] == "5000 train, 1000 test"
    assert "loss" in found["trial", "one round"]["found"]
    assert found["device", "auto"]["found"].endswith("cpu")
    assert found["threads", "torch"]["found"].startswith(str(torch.get_num_threads()))
    monkeypatch.setattr("splitcast.cli.doctor.version", _without_transformers)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert "extra     models         missing: pip install 'splitcast[models]'" in lines


def _without_transformers(name):
    from importlib.metadata import PackageNotFoundError, version

    if name == "transformers":
        raise PackageNotFoundError(name)
    return version(name)
