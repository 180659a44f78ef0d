"""Trains one point of a sweep after the other: jobs come as JSON lines on stdin, what happens leaves on stdout.

The process ends when stdin does, so that nobody trains on when the sweep was killed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from splitcast.base.config import from_toml
from splitcast.base.errors import SplitcastError
from splitcast.run.loop import train
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.run.track import tracking

EVERY_S = 0.5
"""Between two words on progress."""

Tell = Callable[[dict[str, Any]], None]


def train_point(toml: str, path: str, track: Sequence[str] = (), tell: Tell | None = None) -> str:
    """Train a configuration in a folder, or go on there; returns why it failed, or nothing."""
    folder, last = RunFolder(Path(path)), 0.0

    def on_round(record: RoundRecord) -> None:
        nonlocal last
        tracked(record)
        if tell and time.monotonic() - last > EVERY_S:
            last = time.monotonic()
            tell({"round": record.round})

    try:
        config = from_toml(toml)
        known = folder.config_file.is_file()
        with tracking(track, folder.path, config) as tracked:
            train(config, folder.path, resume=known, on_round=on_round)
    except SplitcastError as error:
        return str(error)
    except Exception as error:  # a row of the table, not the end of the sweep
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def main() -> None:
    """Serve jobs until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = sys.stderr  # what a model or data set prints is not for the one who waits for our answers
    jobs: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)

    def tell(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=out)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        job = jobs.get()
        tell({"done": train_point(job["config"], job["folder"], job["track"], tell)})


if __name__ == "__main__":
    main()
