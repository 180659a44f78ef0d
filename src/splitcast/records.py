"""A run folder: what was asked, what happened each round, where it stands, and how it ended.

    config.toml              the configuration
    gamma.json               Gamma of every cut, if it was measured for the policy
    rounds.jsonl             one line per round; in a simulation nothing in it depends on the machine's speed
    checkpoint.safetensors   all weights and optimiser state after some round
    summary.json             written when the run is complete

Every file but `rounds.jsonl` is written under a temporary name and renamed. `rounds.jsonl` is appended to; on resume
it is cut back to the round of the checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from splitcast.config import Config, load, to_toml
from splitcast.engine.state import State
from splitcast.errors import SplitcastError
from splitcast.split import Params

FORMAT = "splitcast-checkpoint-1"


@dataclass(frozen=True)
class RoundRecord:
    """One line of `rounds.jsonl`."""

    round: int
    cut: int
    clients: int
    """how many took part"""
    loss: float
    """training loss, sum_n rho^n F^n"""
    up_bytes: int
    down_bytes: int
    kinds: dict[str, int]
    """bytes on the air per direction and kind"""
    drift: float | None
    """mean distance of the client halves from their average; on real sites only known when halves are collected"""
    latency_s: float
    """simulated seconds of the round"""
    slowest_client: int
    """who held the round up longest, and with what: compute, uplink, server, downlink or backward"""
    slowest_part: str
    test_loss: float | None = None
    test_accuracy: float | None = None
    rank: float | None = None
    """sfl-gb: directions broadcast, mean over the local steps"""
    dropped_energy: float | None = None
    """sfl-gb: share of the gradients' energy that those directions miss, the greatest of the local steps"""
    gamma: float | None = None
    """sfl-gb: that energy itself, sum_n rho^n ||s^n - sent^n||^2 before rounding on the wire: the measured Gamma"""
    wall_s: dict[str, float] | None = None
    """on real sites: measured seconds of the round's parts (upload, server, download, client)"""
    failures: dict[str, str] | None = None
    """on real sites: those that failed in this round, and why"""


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name, force to disk, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class RunFolder:
    """Reads and writes one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.rounds_file = path / "rounds.jsonl"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self.summary_file = path / "summary.json"
        self.gamma_file = path / "gamma.json"

    def create(self, config: Config) -> None:
        """Start a new run in an empty or absent folder."""
        if self.path.exists() and not self.path.is_dir():
            raise SplitcastError(f"out: {self.path} is a file; choose a folder")
        if self.path.exists() and any(self.path.iterdir()):
            raise SplitcastError(f"out: {self.path} is not empty; choose another folder, or --resume")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SplitcastError(f"out: cannot create {self.path}: {error.strerror}") from None
        self.reconfigure(config)
        self.rounds_file.touch()

    def reconfigure(self, config: Config) -> None:
        """Ask something else of an existing run, such as more rounds, which makes it unfinished."""
        self.summary_file.unlink(missing_ok=True)
        write_atomically(self.config_file, to_toml(config).encode())

    def config(self) -> Config:
        """The configuration of an existing run."""
        if not self.config_file.is_file():
            raise SplitcastError(f"run: {self.path} is not a run folder (it has no config.toml)")
        return load(self.config_file)

    def save_gamma(self, gamma: Sequence[float]) -> None:
        """Keep what was measured, so that resuming need not do it again."""
        write_atomically(self.gamma_file, (json.dumps({"gamma": list(gamma)}) + "\n").encode())

    def gamma(self) -> tuple[float, ...]:
        """What `save_gamma` kept; empty if nothing."""
        if not self.gamma_file.is_file():
            return ()
        try:
            return tuple(float(value) for value in json.loads(self.gamma_file.read_text(encoding="utf-8"))["gamma"])
        except (ValueError, TypeError, KeyError):
            raise SplitcastError(f"run: {self.gamma_file} is damaged; delete it to measure Gamma again") from None

    def rounds(self) -> list[RoundRecord]:
        """Every complete line of `rounds.jsonl`."""
        return list(self._lines())

    def _lines(self) -> Iterator[RoundRecord]:
        if not self.rounds_file.is_file():
            raise SplitcastError(f"run: {self.path} is not a run folder (it has no rounds.jsonl)")
        try:
            text = self.rounds_file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise SplitcastError(f"run: {self.rounds_file} is damaged: not a text in UTF-8") from None
        for number, line in enumerate(text.splitlines(keepends=True)):
            if not line.endswith("\n"):
                return  # the writer was stopped in the middle of this line
            try:
                yield RoundRecord(**json.loads(line))
            except (ValueError, TypeError):
                raise SplitcastError(f"run: {self.rounds_file} line {number + 1} is not a round") from None

    def append(self, record: RoundRecord) -> None:
        """Add a round."""
        with self.rounds_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def rewind(self, round_: int) -> list[RoundRecord]:
        """Drop the rounds after the checkpoint's and return the others."""
        lines = self.rounds() if self.rounds_file.is_file() else []  # killed before it had a first line
        kept = [record for record in lines if record.round <= round_]
        if len(kept) != round_:
            raise SplitcastError(f"run: {self.rounds_file} has {len(kept)} of the {round_} rounds before resuming")
        text = "".join(json.dumps(asdict(record)) + "\n" for record in kept)
        write_atomically(self.rounds_file, text.encode())
        return kept

    def save(self, state: State, round_: int, samples: str = "") -> None:
        """Checkpoint the state after a round, with the fingerprint of the data it was trained on."""
        tensors = {k: v.detach().contiguous() for k, v in state.tensors().items()}
        metadata = {
            "format": FORMAT,
            "round": str(round_),
            "cut": str(state.cut),
            "copies": str(state.copies),
            "samples": samples,
            "digest": _digest(tensors),
        }
        write_atomically(self.checkpoint_file, save(tensors, metadata))

    def restore(self, like: Params, samples: str = "") -> tuple[State, int]:
        """The state and round of the checkpoint, verified; ``like`` are the parameters of the model."""
        file = self.checkpoint_file
        try:
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SplitcastError(f"checkpoint: {file} is corrupt or truncated ({error})") from None
        if metadata.get("format") != FORMAT:
            raise SplitcastError(f"checkpoint: {file} has format {metadata.get('format')}, not {FORMAT}")
        if metadata["digest"] != _digest(tensors):
            raise SplitcastError(f"checkpoint: {file} is corrupt (its contents do not match their digest)")
        if samples and metadata.get("samples", samples) != samples:
            raise SplitcastError(f"run: {self.path} was trained on other data; resume it from Python, with its images")
        state = State.from_tensors(tensors, int(metadata["cut"]), int(metadata["copies"]), like)
        return state, int(metadata["round"])

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary of a complete run."""
        write_atomically(self.summary_file, (json.dumps(summary, indent=2) + "\n").encode())

    def summary(self) -> dict[str, Any]:
        """The summary of a complete run."""
        if not self.summary_file.is_file():
            raise SplitcastError(f"run: {self.path} is not complete (no summary.json); finish it with --resume")
        try:
            summary: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except ValueError:
            raise SplitcastError(f"run: {self.summary_file} is damaged; delete it and resume the run") from None
        return summary


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        total.update(key.encode())
        total.update(tensors[key].contiguous().flatten().numpy().tobytes())
    return total.hexdigest()
