"""FedLite's gradient correction: by hand, on sites, and where there is nothing to correct."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from splitcast import SplitModel
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.run.parts import make_simulator
from splitcast.schemes.schemes import make_scheme
from test_auxiliary import blocks, tiny
from test_federation import IMAGES, Wired, difference, federation


def test_clients_correct_what_they_receive_by_what_quantising_changed():
    """FedLite's correction by hand: the gradient at the quantised activations, plus l (z - z') for every sample."""
    weight, lr = 0.3, 0.2
    values = {"scheme": "sfl", "clients": 2, "batch": 15, "lr": lr, "dtype": "float64", "uplink_codec": "fedlite:1,2"}
    found = {}
    for correction in (0.0, weight):
        config = with_values(Config(), **values, gradient_correction=correction)
        sim = make_simulator(config, tiny(), SplitModel(blocks(), (1, 2, 3)))
        assert sim.sizes.tolist() == [15, 15]
        rows = sim.rows(1, 0, np.arange(2))
        halves = []
        for n in range(2):
            whole = nn.Sequential(*blocks()).double()
            z = whole[:1](sim.x[rows[n]])
            coarse = codec("fedlite:1,2").through(z.detach()[None])[0].requires_grad_()
            F.cross_entropy(whole[1:](coarse), sim.y[rows[n]]).backward()
            z.backward(coarse.grad + correction / 15 * (z - coarse).detach())
            halves.append([(p - lr * p.grad).detach() for p in whole[0].parameters()])
        sim.round(1)
        found[correction] = [sum(each) / 2 for each in zip(*halves, strict=True)]
        for ours, hand in zip(sim.state.client.params.values(), found[correction], strict=True):
            assert torch.allclose(ours, hand, rtol=0, atol=1e-12)
    assert not torch.allclose(found[0.0][0], found[weight][0], atol=1e-4)


def test_sites_correct_as_the_simulator_does():
    values = {"scheme": "sfl", "clients": 3, "batch": 8, "arch": "cnn-small", "uplink_codec": "fedlite:49,4"}
    config = with_values(Config(), **values, downlink_codec="int8", gradient_correction=0.5)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    plain = make_simulator(with_values(config, gradient_correction=0.0), IMAGES)
    for t in (1, 2):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages == plain.round(t).ledger.messages
    assert difference(fed, sim) < 1e-5 < 1e-4 < difference(fed, plain)


def test_schemes_without_a_gradient_to_correct_refuse_it():
    for scheme in ("fl", "merge-sfl", "cse-fsl"):
        with pytest.raises(SplitcastError, match=f"gradient_correction: {scheme} has none; choose one of sfl-ga, sfl,"):
            make_scheme(with_values(Config(), scheme=scheme, gradient_correction=0.1))
