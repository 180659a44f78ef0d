"""A deployment on this machine: a server and two sites as real processes with mutual TLS. Run: python deployment.py

Needs the extra `deploy`. On real machines each kit goes to its owner, who starts it there: docs/deployment.md.
"""

import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from splitcast import Config, with_values
from splitcast.deploy.kits import make_kits
from splitcast.deploy.processes import start, stop
from splitcast.deploy.supervise import supervise


def main(rounds: int = 5) -> None:
    """Kits, processes, a training, and an end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with TemporaryDirectory() as temporary:
        here = Path(temporary)
        file, kits = here / "deployment.toml", here / "kits"
        file.write_text(
            f'[server]\nport = {port}\n[sites.hospital-a]\ndata = "part:0"\n[sites.hospital-b]\ndata = "part:1"\n'
        )
        print("kits:", ", ".join(make_kits(file, kits)))
        config = with_values(Config(), arch="cnn-small", clients=2, rounds=rounds, eval_every=rounds, scheme="sfl")
        try:
            start(kits)
            summary = supervise(
                kits,
                config,
                here / "run",
                on_round=lambda record: print(f"round {record.round}: loss {record.loss:.3f}", flush=True),
            )
        finally:
            stop(kits)
    print(f"accuracy {100 * summary['accuracy']:.1f} % after {summary['rounds']} rounds")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
