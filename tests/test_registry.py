"""Plug-ins by name: built-in names, module:function, and what may be imported at all."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from splitcast import data, model
from splitcast.base.config import NetworkConfig
from splitcast.base.errors import SplitcastError, imported, imports_allowed, one_of
from splitcast.base.registry import Registry
from splitcast.cost.channel import CHANNELS, Rayleigh, channel
from splitcast.cost.trace import Trace


def refusal(call, *args, **options):
    with pytest.raises(SplitcastError) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# What a user may have in a module; tests name it f"{__name__}:..."


def double(x):
    return 2 * x


def nothing_taken():
    return 3


NUMBER = 3


class Doubler:
    def __init__(self, x):
        self.value = 2 * x


class Callable:
    def __call__(self, x):
        return x + 1


instance = Callable()


def shapes():
    return Registry("shape", takes=1, entries={"round": abs, "square": double})


def test_built_in_names_in_order_and_modules_of_the_user():
    found = shapes()
    found["ring"] = round
    assert list(found) == ["round", "square", "ring"]
    assert found.find("ring") is round
    assert found.find("math:sqrt")(9) == 3
    assert found.find(f"{__name__}:double") is double
    assert found.find(f"{__name__}:Doubler")(4).value == 8
    assert found.find(f"{__name__}:instance")(4) == 5


def test_a_built_in_name_does_not_hide_a_module_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "square.py").write_text("def triple(x):\n    return 3 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert shapes().find("square:triple")(5) == 15
    assert shapes().find("square")(5) == 10


def test_an_unknown_name_lists_those_built_in_and_the_form():
    assert refusal(shapes().find, "sqare") == (
        "shape: unknown 'sqare'; choose one of round, square, or module:function of yours"
    )
    assert refusal(shapes().find, "sqare", "outline").startswith("outline: unknown 'sqare'")
    kinds = Registry("shape", 1, {"round": abs}, forms=("ngon:N",))
    assert "choose one of round, ngon:N, or module:function of yours" in refusal(kinds.find, "ngon")


@pytest.mark.parametrize("name", ["", "a:b", "my shape", "a\nb", ":", "-x"])
def test_names_that_could_be_something_else_are_not_taken(name):
    found = shapes()
    assert refusal(found.__setitem__, name, abs).startswith("shape: ")
    assert name not in found


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (":f", "':f' is not of the form module:function"),
        ("math:", "'math:' is not of the form"),
        (".relative:f", "is not of the form"),
        ("os:path.join", "is not of the form"),
        ("os/path:join", "is not of the form"),
        ("a b:c", "is not of the form"),
        ("math:sqrt\n", "is not of the form"),
        ("math\n:sqrt", "is not of the form"),
        ("math:sqrt:x", "is not of the form"),
        ("2fast:f", "is not of the form"),
        ("nosuchmodule:f", "cannot import 'nosuchmodule:f': No module named 'nosuchmodule'"),
        ("os..path:join", "cannot import"),
        ("math:root", "cannot import 'math:root'"),
        ("math:pi", "'math:pi' is not a function of 1 argument(s)"),
        (f"{__name__}:NUMBER", "is not a function of 1 argument(s)"),
        (f"{__name__}:nothing_taken", "is not a function of 1 argument(s)"),
    ],
)
def test_paths_that_are_no_function_are_one_line(path, words):
    message = refusal(shapes().find, path)
    assert message.startswith("shape: ") and words in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "division by zero"),
        ("def f(:", "invalid syntax"),
        ("raise SystemExit(0)", "0"),
        ("raise KeyError", "Key"),
    ],
)
def test_modules_that_fail_to_import_are_one_line(tmp_path, monkeypatch, text, said):
    (tmp_path / "fails_to_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(imported, "arch", "fails_to_import:f", takes=2)
    assert message.startswith("arch: cannot import 'fails_to_import:f': ") and said in message


@given(st.text(max_size=30))
def test_no_text_is_anything_but_found_or_refused_in_one_line(name):
    with imports_allowed([]):  # so that nothing found by chance runs
        message = refusal(shapes().find, f"{name}?")
        assert message.startswith("shape: ")
    assert len(refusal(one_of, "kind", f"{name}?", ["a"]).splitlines()) == 1


# What may be imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Two packages whose names begin alike; importing anything of theirs is noticed."""
    for name in ("allowed_pkg", "allowed_pkg/sub", "allowed_pkg_not"):
        (tmp_path / name).mkdir()
        text = f"import sys\nsys.imported_here.append('{name}')\n"
        (tmp_path / name / "__init__.py").write_text(f"{text}from shutil import which, rmtree\ndef f(x): return x\n")
    monkeypatch.setattr(sys, "imported_here", [], raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield sys.imported_here
    for name in [name for name in sys.modules if name.startswith("allowed_pkg")]:
        del sys.modules[name]


def test_an_allowed_package_allows_what_is_below_it_and_nothing_else(package):
    with imports_allowed(["allowed_pkg"]):
        assert imported("arch", "allowed_pkg:f", 1)(3) == 3
        assert imported("arch", "allowed_pkg.sub:f", 1)(3) == 3
        message = refusal(imported, "arch", "allowed_pkg_not:f", 1)
        assert message == "arch: 'allowed_pkg_not:f' may not be imported here; allowed are allowed_pkg"
    assert package == ["allowed_pkg", "allowed_pkg/sub"]  # what was refused did not run
    assert imported("arch", "allowed_pkg_not:f", 1)(3) == 3


def test_an_empty_list_forbids_all(package):
    with imports_allowed([]):
        for path in ("allowed_pkg:f", "cProfile:run", "math:sqrt"):
            assert refusal(imported, "arch", path, 1) == f"arch: {path!r} may not be imported here; allowed are none"
        assert shapes().find("round") is abs
    assert package == []


def test_a_subpackage_or_one_function_can_be_allowed_alone(package):
    with imports_allowed(["allowed_pkg.sub", "math:sqrt"]):
        assert imported("arch", "allowed_pkg.sub:f", 1)(3) == 3
        assert imported("arch", "math:sqrt", 1)(9) == 3
        assert "allowed are allowed_pkg.sub, math:sqrt" in refusal(imported, "arch", "allowed_pkg:f", 1)
        assert "may not" in refusal(imported, "arch", "math:exp", 1)
        assert "may not" in refusal(imported, "arch", "allowed_pkg.subway:f", 1)


def test_what_an_allowed_module_has_imported_itself_is_not_allowed(package):
    with imports_allowed(["allowed_pkg"]):
        assert "may not" in refusal(imported, "arch", "allowed_pkg:rmtree", 1)
    with imports_allowed(["allowed_pkg:which"]):
        assert imported("arch", "allowed_pkg:which", 1).__name__ == "which"
        assert "may not" in refusal(imported, "arch", "allowed_pkg:rmtree", 1)


def test_of_two_limits_both_must_allow_and_each_ends(package):
    with imports_allowed(["allowed_pkg", "math"]):
        with imports_allowed(["allowed_pkg.sub", "cmath"]):
            assert imported("arch", "allowed_pkg.sub:f", 1)(3) == 3
            assert refusal(imported, "arch", "math:sqrt", 1).endswith("allowed are allowed_pkg.sub")
            assert "may not" in refusal(imported, "arch", "cmath:sqrt", 1)
        assert imported("arch", "math:sqrt", 1)(9) == 3
        assert "may not" in refusal(imported, "arch", "cmath:sqrt", 1)
    assert imported("arch", "cmath:sqrt", 1)(9) == 3


def test_a_limit_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), imports_allowed([]):
        print(1 / 0)
    assert imported("arch", "math:sqrt", 1)(9) == 3


