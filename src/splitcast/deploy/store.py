"""A site's own half on its own disk, by run and round; the last two rounds are kept."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from splitcast.engine.state import Half, State
from splitcast.errors import SplitcastError
from splitcast.records import write_atomically
from splitcast.split import Params


class SiteStore:
    """The halves of one run (`engine.site.Keeper`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clear(self) -> None:
        for file in self._files():
            file.unlink()

    def save(self, half: Half, cut: int, round_: int) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tensors = {k: v.contiguous() for k, v in State(cut, half, Half({})).tensors().items()}
        write_atomically(self._file(cut, round_), save(tensors))
        for old in self._files()[:-2]:
            old.unlink()

    def load(self, cut: int, round_: int, like: Params) -> Half | None:
        try:
            return State.from_tensors(load(self._file(cut, round_).read_bytes()), cut, 0, like).client
        except (OSError, SafetensorError, SplitcastError):
            return None  # a damaged half is no half: the averaged one takes its place

    def _file(self, cut: int, round_: int) -> Path:
        return self.folder / f"half-{round_:08}-cut{cut}.safetensors"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("half-*.safetensors"))
