"""Rounds of any scheme with the clients elsewhere: the server's side of the protocol.

The program, the server half, the codecs and the ledger are those of the simulator; what differs is that messages are
packed, travel, and are checked (`remote.wire`), and that sites may fail (`remote.sites`). A site that fails is out for
the rest of the round, and rho is renormalised over the others.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from splitcast.base.config import Config, to_toml
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import torch_seed
from splitcast.cutting.formats import measures
from splitcast.cutting.reassign import period
from splitcast.data.batches import participants
from splitcast.engine.engine import Measured, RoundReport, evaluate, kept_tensors, restore_kept
from splitcast.engine.links import CountingLink
from splitcast.engine.mixed import AnyState, MixedState
from splitcast.engine.party import Kit
from splitcast.engine.state import State, check_sides, started
from splitcast.model.split import Params, SplitModel
from splitcast.remote.clients import RemoteCohort
from splitcast.remote.halves import Halves
from splitcast.remote.link import ServerLink
from splitcast.remote.mixed import AnyHalves, MixedHalves
from splitcast.remote.sites import Limits, NoSites, Sites, Transport
from splitcast.remote.wire import integer
from splitcast.schemes.choices import schemes_by_format
from splitcast.schemes.messages import Ledger
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import make_scheme, placed
from splitcast.training.defence import Defence
from splitcast.training.optimiser import make_optimiser
from splitcast.training.placement import Fleet, Placed, Placement
from splitcast.training.runtime import Runtime
from splitcast.training.task import Task, make_task


class Federation:
    """An engine (`engine.engine.Engine`) whose clients are sites."""

    def __init__(
        self,
        config: Config,
        model: SplitModel,
        classes: int,
        names: Sequence[str],
        transport: Transport,
        limits: Limits,
        *,
        placement: Placed | None = None,
        run: str = "run",
        absent: Sequence[int] = (),
    ) -> None:
        """``names`` are the sites in the order of the client numbers; those in ``absent`` cannot be called."""
        refuse_what_cannot_travel(config, len(names))
        self._scheme, self._formats, self._uplink = make_scheme(config), schemes_by_format(config), ""
        model = self._scheme.fitted(model)
        self.config, self.train, self.model, self.classes = config, config.train, model, classes
        self.task: Task = make_task(config.model.task, classes)
        (theirs, mine), exact = self._scheme.rates, self._scheme.sync.exact
        self.optimiser = make_optimiser(config.train, mine, exact=exact, server=True)
        defence = Defence.of(config.defence, config.train.seed)
        self.kit = Kit(model, self.task, self.optimiser, Runtime.of(config.train), defence)
        placement = (placement or placed(config, self._scheme, model.depth)).check(model)
        self.kit.guard(placement)
        check_sides(config, placement)
        self._absent = list(absent)
        self.sites = Sites(names, transport, limits, set(range(len(names))) - set(absent))
        sizes = self._join(config, run)
        sides = (make_optimiser(config.train, theirs, exact=exact), self.optimiser)
        like, start = (started(model, placement, sides) for _ in range(2))
        self.halves: AnyHalves
        if isinstance(placement, Fleet):
            if sides[0].at_sync != "average":
                raise SplitcastError(f"optimizer_state: {config.train.optimizer_state!r} needs one cut for all sites")
            self.halves = MixedHalves(MixedState.start(start, placement), like, self.sites, sizes, sides[0])
        else:
            self.halves = Halves(State.start(start, placement), like, self.sites, sizes, self._scheme.sync)
            self.halves.states_differ = sides[0].at_sync == "local"

    @property
    def state(self) -> AnyState:
        """Who holds what, the server half, and the client half where it is known."""
        return self.halves.state

    @property
    def scheme(self) -> Scheme:
        """The scheme, as it runs at the present placement."""
        return self._scheme.at(self.state.placement)

    def start(self) -> None:
        """Begin at round 1: the sites forget what an earlier run of the same name left."""
        self.halves.restore(0)

    def resume(self, tensors: Mapping[str, Tensor], about: Mapping[str, str], t: int) -> None:
        self.halves.resume(tensors, about, self._scheme, self.model.depth)
        restore_kept(self._scheme, tensors)
        self.halves.differ = not self.scheme.equal_after(t)
        self.halves.restore(t)

    def place(self, placement: Placed, ledger: Ledger, *, charge: bool = True) -> None:
        assert isinstance(placement, Placement)  # `refuse_what_cannot_travel`
        if placement != self.state.placement:
            link = CountingLink(ledger) if charge else None
            self.halves.move(placement, self._scheme, self.optimiser, link, travels=self._scheme.clients_keep_halves)

    def send_as(self, uplink: str) -> None:
        self._scheme, self._uplink = self._formats[uplink], uplink

    def round(self, t: int, ledger: Ledger | None = None, who: np.ndarray | None = None) -> RoundReport:
        ledger = ledger or Ledger()
        self.optimiser.begin(t)
        self.sites.round = t
        self._rejoin()
        if self._scheme.clients_keep_halves:
            given = self.halves.refresh()
            if not self.scheme.sync.exact:
                self._begin_differences(t, given, ledger)
        self.halves.forget()
        ready = self.halves.fresh() if self._scheme.clients_keep_halves else sorted(self.sites.present)
        who = participants(self.train, len(self.sites.names), t) if who is None else who
        drawn = [int(n) for n in who if n in ready]
        try:
            cohort = self._run(t, drawn or ready, ledger)
        except NoSites:  # those that were drawn are gone: the others take their place
            others = [n for n in ready if n in self.sites.present and n not in self.sites.failures]
            if not others or len(self.sites.present) < self.sites.limits.min_sites:
                raise
            cohort = self._run(t, others, ledger)
        self.halves.resumed = False
        return RoundReport(cohort.loss, cohort.took_part, ledger, Measured(*self.sites.turn_page()))

    def _begin_differences(self, t: int, given: Sequence[int], ledger: Ledger) -> None:
        """Everybody holds the averaged half now, or still what was averaged last. Who comes late is given it whole."""
        assert isinstance(self.halves, Halves)  # else halves travel as they are
        if not self.halves.differ:
            self.halves.differences.begin(self.halves.state.client)
        if t > 1 and not self.halves.resumed:
            CountingLink(ledger).models("down", self.halves.state.client.travelling(), given)

    def _run(self, t: int, ids: Sequence[int], ledger: Ledger) -> RemoteCohort:
        """The program of a round, with these sites."""
        one = self._scheme.one_server
        cohort = RemoteCohort(self.kit, self.halves, t, ids, self.train, ledger, one_server=one)
        link = ServerLink(self.sites, ledger, self.train.seed, self._uplink)
        with self.kit.runtime.fork_rng():
            torch.manual_seed(torch_seed(self.train.seed, "layers", t))
            self.scheme.round(t, cohort, None, link)
        if self._scheme.clients_keep_halves:
            for clients in cohort.parts:
                link.flush(clients)
        cohort.close()
        return cohort

    def evaluate(self, x: Tensor, y: Tensor) -> dict[str, float]:
        try:
            weights = self.averaged()
        except NoSites:
            return {}  # nobody to ask
        runtime, guard = self.kit.runtime, self.kit.guard(self.state.placement)
        with runtime.fork_rng():
            torch.manual_seed(torch_seed(self.train.seed, "defence"))
            return evaluate(self.model, weights, self.task, x, y, runtime, guard=guard)

    def averaged(self) -> Params:
        return self.halves.averaged()

    def drift(self) -> float | None:
        return self.halves.drift()

    def snapshot(self, t: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The averaged client half and the server half; sites whose halves differ keep their own."""
        tensors, about = self.halves.snapshot()
        self.halves.keep(t)
        return tensors | kept_tensors(self._scheme), about

    def _join(self, config: Config, run: str) -> np.ndarray:
        """Tell the sites what is trained; returns how many rows each has, 0 for those that cannot take part."""
        self._about = {"input_shape": list(self.model.input_shape), "classes": self.classes}
        self._about |= {"config": to_toml(config), "run": run, "fingerprint": self.model.fingerprint()}
        for n in sorted(set(range(len(self.sites.names))) - self.sites.present):
            self.sites.failures[n] = "absent: not connected when the job began"
        rows = self._ask_to_join(sorted(self.sites.present))
        self.sites.present &= set(rows)
        self.sites.resting |= dict.fromkeys(set(range(len(self.sites.names))) - set(rows) - set(self._absent), (1, 1))
        if len(rows) < self.sites.limits.min_sites:
            joined = f"{len(rows)} of {len(self.sites.names)} joined, {self.sites.limits.min_sites} needed"
            raise NoSites(f"sites: {joined}; {self.sites.why()}")
        return np.array([rows.get(n, 0) for n in range(len(self.sites.names))])

    def _ask_to_join(self, ids: Sequence[int]) -> dict[int, int]:
        """Rows of those that join."""
        asked = {n: self._about | {"client": n} for n in ids}
        limits = self.sites.limits
        return self.sites.ask(
            "join", asked, "download", lambda n, answer: integer(answer["rows"], "rows", 1, limits.rows_of(n))
        )

    def _rejoin(self) -> None:
        """Ask sites that were left alone for a while; who is back gets the averaged half and takes part again."""
        due = self.sites.due()
        for n, rows in self._ask_to_join(due).items() if due else ():
            self.sites.welcome(n)
            self.halves.welcome(n, rows)


