"""A run folder holds what was written, survives a crash at any moment, and refuses what was changed."""

import json
import os
import signal
import stat
import sys
import tempfile
import time
import warnings
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from splitcast.base import files
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.run import lines, records
from splitcast.run.records import RoundRecord, RoundsReader, RunFolder
from splitcast.run.verify import verify
from waiting import PATIENCE_S

CONFIG = with_values(Config(), rounds=8)
ABOUT = {"cut": "2", "copies": "0"}
SLOW = settings(deadline=None, max_examples=60)


def record(t, **values):
    made = RoundRecord(
        round=t,
        cut=1,
        clients=2,
        loss=2.0 / t,
        up_bytes=300,
        down_bytes=100,
        kinds={"up.smashed": 300, "down.gradient": 100},
        drift=0.5,
        latency_s=1.5,
        slowest_client=1,
        slowest_part="uplink",
        test_accuracy=0.25 if t % 2 == 0 else None,
        metrics={"rank": 8.0},
    )
    return replace(made, **values)


def tensors(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "client/trained/0.weight": torch.randn(3, 2, generator=draw),
        "server/trained/1.bias": torch.randn(4, generator=draw, dtype=torch.float64),
        "server/opt/step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5, generator=draw).bfloat16(),
    }


def write_run(path, rounds=6, checkpoint=4, summary=True):
    """A run with a checkpoint before its last rounds."""
    folder = RunFolder(path)
    folder.create(CONFIG)
    for t in range(1, rounds + 1):
        folder.append(record(t))
        if t == checkpoint:
            folder.save(tensors(), ABOUT, t, samples="these")
    if summary:
        folder.finish({"rounds": rounds, "accuracy": 0.25})
    return folder


def edit(file, old, new, count=1):
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, count))


def lines_of(folder):
    return folder.rounds_file.read_bytes().splitlines(keepends=True)


def write_lines(folder, content):
    folder.rounds_file.write_bytes(b"".join(content))


def read_all(folder):
    """Everything a resume reads."""
    folder.config(), folder.measured("gamma")
    if folder.checkpoint_file.exists():
        folder.rewind(folder.restore("these").round)
    folder.rounds()
    if folder.summary_file.exists():
        folder.summary()


# ---- what is written is read


def test_a_run_is_read_as_it_was_written(tmp_path):
    folder = write_run(tmp_path / "deep" / "run")
    assert folder.config() == CONFIG
    assert folder.rounds() == [record(t) for t in range(1, 7)] == RunFolder(folder.path).rounds()
    assert folder.rounds(upto=2) == [record(1), record(2)]
    assert folder.summary() == {"rounds": 6, "accuracy": 0.25}
    found = folder.restore("these")
    assert (found.round, found.about, folder.checkpointed()) == (4, ABOUT, 4)
    assert found.tensors.keys() == tensors().keys()
    for name, value in tensors().items():
        assert found.tensors[name].dtype == value.dtype and torch.equal(found.tensors[name], value)
    assert verify(folder.path) == []
    assert sorted(file.name for file in folder.path.iterdir()) == sorted(
        ["run.json", "config.toml", "rounds.jsonl", "checkpoint.safetensors", "summary.json"]
    )


def test_a_record_knows_its_bytes():
    assert record(1).bytes == 400


def test_the_chain_is_the_digest_of_the_chain_before_and_the_line(tmp_path):
    folder = write_run(tmp_path, rounds=3, checkpoint=3)
    run = json.loads(folder.run_file.read_text())["run"]
    chain = blake2b(run.encode(), digest_size=16).hexdigest()
    for line in lines_of(folder):
        values = json.loads(line)
        stored = values.pop("chain")
        chain = blake2b(chain.encode() + json.dumps(values).encode(), digest_size=16).hexdigest()
        assert stored == chain
    assert chain.encode() in folder.checkpoint_file.read_bytes()
    assert json.loads(folder.summary_file.read_text())["chain"] == chain


def test_two_runs_of_the_same_numbers_are_two_runs(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert a.rounds() == b.rounds() and lines_of(a)[0] != lines_of(b)[0]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**63 - 1)
any_record = st.builds(
    RoundRecord,
    round=st.just(1),
    cut=st.integers(-(2**63), 2**63 - 1),
    clients=counts,
    loss=finite,
    up_bytes=counts,
    down_bytes=counts,
    kinds=st.dictionaries(names, counts, max_size=4),
    drift=st.none() | finite,
    latency_s=finite,
    slowest_client=st.integers(-1, 99),
    slowest_part=names,
    test_loss=st.none() | finite,
    test_accuracy=st.none() | finite,
    metrics=st.dictionaries(names, finite, max_size=4),
    wall_s=st.none() | st.dictionaries(names, finite, max_size=4),
    failures=st.none() | st.dictionaries(names, names, max_size=4),
)


