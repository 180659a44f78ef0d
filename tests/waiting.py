"""Waiting for what other processes do, on a machine that may be busy with many other things."""

import time

PATIENCE_S = 600.0
"""After which it is not slow but stuck."""


def wait_for(condition, every_s=0.1):
    """Return once it holds; however slow the machine, it does, or the test fails after minutes."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(every_s)
