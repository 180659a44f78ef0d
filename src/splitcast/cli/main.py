"""The command line: parse, call, print. Bad input is one line on stderr and exit code 2."""

import gc
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from splitcast.base.config import Config, load
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.renames import moved_flag
from splitcast.cli.options import (
    FLAGS,
    AttackOptions,
    BenchOptions,
    CompareOptions,
    CompletionOptions,
    DataOptions,
    DeployOptions,
    DoctorOptions,
    ExportOptions,
    InitOptions,
    LearnOptions,
    PlanOptions,
    ProfileOptions,
    ReportOptions,
    ReproduceOptions,
    SweepOptions,
    TrainOptions,
    VerifyOptions,
    WatchOptions,
    ZooOptions,
)

HELP = """\
splitcast trains a model in two halves, across many clients and one server, and counts what it costs.

usage: splitcast COMMAND [options]      (splitcast COMMAND --help lists them)

  train     train one scheme; write a run folder
  compare   train several schemes on the same data and seeds; one table, one figure
  sweep     train a grid of options and seeds, several at a time; tables with confidence intervals
  plan      which cut, how long a round takes in a wireless cell, and who gets what
  learn     learn which cut to take under which channel (DDQN), for train --policy
  reproduce draw the paper's figures anew and judge its claims (splitcast reproduce all --quick)
  report    one self-contained HTML page about one or several runs
  watch     the same page, live while runs go on (splitcast watch runs/sweep)
  attack    what the server can reconstruct of a client's samples (splitcast attack RUN)
  verify    whether run folders are whole and unedited (splitcast verify RUN...)
  export    the trained model of a run, for plain PyTorch (splitcast export RUN model.safetensors)
  profile   what each cut costs: parameters, traffic, FLOPs, privacy
  data      fetch data sets (splitcast data get mnist) or list them (splitcast data list)
  zoo       train models and tasks of many kinds under every scheme; one table
  doctor    versions, devices, threads, data sets and extras of this machine, and what to do about gaps
  bench     measure speed as ratios in one run (splitcast bench engine)
  init      write a commented configuration (splitcast init my.toml)
  completion  complete commands and flags in bash or zsh: eval "$(splitcast completion bash)"
  deploy    train for real: one server, sites elsewhere, on NVIDIA FLARE (docs/deployment.md)

examples:
  splitcast train --scheme sfl-ga --cut 1 --rounds 100
  splitcast compare sfl-ga sfl psl --partition dirichlet --alpha 0.3 --out runs/skewed
  splitcast sweep --over scheme=sfl,sfl-ga partition=iid,shards seed=0..2 --out runs/seeds
  splitcast plan --scheme sfl --bandwidth-hz 10e6 --epsilon 0.001
  splitcast train --policy greedy --epsilon 0.001
  splitcast train --config my.toml --lr 0.1
"""


def train(options: TrainOptions) -> None:
    from splitcast.cli.show import run_training

    run_training(options.settings, options.out, options.resume, options.track, options.output)


def compare(options: CompareOptions) -> None:
    from splitcast.cli.show import run_comparison

    if options.settings.split.scheme != Config().split.scheme:
        raise SplitcastError("scheme: compare takes schemes without a flag, as in: splitcast compare sfl-ga sfl psl")
    run_comparison(options)


def sweep(options: SweepOptions) -> None:
    from splitcast.cli.show_sweep import run_sweep

    if options.jobs < 0 or options.draw < 0:
        raise SplitcastError("jobs, draw: must be at least 0")
    run_sweep(options)


def plan(options: PlanOptions) -> None:
    from splitcast.base.config import with_values
    from splitcast.cli.show_plan import run_per_client, run_plan
    from splitcast.cost.memory import device
    from splitcast.model import make_model
    from splitcast.model.hub import text_shape

    config, model, shape, classes = options.settings, None, options.input_shape, options.classes
    if options.client_device:
        given = device(options.client_device)
        config = with_values(config, client_flops_per_s=given.flops_per_s, client_memory_gb=given.memory_gb)
    text = text_shape(config.model.arch) if config.data.dataset == "mnist-mini" else None
    if text:
        shape = shape or (text[0],)
        config = with_values(config, task="next-token") if text[1] else config
    if shape:
        model = make_model(config, shape, 10 if classes is None else classes, shapes_only=True)
    if model and classes is None and config.model.task == "next-token":
        classes = model.smashed_shape(model.depth)[-1]
    if options.per_client:
        run_per_client(config, min(options.draws, 8), model, options.json)
        return
    run_plan(config, options.draws, options.out, model, classes, options.json)


