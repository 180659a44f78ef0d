"""A run folder: what was asked, what happened each round, where it stands, and how it ended.

    run.json                 the run's identity, and the digest of config.toml
    config.toml              the configuration; a folder with this file holds a run
    gamma.json, errors.json  Gamma of every cut and errors of formats there, if they were measured for the policy
    rounds.jsonl             one line per round, chained; in a simulation no number in it depends on the machine's speed
    checkpoint.safetensors   all weights and optimiser state after some round, and the chain of that round
    summary.json             written when the run is complete
    .lock                    held by the process that writes

Every file but `rounds.jsonl` is written under a temporary name and renamed. `rounds.jsonl` is appended to, and forced
to disk before a checkpoint of its last round; on resume it is cut back to the round of the checkpoint. Whatever was
edited, swapped, removed or taken from another run is refused on reading. Folders of older versions, without `run.json`,
are read and go on without chains.
"""

import json
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from splitcast.base.config import Config, from_toml, to_toml
from splitcast.base.errors import SplitcastError
from splitcast.base.files import LOCK, lock_folder, read_bounded, sync, temporary_of, write_atomically
from splitcast.run.checkpoint import Checkpoint, Stored, pack, round_of, unpack
from splitcast.run.identity import FILE as RUN_FILE
from splitcast.run.identity import Identity, digest_of, read_identity, write_identity
from splitcast.run.lines import RoundRecord, RoundsReader, line_of, stored_chain
from splitcast.run.strict import ENTRIES, LINE_BYTES, number, parsed

__all__ = ["Checkpoint", "RoundRecord", "RoundsReader", "RunFolder", "write_atomically"]

SEAL = ("run", "chain", "digest")
"""Keys of `summary.json` that say what it belongs to."""