@SLOW
@given(st.lists(any_record, min_size=1, max_size=5))
def test_any_records_are_read_as_they_were_written(made):
    made = [replace(each, round=t) for t, each in enumerate(made, 1)]
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.create(CONFIG)
        for each in made:
            folder.append(each)
        assert folder.rounds() == made
        assert verify(folder.path) == []


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"loss": float("nan")}, "loss: nan in round 1"),
        ({"test_loss": float("inf")}, "test_loss: inf in round 1"),
        ({"metrics": {"gamma": float("inf")}}, "metrics: a dict in round 1"),
        ({"up_bytes": 2**63}, "up_bytes: 9223372036854775808 in round 1"),
        ({"clients": True}, "clients: True in round 1"),
        ({"slowest_part": "x" * 1001}, "slowest_part: 'xxxx"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, bad, told):
    folder = write_run(tmp_path, rounds=0, checkpoint=None, summary=False)
    with pytest.raises(SplitcastError, match=told):
        folder.append(record(1, **bad))
    assert not folder.rounds_file.exists()


def test_a_long_reason_of_a_failure_is_clipped_and_kills_no_run(tmp_path):
    folder = write_run(tmp_path, rounds=0, checkpoint=None, summary=False)
    folder.append(record(1, failures={"site-1": "why " * 1000 + "\ud800"}))
    assert folder.rounds()[0].failures == {"site-1": ("why " * 1000)[:1000]}


def test_rounds_are_appended_in_order_and_saved_at_their_end(tmp_path):
    folder = write_run(tmp_path, summary=False)
    for wrong in (6, 8):
        with pytest.raises(SplitcastError, match=f"round: {wrong} cannot follow round 6"):
            folder.append(record(wrong))
    with pytest.raises(SplitcastError, match="ends with 6; cannot save round 7"):
        folder.save(tensors(), ABOUT, 7)
    with pytest.raises(SplitcastError, match="about: chain is a name of the checkpoint itself"):
        folder.save(tensors(), {"chain": "0"}, 6)
    with pytest.raises(SplitcastError, match="not a text of 1000"):
        folder.save(tensors(), {"cut": "1" * 1001}, 6)
    assert folder.restore().round == 4


def test_two_writers_without_lock_still_make_one_chain(tmp_path):
    a, b = write_run(tmp_path, rounds=2, checkpoint=2, summary=False), RunFolder(tmp_path)
    for t in range(3, 9):
        (a if t % 2 else b).append(record(t))
    assert len(a.rounds()) == 8 and verify(tmp_path) == []


def test_a_run_may_be_asked_for_more_rounds(tmp_path):
    folder = write_run(tmp_path)
    more = with_values(CONFIG, rounds=20)
    folder.reconfigure(more)
    assert folder.config() == more and not folder.summary_file.exists()
    assert folder.restore("these").round == 4 and folder.rounds() == [record(t) for t in range(1, 7)]
    assert verify(tmp_path) == []
    assert "next" not in json.loads(folder.run_file.read_text())


def test_the_data_of_a_run_is_its_own(tmp_path):
    folder = write_run(tmp_path)
    assert folder.restore().round == 4
    with pytest.raises(SplitcastError, match="trained on other data"):
        folder.restore("others")


# ---- attacks


def swap_lines(folder, other):
    a, b, *rest = lines_of(folder)
    write_lines(folder, [b, a, *rest])


def swap_contents(folder, other):
    """Lines 2 and 3 swapped, with their round numbers in order."""
    a, b, c, *rest = lines_of(folder)
    b, c = c.replace(b'"round": 3', b'"round": 2'), b.replace(b'"round": 2', b'"round": 3')
    write_lines(folder, [a, b, c, *rest])


def repeat_line(folder, other):
    a, b, *rest = lines_of(folder)
    write_lines(folder, [a, b, b, *rest])


def remove_first(folder, other):
    write_lines(folder, lines_of(folder)[1:])


def remove_middle(folder, other):
    a, _, *rest = lines_of(folder)
    write_lines(folder, [a, *rest])


def remove_last(folder, other):
    write_lines(folder, lines_of(folder)[:-1])


def cut_below_checkpoint(folder, other):
    write_lines(folder, lines_of(folder)[:3])
    folder.summary_file.unlink()


def remove_rounds(folder, other):
    folder.rounds_file.unlink()


def other_line(folder, other):
    write_lines(folder, [lines_of(other)[0], *lines_of(folder)[1:]])


def rechain(folder, numbers, run):
    """All lines again, some changed, with right chains: what the checkpoint must notice."""
    chain, made = lines.start_of(run), []
    for each in folder.rounds():
        line, chain = lines.line_of(replace(each, **numbers.get(each.round, {})), chain, True)
        made.append(line)
    write_lines(folder, made)


def rechained(folder, other):
    rechain(folder, {3: {"up_bytes": 1}}, json.loads(folder.run_file.read_text())["run"])
    folder.summary_file.unlink()


def other_rounds(folder, other):
    folder.rounds_file.write_bytes(other.rounds_file.read_bytes())


def other_checkpoint(folder, other):
    folder.checkpoint_file.write_bytes(other.checkpoint_file.read_bytes())


def other_summary(folder, other):
    folder.summary_file.write_bytes(other.summary_file.read_bytes())


def other_identity(folder, other):
    folder.run_file.write_bytes(other.run_file.read_bytes())


def stale_summary(folder, other):
    folder.append(record(7))


def no_identity(folder, other):
    folder.run_file.unlink()


def no_identity_no_rounds(folder, other):
    folder.run_file.unlink()
    folder.rounds_file.unlink()


def old_checkpoint(folder, other):
    folder.checkpoint_file.write_bytes(old_checkpoint_file(4))


