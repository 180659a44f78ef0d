"""The protocol between a server and sites, in one process: equal to the simulator, and what faults do to it."""

import dataclasses

import pytest
import torch

from splitcast import data
from splitcast.config import Config, DataConfig, ModelConfig, SplitConfig, TrainConfig, from_toml
from splitcast.engine.federation import Federation
from splitcast.engine.roster import Limits, Reply
from splitcast.engine.site import Site
from splitcast.models import build
from splitcast.run import make_parts, make_simulator
from splitcast.schemes.messages import Ledger
from splitcast.seeds import torch_seed

IMAGES = data.load("mnist-mini")
SCHEMES = ["sfl-ga", "sfl", "psl", "epsl", "sfl-gb", "fl", "sl"]


class Memory:
    """A site's store, in memory."""

    def __init__(self):
        self.kept = {}

    def clear(self):
        self.kept = {}

    def save(self, half, cut, round_):
        clone = [{k: v.clone() for k, v in group.items()} for group in (half.params, half.momentum)]
        self.kept[round_] = (cut, dataclasses.replace(half, params=clone[0], momentum=clone[1]))

    def load(self, cut, round_, like):
        found = self.kept.get(round_)
        return found[1] if found and found[0] == cut else None


def rows(config, client):
    config = from_toml(config)
    part = make_parts(config, IMAGES)[client]
    return IMAGES.train_x[part], IMAGES.train_y[part]


class Wired:
    """Sites in this process; ``spoil`` (method, site, request, answer) stands in for what goes wrong on the way."""

    def __init__(self, count, spoil=None):
        self.memories = [Memory() for _ in range(count)]
        self.sites = [Site(rows, lambda run, n=n: self.memories[n]) for n in range(count)]
        self.spoil = spoil or (lambda method, n, request, answer: answer)
        self.calls = []

    def call(self, method, requests):
        replies = {}
        for n, request in requests.items():
            self.calls.append((method, n))
            try:
                answer = getattr(self.sites[n], method)(**request)
                replies[n] = Reply(self.spoil(method, n, request, answer), "", 0.0)
            except Exception as error:
                replies[n] = Reply(None, str(error), 0.0)
        return replies


def settings(scheme, clients=3, **values):
    train = {k: v for k, v in values.items() if k in TrainConfig.__dataclass_fields__}
    split = {k: v for k, v in values.items() if k in SplitConfig.__dataclass_fields__}
    return Config(
        data=DataConfig(clients=clients, sizes="unequal"),
        model=ModelConfig(arch="cnn-small"),
        split=SplitConfig(scheme=scheme, **split),
        train=TrainConfig(**({"batch": 8, "rounds": 10} | train)),
    )


def federation(config, line, **options):
    model = build(config.model.arch, IMAGES.train_x.shape[1:], IMAGES.classes, torch_seed(config.train.seed, "model"))
    names = [f"site-{n + 1}" for n in range(config.data.clients)]
    made = Federation(config, model, IMAGES.classes, config.split.cut, names, line, Limits(**options))
    made.start()
    return made


def flat(engine, params):
    return torch.cat([params[k].flatten() for k in engine.model.initial()])


def difference(fed, sim):
    ours = fed.halves.average().params | fed.state.server.params
    return float((flat(fed, ours) - flat(sim, sim.state.averaged(sim.weights))).abs().max())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("tau", [1, 3])
def test_ten_rounds_equal_the_simulator(name, tau):
    config = settings(name, local_steps=tau, momentum=0.5 if tau == 3 else 0.0)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 11):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert difference(fed, sim) < 1e-6
    assert fed.drift() == pytest.approx(sim.drift(), abs=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_participation_and_dropout_equal_the_simulator(name):
    config = settings(name, participation=0.7, dropout=0.3, momentum=0.9)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 11):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
    assert difference(fed, sim) < 1e-6


@pytest.mark.parametrize("name", ["sfl-ga", "sfl", "sfl-gb", "sl"])
def test_moving_the_cut_equals_the_simulator(name):
    config = settings(name, momentum=0.5, downlink_codec="fp32")
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t, cut in enumerate([2, 4, 1, 3, 3, 2, 1], start=1):
        ours, theirs = Ledger(), Ledger()
        fed.recut(cut, ours, charge=t > 1)
        sim.recut(cut, theirs, charge=t > 1)
        assert fed.round(t, ours).ledger.messages == sim.round(t, theirs).ledger.messages
    assert difference(fed, sim) < 1e-6
