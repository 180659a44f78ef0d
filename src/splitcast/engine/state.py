"""The weights of a running training: who holds what, the clients' weights, and the server's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.model.split import Params, SplitModel
from splitcast.training.optimiser import Optimiser, at_sync
from splitcast.training.placement import SIDES, Fleet, Placed, Placement, Side
from splitcast.training.runtime import Runtime
from splitcast.training.weights import FROZEN, TRAINED, Slots, Weights

SHARES = "shares"
"""Name of rho (N,) in a checkpoint: what an average of the clients weighs them by."""


@dataclass
class State:
    """Clients hold one copy for all or one each; the server holds one copy between rounds."""

    placement: Placement
    client: Weights
    server: Weights
    own: Weights | None = None
    """the optimiser's state of each client, where all hold one half and it stays with them"""

    @staticmethod
    def start(weights: Weights, placement: Placement) -> "State":
        """A whole model, divided."""
        return State(
            placement,
            weights.only(partial(_of_side, placement, "client")),
            weights.only(partial(_of_side, placement, "server")),
        )

    def averaged(self, rho: Tensor) -> Params:
        """The whole model with the averaged client weights, frozen parameters and buffers included."""
        both = Weights({TRAINED: {}})
        both.adopt(self.client.mean(rho))
        both.adopt(self.server)
        return both.everything()

    def spread(self, members: int) -> None:
        """Give each of so many clients a copy of the half that all hold, with its own state of the optimiser."""
        self.client, self.own = self.client.stack(members).keeping(self.own), None

    def share(self, half: Weights, optimiser: Optimiser) -> None:
        """All clients hold ``half`` from now on; state that is not sent stays with each or begins anew."""
        if at_sync(optimiser) == "local" and self.client.stacked:
            self.own = self.client.home()
        self.client = half.renewed(optimiser)

    def hand_to(self, client: int, members: int, optimiser: Optimiser) -> None:
        """One of so many clients has the half now, with its own state of the optimiser or one that begins anew."""
        self.client = self.client.renewed(optimiser)
        if at_sync(optimiser) == "local":
            self.own = self.own or self.client.stack(members).home()
            self.client = self.client.keeping(self.own.one(client))  # its row itself: steps are in place

    def move(self, placement: Placement, rho: Tensor, optimiser: Optimiser) -> tuple[int, int]:
        """Another placement, without changing a logit of the averaged model.

        Blocks moving to the clients are copied to each; blocks moving to the server become the weighted average
        of the clients' copies; the optimiser's state moves along, or, if it is not sent, begins anew. Returns the
        values (broadcast to the clients, uploaded by each). Nothing is uploaded when the clients' copies are equal:
        the server made that copy itself.
        """
        down = self.server.only(lambda name: placement.side(name) == "client").renewed(optimiser)
        up = self.client.only(lambda name: placement.side(name) == "server").mean(rho).renewed(optimiser)
        counted = down.travelling(), up.travelling() if self.client.stacked else 0
        self.server.drop(lambda name: placement.side(name) == "client")
        self.client.drop(lambda name: placement.side(name) == "server")
        self.client.adopt(down.stack(len(rho)) if self.client.stacked else down)
        self.server.adopt(up)
        if self.own:
            self.own.drop(lambda name: placement.side(name) == "server")
            self.own.adopt(down.stack(len(rho)).home())
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
        """Every tensor under a flat name, for a checkpoint; what is frozen stays out of it: it is the model's, whose
        fingerprint a checkpoint has."""
        return {
            f"{side}/{slot}/{name}": value
            for side, weights in self._sides()
            for slot, values in weights.slots.items()
            for name, value in values.items()
            if slot != FROZEN
        }

    def _sides(self) -> list[tuple[str, Weights]]:
        own = [("own", self.own)] if self.own else []
        return [("client", self.client), ("server", self.server), *own]

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], placement: Placement, copies: int, like: Weights) -> "State":
        """The inverse of `tensors`, for weights of the slots and shapes of ``like``, whose frozen values are taken;
        ``copies`` is 0 for one copy.

        Names come in the order of ``like``, so that sums over them do not depend on how they were stored.
        """
        client, server = (like.only(partial(_of_side, placement, side)) for side in SIDES)
        found = State(
            placement,
            read(tensors, "client", client, (copies,) if copies else ()),
            read(tensors, "server", server),
        )
        each = [v for key, v in tensors.items() if key.startswith("own/")]
        if each:
            found.own = read(tensors, "own", client.home(), tuple(each[0].shape[:1]))
        return found


def started(
    model: SplitModel, placement: Placed, optimisers: Sequence[Optimiser], runtime: Runtime | None = None
) -> Weights:
    """The weights of a whole model at the start, with the states of the optimisers of clients and server."""
    device, dtype = (runtime.device, runtime.dtype) if runtime else ("cpu", torch.float32)
    params, buffers, frozen = (
        {k: v.to(device) for k, v in part.items()}
        for part in (model.initial(dtype), model.buffers(dtype), model.frozen(dtype))
    )
    if isinstance(placement, Fleet):  # with one kind of state (`check_sides`)
        return Weights.start(params, optimisers[0], buffers, frozen)
    whole = Weights({})
    for side, optimiser in zip(SIDES, optimisers, strict=True):
        mine = ({k: v for k, v in part.items() if placement.side(k) == side} for part in (params, buffers, frozen))
        own, *beside = mine
        whole.adopt(Weights.start(own, optimiser, *beside))
    return whole


def check_sides(config: Config, placement: Placed) -> None:
    """Refuse an optimiser of the server's own where it has no half, or where blocks change sides."""
    given = {"server_optimizer": config.train.server_optimizer, "server_lr": config.train.server_lr}
    named = [f"{name}: {value!r}" for name, value in given.items() if value]
    sides = {segment.side for place in placement.kinds for segment in place.segments}
    if named and "server" not in sides:
        raise SplitcastError(f"{named[0]}, but with {config.split.scheme} the server has no half; leave it out")
    if config.train.server_optimizer not in ("", config.train.optimizer) and (
        isinstance(placement, Fleet) or config.policy.policy != "fixed"
    ):
        raise SplitcastError(f"{named[0]} needs one fixed cut: blocks that change sides take their state along")


def _of_side(placement: Placement, side: Side, name: str) -> bool:
    return placement.side(name) == side


def read(tensors: Mapping[str, Tensor], part: str, like: Weights, lead: tuple[int, ...] = ()) -> Weights:
    """Weights of the slots and shapes of ``like``, stacked if there is a leading dimension; frozen ones are its own."""
    slots: Slots = {}
    for slot, values in like.slots.items():
        if slot == FROZEN:
            slots[slot] = values
            continue
        found = {name: expected(tensors, f"{part}/{slot}/{name}", (*lead, *v.shape)) for name, v in values.items()}
        slots[slot] = {name: v.to(values[name].device) for name, v in found.items()}
    return Weights(slots, stacked=bool(lead))


def expected(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a checkpoint, if it is there and has the shape that it should."""
    if key not in tensors:
        raise SplitcastError(f"checkpoint: has no {key}; it belongs to another model or scheme")
    if tensors[key].shape != shape:
        found = tuple(tensors[key].shape)
        raise SplitcastError(f"checkpoint: {key} has shape {found}, not {shape}; it belongs to another model")
    return tensors[key]
