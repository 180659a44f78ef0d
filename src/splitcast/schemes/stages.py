"""A round as a list of stages: what is sent, from the ledger, and what is computed in between.

In a stage every client works on its own; the stage ends with its slowest client. A local step of a split scheme is
    forward on the client, smashed data and labels up, forward and backward on the server      (one stage)
    what the feedback sends, broadcasts before unicasts, then backward on the client            (one stage each)
so that l_t = max_n {l^F + l^U + l^s} + max_n {l^D + l^B} of the paper is a step of SFL-GA. The stages follow from
the messages alone: a new feedback needs nothing here. Sizes are per client and the same for all of them.
"""

from collections import Counter
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


def workloads(model: SplitModel, scheme: Scheme, batch: int, workload: str) -> Mapping[int, Work]:
    """Work per local step for every cut, without the feedback; a scheme without a cut has one entry, for the cut V."""
    paper = one_of("workload", workload, ["profiled", "paper"]) == "paper"
    if scheme.whole_model:
        whole = PAPER_CLIENT_FLOPS + PAPER_SERVER_FLOPS
        forward, backward = (whole, whole) if paper else model.whole_flops()
        return {model.depth: Work(batch * forward, batch * backward, 0.0)}
    if paper:
        constant = Work(batch * PAPER_CLIENT_FLOPS, batch * PAPER_CLIENT_FLOPS, 2 * batch * PAPER_SERVER_FLOPS)
        return dict.fromkeys(model.cuts, constant)
    return {
        row.cut: Work(
            batch * row.client_forward_flops,
            batch * row.client_backward_flops,
            batch * (row.server_forward_flops + row.server_backward_flops),
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
    stages = [_transfer("re-cut", m) for m in messages if m.kind == "migration"]
    rest = [m for m in messages if m.kind != "migration"]
    if not scheme.sequential:
        return stages + _turn(rest, scheme, work, tuple(clients), local_steps)
    turns: dict[int, list[Message]] = {n: [] for n in clients}
    for message in rest:
        for n in message.clients:
            turns[n].append(replace(message, clients=(n,)))
    for n, mine in turns.items():
        stages += _turn(mine, scheme, work, (n,), local_steps)
    return stages


def _turn(
    messages: Sequence[Message], scheme: Scheme, work: Work, clients: tuple[int, ...], local_steps: int
) -> list[Stage]:
    """The local steps of clients that work side by side, and the exchange of their models."""
    models = [_transfer("model", message) for message in messages if message.kind == "model"]
    if scheme.whole_model:
        flops = local_steps * (work.client_forward + work.client_backward)
        upload, *rest = models or [Stage("model", clients)]
        return [replace(upload, compute_flops=flops), *rest]
    trained: list[Stage] = []
    for step in _steps([message for message in messages if message.kind != "model"]):
        up = 8 * sum(m.nbytes for m in step if m.direction == "up")
        trained.append(Stage("forward", step[0].clients, work.client_forward, up, work.server))
        trained += _feedback([m for m in step if m.direction == "down"], work, step[0].clients)
    if scheme.sequential:  # a client receives the model, trains it, and sends it back
        return [*models[1:], *trained, *models[:1]]
    return trained + models


def _steps(messages: Iterable[Message]) -> list[list[Message]]:
    """The messages of each local step, in which every client sends smashed data once.

    Clients that were taken in chunks have messages of their own; what is alike becomes one message of all of them.
    """
    steps: list[list[Message]] = []
    done: Counter[int] = Counter()
    for message in messages:
        if message.kind == "smashed":
            done.update(message.clients)
        at = done[message.clients[0]] - 1
        if at == len(steps):
            steps.append([])
        for k, other in enumerate(steps[at]):
            if replace(message, clients=other.clients) == other and set(message.clients).isdisjoint(other.clients):
                steps[at][k] = replace(other, clients=other.clients + message.clients)
                break
        else:
            steps[at].append(message)
    return steps


def _feedback(messages: Iterable[Message], work: Work, clients: tuple[int, ...]) -> list[Stage]:
    """A stage for what is broadcast and one for what is unicast, in the order in which they are sent."""
    stages = []
    for broadcast, group in groupby(messages, key=lambda m: m.broadcast):
        together = list(group)
        bits = 8 * sum(m.nbytes for m in together)
        stages.append(_down("feedback", together[0].clients, bits, broadcast=broadcast))
    stages = stages or [Stage("feedback", clients)]
    stages[0] = replace(stages[0], joint_flops=work.feedback)
    stages[-1] = replace(stages[-1], backward_flops=work.client_backward)
    return stages


def _transfer(name: str, message: Message) -> Stage:
    if message.direction == "up":
        return Stage(name, message.clients, uplink_bits=8 * message.nbytes)
    return _down(name, message.clients, 8 * message.nbytes, broadcast=message.broadcast)


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
    everyone: Sequence[int] | None = None,
) -> Ledger:
    """What a round would send, without any data: smashed data (b, *d), client halves of ``model_values`` values.

    ``everyone``, if more than ``clients`` take part in the training, hears the averaged half.
    """
    ledger, codec = Ledger(), _SizeOnly(scheme.downlink)
    for turn in [[n] for n in clients] if scheme.sequential else [list(clients)]:
        gradients = torch.empty((len(turn), *shape), device="meta")
        for _ in range(0 if scheme.whole_model else local_steps):
            scheme.send_smashed(shape, classes, ledger, turn)
            scheme.feedback.reply(gradients, gradients.new_empty(len(turn)), codec, ledger, turn)
    if scheme.sequential or syncs:
        scheme.send_models(model_values, ledger, clients, clients if everyone is None else everyone)
    return ledger
