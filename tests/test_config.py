"""The configuration: sections and names, TOML in and out, bounds, and files of earlier versions."""

import contextlib
import dataclasses
import math
import re
import tomllib
import warnings
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitcast.base.config import (
    MAX_BYTES,
    NEVER_BARE,
    SCHEME_SECTIONS,
    SECTIONS,
    Config,
    DataConfig,
    EpslConfig,
    LearnConfig,
    ModelConfig,
    NetworkConfig,
    PolicyConfig,
    SflGbConfig,
    SplitConfig,
    TrainConfig,
    from_toml,
    leaf_names,
    leaves,
    load,
    to_toml,
    with_values,
)
from splitcast.base.errors import LONGEST, SplitcastError
from splitcast.cli.help import unused_flag
from splitcast.cli.main import COMMANDS, main, parse


def refusal(call, *args, **options):
    with pytest.raises(SplitcastError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < LONGEST
    return message


def train_settings(*args):
    return parse(COMMANDS["train"][0], "train", list(args)).settings


# Sections and names


def test_sections_in_order_with_the_schemes_between_split_and_train():
    order = list(SECTIONS)
    general = ["data", "model", "split", "train", "network", "world", "policy"]
    assert [name for name in order if name not in SCHEME_SECTIONS] == general
    schemes = [name for name in SCHEME_SECTIONS if name not in NEVER_BARE]
    assert all(order.index("split") < order.index(name) < order.index("train") for name in schemes)
    assert re.findall(r"^\[(.*)\]$", to_toml(Config()), re.M) == order
    assert list(tomllib.loads(to_toml(Config()))["sfl-gb"]) == ["rank", "drop", "coefficients"]


def test_new_keys_have_the_defaults_that_change_nothing():
    config = Config()
    assert (config.epsl.aggregate, config.sfl_gb.rank, config.sfl_gb.drop) == (0.5, 0, 0.0)
    assert (config.model.task, config.train.optimizer, config.train.device) == ("classification", "sgd", "cpu")
    assert config.network.channel == "rayleigh"


def test_leaf_names_are_unique_and_dotted_for_schemes():
    names = leaf_names()
    assert len(set(names)) == len(names)
    dotted = [name for name in names if "." in name]
    assert dotted == [f"{part}.{key}" for part in SCHEME_SECTIONS for key in SECTIONS[part].__dataclass_fields__]
    assert dotted[4:7] == ["epsl.aggregate", "sfl-gb.rank", "sfl-gb.drop"]
    assert {"lr", "dataset", "channel", "task", "device"} <= set(names)
    changed = with_values(Config(), **{"lr": 0.7, "sfl-gb.drop": 0.3})
    assert {k: v for k, v in leaves(changed).items() if v != leaves(Config())[k]} == {"lr": 0.7, "sfl-gb.drop": 0.3}


@pytest.mark.parametrize("name", ["sfl-gb.rank", "sfl_gb.rank", "rank"])
def test_a_value_of_a_scheme_by_any_of_its_names(name):
    changed = with_values(Config(), **{name: 8}, rounds=3)
    assert changed == Config(sfl_gb=SflGbConfig(rank=8), train=TrainConfig(rounds=3))


def test_a_key_may_be_named_with_its_section():
    assert with_values(Config(), **{"train.lr": 0.3}) == Config(train=TrainConfig(lr=0.3))
    assert with_values(Config()) == Config()


@pytest.mark.parametrize(
    "name", ["rnk", "epsl.rank", "sfl-gb.", ".rank", "sfl.gb.rank", "data", "a\nb", "", "x" * 5000]
)
def test_unknown_names_list_the_allowed(name):
    message = refusal(with_values, Config(), **{name: 8})
    assert "unknown key; allowed are dataset, clients" in message and "sfl-gb.rank" in message


def test_one_value_under_two_names_is_refused():
    assert "given twice" in refusal(with_values, Config(), **{"sfl-gb.rank": 8, "rank": 9})


# TOML

words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=1000)
positive = st.floats(0, 1e7, exclude_min=True)
configs = st.builds(
    Config,
    data=st.builds(DataConfig, dataset=words, clients=st.integers(1, 10**7), alpha=positive),
    model=st.builds(ModelConfig, arch=words, task=words),
    split=st.builds(SplitConfig, scheme=words, cut=st.integers(-(2**63) + 1, 2**63 - 1)),
    epsl=st.builds(EpslConfig, aggregate=st.floats(0, 1)),
    sfl_gb=st.builds(SflGbConfig, rank=st.integers(0, 2**63 - 1), drop=st.floats(0, 1, exclude_max=True)),
    train=st.builds(
        TrainConfig, lr=st.floats(0, exclude_min=True, allow_infinity=False), seed=st.integers(0, 2**63 - 1)
    ),
    network=st.builds(NetworkConfig, distance_m=st.lists(positive, max_size=5), channel=words, trace=words),
    policy=st.builds(PolicyConfig, policy=words, charge_migration=st.booleans()),
)


