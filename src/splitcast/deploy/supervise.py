"""Submit a run as a FLARE job, watch its folder, and submit it again from the last checkpoint whenever it dies.

The supervisor runs on the server's machine: the run folder is written there by the job itself, so its rounds are what
has really happened, and a supervisor that is stopped loses nothing (`splitcast deploy run --resume FOLDER`).
"""

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from splitcast.config import Config, to_toml
from splitcast.deploy.job import TROUBLE
from splitcast.deploy.keeper import LOG
from splitcast.deploy.kits import OPERATOR, deployment_in, kit
from splitcast.deploy.settings import Deployment
from splitcast.engine.federation import refuse_what_cannot_travel
from splitcast.errors import SplitcastError
from splitcast.records import RoundRecord, RunFolder, write_atomically

RUN_FILE = "deployment.json"
"""In the run folder: the name under which sites keep their halves."""
SITES_S = 60.0
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
    kit(folder, "operator")
    run = RunFolder(out)
    sites = _wait_for_sites(folder, deployment, SITES_S, deployment.to_start)
    if not resume:
        run.create(config)
        write_atomically(out / RUN_FILE, json.dumps({"run": secrets.token_hex(8)}).encode())
    watch = _Watch(run, on_round)
    fruitless = 0
    while True:
        before = _checkpointed(run)
        (out / TROUBLE).unlink(missing_ok=True)
        job = _submit(folder, deployment, config, run)
        note(f"job {job} submitted to {', '.join(sites)}")
        ended = _follow(folder, job, watch)
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
            log = folder / "server" / LOG
            raise SplitcastError(f"run: {FRUITLESS} jobs in a row ended without a checkpoint ({reason}); see {log}")
        note(f"{reason}; submitting again from round {_checkpointed(run)}")
        sites = _wait_for_sites(folder, deployment, RETURN_S, max(1, deployment.limits.min_sites))


@contextmanager
def session(folder: Path) -> Iterator[Any]:
    """A connection to the server as its operator."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    with redirect_stdout(StringIO()):
        opened = new_secure_session(OPERATOR, str(kit(folder, "operator")), timeout=5.0)
    try:
        yield opened
    finally:
        with redirect_stdout(StringIO()):
            opened.close()


def connected(folder: Path) -> list[str] | None:
    """Sites that are connected to the server; None if there is no server."""
    try:
        with session(folder) as opened:
            return sorted(client.name for client in opened.get_system_info().client_info)
    except Exception:  # FLARE raises many kinds for a server that is not there
        return None


def _wait_for_sites(folder: Path, deployment: Deployment, patience_s: float, needed: int) -> list[str]:
    """The connected sites: all of them, or at least ``needed`` when patience ends."""
    started, there = time.monotonic(), connected(folder)
    while True:
        known = [name for name in deployment.sites if name in (there or [])]
        waited = time.monotonic() - started
        if len(known) == len(deployment.sites) or (waited > patience_s and len(known) >= needed):
            return known
        if waited > (SERVER_S if there is None and needed < len(deployment.sites) else patience_s):
            break
        time.sleep(POLL_S)
        there = connected(folder)
    if there is None:
        raise SplitcastError(
            f"server: nobody answers at {deployment.server.host}:{deployment.server.port}; "
            f"start it with: splitcast deploy start --folder {folder} --only server"
        )
    missing = ", ".join(name for name in deployment.sites if name not in known)
    raise SplitcastError(
        f"{missing}: not connected, and {needed} of {len(deployment.sites)} sites are needed; "
        "start them there with: splitcast deploy start --only NAME, or lower min_sites"
    )


def _submit(folder: Path, deployment: Deployment, config: Config, run: RunFolder) -> str:
    limits = asdict(deployment.limits.limits()) | {"call_timeout_s": deployment.limits.call_timeout_s}
    trainer = {
        "config": to_toml(config),
        "run": json.loads((run.path / RUN_FILE).read_text(encoding="utf-8"))["run"],
        "folder": str(run.path.resolve()),
        "sites": list(deployment.sites),
        "limits": limits,
        "test": deployment.server.test,
    }
    return submit(folder, trainer, min_sites=max(1, deployment.limits.min_sites))


def submit(
    folder: Path,
    trainer: dict[str, Any],
    *,
    min_sites: int = 1,
    server: str = "splitcast.deploy.job.Trainer",
    client: str = "splitcast.deploy.job.Client",
) -> str:
    """Submit a job with this server object, made from the arguments ``trainer``, and these clients.

    A job is three small JSON files: no code travels.
    """
    runtime = "nvflare.collab.runtime"
    controller = {"id": "controller", "path": f"{runtime}.controller.CollabController", "args": {"server_obj_id": "it"}}
    executor = {"id": "executor", "path": f"{runtime}.executor.CollabExecutor", "args": {"client_obj_id": "it"}}
    everywhere = {"app": ["@ALL"]}
    files = {
        "meta.json": {
            "name": "splitcast",
            "resource_spec": {},
            "min_clients": min_sites,
            "deploy_map": everywhere,
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [controller],
            "components": [{"id": "it", "path": server, "args": trainer}],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "it", "path": client, "args": {}}],
        },
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name, content in files.items():
            file = Path(temporary) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content), encoding="utf-8")
        with session(folder) as opened:
            return str(opened.submit_job(temporary))


def _follow(folder: Path, job: str, watch: "_Watch") -> str:
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
            seen = _look(folder, job)
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


def _look(folder: Path, job: str) -> tuple[str, str] | None:
    """FLARE's word for the state of a job, and since when the server runs; None without a server."""
    try:
        with session(folder) as opened:
            return str(opened.get_job_status(job)), str(opened.get_system_info().server_info.start_time)
    except Exception:  # FLARE raises many kinds for a server that is not there
        return None


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