def flip(name, place):
    def attack(folder, other):
        content = bytearray((folder.path / name).read_bytes())
        content[place] ^= 1
        (folder.path / name).write_bytes(content)

    return attack


def change(name, old, new):
    return lambda folder, other: edit(folder.path / name, old, new)


def put(name, content):
    return lambda folder, other: (folder.path / name).write_bytes(content)


def truncate(name):
    return lambda folder, other: os.truncate(folder.path / name, (folder.path / name).stat().st_size // 2)


CHECKPOINT, ROUNDS, SUMMARY = "checkpoint.safetensors", "rounds.jsonl", "summary.json"
ATTACKS = {
    "swapped lines": (swap_lines, "rounds.jsonl line 1 is round 2, not 1: lines were removed, repeated or swapped"),
    "swapped contents": (swap_contents, "rounds.jsonl line 2 does not follow"),
    "repeated line": (repeat_line, "rounds.jsonl line 3 is round 2, not 3"),
    "removed first line": (remove_first, "rounds.jsonl line 1 is round 2, not 1"),
    "removed middle line": (remove_middle, "rounds.jsonl line 2 is round 3, not 2"),
    "removed last line": (remove_last, "summary.json is of another run or of other rounds"),
    "lost lines": (cut_below_checkpoint, "rounds.jsonl has 3 of the 4 rounds of the checkpoint"),
    "lost rounds": (remove_rounds, "rounds.jsonl has 0 of the 4 rounds of the checkpoint"),
    "edited number": (change(ROUNDS, b'"up_bytes": 300', b'"up_bytes": 200'), "line 1 does not follow"),
    "edited white space": (change(ROUNDS, b'"cut": 1', b'"cut":  1'), "line 1 does not follow"),
    "edited chain": (change(ROUNDS, b'"chain": "', b'"chain": "0'), "line 1 has a chain that nothing explains"),
    "key after the chain": (change(ROUNDS, b'"}\n', b'", "x": 1}\n'), "line 1 has a chain that nothing explains"),
    "unchained line": (put(ROUNDS, json.dumps(vars(record(1))).encode() + b"\n"), "line 1 has no chain"),
    "line of another run": (other_line, "line 1 does not follow"),
    "lines chained again": (rechained, "checkpoint.safetensors is of other rounds 1 to 4 than rounds.jsonl"),
    "rounds of another run": (other_rounds, "rounds.jsonl line 1 does not follow"),
    "binary line": (put(ROUNDS, b"\xff\xfe\n"), "line 1 is damaged: not a text in UTF-8"),
    "empty line": (put(ROUNDS, b"\n"), "line 1 is not a round"),
    "checkpoint of another run": (other_checkpoint, "checkpoint.safetensors is of another run"),
    "checkpoint of an older version": (old_checkpoint, "is of another run (without identity, not"),
    "round of the checkpoint": (change(CHECKPOINT, b'"round":"4"', b'"round":"5"'), "do not match their digest"),
    "cut of the checkpoint": (change(CHECKPOINT, b'"cut":"2"', b'"cut":"1"'), "do not match their digest"),
    "data of the checkpoint": (change(CHECKPOINT, b'"these"', b'"those"'), "do not match their digest"),
    "name of a tensor": (change(CHECKPOINT, b"0.weight", b"2.weight"), "do not match their digest"),
    "shape of a tensor": (change(CHECKPOINT, b"[3,2]", b"[2,3]"), "do not match their digest"),
    "type of a tensor": (change(CHECKPOINT, b'"F32","shape":[3,2]', b'"I32","shape":[3,2]'), "match their digest"),
    "content of a tensor": (flip(CHECKPOINT, -1), "do not match their digest"),
    "format of the checkpoint": (change(CHECKPOINT, b"checkpoint-2", b"checkpoint-3"), "has format"),
    "name in the metadata": (change(CHECKPOINT, b'"chain":', b'"chaim":'), "metadata has no chain"),
    "half a checkpoint": (truncate(CHECKPOINT), "is corrupt or truncated"),
    "empty checkpoint": (put(CHECKPOINT, b""), "is corrupt or truncated"),
    "config": (change("config.toml", b"lr = 0.02", b"lr = 0.03"), "config.toml was edited since the run began"),
    "comment in config": (change("config.toml", b"[data]", b"# mine\n[data]"), "config.toml was edited"),
    "binary config": (put("config.toml", b"\xff"), "config.toml is not a text in UTF-8"),
    "deep config": (put("config.toml", b"a = " + b"[" * 50_000), "not valid TOML"),
    "long number in config": (put("config.toml", b"a = " + b"1" * 5000), "not valid TOML"),
    "summary": (change(SUMMARY, b'"rounds": 6', b'"rounds": 7'), "summary.json was edited"),
    "half a summary": (truncate(SUMMARY), "summary.json is damaged"),
    "summary of a list": (put(SUMMARY, b"[]"), "summary.json is damaged"),
    "deep summary": (put(SUMMARY, b"[" * 100_000), "summary.json is damaged"),
    "nan in summary": (put(SUMMARY, b'{"a": NaN}'), "summary.json is damaged"),
    "summary of another run": (other_summary, "summary.json is of another run or of other rounds"),
    "rounds after the summary": (stale_summary, "summary.json is of another run or of other rounds"),
    "identity of another run": (other_identity, "rounds.jsonl line 1 does not follow"),
    "no identity": (no_identity, "rounds.jsonl line 1 has a chain that nothing explains"),
    "no identity and no rounds": (no_identity_no_rounds, "checkpoint.safetensors is of another run"),
    "bad identity": (change("run.json", b'"run": "', b'"run": "x'), "run.json is damaged: bad run"),
    "identity of a list": (put("run.json", b"[]"), "run.json is damaged"),
    "other format": (change("run.json", b"splitcast-run-1", b"splitcast-run-2"), "run.json is damaged: bad format"),
    "long identity": (put("run.json", b" " * 20_000), "run.json is damaged: longer than"),
    "gamma": (put("gamma.json", b'{"gamma": [1, NaN]}'), "gamma.json is damaged"),
    "gamma of texts": (put("gamma.json", b'{"gamma": ["1"]}'), "gamma.json is damaged"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_every_change_is_refused_in_one_line_that_says_where(tmp_path, name):
    folder, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    attack, told = ATTACKS[name]
    attack(folder, other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(SplitcastError) as caught:
            read_all(folder)
        assert "\n" not in str(caught.value)
        problems = verify(folder.path)
    assert any(told in problem for problem in problems), problems
    assert all("\n" not in problem and str(folder.path) in problem for problem in problems)
    assert verify(other.path) == []


def test_a_summary_of_another_run_without_rounds_is_refused(tmp_path):
    folder, other = (write_run(tmp_path / name, rounds=0, checkpoint=None) for name in ("run", "other"))
    assert folder.summary()["rounds"] == 0
    other_summary(folder, other)
    with pytest.raises(SplitcastError, match="is of another run"):
        folder.summary()


def test_every_bad_line_is_told_once_and_the_good_ones_are_not(tmp_path):
    folder = write_run(tmp_path, summary=False, checkpoint=None)
    a, b, c, _, e, f = lines_of(folder)
    write_lines(
        folder, [a, b.replace(b'_bytes": 300', b'_bytes": 200'), c, b"{}\n", e, f.replace(b'"loss"', b'"lost"')]
    )
    told = [problem.split("rounds.jsonl ")[1].split(":")[0] for problem in verify(tmp_path)]
    assert told == [
        "line 2 does not follow from the lines before",
        "line 4 is not a round",
        "line 6 has an unknown key 'lost'",
    ]
    write_lines(folder, [b"x\n"] * 50)
    assert len(verify(tmp_path)) == 21


def test_verify_tells_of_what_a_crash_left(tmp_path):
    folder = write_run(tmp_path)
    (tmp_path / ".checkpoint.safetensors.tmp").write_bytes(b"half")
    (problem,) = verify(tmp_path)
    assert ".checkpoint.safetensors.tmp was left by a write that was stopped" in problem
    with folder.rounds_file.open("ab") as file:
        file.write(b'{"round": 7, "cu')
    assert any("line 7 is half-written" in problem for problem in verify(tmp_path))
    assert verify(tmp_path / "absent") == [f"run: {tmp_path / 'absent'} is not a folder"]
    assert "not a run folder" in verify(tmp_path.parent)[0]


def test_files_that_are_no_files_are_refused_without_waiting(tmp_path):
    folder = write_run(tmp_path)
    for file in (folder.rounds_file, folder.checkpoint_file, folder.summary_file, folder.run_file, folder.config_file):
        file.unlink()
        os.mkfifo(file)
    problems = verify(tmp_path)
    for file in ("rounds.jsonl", "checkpoint.safetensors", "summary.json", "run.json", "config.toml"):
        assert any(file in problem and "not" in problem for problem in problems), file
    with pytest.raises(SplitcastError, match="rounds.jsonl is not a file"):
        RoundsReader(tmp_path).new()


GOOD_LINE = vars(record(1, loss=2.0))
HOSTILE = {
    "round": [0, 2, -1, "1", 1.0, True, None, 2**64],
    "cut": ["1", 1.0, False, None, 2**63, [1]],
    "clients": [-1, 1.5, None, True],
    "loss": [None, "1", True, [1.0], 10**30],
    "up_bytes": [-1, 1.0, "1", None, 2**63],
    "kinds": [None, [], {"up": 1.0}, {"up": "1"}, {"up": True}, {"x" * 1001: 1}, {str(k): 1 for k in range(1001)}],
    "drift": ["1", True, {}],
    "latency_s": [None, "1"],
    "slowest_client": [None, 1.0],
    "slowest_part": [None, 1, "x" * 1001, "\ud800"],
    "test_loss": ["1", True],
    "test_accuracy": [[]],
    "metrics": [None, {"rank": None}, {"rank": "8"}, {"rank": True}, {"\ud800": 1.0}],
    "wall_s": [1.0, {"up": None}],
    "failures": ["x", {"site": 1}, {"site": None}],
    "uplink": [1, ["int8"], "x" * 1001, "\ud800"],
    "cuts": [1, "1", {"0": 1}, [1.0], [None], [True], [[1]], [2**63]],
}


def unchained(tmp_path, *content):
    """A folder of an older version, in which any line stands for itself."""
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "rounds.jsonl").write_bytes(b"".join(content))
    return RunFolder(tmp_path)


@pytest.mark.filterwarnings("ignore:run. .* is of an older version")
@pytest.mark.parametrize("field", HOSTILE)
def test_values_of_the_wrong_kind_are_refused_by_name(tmp_path, field):
    good = (json.dumps(GOOD_LINE) + "\n").encode()
    assert unchained(tmp_path, good).rounds() == [record(1)]
    for value in HOSTILE[field]:
        line = (json.dumps(GOOD_LINE | {"round": 2, field: value}) + "\n").encode()
        if field == "round" and value == 2:
            continue
        told = f"line 2 (has a bad {field}|is round)"
        with pytest.raises(SplitcastError, match=told) as caught:
            unchained(tmp_path, good, line).rounds()
        assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


@pytest.mark.filterwarnings("ignore:run. .* is of an older version")
@pytest.mark.parametrize(
    "line",
    [
        *(json.dumps(GOOD_LINE).replace("2.0", bad) for bad in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000)),
        *("[" * 100_000, '{"a":' * 100_000, "null", "[]", "1", '""', "{}", "{} {}", "{", '{"round": 1}'),
        json.dumps(GOOD_LINE | {"surprise": 1}),
        json.dumps(GOOD_LINE) + " {}",
        json.dumps(GOOD_LINE).replace("{", "{" + " " * 1_000_000, 1),
    ],
)
def test_lines_that_are_no_rounds_are_refused(tmp_path, line):
    with pytest.raises(SplitcastError, match="rounds.jsonl line 1 ") as caught:
        unchained(tmp_path, line.encode() + b"\n").rounds()
    assert len(str(caught.value)) < 300


def test_every_field_of_a_record_is_checked():
    assert set(HOSTILE) | {"down_bytes"} == {field.name for field in fields(RoundRecord)}


@SLOW
@given(
    st.sampled_from(["run.json", "config.toml", ROUNDS, CHECKPOINT, SUMMARY, "gamma.json"]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=6), st.integers(0, 8)), min_size=1),
)
def test_no_content_makes_reading_fail_in_another_way(name, edits):
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = write_run(Path(place) / "run")
        folder.save_measured("gamma", [1.0, 2.0])
        file = folder.path / name
        before, content = everything(folder), file.read_bytes()
        for where, new, gone in edits:
            at = int(where * len(content))
            content = content[:at] + new + content[at + gone :]
        file.write_bytes(content)
        problems = verify(folder.path)
        assert all(str(folder.path) in problem and "\n" not in problem for problem in problems)
        try:
            after = everything(folder)
        except SplitcastError as error:
            assert "\n" not in str(error) and problems
        else:
            assert after == before or problems or name == "gamma.json"


