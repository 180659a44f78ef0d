"""What the server keeps of decoded smashed data, to train on it again: bounded in memory and on disk.

Rows are kept in fp16, the first in memory, those that do not fit there in a file that has no name and goes with the
process. Every row has a key, which says whose sample it is; a row that comes again takes the place of the older one,
and where there is no room a new row takes that of the oldest.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

FP16_TOP = 65504.0
RESTORED = 1024
"""Rows at once."""


class Pool:
    """Smashed data (rows, *d) and targets (rows, ...) under keys.

    >>> pool = Pool(memory_bytes=8, disk_bytes=4)
    >>> pool.add([7, 8], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1]))
    >>> pool.add([7, 9, 10], torch.tensor([[5.0, 6.0], [7.0, 8.0], [9.0, 0.0]]), torch.tensor([1, 0, 1]))
    >>> pool.keys, pool.take(np.array([0, 1, 2]))[0].tolist()
    ([7, 9, 10], [[5.0, 6.0], [7.0, 8.0], [9.0, 0.0]])
    """

    def __init__(self, memory_bytes: int, disk_bytes: int) -> None:
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self._places: dict[int, int] = {}
        """key to row, oldest first"""
        self._rows: np.ndarray | None = None
        """the rows in that order, while nothing comes"""
        self._x: list[Tensor] = []
        """in memory, on disk"""
        self._targets: Tensor | None = None
        self._held = 0
        self._memory_rows = self._most = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def keys(self) -> list[int]:
        """Whose rows are here, oldest first."""
        return list(self._places)

    def add(self, keys: Sequence[int], x: Tensor, y: Tensor) -> None:
        """Keep rows x (rows, *d) with targets y (rows, ...)."""
        if not len(x):
            return
        if self._targets is None:
            row = 2 * math.prod(x.shape[1:])
            self._memory_rows = self.memory_bytes // row
            self._most = max(1, self._memory_rows + self.disk_bytes // row)
        places, self._rows = [self._place(key) for key in keys], None
        self._grow(max(places) + 1, x.shape[1:], y)
        assert self._targets is not None
        rows, values = np.array(places), x.detach().cpu().clamp(-FP16_TOP, FP16_TOP).half()
        for part, here, inside in self._parts(rows):
            self._x[part][inside] = values[here]
        self._targets[torch.from_numpy(rows)] = y.detach().cpu()

    def take(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows and targets at these positions, counted from the oldest, in float32."""
        assert self._targets is not None
        if self._rows is None:
            self._rows = np.fromiter(self._places.values(), np.int64, len(self._places))
        rows = self._rows[positions]
        out = torch.empty(len(rows), *self._x[0].shape[1:], dtype=torch.float16, device="cpu")
        for part, here, inside in self._parts(rows):
            out[here] = self._x[part][inside]
        return out.float(), self._targets[torch.from_numpy(rows)]

    def _parts(self, rows: np.ndarray) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Memory (0) and disk (1), if any of the rows are there: which of them, and where."""
        near = rows < self._memory_rows
        for part, here, first in ((0, near, 0), (1, ~near, self._memory_rows)):
            if here.any():
                yield part, torch.from_numpy(np.flatnonzero(here)), torch.from_numpy(rows[here] - first)

    def tensors(self) -> dict[str, Tensor]:
        """All of it where it lies, for a checkpoint: keys and their rows, oldest first, and what is in the rows."""
        if not self._places or self._targets is None:
            return {}
        rows, near = len(self), min(len(self), self._memory_rows)
        keys, places = (torch.tensor(list(each), device="cpu") for each in (self._places, self._places.values()))
        parts = {"smashed": self._x[0][:near], "on_disk": self._x[1][: rows - near], "targets": self._targets[:rows]}
        return {"keys": keys, "rows": places} | {name: part for name, part in parts.items() if len(part)}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.__init__(self.memory_bytes, self.disk_bytes)  # type: ignore[misc]
        parts = [kept[name] for name in ("smashed", "on_disk") if name in kept]
        for at in range(0, len(kept["keys"]) if parts else 0, RESTORED):
            keys, rows = (kept[name][at : at + RESTORED] for name in ("keys", "rows"))
            near, first = parts[0], len(parts[0])
            here, there = near[rows.clamp(max=first - 1)], parts[-1][(rows - first).clamp(min=0)]
            x = torch.where((rows < first).view(-1, *[1] * (near.dim() - 1)), here, there)
            self.add(keys.tolist(), x, kept["targets"][rows])

    def _place(self, key: int) -> int:
        """The row of a key, which is now the youngest."""
        if key in self._places:
            place = self._places.pop(key)
        elif len(self._places) < self._most:
            place = len(self._places)
        else:
            place = self._places.pop(next(iter(self._places)))
        self._places[key] = place
        return place

    def _grow(self, rows: int, shape: Sequence[int], y: Tensor) -> None:
        """Room for so many rows, at least doubled so that growing is rare."""
        if rows <= self._held:
            return
        room = min(max(rows, 2 * self._held), self._most)
        near, far = min(room, self._memory_rows), max(0, room - self._memory_rows)
        old = self._x or [torch.empty(0, *shape, dtype=torch.float16, device="cpu")] * 2
        self._x = [
            _copied(old[0], torch.empty(near, *shape, dtype=torch.float16, device="cpu")),
            _copied(old[1], _on_disk(far, shape)) if far > len(old[1]) else old[1],
        ]
        targets = y.new_empty(room, *y.shape[1:], device="cpu")
        self._targets = targets if self._targets is None else _copied(self._targets, targets)
        self._held = room


def _copied(old: Tensor, new: Tensor) -> Tensor:
    new[: len(old)] = old
    return new


def _on_disk(rows: int, shape: Sequence[int]) -> Tensor:
    """Rows in a file without a name."""
    with tempfile.TemporaryFile(prefix="splitcast-pool-") as file:
        file.truncate(2 * rows * math.prod(shape))
        mapped = np.memmap(file, np.float16, "r+", shape=(rows, *shape))
    return torch.from_numpy(mapped)
