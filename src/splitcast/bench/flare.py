"""What a real round costs: two sites on loopback with mTLS, 400 KB of smashed data each (PSL, paper CNN, cut 1).

A round is two calls, one that brings 400 KB up and one that brings 400 KB down, with the arithmetic in between. It is
compared with two bare echo calls of 400 KB, and with two bare calls that move the same bytes as the round, all in one
job and taking turns. Payload on the wire comes from the counters of the loopback interface: every message crosses it
twice, from the site to FLARE's server process and from there to the job's process, or the other way.
"""

import json
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from splitcast.bench.rows import Row
from splitcast.config import Config, to_toml, with_values
from splitcast.deploy.console import Operator
from splitcast.deploy.kits import deployment_in, make_kits
from splitcast.deploy.processes import start, stop
from splitcast.deploy.supervise import wait_for_sites
from splitcast.engine.roster import Limits
from splitcast.errors import SplitcastError

SITES = ("site-1", "site-2")
BATCH = 16
"""401,408 bytes of fp32 smashed data at cut 1"""
HOPS = 2
PATIENCE_S = 300.0


def flare(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench flare`."""
    with tempfile.TemporaryDirectory() as temporary:
        seen = _measured(Path(temporary), repeats)
    return [
        Row("flare.psl.n2_b16.round", 1e3 * seen["round"], "ms"),
        Row("flare.two_echo_calls", 1e3 * seen["echoes"], "ms"),
        Row("flare.psl.n2_b16.round_per_two_echo_calls", seen["round"] / seen["echoes"], "x"),
        Row("flare.psl.n2_b16.round_per_calls_of_same_traffic", seen["round"] / seen["bare"], "x"),
        Row("flare.psl.n2_b16.ledger", seen["ledger"] / 1e6, "MB"),
        Row("flare.psl.n2_b16.loopback_per_hop_and_ledger", seen["sent"] / HOPS / seen["ledger"], "x"),
    ]


def _measured(here: Path, repeats: int) -> dict[str, float]:
    folder, file = here / "kits", here / "deployment.toml"
    sites = "".join(f'[sites.{name}]\ndata = "part:{n}"\n' for n, name in enumerate(SITES))
    file.write_text(f"[server]\nport = {_free_port()}\n{sites}", encoding="utf-8")
    make_kits(file, folder, ["splitcast.bench.flare_job."])
    config = with_values(Config(), scheme="psl", clients=len(SITES), batch=BATCH, rounds=3 + 5 * repeats)
    trainer = {"config": to_toml(config), "run": "bench", "folder": str(here), "sites": list(SITES), "test": ""}
    trainer["limits"] = asdict(Limits()) | {"call_timeout_s": 60.0}
    job = "splitcast.bench.flare_job"
    try:
        start(folder)
        with Operator(folder) as operator:
            wait_for_sites(operator, deployment_in(folder), PATIENCE_S, len(SITES))
            operator.submit(trainer, server=f"{job}.EchoTrainer", client=f"{job}.EchoClient")
        return _awaited(here / "measured.json")
    finally:
        stop(folder)


def _awaited(file: Path) -> dict[str, float]:
    deadline = time.monotonic() + PATIENCE_S
    while not file.is_file():
        if time.monotonic() > deadline:
            raise SplitcastError(f"bench: nothing was measured after {PATIENCE_S:g} s")
        time.sleep(0.2)
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
