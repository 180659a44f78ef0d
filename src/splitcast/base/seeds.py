"""Random streams: one seed, one independent stream per role and per place in the run.

A stream is a pure function of (seed, role, counters), so that nothing about randomness has to be stored in a
checkpoint, and a client on another machine can draw its own batch without seeing the others'.
"""

from typing import Literal, get_args

import numpy as np
import torch

Role = Literal[
    "data",
    "model",
    "batch",
    "participation",
    "codec",
    "layers",
    "channel",
    "policy",
    "sweep",
    "augment",
    "pool",
    "order",
    "rotation",
    "writing",
    "defence",
    "test",
]
_ROLES: tuple[Role, ...] = get_args(Role)


def stream(seed: int, role: Role, *counters: int) -> np.random.Generator:
    """The generator of one role at one place, e.g. ``stream(0, "batch", round, step)``.

    >>> stream(0, "data").random() == stream(0, "data").random() != stream(0, "model").random()
    True
    """
    return np.random.default_rng([seed, _ROLES.index(role), *counters])


def torch_seed(seed: int, role: Role, *counters: int) -> int:
    """A seed for a `torch.Generator` of one role at one place."""
    return int(stream(seed, role, *counters).integers(2**62))


def torch_stream(seed: int, role: Role, *counters: int) -> torch.Generator:
    """As `stream`, for torch."""
    return torch.Generator().manual_seed(torch_seed(seed, role, *counters))


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`; where there is no accelerator, without the calls that it keeps for one that may come.

    It keeps three of them, each with the stack it was called from, for ever: a millisecond, and memory, every round.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
