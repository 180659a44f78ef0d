"""`splitcast deploy` in the terminal."""

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from splitcast.base.config import Config, load
from splitcast.base.errors import SplitcastError, one_of
from splitcast.cli.options import DeployOptions, Output
from splitcast.cli.show import Watch, line_of, told_cuts
from splitcast.cutting.auto import is_auto, with_cuts
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.run.track import tracking
from splitcast.studies.plan import scenario_of

ACTIONS = ("init", "start", "stop", "status", "run", "renew", "revoke")


def run_deploy(options: DeployOptions) -> None:
    """`splitcast deploy`."""
    action, file, folder = one_of("action", options.action, ACTIONS), options.file, options.folder
    try:
        import nvflare  # noqa: F401
    except ImportError:
        raise SplitcastError("deploy: NVIDIA FLARE is not installed; install the extra `deploy`") from None
    logging.getLogger().addHandler(logging.NullHandler())  # FLARE tells every lost connection on stderr
    if action == "run":
        _run(options)
    elif action == "init":
        _init(file, folder)
    elif action == "status":
        _status(folder, options.output)
    elif action in ("renew", "revoke"):
        _renew(folder, file if action == "revoke" else None, revoke=action == "revoke")
    else:
        from splitcast.deploy import processes

        names = (processes.start if action == "start" else processes.stop)(folder, options.only)
        done = "started" if action == "start" else "stopped"
        print(f"{done}: {', '.join(names) or 'nothing, all is as you wish already'}")


def _init(file: Path | None, folder: Path) -> None:
    from splitcast.deploy.kits import make_kits

    if file is None:
        raise SplitcastError("file: init needs a deployment file; docs/deployment.md shows one")
    made = make_kits(file, folder)
    print(f"kits in {folder}: {', '.join(made) or 'nothing new'}")


def _renew(folder: Path, name: Path | None, *, revoke: bool) -> None:
    from splitcast.deploy.kits import renew_kits, revoke_site
    from splitcast.deploy.processes import refuse_running

    if revoke and name is None:
        raise SplitcastError("revoke: needs the name of a site, as in: splitcast deploy revoke site-2")
    refuse_running(folder)
    made = revoke_site(folder, str(name)) if revoke else renew_kits(folder)
    print(f"new certificates in {folder}: {', '.join(made)}; bring each site its new startup folder, old ones are void")
    if revoke:
        print(f"{name} is out; take it out of your own deployment file too, or the next init brings it back")


def _status(folder: Path, output: Output) -> None:
    from splitcast.deploy.console import Operator
    from splitcast.deploy.kits import days_left, deployment_in
    from splitcast.deploy.processes import running
    from splitcast.deploy.supervise import run_going_on

    names = ["server", *deployment_in(folder).sites]
    with Operator(folder) as operator:
        there = operator.connected()
    days = {name: days_left(folder / name) for name in [*names, "operator"]}
    rows = {
        name: {
            "running here": running(folder / name) is not None,
            "connected": there is not None and (name == "server" or name in there),
            "certificate days": _whole(days[name]),
        }
        for name in names
    }
    going_on = run_going_on(folder)
    if output.json:
        print(json.dumps(rows | ({"run": going_on} if going_on else {})))
        return
    table = Table()
    for heading in ("", "running here", "connected", "certificate ends in"):
        table.add_column(heading)
    for name, row in rows.items():
        here, connected, _ = row.values()
        table.add_row(name, "yes" if here else "no", "yes" if connected else "no", _ends(days[name]))
    table.add_row("operator", "", "", _ends(days["operator"]))
    Console().print(table)
    if going_on:
        rate, left = going_on["round_s"], going_on["left_s"]
        pace = f", {rate:.3g} s a round, {left:.0f} s left" if rate is not None and left is not None else ""
        print(
            f"run {going_on['folder']}: round {going_on['round']} of {going_on['rounds']}{pace}; job {going_on['job']}"
        )


def _whole(days: float | None) -> int | None:
    return None if days is None else int(days // 1)


def _ends(days: float | None) -> str:
    if days is None:
        return "not here"
    return f"{int(days)} days" if days > 0 else "expired: splitcast deploy renew"


@contextmanager
def _terminable(hint: str) -> Iterator[None]:
    """Within, SIGTERM is an interruption like Ctrl-C, and either says how to go on."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending the job takes some seconds
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if ours else None
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(hint) from None
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)


def _run(options: DeployOptions) -> None:
    from splitcast.deploy.supervise import supervise

    folder, resume, output = options.folder, options.resume, options.output
    asked, out = _what(options.file, options.out, resume)
    config = with_cuts(asked, scenario_of(asked)) if is_auto(asked) else asked
    watch = Watch()
    show = watch(config.split.scheme, config)

    def say(text: str) -> None:  # part of it may come from a site: no markup, no control characters
        watch.say("".join(c if c.isprintable() else "?" for c in text))

    def on_round(record: RoundRecord) -> None:
        tracked(record)
        if not output.silent:
            show(record)
            for name, reason in (record.failures or {}).items():
                say(f"round {record.round}: {name}: {reason}")

    def note(text: str) -> None:
        if not output.silent:
            say(text)

    hint = f"go on with: splitcast deploy run --resume {out} --folder {folder}"
    with _terminable(hint), watch, tracking(options.track, out, config) as tracked:
        if is_auto(asked):
            note(f"{config.split.scheme} takes cut {told_cuts(config.split.cut)}")
        summary = supervise(folder, config, out, resume=resume is not None, on_round=on_round, note=note)
    if output.json:
        print(json.dumps(summary | {"folder": str(out)}))
        return
    print(line_of(summary, f"{summary['wall_seconds']:.1f} s", out))


def _what(file: Path | None, out: Path | None, resume: Path | None) -> tuple[Config, Path]:
    """The configuration and the run folder."""
    if resume:
        if file or out:
            raise SplitcastError("resume: takes its settings from the run folder; leave the other options out")
        return RunFolder(resume).config(), resume
    if file is None:
        raise SplitcastError("file: run needs a configuration, e.g. the config.toml of a run folder")
    config = load(file)
    return config, out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.split.scheme}"
