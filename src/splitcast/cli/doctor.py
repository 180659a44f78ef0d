"""What this machine has for splitcast, and what to do about what is missing."""

import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import torch

from splitcast import data
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.run.loop import train
from splitcast.training.runtime import device_name

_NEEDED = re.compile(r"""(?P<name>[\w.-]+)[^;]*;\s*extra\s*==\s*['"](?P<extra>[\w-]+)['"]""")


@dataclass(frozen=True)
class Finding:
    """One line."""

    topic: str
    name: str
    found: str
    """empty if it is not there"""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.topic:9} {self.name:14} {self.found or 'missing'}{f': {self.remedy}' if self.remedy else ''}"


def examine() -> list[Finding]:
    """All findings, in the order in which a reader needs them."""
    return [*_versions(), *_devices(), *_threads(), *_datasets(), *_extras(), _trial()]


def _versions() -> Iterator[Finding]:
    yield Finding("version", "python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    for name in ("splitcast", "torch", "numpy"):
        yield Finding("version", name, version(name))


def _devices() -> Iterator[Finding]:
    used = f"what --device auto takes here is {device_name('auto')}"
    yield Finding(
        "device", "cpu", f"{os.cpu_count()} cores, torch computes with {torch.backends.cpu.get_cpu_capability()}"
    )
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    remedy = "" if names else "install a torch with CUDA if this machine has an NVIDIA GPU"
    yield Finding("device", "cuda", ", ".join(names), remedy)
    yield Finding("device", "mps", "yes" if torch.backends.mps.is_available() else "")
    yield Finding("device", "auto", used)


def _threads() -> Iterator[Finding]:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    said = f"OMP_NUM_THREADS={asked}" if asked else "OMP_NUM_THREADS is not set"
    hint = "" if asked else "last bits of a run depend on the number of threads; set it to repeat runs exactly"
    yield Finding("threads", "torch", f"{torch.get_num_threads()}, {said}", hint)


def _datasets() -> Iterator[Finding]:
    for name in data.NAMES:
        try:
            found = data.load(name)
            yield Finding("data", name, f"{len(found.train_y)} train, {len(found.test_y)} test")
        except SplitcastError:
            yield Finding("data", name, "", f"splitcast data get {name}")


def _extras() -> Iterator[Finding]:
    """Of every extra of this package, whether all that it names is installed."""
    needed: dict[str, list[str]] = {}
    for requirement in requires("splitcast") or ():
        match = _NEEDED.match(requirement)
        if match and match["name"] != "splitcast" and match["extra"] not in ("dev", "docs"):
            needed.setdefault(match["extra"], []).append(match["name"])
    for extra, packages in needed.items():
        missing = [name for name in packages if not _installed(name)]
        there = ", ".join(f"{name} {version(name)}" for name in packages if name not in missing)
        yield Finding("extra", extra, "" if missing else there, f"pip install 'splitcast[{extra}]'" if missing else "")
    timm = importlib.util.find_spec("timm")
    yield Finding("extra", "timm", "yes" if timm else "", "" if timm else "needs a torchvision that fits your torch")


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _trial() -> Finding:
    """A round of training on whatever --device auto takes."""
    config = with_values(Config(), arch="cnn-small", rounds=1, clients=2, batch=4, eval_samples=50, device="auto")
    try:
        done = train(config)
    except Exception as error:  # of any kind: this is where a broken installation shows
        return Finding("trial", "one round", "", f"{type(error).__name__}: {error}".splitlines()[0])
    return Finding("trial", "one round", f"loss {done.rounds[-1].loss:.3f}, {done.summary['wall_seconds']:.1f} s")