def test_limits_hold_in_every_thread_and_may_end_in_any_order():
    def tried():
        found = []

        def call():
            try:
                found.append(imported("arch", "math:sqrt", 1)(9))
            except SplitcastError as error:
                found.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found[0]

    first, second = imports_allowed(["math"]), imports_allowed(["torch"])
    assert tried() == 3
    first.__enter__()
    assert tried() == 3
    second.__enter__()
    assert "may not be imported" in tried()
    first.__exit__(None, None, None)
    assert tried().endswith("allowed are torch")
    second.__exit__(None, None, None)
    assert tried() == 3


@pytest.mark.parametrize("entry", ["", "a b", "math:", ":f", "math:a.b", "../x", "math\n"])
def test_entries_that_are_no_module_are_refused(entry):
    def enter():
        with imports_allowed(["math", entry]):
            pass

    assert refusal(enter).startswith(f"imports: {entry!r} is not")


def test_a_limit_of_the_process_stays():
    code = """
from splitcast.base.errors import SplitcastError, imported, imports_allowed, limit_imports
limit_imports(["math"])
with imports_allowed(["math", "cmath"]):
    pass
print(imported("arch", "math:sqrt", 1)(9))
try:
    imported("arch", "cmath:sqrt", 1)
except SplitcastError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3.0\narch: 'cmath:sqrt' may not be imported here; allowed are math\n"


names = st.from_regex(r"[a-c]{1,2}", fullmatch=True)
modules = st.lists(names, min_size=1, max_size=3).map(".".join)


@given(st.lists(modules, max_size=3), modules)
def test_a_module_is_allowed_by_itself_and_those_above_it(prefixes, module):
    above = {".".join(module.split(".")[:k]) for k in range(1, 4)}
    with imports_allowed(prefixes):
        message = refusal(imported, "arch", f"{module}:no_such_function", 1)
    assert ("may not be imported" in message) == (not above & set(prefixes))


# Models


def two_blocks(input_shape, classes):
    return [nn.Flatten(), nn.Linear(int(np.prod(input_shape)), classes)]


def test_models_by_name_and_by_function():
    own = model.build(f"{__name__}:two_blocks", (1, 4, 4), 3, seed=0)
    assert (own.depth, own.size) == (2, 16 * 3 + 3)
    assert list(model.ARCHITECTURES) == ["cnn", "cnn-small", "resnet8", "resnet18", "gpt-small"]
    message = refusal(model.build, "resnet", (1, 28, 28), 10, seed=0)
    names = "cnn, cnn-small, resnet8, resnet18, gpt-small, smollm2, hf:FOLDER, hf:CONFIG.json, timm:NAME"
    assert message == f"arch: unknown 'resnet'; choose one of {names}, or module:function of yours"


# Data sets

ROWS = torch.arange(48.0).reshape(6, 2, 2, 2), torch.arange(6) % 3, torch.zeros(2, 2, 2, 2), torch.tensor([0, 3])


def four_tensors():
    return ROWS


def image_data():
    return data.from_tensors(*ROWS, name="mine")


def three_tensors():
    return ROWS[:3]


def bad_labels():
    return ROWS[0], ROWS[1] - 1, *ROWS[2:]


def of_a_folder(path):
    return ROWS


def test_data_sets_of_the_user():
    path = f"{__name__}:four_tensors"
    given = data.load(path)
    assert torch.equal(given.train_x, ROWS[0]) and torch.equal(given.test_y, ROWS[3])
    assert (given.classes, given.name) == (4, path)
    assert data.load(f"{__name__}:image_data").name == "mine"


def test_bad_data_sets_are_one_line():
    assert refusal(data.load, "imagenet") == (
        "dataset: unknown 'imagenet'; choose one of mnist-mini, mnist, fashion-mnist, cifar10, "
        "text-mini, sotu, moby-dick, kjv, spam-assassin, a folder, a .npz, .csv, .parquet, .txt, .md or .jsonl file, "
        "or module:function of yours"
    )
    message = refusal(data.load, f"{__name__}:three_tensors")
    assert message.endswith("returned tuple; allowed are Dataset and (train_x, train_y, test_x, test_y)")
    assert "train_y: smallest label is -1" in refusal(data.load, f"{__name__}:bad_labels")
    assert "not a function of 0 argument(s)" in refusal(data.load, f"{__name__}:of_a_folder")


# Channels


class Steps:
    """Gains that are the number of the round, for as many clients as asked."""

    def __init__(self, network, clients, seed):
        self.distance_m = np.arange(1.0, clients + 1) * network.radius_m
        self.clients, self.seed = clients, seed

    def at(self, round_):
        return [self.seed + float(round_)] * self.clients


def steady(network, clients, seed):
    return Rayleigh(np.full(clients, 0.5), seed)


def replayed(network, clients, seed):
    return Trace(np.ones((3, 2)))


class Faulty(Steps):
    def at(self, round_):
        answers = {1: [1.0, 1.0, 0.0], 2: [1.0, np.nan, 1.0], 3: [1.0, 1.0], 4: "many", 5: [[1.0, 1.0, 1.0]], 6: None}
        return answers[round_]


class Nowhere(Steps):
    distance_m = property(lambda self: [1.0, 2.0, -3.0], lambda self, value: None)


def test_channels_of_the_user():
    made = channel(NetworkConfig(channel=f"{__name__}:Steps", radius_m=7), clients=3, seed=10)
    assert made.at(4).tolist() == [14.0] * 3
    assert made.distance_m.tolist() == [7.0, 14.0, 21.0]
    own = channel(NetworkConfig(channel=f"{__name__}:steady"), clients=3, seed=10)
    assert isinstance(own, Rayleigh) and own.mean_gain.tolist() == [0.5] * 3


def test_rayleigh_is_the_channel_unless_told_otherwise():
    named, usual = (channel(each, 3, seed=1) for each in (NetworkConfig(channel="rayleigh"), NetworkConfig()))
    assert isinstance(usual, Rayleigh) and list(CHANNELS) == ["rayleigh"]
    np.testing.assert_array_equal(named.at(2), usual.at(2))


def test_a_trace_wins_over_a_channel(tmp_path):
    Trace(np.full((1, 2), 0.25)).save(tmp_path / "t.csv")
    made = channel(NetworkConfig(channel=f"{__name__}:Steps", trace=str(tmp_path / "t.csv")), 2, seed=0)
    assert made.at(1).tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("round_", "words"),
    [
        (1, "Faulty in round 1 is 0 for client 2; must be finite and > 0"),
        (2, "in round 2 is nan for client 1"),
        (3, "in round 3 has shape (2,); must be (3,), one per client"),
        (4, "in round 4 is str; must be an array of numbers"),
        (5, "in round 5 has shape (1, 3)"),
        (6, "in round 6 has shape ()"),
    ],
)
def test_bad_gains_are_named(round_, words):
    made = channel(NetworkConfig(channel=f"{__name__}:Faulty"), 3, seed=0)
    message = refusal(made.at, round_)
    assert message.startswith(f"channel: gain of {__name__}:") and words in message


def test_bad_channels_are_named():
    def at(name, clients=3, **network):
        return refusal(channel, NetworkConfig(channel=name, **network), clients, seed=0)

    assert at("rician") == "channel: unknown 'rician'; choose one of rayleigh, or module:function of yours"
    assert "not a function of 3 argument(s)" in at(f"{__name__}:double")
    assert "made int; it must have at(round)" in at(f"{__name__}:three_arguments")
    assert "has shape (2,); must be (3,)" in at(f"{__name__}:replayed")
    made = channel(NetworkConfig(channel=f"{__name__}:Nowhere"), 3, seed=0)
    assert "distance_m" in refusal(getattr, made, "distance_m") and made.at(1).tolist() == [1.0] * 3
    assert "mean gain (of distance_m and shadowing_db) is inf" in at("rayleigh", distance_m=1e-300)


def three_arguments(network, clients, seed):
    return 3


@given(st.integers(1, 20), st.floats(1e-3, 1e7), st.floats(1e-3, 1e7), st.floats(0, 300), st.integers(0, 2**63 - 1))
def test_every_cell_that_may_be_configured_has_gains_or_one_line(clients, one, other, shadowing, seed):
    near, far = sorted((one, other))
    network = NetworkConfig(min_distance_m=near, radius_m=far, shadowing_db=shadowing)
    made = channel(network, clients, seed)
    assert np.isfinite(made.at(1)).all() and (made.at(1) > 0).all()
    slack = 1e-9 * far
    assert (made.distance_m >= near - slack).all() and (made.distance_m <= far + slack).all()


# Policies


def stay(here):
    return 1


def test_policies_by_name():
    from splitcast.cutting.policies import POLICIES, fixed_cut, greedy, make_policy

    def policy(name):
        return make_policy(name, None, None, default_cut=3)

    assert policy("greedy") is greedy
    assert policy("fixed")(None) == 3 and policy("fixed:2")(None) == 2 and fixed_cut("fixed:-1", 1) == -1
    assert policy(f"{__name__}:stay") is stay
    assert list(POLICIES) == ["random", "greedy", "myopic"]
    for name in ("gredy", "ddqn", "ddqn:"):
        assert refusal(policy, name) == (
            f"policy: unknown {name!r}; choose one of random, greedy, myopic, fixed, fixed:V, lookahead, rollout, "
            "clairvoyant, bargain, assign:K, ddqn:FILE, or module:function of yours"
        )
    for name in ("fixed:", "fixed:two", "fixed:--1", "fixed:²", "fixed:1.0"):
        assert refusal(policy, name) == f"policy: {name!r}; give the cut as a number, fixed:1"
    assert "absent" in refusal(policy, "ddqn:absent.safetensors")
    with imports_allowed([]):
        assert "may not be imported" in refusal(policy, f"{__name__}:stay")
        assert policy("fixed:2")(None) == 2