def everything(folder):
    """All that can be read, to be compared."""
    found = folder.restore("these")
    kept = {name: (value.dtype, value.tolist()) for name, value in found.tensors.items()}
    return folder.config(), folder.measured("gamma"), folder.rounds(), kept, found.about, found.round, folder.summary()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@SLOW
@given(st.dictionaries(st.sampled_from(list(GOOD_LINE)), json_values, max_size=4))
def test_a_line_of_any_json_is_a_record_or_refused(changes):
    line = json.dumps(GOOD_LINE | changes).encode()
    try:
        found, _ = lines.read_line(line, 1, "", chained=False)
    except lines.LineError:
        return
    again, _ = lines.line_of(found, "", chained=False)
    assert lines.read_line(again[:-1], 1, "", chained=False)[0] == found


# ---- an older version


def old_checkpoint_file(round_, **more):
    made = more | {
        "client/0.weight": torch.arange(6.0).reshape(2, 3),
        "client_momentum/0.weight": torch.ones(2, 3),
        "server/1.bias": torch.arange(4.0),
        "server_momentum/1.bias": torch.zeros(4),
    }
    total = blake2b(digest_size=16)
    for key in sorted(made):
        total.update(key.encode())
        total.update(made[key].numpy().tobytes())
    metadata = {"format": "splitcast-checkpoint-1", "round": str(round_), "cut": "1", "copies": "2"}
    return save_safetensors(made, metadata | {"samples": "these", "digest": total.hexdigest()})


