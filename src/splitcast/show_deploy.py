"""`splitcast deploy` in the terminal."""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from splitcast.config import Config, load
from splitcast.errors import SplitcastError, one_of
from splitcast.options import Output
from splitcast.records import RoundRecord, RunFolder
from splitcast.show import Watch

ACTIONS = ("init", "start", "stop", "status", "run")


def run_deploy(
    action: str,
    file: Path | None,
    folder: Path,
    only: Sequence[str],
    out: Path | None,
    resume: Path | None,
    output: Output,
) -> None:
    """`splitcast deploy`."""
    one_of("action", action, ACTIONS)
    try:
        import nvflare  # noqa: F401
    except ImportError:
        raise SplitcastError("deploy: NVIDIA FLARE is not installed; install the extra `deploy`") from None
    logging.getLogger().addHandler(logging.NullHandler())  # FLARE tells every lost connection on stderr
    if action == "run":
        _run(file, folder, out, resume, output)
    elif action == "init":
        _init(file, folder)
    elif action == "status":
        _status(folder, output)
    else:
        from splitcast.deploy import processes

        names = processes.start(folder, only) if action == "start" else processes.stop(folder, only)
        done = "started" if action == "start" else "stopped"
        print(f"{done}: {', '.join(names) or 'nothing, all is as you wish already'}")


def _init(file: Path | None, folder: Path) -> None:
    from splitcast.deploy.kits import make_kits

    if file is None:
        raise SplitcastError("file: init needs a deployment file; docs/deployment.md shows one")
    made = make_kits(file, folder)
    print(f"kits in {folder}: {', '.join(made) or 'nothing new'}")


def _status(folder: Path, output: Output) -> None:
    from splitcast.deploy.console import Operator
    from splitcast.deploy.kits import deployment_in
    from splitcast.deploy.processes import running

    names = ["server", *deployment_in(folder).sites]
    with Operator(folder) as operator:
        there = operator.connected()
    rows = {
        name: {
            "running here": running(folder / name) is not None,
            "connected": there is not None and (name == "server" or name in there),
        }
        for name in names
    }
    if output.json:
        print(json.dumps(rows))
        return
    table = Table()
    for heading in ("", "running here", "connected"):
        table.add_column(heading)
    for name, row in rows.items():
        table.add_row(name, *("yes" if value else "no" for value in row.values()))
    Console().print(table)


def _run(file: Path | None, folder: Path, out: Path | None, resume: Path | None, output: Output) -> None:
    from splitcast.deploy.supervise import supervise

    config, out = _what(file, out, resume)
    watch = Watch()
    show = watch(config.split.scheme, config)

    def on_round(record: RoundRecord) -> None:
        if not output.silent:
            show(record)
            for name, reason in (record.failures or {}).items():
                watch.progress.console.print(f"round {record.round}: {name}: {reason}", highlight=False)

    def note(text: str) -> None:
        if not output.silent:
            watch.progress.console.print(text, highlight=False)

    with watch:
        summary = supervise(folder, config, out, resume=resume is not None, on_round=on_round, note=note)
    if output.json:
        print(json.dumps(summary | {"folder": str(out)}))
        return
    megabytes = (summary["up_bytes"] + summary["down_bytes"]) / 1e6
    print(
        f"{summary['scheme']}: {100 * summary['accuracy']:.2f} % after {summary['rounds']} rounds, "
        f"{megabytes:.1f} MB, {summary['wall_seconds']:.1f} s, drift {summary['drift']:.3g}; run folder {out}"
    )


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
