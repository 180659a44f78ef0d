"""A round as a list of stages: what is sent, from the ledger, and what is computed in between.

In a stage every client works on its own; the stage ends with its slowest client. A local step of a split scheme is
    forward on the client, smashed data and labels up, forward and backward on the server      (one stage)
    what the feedback sends, broadcasts before unicasts, then backward on the client            (one stage each)
so that l_t = max_n {l^F + l^U + l^s} + max_n {l^D + l^B} of the paper is a step of SFL-GA. The stages follow from
the messages alone: a new feedback needs nothing here. Sizes are per client and the same for all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from splitcast.errors import one_of
from splitcast.schemes.codec import Codec
from splitcast.schemes.messages import Ledger, Message
from splitcast.schemes.noise import Draw
from splitcast.schemes.schemes import Scheme
from splitcast.split import SplitModel

PAPER_CLIENT_FLOPS = 5.6e6
"""gamma_F = gamma_B of a client per sample, whatever the cut (Section V)."""
PAPER_SERVER_FLOPS = 86.01e6
"""The same of the server."""


@dataclass(frozen=True)
class Work:
    """FLOPs for one client in one local step."""

    client_forward: float
    client_backward: float
    server: float
    """forward and backward of its server half"""
    feedback: float = 0.0
    """what the feedback computes over all clients' gradients together; averaging them is not counted"""


@dataclass(frozen=True)
class Stage:
    """What each of ``clients`` does, in this order, before all wait for the slowest."""

    name: str
    clients: tuple[int, ...]
    compute_flops: float = 0.0
    """on the client, before it sends"""
    uplink_bits: int = 0
    """the clients share the bandwidth"""
    server_flops: float = 0.0
    """on the client's share of the server"""
    joint_flops: float = 0.0
    """once for all clients, on the whole server"""
    broadcast_bits: int = 0
    """over the whole bandwidth, heard by each client at its own rate"""
    unicast_bits: int = 0
    """the clients share the bandwidth"""
    backward_flops: float = 0.0
    """on the client, after it received"""


def workloads(model: SplitModel, scheme: Scheme, batch: int, workload: str, clients: int = 1) -> Mapping[int, Work]:
    """Work per local step of ``clients`` for every cut; a scheme without a cut has one entry, for the cut V."""
    paper = one_of("workload", workload, ["profiled", "paper"]) == "paper"
    if scheme.whole_model:
        whole = PAPER_CLIENT_FLOPS + PAPER_SERVER_FLOPS
        forward, backward = (whole, whole) if paper else model.whole_flops()
        return {model.depth: Work(batch * forward, batch * backward, 0.0)}
    feedback = {cut: scheme.feedback.flops(clients, (batch, *model.smashed_shape(cut))) for cut in model.cuts}
    if paper:
        constant = Work(batch * PAPER_CLIENT_FLOPS, batch * PAPER_CLIENT_FLOPS, 2 * batch * PAPER_SERVER_FLOPS)
        return {cut: replace(constant, feedback=flops) for cut, flops in feedback.items()}
    return {
        row.cut: Work(
            batch * row.client_forward_flops,
            batch * row.client_backward_flops,
            batch * (row.server_forward_flops + row.server_backward_flops),
            feedback[row.cut],
        )
        for row in model.profile()
    }


def round_stages(
    messages: Sequence[Message], scheme: Scheme, work: Work, clients: Sequence[int], local_steps: int
) -> list[Stage]:
    """The stages of a round with these messages; the bits of all stages are the bytes of the ledger.

    >>> from splitcast.config import SplitConfig
    >>> from splitcast.schemes.schemes import scheme
    >>> sfl_ga = scheme(SplitConfig(scheme="sfl-ga"))
    >>> sent = dry_ledger(sfl_ga, (32, 100), 10, 0, [0, 1], local_steps=1, syncs=False).messages
    >>> for stage in round_stages(sent, sfl_ga, Work(1e6, 1e6, 2e6), [0, 1], 1):
    ...     print(stage.name, stage.uplink_bits, stage.broadcast_bits)
    forward 102656 0
    feedback 0 102400
    """
    stages = [_transfer("re-cut", m, m.clients) for m in messages if m.kind == "migration"]
    views: dict[int, list[Message]] = {n: [] for n in (clients if scheme.sequential else clients[:1])}
    for message in messages:
        if message.kind == "migration":
            continue
        # in a parallel scheme all clients' messages are alike: those of the first tell the round
        for n in message.clients if scheme.sequential else message.clients[:1]:
            if n in views:
                views[n].append(message)
    for n, view in views.items():
        stages += _turn(view, scheme, work, (n,) if scheme.sequential else tuple(clients), local_steps)
    return stages