def old_folder(path):
    line = {k: v for k, v in vars(record(1)).items() if k != "metrics"}
    old = [line | {"round": t, "rank": 4.0 * t, "dropped_energy": None, "gamma": 0.5} for t in (1, 2, 3)]
    write_lines(unchained(path), [(json.dumps(each) + "\n").encode() for each in old])
    (path / CHECKPOINT).write_bytes(old_checkpoint_file(2))
    (path / SUMMARY).write_text('{"rounds": 3}')
    return RunFolder(path)


def test_a_folder_of_an_older_version_is_read_with_one_warning(tmp_path):
    folder = old_folder(tmp_path)
    with pytest.warns(UserWarning, match="is of an older version .*client/NAME as client/trained/NAME") as told:
        found = folder.restore("these")
        rounds = folder.rewind(found.round)
        assert folder.rounds() == rounds
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert (found.round, found.about) == (2, {"cut": "1", "copies": "2"})
    assert found.tensors["client/trained/0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.tensors["client/opt/momentum/0.weight"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert set(found.tensors) == {
        *("client/trained/0.weight", "client/opt/momentum/0.weight"),
        *("server/trained/1.bias", "server/opt/momentum/1.bias"),
    }
    assert [each.metrics for each in rounds] == [{"rank": 4.0, "gamma": 0.5}, {"rank": 8.0, "gamma": 0.5}]
    assert folder.summary() == {"rounds": 3} and verify(tmp_path) == []


