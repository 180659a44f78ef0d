"""The release: what is built works alone, with nothing but the core's dependencies, and says one version everywhere."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TINY = ["--arch", "cnn-small", "--rounds", "2", "--batch", "4", "--clients", "4", "--quiet"]


def core_distributions() -> dict[str, object]:
    """What the core needs, and what that needs, and so on; no extras of anybody."""
    found, open_ = {}, [Requirement(line) for line in PROJECT["dependencies"]]
    while open_:
        needed = open_.pop()
        if needed.name.lower() in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found[needed.name.lower()] = made = distribution(needed.name)
        open_ += [Requirement(line) for line in made.requires or ()]
    return found


def run(command, where, **environment):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=where,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(["-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)], out)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


@pytest.mark.long
def test_the_wheel_alone_trains_reports_and_plans(built, tmp_path):
    packages, needed = tmp_path / "packages", tmp_path / "needed"
    run(["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), str(built[0])], tmp_path)
    needed.mkdir()
    for made in core_distributions().values():
        for top in {Path(file).parts[0] for file in made.files or () if ".." not in Path(file).parts}:
            if not (needed / top).exists() and Path(made.locate_file(top)).exists():
                (needed / top).symlink_to(made.locate_file(top))

    def splitcast(*arguments):  # without site, so that nothing else of this environment is seen
        place = os.pathsep.join(map(str, (packages, needed)))
        return run(["-S", "-m", "splitcast", *arguments], tmp_path, PYTHONPATH=place, OMP_NUM_THREADS="1")

    assert splitcast("--version") == f"splitcast {PROJECT['version']}\n"
    assert "sfl: " in splitcast("train", "--scheme", "sfl", *TINY, "--out", "first")
    assert (tmp_path / "first" / "summary.json").is_file()
    splitcast("report", "first")
    assert "echarts" in (tmp_path / "first" / "report.html").read_text(encoding="utf-8")
    planned = json.loads(splitcast("plan", "--arch", "cnn-small", "--draws", "5", "--json"))
    assert planned["best_cut"] in (1, 2, 3, 4)


def test_the_source_distribution_has_what_a_stranger_needs(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "Makefile",
        "constraints.txt",
        "docs/index.md",
    ):
        assert name in names, name
    assert not [name for name in names if name.startswith((".venv", "runs/", "demo/", "site/")) or ".pyc" in name]


def test_there_is_one_version():
    version = PROJECT["version"]
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
