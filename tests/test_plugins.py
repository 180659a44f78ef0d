"""Whatever has a name can be yours, in every command: scheme, codec, data, allocator, channel, policy, model, task."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from splitcast.allocate.allocate import equal_share
from splitcast.base.codec import Codec, Float
from splitcast.cli.main import main
from splitcast.cost.channel import rayleigh
from splitcast.cutting.policies import greedy
from splitcast.data import load
from splitcast.schemes.schemes import Sfl
from splitcast.training.optimiser import SGD
from splitcast.training.task import Classification

CALLED: set[str] = set()


def scheme(config):
    CALLED.add("scheme")
    return Sfl(config)


def codec():
    CALLED.add("codec")
    return Float("half", torch.float16)


def dataset():
    CALLED.add("dataset")
    whole = load("mnist-mini")
    return whole.train_x[:200], whole.train_y[:200], whole.test_x[:50], whole.test_y[:50]


def allocator(**stage):
    CALLED.add("allocator")
    return equal_share(**stage)


def channel(network, clients, seed):
    CALLED.add("channel")
    return rayleigh(network, clients, seed)


def policy(here):
    CALLED.add("policy")
    return greedy(here)


def model(input_shape, classes):
    CALLED.add("model")
    values = int(np.prod(input_shape))
    return [nn.Sequential(nn.Flatten(), nn.Linear(values, 8), nn.ReLU()), nn.Linear(8, 6), nn.Linear(6, classes)]


def task(classes):
    CALLED.add("task")
    return Classification(classes)


def optimizer(lr, momentum):
    CALLED.add("optimizer")
    return SGD(lr, momentum)


FLAGS = {
    "scheme": "--scheme",
    "codec": "--uplink-codec",
    "dataset": "--dataset",
    "allocator": "--allocation",
    "channel": "--channel",
    "policy": "--policy",
    "model": "--arch",
    "task": "--task",
    "optimizer": "--optimizer",
}
TINY = ["--clients", "3", "--rounds", "2", "--batch", "2"]
NOT_ASKED = {("plan", "policy"), ("learn", "policy")}  # a plan has no rounds to choose for; learn makes a policy


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("command", now(["train", "compare", "plan", "learn"], "train"))
def test_own_parts_by_name(command, kind, tmp_path, capsys):
    CALLED.clear()
    flags = [FLAGS[kind], f"{__name__}:{kind}"]
    if command == "compare":
        flags = [f"{__name__}:scheme", "psl"] if kind == "scheme" else ["sfl", "psl", *flags]
    small = [] if kind == "model" else ["--arch", "cnn-small"]
    extra = {
        "plan": ["--draws", "2", "--json"],
        "learn": ["--episodes", "10", "--held-out", "2", "--json"],
        "train": ["--json"],
        "compare": ["--json"],
    }[command]
    main([command, *flags, *small, *TINY, *extra, "--out", str(tmp_path / "out")])
    assert json.loads(capsys.readouterr().out)
    assert kind in CALLED or (command, kind) in NOT_ASKED


@pytest.mark.parametrize("kind", FLAGS)
def test_the_same_from_toml(kind, tmp_path, capsys):
    CALLED.clear()
    from splitcast.base.config import Config, to_toml, with_values

    key = FLAGS[kind][2:].replace("-", "_")
    config = with_values(Config(), **{"clients": 3, "rounds": 1, "batch": 2, key: f"{__name__}:{kind}"})
    if kind != "model":
        config = with_values(config, arch="cnn-small")
    (tmp_path / "own.toml").write_text(to_toml(config))
    main(["train", "--config", str(tmp_path / "own.toml"), "--json", "--out", str(tmp_path / "out")])
    assert json.loads(capsys.readouterr().out)["rounds"] == 1 and kind in CALLED


@pytest.mark.parametrize("kind", FLAGS)
def test_unknown_names_list_what_there_is_and_the_form(kind, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", FLAGS[kind], "nothing-such", *TINY, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert "'nothing-such'" in said and "module:function" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["sfl-gb", "sfl-tc"])
@pytest.mark.parametrize("key", ["uplink_codec", "downlink_codec", "sync_codec"])
def test_own_formats_of_schemes_that_choose_theirs_keep_their_names(scheme, key):
    from splitcast.base.config import Config, with_values
    from splitcast.run.parts import resolved

    own = f"{__name__}:codec"
    found = resolved(with_values(Config(), **{"scheme": scheme, key: own}))
    assert getattr(found.split, key) == own
    assert resolved(found) == found


def abstract():
    return Codec()  # type: ignore[abstract]


def ends():
    raise SystemExit(0)


@pytest.mark.parametrize("name", ["abstract", "ends", "TINY"])
def test_a_format_that_cannot_be_made_ends_in_one_line(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--uplink-codec", f"{__name__}:{name}", *TINY, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith(f"splitcast: uplink_codec: '{__name__}:{name}'")
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()