class RunFolder:
    """Reads and writes one run. Who writes holds `lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / RUN_FILE
        self.config_file = path / "config.toml"
        self.rounds_file = path / "rounds.jsonl"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self.summary_file = path / "summary.json"
        self._tail = RoundsReader(path)
        self._told = False

    # ---- the folder

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; makes the folder if need be. Refused while another process writes."""
        self._make()
        with lock_folder(self.path):
            yield

    def is_vacant(self) -> bool:
        """Whether a run may begin here: the folder is absent, empty, or holds what a killed `create` left."""
        if not self.path.exists():
            return True
        found = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else {""}
        if not found <= {LOCK, RUN_FILE, *(temporary_of(file).name for file in (self.run_file, self.config_file))}:
            return False
        try:
            return RUN_FILE not in found or read_identity(self.path) is not None
        except SplitcastError:
            return False  # a run.json of something else

    def discard(self) -> None:
        """Remove a folder in which no run has begun, unless another process is about to begin one."""
        if not self.path.is_dir():
            return
        with suppress(SplitcastError, OSError):
            with lock_folder(self.path):
                if not self.is_vacant():
                    return
                for entry in self.path.iterdir():
                    if entry.name != LOCK:
                        entry.unlink()
            self.path.rmdir()

    def create(self, config: Config) -> None:
        """Start a new run in a vacant folder; `config.toml` comes last, so that a run is whole once it has it."""
        if self.path.exists() and not self.path.is_dir():
            raise SplitcastError(f"out: {self.path} is a file; choose a folder")
        if not self.is_vacant():
            raise SplitcastError(f"out: {self.path} is not empty; choose another folder, or --resume")
        self._make()
        content = to_toml(config).encode()
        write_identity(self.path, Identity(secrets.token_hex(8), digest_of(content)))
        write_atomically(self.config_file, content)

    def reconfigure(self, config: Config) -> None:
        """Ask something else of an existing run, such as more rounds, which makes it unfinished."""
        content = to_toml(config).encode()
        if self.summary_file.is_dir():
            raise SplitcastError(f"run: {self.summary_file} is a folder; remove it")
        self.summary_file.unlink(missing_ok=True)
        known = read_identity(self.path)
        if known:  # at any moment config.toml has one of the digests in run.json
            write_identity(self.path, Identity(known.run, known.config, digest_of(content)))
        write_atomically(self.config_file, content)
        if known:
            write_identity(self.path, Identity(known.run, digest_of(content)))

    def config(self) -> Config:
        """The configuration of an existing run."""
        self._begun()
        content = read_bounded(self.config_file, LINE_BYTES)
        try:
            found = from_toml(content.decode(), str(self.config_file))
        except UnicodeDecodeError:
            raise SplitcastError(f"config: {self.config_file} is not a text in UTF-8") from None
        except (ValueError, RecursionError):
            raise SplitcastError(f"config: {self.config_file} is not valid TOML") from None
        known = read_identity(self.path)
        if known and digest_of(content) not in (known.config, known.next):
            raise SplitcastError(
                f"config: {self.config_file} was edited since the run began; put it back, or start another run"
            )
        return found

    def _begun(self) -> None:
        if not self.config_file.is_file():
            raise SplitcastError(f"run: {self.path} is not a run folder (it has no config.toml)")

    def _make(self) -> None:
        absent = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise SplitcastError(f"out: {self.path} is a file; choose a folder") from None
        except OSError as error:
            raise SplitcastError(f"out: cannot create {self.path}: {error.strerror}") from None
        for folder in absent:
            sync(folder.parent)

    def _run(self) -> str:
        """The identity; empty, with a warning, in a folder of an older version."""
        known = read_identity(self.path)
        if known:
            return known.run
        if not self._told:
            self._told = True
            warnings.warn(
                f"run: {self.path} is of an older version and goes on without chains; rank, dropped_energy and gamma "
                "are read as metrics, tensors client/NAME as client/trained/NAME, client_momentum/NAME as "
                "client/opt/momentum/NAME, and so for the server",
                stacklevel=3,
            )
        return ""

    # ---- what was measured before

    def save_measured(self, name: str, values: Sequence[float]) -> None:
        """Keep what was measured (gamma, errors), sealed, so that resuming need not do it again."""
        content: dict[str, Any] = {name: [float(value) for value in values]}
        if known := read_identity(self.path):
            content["run"] = known.run
            content["digest"] = _seal(content)
        write_atomically(self.path / f"{name}.json", (json.dumps(content) + "\n").encode())

    def measured(self, name: str) -> tuple[float, ...]:
        """What `save_measured` kept; empty if nothing."""
        file = self.path / f"{name}.json"
        if not file.exists():
            return ()
        try:
            found = parsed(read_bounded(file, LINE_BYTES))
            values, said = found[name], found.pop("digest", None)
            known = read_identity(self.path)
            if not isinstance(values, list) or len(values) > ENTRIES:
                raise ValueError
            if known and (said != _seal(found) or found.get("run") != known.run):
                raise ValueError
            return tuple(number(value) for value in values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise SplitcastError(f"run: {file} is damaged; delete it to measure {name} again") from None

    # ---- rounds

    def rounds(self, upto: int | None = None) -> list[RoundRecord]:
        """Every complete line of `rounds.jsonl`, up to some round."""
        self._begun()
        self._run()
        return RoundsReader(self.path).new(upto)

    def append(self, record: RoundRecord) -> None:
        """Add the next round. It is on disk for sure after the next `save`."""
        tail = self._tail
        tail.new()
        if tail.torn:
            raise SplitcastError(f"run: {self.rounds_file} ends in the middle of a line; resume the run to drop it")
        if record.round != tail.count + 1:
            raise SplitcastError(f"round: {record.round} cannot follow round {tail.count} of {self.rounds_file}")
        line, _ = line_of(record, tail.chain, tail.chained)
        with self.rounds_file.open("ab") as file:
            file.write(line)

    def rewind(self, round_: int) -> list[RoundRecord]:
        """Drop the rounds after the checkpoint's, whatever they are, and return the others."""
        self._run()
        reader = RoundsReader(self.path)
        kept = reader.new(round_)
        if len(kept) != round_:
            raise SplitcastError(f"run: {self.rounds_file} has {len(kept)} of the {round_} rounds before resuming")
        if self.rounds_file.exists() and self.rounds_file.stat().st_size > reader.end:
            with self.rounds_file.open("rb") as file:
                content = file.read(reader.end)
            write_atomically(self.rounds_file, content)
        return kept

    # ---- checkpoints

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], round_: int, samples: str = "") -> None:
        """Checkpoint the tensors after the last round, with the fingerprint of the data they were trained on."""
        tail = self._tail
        tail.new()
        if tail.count != round_:
            raise SplitcastError(f"round: {self.rounds_file} ends with {tail.count}; cannot save round {round_}")
        if round_:
            sync(self.rounds_file)
            sync(self.path)
        known = read_identity(self.path)
        content = pack(tensors, about, round_, known.run if known else "", tail.chain, samples)
        write_atomically(self.checkpoint_file, *content)

    def restore(self, samples: str = "") -> Checkpoint:
        """The checkpoint, verified: it is whole, of this run, and of the rounds recorded here."""
        run = self._run()
        stored = unpack(self.checkpoint_file)
        reader = RoundsReader(self.path)
        reader.new(stored.checkpoint.round)
        self.compare(stored, run, reader.count, reader.chain)
        older = samples.startswith(f"{stored.samples}-")  # `Dataset.fingerprint` begins with what earlier versions kept
        if samples and stored.samples not in (None, samples) and not older:
            raise SplitcastError(f"run: {self.path} was trained on other data; resume it with the data it began with")
        return stored.checkpoint

    def compare(self, stored: Stored, run: str, rounds: int, chain: str) -> None:
        """Refuse a checkpoint that is not of the run, or not of its rounds, of which there are so many up to it."""
        file, round_ = self.checkpoint_file, stored.checkpoint.round
        if stored.run != run or (stored.old and run):
            whose, own = stored.run or "without identity", run or "without identity"
            raise SplitcastError(f"checkpoint: {file} is of another run ({whose}, not {own}); put this run's own back")
        if rounds < round_:
            raise SplitcastError(f"run: {self.rounds_file} has {rounds} of the {round_} rounds of the checkpoint")
        if not stored.old and stored.chain != chain:
            raise SplitcastError(f"checkpoint: {file} is of other rounds 1 to {round_} than {self.rounds_file.name}")

    def checkpointed(self) -> int:
        """The round of the checkpoint, as its header says; 0 without a checkpoint. A cheap look, without checks."""
        return round_of(self.checkpoint_file)

    # ---- the end

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a complete run, sealed with the run's identity and the chain of its last round."""
        try:
            content = json.loads(json.dumps(dict(summary), allow_nan=False))
        except ValueError:
            raise SplitcastError("summary: has a number that is not finite; leave it out") from None
        content = {name: value for name, value in content.items() if name not in SEAL}
        known = read_identity(self.path)
        if known:
            content |= {"run": known.run, "chain": self._last_chain()}
            content["digest"] = _seal(content)
        if self.rounds_file.exists():
            sync(self.rounds_file)
        write_atomically(self.summary_file, (json.dumps(content, indent=2) + "\n").encode())

    def summary(self) -> dict[str, Any]:
        """The summary of a complete run, as it was given to `finish`."""
        if not self.summary_file.is_file():
            raise SplitcastError(f"run: {self.path} is not complete (no summary.json); finish it with --resume")
        try:
            found = parsed(read_bounded(self.summary_file, LINE_BYTES))
            said = {name: found.pop(name, None) for name in SEAL}
            sealed = _seal(found | {name: said[name] for name in ("run", "chain")})
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise SplitcastError(f"run: {self.summary_file} is damaged; delete it and resume the run") from None
        known = read_identity(self.path)
        if known and any(value is not None for value in said.values()):
            if said["digest"] != sealed:
                raise SplitcastError(f"run: {self.summary_file} was edited; delete it and resume the run")
            if (said["run"], said["chain"]) != (known.run, self._last_chain()):
                raise SplitcastError(
                    f"run: {self.summary_file} is of another run or of other rounds; delete it and resume the run"
                )
        return dict(found)

    def _last_chain(self) -> str:
        """What the last complete line says; empty without one."""
        if not self.rounds_file.is_file():
            return ""
        with self.rounds_file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 2 * LINE_BYTES))
            lines = file.read(2 * LINE_BYTES).rpartition(b"\n")[0]
        return stored_chain(lines.rpartition(b"\n")[2]) or ""


def _seal(summary: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(summary, sort_keys=True).encode())