@pytest.mark.filterwarnings("ignore:run. .* is of an older version")
def test_a_run_of_an_older_version_goes_on(tmp_path):
    folder = old_folder(tmp_path)
    folder.rewind(folder.restore().round)
    folder.reconfigure(CONFIG)
    folder.append(record(3))
    folder.save(tensors(), ABOUT, 3)
    folder.finish({"rounds": 3})
    assert folder.config() == CONFIG and verify(tmp_path) == []
    assert RunFolder(tmp_path).restore().round == 3
    edit(folder.rounds_file, b'"up_bytes": 300', b'"up_bytes": 200')
    with pytest.raises(SplitcastError, match="is of other rounds 1 to 3"):
        folder.restore()


@pytest.mark.filterwarnings("ignore:run. .* is of an older version")
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b'"round":"2"', b'"round":"9"', "has 3 of the 9 rounds"),
        (b'"round":"2"', b'"round":"x"', "its round is 'x'"),
        (b'"cut"', b'"cup"', "metadata has no cut"),
        (b'"client/0.weight"', b'"klient/0.weight"', "do not match"),
    ],
)
def test_an_older_checkpoint_is_parsed_strictly(tmp_path, old, new, told):
    folder = old_folder(tmp_path)
    edit(folder.checkpoint_file, old, new)
    with pytest.raises(SplitcastError, match=told):
        folder.restore()


@pytest.mark.filterwarnings("ignore:run. .* is of an older version")
@pytest.mark.parametrize("bad", ["٢", "²", "-2", "2.0", " 2", "", "2_0", "0000000002"])
def test_the_round_of_a_checkpoint_is_a_few_digits(tmp_path, bad):
    folder = old_folder(tmp_path)
    folder.checkpoint_file.write_bytes(old_checkpoint_file(bad))
    for look in (folder.restore, folder.checkpointed):
        with pytest.raises(SplitcastError, match="is corrupt .its round is") as caught:
            look()
        assert str(caught.value).isascii()


@pytest.mark.filterwarnings("ignore:run. .* is of an older version")
@pytest.mark.parametrize("name", ["other/0.weight", "client", "client/", ""])
def test_unknown_tensors_of_an_older_checkpoint_are_refused(tmp_path, name):
    folder = old_folder(tmp_path)
    folder.checkpoint_file.write_bytes(old_checkpoint_file(2, **{name: torch.ones(1)}))
    with pytest.raises(SplitcastError, match=f"has an unknown tensor '{name}'"):
        folder.restore()


# ---- following


def test_a_look_parses_only_what_is_new(tmp_path, monkeypatch):
    folder = write_run(tmp_path, rounds=50, checkpoint=50, summary=False)
    parsed = []
    monkeypatch.setattr(lines, "read_line", lambda *args, read=lines.read_line: (parsed.append(1), read(*args))[1])
    reader = RoundsReader(tmp_path)
    assert len(reader.new()) == len(parsed) == reader.count == 50
    assert reader.new() == [] and len(parsed) == 50
    line, _ = lines.line_of(record(51), reader.chain, True)
    with folder.rounds_file.open("ab") as file:
        file.write(line[:30])
        file.flush()
        assert reader.new() == [] and reader.torn and len(parsed) == 50
        file.write(line[30:])
    assert reader.new() == [record(51)] and not reader.torn and len(parsed) == 51


def test_a_reader_waits_for_a_run_to_begin(tmp_path):
    reader = RoundsReader(tmp_path / "run")
    assert reader.new() == []
    (tmp_path / "run").mkdir()
    assert reader.new() == []
    folder = write_run(tmp_path / "run", rounds=2, checkpoint=None, summary=False)
    assert reader.new() == [record(1), record(2)] == folder.rounds()


def test_a_reader_tells_what_a_resume_changed(tmp_path):
    folder = write_run(tmp_path, summary=False)
    reader = RoundsReader(tmp_path)
    assert len(reader.new()) == 6
    folder.rewind(4)
    assert reader.new() == [] and reader.count == 4
    folder.append(record(5, loss=9.0))
    assert reader.new() == [record(5, loss=9.0)]
    folder.rewind(4)
    for t in range(5, 9):  # grown beyond what it was before the next look
        folder.append(record(t, loss=float(t)))
    assert reader.new() == [record(t, loss=float(t)) for t in range(5, 9)]
    folder.rewind(4)
    for t in range(5, 10):  # the same again, and one more
        folder.append(record(t, loss=float(t)))
    assert reader.new() == [record(9, loss=9.0)]


def test_a_reader_reports_no_garbage_and_goes_on_when_it_is_gone(tmp_path):
    folder = write_run(tmp_path, rounds=3, checkpoint=None, summary=False)
    reader = RoundsReader(tmp_path)
    assert len(reader.new()) == 3
    good = folder.rounds_file.read_bytes()
    for bad in (good + b"garbage\n", b"garbage\n" + good, good[:-9] + b"garbage\n"):
        folder.rounds_file.write_bytes(bad)
        for _ in range(2):
            with pytest.raises(SplitcastError, match="rounds.jsonl line [134] "):
                reader.new()
    folder.rounds_file.write_bytes(good)
    assert reader.new() == []
    folder.append(record(4))
    assert reader.new() == [record(4)]


