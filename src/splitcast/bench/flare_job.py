"""What runs inside FLARE for `splitcast bench flare`."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from splitcast.config import from_toml
from splitcast.deploy.job import Client, Trainer
from splitcast.records import write_atomically
from splitcast.schemes.messages import Ledger


class EchoClient(Client):
    """A site that also answers bare calls."""

    @collab.publish  # type: ignore[untyped-decorator]
    def echo(self, data: bytes) -> dict[str, Any]:
        """Send everything back."""
        return {"data": data}

    @collab.publish  # type: ignore[untyped-decorator]
    def sink(self, data: bytes) -> dict[str, Any]:
        """Send nothing back."""
        return {}

    @collab.publish  # type: ignore[untyped-decorator]
    def source(self, size: int) -> dict[str, Any]:
        """Send so many bytes."""
        return {"data": bytes(size)}


class EchoTrainer(Trainer):
    """Rounds and bare calls of the same size take turns; medians go to a file."""

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """Measure."""
        federation = self.federation(from_toml(self.config))
        federation.start()
        line, everyone = federation.roster.line, sorted(federation.roster.present)
        rounds = from_toml(self.config).train.rounds
        rows: dict[str, list[float]] = {key: [] for key in ("round", "echoes", "bare", "sent", "ledger")}
        for t in range(1, rounds + 1):
            ledger = Ledger()
            before, started = loopback_bytes(), time.perf_counter()
            federation.round(t, ledger)
            rows["round"].append(time.perf_counter() - started)
            rows["sent"].append(loopback_bytes() - before)
            rows["ledger"].append(ledger.total())
            blob = os.urandom(ledger.total("down") // len(everyone))
            started = time.perf_counter()
            for _ in range(2):
                line.call("echo", {n: {"data": blob} for n in everyone})
            rows["echoes"].append(time.perf_counter() - started)
            started = time.perf_counter()
            line.call("source", {n: {"size": len(blob)} for n in everyone})
            line.call("sink", {n: {"data": blob} for n in everyone})
            rows["bare"].append(time.perf_counter() - started)
        warm = {key: statistics.median(values[3:]) for key, values in rows.items()}
        write_atomically(Path(self.folder) / "measured.json", json.dumps(warm).encode())


def loopback_bytes() -> int:
    """Bytes the loopback interface has sent so far."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0
