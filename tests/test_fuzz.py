"""Bad input is refused in one line: known cases by hand, and random ones of every class (`tests/fuzz`)."""

import io
import json
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fuzz.core import LONGEST_LINE, run_cases
from fuzz.run import SUBJECTS
from splitcast.base.config import NetworkConfig
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import cell
from splitcast.cost.channel import channel
from splitcast.cost.trace import Trace
from splitcast.cutting.ddqn import Agent, QNetwork
from splitcast.cutting.encoder import Encoder
from splitcast.data import catalog, sources
from splitcast.data.datasets import from_datasets, from_tensors
from splitcast.data.fetch import fetch
from splitcast.data.loading import load
from splitcast.data.npz import read_npz
from splitcast.data.partition import partition
from splitcast.data.sources import ImageRecipe

SECONDS = {"config": 4, "command": 9, "folder": 10, "server": 10, "site": 10, "trace": 3, "policy": 3, "npz": 4}
SHORT = 3  # the other classes


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_random_cases_have_no_findings(tmp_path, name, share):
    least = 60 if name == "folder" else 20  # of folders nine in ten cases are told
    outcome = run_cases(SUBJECTS[name](tmp_path), seed=20, seconds=share * SECONDS.get(name, SHORT), least=least)
    assert not outcome.findings, "\n".join(outcome.lines())
    assert outcome.cases >= 20 and len(outcome.words) > 1  # neither all refused nor all taken


def test_a_case_is_a_function_of_its_class_seed_and_number(tmp_path):
    first, again = (run_cases(SUBJECTS["trace"](tmp_path), seed=5, seconds=60, most=50, least=50) for _ in range(2))
    assert first.words == again.words and first.cases == 50


def refused(call, *args, **kwargs):
    with pytest.raises(SplitcastError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and len(message) <= LONGEST_LINE
    return message


# channels


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("999999999,0,1", "no gain for round 2, client 0"),
        ("1,999999999,1", "no gain for round 1, client 1"),
        ("100000000000000000000,0,1", "at most 9 digits"),
        ("1,1000000000000,1", "at most 9 digits"),
        ("1_0,0,1", "line 3 is '1_0,0,1'"),
        ("2,0,1,7", "line 3 is '2,0,1,7'"),
        ("٢,0,1", "two integers"),
        ("2,0," + "9" * 5000, "inf"),
    ],
)
def test_a_trace_allocates_nothing_for_what_it_does_not_hold(tmp_path, row, words):
    file = tmp_path / "t.csv"
    file.write_text(f"round,client,gain\n1,0,1\n{row}\n")
    assert words in refused(Trace.load, file)


