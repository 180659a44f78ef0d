"""Submit a run as a FLARE job, watch its folder, and submit it again from the last checkpoint whenever it dies.

The supervisor runs on the server's machine: the run folder is written there by the job itself, so its rounds are what
has really happened, and a supervisor that is stopped loses nothing (`splitcast deploy run --resume FOLDER`).
"""

import json
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitcast.base.config import Config, to_toml
from splitcast.base.errors import SplitcastError
from splitcast.base.files import read_bounded, write_atomically, writer
from splitcast.deploy.console import Operator
from splitcast.deploy.job import TROUBLE
from splitcast.deploy.kits import deployment_in
from splitcast.deploy.settings import Deployment
from splitcast.deploy.watchdog import LOG
from splitcast.remote.federation import refuse_what_cannot_travel
from splitcast.run.records import RoundRecord, RoundsReader, RunFolder
from splitcast.run.strict import LINE_BYTES, parsed, text

RUN_FILE = "deployment.json"
"""In the run folder: the name under which sites keep their halves, and the last job."""
RUN_NAME = re.compile(r"[0-9a-f]{16}")
LAST_RUN = "run.json"
"""In the folder of the deployment: where the last run is."""
SITES_S = 30.0
"""How long to wait for the sites before a run starts."""
RETURN_S = 15.0
"""How long to wait for lost sites before it goes on without them."""
SERVER_S = 120.0
"""How long to wait for a server that went away."""
PACE = 20
"""Rounds from which the time that is left is told."""
FRUITLESS = 3
"""Submissions in a row without a new checkpoint after which the supervisor gives up."""
POLL_S = 0.3
ASK_S = 2.0
"""How often to look at the folder, and how often to ask the server."""

Note = Callable[[str], None]


