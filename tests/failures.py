"""What five failures cost a real training: `python tests/failures.py --help`.

Server, site-1 and site-2 are in one network namespace, site-3 in another, with a cable between them, and mutual TLS on
it. Where nobody may make namespaces, all is on loopback and the cable is not cut. `test_deploy_failures.py` is the
short form.
"""

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from splitcast.base.config import Config, to_toml, with_values
from splitcast.deploy.kits import make_kits
from splitcast.deploy.processes import stop
from splitcast.run.records import RoundRecord, RoundsReader, RunFolder
from splitcast.run.verify import verify
from waiting import PATIENCE_S

SITES = ("site-1", "site-2", "site-3")
VICTIM = SITES[-1]
CONFIG = with_values(Config(), batch=8, arch="cnn-small", scheme="sfl-ga", checkpoint_every=10)
LIMITS = "call_timeout_s = 5\ndrop_after = 3"
CONNECTED = """
import sys
from pathlib import Path
from splitcast.deploy.console import Operator
from splitcast.deploy.settings import load_deployment
from splitcast.deploy.supervise import wait_for_sites
folder, patience_s = Path(sys.argv[1]), float(sys.argv[2])
with Operator(folder) as operator:
    there = load_deployment(folder / "deployment.toml")
    wait_for_sites(operator, there, patience_s, len(there.sites))
"""
"""Ends when all sites are connected."""


@dataclass(frozen=True)
class Networks:
    """Two namespaces: one for the server and most sites, one for the victim."""

    hub: str
    far: str

    def plug(self, *, out: bool) -> None:
        """Pull the victim's cable, or put it back."""
        _ip("-n", self.far, "link", "set", "cable", "down" if out else "up")


def free_port() -> int:
    """A port that nobody listens on, below those that connections are given by themselves."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def networks() -> Iterator[Networks | None]:
    """Two namespaces and a cable; none, and a line that says so, where this user may not make them."""
    made = Networks(*(f"splitcast-{os.getpid()}-{end}" for end in ("hub", "far")))
    homes = [Path("/etc/netns") / name for name in (made.hub, made.far)]
    try:
        try:
            for name in (made.hub, made.far):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", made.hub, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", made.far)
            for end, name in enumerate((made.hub, made.far), 1):
                _ip("-n", name, "address", "add", f"10.77.0.{end}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
            for home in homes:
                home.mkdir(parents=True)
                (home / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 hub\n")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            print(f"no network namespaces, so no cable is cut: {str(said).strip()}", file=sys.stderr)
            yield None
        else:
            yield made
    finally:
        for name, home in zip((made.hub, made.far), homes, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(home, ignore_errors=True)


class Lab:
    """A running deployment in a folder; the last of its sites is the victim."""

    def __init__(self, root: Path, nets: Networks | None, limits: str, sites: Sequence[str]) -> None:
        self.root, self.nets, self.folder, self.sites = root, nets, root / "kits", sites
        host = "hub" if nets else "localhost"
        lines = ["[server]", f'host = "{host}"', f"port = {free_port()}", "[limits]", limits]
        for n, name in enumerate(sites):
            lines += [f"[sites.{name}]", f'data = "part:{n}"']
        (root / "deployment.toml").write_text("\n".join([*lines, ""]))
        make_kits(root / "deployment.toml", self.folder)

    def python(self, *words: object, who: str = "server") -> list[str]:
        """Python in the network of a party."""
        inside = []
        if self.nets:
            inside = ["ip", "netns", "exec", self.nets.far if who == VICTIM else self.nets.hub]
        return [*inside, sys.executable, *map(str, words)]

    def command(self, *words: object, who: str = "server") -> list[str]:
        """`splitcast deploy`, in the network of a party."""
        return self.python("-m", "splitcast", "deploy", *words, "--folder", self.folder, who=who)

    def start(self) -> None:
        """The server and the sites; returns when all are connected."""
        for names in (("server", *(name for name in self.sites if name != VICTIM)), (VICTIM,)):
            command = self.command("start", "--only", *names, who=names[0])
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(self.python("-c", CONNECTED, self.folder, PATIENCE_S), check=True)

    def processes(self, kit: str, *programs: str) -> list[psutil.Process]:
        """Processes of FLARE that belong to a kit."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(self.folder / kit) in words and any(name in word for word in words for name in programs):
                found.append(process)
        return found

    def signal(self, number: int, kit: str, *programs: str) -> None:
        """To every one of them, and there must be at least one of each kind."""
        for name in programs:
            members = self.processes(kit, name)
            assert members, f"{kit} has no {name}"
            for process in members:
                process.send_signal(number)


@contextmanager
def laboratory(root: Path, limits: str = LIMITS, sites: Sequence[str] = SITES) -> Iterator[Lab]:
    """A lab that runs, and of which nothing is left afterwards."""
    with networks() as nets:
        lab = Lab(root, nets, limits, sites)
        try:
            lab.start()
            yield lab
        finally:
            stop(lab.folder)  # in whatever network they are


SITE = ("client_train", "worker_process")
Fail = Callable[[Lab], None]
FAILURES: dict[str, tuple[Fail, Fail | None]] = {
    "process of a site's job killed": (lambda lab: lab.signal(signal.SIGKILL, VICTIM, "worker_process"), None),
    "site killed": (lambda lab: lab.signal(signal.SIGKILL, VICTIM, *SITE), None),
    "server killed": (lambda lab: lab.signal(signal.SIGKILL, "server", "server_train"), None),
    "site stopped": (
        lambda lab: lab.signal(signal.SIGSTOP, VICTIM, *SITE),
        lambda lab: lab.signal(signal.SIGCONT, VICTIM, *SITE),
    ),
    "network cut": (lambda lab: lab.nets.plug(out=True), lambda lab: lab.nets.plug(out=False)),
}
"""What is done, and, for what does not end by itself, how it is undone."""
LASTS_S = {"site stopped": 40.0, "network cut": 30.0}