@SLOW
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.sampled_from([1.0, 2.0])),
            st.tuples(st.just("rewind"), st.floats(0, 1)),
            st.tuples(st.just("look"), st.none()),
            st.tuples(st.just("torn"), st.none()),
        ),
        max_size=25,
    )
)
def test_a_follower_always_has_what_is_in_the_file(steps):
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.create(CONFIG)
        truth, seen, reader = [], [], RoundsReader(folder.path)
        for what, value in [*steps, ("look", None)]:
            if what == "append":
                folder.rewind(len(truth))  # drops half a line
                truth.append(record(len(truth) + 1, loss=value))
                folder.append(truth[-1])
            elif what == "rewind":
                truth = truth[: int(value * len(truth))]
                assert folder.rewind(len(truth)) == truth
            elif what == "torn":
                with folder.rounds_file.open("ab") as file:
                    file.write(b'{"round"')
            else:
                for each in reader.new():
                    seen = [*seen[: each.round - 1], each]
                seen = seen[: reader.count]
                assert seen == truth == folder.rounds()


# ---- recovery


def test_rewind_drops_whatever_follows_the_checkpoint(tmp_path):
    folder = write_run(tmp_path, summary=False)
    kept = b"".join(lines_of(folder)[:4])
    for rest in (b"", b'{"round": 5, "cu', b"garbage\n", b"\0" * 500 + b"\n" + lines_of(folder)[5]):
        folder.rounds_file.write_bytes(kept + rest)
        assert folder.rewind(4) == [record(t) for t in range(1, 5)]
        assert folder.rounds_file.read_bytes() == kept
    folder.append(record(5))
    assert len(folder.rounds()) == 5
    with pytest.raises(SplitcastError, match="has 5 of the 6 rounds before resuming"):
        folder.rewind(6)
    folder.rounds_file.write_bytes(kept.replace(b"300", b"200", 1))
    with pytest.raises(SplitcastError, match=r"rounds\.jsonl line 1 does not follow"):
        folder.rewind(4)


def test_half_a_line_is_not_a_round_and_nothing_is_appended_to_it(tmp_path):
    folder = write_run(tmp_path, summary=False)
    with folder.rounds_file.open("ab") as file:
        file.write(b'{"round": 7, "cu')
    assert len(folder.rounds()) == 6
    with pytest.raises(SplitcastError, match="ends in the middle of a line; resume the run"):
        RunFolder(tmp_path).append(record(7))


def test_create_refuses_what_is_not_vacant(tmp_path):
    for name in ("config.toml", "notes.txt", ".hidden", "rounds.jsonl"):
        place = tmp_path / name.strip(".")
        place.mkdir()
        (place / name).write_text("mine")
        assert not RunFolder(place).is_vacant()
        with pytest.raises(SplitcastError, match="is not empty; choose another folder"):
            RunFolder(place).create(CONFIG)
        assert (place / name).read_text() == "mine"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "run.json").write_text("{}")
    with pytest.raises(SplitcastError, match="is not empty"):
        RunFolder(foreign).create(CONFIG)
    with pytest.raises(SplitcastError, match="is a file; choose a folder"):
        RunFolder(foreign / "run.json").create(CONFIG)
    with pytest.raises(SplitcastError, match="is a file; choose a folder"), RunFolder(foreign / "run.json").lock():
        pass
    with pytest.raises(SplitcastError, match="is not a run folder"):
        RunFolder(tmp_path).rounds()


