"""A site's own weights on its own disk, by run and round, but for what is frozen, and what is remembered for their next
averaging; the last two rounds are kept."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from splitcast.base.errors import SplitcastError
from splitcast.base.files import write_atomically
from splitcast.training.differences import Differences
from splitcast.training.placement import Placement
from splitcast.training.weights import FROZEN, Weights


class SiteStore:
    """The weights of one run (`remote.site.WeightStore`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clear(self) -> None:
        for file in self._files():
            file.unlink()

    def save(self, weights: Weights, differences: Differences, placement: Placement, round_: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {slot: values for slot, values in weights.slots.items() if slot != FROZEN}
        tensors = {f"{slot}/{k}": v.contiguous() for slot, values in kept.items() for k, v in values.items()}
        write_atomically(self._file(placement, round_), save(tensors | differences.tensors()))
        for old in self._files()[:-2]:
            old.unlink()

    def load(self, placement: Placement, round_: int, like: Weights) -> tuple[Weights, Differences] | None:
        try:
            stored = load(self._file(placement, round_).read_bytes())
            slots = {
                slot: values if slot == FROZEN else {k: stored[f"{slot}/{k}"] for k in values}
                for slot, values in like.slots.items()
            }
        except (OSError, SafetensorError, SplitcastError, KeyError):
            return None  # damaged weights are none: the averaged ones take their place
        fits = all(slots[slot][k].shape == v.shape for slot, values in like.slots.items() for k, v in values.items())
        differences, size = Differences.from_tensors(stored, torch.device("cpu")), like.flat().shape
        fits &= all(value.shape == size for value in differences.tensors().values())
        return (Weights(slots), differences) if fits else None

    def _file(self, placement: Placement, round_: int) -> Path:
        return self.folder / f"half-{round_:08}-cut{placement.cut}.safetensors"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("half-*.safetensors"))
