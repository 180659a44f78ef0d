"""What a real round costs: two sites on loopback with mTLS, 400 KB of smashed data each (PSL, cut 1), by two models.

`cnn-small` computes little, so that its round is mostly transport; the paper's `cnn` computes for about 70 ms of CPU.

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
from typing import Any

from splitcast.base.config import Config, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.bench.rows import Row, tell
from splitcast.deploy.console import Operator
from splitcast.deploy.kits import deployment_in, make_kits
from splitcast.deploy.processes import start, stop
from splitcast.deploy.supervise import wait_for_sites
from splitcast.remote.sites import PARTS, Limits

SITES = ("site-1", "site-2")
MODELS = "cnn-small:128 cnn:16"
"""arch:batch; both have 401,408 bytes of fp32 smashed data at cut 1"""
HOPS = 2
PATIENCE_S = 300.0


def flare(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench flare`."""
    with tempfile.TemporaryDirectory() as temporary:
        seen = _measured(Path(temporary), repeats)
    rows = []
    for model, medians in seen.items():
        case = f"flare.{model.replace(':', '.n2_b')}"
        round_, ledger = medians["round"], medians["ledger"]
        rows += [
            Row(f"{case}.round", 1e3 * round_, "ms"),
            *(Row(f"{case}.round.{part}", 1e3 * medians[part], "ms") for part in PARTS),
            Row(f"{case}.two_echo_calls", 1e3 * medians["echoes"], "ms"),
            Row(f"{case}.round_per_two_echo_calls", round_ / medians["echoes"], "x"),
            Row(f"{case}.round_per_calls_of_same_traffic", round_ / medians["bare"], "x"),
            Row(f"{case}.ledger", ledger / 1e6, "MB"),
            Row(f"{case}.loopback_per_hop_and_ledger", medians["sent"] / HOPS / ledger, "x"),
        ]
    return rows


def _measured(here: Path, repeats: int) -> dict[str, dict[str, float]]:
    folder, file = here / "kits", here / "deployment.toml"
    sites = "".join(f'[sites.{name}]\ndata = "part:{n}"\n' for n, name in enumerate(SITES))
    file.write_text(f"[server]\nport = {_free_port()}\n{sites}", encoding="utf-8")
    job = "splitcast.bench.flare_job"
    server, client = f"{job}.EchoTrainer", f"{job}.EchoClient"
    make_kits(file, folder, [server, client])
    config = with_values(Config(), scheme="psl", clients=len(SITES), rounds=3 + 5 * repeats)
    limits = asdict(Limits()) | {"call_timeout_s": 60.0}
    trainer: dict[str, Any] = {"config": to_toml(config), "run": "bench", "folder": str(here), "sites": list(SITES)}
    try:
        start(folder)
        with Operator(folder) as operator:
            wait_for_sites(operator, deployment_in(folder), PATIENCE_S, len(SITES))
            operator.submit(trainer | {"limits": limits, "models": MODELS}, server=server, client=client)
        return _awaited(here / "measured.json")
    finally:
        stop(folder)


def _awaited(file: Path) -> dict[str, dict[str, float]]:
    started = time.monotonic()
    while not file.is_file():
        waited = time.monotonic() - started
        tell("seconds, at most", int(waited), int(PATIENCE_S))
        if waited > PATIENCE_S:
            raise SplitcastError(f"bench: nothing was measured after {PATIENCE_S:g} s")
        time.sleep(0.2)
    found: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