def test_a_folder_without_a_run_is_discarded_unless_somebody_holds_it(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.discard()
    with folder.lock():
        RunFolder(tmp_path / "run").discard()
        assert (tmp_path / "run" / ".lock").exists()
    (tmp_path / "run" / ".config.toml.tmp").write_bytes(b"half")
    folder.discard()
    assert not folder.path.exists()
    write_run(tmp_path / "run").discard()
    assert verify(tmp_path / "run") == []


def killed(step, act):
    """Run in a process of its own that dies by SIGKILL at its so-manieth line; False if it came to its end."""
    child = os.fork()
    if not child:
        places = {files.__file__, records.__file__}
        count = 0

        def trace(frame, event, _):
            nonlocal count
            if event == "call":
                return trace if frame.f_code.co_filename in places else None
            if event == "line":
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def go_on(folder):
    """What the loop does on resume; returns the rounds it goes on from."""
    with folder.lock():
        if folder.is_vacant():
            folder.create(CONFIG)
            return []
        assert folder.config().train.rounds in (8, 9)
        done = folder.restore("these").round if folder.checkpoint_file.exists() else 0
        kept = folder.rewind(done)
        assert kept == [record(t) for t in range(1, done + 1)]
        for t in range(done + 1, 6):
            folder.append(record(t))
        folder.save(tensors(1), ABOUT, max(done, 5), samples="these")
        folder.reconfigure(CONFIG)
        return kept


def left_by_crash(path):
    return [problem for problem in verify(path) if ".tmp was left by a write" not in problem]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_creation_may_be_killed_at_any_line(tmp_path, stride):
    step, kills = 1, 0

    def act():
        with RunFolder(tmp_path / f"{step}" / "run").lock():
            RunFolder(tmp_path / f"{step}" / "run").create(CONFIG)

    while killed(step, act):
        folder = RunFolder(tmp_path / f"{step}" / "run")
        assert folder.is_vacant() or folder.config() == CONFIG
        go_on(folder)
        assert folder.config() == CONFIG and verify(folder.path) == []
        step, kills = step + stride, kills + 1
    assert kills > 30 / stride
    assert not (tmp_path / f"{step}" / "run" / ".lock").exists()


def life():
    """A run in steps."""
    yield lambda folder: folder.append(record(1))
    yield lambda folder: folder.append(record(2))
    yield lambda folder: folder.save(tensors(), ABOUT, 2, samples="these")
    yield lambda folder: folder.append(record(3))
    yield lambda folder: folder.rewind(2)
    yield lambda folder: folder.append(record(3))
    yield lambda folder: folder.append(record(4))
    yield lambda folder: folder.save(tensors(1), ABOUT, 4, samples="these")
    yield lambda folder: folder.finish({"rounds": 4})
    yield lambda folder: folder.reconfigure(with_values(CONFIG, rounds=9))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stride", [23, pytest.param(5, marks=pytest.mark.long)])
def test_a_run_may_be_killed_at_any_line(tmp_path, stride):
    step, kept = 1, set()

    def act():
        folder = RunFolder(tmp_path / f"{step}")
        with folder.lock():
            folder.create(CONFIG)
            for do in life():
                do(folder)

    while killed(step, act):
        folder = RunFolder(tmp_path / f"{step}")
        kept.add(len(go_on(folder)))
        assert left_by_crash(folder.path) == []
        step += stride
    assert kept == {0, 2, 4}


class Disk:
    """What is on disk for sure: content of files as of their last fsync, names as of the folder's."""

    def __init__(self, path, monkeypatch):
        self.path, self.contents, self.names, self.states, self.open = path, {}, {}, [], []
        self.fsync, self.replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.on_fsync)
        monkeypatch.setattr(os, "replace", self.on_replace)

    def on_fsync(self, opened):
        self.fsync(opened)
        self.look()
        about = os.fstat(opened)
        if not stat.S_ISDIR(about.st_mode):
            self.open.append(os.dup(opened))  # so that no other file gets its number
            self.contents[about.st_ino] = Path(f"/proc/self/fd/{opened}").read_bytes()
        elif os.path.samestat(about, self.path.stat()):
            self.names = {entry.name: entry.inode() for entry in os.scandir(self.path)}
        self.look()

    def on_replace(self, *args):
        self.look()
        self.replace(*args)
        self.look()

    def look(self):
        """Remember what a power loss just now may leave: the old names, one or all of the new; contents as synced."""
        now = {entry.name: entry.inode() for entry in os.scandir(self.path)} if self.path.exists() else {}
        some = [self.names | {name: inode} for name, inode in now.items() if self.names.get(name) != inode]
        for names in (self.names, *some, now):
            state = {name: self.contents.get(inode, b"") for name, inode in names.items()}
            if state not in self.states:
                self.states.append(state)


def test_a_power_loss_at_any_moment_leaves_a_run_that_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "run", patch)
        folder = RunFolder(tmp_path / "run")
        folder.create(CONFIG)
        for do in life():
            do(folder)
            disk.look()
    for opened in disk.open:
        os.close(opened)
    kept = set()
    for k, state in enumerate(disk.states):
        after = RunFolder(tmp_path / f"{k}")
        after.path.mkdir()
        for name, content in state.items():
            (after.path / name).write_bytes(content)
        kept.add(len(go_on(after)))
        assert left_by_crash(after.path) == []
    assert kept == {0, 2, 4}
    assert len(disk.states) > 20


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.write_atomically(target, b"old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(target, b"new")
    assert target.read_bytes() == b"old"


# ---- the lock


def test_a_second_writer_is_refused_by_the_first_ones_number(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        told = f"is being written by process {os.getpid()}; wait for it or stop it"
        with pytest.raises(SplitcastError, match=told), RunFolder(tmp_path / "run").lock():
            raise AssertionError
        folder.create(CONFIG)
    assert not (tmp_path / "run" / ".lock").exists()
    with folder.lock():
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        with RunFolder(tmp_path).lock():
            os.write(tell, b"x")
            time.sleep(PATIENCE_S)
        os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(SplitcastError, match=f"written by process {child};"), RunFolder(tmp_path).lock():
            raise AssertionError
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready), os.close(tell)
    assert (tmp_path / ".lock").exists()
    with RunFolder(tmp_path).lock():
        RunFolder(tmp_path).create(CONFIG)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_many_processes_that_want_the_lock_get_it_one_at_a_time(tmp_path):
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            taken, end = 0, time.monotonic() + PATIENCE_S
            while taken < 25 and time.monotonic() < end:
                try:
                    with RunFolder(tmp_path).lock():
                        inside = os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL)
                        os.close(inside)
                        (tmp_path / "inside").unlink()
                        taken += 1
                except SplitcastError:
                    pass
                except BaseException:
                    os._exit(1)
            os._exit(0 if taken == 25 else 2)
        children.append(child)
    assert [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children] == [0] * 4


def test_a_lock_file_of_somebody_else_is_not_believed(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SplitcastError, match="cannot write in"), RunFolder(tmp_path / "run").lock():
        raise AssertionError
    assert (tmp_path / "elsewhere").read_text() == "precious"
