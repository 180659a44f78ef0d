"""A race: a FedAvg round of the paper's CNN in Flower's simulation, pfl-research, a naive loop and splitcast.

Each contestant is a process of its own (`racers.py`), peers in environments that are made for them with pip and kept in
the cache. A round is told as a ratio to a centralised step on the same samples, timed in turns in the same process;
start-up is the time from the start of the process to the end of its first round, memory the highest sum over the
contestant and all processes it started (proportional set size). A peer that cannot be installed or fails is left out
with a word; so is one that does not end with the same weights.
"""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from splitcast.base.errors import SplitcastError
from splitcast.bench import racers
from splitcast.bench.rows import Row, tell
from splitcast.data.loading import cache_folder

PEERS = {"flower": "flwr[simulation]==1.41.0", "pfl": "pfl==0.6.0"}
"""What pip installs for whom."""
CONTESTANTS = ("splitcast", "naive", *PEERS)
CASES = ((10, 32), (100, 4))
"""Clients, batch."""
PATIENCE_S = 900.0
EVERY_S = 1.0
"""Between two looks at the memory."""
TOLERANCE = 1e-5
"""Of the norm of the weights, relatively: float32 sums in another order."""


def peers(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench peers`."""
    rows: list[Row] = []
    norms: dict[tuple[int, int], float] = {}
    for k, name in enumerate(CONTESTANTS):
        for j, case in enumerate(CASES):
            tell("peers", k * len(CASES) + j, len(CONTESTANTS) * len(CASES))
            try:
                told, peak = race(python_of(name), name, *case, repeats + 1)
                norm = norms.setdefault(case, told["norm"])  # splitcast's, which runs first
                if not math.isclose(told["norm"], norm, rel_tol=TOLERANCE):
                    raise SplitcastError("it ends with other weights than splitcast")
            except SplitcastError as error:
                if name not in PEERS:
                    raise
                warnings.warn(f"bench: {name} is left out: {error}", stacklevel=2)
                break
            rows += _rows(f"peers.n{case[0]}_b{case[1]}.{name}", told, peak)
    return rows


def _rows(case: str, told: dict[str, float], peak: int) -> list[Row]:
    return [
        Row(f"{case}.round", told["round"] / told["central"], "x central"),
        Row(f"{case}.central", 1e3 * told["central"], "ms"),
        Row(f"{case}.startup", told["first"], "s"),
        *([Row(f"{case}.memory", peak / 2**20, "MiB")] if peak else []),
    ]


def python_of(name: str) -> Path:
    """The interpreter of a contestant; a peer's environment is made if it is not there yet."""
    if name not in PEERS:
        return Path(sys.executable)
    version = torch.__version__.partition("+")[0]
    place = cache_folder() / "peers" / re.sub(r"[^\w.]+", "-", f"{PEERS[name]} torch {version}")
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.is_file():
        print(f"bench: installing {PEERS[name]} into {place}", file=sys.stderr, flush=True)
        _call([sys.executable, "-m", "venv", "--clear", str(place)])
        _call([str(python), "-m", "pip", "install", "--quiet", PEERS[name], f"torch=={version}"])
        ready.touch()
    return python


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SplitcastError(f"it cannot be installed: {type(error).__name__}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise SplitcastError(f"it cannot be installed: {said[-1] if said else 'pip failed'}")


def race(python: Path, name: str, clients: int, batch: int, rounds: int) -> tuple[dict[str, float], int]:
    """What a contestant told, ``first`` in seconds from its start, and its peak memory in bytes (0 if unknown)."""
    command = [str(python), racers.__file__, name, str(clients), str(batch), str(rounds)]
    quiet = {"RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    began, peak = time.time(), 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | quiet
    ) as process:
        told: list[str] = []
        reader = threading.Thread(target=lambda: told.extend(process.stdout or ()), daemon=True)
        reader.start()
        while process.poll() is None:
            if time.time() - began > PATIENCE_S:
                process.kill()
            peak = max(peak, sum(map(_resident, (process.pid, *_children(process.pid)))))
            time.sleep(EVERY_S)
        reader.join(10)
    try:
        found: dict[str, float] = json.loads(told[-1])
    except (IndexError, ValueError):
        raise SplitcastError(f"it ended with code {process.returncode} and no result") from None
    return found | {"first": found["first"] - began}, peak


def _children(pid: int) -> Iterator[int]:
    """All processes below one, where there is /proc."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        below = {int(child) for thread in threads for child in (thread / "children").read_text().split()}
    except OSError:
        return
    for child in below:
        yield child
        yield from _children(child)


def _resident(pid: int) -> int:
    """Bytes of memory of a process, shared pages in proportion."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
