"""The operator's line to the server: who is connected, submit a job, what became of it.

Logging in takes a second and leaves threads behind, so that one session is kept until it fails.
"""

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from splitcast.base.errors import SplitcastError
from splitcast.deploy.kits import OPERATOR, SERVER_CLASSES, SITE_CLASSES, kit

T = TypeVar("T")
LOGIN_S = 10.0
ABORT_S = 60.0


class Operator:
    """A session with the server, opened when needed and again after it failed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kit = folder, kit(folder, "operator")
        self.session: Any = None

    def __enter__(self) -> "Operator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Log out."""
        if self.session is not None:
            with suppress(Exception), redirect_stdout(StringIO()):
                self.session.close()
            self.session = None

    def ask(self, question: Callable[[Any], T]) -> T | None:
        """The answer of a session; None if there is no server, or another one than before."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        try:
            with redirect_stdout(StringIO()):
                if self.session is None:
                    self.session = new_secure_session(OPERATOR, str(self.kit), timeout=LOGIN_S)
                return question(self.session)
        except Exception:  # FLARE raises many kinds for a server that is not there
            self.close()
            return None

    def connected(self) -> list[str] | None:
        """Sites that are connected to the server; None if there is no server."""
        return self.ask(lambda session: sorted(client.name for client in session.get_system_info().client_info))

    def look(self, job: str) -> tuple[str, str] | None:
        """FLARE's word for the state of a job, and since when the server runs; None without a server."""
        return self.ask(
            lambda session: (
                str(session.get_job_status(job)),
                str(session.get_system_info().server_info.start_time),
            )
        )

    def end(self, job: str) -> None:
        """Abort a job unless it has ended, and wait for that a little: two jobs must not write one run folder.

        A server that was started again calls the jobs of the one before running for ever, and has none to abort.
        """
        if not job:
            return
        deadline = time.monotonic() + ABORT_S
        there = None
        while (seen := self.look(job)) and not seen[0].startswith("FINISHED") and time.monotonic() < deadline:
            if there is None:
                there = self.ask(lambda session: _abort(session, job))
            if there is False:
                return
            time.sleep(0.5)

    def submit(
        self,
        trainer: dict[str, Any],
        *,
        min_sites: int = 1,
        server: str = SERVER_CLASSES[0],
        client: str = SITE_CLASSES[0],
    ) -> str:
        """Submit a job with this server object, made from the arguments ``trainer``, and these clients.

        A job is three small JSON files: no code travels. It goes to the sites of the run and to nobody else.
        """
        controller = {"path": SERVER_CLASSES[1], "args": {"server_obj_id": "it"}}
        executor = {"path": SITE_CLASSES[1], "args": {"client_obj_id": "it"}}
        everybody = ["server", *trainer["sites"]]
        meta = {"name": "splitcast", "resource_spec": {}, "min_clients": min_sites, "deploy_map": {"app": everybody}}
        files = {
            "meta.json": meta,
            "app/config/config_fed_server.json": {
                "format_version": 2,
                "workflows": [{"id": "controller", **controller}],
                "components": [{"id": "it", "path": server, "args": trainer}],
            },
            "app/config/config_fed_client.json": {
                "format_version": 2,
                "executors": [{"tasks": ["*"], "executor": {"id": "executor", **executor}}],
                "components": [{"id": "it", "path": client, "args": {}}],
            },
        }
        with tempfile.TemporaryDirectory() as temporary:
            for name, content in files.items():
                file = Path(temporary) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(content), encoding="utf-8")
            job = self.ask(lambda session: session.submit_job(temporary))
        if job is None:
            raise SplitcastError("server: did not take the job; try again with --resume")
        return str(job)


def _abort(session: Any, job: str) -> bool:
    """Whether there was something to abort."""
    try:
        session.abort_job(job)
    except Exception as error:
        if "is not running" in str(error):
            return False
        raise
    return True
