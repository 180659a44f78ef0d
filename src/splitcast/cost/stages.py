"""A round as a list of stages, folded from the events of its ledger.

In a stage every client works on its own, in this order: it computes, sends, the server computes for it; or the server
computes for all, sends, and the client computes. The stage ends with its slowest client. What cannot come next in this
order begins a new stage. So a local step of SFL-GA, whose events are

    forward on the client, smashed data and labels up, forward and backward on the server,
    the aggregated gradient down, backward on the client,

becomes two stages and takes l_t = max_n {l^F + l^U + l^s} + max_n {l^D + l^B}, as in the paper.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitcast.base.errors import one_of
from splitcast.model.split import SplitModel
from splitcast.schemes.messages import Event, JointWork, Message, Phase, Work
from splitcast.training.placement import Placed, Placement

PAPER_CLIENT_FLOPS = 5.6e6
"""gamma_F = gamma_B of a client per sample, whatever the cut (Section V)."""
PAPER_SERVER_FLOPS = 86.01e6
"""The same of the server."""

WORKLOADS = ("profiled", "paper")

Load = float | tuple[float, ...]
"""One number for all clients of a stage, or one for each."""


@dataclass(frozen=True)
class Stage:
    """What each of ``clients`` does, in this order, before all wait for the slowest."""

    name: str
    clients: tuple[int, ...]
    compute_flops: Load = 0.0
    """on the client, before it sends"""
    uplink_bits: Load = 0
    """the clients share the bandwidth"""
    server_flops: Load = 0.0
    """on the client's share of the server"""
    joint_flops: float = 0.0
    """once for all clients, on the whole server"""
    broadcast_bits: Load = 0
    """over the whole bandwidth, heard by each client at its own rate"""
    unicast_bits: Load = 0
    """the clients share the bandwidth"""
    backward_flops: Load = 0.0
    """on the client, after it received"""

    def total(self, load: str) -> float:
        """A load, summed over the clients."""
        value: Load = getattr(self, load)
        return sum(value) if isinstance(value, tuple) else value * len(self.clients)

    def of(self, load: str, client: int) -> float:
        """A load of one client; 0 for one that has no part in the stage."""
        value: Load = getattr(self, load)
        if client not in self.clients:
            return 0.0
        return value[self.clients.index(client)] if isinstance(value, tuple) else value


Workload = Mapping[tuple[int, Phase], Load]
"""FLOPs of each client in one local step, by segment and phase: a number for all, or one for each of the N."""


def workload(
    model: SplitModel, placed: Placed, batch: int, name: str, multiply_add: int = 2, *, recompute: bool = False
) -> Workload:
    """Counted on the model (`profiled`), or the paper's constants, which are the same for every cut (`paper`).

    A multiply-add of the model counts as so many FLOPs, 2 or 1. Clients that ``recompute`` run forward once more on the
    way back.
    """
    each = {place: _workload(model, place, batch, name, multiply_add, recompute) for place in placed.kinds}
    if isinstance(placed, Placement):
        return each[placed]
    return {key: tuple(each[place][key] for place in placed.placements) for key in each[placed.of(0)]}


def _workload(
    model: SplitModel, placement: Placement, batch: int, name: str, multiply_add: int, recompute: bool
) -> dict[tuple[int, Phase], float]:
    paper = one_of("workload", name, WORKLOADS) == "paper"
    sides = [segment.side for segment in placement.way]
    flops: dict[tuple[int, Phase], float] = {}
    for k, segment in enumerate(placement.segments):
        if paper and not segment.head:  # it has none
            mine = PAPER_CLIENT_FLOPS if segment.side == "client" else PAPER_SERVER_FLOPS
            forward = backward = (
                PAPER_CLIENT_FLOPS + PAPER_SERVER_FLOPS if len(sides) == 1 else mine / sides.count(segment.side)
            )
        else:
            forward, backward = (n * multiply_add / 2 for n in model.flops(segment.start, segment.stop))
        if recompute and segment.side == "client":
            backward += forward
        flops[k, "forward"], flops[k, "backward"] = batch * forward, batch * backward
        flops[k, "both"] = batch * (forward + backward)
    return flops


_BEFORE: dict[str, tuple[str, ...]] = {
    "compute_flops": ("compute_flops",),
    "uplink_bits": ("compute_flops", "uplink_bits"),
    "server_flops": ("compute_flops", "uplink_bits", "server_flops"),
    "joint_flops": ("joint_flops",),
    "broadcast_bits": ("joint_flops", "broadcast_bits"),
    "unicast_bits": ("joint_flops", "unicast_bits"),
    "backward_flops": ("joint_flops", "broadcast_bits", "unicast_bits", "backward_flops"),
}
"""What a stage may hold when a load joins it."""