def test_a_trace_is_a_file_of_bounded_size(tmp_path):
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(2**28 + 1)
    assert "at most 268,435,456" in refused(Trace.load, tmp_path / "large.csv")
    assert "is not a file" in refused(Trace.load, tmp_path)
    assert "cannot read" in refused(Trace.load, tmp_path / "a\0b")
    assert "type <U1" in refused(Trace, np.array([["x"]]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"radius_m": 1e308}, "radius_m: input should be less than or equal to 10000000"),
        ({"distance_m": (5e-324,)}, "mean gain (of distance_m and shadowing_db) is inf"),
        ({"distance_m": (1e-60,)}, "must be from 1e-200 to 1e+200"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_gains_that_no_time_comes_of_are_refused(values, words):
    assert words in refused(lambda: channel(NetworkConfig(**values), 3, 0))


def test_a_trace_beyond_all_gains_is_refused(tmp_path):
    Trace(np.array([[1.0], [1e-300]])).save(tmp_path / "t.csv")
    said = refused(channel, NetworkConfig(trace=str(tmp_path / "t.csv")), 1, 0)
    assert "gain 1e-300 in round 2, client 0; must be from 1e-200" in said


@pytest.mark.parametrize("field", ["bandwidth_hz", "server_flops_per_s", "client_flops_per_s"])
def test_a_cell_of_almost_nothing_is_refused(field):
    assert "must be from 1e-40 to 1e+40" in refused(cell, NetworkConfig(**{field: 5e-324}), 2, 0)


# policies


@pytest.fixture
def policy(tmp_path):
    code = Encoder(np.full(2, -9.0), np.ones(2), 3.0, 4, True)
    Agent(QNetwork(code.size, 5, 4), code, "00ff").save(tmp_path / "p.safetensors")
    content = (tmp_path / "p.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + length])["__metadata__"]
    assert Agent.load(tmp_path / "p.safetensors").encoder.size == 7
    return tmp_path / "p.safetensors", load_tensors(content), facts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"network/head.bias": torch.zeros(5)}, "F32 [5] as 'network/head.bias'; allowed is F32 [4]"),
        ({"network/head.bias": torch.zeros(4).double()}, "F64 [4] as 'network/head.bias'; allowed is F32 [4]"),
        ({"network/head.bias": torch.full((4,), float("nan"))}, "NaN or infinite values in network/head.bias"),
        ({"network/x": torch.zeros(4)}, "F32 [4] as 'network/x'; allowed is nothing"),
        ({"scale/log_gain_mean": torch.zeros(3).double()}, "F64 [3] as 'scale/log_gain_mean'; allowed is F64 [2]"),
        ({"scale/budget_s": torch.zeros(1).double()}, "scale/budget_s 0; allowed are numbers above 0"),
    ],
)
def test_tensors_of_a_policy_are_compared(policy, change, words):
    file, tensors, facts = policy
    file.write_bytes(save_tensors(tensors | change, facts))
    assert words in refused(Agent.load, file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": "10000000"}, "hidden '10000000'"),
        ({"hidden": "999999"}, "as 'network/body.0.weight'; allowed is F32 [999999, 7]"),
        ({"cuts": "-1"}, "cuts '-1'"),
        ({"shows_cut": "yes"}, "shows_cut 'yes'"),
        ({"clients": "two"}, "clients 'two'"),
        ({"scenario": "[/x]"}, "scenario '[/x]'"),
        ({"more": "1"}, "see 'more'"),
        ({"format": "splitcast-ddqn-2"}, "is not a learned policy"),
    ],
)
def test_metadata_of_a_policy_are_compared_before_anything_is_made(policy, change, words):
    file, tensors, facts = policy
    file.write_bytes(save_tensors(tensors, facts | change))
    assert words in refused(Agent.load, file)


def test_missing_parts_and_huge_headers_of_a_policy_are_refused(policy):
    file, tensors, facts = policy
    file.write_bytes(save_tensors({k: v for k, v in tensors.items() if k != "scale/budget_s"}, facts))
    assert "nothing as 'scale/budget_s'; allowed is F64 [1]" in refused(Agent.load, file)
    file.write_bytes(save_tensors(tensors, {k: v for k, v in facts.items() if k != "cuts"}))
    assert "see 'cuts'" in refused(Agent.load, file)
    file.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    assert "a header of 1,099,511,627,776 bytes" in refused(Agent.load, file)
    assert "it is not a file" in refused(Agent.load, file.parent)


# arrays


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.array(["cat"]), "<U3"),
        (np.array([1], dtype=np.uint64), "<u8"),
        (np.array([1j]), "<c16"),
        (np.array([1], dtype="M8[s]"), "<M8[s]"),
        (np.array([b"cat"]), "|S3"),
        (np.zeros(1, dtype=np.longdouble), "<f16"),
    ],
)
def test_arrays_of_other_types_are_refused(tmp_path, array, kind):
    said = refused(read_npz, npz(tmp_path / "a.npz", x=array), ["x"])
    assert f"x of type '{kind}'; allowed are b1" in said


def test_objects_and_records_are_refused(tmp_path):
    said = refused(read_npz, npz(tmp_path / "a.npz", x=np.array([{}], dtype=object)), ["x"])
    assert "x of type '|O'" in said
    said = refused(read_npz, npz(tmp_path / "a.npz", x=np.zeros(1, dtype=[("a", "f4")])), ["x"])
    assert "not of plain numbers" in said


