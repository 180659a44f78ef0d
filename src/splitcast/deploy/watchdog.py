"""Keeps one kit's FLARE process alive: `python watchdog.py KIT`; run as a file, so that nothing heavy is imported.

When the process dies, whatever it started is ended too, and it is started again: a job that lost its server must not
go on writing. SIGTERM ends all of it. What FLARE prints goes to KIT/flare.log.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

ORG = "splitcast"
"""The organisation in every certificate."""
PID_FILE = "watchdog.pid"
"""Written by whoever starts a watchdog, removed by the watchdog when it ends."""
LOG = "flare.log"
POLL_S = 0.5
RESTART_S = 1.0


def command(kit: Path) -> list[str]:
    """FLARE's server or client for a kit."""
    if (kit / "startup" / "fed_server.json").is_file():
        program, settings, who = "server.server_train", "fed_server.json", []
    else:
        program, settings, who = "client.client_train", "fed_client.json", [f"uid={kit.name}"]
    given = ["--set", "secure_train=true", *who, f"org={ORG}", "config_folder=config"]
    return [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{program}", "-m", str(kit), "-s", settings, *given]


class Family:
    """A process and everything it started, remembered while they live."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.members: set[psutil.Process] = set()
        self.look()

    def look(self) -> None:
        """Remember who is there now."""
        try:
            parent = psutil.Process(self.process.pid)
            self.members |= {parent, *parent.children(recursive=True)}
        except psutil.NoSuchProcess:
            pass

    def end(self) -> None:
        """Nobody is left when this returns."""
        self.look()
        alive = [member for member in self.members if member.is_running()]
        for member in alive:
            _quietly(member.terminate)
        _, alive = psutil.wait_procs(alive, timeout=3)
        for member in alive:
            _quietly(member.kill)
        psutil.wait_procs(alive, timeout=60)
        self.process.wait()


def _quietly(act: Callable[[], object]) -> None:
    with suppress(psutil.NoSuchProcess):
        act()


def watch(kit: Path) -> None:
    """Start, watch, start again."""
    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    os.umask(0o077)
    try:
        while not stopping:
            with (kit / LOG).open("ab") as log:
                family = Family(subprocess.Popen(command(kit), stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            while not stopping and family.process.poll() is None:
                family.look()
                time.sleep(POLL_S)
            family.end()
            if not stopping:
                time.sleep(RESTART_S)
    finally:
        (kit / PID_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    watch(Path(sys.argv[1]).resolve())