def learn(options: LearnOptions) -> None:
    from splitcast.cli.show_learn import run_learning
    from splitcast.studies.learn import QUICK

    learning = replace(options.learning, **QUICK) if options.quick else options.learning
    run_learning(options.settings, learning, options.out, options.output)


def reproduce(options: ReproduceOptions) -> None:
    from splitcast.cli.show_reproduce import run_reproduction

    run_reproduction(options)


def report(options: ReportOptions) -> None:
    from splitcast.studies.report import write_report

    gc.disable()  # long runs are millions of objects, none of them garbage
    try:
        page = write_report(options.runs, options.out, trust=options.trust)
    finally:
        gc.enable()
    print(f"report: {page}")


def watch(options: WatchOptions) -> None:
    from splitcast.cli.show_watch import run_watch

    run_watch(options)


def attack(options: AttackOptions) -> None:
    from splitcast.cli.show_attack import run_attack

    run_attack(options)


def verify(options: VerifyOptions) -> None:
    from splitcast.run.verify import verify as problems_of

    if not options.runs:
        raise SplitcastError("runs: none given; name a run folder")
    found = {run: problems_of(run) for run in options.runs}
    for run, problems in found.items():
        print("\n".join(problems or [f"{run}: ok"]))
    if any(found.values()):
        sys.exit(1)


def export(options: ExportOptions) -> None:
    from splitcast.run.export import export as write

    print(f"written: {options.file}, {write(options.run, options.file):,} values")


def profile(options: ProfileOptions) -> None:
    from splitcast.cli.show import print_profile
    from splitcast.model import build
    from splitcast.model.profile import as_rows

    model = build(options.arch, options.input_shape, options.classes, seed=0)
    if options.json:
        print(json.dumps({"parameters": model.size, "cuts": as_rows(model.profile())}, indent=2))
    else:
        print_profile(model)


def data(options: DataOptions) -> None:
    from splitcast import data as datasets
    from splitcast.base.errors import one_of

    if one_of("action", options.action, ["get", "list"]) == "get":
        print(f"ready: {datasets.fetch(options.name, options.cache)}")
        return
    for name in datasets.NAMES:
        try:
            found = datasets.load(name, options.cache)
            print(f"{name:14} {len(found.train_y):6} train, {len(found.test_y):6} test, {found.classes} classes")
        except SplitcastError:
            print(f"{name:14} not fetched: splitcast data get {name}")
    for name, size in datasets.stored_texts(options.cache).items():
        print(f"{name:14} {size}" if size else f"{name:14} not fetched: splitcast data get {name}")


def bench(options: BenchOptions) -> None:
    from splitcast.base.errors import one_of
    from splitcast.bench import BENCHES
    from splitcast.cli.show import measured, print_bench

    if options.repeats < 1:
        raise SplitcastError(f"repeats: {options.repeats}; must be at least 1")
    run = BENCHES[one_of("bench", options.what, BENCHES)]
    rows = run(options.repeats) if options.json else measured(run, options.repeats)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_bench(rows)


def zoo(options: ZooOptions) -> None:
    from splitcast.base.errors import one_of
    from splitcast.base.files import write_atomically
    from splitcast.schemes.schemes import SCHEMES
    from splitcast.studies.zoo import ENTRIES, markdown, try_all

    models = [one_of("models", name, ENTRIES) for name in options.models or ENTRIES]
    schemes = [one_of("schemes", name, SCHEMES) for name in options.schemes or SCHEMES]
    options.out.mkdir(parents=True, exist_ok=True)
    show = (lambda cell: None) if options.quiet else (lambda cell: print(cell, file=sys.stderr))
    cells = try_all(options.out, models, schemes, show)
    table = options.out / "models.md"
    write_atomically(table, markdown(cells).encode())
    refused = sum(bool(cell.reason) for cell in cells)
    print(f"{len(cells)} trainings, {refused} refused in one line; table {table}")


def doctor(options: DoctorOptions) -> None:
    from splitcast.cli.doctor import examine

    found = examine()
    if options.json:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        print("\n".join(str(finding) for finding in found))


def deploy(options: DeployOptions) -> None:
    from splitcast.cli.show_deploy import run_deploy

    run_deploy(options)


def init(options: InitOptions) -> None:
    from splitcast.cli.help import commented_config

    if options.file.exists():
        raise SplitcastError(f"file: {options.file} exists; choose another name")
    options.file.write_text(commented_config())
    print(f"written: {options.file}; edit it, then: splitcast train --config {options.file}")


