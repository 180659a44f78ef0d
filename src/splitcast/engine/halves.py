"""Both halves of the model when the client halves are on sites elsewhere.

Either all sites hold the same half, which is then known here too (`state.client`), or their halves ``differ``, and the
average has to be collected. A site whose half is not what the protocol says (a new one, one that missed an averaging)
is stale until it has been given the averaged half.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.engine.roster import NoSites, Roster
from splitcast.engine.state import Half, State
from splitcast.engine.wire import opened_params, sealed_params
from splitcast.schemes.messages import Ledger
from splitcast.split import Params, block_of


class Halves:
    """Who holds which weights."""

    def __init__(self, state: State, like: Params, roster: Roster, sizes: NDArray[np.int64], *, momentum: bool) -> None:
        self.state, self.like, self.roster, self.sizes = state, like, roster, sizes
        self.momentum = momentum
        self.differ = False
        self.stale = set(roster.present)
        self.collected: tuple[list[int], Half] | None = None
        """the halves of some sites after the last round, if they were asked for"""

    def rho(self, ids: Sequence[int]) -> Tensor:
        """rho^n = D^n / D over some of the clients."""
        sizes = self.sizes[list(ids)]
        return torch.from_numpy(sizes / sizes.sum()).float()

    def fresh(self) -> list[int]:
        """Sites that hold what they should."""
        return sorted(self.roster.present - self.stale)

    def average(self) -> Half:
        """The averaged half: known, or collected from the sites; that of the checkpoint if no site has one."""
        if not self.differ:
            return self.state.client
        if self.collected is None:
            halves = self.hand_in(self.fresh())
            if not halves and self._names(0, self.state.cut) and not self.state.client.params:
                raise NoSites(f"sites: none sent its half; {self.roster.why()}")
            if not halves:
                return self.state.client
            self.collected = list(halves), stacked(halves.values())
        ids, copies = self.collected
        self.state.client = copies.mean(self.rho(ids))
        return self.state.client

    def average_among(self, ids: Sequence[int]) -> list[int]:
        """The averaged half of some becomes everybody's; returns who sent one."""
        halves = self.hand_in(ids)
        if not halves:
            raise NoSites(f"sites: none sent its half; {self.roster.why()}")
        self.stale |= set(ids) - set(halves)
        self.share(halves)
        return list(halves)

    def share(self, halves: Mapping[int, Half]) -> None:
        """Average these halves and give the average to everybody."""
        self.state.client, self.differ = stacked(halves.values()).mean(self.rho(list(halves))), False
        self.give(self.fresh())

    def give(self, ids: Sequence[int]) -> list[int]:
        """Send `state.client` to some sites; returns those that took it."""
        half = sealed_params((self.state.client.params, self.state.client.momentum), self._names(0, self.state.cut))
        taken = self.roster.ask("adopt", {n: {"cut": self.state.cut, "half": half} for n in ids}, "download")
        self.stale = (self.stale | set(ids)) - set(taken)
        return list(taken)

    def hand_in(self, ids: Sequence[int]) -> dict[int, Half]:
        """The halves of some sites."""
        answers = self.roster.ask("hand_in", {n: {} for n in ids}, "upload")
        return self.roster.read(answers, lambda answer: self.opened(answer["half"]))

    def opened(self, message: Any) -> Half:
        """A half that a site sent."""
        names = self._names(0, self.state.cut)
        return opened_params(message, "half", names, self.like, momentum=self.momentum)

    def refresh(self) -> None:
        """Give stale sites the averaged half."""
        stale = sorted(self.stale & self.roster.present)
        if stale:
            self.average()
            self.give(stale)

    def restore(self, t: int) -> None:
        """Sites that kept their half after round ``t`` go on with it; all others are stale."""
        asked = {n: {"cut": self.state.cut, "round_": t} for n in self.roster.present}
        answers = self.roster.ask("restore", asked, "client")
        kept = {n for n, answer in answers.items() if answer.get("found") is True}
        self.stale = self.roster.present - (kept if self.differ else set())

    def keep(self, t: int) -> None:
        """Let the sites keep halves of their own on their own disks."""
        if self.differ:
            self.roster.ask("keep", {n: {"round_": t} for n in self.fresh()}, "client")

    def drift(self) -> float | None:
        """Mean distance of the halves from their average, if they are equal or were collected."""
        if self.differ and self.collected:
            ids, copies = self.collected
            return copies.drift(self.rho(ids))
        return None if self.differ else 0.0

    def recut(self, cut: int, ledger: Ledger, *, charge: bool, travels: bool) -> None:
        """Move the cut; without ``travels`` no site holds a half now.

        Blocks that move to the clients are sent to each; blocks that move to the server come up from each, unless
        all are equal and hence known here.
        """
        old, fresh = self.state.cut, self.fresh() if travels else []
        arrived: dict[int, Half] = {}
        if fresh:
            rising = cut > old
            names = self._names(min(old, cut), max(old, cut))
            blocks = sealed_params((self.state.server.params, self.state.server.momentum), names) if rising else None
            asked = {n: {"cut": old, "new_cut": cut, "blocks": blocks, "upload": self.differ} for n in fresh}
            answers = self.roster.ask("recut", asked, "download" if rising else "upload")
            moved = set(answers)
            if self.differ and not rising:
                arrived = self.roster.read(
                    answers, lambda a: opened_params(a["blocks"], "blocks", names, self.like, momentum=self.momentum)
                )
                moved = set(arrived)
                if not arrived:
                    raise NoSites(f"sites: none sent its blocks; {self.roster.why()}")
            self.stale |= set(fresh) - moved
        if self.differ and fresh:
            down, up = self._moved(cut, arrived)
        else:
            down, up = self.state.recut(cut, self.rho(range(len(self.sizes))))
        self.collected = None
        if charge and travels:
            everyone = range(len(self.sizes))
            ledger.broadcast("migration", 4 * down, everyone)
            ledger.unicast("up", "migration", 4 * up, everyone)

    def _moved(self, cut: int, arrived: Mapping[int, Half]) -> tuple[int, int]:
        """Drop what went down from the server half and add the average of what came up."""
        came = stacked(arrived.values()).mean(self.rho(list(arrived))) if arrived else Half({})
        down = up = 0
        server = self.state.server
        for mine, theirs in ((server.params, came.params), (server.momentum, came.momentum)):
            for name in [k for k in mine if block_of(k) < cut]:
                down += mine.pop(name).numel()
            mine.update(theirs)
            up += sum(value.numel() for value in theirs.values())
        self.state.client, self.state.cut = Half({}), cut  # what the sites hold is not known here
        return down, up

    def _names(self, start: int, stop: int) -> list[str]:
        return [name for name in self.like if start <= block_of(name) < stop]


def stacked(halves: Iterable[Half]) -> Half:
    """Shared halves as one stacked half."""
    ones = list(halves)
    return Half(_stack([half.params for half in ones]), _stack([half.momentum for half in ones]), stacked=True)


def _stack(groups: Sequence[Params]) -> Params:
    return {name: torch.stack([group[name] for group in groups]) for name in groups[0]}
