"""Command lines: every one ends with 0, 1 or 2 and, if not 0, one line on stderr."""

import contextlib
import io
import json
import os
import shutil

from fuzz.core import Finding, Subject, attempt, expect, one_line
from fuzz.values import NUMBERS, SMALL_NUMBERS, text
from splitcast.base.config import LearnConfig, leaf_names
from splitcast.cli.main import COMMANDS, main, parse

NAMES = ["train", "compare", "plan", "learn", "profile", "report", "data", "verify"]
LEAVES = [name.replace("_", "-") for name in leaf_names()]
LEARN = [name.replace("_", "-") for name in LearnConfig.__dataclass_fields__]
OWN = {
    "train": ["out", "resume", "track", "quiet", "json", "config"],
    "compare": ["out", "target", "quiet", "json", "config"],
    "plan": ["draws", "input-shape", "classes", "out", "json", "config"],
    "learn": ["out", "quiet", "json", "config", *LEARN],
    "profile": ["arch", "input-shape", "classes", "json"],
    "report": ["out", "trust"],
    "data": ["cache"],
    "verify": [],
}
HEAVY = {"rounds", "batch", "local-steps", "clients", "gamma-draws", "episodes", "held-out", "trace", "config"}
"""What a large value of takes long, as it must; or a file that is another class's."""
NUMPY = ("encountered in", "divide by zero", "invalid value enc")
WORDS = {
    "scheme": ["sfl", "psl", "epsl", "sfl-gb", "fl", "sl"],
    "policy": ["fixed:2", "greedy", "myopic", "random", "clairvoyant"],
    "dataset": ["mnist", "mnist-mini", "tiny:data"],
    "partition": ["iid", "dirichlet", "shards"],
    "uplink-codec": ["int8", "int2", "fp16"],
    "arch": ["cnn-small"],
    "allocation": ["equal", "optimal"],
    "optimizer": ["sgd", "adam"],
    "device": ["cpu", "cuda", "cpu:9", "meta"],
    "dtype": ["float64", "float16"],
}


def word(rng, flag, numbers=NUMBERS):
    """A value for a flag, of any kind."""
    kind = rng.randrange(6)
    if kind < 3:
        return str(rng.choice(numbers))
    if kind == 3 and flag in WORDS:
        return rng.choice(WORDS[flag])
    return text(rng).replace("\x00", "")


class Commands(Subject):
    """`parse` of random words, and now and then `main` of a small training, plan or page."""

    name = "command"
    run_share = 0.1

    def case(self, rng):
        if rng.random() < self.run_share:
            return self._run(rng)
        name = rng.choice(NAMES)
        args = []
        for _ in range(rng.randrange(5)):
            flag = rng.choice([*(LEAVES if name in ("train", "compare", "plan", "learn") else []), *OWN[name], "x", ""])
            args += rng.choice([[f"--{flag}", word(rng, flag)], [f"--{flag}={word(rng, flag)}"], [f"--{flag}"]])
        if rng.random() < 0.3:
            args.insert(rng.randrange(len(args) + 1), word(rng, ""))
        args = [arg for arg in args if arg not in ("-h", "--help")]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                made, refusal = attempt(parse, COMMANDS[name][0], name, args)
            except OSError:  # main prints these in one line too
                return "no file"
            except SystemExit as stop:  # of --help and the like
                expect(stop.code in (0, None), f"parse ended with {stop.code}")
                return "help"
        expect(not err.getvalue(), f"parse wrote {err.getvalue()[:200]!r}")
        return "refused" if refusal else "taken" if made else "nothing"

    def _run(self, rng):
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        args = self._line(rng)
        out, err, code = io.StringIO(), io.StringIO(), 0
        here = os.getcwd()  # noqa: PTH109
        try:
            os.chdir(work)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(args)
        except SystemExit as stop:
            code = stop.code or 0
        except Exception as error:
            raise Finding(f"splitcast {' '.join(args)}: {type(error).__name__}: {error}"[:1000]) from error
        finally:
            os.chdir(here)
        said = err.getvalue()
        where = f"splitcast {' '.join(args)}"[:600]
        expect(code in (0, 1, 2), f"{where}: ended with {code}")
        expect("Traceback" not in said and not any(part in said for part in NUMPY), f"{where}: {said[:600]}")
        if code == 2:
            lines = said.splitlines()
            expect(bool(lines) and all(line.startswith("splitcast: ") for line in lines), f"{where}: said {said[:600]}")
            expect(len(lines) <= 1 + self._warned(lines), f"{where}: several lines: {said[:600]}")
            one_line(lines[-1])
        elif code == 0 and "--json" in args:
            strict_json(out.getvalue(), where)
        return f"{args[0]} {code}"

    @staticmethod
    def _warned(lines):
        return sum("is now" in line or "another scenario" in line or "left out" in line for line in lines)

    def _line(self, rng):
        """A command that takes a moment, with a few odd flags."""
        name = rng.choice(["train", "train", "plan", "plan", "learn", "profile", "report", "data", "verify", "compare"])
        if name in ("report", "verify"):
            return [name, *(word(rng, "") for _ in range(rng.randrange(3)))]
        if name == "data":
            return [name, rng.choice(["list", text(rng).replace("get", "")]), "--cache", word(rng, "")]
        given = {} if name == "profile" else {"arch": "cnn-small", "clients": "2", "batch": "2"}
        given["json"] = ""
        if name in ("train", "compare"):
            given |= {"rounds": "1", "out": "run"}
        elif name == "plan":
            given |= {"draws": "1"}
        elif name == "learn":
            given |= {"rounds": "2", "episodes": "2", "held-out": "1", "hidden": "2", "explore-episodes": "1"}
        pool = [*([] if name == "profile" else LEAVES), *OWN[name] * 3]
        for flag in rng.sample(pool, rng.choice([0, 1, 1, 2, 3])):
            some = [n for n in NUMBERS if n != 10**6] if flag == "classes" else NUMBERS  # so many take gigabytes
            given[flag] = word(rng, flag, SMALL_NUMBERS if flag in HEAVY else some)
        given.pop("config", None)
        args = [name, *(["psl"] if name == "compare" else [])]
        for flag, value in given.items():
            args += [f"--{flag}"] if flag in ("json", "quiet", "trust") else [f"--{flag}={value}"]
        return args


def strict_json(content, where):
    """JSON without NaN and Infinity."""

    def refuse(constant):
        raise Finding(f"{where}: {constant} in the JSON")

    try:
        json.loads(content, parse_constant=refuse)
    except ValueError:
        raise Finding(f"{where}: not JSON: {content[:200]!r}") from None