def supervise(
    folder: Path,
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Run to the end; returns the summary."""
    deployment = deployment_in(folder)
    refuse_what_cannot_travel(config, len(deployment.sites))
    with Operator(folder) as operator:
        return _supervised(operator, deployment, config, RunFolder(out), resume, on_round, note)


def _supervised(
    operator: Operator,
    deployment: Deployment,
    config: Config,
    run: RunFolder,
    resume: bool,
    on_round: Callable[[RoundRecord], None],
    note: Note,
) -> dict[str, Any]:
    if resume and run.summary_file.is_file():
        return run.summary()
    begun = resume and _has_begun(run)
    to_go_on = max(1, deployment.limits.min_sites)
    wait_for_sites(operator, deployment, SITES_S, to_go_on if begun else deployment.to_start)
    if not begun:
        _begin(run, None if resume else config)
    write_atomically(operator.folder / LAST_RUN, json.dumps({"folder": str(run.path.resolve())}).encode())
    watch = _Watch(run, on_round)
    fruitless = 0
    while True:
        before = run.checkpointed()
        try:
            job = _submitted(operator, deployment, config, run)
            ended = _follow(operator, job, watch)
        except BaseException:
            operator.close()  # it may have been stopped in the middle of a question
            operator.end(_known(run)["job"])
            raise
        if run.summary_file.is_file():
            summary = run.summary() | {"command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
            run.finish(summary)
            return summary
        trouble = _trouble(run)
        if trouble and not trouble["again"]:
            raise SplitcastError(str(trouble["what"]))
        fruitless = 0 if run.checkpointed() != before else fruitless + 1
        reason = trouble["what"] if trouble else ended
        if fruitless == FRUITLESS:
            log = operator.folder / "server" / LOG
            raise SplitcastError(f"run: {FRUITLESS} jobs in a row ended without a checkpoint ({reason}); see {log}")
        sites = wait_for_sites(operator, deployment, RETURN_S, to_go_on, SERVER_S)
        note(f"{reason}; going on from round {run.checkpointed()} with {', '.join(sites)}")


def _has_begun(run: RunFolder) -> bool:
    """Whether a run to be resumed has a name at its sites already; one without rounds can still get one."""
    if (run.path / RUN_FILE).is_file():
        return bool(_known(run))
    run.config()
    if run.checkpoint_file.exists() or run.rounds():
        raise SplitcastError(f"resume: {run.path} was not run on sites; go on with: splitcast train --resume")
    return False


def _begin(run: RunFolder, config: Config | None) -> None:
    """Make the run folder, if there is a configuration for it, and give the run its name; nobody else may write yet."""
    new = not run.path.exists()
    try:
        with run.lock():
            if config is not None:
                run.create(config)
            _write(run, {"run": secrets.token_hex(8), "job": ""})
    except BaseException:
        if new and not run.config_file.exists():
            run.discard()
        raise


def wait_for_sites(
    operator: Operator, deployment: Deployment, patience_s: float, needed: int, server_s: float = 0.0
) -> list[str]:
    """The connected sites: all of them, or at least ``needed`` when patience ends, which may be longer for a server."""
    started = time.monotonic()
    while True:
        there = operator.connected()
        known = [name for name in deployment.sites if name in (there or [])]
        waited = time.monotonic() - started
        if len(known) == len(deployment.sites) or (waited > patience_s and len(known) >= needed):
            return known
        if waited > (max(patience_s, server_s) if there is None else patience_s):
            break
        time.sleep(POLL_S)
    if there is None:
        raise SplitcastError(
            f"server: nobody answers at {deployment.server.host}:{deployment.server.port}; "
            f"start it with: splitcast deploy start --folder {operator.folder} --only server"
        )
    missing = ", ".join(name for name in deployment.sites if name not in known)
    raise SplitcastError(
        f"{missing}: not connected, and {needed} of {len(deployment.sites)} sites are needed; "
        "start them there with: splitcast deploy start --only NAME, or lower min_sites"
    )


def run_going_on(folder: Path) -> dict[str, Any] | None:
    """The last run of a deployment, where it stands and how long it will take, if a job is at it on this machine."""
    try:
        run = RunFolder(Path(text(parsed(read_bounded(folder / LAST_RUN, LINE_BYTES))["folder"])))
        if run.summary_file.is_file() or writer(run.path) is None:
            return None
        job, rounds, records = _known(run)["job"], run.config().train.rounds, run.rounds()
    except (SplitcastError, OSError, ValueError, TypeError, KeyError):
        return None
    lately = [sum(record.wall_s.values()) for record in records[-PACE:] if record.wall_s]
    pace = sum(lately) / len(lately) if lately else None
    left = None if pace is None else pace * (rounds - len(records))
    about = {"folder": str(run.path), "job": job, "round": len(records), "rounds": rounds}
    return about | {"round_s": pace, "left_s": left}


def _submitted(operator: Operator, deployment: Deployment, config: Config, run: RunFolder) -> str:
    """Submit the run, after ending whatever job of it may still be there."""
    known = _known(run)
    operator.end(known["job"])
    (run.path / TROUBLE).unlink(missing_ok=True)
    trainer = _trainer(deployment, config, run) | {"run": known["run"]}
    job = operator.submit(trainer, min_sites=max(1, deployment.limits.min_sites))
    _write(run, known | {"job": job})
    return job


def _known(run: RunFolder) -> dict[str, str]:
    """What `_write` wrote."""
    file = run.path / RUN_FILE
    try:
        found = parsed(read_bounded(file, LINE_BYTES))
        if not isinstance(found, dict) or set(found) != {"run", "job"} or not RUN_NAME.fullmatch(text(found["run"])):
            raise ValueError
        return {"run": found["run"], "job": text(found["job"])}
    except ValueError:
        raise SplitcastError(f"resume: {file} is damaged; put back what it was, or start another run") from None


def _write(run: RunFolder, known: dict[str, str]) -> None:
    write_atomically(run.path / RUN_FILE, json.dumps(known).encode())


def _trainer(deployment: Deployment, config: Config, run: RunFolder) -> dict[str, Any]:
    """The arguments of `deploy.job.Trainer`."""
    limits = asdict(deployment.engine_limits()) | {"call_timeout_s": deployment.limits.call_timeout_s}
    return {
        "config": to_toml(config),
        "folder": str(run.path.resolve()),
        "sites": list(deployment.sites),
        "limits": limits,
        "to_start": deployment.to_start,
        "message_bytes": deployment.limits.message_bytes,
    }


def _follow(operator: Operator, job: str, watch: "_Watch") -> str:
    """Show the job's rounds until it ends; returns how it ended.

    A server that was killed and started again still calls the job running: it is another server all the same.
    """
    born, asked, lost = "", 0.0, 0
    while True:
        watch.look()
        if watch.run.summary_file.is_file():
            return "finished"
        if (watch.run.path / TROUBLE).is_file():
            return "the job gave up"
        if time.monotonic() - asked > ASK_S:
            asked = time.monotonic()
            seen = operator.look(job)
            lost = lost + 1 if seen is None else 0
            if seen is not None:
                status, since = seen
                born = born or since
                if status.startswith("FINISHED"):
                    watch.look()
                    return f"the job ended ({status.removeprefix('FINISHED:').lower()})"
                if since != born:
                    return "the server was lost and came back"
            if lost == 2:
                return "the server was lost"
        time.sleep(POLL_S)


class _Watch:
    """Reports every round of a run folder once, also when some are run again after a loss."""

    def __init__(self, run: RunFolder, on_round: Callable[[RoundRecord], None]) -> None:
        self.run, self.on_round, self.seen = run, on_round, 0
        self.reader = RoundsReader(run.path)

    def look(self) -> None:
        for record in self.reader.new():
            if record.round > self.seen:
                self.seen = record.round
                self.on_round(record)


def _trouble(run: RunFolder) -> dict[str, Any] | None:
    file = run.path / TROUBLE
    if not file.is_file():
        return None
    try:
        found = parsed(read_bounded(file, LINE_BYTES))
        if not isinstance(found, dict) or set(found) != {"what", "again"} or type(found["again"]) is not bool:
            raise ValueError
        return {"what": " ".join(text(found["what"]).split()), "again": found["again"]}
    except ValueError:
        raise SplitcastError(f"run: {file} is damaged; delete it and resume the run") from None
