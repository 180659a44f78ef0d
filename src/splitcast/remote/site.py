"""A client's side of the protocol: its rows, its weights, and the scheme's program, run with a server elsewhere.

Every published method is one call of the server and answers with a dictionary, "seconds" being what it took here. What
the server says is checked (`remote.wire`) before anything is done with it. Nothing of the data leaves a site but what
the program sends. How calls travel is none of its business: see `remote.flare`.
"""

import inspect
import secrets
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from splitcast.base.codec import Codec
from splitcast.base.config import Config, from_toml
from splitcast.data.augment import find_augment
from splitcast.engine.party import Group, Kit
from splitcast.model import MOST_CLASSES, MOST_VALUES, make_model
from splitcast.remote.dialogue import Dialogue
from splitcast.remote.program import SiteCohort, SiteLink
from splitcast.remote.scrutiny import Scrutiny
from splitcast.remote.wire import (
    Refused,
    flag,
    integer,
    items,
    pack_weights,
    shown,
    text,
    unpack_change,
    unpack_weights,
)
from splitcast.schemes.choices import schemes_by_format
from splitcast.schemes.schemes import make_scheme
from splitcast.training.defence import Defence
from splitcast.training.differences import Differences
from splitcast.training.optimiser import make_optimiser
from splitcast.training.placement import Placement
from splitcast.training.runtime import Runtime
from splitcast.training.task import fit_targets, make_task
from splitcast.training.weights import Weights

Answer = dict[str, Any]
S = TypeVar("S", bound="Site")
P = ParamSpec("P")

LAST_ROUND = 10**9
MOST_CALLS = 10**12
MOST_CLIENTS = 10**6
MOST_MESSAGES = 100
CONFIG_TEXT = 2**20


class WeightStore(Protocol):
    """Where a site keeps its weights between jobs."""

    def clear(self) -> None:
        """A run begins anew: forget what an earlier one left."""
        ...

    def save(self, weights: Weights, differences: Differences, placement: Placement, round_: int) -> None:
        """Keep the weights after a round, and what is remembered for the next averaging."""
        ...

    def load(self, placement: Placement, round_: int, like: Weights) -> tuple[Weights, Differences] | None:
        """The same after a round, or None if there is nothing for this round and placement."""
        ...


