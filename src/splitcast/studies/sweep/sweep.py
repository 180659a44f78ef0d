"""Runs the points of a sweep, several at a time, each in a run folder: finished ones are kept, stopped ones go on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from splitcast.base.config import to_toml
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.files import lock_folder, write_atomically
from splitcast.run.auto import as_begun
from splitcast.run.parts import resolved
from splitcast.run.records import RunFolder
from splitcast.studies.sweep.points import Point
from splitcast.studies.sweep.worker import train_point

PLAN = "sweep.json"
"""What was swept: the options and values of every run, and why runs failed."""
THREADS = 1
"""Of every training, whatever the machine: the results of a sweep do not depend on how many run at a time."""

OnProgress = Callable[[Point, int], None]
"""Told the round in which a run is; its last when it is done."""


def sweep(
    points: Sequence[Point],
    out: Path,
    jobs: int = 0,
    on: str = "processes",
    track: Sequence[str] = (),
    progress: OnProgress | None = None,
) -> dict[str, str]:
    """Train all points; returns the reasons of those that failed, by name. ``jobs`` 0: one for each core."""
    one_of("on", on, ["processes", "ray"])
    if RunFolder(out).config_file.is_file():
        raise SplitcastError(f"out: {out} is a run itself; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    told = progress or (lambda point, done: None)
    with lock_folder(out):
        _plan(points, out, {})
        open_ = [point for point in points if not _finished(point, out)]
        for point in points:
            if point not in open_:
                told(point, point.config.train.rounds)
        runner = _on_ray if on == "ray" else _in_processes
        failed = {
            point.name: reason
            for point, reason in runner(open_, out, jobs or os.cpu_count() or 1, track, told)
            if reason
        }
        _plan(points, out, failed)
    return failed


def _finished(point: Point, out: Path) -> bool:
    """Whether a run is complete; refuses the folder of another."""
    folder = RunFolder(out / point.name)
    if folder.config_file.is_file() and resolved(folder.config()) != resolved(as_begun(point.config, folder)):
        raise SplitcastError(f"out: {folder.path} holds a run with another configuration; choose another folder")
    return folder.summary_file.is_file()


def _plan(points: Sequence[Point], out: Path, failed: dict[str, str]) -> None:
    """Write what is swept beside the runs; a sweep that grows keeps what it had."""
    runs = {point.name: {"values": point.values, "failed": failed.get(point.name, "")} for point in points}
    write_atomically(out / PLAN, json.dumps({"runs": read_plan(out) | runs}, indent=1).encode())


def read_plan(out: Path) -> dict[str, Any]:
    """The runs of a sweep by the names of their folders: their values, and why they failed."""
    try:
        runs = json.loads((out / PLAN).read_text())["runs"]
        assert all(isinstance(run["values"], dict) and isinstance(run["failed"], str) for run in runs.values())
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        raise SplitcastError(f"out: {out / PLAN} is not what a sweep writes; remove it") from None
    return dict(runs)


def _in_processes(
    points: Sequence[Point], out: Path, jobs: int, track: Sequence[str], told: OnProgress
) -> Iterator[tuple[Point, str]]:
    """Workers of our own; they end with us, however that is."""
    waiting, heard = list(reversed(points)), SimpleQueue[tuple[Any, Point, str]]()
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    with ExitStack() as stack:

        def give(worker: "subprocess.Popen[str]") -> bool:
            if not waiting:
                return False
            point = waiting.pop()
            Thread(target=_serve, args=(worker, point, out, track, told, heard), daemon=True).start()
            return True

        busy = 0
        for _ in range(min(jobs, len(points))):
            worker = stack.enter_context(_worker(environment))
            stack.callback(worker.kill)
            busy += give(worker)
        while busy:
            worker, point, reason = heard.get()
            if worker.poll() is not None:
                worker = stack.enter_context(_worker(environment))
                stack.callback(worker.kill)
            busy += give(worker) - 1
            yield point, reason


def _worker(environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "splitcast.studies.sweep.worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )


def _serve(
    worker: "subprocess.Popen[str]",
    point: Point,
    out: Path,
    track: Sequence[str],
    told: OnProgress,
    heard: "SimpleQueue[Any]",
) -> None:
    """Give a worker a point and listen until it is done."""
    reason = "its process ended; out of memory?"
    try:
        assert worker.stdin and worker.stdout
        print(
            json.dumps({"config": to_toml(point.config), "folder": str(out / point.name), "track": list(track)}),
            file=worker.stdin,
            flush=True,
        )
        for line in worker.stdout:
            said = json.loads(line)
            if "done" in said:
                reason = said["done"]
                break
            told(point, said["round"])
    except (OSError, ValueError):
        worker.kill()
    told(point, point.config.train.rounds)
    heard.put((worker, point, reason))


def _on_ray(
    points: Sequence[Point], out: Path, jobs: int, track: Sequence[str], told: OnProgress
) -> Iterator[tuple[Point, str]]:
    """The cluster that `ray.init` finds, or one on this machine; all its nodes must see the folder."""
    try:
        import ray
    except ImportError:
        raise SplitcastError("on: ray is not installed; install the extra `cluster`") from None
    environment = {"env_vars": {"OMP_NUM_THREADS": str(THREADS)}}
    here = not ray.is_initialized()
    if here:
        ray.init(runtime_env=environment, log_to_driver=False, include_dashboard=False, logging_level="error")
    try:
        run = ray.remote(num_cpus=1, max_retries=0)(train_point)
        running = {
            run.remote(to_toml(point.config), str((out / point.name).resolve()), list(track)): point for point in points
        }
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            point = running.pop(done)
            try:
                reason = ray.get(done)
            except ray.exceptions.RayError as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            told(point, point.config.train.rounds)
            yield point, reason
    finally:
        if here:
            ray.shutdown()
