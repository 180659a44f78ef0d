"""What is seen of long work: bars in a terminal, a plain line now and then elsewhere; and the race of `bench peers`."""

import io
import sys
from pathlib import Path

import pytest

from splitcast.base.errors import SplitcastError
from splitcast.bench import peers, rows
from splitcast.bench.rows import Row, heard_by, interleaved_medians
from splitcast.cli import progress
from splitcast.cli.progress import Bars
from splitcast.cli.show import measured


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_where_there_is_no_terminal_a_plain_line_comes_now_and_then(clock):
    out = io.StringIO()
    with Bars(out) as bars:
        task = bars.add("sfl", 100)
        for second in range(1, 41):
            clock[0] += 1.0
            bars.move(task, 2 * second, f"  91.0 %   {second} MB")
    first, second = out.getvalue().splitlines()  # after 15 s and after 30 s
    assert first == "sfl: 30 of 100 91.0 % 15 MB, 38 s left"  # 28 rounds in 15 s, 70 to go
    assert second.startswith("sfl: 60 of 100 91.0 % 30 MB, 21 s left")  # 58 in 30, 40 to go


def test_a_short_run_without_a_terminal_says_nothing():
    out = io.StringIO()
    with Bars(out) as bars:
        bars.move(bars.add("sfl", 2), 2)
    assert out.getvalue() == ""


def test_a_terminal_has_a_bar_once_something_moved():
    out = Terminal()
    with Bars(out):
        pass
    assert out.getvalue() == ""
    with Bars(out) as bars:
        bars.move(bars.add("sfl", 4), 3)
    assert "sfl" in out.getvalue() and "3/4" in out.getvalue()


def test_a_benchmark_says_how_far_it_is():
    heard, calls = [], []
    with heard_by(lambda *told: heard.append(told)):
        found = interleaved_medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, "case")
    assert calls == ["a", "b"] * 3 and set(found) == {"a", "b"}  # one turn to warm up
    assert heard[0] == ("case", 0, 6) and heard[-1] == ("case", 6, 6)
    rows.tell("nobody", 1, 2)  # listens
    assert measured(lambda repeats: [Row("figure", float(repeats), "s")], 3) == [Row("figure", 3.0, "s")]


@pytest.mark.long
def test_contestants_of_the_race_end_with_the_same_weights():
    python = Path(sys.executable)
    (naive, peak), (ours, _) = (peers.race(python, name, 3, 2, 2) for name in ("naive", "splitcast"))
    assert naive["norm"] == pytest.approx(ours["norm"], rel=1e-6) and naive["norm"] > 1
    for told in (naive, ours):
        assert told["rounds"] == 2 and told["round"] > 0 and told["central"] > 0 and told["first"] > 0.1
    assert peak > 50e6 or not Path("/proc/self/smaps_rollup").exists()


@pytest.mark.long
def test_a_peer_that_cannot_be_installed_is_left_out_with_a_word(monkeypatch, tmp_path):
    monkeypatch.setenv("SPLITCAST_DATA", str(tmp_path))
    monkeypatch.setattr(peers, "PEERS", {"pfl": "nothing @ file:///nowhere/nothing-1-py3-none-any.whl"})
    monkeypatch.setattr(peers, "CONTESTANTS", ("splitcast", "pfl"))
    monkeypatch.setattr(peers, "CASES", ((10, 32),))
    told = {"round": 3.0, "central": 2.0, "first": 1.0, "norm": 5.0}
    monkeypatch.setattr(peers, "race", lambda *arguments: (told, 2**21))
    with pytest.warns(UserWarning, match="pfl is left out: it cannot be installed: ERROR"):
        found = {row.name.removeprefix("peers.n10_b32."): row.value for row in peers.peers(1)}
    assert found == {
        "splitcast.round": 1.5,
        "splitcast.central": 2e3,
        "splitcast.startup": 1.0,
        "splitcast.memory": 2.0,
    }
    with pytest.raises(SplitcastError, match="no result"):
        monkeypatch.undo()
        peers.race(Path(sys.executable), "nobody", 1, 1, 1)
