"""The ledger against the closed form of every scheme."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splitcast.config import SplitConfig, TrainConfig
from splitcast.engine.simulator import Simulator
from splitcast.schemes.messages import Ledger
from splitcast.schemes.schemes import scheme
from splitcast.split import SplitModel

WIDTHS = [5, 4, 3, 2, 3]  # input and the outputs of four linear blocks
VALUES = {"fp32": 4, "fp16": 2}


def simulator(name, cut, clients, batch, tau, up="fp32", down="fp32", **options):
    torch.manual_seed(0)
    blocks = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    rows = 4 * clients
    x, y = torch.randn(rows, WIDTHS[0]), torch.arange(rows) % 3
    split = SplitConfig(scheme=name, uplink_codec=up, downlink_codec=down, aggregate=options.pop("fraction", 0.5))
    train = TrainConfig(batch=batch, local_steps=tau, **options)
    parts = np.split(np.arange(rows), clients)
    return Simulator(SplitModel(blocks, (WIDTHS[0],)), scheme(split), cut, x, y, parts, train)


def closed_form(name, cut, k, b, tau, up, down, fraction, momentum):
    """Bytes up and down per round for k clients, written out per scheme."""
    d = WIDTHS[cut]
    phi = sum(WIDTHS[i] * WIDTHS[i + 1] + WIDTHS[i + 1] for i in range(cut))
    q = sum(WIDTHS[i] * WIDTHS[i + 1] + WIDTHS[i + 1] for i in range(4))
    model = 4 * (2 if momentum else 1)
    u, g = VALUES[up] * b * d, VALUES[down] * d
    smashed = tau * k * (u + b)  # labels: one byte each
    m = round(fraction * b)
    return {
        "sfl-ga": (smashed, tau * g * b),
        "sfl": (smashed + k * model * phi, tau * k * g * b + model * phi),
        "psl": (smashed, tau * k * g * b),
        "epsl": (smashed, tau * g * (m + k * (b - m))),
        "fl": (k * model * q, model * q),
        "sl": (smashed + k * model * phi, tau * k * g * b + k * model * phi),
    }[name]


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["sfl-ga", "sfl", "psl", "epsl", "fl", "sl"]),
    cut=st.integers(1, 3),
    clients=st.integers(1, 6),
    batch=st.integers(1, 7),
    tau=st.integers(1, 3),
    up=st.sampled_from(["fp32", "fp16"]),
    down=st.sampled_from(["fp32", "fp16"]),
    fraction=st.floats(0, 1),
    participation=st.floats(0.1, 1),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_ledger_is_the_closed_form(name, cut, clients, batch, tau, up, down, fraction, participation, momentum):
    sim = simulator(
        name,
        cut,
        clients,
        batch,
        tau,
        up,
        down,
        fraction=fraction,
        participation=participation,
        momentum=momentum,
    )
    report = sim.round(1)
    k = len(report.clients)
    assert k == max(1, round(participation * clients))
    expected = closed_form(name, cut, k, batch, tau, up, down, fraction, momentum)
    assert (report.ledger.total("up"), report.ledger.total("down")) == expected
    # every byte belongs to one client or was broadcast, and none to an absent client
    apart = {n: report.ledger.of_client(n) for n in range(clients)}
    assert sum(apart.values()) + report.ledger.broadcasts() == report.ledger.total()
    assert all(apart[n] == 0 for n in apart if n not in report.clients)
    assert sum(report.ledger.by_kind().values()) == report.ledger.total()


def test_a_broadcast_counts_once_and_a_unicast_per_client():
    ledger = Ledger()
    ledger.broadcast("gradient", 10, [0, 1, 2])
    ledger.unicast("up", "smashed", 7, [0, 2])
    assert (ledger.total("down"), ledger.total("up"), ledger.of_client(1), ledger.of_client(2)) == (
        10,
        14,
        0,
        7,
    )


def test_dropout_leaves_out_about_its_share_and_never_all():
    sim = simulator("sfl", 1, 6, 2, 1, dropout=0.5)
    counts = [len(sim.round(t).clients) for t in range(1, 201)]
    assert min(counts) >= 1
    assert sum(counts) / 200 == pytest.approx(3, abs=0.3)
    lonely = simulator("sfl", 1, 6, 2, 1, dropout=0.99)
    assert {len(lonely.round(t).clients) for t in range(1, 21)} == {1}