@given(configs)
def test_what_is_written_is_read_back(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_toml(to_toml(config)) == config


def test_sections_of_schemes_are_read():
    text = "[epsl]\naggregate = 0.25\n[sfl-gb]\nrank = 8\ndrop = 0.1\n"
    assert from_toml(text) == Config(epsl=EpslConfig(aggregate=0.25), sfl_gb=SflGbConfig(rank=8, drop=0.1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nspeed = 1", "c.toml: unknown key 'speed' in [train]; allowed are rounds, batch"),
        ("[sfl-gb]\naggregate = 1", "c.toml: unknown key 'aggregate' in [sfl-gb]; allowed are rank, drop"),
        ("[sfl_gb]\nrank = 1", "unknown section [sfl_gb]; allowed are data, model, lora, split, epsl, sfl-gb"),
        ("[training]\nlr = 1", "unknown section [training]; allowed are data"),
        ("lr = 0.1", "c.toml: 'lr' belongs into the section [train]"),
        ("rank = 1", "c.toml: 'rank' belongs into the section [sfl-gb]"),
        ("data = 3", "c.toml: 'data' is a section, written [data]"),
        ("split = 3", "c.toml: 'split' is a section"),
        ("[[train]]\nlr = 1", "c.toml: 'train' is a section"),
        ("[train]\nlr = -1", "c.toml: lr: input should be greater than 0, got -1"),
        ("[train]\nlr = {a = 1}", "c.toml: lr: "),
        ("[train.lr]\na = 1", "c.toml: lr: "),
        ("[epsl]\naggregate = 2", "c.toml: epsl.aggregate: input should be less than or equal to 1, got 2"),
        ("lr = [", "c.toml: not valid TOML: "),
        ('["a\\nb"]\nx = 1', r"unknown section ['a\nb']"),
        ('[train]\n"a\\nb" = 1', r"unknown key 'a\nb' in [train]"),
        (f"[{'x' * 5000}]", "unknown section ['xxx"),
        (f"[train]\nlr = '{'x' * 5000}'", "c.toml: lr: "),
        ("[train]\nseed = 0x" + "f" * 9000, "c.toml: seed: "),
        ("[train]\nseed = " + "9" * 5000, "c.toml: not valid TOML: Exceeds the limit"),
        ("[train]\nlr = " + "[" * 90_000, "c.toml: not valid TOML: nested too deeply"),
        ("[train]\nlr = " + "[" * 200 + "]" * 200, "c.toml: lr: "),
        ("[train]\nlr = " + "{a=" * 90_000, "c.toml: not valid TOML: nested too deeply"),
        ("[train]\n" + "a." * 90_000 + "a = 1", "c.toml: not valid TOML: a key of too many parts"),
        ("[train]\n" + "'a,' . " * 90_000 + "a = 1", "c.toml: not valid TOML: a key of too many parts"),
        ("[" + "1." * 90_000 + "a]", "c.toml: not valid TOML: a key of too many parts"),
        ("#" * (MAX_BYTES + 1), "c.toml: 1,000,001 bytes as TOML; at most 1,000,000 are allowed"),
        ("#" + "🏠" * (MAX_BYTES // 4), "c.toml: 1,000,001 bytes as TOML"),
    ],
)
def test_bad_files_are_one_line(text, said):
    assert said in refusal(from_toml, text, "c.toml")


def test_a_file_of_the_largest_size_is_read(tmp_path):
    file = tmp_path / "c.toml"
    text = "[train]\nlr = 0.5\n"
    file.write_text(text + "#" * (MAX_BYTES - len(text)))
    assert load(file).train.lr == 0.5
    file.write_text(text + "#" * (MAX_BYTES - len(text) + 1))
    assert "larger than 1,000,000 bytes" in refusal(load, file)


def test_long_lists_of_numbers_are_no_long_keys():
    config = with_values(Config(), distance_m=[100.5 + n for n in range(20_000)])
    assert from_toml(to_toml(config)) == config


def test_what_could_not_be_read_back_is_not_written():
    config = with_values(Config(), distance_m=[123.456789012345] * 99_999)
    assert "bytes as TOML; at most 1,000,000" in refusal(to_toml, config)


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_one_line(text):
    with contextlib.suppress(SplitcastError):
        assert isinstance(from_toml(text), Config)


# Bounds


@pytest.mark.parametrize(
    ("name", "most", "above"),
    [
        ("clients", 10**7, 10**7 + 1),
        ("batch", 10**6, 10**6 + 1),
        ("rounds", 10**9, 10**9 + 1),
        ("local_steps", 10**6, 10**6 + 1),
        ("seed", 2**63 - 1, 2**63),
        ("cut", 2**63 - 1, 2**63),
        ("eval_every", 2**63 - 1, 2**63),
        ("sync_every", 2**63 - 1, 2**63),
        ("gamma_draws", 2**63 - 1, 2**63),
        ("sfl-gb.rank", 2**63 - 1, 2**63),
        ("bandwidth_hz", 1e12, 1.1e12),
        ("radius_m", 1e7, 1.1e7),
        ("radius_m", 1e7, 1e308),
        ("min_distance_m", 1e7, 1.1e7),
        ("distance_m", 1e7, 1.1e7),
        ("server_flops_per_s", 1e21, 1.1e21),
        ("client_flops_per_s", 1e21, 1.1e21),
        ("client_flops_per_s_range", 1e21, 1.1e21),
        ("shadowing_db", 300, 301),
        ("dataset", "x" * 1000, "x" * 1001),
        ("gamma", [1.0] * 100_000, [1.0] * 100_001),
        ("client_power_dbm", [1.0] * 100_000, [1.0] * 100_001),
    ],
)
def test_values_are_bounded(name, most, above):
    config = with_values(Config(), **{name: most})
    found = leaves(config)[name]
    assert found in (most, (most,)) or list(found) == most
    assert refusal(with_values, Config(), **{name: above}).startswith(name)


def test_every_number_is_finite_and_every_text_is_short_and_plain():
    seen = set()
    for name, value in leaves(Config()).items():
        kind = type(value)
        seen.add(kind)
        bad = {
            str: ["x" * 1001, "a\nb", "a\0b", "\x7f", "\u2028", "\udcff"],
            bool: [2, "perhaps"],
            int: [10**30, -(10**30), math.inf, math.nan],
            float: [math.inf, -math.inf, math.nan],
            tuple: [[math.inf], [math.nan], [1.0] * 100_001, ["x"]],
        }[kind]
        if name in ("labels", "lora.modules", "uplink_choices"):
            bad = [["x" * 1001], ["a\nb"], [1.0], ["x"] * 10_001]
        for each in bad:
            assert refusal(with_values, Config(), **{name: each}).startswith(name)
    assert seen == {str, bool, int, float, tuple}


@given(st.data())
@settings(max_examples=50)
def test_counts_of_learning_are_bounded_too(data):
    names = [leaf.name for leaf in dataclasses.fields(LearnConfig) if isinstance(leaf.default, int)]
    name = data.draw(st.sampled_from(names))
    assert refusal(LearnConfig, **{name: data.draw(st.integers(min_value=2**63))}).startswith(name)


def test_values_cannot_be_changed_and_unknown_ones_not_given():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().sfl_gb.rank = 3
    assert refusal(SflGbConfig, rnk=3) == "sfl-gb.rnk: unknown key"
    assert refusal(replace, Config().sfl_gb, rank=-1).startswith("sfl-gb.rank: ")


# Earlier versions


def warned(call, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*args)
    return result, [str(each.message) for each in caught]


def test_old_files_are_read_with_one_warning(tmp_path):
    file = tmp_path / "old.toml"
    file.write_text('[split]\nscheme = "sfl-gb"\nrank = 8\naggregate = 0.25\n[train]\nlr = 0.5\n')
    config, said = warned(load, file)
    assert config == with_values(Config(), **{"scheme": "sfl-gb", "rank": 8, "epsl.aggregate": 0.25, "lr": 0.5})
    assert said == [f"{file}: split.rank is now sfl-gb.rank, split.aggregate is now epsl.aggregate"]
    again, silent = warned(from_toml, to_toml(config))
    assert again == config and silent == []


def test_old_and_new_keys_of_one_file_come_together_unless_they_are_the_same():
    config, said = warned(from_toml, "[split]\nrank = 8\n[sfl-gb]\ndrop = 0.2\n", "c")
    assert config.sfl_gb == SflGbConfig(rank=8, drop=0.2) and said == ["c: split.rank is now sfl-gb.rank"]
    message = refusal(from_toml, "[sfl-gb]\nrank = 8\n[split]\nrank = 8\n", "c")
    assert message == "c: split.rank is now sfl-gb.rank, which is given too; leave the old one out"
    assert "split.rank is now" in refusal(from_toml, "sfl-gb = 3\n[split]\nrank = 8\n", "c")


def test_old_values_are_checked_as_new_ones():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (
            refusal(from_toml, "[split]\ndrop = 1.0\n", "c") == "c: sfl-gb.drop: input should be less than 1, got 1.0"
        )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rank", "8"], "splitcast: --rank is now --sfl-gb.rank"),
        (["--lr", "0.1", "--drop=0.1"], "splitcast: --drop is now --sfl-gb.drop"),
        (["--aggregate", "0.1"], "splitcast: --aggregate is now --epsl.aggregate"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare", "plan", "learn"])
def test_old_flags_name_the_new_ones(capsys, command, flags, said):
    with pytest.raises(SystemExit) as stop:
        main([command, *flags])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


# Flags


def test_flags_of_schemes_have_their_prefix_and_others_none():
    flags = [
        "--epsl.aggregate",
        "0.25",
        "--sfl-gb.rank=8",
        "--lr",
        "0.1",
        "--no-charge-migration",
        "--channel",
        "my:own",
    ]
    names = {"epsl.aggregate": 0.25, "sfl-gb.rank": 8, "lr": 0.1, "charge_migration": False, "channel": "my:own"}
    assert train_settings(*flags, "--distance-m", "5", "6") == with_values(Config(), distance_m=(5, 6), **names)
    assert train_settings() == Config()


def test_flags_override_a_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[sfl-gb]\nrank = 8\ndrop = 0.1\n[train]\nlr = 0.5\nbatch = 4\n")
    config = train_settings("--config", str(file), "--sfl-gb.rank", "3", "--lr", "0.1")
    assert config == with_values(Config(), **{"sfl-gb.rank": 3, "drop": 0.1, "lr": 0.1, "batch": 4})


@pytest.mark.parametrize(
    "flags", [["--sfl-gb.rank", "-1"], ["--train.lr", "1"], ["--settings.train.lr", "1"], ["--epsl.rank", "1"]]
)
def test_bad_flags_are_one_line(flags):
    message = refusal(train_settings, *flags)
    assert flags[0].split(".")[-1] in message


@pytest.mark.parametrize("command", ["train", "compare", "plan", "learn"])
def test_help_lists_every_key_under_its_section(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help-all"])
    assert stop.value.code == 0
    boxes, title = {}, ""
    for line in (line.strip() for line in capsys.readouterr().out.splitlines()):
        found = re.match(r"\[([\w.-]*)\] ", line)
        title = found[1] if found else title
        boxes[title] = f"{boxes.get(title, '')}\n{line}"
    assert [title for title in boxes if title] == list(SECTIONS)
    for name, kind in SECTIONS.items():
        prefix = f"{name}." if name in SCHEME_SECTIONS else ""
        for leaf in dataclasses.fields(kind):
            told = re.search(rf"^--{prefix}{leaf.name.replace('_', '-')}( |$)", boxes[name], re.M)
            assert bool(told) != unused_flag(command, f"--{leaf.name}")
    for name in (
        "dataset",
        "arch",
        "task",
        "scheme",
        "channel",
        "allocation",
        "policy",
        "uplink-codec",
        "downlink-codec",
    ):
        described = re.search(rf"^--{name} .*?(?=^--|\Z)", "\n".join(boxes.values()), re.S | re.M)
        assert "module:function" in described[0], name


def test_options_beside_the_configuration_have_no_prefix():
    kind = COMMANDS["learn"][0]
    options = parse(kind, "learn", ["--episodes", "3", "--quiet", "--rounds", "4"])
    assert (options.learning.episodes, options.output.quiet, options.settings.train.rounds) == (3, True, 4)
    options = parse(COMMANDS["compare"][0], "compare", ["sfl", "psl", "--json", "--sfl-gb.rank", "2"])
    assert (options.schemes, options.output.json, options.settings.sfl_gb.rank) == (("sfl", "psl"), True, 2)
