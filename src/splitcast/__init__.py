"""Split federated learning with gradient aggregation: train, compare, plan."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitcast.base.config import Config, with_values
    from splitcast.base.errors import SplitcastError
    from splitcast.data import Dataset, from_datasets, from_tensors
    from splitcast.model.split import SplitModel
    from splitcast.run.loop import Result, train
    from splitcast.studies.results import results

_HOMES = {
    "Config": "base.config",
    "Dataset": "data",
    "Result": "run.loop",
    "SplitModel": "model.split",
    "SplitcastError": "base.errors",
    "from_datasets": "data",
    "from_tensors": "data",
    "results": "studies.results",
    "train": "run.loop",
    "with_values": "base.config",
}

__all__ = [
    "Config",
    "Dataset",
    "Result",
    "SplitModel",
    "SplitcastError",
    "from_datasets",
    "from_tensors",
    "results",
    "train",
    "with_values",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `splitcast --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'splitcast' has no attribute {name!r}")
    return getattr(importlib.import_module(f"splitcast.{_HOMES[name]}"), name)
