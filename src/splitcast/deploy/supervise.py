"""Submit a run as a FLARE job, watch its folder, and submit it again from the last checkpoint whenever it dies.

The supervisor runs on the server's machine: the run folder is written there by the job itself, so its rounds are what
has really happened, and a supervisor that is stopped loses nothing (`splitcast deploy run --resume FOLDER`).
"""

import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitcast.config import Config, to_toml
from splitcast.deploy.console import Operator
from splitcast.deploy.job import TROUBLE
from splitcast.deploy.keeper import LOG
from splitcast.deploy.kits import deployment_in
from splitcast.deploy.settings import Deployment
from splitcast.engine.federation import refuse_what_cannot_travel
from splitcast.errors import SplitcastError
from splitcast.records import RoundRecord, RunFolder, write_atomically

RUN_FILE = "deployment.json"
"""In the run folder: the name under which sites keep their halves, and the last job."""
SITES_S = 30.0
"""How long to wait for the sites before a run starts."""
RETURN_S = 15.0
"""How long to wait for lost sites before it goes on without them."""
SERVER_S = 120.0
"""How long to wait for a server that went away."""
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
    if resume and not (run.path / RUN_FILE).is_file():
        raise SplitcastError(f"resume: {run.path} was not run on sites; go on with: splitcast train --resume")
    to_go_on = max(1, deployment.limits.min_sites)
    wait_for_sites(operator, deployment, SITES_S, to_go_on if resume else deployment.to_start)
    if not resume:
        run.create(config)
        _write(run, {"run": secrets.token_hex(8), "job": ""})
    watch = _Watch(run, on_round)
    fruitless = 0
    while True:
        before = _checkpointed(run)
        job = _submitted(operator, deployment, config, run)
        try:
            ended = _follow(operator, job, watch)
        except BaseException:
            operator.end(job)
            raise
        if run.summary_file.is_file():
            summary = run.summary() | {"command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
            run.finish(summary)
            return summary
        trouble = _trouble(run)
        if trouble and not trouble["again"]:
            raise SplitcastError(str(trouble["what"]))
        fruitless = 0 if _checkpointed(run) != before else fruitless + 1
        reason = trouble["what"] if trouble else ended
        if fruitless == FRUITLESS:
            log = operator.folder / "server" / LOG
            raise SplitcastError(f"run: {FRUITLESS} jobs in a row ended without a checkpoint ({reason}); see {log}")
        sites = wait_for_sites(operator, deployment, RETURN_S, to_go_on, SERVER_S)
        note(f"{reason}; going on from round {_checkpointed(run)} with {', '.join(sites)}")


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


def _submitted(operator: Operator, deployment: Deployment, config: Config, run: RunFolder) -> str:
    """Submit the run, after ending whatever job of it may still be there."""
    known = json.loads((run.path / RUN_FILE).read_text(encoding="utf-8"))
    if known["job"]:
        operator.end(known["job"])
    (run.path / TROUBLE).unlink(missing_ok=True)
    trainer = _trainer(deployment, config, run) | {"run": known["run"]}
    job = operator.submit(trainer, min_sites=max(1, deployment.limits.min_sites))
    _write(run, known | {"job": job})
    return job


def _write(run: RunFolder, known: dict[str, str]) -> None:
    write_atomically(run.path / RUN_FILE, json.dumps(known).encode())


def _trainer(deployment: Deployment, config: Config, run: RunFolder) -> dict[str, Any]:
    """The arguments of `deploy.job.Trainer`."""
    limits = asdict(deployment.limits.limits()) | {"call_timeout_s": deployment.limits.call_timeout_s}
    return {
        "config": to_toml(config),
        "folder": str(run.path.resolve()),
        "sites": list(deployment.sites),
        "limits": limits,
        "test": deployment.server.test,
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

    def look(self) -> None:
        for record in self.run.rounds():
            if record.round > self.seen:
                self.seen = record.round
                self.on_round(record)


def _checkpointed(run: RunFolder) -> int:
    from safetensors import safe_open

    if not run.checkpoint_file.is_file():
        return 0
    with safe_open(run.checkpoint_file, framework="pt") as opened:
        return int((opened.metadata() or {}).get("round", 0))


def _trouble(run: RunFolder) -> dict[str, Any] | None:
    file = run.path / TROUBLE
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
