"""Datasets, their division among clients, and mini-batches."""

from splitcast.data.batches import draw_batches
from splitcast.data.partition import partition

__all__ = ["draw_batches", "partition"]
