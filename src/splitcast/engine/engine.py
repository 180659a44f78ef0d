"""What the round loop asks of an engine; `Simulator` runs everything here, `Federation` has its clients elsewhere."""

from typing import Protocol

from torch import Tensor

from splitcast.engine.simulator import RoundReport
from splitcast.engine.state import State
from splitcast.schemes.messages import Ledger
from splitcast.split import SplitModel


class Engine(Protocol):
    """Rounds of a scheme."""

    model: SplitModel
    classes: int

    @property
    def state(self) -> State:
        """Where the cut is, and both halves as far as they are known here."""
        ...

    def recut(self, cut: int, ledger: Ledger, *, charge: bool = True) -> None:
        """Move the cut before a round, counting what travels unless ``charge`` is off."""
        ...

    def round(self, t: int, ledger: Ledger | None = None) -> RoundReport:
        """Run round ``t``, counted from 1."""
        ...

    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy of the averaged model."""
        ...

    def drift(self) -> float | None:
        """Mean distance of the client halves from their average; None where that is not known."""
        ...

    def snapshot(self, t: int) -> State:
        """What a checkpoint after round ``t`` holds."""
        ...

    def resume(self, state: State, t: int) -> None:
        """Go on after round ``t``."""
        ...
