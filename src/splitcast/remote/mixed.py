"""The weights of a training whose clients are elsewhere and hold different blocks (`engine.mixed`): `Halves` for every
cohort of equal placements."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.engine.links import CountingLink
from splitcast.engine.mixed import MixedState, weighted
from splitcast.model.split import Params
from splitcast.remote.halves import Halves
from splitcast.remote.sites import NoSites, Sites
from splitcast.remote.wire import pack_weights
from splitcast.schemes.program import Scheme
from splitcast.training.optimiser import Optimiser
from splitcast.training.placement import Placed
from splitcast.training.weights import Weights


class MixedHalves:
    """Who holds which weights, cohort by cohort."""

    def __init__(
        self, state: MixedState, like: Weights, sites: Sites, sizes: NDArray[np.int64], optimiser: Optimiser
    ) -> None:
        self.state, self.like, self.sites, self.sizes, self.optimiser = state, like, sites, sizes, optimiser
        self.cohorts = [
            Halves(mine, like, sites, sizes, members=ids.tolist())
            for mine, ids in zip(state.states, state.members, strict=True)
        ]
        self._last = self.cohorts[0]
        """whose turn was last, where clients take turns"""

    @property
    def differ(self) -> bool:
        """Whether halves of equal placements differ."""
        return any(cohort.differ for cohort in self.cohorts)

    @differ.setter
    def differ(self, now: bool) -> None:
        for cohort in self.cohorts:
            cohort.differ = now

    @property
    def resumed(self) -> bool:
        """Whether no round was run since the checkpoint."""
        return self.cohorts[0].resumed

    @resumed.setter
    def resumed(self, now: bool) -> None:
        for cohort in self.cohorts:
            cohort.resumed = now

    def forget(self) -> None:
        """What was collected is no longer true."""
        for cohort in self.cohorts:
            cohort.forget()

    def among(self, ids: Sequence[int]) -> list[tuple[Halves, list[int]]]:
        """Those of some sites that have equal placements, cohort by cohort."""
        found = [(cohort, [n for n in ids if n in cohort.members]) for cohort in self.cohorts]
        return [(cohort, some) for cohort, some in found if some]

    def fresh(self) -> list[int]:
        """Sites that hold what they should."""
        return sorted(n for cohort in self.cohorts for n in cohort.fresh())

    def welcome(self, n: int, rows: int) -> None:
        """A site is back."""
        next(cohort for cohort in self.cohorts if n in cohort.members).welcome(n, rows)

    def refresh(self) -> list[int]:
        """Give stale sites the averaged half; where nobody has that, what the others have of it."""
        given = list[int]()
        for cohort in self.cohorts:
            if cohort.differ and cohort.stale & cohort.present and not cohort.fresh() and not cohort.resumed:
                cohort.state.client = self._pieced_together(cohort)
                cohort.differ = False
            given += cohort.refresh()
        return given

    def _pieced_together(self, cohort: Halves) -> Weights:
        """Blocks as other cohorts, or the server for them, have them; else as they were last given to this one."""
        parts = list[tuple[Weights, float]]()
        for other in self.cohorts:
            weight = float(self.sizes[sorted(other.present)].sum())
            if other is not cohort and weight and _reached(other):
                parts += [(other.state.client, weight), (other.state.server, weight)]
        known = weighted(parts) if parts else Weights({})
        return Weights(
            {
                slot: {name: known.slots.get(slot, {}).get(name, value).clone() for name, value in values.items()}
                for slot, values in cohort.shared.slots.items()
            }
        )

    def average(self) -> None:
        """Let every cohort's averaged half be known; where nobody answers, it is the last that was."""
        reached = [_reached(cohort) for cohort in self.cohorts]  # every one is asked
        if not any(reached):
            raise NoSites(f"sites: none sent its half; {self.sites.why()}")

    def averaged(self) -> Params:
        """The whole model, every block averaged over its copies."""
        self.average()
        return self.state.averaged(torch.from_numpy(self.sizes / self.sizes.sum()).float())

    def share(self, came: Sequence[tuple[Halves, Mapping[int, Weights]]]) -> None:
        """Average every block over all copies of it, those of these halves and the server's, and give everybody its
        part."""
        parts = list[tuple[Weights, float]]()
        for cohort, halves in came:
            if halves:
                weight = float(self.sizes[list(halves)].sum())
                parts += [(cohort.mean_of(halves), weight), (cohort.state.server, weight)]
        if not parts:
            raise NoSites(f"sites: none sent a half that can be used; {self.sites.why()}")
        self.state.divide(weighted(parts), self.optimiser)
        for cohort in self.cohorts:
            cohort.shared, cohort.differ = cohort.state.client, False
            cohort.adopted(pack_weights(cohort.state.client), cohort.fresh())

    def join(self, weights: Sequence[tuple[Halves, float]]) -> None:
        """Average the blocks that the server holds for several cohorts, each with its weight."""
        if weights:
            self.state.join([(self.cohorts.index(cohort), weight) for cohort, weight in weights])

    def handed_to(self, n: int) -> Halves:
        """The cohort of a client whose turn it is; all blocks are where its placement has them."""
        whole = Weights({})
        whole.adopt(self._last.state.client)
        whole.adopt(self._last.state.server)
        self.state.divide(whole, self.optimiser)
        self._last = next(cohort for cohort in self.cohorts if n in cohort.members)
        return self._last

    def restore(self, t: int) -> None:
        """Sites that kept their half after round ``t`` go on with it; all others are stale."""
        for cohort in self.cohorts:
            cohort.restore(t)

    def keep(self, t: int) -> None:
        """Let the sites keep halves of their own on their own disks."""
        for cohort in self.cohorts:
            cohort.keep(t)

    def drift(self) -> float | None:
        """Mean distance of the halves from the average of their cohort, if that is known of all."""
        apart = [cohort.drift() for cohort in self.cohorts]
        sizes = [len(cohort.members) for cohort in self.cohorts]
        known = [n * each for n, each in zip(sizes, apart, strict=True) if each is not None]
        return sum(known) / sum(sizes) if len(known) == len(sizes) else None

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Averaged halves and server halves of all cohorts, and what is needed to read them."""
        self.average()
        return self.state.tensors(), self.state.about()

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], scheme: Scheme, depth: int) -> None:
        """The inverse of `snapshot`."""
        self.state.states = MixedState.from_tensors(tensors, self.state.placement, about["copies"], self.like).states
        for cohort, mine in zip(self.cohorts, self.state.states, strict=True):
            cohort.state = mine

    def move(
        self, placement: Placed, scheme: Scheme, optimiser: Optimiser, link: CountingLink | None, *, travels: bool
    ) -> None:
        """None does."""
        raise SplitcastError("cut: with one for every client, none moves")


def _reached(cohort: Halves) -> bool:
    """Whether the averaged half of a cohort is known, or its sites could be asked for it."""
    try:
        cohort.average()
    except NoSites:
        return False
    return True


AnyHalves = Halves | MixedHalves
