"""Datasets, their division among clients, and mini-batches."""

from splitcast.data.batches import draw_batches
from splitcast.data.datasets import Dataset, from_datasets, from_tensors
from splitcast.data.fetch import fetch, stored_texts
from splitcast.data.loading import NAMES, TEXT_NAMES, cache_folder, load
from splitcast.data.partition import natural, natural_column, partition

__all__ = [
    "NAMES",
    "TEXT_NAMES",
    "Dataset",
    "cache_folder",
    "draw_batches",
    "fetch",
    "from_datasets",
    "from_tensors",
    "load",
    "natural",
    "natural_column",
    "partition",
    "stored_texts",
]
