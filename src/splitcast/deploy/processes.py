"""Start and stop what runs on this machine: one watchdog per kit."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from splitcast.base.errors import SplitcastError
from splitcast.deploy import watchdog
from splitcast.deploy.kits import deployment_in, kit
from splitcast.deploy.watchdog import LOG, PID_FILE

WATCHDOG = Path(watchdog.__file__)
START_S = 120.0
"""How long the server may take to listen."""
STOP_S = 60.0
"""How long a watchdog may take to end all it keeps."""


def running(path: Path) -> int | None:
    """The watchdog of a kit, if it lives."""
    try:
        pid = int((path / PID_FILE).read_text())
        if str(WATCHDOG) in psutil.Process(pid).cmdline():
            return pid
    except (OSError, ValueError, psutil.Error):
        pass
    return None


def refuse_running(folder: Path) -> None:
    """Refuse to change kits that are in use on this machine."""
    alive = [name for name in ("server", *deployment_in(folder).sites) if running(folder / name) is not None]
    if alive:
        raise SplitcastError(
            f"{', '.join(alive)}: running on this machine; stop first with: splitcast deploy stop --folder {folder}"
        )


def start(folder: Path, only: Sequence[str] = ()) -> list[str]:
    """Start the server and the sites, or ``only`` some of them; returns who was started."""
    deployment = deployment_in(folder)
    everybody = ["server", *deployment.sites]
    for name in only:
        if name not in everybody:
            raise SplitcastError(f"only: unknown {name!r}; choose from {', '.join(everybody)}")
    kits = [kit(folder, name) for name in only or everybody]
    new = [path for path in kits if running(path) is None]
    if any(path.name == "server" for path in new):
        _refuse_busy_port(deployment.server.host, deployment.server.port)
    try:
        for path in new:
            _spawn(path, threads=max(1, (os.cpu_count() or 1) // len(kits)))
        if any(path.name == "server" for path in new):
            _wait_for_server(folder / "server", deployment.server.host, deployment.server.port)
    except BaseException:
        stop(folder, [path.name for path in new])
        raise
    return [path.name for path in new]


def stop(folder: Path, only: Sequence[str] = ()) -> list[str]:
    """End watchdogs and all they keep; returns whose were ended."""
    names = list(only) or ["server", *deployment_in(folder).sites]
    pids = {name: pid for name in reversed(names) if (pid := running(folder / name)) is not None}
    processes = []
    for pid in pids.values():
        try:
            processes.append(psutil.Process(pid))
            os.kill(pid, signal.SIGTERM)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    _, stubborn = psutil.wait_procs(processes, timeout=STOP_S)
    for process in stubborn:
        members = [*process.children(recursive=True), process]
        for member in members:
            member.kill()
        psutil.wait_procs(members, timeout=STOP_S)
    return list(pids)


def _spawn(path: Path, threads: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", str(WATCHDOG), str(path.resolve())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # those who share a machine share its cores, unless the user says otherwise
        env={"OMP_NUM_THREADS": str(threads), **os.environ},
    )
    (path / PID_FILE).write_text(f"{process.pid}\n")  # before anything can go wrong, so that `stop` finds it


def _refuse_busy_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if host == "localhost" else "", port))
        except OSError as error:
            raise SplitcastError(
                f"server: port {port} is in use on this machine ({error.strerror}); "
                "end what uses it, or change port in the deployment file and init a new folder"
            ) from None


def _wait_for_server(path: Path, host: str, port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1" if host == "localhost" else host, port)) == 0:
                return
        time.sleep(0.1)
    raise SplitcastError(f"server: does not listen on {host}:{port} after {START_S:g} s; see {path / LOG}")