def _turn(
    messages: Sequence[Message], scheme: Scheme, work: Work, clients: tuple[int, ...], local_steps: int
) -> list[Stage]:
    """The local steps of clients that work side by side, and the exchange of their models."""
    steps: list[list[Message]] = []
    models: list[Stage] = []
    for message in messages:
        if message.kind == "model":
            models.append(_transfer("model", message, clients))
        elif message.kind == "smashed":
            steps.append([message])
        else:
            steps[-1].append(message)
    if scheme.whole_model:
        flops = local_steps * (work.client_forward + work.client_backward)
        upload, *rest = models or [Stage("model", clients)]
        return [replace(upload, compute_flops=flops), *rest]
    trained: list[Stage] = []
    for step in steps:
        up = 8 * sum(m.nbytes for m in step if m.direction == "up")
        trained.append(Stage("forward", clients, work.client_forward, up, work.server))
        trained += _feedback([m for m in step if m.direction == "down"], work, clients)
    if scheme.sequential:  # a client receives the model, trains it, and sends it back
        return [*models[1:], *trained, *models[:1]]
    return trained + models


def _feedback(messages: Iterable[Message], work: Work, clients: tuple[int, ...]) -> list[Stage]:
    """A stage for what is broadcast and one for what is unicast, in the order in which they are sent."""
    stages = []
    for broadcast, group in groupby(messages, key=lambda m: m.broadcast):
        bits = 8 * sum(m.nbytes for m in group)
        stages.append(_down("feedback", clients, bits, broadcast=broadcast))
    stages = stages or [Stage("feedback", clients)]
    stages[0] = replace(stages[0], joint_flops=work.feedback)
    stages[-1] = replace(stages[-1], backward_flops=work.client_backward)
    return stages


def _transfer(name: str, message: Message, clients: tuple[int, ...]) -> Stage:
    if message.direction == "up":
        return Stage(name, clients, uplink_bits=8 * message.nbytes)
    return _down(name, clients, 8 * message.nbytes, broadcast=message.broadcast)


def _down(name: str, clients: tuple[int, ...], bits: int, *, broadcast: bool) -> Stage:
    return Stage(name, clients, broadcast_bits=bits) if broadcast else Stage(name, clients, unicast_bits=bits)


class _SizeOnly:
    """A codec that counts and does not encode."""

    def __init__(self, codec: Codec) -> None:
        self.name, self.exact, self.nbytes = codec.name, codec.exact, codec.nbytes
        self.encode, self.decode = codec.encode, codec.decode

    def through(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        return x


def dry_ledger(
    scheme: Scheme,
    shape: Sequence[int],
    classes: int,
    model_values: int,
    clients: Sequence[int],
    *,
    local_steps: int,
    syncs: bool,
) -> Ledger:
    """What a round would send, without any data: smashed data (b, *d), client halves of ``model_values`` values."""
    ledger, codec = Ledger(), _SizeOnly(scheme.downlink)
    for turn in [[n] for n in clients] if scheme.sequential else [list(clients)]:
        gradients = torch.empty((len(turn), *shape), device="meta")
        for _ in range(0 if scheme.whole_model else local_steps):
            scheme.send_smashed(shape, classes, ledger, turn)
            scheme.feedback.reply(gradients, gradients.new_empty(len(turn)), codec, ledger, turn)
    if scheme.sequential or syncs:
        scheme.send_models(model_values, ledger, clients)
    return ledger
