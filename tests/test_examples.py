"""The examples run as they stand, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import PATIENCE_S

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "own_scheme": ["own_scheme:QuarterScheme: ", "sfl: "],
    "own_model": ["cut 1: ", "accuracy "],
    "sweep": ["| sfl | done | 2 |", r"\toprule"],
    "llm": ["round 2: perplexity "],
    "deployment": ["kits: ", "round 2: loss ", "accuracy "],
}
MARKS = {name: [pytest.mark.long] for name in ("own_scheme", "own_model", "sweep", "llm")}
MARKS["deployment"] = [pytest.mark.deploy, pytest.mark.long]
NEEDS = {"llm": "transformers", "deployment": "nvflare", "sb3_dqn": "stable_baselines3"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in SAYS],
)
def test_an_example_runs(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "2"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_tested_or_says_what_it_needs():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*SAYS, "sb3_dqn", "shaped_links"}


def test_shaped_links_are_skipped_with_a_line_where_there_are_no_namespaces(tmp_path):
    pytest.importorskip("nvflare")
    command = [sys.executable, str(EXAMPLES / "shaped_links.py")]
    env = os.environ | {"PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}  # neither ip nor tc
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shaped links are skipped: ") and done.stdout.count("\n") == 1
    assert not list(tmp_path.iterdir())
