"""Formats that send some of the values: nothing comes back for the others (the chain rule), by hand and on the air."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from splitcast import SplitModel
from splitcast.base.comparators.splitfc import _chances
from splitcast.base.config import Config, with_values
from splitcast.base.formats import codec
from splitcast.base.rounding import RoundingNoise
from splitcast.run.parts import make_simulator
from splitcast.studies.plan import scenario_of
from test_auxiliary import blocks, tiny

LR = 0.2


def simulator(**values):
    config = with_values(Config(), clients=2, batch=15, lr=LR, dtype="float64", **values)
    return make_simulator(config, tiny(), SplitModel(blocks(), (1, 2, 3)))


@pytest.mark.parametrize("name", ["topk:40%", "randtopk:40%", "splitfc:20/2"])
def test_clients_pull_the_gradients_of_what_they_sent_back(name):
    sim, form = simulator(scheme="psl", uplink_codec=name), codec(name)
    rows = sim.rows(1, 0, np.arange(2))
    halves = []
    for n in range(2):
        whole = nn.Sequential(*blocks()).double()
        z = whole[:1](sim.x[rows[n]])
        payload = form.encode(z.detach(), RoundingNoise(0, 1, 0).of("smashed", [n], always=True))
        seen = form.decode(payload, z.shape).double().requires_grad_()
        F.cross_entropy(whole[1:](seen), sim.y[rows[n]]).backward()
        sent = (seen != 0).double()
        if name.startswith("splitfc"):
            chance = torch.from_numpy(_chances(z.detach().flatten(1).numpy(), z.shape, form.kept(z[0].numel())))
            sent = (sent.amax(0).flatten() / chance).view(z.shape[1:]).expand_as(z)
        assert 0 < int((sent == 0).sum()) < sent.numel()
        z.backward(seen.grad * sent)
        halves.append([(p - LR * p.grad).detach() for p in whole[0].parameters()])
    sim.round(1)
    for ours, *hand in zip(sim.state.client.params.values(), *halves, strict=True):
        assert torch.allclose(ours, torch.stack(hand), rtol=0, atol=1e-7)


def test_gradients_travel_without_places_as_plans_expect():
    """Of 5 values of a sample two are sent: 15 samples of 8 bytes come back."""
    sim = simulator(scheme="psl", uplink_codec="topk:40%")
    down = [message for message in sim.round(1).ledger.messages if message.kind == "gradient"]
    planned = scenario_of(sim.config, sim.model).dry(sim.state.placement, 1).messages
    assert [message.nbytes for message in down] == [15 * 2 * 4]
    assert down[0].nbytes in [message.nbytes for message in planned if message.kind == "gradient"]


def test_all_values_are_training_without_a_format():
    plain, sparse = simulator(scheme="sfl", uplink_codec="fp32"), simulator(scheme="sfl", uplink_codec="topk:100%")
    for t in (1, 2):
        plain.round(t), sparse.round(t)
    for a, b in zip(plain.state.client.params.values(), sparse.state.client.params.values(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


def test_an_aggregated_gradient_is_one_for_all_whatever_each_sent():
    sim = simulator(scheme="sfl-ga", uplink_codec="topk:40%", downlink_codec="fp32")
    (down,) = [message for message in sim.round(1).ledger.messages if message.kind == "gradient"]
    assert down.broadcast and down.nbytes == 15 * 5 * 4
