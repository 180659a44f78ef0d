"""The weights of a training in which clients hold different blocks.

Every block is averaged over all copies of it, wherever they are. With v_n blocks on client n, and w_b^n the copy of
block b that works on client n's samples, on the client if b <= v_n and else on the server, an averaging gives

    w_b = sum_n rho^n w_b^n,

whatever the cuts are: so `sfl` stays federated averaging. Between averagings the server's copies are averaged among
themselves, and clients keep their own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.engine.state import State
from splitcast.model.split import Params, block_of
from splitcast.schemes.program import Scheme
from splitcast.training.optimiser import Optimiser
from splitcast.training.placement import Fleet, Placed, Placement, heard
from splitcast.training.weights import FROZEN, Weights


@dataclass
class MixedState:
    """A `State` for every cohort; blocks that the server holds for several of them are equal between rounds."""

    placement: Fleet
    members: list[np.ndarray]
    states: list[State]

    @staticmethod
    def start(weights: Weights, placement: Fleet) -> "MixedState":
        """A whole model, divided in several ways."""
        members = [np.array(ids) for ids in placement.cohorts.values()]
        return MixedState(placement, members, [State.start(weights.clone(), place) for place in placement.cohorts])

    def of(self, client: int) -> State:
        """What one client works with."""
        k, at = self._where(client)
        return self.states[k].of(at)

    def averaged(self, rho: Tensor) -> Params:
        """The whole model, every block averaged over its copies."""
        return self._mean(self._everybody(rho)).everything()

    def average(
        self, taking_part: Iterable[tuple[int, float, Tensor, Tensor]], optimiser: Optimiser, *, by_side: bool = False
    ) -> None:
        """Average every block over the copies of those who take part (cohort, its weight, where they are among its
        members, rho among themselves); everybody has the average then. ``by_side``: over the clients' copies only, so
        that the server's are others (`Scheme.by_side`)."""
        if by_side:
            mean = weighted([self._parts(*share)[0] for share in taking_part])
            for state in self.states:
                state.share(mean.only(state.placement.on_client).clone(), optimiser)
            return
        self.divide(self._mean(taking_part), optimiser)

    def divide(self, whole: Weights, optimiser: Optimiser) -> None:
        """Give every cohort its part of these weights; what only absent cohorts hold (heads of their own) stays."""
        known = {name for values in whole.slots.values() for name in values}
        for state in self.states:
            own = state.client.only(lambda name: name not in known)
            even = torch.full((max(1, own.copies),), 1 / max(1, own.copies))
            whole.adopt(own.mean(even))
        for state in self.states:
            mean = State.start(whole.clone(), state.placement)
            state.share(mean.client, optimiser)
            state.server = mean.server

    def join(self, cohorts: Sequence[tuple[int, float]]) -> None:
        """Average the blocks that the server holds for several cohorts, each with its weight, and give the average to
        all."""
        mean = weighted([(self.states[k].server, weight) for k, weight in cohorts])
        for state in self.states:
            own = state.server.slots
            state.server = Weights(
                {slot: {k: mean.slots.get(slot, {}).get(k, v).clone() for k, v in own[slot].items()} for slot in own}
            )

    def handed_to(self, client: int) -> State:
        """The weights as they are now, for one client in its turn: all cohorts look at the same tensors."""
        first = self.states[0]
        whole = Weights({})
        whole.adopt(first.client)
        whole.adopt(first.server)
        self.states = [State.start(whole, place) for place in self.placement.cohorts]
        return self.states[self._where(client)[0]]

    def drift(self, rho: Tensor) -> float:
        """Mean distance of the clients' weights from the average of their cohort."""
        apart = [
            len(ids) * state.client.drift(rho[torch.from_numpy(ids)] / rho[torch.from_numpy(ids)].sum())
            for ids, state in zip(self.members, self.states, strict=True)
        ]
        return sum(apart) / len(self.placement.placements)

    def travelling(self) -> list[int]:
        """Values of each client's weights that are sent when they are exchanged, (N,)."""
        held = [state.client.travelling() for state in self.states]
        return [held[self._where(n)[0]] for n in range(len(self.placement.placements))]

    def about(self) -> dict[str, str]:
        """What is needed to read `tensors`."""
        cuts = ",".join(str(place.cut) for place in self.placement.placements)
        return {"cut": cuts, "copies": ",".join(str(state.client.copies) for state in self.states)}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under a flat name, for a checkpoint."""
        return {f"{k}/{name}": v for k, state in enumerate(self.states) for name, v in state.tensors().items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], placement: Fleet, copies: str, like: Weights) -> "MixedState":
        """The inverse of `tensors`."""
        made = MixedState.start(like, placement)
        for k, (place, count) in enumerate(zip(placement.cohorts, copies.split(","), strict=True)):
            own = {name.removeprefix(f"{k}/"): v for name, v in tensors.items() if name.startswith(f"{k}/")}
            made.states[k] = State.from_tensors(own, place, int(count), like)
        return made

    def _everybody(self, rho: Tensor) -> list[tuple[int, float, Tensor, Tensor]]:
        found = []
        for k, ids in enumerate(self.members):
            mine = rho[torch.from_numpy(ids)]
            found.append((k, float(mine.sum()), torch.arange(len(ids)), mine / mine.sum()))
        return found

    def _mean(self, cohorts: Iterable[tuple[int, float, Tensor, Tensor]]) -> Weights:
        return weighted([part for share in cohorts for part in self._parts(*share)])

    def _parts(self, k: int, weight: float, places: Tensor, rho: Tensor) -> list[tuple[Weights, float]]:
        """The mean of a cohort's clients, and the server's blocks for them."""
        client = self.states[k].client
        half = client.take(places).mean(rho) if client.stacked else client
        mean = Weights(dict(half.sent()) | {FROZEN: half.beside(FROZEN)})
        return [(mean, weight), (self.states[k].server, weight)]

    def _where(self, client: int) -> tuple[int, int]:
        k = list(self.placement.cohorts).index(self.placement.of(client))
        return k, int(np.searchsorted(self.members[k], client))


AnyState = State | MixedState


def start(weights: Weights, placement: Placed) -> AnyState:
    """A whole model, divided."""
    return State.start(weights, placement) if isinstance(placement, Placement) else MixedState.start(weights, placement)


def restored(
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str],
    clients: int,
    scheme: Scheme,
    depth: int,
    like: Callable[[Placed], Weights],
) -> AnyState:
    """The weights of a checkpoint, where blocks were then; ``like``: those of a whole model at a placement."""
    cuts = [int(cut) for cut in about["cut"].split(",")]
    if len(cuts) not in (1, clients):
        raise SplitcastError(f"checkpoint: has cuts of {len(cuts)} clients, the run has {clients}")
    placement = Fleet.of_clients([scheme.place(min(cut, depth - 1), depth) for cut in cuts])
    if isinstance(placement, Fleet):
        return MixedState.from_tensors(tensors, placement, about["copies"], like(placement))
    return State.from_tensors(tensors, placement, int(about["copies"]), like(placement))


def moved(state: AnyState, placement: Placed, clients: int) -> tuple[AnyState, dict[int, int]]:
    """Another division of a model whose copies are equal, as they are when client halves were just averaged: nothing is
    uploaded, since the server has all of it, and not a logit changes. With it, the values that each client is sent
    which gets blocks (`training.placement.heard`)."""
    first = state if isinstance(state, State) else state.states[0]
    if first.client.stacked:
        raise SplitcastError("cut: cuts of single clients move only while all client halves are equal")
    whole = Weights({})
    whole.adopt(first.client)
    whole.adopt(first.server)
    return start(whole, placement), heard(state.placement, placement, block_values(whole), clients)


def block_values(weights: Weights) -> dict[int, int]:
    """Values of every block that are sent when weights are exchanged."""
    blocks = {block_of(name) for values in weights.slots.values() for name in values}
    return {block: weights.only(lambda name, b=block: block_of(name) == b).travelling() for block in blocks}  # type: ignore[misc]


def weighted(parts: Sequence[tuple[Weights, float]]) -> Weights:
    """Every tensor averaged over the copies that there are, by their weights; what is frozen is the same in all."""
    mean, total = Weights({}), dict[tuple[str, str], float]()
    for weights, share in parts:
        for slot, values in weights.slots.items():
            for name, value in values.items():
                known = mean.slots.setdefault(slot, {})
                if slot == FROZEN or not value.is_floating_point():
                    known.setdefault(name, value)
                    continue
                known[name] = known[name] + share * value if name in known else share * value
                total[slot, name] = total.get((slot, name), 0.0) + share
    for (slot, name), weight in total.items():
        mean.slots[slot][name] /= weight
    whole = Weights({})
    whole.adopt(mean)
    return whole