def fold(events: Iterable[Event], placement: Placed, flops: Workload) -> list[Stage]:
    """The stages of a round; the bits of all stages are the bytes of the ledger.

    >>> from splitcast.schemes.messages import Message, Work
    >>> who = (0, 1)
    >>> events = [Work(0, "forward", who), Message("up", "smashed", 100, who), Work(1, "both", who)]
    >>> events += [Message("down", "gradient", 100, who, broadcast=True), Work(0, "backward", who)]
    >>> flops = {(0, "forward"): 1.0, (0, "backward"): 2.0, (1, "both"): 3.0}
    >>> for stage in fold(events, Placement.split(1, 2), flops):
    ...     print(stage.name, stage.uplink_bits, stage.server_flops, stage.broadcast_bits, stage.backward_flops)
    forward 800 3.0 0 0.0
    feedback 0 0.0 800 2.0
    """
    stages: list[Stage] = []
    unread: list[Message] = []  # messages that came one after the other, which are decoded once all are there
    for event in events:
        if unread and not (isinstance(event, Message) and event.direction == unread[0].direction):
            stages[-1] = _decoded(stages[-1], unread)
            unread = []
        last = stages[-1] if stages else None
        if isinstance(event, Message):
            bits: Load = tuple(8 * n for n in event.nbytes) if isinstance(event.nbytes, tuple) else 8 * event.nbytes
            load = "uplink_bits" if event.direction == "up" else "broadcast_bits" if event.broadcast else "unicast_bits"
            name = _NAMES.get(event.kind, "forward" if event.direction == "up" else "feedback")
        elif isinstance(event, JointWork):
            bits, load, name = event.flops, "joint_flops", "feedback"
        else:
            bits, load, name = _flops(event, flops), _work_load(event, placement, last), "forward"
            name = "feedback" if load == "backward_flops" else name
        who = (event.by or event.clients) if isinstance(event, Work) else event.clients
        if last is None or any(getattr(last, other) for other in _LOADS if other not in _BEFORE[load]):
            stages.append(_with(Stage(name, who), load, bits, who))
        else:
            name = name if name in _NAMES.values() else last.name
            stages[-1] = replace(_with(last, load, bits, who), name=name)
        if isinstance(event, Message) and any(event.coding):
            stages[-1] = _encoded(stages[-1], event)
            unread.append(event)
    if unread:
        stages[-1] = _decoded(stages[-1], unread)
    return stages


def _encoded(stage: Stage, message: Message) -> Stage:
    """Clients encode before they send; the server does one message after the other."""
    if message.direction == "up":
        return _with(stage, "compute_flops", message.coding[0], message.clients)
    times = 1 if message.broadcast else len(message.clients)
    return _with(stage, "joint_flops", times * message.coding[0], message.clients)


def _decoded(stage: Stage, messages: Sequence[Message]) -> Stage:
    """The server decodes for each client, or each client for itself."""
    for message in messages:
        load = "server_flops" if message.direction == "up" else "backward_flops"
        stage = _with(stage, load, message.coding[1], message.clients)
    return stage


_NAMES = {"model": "model", "migration": "re-cut"}
_LOADS = tuple(_BEFORE)


def _flops(event: Work, flops: Workload) -> Load:
    known = flops[event.segment, event.phase]
    if not isinstance(known, tuple) and not isinstance(event.share, tuple):
        return known * event.share
    each = known if isinstance(known, tuple) else dict.fromkeys(event.clients, known)
    return tuple(each[n] * share for n, share in zip(event.clients, event.shares(), strict=True))


def _work_load(event: Work, placement: Placed, last: Stage | None) -> str:
    """Where work belongs: a client computes before it sends, or after it received."""
    if placement.segments[event.segment].side == "server":
        return "server_flops"
    if last is None or event.phase == "forward":
        return "compute_flops"
    if last.broadcast_bits or last.unicast_bits:
        return "backward_flops"
    waited = last.uplink_bits or last.server_flops or last.joint_flops
    return "backward_flops" if waited and event.phase == "backward" else "compute_flops"


def _with(stage: Stage, load: str, value: Load, clients: Sequence[int]) -> Stage:
    """The stage with a load of some clients added."""
    if load == "joint_flops":
        assert not isinstance(value, tuple)
        return replace(stage, joint_flops=stage.joint_flops + value)
    known: Load = getattr(stage, load)
    if tuple(clients) == stage.clients and not isinstance(value, tuple) and not isinstance(known, tuple):
        return _changed(stage, {load: known + value})
    everyone = tuple(dict.fromkeys((*stage.clients, *clients)))
    stage = stage if everyone == stage.clients else _widened(stage, everyone)
    known = getattr(stage, load)
    sizes = dict(zip(clients, value if isinstance(value, tuple) else [value] * len(clients), strict=True))
    each = known if isinstance(known, tuple) else (known,) * len(everyone)
    return _changed(stage, {load: tuple(old + sizes.get(n, 0) for n, old in zip(everyone, each, strict=True))})


def _widened(stage: Stage, everyone: tuple[int, ...]) -> Stage:
    """The stage with further clients, who do nothing in it yet."""
    loads = {
        load: tuple(stage.of(load, n) for n in everyone)
        for load in _LOADS
        if load != "joint_flops" and getattr(stage, load)
    }
    return _changed(stage, {"clients": everyone, **loads})


def _changed(stage: Stage, values: Mapping[str, Any]) -> Stage:
    return replace(stage, **values)
