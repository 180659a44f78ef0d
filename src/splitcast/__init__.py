"""Split federated learning with gradient aggregation: train, compare, plan."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitcast.config import Config, with_values
    from splitcast.data import from_datasets, from_tensors
    from splitcast.errors import SplitcastError
    from splitcast.run import Result, train
    from splitcast.split import SplitModel

_HOMES = {
    "Config": "config",
    "Result": "run",
    "SplitModel": "split",
    "SplitcastError": "errors",
    "from_datasets": "data",
    "from_tensors": "data",
    "train": "run",
    "with_values": "config",
}

__all__ = [
    "Config",
    "Result",
    "SplitModel",
    "SplitcastError",
    "from_datasets",
    "from_tensors",
    "train",
    "with_values",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `splitcast --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'splitcast' has no attribute {name!r}")
    return getattr(importlib.import_module(f"splitcast.{_HOMES[name]}"), name)