def refuse_what_cannot_travel(config: Config, sites: int) -> None:
    """Settings that only make sense where everything is in one process."""
    if config.split.client_update != "own":
        raise SplitcastError(f"client_update: {config.split.client_update!r} needs the simulator; sites have 'own'")
    if config.train.device != "cpu":
        raise SplitcastError(f"device: {config.train.device!r} needs the simulator; sites have 'cpu'")
    if config.train.dtype != "float32":
        raise SplitcastError(f"dtype: {config.train.dtype!r} never travels; sites have 'float32'")
    if not make_scheme(config).sites:
        raise SplitcastError(f"scheme: {config.split.scheme!r} needs the simulator")
    if config.train.deadline_s:
        raise SplitcastError(
            f"deadline_s: {config.train.deadline_s:g} is simulated; sites have time limits of their own"
        )
    if config.train.wait_for:
        raise SplitcastError("wait_for: needs the simulator; the server of sites waits for all of them")
    if config.train.eval_clients:
        raise SplitcastError("eval_clients: needs the simulator; a site has its half of the model only")
    if period(config.policy.policy):
        raise SplitcastError(f"policy: {config.policy.policy!r} needs the simulator; sites take --cut auto")
    if config.policy.gamma_draws:
        raise SplitcastError("gamma_draws: measuring needs all data in one place; give gamma instead")
    if measures(config.policy):
        raise SplitcastError("uplink_choices: measuring their errors needs all data in one place; give uplink_errors")
    if config.data.clients != sites:
        raise SplitcastError(f"clients: {config.data.clients}, but the deployment has {sites} sites; make them equal")
