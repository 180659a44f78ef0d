"""Trainings that die by SIGKILL at moments that do not depend on how fast the machine is."""

import os
import random
import signal
import time

from splitcast.run.loop import train
from waiting import wait_for


def trained_in_a_child(config, folder, **parts):
    """A process of its own that trains, from wherever the folder stands."""
    child = os.fork()
    if not child:
        code = 1
        try:
            train(config, folder, resume=(folder / "config.toml").exists(), **parts)
            code = 0
        finally:
            os._exit(code)
    return child


def lines(folder):
    """How many rounds have been written down."""
    file = folder / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def killed_at_random(config, folder, times, **parts):
    """So many children, each killed some moments after a random round was written, unless that is beyond its end."""
    codes, ended = [], {}
    for _ in range(times):
        child, last = trained_in_a_child(config, folder, **parts), random.randrange(config.train.rounds)

        def there(child=child, last=last):
            if child not in ended and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended[child] = True
            return child in ended or lines(folder) > last

        wait_for(there, every_s=0.002)
        time.sleep(random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert -signal.SIGKILL in codes and set(codes) <= {0, -signal.SIGKILL}