@dataclass
class Trial:
    """One training in which something fails."""

    failure: str
    rounds: int
    sites: int
    began: float = 0.0
    """when it failed, on the clock of `seen`"""
    ended: float = 0.0
    """when that was over"""
    seen: list[tuple[float, RoundRecord]] = field(default_factory=list)
    """every round, when it was seen first or again"""
    records: list[RoundRecord] = field(default_factory=list)
    """what is in the folder at the end"""
    faults: list[str] = field(default_factory=list)
    """what `verify` says of it"""

    @property
    def after(self) -> list[tuple[float, RoundRecord]]:
        return [(at, record) for at, record in self.seen if at > self.began]

    @property
    def standstill(self) -> tuple[float, float]:
        """The longest time after the failure without a round that is further than all before, and when it ended."""
        last, furthest, longest, until = self.began, 0, 0.0, self.began
        furthest = max((record.round for at, record in self.seen if at <= self.began), default=0)
        for at, record in self.after:
            if record.round > furthest:
                if at - last > longest:
                    longest, until = at - last, at
                last, furthest = at, record.round
        return longest, until

    @property
    def back(self) -> float | None:
        """When all sites took part again: after the failure, the first round without one, or else the standstill."""
        without = [at for at, record in self.after if record.clients < self.sites]
        since = max(self.ended, without[0] if without else self.standstill[1] - 1e-9)
        return next((at for at, record in self.after if at > since and record.clients == self.sites), None)

    @property
    def again(self) -> int:
        """Rounds that had to be run again."""
        return len(self.seen) - len({record.round for _, record in self.seen})

    def row(self) -> list[str]:
        """For the table."""
        back = "never" if self.back is None else f"{self.back - self.began:.0f} s"
        if self.back is not None and self.ended > self.began + 1:
            back += f" ({self.back - self.ended:+.0f} s)"
        whole = [record.round for record in self.records] == list(range(1, self.rounds + 1)) and not self.faults
        failed = [record for record in self.records if record.failures]
        lasted = f", {self.ended - self.began:.0f} s" if self.ended > self.began + 1 else ""
        least = sum(record.clients < self.sites for record in self.records)
        found = f"{len(self.records)} of {self.rounds}" + ("" if whole else ": DAMAGED")
        cells = [self.failure + lasted, f"{self.standstill[0]:.0f} s", back, str(self.again), found]
        return [*cells, str(least), str(len(failed))]


HEAD = ["what failed", "longest without a new round", "all sites again after (after its end)", "rounds run again"]
HELP = f"some of: {', '.join(FAILURES)}"
HEAD += ["rounds recorded", "of them without the site", "with a failure in the record"]


def trial(lab: Lab, failure: str, out: Path, rounds: int, at: int, over: Callable[[Trial], bool]) -> Trial:
    """Train, let it fail after round ``at``, undo that, if it has to be, once it is ``over``, and watch."""
    fail, undo = FAILURES[failure]
    config = out.parent / f"{out.name}.toml"
    config.write_text(to_toml(with_values(CONFIG, clients=len(lab.sites), rounds=rounds, eval_every=rounds)))
    made, reader = Trial(failure, rounds, len(lab.sites)), RoundsReader(out)
    running = subprocess.Popen(lab.command("run", config, "--out", out, "--json"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        stack.callback(lambda: (running.terminate(), running.wait()) if running.poll() is None else None)
        while running.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{failure}: not over after {PATIENCE_S:g} s")
            now = time.monotonic()
            made.seen += [(now, record) for record in (reader.new() if out.is_dir() else [])]
            if not made.began and made.seen and made.seen[-1][1].round >= at:
                fail(lab)
                made.began = made.ended = time.monotonic()
                if undo:
                    stack.callback(undo_once := _once(lambda: undo(lab)))
            if made.began and undo and made.ended == made.began and over(made):
                undo_once()
                made.ended = time.monotonic()
            time.sleep(0.05)
    assert running.returncode == 0, f"{failure}: the run ended with {running.returncode}"
    made.seen += [(time.monotonic(), record) for record in reader.new()]
    made.records, made.faults = RunFolder(out).rounds(), verify(out)
    return made


def _over(made: Trial) -> bool:
    return time.monotonic() > made.began + LASTS_S[made.failure]


def _once(act: Callable[[], None]) -> Callable[[], None]:
    waiting = [act]
    return lambda: waiting.pop()() if waiting else None


def main() -> None:
    """Every failure, or those that are asked for, and a table."""
    ask = argparse.ArgumentParser(description=main.__doc__)
    ask.add_argument("--rounds", type=int, default=200)
    ask.add_argument("--at", type=int, default=37, help="the round after which something fails")
    ask.add_argument(
        "--only", nargs="*", choices=FAILURES, default=list(FAILURES), metavar="FAILURE", help=str([*FAILURES])
    )
    options = ask.parse_args()
    rows = [HEAD, ["---"] * len(HEAD)]
    with tempfile.TemporaryDirectory(prefix="splitcast-") as temporary, laboratory(Path(temporary)) as lab:
        for number, failure in enumerate(options.only):
            if failure == "network cut" and not lab.nets:
                continue
            out = Path(temporary) / f"run-{number}"
            rows.append(trial(lab, failure, out, options.rounds, options.at, _over).row())
            print(rows[-1], file=sys.stderr, flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