def completion(options: CompletionOptions) -> None:
    from splitcast.base.errors import one_of
    from splitcast.cli.help import completion as script

    shell = one_of("shell", options.shell, ["bash", "zsh"])
    print(script(shell, {name: kind for name, (kind, _) in COMMANDS.items()}), end="")


Command = Callable[[Any], None]
COMMANDS: dict[str, tuple[type, Command]] = {
    "train": (TrainOptions, train),
    "compare": (CompareOptions, compare),
    "sweep": (SweepOptions, sweep),
    "plan": (PlanOptions, plan),
    "learn": (LearnOptions, learn),
    "reproduce": (ReproduceOptions, reproduce),
    "report": (ReportOptions, report),
    "watch": (WatchOptions, watch),
    "attack": (AttackOptions, attack),
    "verify": (VerifyOptions, verify),
    "export": (ExportOptions, export),
    "profile": (ProfileOptions, profile),
    "data": (DataOptions, data),
    "zoo": (ZooOptions, zoo),
    "doctor": (DoctorOptions, doctor),
    "bench": (BenchOptions, bench),
    "deploy": (DeployOptions, deploy),
    "init": (InitOptions, init),
    "completion": (CompletionOptions, completion),
}


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `splitcast`."""
    arguments = list(sys.argv[1:] if args is None else args)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if arguments[0] in ("-V", "--version"):
        print(f"splitcast {version('splitcast')}")
        return
    if str(Path.cwd()) not in sys.path:  # an installed command does not look where its user works
        sys.path.append(str(Path.cwd()))
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"splitcast: {message}", file=sys.stderr)
        try:
            try:
                _dispatch(arguments)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # who reads it, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> None:
    try:
        name, *rest = arguments
        if name not in COMMANDS:
            raise SplitcastError(f"command: unknown {name!r}; choose one of {', '.join(COMMANDS)}")
        kind, command = COMMANDS[name]
        command(parse(kind, name, rest))
    except SplitcastError as error:
        print(f"splitcast: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        raise
    except OSError as error:  # a folder that cannot be written, a full disk
        said = SplitcastError(f"cannot use {shown(error.filename or 'a file')}: {error.strerror or error}")
        print(f"splitcast: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stopped:
        print(f"splitcast: interrupted{f'; {stopped}' if str(stopped) else ''}", file=sys.stderr)
        sys.exit(130)


def parse(kind: type, name: str, args: list[str]) -> Any:
    """Options of a command; ``--config FILE`` supplies the defaults of its settings."""
    from splitcast.cli.help import help_text, unused_flag

    if any(word in ("-h", "--help", "--help-all") for word in args):
        print(help_text(kind, name, everything="--help-all" in args), end="")
        raise SystemExit(0)
    keywords: dict[str, Any] = {}
    args = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    settings = "settings" in kind.__dataclass_fields__  # type: ignore[attr-defined]
    for flag in (arg.partition("=")[0] for arg in args if settings):
        if now := moved_flag(flag):
            raise SplitcastError(f"{flag} is now {now}")
        if unused_flag(name, flag):
            raise SplitcastError(f"{flag}: {name} has no use for it; leave it out")
    if "--config" in args:
        at = args.index("--config")
        if at + 1 >= len(args):
            raise SplitcastError("config: --config needs a file name")
        if not settings:
            raise SplitcastError(f"config: {name} takes no --config")
        keywords["default"] = kind(settings=load(Path(args[at + 1])))
        args = args[:at] + args[at + 2 :]
    if name == "train" and (begun := _value_of("--resume", args)):
        if keywords:
            raise SplitcastError("config: a run goes on with its own configuration; leave --config out")
        from splitcast.run.records import RunFolder

        keywords["default"] = kind(settings=RunFolder(Path(begun)).config())
    framed = io.StringIO()
    try:
        with redirect_stderr(framed):
            return tyro.cli(kind, prog=f"splitcast {name}", args=args, registry=FLAGS, **keywords)
    except SystemExit as stop:
        if stop.code:
            raise SplitcastError(unframed(framed.getvalue())) from None
        raise


def _value_of(flag: str, args: list[str]) -> str:
    """What follows a flag; empty if nothing does."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    return next((following for word, following in pairwise(words) if word == flag), "")


def unframed(box: str) -> str:
    """What tyro says in a frame of several lines, in one.

    >>> unframed("╭─ Parsing error ─╮\\n│ invalid value: x │\\n│ ──────── │\\n│ For full helptext, run … │\\n╰──╯")
    'invalid value: x; For full helptext, run …'
    """
    said = [line.strip("╭╮╰╯│─ ") for line in box.splitlines()[1:]]
    return "; ".join(line for line in said if line.strip("-")).replace(":; ", ": ")
