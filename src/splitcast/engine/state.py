"""The weights of a running training: who holds what, the clients' weights, and the server's."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.model.split import Params
from splitcast.training.placement import Placement
from splitcast.training.weights import FROZEN, TRAINED, Weights

SHARES = "shares"
"""Name of rho (N,) in a checkpoint: what an average of the clients weighs them by."""


@dataclass
class State:
    """Clients hold one copy for all or one each; the server holds one copy between rounds."""

    placement: Placement
    client: Weights
    server: Weights
    marked: Weights | None = None
    """the clients' weights when a scheme last marked them, one copy"""

    @staticmethod
    def start(weights: Weights, placement: Placement) -> "State":
        """A whole model, divided."""
        return State(
            placement,
            weights.only(lambda name: placement.side(name) == "client"),
            weights.only(lambda name: placement.side(name) == "server"),
        )

    def averaged(self, rho: Tensor) -> Params:
        """The whole model with the averaged client weights, frozen parameters and buffers included."""
        both = Weights({TRAINED: {}})
        both.adopt(self.client.mean(rho))
        both.adopt(self.server)
        return both.everything()

    def move(self, placement: Placement, rho: Tensor) -> tuple[int, int]:
        """Another placement, without changing a logit of the averaged model.

        Blocks moving to the clients are copied to each; blocks moving to the server become the weighted average
        of the clients' copies; the optimiser's state moves along. Returns the values (broadcast to the clients,
        uploaded by each). Nothing is uploaded when the clients' copies are equal: the server made that copy itself.
        """
        down = self.server.only(lambda name: placement.side(name) == "client")
        up = self.client.only(lambda name: placement.side(name) == "server").mean(rho)
        counted = down.travelling(), up.travelling() if self.client.stacked else 0
        self.server.drop(lambda name: placement.side(name) == "client")
        self.client.drop(lambda name: placement.side(name) == "server")
        self.client.adopt(down.stack(len(rho)) if self.client.stacked else down)
        self.server.adopt(up)
        self.placement = placement
        return counted

    def of(self, client: int) -> "State":
        """What one client works with: its own weights where they differ, and the server's."""
        own = self.client.take(slice(client, client + 1)) if self.client.stacked else self.client
        return State(self.placement, own, self.server)

    def drift(self, rho: Tensor) -> float:
        """Mean distance of the client halves from their average."""
        return self.client.drift(rho)

    def about(self) -> dict[str, str]:
        """What is needed to read `tensors`."""
        return {"cut": str(self.placement.cut), "copies": str(self.client.copies)}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a flat name, for a checkpoint."""
        return {
            f"{side}/{slot}/{name}": value
            for side, weights in self._sides()
            for slot, values in weights.slots.items()
            for name, value in values.items()
        }

    def _sides(self) -> list[tuple[str, Weights]]:
        marked = [("marked", self.marked)] if self.marked else []
        return [("client", self.client), ("server", self.server), *marked]

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], placement: Placement, copies: int, like: Weights) -> "State":
        """The inverse of `tensors`, for weights of the slots and shapes of ``like``; ``copies`` is 0 for one copy.

        Names come in the order of ``like``, so that sums over them do not depend on how they were stored.
        """
        sides = {}
        for side in ("client", "server"):
            lead = (copies,) if side == "client" and copies else ()
            slots = {
                slot: {
                    name: _expected(
                        tensors, f"{side}/{slot}/{name}", (*(lead if slot != FROZEN else ()), *value.shape)
                    ).to(value.device)
                    for name, value in values.items()
                    if placement.side(name) == side
                }
                for slot, values in like.slots.items()
            }
            sides[side] = Weights(slots, stacked=bool(lead))
        marked = None
        if any(key.startswith("marked/") for key in tensors):
            half = like.only(placement.on_client).snapshot()
            slots = {
                slot: {
                    name: _expected(tensors, f"marked/{slot}/{name}", tuple(v.shape)).to(v.device)
                    for name, v in values.items()
                }
                for slot, values in half.slots.items()
            }
            marked = Weights(slots)
        return State(placement, sides["client"], sides["server"], marked)


def _expected(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...]) -> Tensor:
    if key not in tensors:
        raise SplitcastError(f"checkpoint: has no {key}; it belongs to another model or scheme")
    if tensors[key].shape != shape:
        found = tuple(tensors[key].shape)
        raise SplitcastError(f"checkpoint: {key} has shape {found}, not {shape}; it belongs to another model")
    return tensors[key]