@pytest.mark.parametrize("kind", ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", ">f4", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_arrays_are_read_as_numpy_reads_them(tmp_path, kind, order):
    for shape in ((), (0, 3), (5,), (2, 3, 4)):
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind, order=order)
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / "a.npz", x=array, other=np.array([{}], dtype=object))
            found = read_npz(tmp_path / "a.npz", ["x"])["x"]
            assert np.array_equal(found, array) and found.shape == shape and found.dtype.isnative
            assert found.dtype == array.dtype.newbyteorder("=")


def test_an_archive_that_inflates_beyond_the_limit_is_not_read(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(10**7, np.uint8), y=np.zeros(3))
    assert (tmp_path / "a.npz").stat().st_size < 20_000
    assert "inflates to 10,000,128 bytes; at most 1,000,000" in refused(read_npz, tmp_path / "a.npz", ["x"], 10**6)
    assert read_npz(tmp_path / "a.npz", ["y"], 1000)["y"].shape == (3,)


def with_header(shape, data=bytes(4)):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("(1000000, 1000000, 1000000)", "of shape (1000000, 1000000, 1000000), which is not its 132 bytes"),
        ("(99999999999999999999,)", "no header"),
        (f"({'1' * 3000}x)", "no header"),
        ("(5,)", "of shape (5,), which is not its 132 bytes"),
        ("(-4,)", "no header"),
        ("(2, 2, 1, 1, 1, 1, 1, 1, 1)", "9 dimensions; at most 8"),
    ],
)
def test_shapes_are_compared_with_the_bytes_there_are(tmp_path, shape, words):
    (tmp_path / "a.npz").write_bytes(with_header(shape))
    assert words in refused(read_npz, tmp_path / "a.npz", ["x"])


def test_sizes_that_a_file_cannot_hold_are_refused(tmp_path):
    content = bytearray(with_header("(4,)"))
    at = content.find(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 2**31)
    (tmp_path / "a.npz").write_bytes(content)
    said = refused(read_npz, tmp_path / "a.npz", ["x"])
    assert f"says that x has 2,147,483,648 bytes, more than a file of {len(content)} can hold" in said


def test_what_is_no_archive_or_lacks_an_array_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"hello")
    assert "must be a .npz file, whole" in refused(read_npz, tmp_path / "a.npz", ["x"])
    assert "is not a file" in refused(read_npz, tmp_path, ["x"])
    assert "has 0 arrays x; allowed is one" in refused(read_npz, npz(tmp_path / "b.npz", y=np.zeros(1)), ["x"])
    content = bytearray(npz(tmp_path / "c.npz", x=np.zeros(9)).read_bytes())
    content[200] ^= 1
    (tmp_path / "c.npz").write_bytes(content)
    assert "CRC" in refused(read_npz, tmp_path / "c.npz", ["x"])


GOOD = {
    "train_x": np.zeros((3, 1, 2, 2), np.uint8),
    "train_y": np.array([0, 1, 2], np.uint8),
    "test_x": np.zeros((2, 1, 2, 2), np.uint8),
    "test_y": np.array([0, 1], np.uint8),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_x": np.zeros((3, 2, 2), np.uint8)}, "train_x: uint8 of shape (3, 2, 2)"),
        ({"train_x": np.zeros((3, 1, 2, 2))}, "train_x: float64"),
        ({"train_x": np.zeros((3, 3, 2, 2), np.uint8)}, "train_x: 3 channels; allowed are 1"),
        ({"test_x": np.zeros((2, 1, 2, 3), np.uint8)}, "test_x: shape is (2, 1, 2, 3)"),
        ({"test_y": np.zeros(3, np.uint8)}, "test_x: shape is (2, 1, 2, 2) for 3 labels"),
        ({"train_y": np.zeros(0, np.uint8)}, "train_y: uint8 of shape (0,)"),
        ({"train_y": np.zeros(3, np.int64)}, "train_y: int64"),
    ],
)
def test_a_stored_dataset_of_other_arrays_is_damaged_and_fetched_again(tmp_path, change, words):
    npz(tmp_path / "mnist.npz", **GOOD | change)
    said = refused(load, "mnist", tmp_path)
    assert words in said and "splitcast data get mnist" in said
    if "channels" not in said and "shape is" not in said:  # those are whole arrays, only not of this set
        whole = ImageRecipe((sources.Source("here", lambda folder, report: {}),), {}, lambda parts: GOOD)
        fetch("mnist", tmp_path, recipe=whole, report=lambda *_: None)
        assert len(load("mnist", tmp_path).train_y) == 3


