"""The documentation says what is true: its Python runs, the names it gives exist, its pages build and ask nobody."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import splitcast
from splitcast.base.formats import CODECS
from splitcast.cli.main import main
from splitcast.cost.clock import ALLOCATORS
from splitcast.schemes.schemes import SCHEMES
from waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "splitcast"


def tables(page: str, columns: int) -> list[list[str]]:
    """The rows of all tables of a page with so many columns, heads and rules left out."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    rules = [at for at, row in enumerate(rows) if set("".join(row)) == {"-"}]
    return [row for at, row in enumerate(rows) if len(row) == columns and at not in rules and at + 1 not in rules]


def fenced(page: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def find(module: str, path: str) -> object:
    """What ``path`` names in a module that defines it; a field without a default is its annotation."""
    found: object = importlib.import_module(module)
    for name in path.split("."):
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[name] if name in fields else getattr(found, name)
    return found


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder to work in; what examples register or import is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = [(registry, dict(registry)) for registry in (SCHEMES, CODECS, ALLOCATORS)]
    yield tmp_path
    for registry, before in known:
        registry.clear()
        registry.update(before)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [
        "index.md",
        "data.md",
        "text.md",
        "language-models.md",
        "schemes.md",
        "tasks.md",
        "planning.md",
        "extend.md",
        "experiments.md",
        "api.md",
        "bytes.md",
    ],
)
def test_python_runs(page, workplace, capsys):
    blocks = fenced(page, "python")
    assert blocks
    for block in blocks:
        quick = re.sub(r"\b(rounds|draws|episodes|held_out)=\d+", r"\1=2", block)
        if named := re.match(r"# (\w+\.py)\n", block):
            (workplace / named[1]).write_text(quick, encoding="utf-8")
            importlib.invalidate_caches()
        else:
            exec(compile(quick, f"{page}: {quick.splitlines()[0]}", "exec"), {"__name__": page})
    printed = capsys.readouterr().out
    for output in fenced(page, "text"):
        assert output in printed


def test_the_command_finds_modules_where_its_user_works(workplace, monkeypatch, capsys):
    (workplace / "my_blocks.py").write_text(
        "from torch import nn\ndef two(shape, classes): return [nn.Flatten(), nn.Linear(784, classes)]\n"
    )
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(workplace))])
    main(["profile", "--arch", "my_blocks:two", "--json"])
    assert '"parameters": 7850' in capsys.readouterr().out


def test_every_equation_has_its_code():
    rows = tables("equations.md", 5)
    numbered = [int(eq) for eq, *_ in rows if eq.isdigit()]
    assert numbered == list(range(1, 52))
    items = set(re.findall(r"^### (\d+)\.", (DOCS / "fidelity.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for eq, _, code, file, fidelity in rows:
        names = re.findall(r"`([^`]+)`", code)
        assert names, eq
        module = "splitcast." + file.strip("`").removesuffix(".py").replace("/", ".")
        for name in names:
            assert find(module, name) is not None
            assert getattr(find(module, name.split(".")[0]), "__module__", module) == module, (eq, name)
        assert set(re.findall(r"\d+", fidelity)) <= items, eq


def test_every_name_of_the_reference_exists():
    names = [row[0].strip("`") for row in tables("api.md", 2)]
    assert sorted(name for name in names if "." not in name) == splitcast.__all__
    for module, name in (name.rsplit(".", 1) for name in names if "." in name):
        assert find(module, name) is not None


def test_the_tour_leaves_out_no_part_of_the_house():
    tour = (DOCS / "tour.md").read_text(encoding="utf-8")
    parts = [p.name + "/" if p.is_dir() else p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()]
    assert [part for part in parts if f"`{part}`" not in tour and part not in ("__init__.py", "__pycache__/")] == []


def test_every_file_that_a_page_names_exists():
    for page in [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for file in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page.read_text(encoding="utf-8")):
            assert (PACKAGE / file).is_file() or (ROOT / file).is_file(), f"{page.name} names {file}"


@pytest.mark.long
def test_pages_build_and_request_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=PATIENCE_S)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.glob("*.html"))
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in pages}
    outside = r"""<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=["']?(?:https?:)?//"""
    for page in pages:
        assert re.findall(outside, page.read_text(encoding="utf-8")) == [], page.name
    imported = r"""(?:url\(|@import)\s*["']?(?:https?:)?//"""
    for style in tmp_path.rglob("*.css"):
        assert re.findall(imported, style.read_text(encoding="utf-8")) == [], style.name