def published(call: Callable[Concatenate[S, P], Answer | None]) -> Callable[Concatenate[S, P], Answer]:
    """One call at a time, with the arguments it takes, in the order of their numbers, and how long it took."""
    takes = inspect.signature(call)

    @wraps(call)
    def measured(site: S, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        started = time.perf_counter()
        try:
            takes.bind(site, *args, **kwargs)
        except TypeError as error:
            raise Refused(f"request: {shown(str(error))}") from None
        number = integer(kwargs.get("call"), "call", 1, MOST_CALLS)
        with site.busy:
            if number < site.last_call and call.__name__ != "join":  # with which a server begins to count
                raise Refused(f"call: number {number} came late, after {site.last_call}")
            answer = call(site, *args, **kwargs) or {}
            site.last_call = number  # one that was refused is none
        return answer | {"seconds": time.perf_counter() - started}

    return measured


class Site:
    """One client."""

    def __init__(
        self, rows: Callable[[Config, int], tuple[Tensor, Tensor]], store: Callable[[str], WeightStore]
    ) -> None:
        """``rows`` gives x and y for (configuration, client number), ``store`` what keeps the weights of a run."""
        self._rows, self._make_store = rows, store
        self.busy = threading.Lock()
        self.secret = secrets.randbits(62)
        self.scrutiny: Scrutiny | None = None
        """of the gradients that the server sends; the owner's choice"""
        self.last_call = 0
        self._dialogue: Dialogue | None = None
        self._answered: tuple[int, int, Answer] = (0, -1, {})
        """round and turn of the last call of the program, and its answer"""
        self.config = Config()
        self.joined = False

    @published
    def join(
        self, call: Any, config: Any, run: Any, client: Any, input_shape: Any, classes: Any, fingerprint: Any = ""
    ) -> Answer:
        """Take part in a run as client number ``client``, with a model of this fingerprint."""
        made = from_toml(text(config, "config", CONFIG_TEXT), "configuration from the server")
        client = integer(client, "client", 0, MOST_CLIENTS)
        classes = integer(classes, "classes", 1, MOST_CLASSES)
        shape = tuple(integer(n, "input_shape", 1, MOST_VALUES) for n in items(input_shape, "input_shape", 8))
        run = text(run, "run")
        x, y = self._rows(made, client)
        if tuple(x.shape[1:]) != shape:  # before a model of that size is made
            raise Refused(f"data: samples here are {tuple(x.shape[1:])}, the model takes {shape}")
        augment = find_augment(made.data.augment)
        scheme, formats, runtime = make_scheme(made), schemes_by_format(made), Runtime.of(made.train)
        optimiser = make_optimiser(made.train, scheme.rates[0], exact=scheme.sync.exact)
        model = scheme.fitted(make_model(made, shape, classes, x.dtype))
        if text(fingerprint, "fingerprint") not in ("", model.fingerprint()):  # frozen weights never travel
            raise Refused(
                f"arch: {made.model.arch} is another model here than on the server, or has other frozen weights"
            )
        task = make_task(made.model.task, classes)
        y = fit_targets(task, y, model.smashed_shape(model.depth), "data")
        kit = Kit(model, task, optimiser, runtime, Defence.of(made.defence, made.train.seed))
        like = Weights.start(model.initial(), optimiser, model.buffers(), model.frozen())
        placement, store = scheme.place(1, model.depth), self._make_store(run)
        self.leave()  # nothing is refused from here on, and so far nothing has changed
        self.client, self.x, self.y, self.model, self.scheme, self.runtime = client, x, y, model, scheme, runtime
        self.optimiser, self.kit, self.like, self.placement, self.store = optimiser, kit, like, placement, store
        self.formats = formats
        self.weights, self.holds, self.differences = like.only(lambda name: False), False, Differences()
        self._adopted = 0
        self.config, self.augment, self.joined = made, augment, True
        return {"rows": len(self.y)}

    @published
    def restore(self, call: Any, cut: Any, round_: Any) -> Answer:
        """Go on with the weights this site kept after a round; round 0 forgets what an earlier run left."""
        placement, round_ = self._placement(cut), integer(round_, "round", 0, LAST_ROUND)
        if round_ == 0:
            self.store.clear()
            return {"found": False}
        found = self.store.load(placement, round_, self._like(placement))
        if found:
            (self.weights, self.differences), self.placement, self.holds = found, placement, True
        return {"found": found is not None}

    @published
    def adopt(self, call: Any, cut: Any, half: Any) -> None:
        """Take weights over from the server."""
        placement, sync = self._placement(cut), self._sync()
        last = self.differences.last
        if not sync.exact and last is not None and isinstance(half, dict) and half.get("format") == sync.name:
            self._expect(cut)
            if call == self._adopted:  # the same call again
                return
            seen = unpack_change(half, len(last), sync)
            self.differences.last = self.differences.arrived(seen)
            self.weights = Weights.unflat(self.differences.last, self._like(placement))
        else:
            self.weights = unpack_weights(half, self._like(placement))
            self.differences.moved()
            self._holds_what_all_do()
        self.placement, self.holds, self._adopted = placement, True, call
        self.leave()

    @published
    def hand_in(self, call: Any) -> Answer:
        """Send this site's weights to the server."""
        self._expect_weights()
        return {"half": pack_weights(self.weights)}

    @published
    def keep(self, call: Any, round_: Any) -> None:
        """Keep these weights on this site's disk."""
        self._expect_weights()
        self.store.save(self.weights, self.differences, self.placement, integer(round_, "round", 1, LAST_ROUND))

    @published
    def begin(self, call: Any, cut: Any, round_: Any, turn: Any, messages: Any, uplink: Any = "") -> Answer:
        """Run the program of a round until it waits for more than these messages; ``uplink``: with smashed data in this
        format, where the configuration has several."""
        self._expect_weights()
        self._expect(cut)
        round_ = integer(round_, "round", 1, LAST_ROUND)
        if (asked := text(uplink, "uplink")) not in (self.formats or ("",)):
            raise Refused(f"uplink: {shown(asked)} is none of the formats of this run")
        if self._dialogue is not None and (round_, turn) == self._answered[:2]:
            return self._answered[2]
        self.leave()
        self.scheme = self.formats.get(asked, self.scheme)
        self.optimiser.begin(round_)
        self.group = Group([self.client], torch.ones(1, device="cpu"), [slice(0, 1)], keep=True, round=round_)
        self.cohort, self._before = SiteCohort(self, self.group), self.weights.clone()
        cohort = self.cohort
        self._dialogue = Dialogue(
            lambda dialogue: self.scheme.at(self.placement).round(round_, cohort, None, SiteLink(dialogue))
        )
        self._answered = (round_, -1, {})
        return self._go_on(turn, messages)

    @published
    def proceed(self, call: Any, round_: Any, turn: Any, messages: Any) -> Answer:
        """Give the program what it waits for, and run it on; a call that is repeated gets the same answer."""
        if self._dialogue is None or self.group.round != integer(round_, "round", 1, LAST_ROUND):
            raise Refused(f"round: {shown(round_)} has not begun here")
        if turn == self._answered[1]:
            return self._answered[2]
        return self._go_on(turn, messages)

    @published
    def move(self, call: Any, cut: Any, new_cut: Any, blocks: Any, upload: Any) -> Answer:
        """Another placement: take the blocks that come, give up those that go, sending them if asked to."""
        self._expect_weights()
        self._expect(cut)
        self.leave()
        old, new = self.placement, self._placement(new_cut)
        come = self.like.only(lambda name: new.on_client(name) and not old.on_client(name))
        go = self.weights.only(lambda name: not new.on_client(name))
        answer = {"blocks": pack_weights(go)} if go.travelling() and flag(upload, "upload") else {}
        if come.travelling():
            self.weights.adopt(unpack_weights(blocks, come))
        self.weights.drop(lambda name: not new.on_client(name))
        self.placement = new
        self.differences.moved()
        if not flag(upload, "upload"):  # the server knows what all hold
            self._holds_what_all_do()
        return answer

    def leave(self) -> None:
        """End the program of an earlier round."""
        if self._dialogue is not None:
            self._dialogue.close()
            self._dialogue = None
        if self.joined:
            self.weights.pending = {}

    def _go_on(self, turn: Any, messages: Any) -> Answer:
        assert self._dialogue is not None
        turn = integer(turn, "turn", self._answered[1] + 1, self._answered[1] + 1)
        given = items(messages, "messages", MOST_MESSAGES)
        over = self._dialogue.ended
        try:
            sent = self._dialogue.go_on(given)
        except BaseException:
            if not over:  # a round that was refused leaves no trace
                self.weights = self._before
            self._dialogue = None
            raise
        self._answered = (self.group.round, turn, {"messages": sent, "loss": self.cohort.loss})
        return self._answered[2]

    def _sync(self) -> Codec:
        return self.scheme.at(self.placement).sync

    def _holds_what_all_do(self) -> None:
        if not self._sync().exact:
            self.differences.begin(self.weights)

    def _placement(self, cut: Any) -> Placement:
        if not self.joined:
            raise Refused("join: comes first")
        return self.scheme.place(min(integer(cut, "cut", 1, self.model.depth), self.model.depth - 1), self.model.depth)

    def _like(self, placement: Placement) -> Weights:
        """What weights look like there; state of the optimiser that is not sent is as at the start, or as it is."""
        like = self.like.only(placement.on_client)
        return like.keeping(self.weights) if self.optimiser.at_sync == "local" else like

    def _expect(self, cut: Any) -> None:
        if self._placement(cut) != self.placement:
            raise Refused(f"cut: the server speaks of {cut}, these weights have {self.placement.cut}")

    def _expect_weights(self) -> None:
        if not self.joined or not self.holds:
            raise Refused("weights: there are none here yet")
