"""What runs inside FLARE for `splitcast bench flare`."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from splitcast.base.config import Config, from_toml, with_values
from splitcast.base.files import write_atomically
from splitcast.deploy.job import Client, Trainer
from splitcast.deploy.samples import server_dataset
from splitcast.remote.flare import for_the_server
from splitcast.schemes.messages import Ledger


class EchoClient(Client):
    """A site that also answers bare calls."""

    @for_the_server
    def echo(self, data: bytes) -> dict[str, Any]:
        """Send everything back."""
        return {"data": data}

    @for_the_server
    def sink(self, data: bytes) -> dict[str, Any]:
        """Send nothing back."""
        return {}

    @for_the_server
    def source(self, size: int) -> dict[str, Any]:
        """Send so many bytes."""
        return {"data": bytes(size)}


class EchoTrainer(Trainer):
    """Rounds and bare calls of the same size take turns; medians go to a file."""

    def __init__(self, models: str, **trainer: Any) -> None:
        """``models`` are arch:batch, with spaces between."""
        super().__init__(**trainer)
        self.models = models.split()

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """Measure every model."""
        self.prepare()
        found = {}
        for model in self.models:
            arch, batch = model.split(":")
            found[model] = self.measure(with_values(from_toml(self.config), arch=arch, batch=int(batch)))
        write_atomically(Path(self.folder) / "measured.json", json.dumps(found).encode())

    def measure(self, config: Config) -> dict[str, float]:
        """Medians of one model."""
        federation = self.federation(config, server_dataset("", config))
        federation.start()
        line, everyone = federation.sites.transport, sorted(federation.sites.present)
        rows: dict[str, list[float]] = {}
        for t in range(1, config.train.rounds + 1):
            ledger = Ledger()
            before, started = loopback_bytes(), time.perf_counter()
            report = federation.round(t, ledger)
            row = {"round": time.perf_counter() - started, "sent": loopback_bytes() - before, "ledger": ledger.total()}
            assert report.measured
            row |= report.measured.seconds
            blob = os.urandom(ledger.total("down") // len(everyone))
            started = time.perf_counter()
            for _ in range(2):
                line.call("echo", {n: {"data": blob} for n in everyone})
            row["echoes"] = time.perf_counter() - started
            started = time.perf_counter()
            line.call("source", {n: {"size": len(blob)} for n in everyone})
            line.call("sink", {n: {"data": blob} for n in everyone})
            row["bare"] = time.perf_counter() - started
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
        return {key: statistics.median(values[3:]) for key, values in rows.items()}


def loopback_bytes() -> int:
    """Bytes the loopback interface has sent so far."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0
