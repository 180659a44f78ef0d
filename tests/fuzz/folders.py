"""Run folders that were edited, cut short, mixed up or damaged."""

import os
import shutil
from contextlib import suppress

import torch

from fuzz.core import Subject, attempt, expect, one_line
from fuzz.values import spoiled_bytes, spoiled_lines
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.run.identity import read_identity
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from splitcast.run.verify import verify
from splitcast.studies.report import write_report

FILES = ["run.json", "config.toml", "gamma.json", "rounds.jsonl", "checkpoint.safetensors", "summary.json"]
MAIN = ["rounds.jsonl", "checkpoint.safetensors", "config.toml"]
TINY = {"arch": "cnn-small", "clients": 2, "batch": 2, "rounds": 4, "eval_every": 4, "checkpoint_every": 2}
FILE_OF = dict(zip(("config", "gamma", "rounds", "restore", "summary"), FILES[1:], strict=True))
MEASURED = {"policy": "greedy", "gamma_draws": 1, "scheme": "psl"}


class _Stop(Exception):  # noqa: N818
    """Ends a training."""


class Folders(Subject):
    """Whatever was done to a folder is refused, or leaves every result as it was; `verify` tells of it."""

    name = "folder"

    def __init__(self, folder):
        super().__init__(folder)
        self.work, self.page = folder / "run", folder / "report.html"
        self.kinds = {}
        for name, values in (("fixed", {}), ("measured", MEASURED)):
            for state in ("finished", "stopped"):
                self.kinds[f"{name}-{state}"] = self._made(name, state, with_values(Config(), **TINY, **values))
        self.other = folder / "other"
        train(with_values(Config(), **TINY, **MEASURED, seed=1), self.other)

    def _made(self, name, state, config):
        """A run, stopped after round 3 or not, and all that can be read of it and comes of it."""
        made, early = self.folder / f"{name}-{state}", {}

        def watch(record):
            if record.round == 2:
                early["checkpoint"] = (made / "checkpoint.safetensors").read_bytes()
            if record.round == 3 and state == "stopped":
                raise _Stop

        with suppress(_Stop):
            train(config, made, on_round=watch)
        run = RunFolder(made)
        reads = {"config": run.config(), "rounds": run.rounds(), "gamma": run.measured("gamma")}
        if state == "finished":
            reads["summary"] = run.summary()
        expect(not verify(made), f"a run as it was left has problems: {verify(made)}")
        self._lay(made)
        write_report([self.work], self.page)
        page = self.page.read_bytes()
        tensors = {RunFolder(self.work).restore().round: RunFolder(self.work).restore().tensors}
        (self.work / "checkpoint.safetensors").write_bytes(early["checkpoint"])
        tensors[2] = RunFolder(self.work).restore().tensors
        self._lay(made)
        ended = train(run.config(), self.work, resume=True)
        tensors[4] = RunFolder(self.work).restore().tensors
        return {"path": made, "reads": reads, "page": page, "tensors": tensors, "ended": ended.rounds, **early}

    def _lay(self, source):
        if self.work.exists():
            shutil.rmtree(self.work)
        shutil.copytree(source, self.work)

    def case(self, rng):
        kind = rng.choice(list(self.kinds))
        known = self.kinds[kind]
        self._lay(known["path"])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            self._spoil(rng, known)
        problems = verify(self.work)
        expect(isinstance(problems, list), "verify gave no list")
        for problem in problems:
            one_line(problem)
        told = self._read(known, problems)
        further = rng.random()
        if further < 0.25:
            self._resume(known)
        elif further < 0.4:
            self._report(known, told)
        return "told" if problems else "unnoticed" if told else "same"

    def _read(self, known, problems):
        """Every reader; returns the names of what is refused or differs."""
        run, reads, whose = RunFolder(self.work), known["reads"], self._whose(known)
        told = set()
        for name in ("config", "rounds", "gamma", "summary", "restore"):
            found, refusal = attempt(run.measured, name) if name == "gamma" else attempt(getattr(run, name))
            exists = (self.work / FILE_OF[name]).exists()
            if refusal is not None:
                told.add(name)
                expect(problems or not exists, f"{name} is refused ({refusal}), and verify finds no problem")
                continue
            if name == "restore":
                same_as_was = same(found.tensors, known["tensors"].get(found.round, {}))
            elif name == "rounds":  # a run that was stopped earlier has fewer
                same_as_was = found == reads["rounds"][: len(found)]
                told |= {"rounds"} if len(found) < len(reads["rounds"]) else set()
                expect(problems or len(found) >= run.checkpointed(), "fewer rounds than the checkpoint's, not told")
            else:
                same_as_was = found == reads.get(name) or (name == "gamma" and not exists)
                told |= {name} if found != reads.get(name) else set()
            if not same_as_was:
                told.add(name)
                expect(whose != "own", f"{name} is read, and other than it was")
                expect(whose == "nobody's" or problems, f"{name} is of another run, and verify finds no problem")
        return told

    def _whose(self, known):
        """Whose run.json is there: without one, a folder is of an older version, for all that can be seen of it."""
        try:
            found = read_identity(self.work)
        except SplitcastError:
            return "own"  # then nothing is read at all
        return "nobody's" if found is None else "own" if found == read_identity(known["path"]) else "another's"

    def _resume(self, known):
        def go():
            return train(RunFolder(self.work).config(), self.work, resume=True)

        whose = self._whose(known)
        ended, _ = attempt(go)
        expect(ended is None or whose != "another's", "resumed with the identity of another run")
        if ended is not None and whose == "own":
            expect(ended.rounds == known["ended"], "resumed, and ended with other rounds")
            run = RunFolder(self.work)
            expect(run.rounds() == known["ended"], "resumed, and wrote other rounds")
            stored = run.restore()
            expect(same(stored.tensors, known["tensors"][stored.round]), "resumed to other weights")

    def _report(self, known, told):
        self.page.unlink(missing_ok=True)
        _, refusal = attempt(write_report, [self.work], self.page)
        if refusal is None and not told & {"config", "rounds", "summary", "gamma"}:
            expect(self.page.read_bytes() == known["page"], "the report has changed, but nothing it is about")

    def _spoil(self, rng, known):
        name = rng.choice(FILES + MAIN)
        file = self.work / name
        content = file.read_bytes() if file.is_file() else b""
        what = rng.randrange(20)
        if what < 7:
            file_write(file, spoiled_bytes(rng, content))
        elif what < 11:
            others = (self.other / name).read_bytes().splitlines(keepends=True) if name == "rounds.jsonl" else ()
            file_write(file, spoiled_lines(rng, content, others))
        elif what < 13:
            file_write(file, edited(rng, content))
        elif what == 13:
            file_write(file, (self.other / name).read_bytes())
        elif what == 14:
            donor = rng.choice([each["path"] for each in self.kinds.values()]) / rng.choice(FILES)
            file_write(file, donor.read_bytes() if donor.is_file() else b"")
        elif what == 15:
            file_write(self.work / "checkpoint.safetensors", known["checkpoint"])
        elif what == 16:
            remove(file)
        elif what == 17:
            remove(file)
            rng.choice([file.mkdir, lambda: os.mkfifo(file), lambda: file.symlink_to(file.name)])()
        elif what == 18:
            file_write(self.work / rng.choice([".rounds.jsonl.tmp", ".lock", "x", ".x.tmp"]), b"x")
        else:
            file_write(file, b"" if rng.random() < 0.5 else content * 2)


def edited(rng, content):
    """Another digit somewhere: what a person would change."""
    digits = [at for at, byte in enumerate(content[:5000]) if 48 <= byte <= 57]
    if not digits:
        return content
    at = rng.choice(digits)
    return content[:at] + str(rng.randrange(10)).encode() + content[at + 1 :]


def remove(file):
    """Whatever is there."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def file_write(file, content):
    """In place of whatever is there."""
    remove(file)
    file.write_bytes(content)


def same(ours, theirs):
    """Equal names and bits."""
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
