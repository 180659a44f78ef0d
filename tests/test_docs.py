"""The documentation says what is true: its Python runs, the names it gives exist, its pages build and ask nobody."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import splitcast
from splitcast.ccc.clock import ALLOCATORS
from splitcast.cli import main
from splitcast.schemes.codec import CODECS
from splitcast.schemes.schemes import SCHEMES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "splitcast"


def table(page: str, columns: int) -> list[list[str]]:
    """The rows of all tables of a page with so many columns, without their heads."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in rows if len(row) == columns]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder to work in; what examples register or import there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (SCHEMES, CODECS, ALLOCATORS):
        known = dict(registry)
        for name in known:
            monkeypatch.setitem(registry, name, known[name])
    before = set(sys.modules), {id(r): set(r) for r in (SCHEMES, CODECS, ALLOCATORS)}
    yield tmp_path
    for registry in (SCHEMES, CODECS, ALLOCATORS):
        for name in set(registry) - before[1][id(registry)]:
            del registry[name]
    for name in set(sys.modules) - before[0]:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize("page", ["index.md", "schemes.md", "planning.md", "extend.md", "api.md"])
def test_python_runs(page, workplace, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        quick = re.sub(r"\b(rounds|draws|episodes|held_out)=\d+", r"\1=2", block)
        if named := re.match(r"# (\w+\.py)\n", block):
            (workplace / named[1]).write_text(quick, encoding="utf-8")
            importlib.invalidate_caches()
        else:
            exec(compile(quick, f"{page}: {quick.splitlines()[0]}", "exec"), {"__name__": page})
    for printed in re.findall(r"^```text\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        assert printed in capsys.readouterr().out


def test_the_command_finds_modules_where_its_user_works(workplace, monkeypatch, capsys):
    (workplace / "my_blocks.py").write_text(
        "from torch import nn\ndef two(shape, classes): return [nn.Flatten(), nn.Linear(784, classes)]\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(workplace))])
    main(["profile", "--arch", "my_blocks:two", "--json"])
    assert '"parameters": 7850' in capsys.readouterr().out
