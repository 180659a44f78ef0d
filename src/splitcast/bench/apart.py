"""Work in a process of its own, and what that has cost."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def apart(work: Callable[..., dict[str, float] | None], **given: Any) -> dict[str, float]:
    """What a function of a module has told, and processor seconds (``seconds``) and the most GiB (``gib``) that a
    process of its own needed for it."""
    module, name = work.__module__, work.__qualname__
    code = f"from {module} import {name}; from {__name__} import tell; tell({name}(**{given!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def tell(found: dict[str, float] | None) -> None:
    """Print it, and what this process has cost; its memory is known on Linux only.

    The peak of `getrusage` would not do: it begins with that of the process which has started this one.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peak = next((float(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM")), math.nan)
    print(json.dumps({"seconds": time.process_time(), "gib": peak, **(found or {})}))
