"""Experiment trackers: where rounds are written besides the run folder.

A tracker has `log(round, values)` and `close()`; a function of yours takes the run folder and the configuration and
returns one. Built in are tensorboard, mlflow, wandb (each with the package of its name) and csv.
"""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from splitcast.base.config import Config, leaves
from splitcast.base.errors import SplitcastError
from splitcast.base.registry import Registry
from splitcast.run.identity import read_identity
from splitcast.run.lines import RoundRecord

_COLUMNS = ("loss", "drift", "up_bytes", "down_bytes", "latency_s", "wall_s", "test_loss", "test_accuracy")


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, round: int, values: dict[str, float]) -> None:
        """The numbers of a round; after a resume some rounds come again, with the same numbers."""
        ...

    def close(self) -> None:
        """The run is over, or interrupted."""
        ...


def values_of(record: RoundRecord) -> dict[str, float]:
    """Every number of a record by its name."""
    found = {name: getattr(record, name) for name in _COLUMNS} | record.metrics
    return {name: float(value) for name, value in found.items() if value is not None}


class Csv:
    """``<folder>.csv`` beside the run folder: round, name, value."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.path = folder.with_name(folder.name + ".csv")
        self.known: set[int] = set()
        if self.path.is_file():
            with self.path.open(newline="") as file:
                self.known = {int(row[0]) for row in list(csv.reader(file))[1:] if row and row[0].isdigit()}
        self.file = self.path.open("a", newline="")
        if not self.known:
            self.file.write("round,name,value\n")

    def log(self, round: int, values: dict[str, float]) -> None:
        if round not in self.known:
            csv.writer(self.file, lineterminator="\n").writerows((round, *pair) for pair in values.items())
            self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Events beside the run folder, in ``<folder>-events``."""

    def __init__(self, folder: Path, config: Config) -> None:
        with _needs("tensorboard", "track"):
            from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder.with_name(folder.name + "-events")))

    def log(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """A run of the experiment ``splitcast`` at MLFLOW_TRACKING_URI; without one, in ``mlruns`` beside the folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        with _needs("mlflow", "mlflow"):
            import mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((folder.resolve().parent / "mlruns").as_uri())
        self.client = mlflow.MlflowClient()
        named = self.client.get_experiment_by_name("splitcast")
        experiment = named.experiment_id if named else self.client.create_experiment("splitcast")
        tag = _identity(folder)
        known = self.client.search_runs([experiment], f"tags.splitcast = '{tag}'", max_results=1)
        self.run = (
            known[0] if known else self.client.create_run(experiment, run_name=folder.name, tags={"splitcast": tag})
        )
        if not known:
            for name, value in leaves(config).items():
                self.client.log_param(self.run.info.run_id, name, str(value)[:500])

    def log(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run.info.run_id, name, value, step=round)

    def close(self) -> None:
        self.client.set_terminated(self.run.info.run_id)


class WandB:
    """A run of the project ``splitcast``; WANDB_MODE=offline keeps it on this machine, beside the run folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        with _needs("wandb", "wandb"):
            import wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "splitcast"),
            name=folder.name,
            id=_identity(folder),
            resume="allow",
            dir=str(folder.resolve().parent),
            config={name.replace(".", "/"): value for name, value in leaves(config).items()},
        )

    def log(self, round: int, values: dict[str, float]) -> None:
        self.run.log(values, step=round)

    def close(self) -> None:
        self.run.finish()


TRACKERS: Registry[Callable[[Path, Config], Tracker]] = Registry("track", takes=2)
TRACKERS |= {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB, "csv": Csv}


@contextmanager
def tracking(names: Sequence[str], folder: Path, config: Config) -> Iterator[Callable[[RoundRecord], None]]:
    """What to call after every round; trackers open with the first, so that a refused run leaves no trace."""
    made = [TRACKERS.find(name) for name in names]
    opened: list[Tracker] = []

    def on_round(record: RoundRecord) -> None:
        if made and not opened:
            opened.extend(_opened(make, name, folder, config) for name, make in zip(names, made, strict=True))
        for tracker in opened:
            tracker.log(record.round, values_of(record))

    try:
        yield on_round
    finally:
        for tracker in opened:
            with suppress(Exception):  # the training itself is safe in its folder
                tracker.close()


def _opened(make: Callable[[Path, Config], Any], name: str, folder: Path, config: Config) -> Tracker:
    tracker = make(folder, config)
    if not callable(getattr(tracker, "log", None)) or not callable(getattr(tracker, "close", None)):
        raise SplitcastError(f"track: {name!r} gives a {type(tracker).__name__}, which has no log and close")
    return tracker  # type: ignore[no-any-return]


@contextmanager
def _needs(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise SplitcastError(f"track: {package} is not installed; install the extra `{extra}`") from None


def _identity(folder: Path) -> str:
    """What stays the same when a run goes on."""
    known = read_identity(folder)
    return known.run if known else folder.name
