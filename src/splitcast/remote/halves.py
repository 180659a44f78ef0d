"""The weights of a training whose clients are elsewhere.

Either all sites hold the same client half, which is then known here too (`state.client`), or their halves ``differ``,
and the average has to be collected. A site whose half is not what the protocol says (a new one, one that missed an
averaging) is stale until it has been given the averaged half.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.engine.links import CountingLink
from splitcast.engine.state import State
from splitcast.model.split import Params
from splitcast.remote.guard import AVERAGES, size_of
from splitcast.remote.sites import Answer, NoSites, Sites
from splitcast.remote.wire import Packed, flag, pack_change, pack_weights, unpack_change, unpack_weights
from splitcast.schemes.program import Scheme
from splitcast.training.differences import Differences
from splitcast.training.optimiser import Optimiser
from splitcast.training.placement import Placement
from splitcast.training.weights import Weights


def _nothing(n: int, answer: Answer) -> None:
    """Of calls that only confirm."""


class Halves:
    """Who holds which weights."""

    def __init__(
        self,
        state: State,
        like: Weights,
        sites: Sites,
        sizes: NDArray[np.int64],
        sync: Codec = FP32,
        members: Iterable[int] | None = None,
    ) -> None:
        """``members``: the sites with this placement; None: all."""
        self.state, self.like, self.sites, self.sizes, self.sync = state, like, sites, sizes, sync
        self.members = set(range(len(sizes)) if members is None else members)
        self.differ = False
        self.states_differ = False
        """whether sites keep states of the optimiser of their own"""
        self.stale = self.present
        self.shared = state.client
        """the last half that everybody was given: what an average is judged by"""
        self.resumed = False
        """whether no round was run since the checkpoint"""
        self.bases: dict[int, Tensor] = {}
        """what each site was given last, flat: what its differences are to"""
        self.differences = Differences()
        self.collected: tuple[list[int], Weights] | None = None
        """the halves of some sites after the last round, if they were asked for"""

    def rho(self, ids: Sequence[int]) -> Tensor:
        """rho^n = D^n / D over some of the clients."""
        sizes = self.sizes[list(ids)]
        return torch.from_numpy(sizes / sizes.sum()).float()

    @property
    def present(self) -> set[int]:
        """Those that can be called."""
        return self.sites.present & self.members

    def fresh(self) -> list[int]:
        """Sites that hold what they should."""
        return sorted(self.present - self.stale)

    def among(self, ids: Sequence[int]) -> list[tuple["Halves", list[int]]]:
        """Those of some sites that have equal placements, cohort by cohort: here all."""
        return [(self, list(ids))]

    def welcome(self, n: int, rows: int) -> None:
        """A site is back: it has so many rows, and is given the averaged half before it takes part."""
        self.sizes[n] = rows
        self.stale.add(n)

    def average(self) -> Weights:
        """The averaged half: known, or collected from the sites; else, after resuming, the checkpoint's."""
        if not self.differ:
            return self.state.client
        if self.collected is None:
            halves = self.hand_in(self.fresh())
            if not halves and not self.resumed:
                raise NoSites(f"sites: none sent its half; {self.sites.why()}")
            if not halves:
                return self.state.client
            self.collected = list(halves), Weights.stacked_of(halves.values())
        self.state.client = self._averaged(*self.collected)
        return self.state.client

    def averaged(self) -> Params:
        """The whole model, with the averaged half."""
        self.average()
        return self.state.client.everything() | self.state.server.everything()

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The averaged half and the server half, what is remembered for the next averaging, and what is needed to read
        them."""
        state = State(self.state.placement, self.average(), self.state.server)
        return state.tensors() | self.differences.tensors(), {"cut": str(state.placement.cut), "copies": "0"}

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], scheme: Scheme, depth: int) -> None:
        """The inverse of `snapshot`."""
        placement = scheme.place(min(int(about["cut"]), depth - 1), depth)
        self.state = State.from_tensors(tensors, placement, 0, self.like)
        self.differences = Differences.from_tensors(tensors, torch.device("cpu"))

    def share(self, halves: Mapping[int, Weights], codec: Codec = FP32) -> tuple[int, list[int]]:
        """Average these halves and give the average to everybody: bytes that are the same for all, and those sites
        that are given the whole half because they do not hold what the others do."""
        if not halves:
            raise NoSites(f"sites: none sent a half that can be used; {self.sites.why()}")
        average, fresh, last = self.mean_of(halves), self.fresh(), None
        message, alone = pack_weights(average), list[int]()
        if not codec.exact and self.differences.last is not None:
            last = self.differences.last
            sent = self.differences.from_server(average.flat())
            message = pack_change(sent, codec)
            half = self.differences.shared(sent, unpack_change(message, len(last), codec))
            average = Weights.unflat(half, average)
            alone = [n for n in fresh if n not in self.bases or not torch.equal(self.bases[n], last)]
        self.state.client = self.shared = average
        self.differ = False
        self.adopted(message, [n for n in fresh if n not in alone])
        self.give(alone)
        return len(message["data"]), alone

    def give(self, ids: Sequence[int]) -> list[int]:
        """Send `state.client` to some sites; returns those that took it."""
        return self.adopted(pack_weights(self.state.client), ids) if ids else []

    def adopted(self, half: Packed, ids: Sequence[int]) -> list[int]:
        """Those that took a half, or what it has moved, over."""
        cut = self.state.placement.cut
        taken = self.sites.ask("adopt", {n: {"cut": cut, "half": half} for n in ids}, "download", _nothing)
        self.stale = (self.stale | set(ids)) - set(taken)
        self._hold(taken)
        return list(taken)

    def _hold(self, ids: Iterable[int]) -> None:
        """These sites hold `state.client` now."""
        if not self.sync.exact:
            self.bases |= dict.fromkeys(ids, self.state.client.flat())

    def hand_in(self, ids: Sequence[int]) -> dict[int, Weights]:
        """The halves of some sites."""
        asked: dict[int, dict[str, Any]] = {n: {} for n in ids}
        return self.sound(
            self.sites.ask("hand_in", asked, "upload", lambda n, answer: self.unpacked(n, answer["half"]))
        )

    def sound(self, halves: dict[int, Weights]) -> dict[int, Weights]:
        """Those halves that are not far farther from the last average than the others."""
        last = self.shared if list(self.shared.params) == self.names() else None
        bad: dict[int, str] = {}
        for slot, _ in next(iter(halves.values())).sent() if halves else ():
            sizes = {}
            for n, weights in halves.items():
                away = [v - last.slots[slot][k] if last else v for k, v in weights.slots[slot].items()]
                sizes[n] = size_of(torch.cat([v.flatten().float() for v in away])) if away else 0.0
            bad |= self.sites.guard.outliers(f"{'change of the' if last else 'the'} half ({slot})", sizes)
        for n, reason in bad.items():
            self.sites.fault(n, f"refused: {reason}")
        return {n: weights for n, weights in halves.items() if n not in bad}

    def mean_of(self, halves: Mapping[int, Weights]) -> Weights:
        """The average of some sites' halves."""
        return self._averaged(list(halves), Weights.stacked_of(halves.values()))

    def _averaged(self, ids: list[int], copies: Weights) -> Weights:
        return AVERAGES.find(self.sites.limits.average)(copies, self.rho(ids), self.shared)

    def unpacked(self, n: int, message: Any, codec: Codec = FP32) -> Weights:
        """A half that a site sent, or with a codec that is not exact how far it moved."""
        like, base = self.like.only(self.state.placement.on_client), self.bases.get(n)
        if codec.exact or base is None:
            return unpack_weights(message, like)
        return Weights.unflat(Differences(base).arrived(unpack_change(message, len(base), codec)), like)

    def forget(self) -> None:
        """What was collected is no longer true."""
        self.collected = None

    def refresh(self) -> list[int]:
        """Give stale sites the averaged half; returns those that took it."""
        stale = sorted(self.stale & self.present)
        if not stale:
            return []
        self.average()
        return self.give(stale)

    def restore(self, t: int) -> None:
        """Sites that kept their half after round ``t`` go on with it; all others are stale."""
        asked = {n: {"cut": self.state.placement.cut, "round_": t} for n in sorted(self.present)}
        answers = self.sites.ask("restore", asked, "client", lambda n, answer: flag(answer["found"], "found"))
        kept = {n for n, found in answers.items() if found}
        last = self.differences.last
        self.stale = self.present - (kept if self.differ or last is not None else set())
        self.shared, self.resumed = self.state.client, t > 0
        self.bases = {} if last is None else dict.fromkeys(kept, last)

    def keep(self, t: int) -> None:
        """Let the sites keep what is their own on their own disks."""
        if self.differ or self.states_differ or not self.sync.exact:
            self.sites.ask("keep", {n: {"round_": t} for n in self.fresh()}, "client", _nothing)

    def drift(self) -> float | None:
        """Mean distance of the halves from their average, if they are equal or were collected."""
        if self.differ and self.collected:
            ids, copies = self.collected
            return copies.drift(self.rho(ids))
        return None if self.differ else 0.0

    def move(
        self, placement: Placement, scheme: Scheme, optimiser: Optimiser, link: CountingLink | None, *, travels: bool
    ) -> None:
        """Another placement; without ``travels`` no site holds a half now. What travels is counted on the link.

        Blocks that move to the clients are sent to each; blocks that move to the server come up from each, unless
        all are equal and hence known here.
        """
        old, fresh = self.state.placement, self.fresh() if travels else []
        come = self.like.only(lambda k: old.on_client(k) and not placement.on_client(k))
        arrived: dict[int, Weights] = {}
        if fresh:
            go = self.state.server.only(placement.on_client)
            rising, falling = go.travelling() > 0, come.travelling() > 0
            blocks = pack_weights(go) if rising else None
            request = {"cut": old.cut, "new_cut": placement.cut, "blocks": blocks, "upload": self.differ}

            def read(n: int, answer: Answer) -> Weights | None:
                return unpack_weights(answer["blocks"], come) if self.differ and falling else None

            answers = self.sites.ask("move", dict.fromkeys(fresh, request), "download" if rising else "upload", read)
            arrived = {n: weights for n, weights in answers.items() if weights is not None}
            if self.differ and falling and not arrived:
                raise NoSites(f"sites: none sent its blocks; {self.sites.why()}")
            self.stale |= set(fresh) - set(answers)
        if self.differ and fresh:
            down, up = self._moved(placement, arrived)
        else:
            down, up = self.state.move(placement, self.rho(range(len(self.sizes))), optimiser)
        self.collected, self.bases = None, {}
        self.differences.moved()
        if not self.differ:
            self._hold(self.fresh())
        if link:
            scheme.moved(link, down, up, range(len(self.sizes)))

    def _moved(self, placement: Placement, arrived: Mapping[int, Weights]) -> tuple[int, int]:
        """Drop what went down from the server half and add the average of what came up."""
        down = self.state.server.only(placement.on_client).travelling()
        self.state.server.drop(placement.on_client)
        up = 0
        if arrived:
            came = Weights.stacked_of(arrived.values()).mean(self.rho(list(arrived)))
            self.state.server.adopt(came)
            up = came.travelling()
        self.state.client = self.like.only(lambda name: False)  # what the sites hold is not known here
        self.state.placement = placement
        return down, up

    def names(self) -> list[str]:
        """Parameters of a client half."""
        return [name for name in self.like.params if self.state.placement.on_client(name)]


def positions(ids: Iterable[int], among: Sequence[int]) -> Tensor:
    """Where some clients are among others."""
    return torch.tensor([list(among).index(n) for n in ids], dtype=torch.long, device="cpu")
