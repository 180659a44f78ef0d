"""`splitcast watch`: the report page while runs go on."""

import secrets
import time
from pathlib import Path
from typing import Any

from splitcast.base.errors import SplitcastError
from splitcast.cli.options import WatchOptions
from splitcast.studies.watch import Live, Sites, serve


def run_watch(options: WatchOptions) -> None:
    """Serve until interrupted."""
    if not options.runs:
        raise SplitcastError("runs: none given; name a run folder, or a folder of run folders")
    for path in options.runs:
        if not path.is_dir():
            raise SplitcastError(f"run: {path} is not a folder")
    elsewhere = options.host not in ("localhost", "127.0.0.1", "::1")
    token = secrets.token_urlsafe(24) if elsewhere else ""
    live = Live(options.runs, trust=options.trust, sites=sites_of(options.folder) if options.folder else None)
    server, where = serve(live, options.host, options.port, token)
    print(f"watching at {where} (Ctrl-C ends it, and nothing else)", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        server.shutdown()


def sites_of(folder: Path, every_s: float = 3.0) -> Sites:
    """The parties of a deployment, asked for now and then."""
    from splitcast.deploy.console import Operator
    from splitcast.deploy.kits import days_left, deployment_in
    from splitcast.deploy.processes import running
    from splitcast.deploy.watchdog import PID_FILE

    names, operator = ["server", *deployment_in(folder).sites], Operator(folder)
    known: list[dict[str, Any]] = []
    asked = 0.0

    def is_there(name: str, connected: list[str] | None) -> bool:
        """As the server says; of those that were started here, their death is known at once."""
        dead = (folder / name / PID_FILE).exists() and running(folder / name) is None
        return connected is not None and not dead and (name == "server" or name in connected)

    def ask() -> list[dict[str, Any]]:
        nonlocal known, asked
        if time.monotonic() - asked > every_s:
            there = operator.connected()
            asked = time.monotonic()
            known = [
                {
                    "name": name,
                    "connected": is_there(name, there),
                    "days": None if (days := days_left(folder / name)) is None else int(days),
                }
                for name in names
            ]
        return known

    return ask