def tensors(**changes):
    made = {"train_x": torch.zeros(3, 1, 2, 2), "train_y": torch.arange(3)}
    made |= {"test_x": torch.zeros(2, 1, 2, 2), "test_y": torch.arange(2)}
    return made | changes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_x": torch.zeros(3, 1, 2, 2, dtype=torch.complex64)}, "train_x: a tensor of type torch.complex64"),
        ({"train_y": torch.zeros(3, dtype=torch.complex64)}, "train_y: a tensor of type torch.complex64"),
        ({"train_x": torch.zeros(3, 1, 2, 2).to_sparse()}, "torch.sparse_coo"),
        ({"train_x": torch.zeros(3, 1, 2, 2, device="meta")}, "on meta"),
        ({"train_x": "images"}, "train_x: str; allowed is a tensor of numbers"),
        ({"train_x": np.array([["a"]])}, "train_x: ndarray"),
        ({"train_y": torch.tensor([0, 1, 2**40])}, "train_y: largest label is 1099511627776; allowed are 0 to 1000000"),
        ({"test_y": torch.tensor([0, 10**6 + 1])}, "test_y: largest label is 1000001"),
        ({"train_y": torch.arange(3).to(torch.uint64)}, "train_y: type is torch.uint64"),
        ({"train_x": torch.full((3, 1, 2, 2), 1e300, dtype=torch.float64)}, "train_x: holds NaN or infinite"),
    ],
)
def test_tensors_that_are_no_images_or_labels_are_refused(change, words):
    assert words in refused(from_tensors, **tensors(**change))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32])
def test_labels_of_any_plain_integer_are_taken(kind):
    made = from_tensors(**tensors(train_y=torch.arange(3).to(kind)))
    assert made.train_y.dtype == torch.int64 and made.train_y.tolist() == [0, 1, 2]


def test_own_datasets_that_fail_or_lie_are_refused():
    class Endless(list):
        def __len__(self):
            return 10**15

        def __getitem__(self, at):
            return torch.zeros(1, 2, 2), 0

    class Broken(list):
        def __getitem__(self, at):
            raise KeyError("no\nsuch row")

    assert "what the memory can hold" in refused(from_datasets, Endless(), Endless())
    assert "train[0]" in refused(from_datasets, Broken([1]), Broken([1]))
    odd = [(torch.zeros(1, 2, 2, dtype=torch.complex64), 0)]
    assert "complex64" in refused(from_datasets, odd, odd)
    assert "train[0]: a tensor of type torch.complex64" in refused(from_datasets, [(torch.zeros(1, 2, 2), 1j)], odd)


def test_a_table_of_too_many_clients_and_classes_is_refused():
    said = refused(partition, np.arange(20_000), 10_000, "dirichlet", rng=np.random.default_rng(0))
    assert said == "clients = 10000: with 20000 classes, allowed are 1 to 5000 for dirichlet"


def test_what_a_source_unpacks_to_is_bounded(monkeypatch):
    bomb = zlib.compressobj(wbits=31)
    content = bomb.compress(bytes(10**7)) + bomb.flush()
    assert len(sources.gunzipped(content + content)) == 2 * 10**7
    monkeypatch.setattr(sources, "MOST_BYTES", 10**6)
    for bad in (content, content[:-9]):
        with pytest.raises(ValueError, match="more than 1,000,000 bytes"):
            sources.gunzipped(bad)
    with pytest.raises(ValueError, match="cut short"):
        sources.gunzipped(zlib.compress(b"x", wbits=31)[:-9])
    with pytest.raises(TypeError):  # a number of labels, in place of a list of them, is not so many zeros
        catalog.cifar_pngs(dict.fromkeys(catalog.CIFAR_LABELS.values(), b"1000000000000"))
