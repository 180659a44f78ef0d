"""What runs inside FLARE for `splitcast bench flare`."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from splitcast.config import Config, from_toml, with_values
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
        """Measure every model in ``test``, a list of arch:batch."""
        models, self.test = self.test.split(), ""
        found = {}
        for model in models:
            arch, batch = model.split(":")
            found[model] = self.measure(with_values(from_toml(self.config), arch=arch, batch=int(batch)))
        write_atomically(Path(self.folder) / "measured.json", json.dumps(found).encode())

    def measure(self, config: Config) -> dict[str, float]:
        """Medians of one model."""
        federation = self.federation(config)
        federation.start()
        line, everyone = federation.roster.line, sorted(federation.roster.present)
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
