"""Calls that are lost between any two messages, sites that lie in any slot, schemes of any shape: rounds go on."""

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.data.batches import participants
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.remote.sites import NoSites, Reply
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.run.selecting import measure_gamma
from splitcast.schemes.schemes import FedAvg, SflGb, SplitLearning
from splitcast.training.task import Classification
from test_federation import IMAGES, Wired, difference, federation, flat, settings
from test_seams import AtHome


class Seldom(FedAvg):
    """FedAvg that averages every second round."""

    sync_every = 2


class TurnsAtHome(SplitLearning):
    """Clients in turn, labels at home."""

    place = AtHome.place
    step = AtHome.step


class Half(SflGb):
    """A subclass keeps its own step at every placement."""

    steps = 0

    def step(self, *parts):
        Half.steps += 1
        super().step(*parts)


def own(name, **values):
    return with_values(settings("sfl", **values), scheme=f"test_losses:{name}")


def at_home(**values):
    return with_values(settings("sfl", **values), scheme="test_seams:AtHome")


class Losing(Wired):
    """Loses calls before they reach the site, and their repetition too; ``lost`` says which."""

    def __init__(self, count, lost):
        super().__init__(count)
        self.lost = lost

    def call(self, method, requests):
        open_ = {n: r for n, r in requests.items() if not self.lost(method, n, r)}
        gone = {n: Reply(None, "lost", 0.0) for n in requests if n not in open_}
        return super().call(method, open_) | gone


@pytest.mark.parametrize("method", ["adopt", "begin", "proceed", "hand_in"])
@pytest.mark.parametrize("scheme", now(["sl", "sfl", "psl", "fl", "sfl-gb"], "sl", "sfl-gb"))
@pytest.mark.parametrize("site", now([0, 2], 2))
def test_a_lost_call_never_ends_the_loop(scheme, method, site, tmp_path):
    config = settings(scheme, rounds=4, local_steps=2)

    def lost(called, n, request):
        return called == method and n == site and fed.sites.round == 2

    fed = federation(config, transport := Losing(3, lambda *_: False))
    transport.lost = lost
    rounds = train(config, tmp_path / "run", engine=fed, dataset=IMAGES).rounds
    assert len(rounds) == 4 and all(np.isfinite(record.loss) for record in rounds)
    assert rounds[3].clients == 3


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("gone", [[1], [0, 2]])
@pytest.mark.parametrize("tau", now([1, 2], 2))
def test_sites_lost_between_the_messages_of_a_step_leave_no_trace(turn, gone, tau):
    def lost(method, n, request):
        return method == "proceed" and n in gone and request["round_"] == 2 and request["turn"] == turn

    def absent(method, n, request):
        return method == "begin" and n in gone and request["round_"] == 2

    config = at_home(local_steps=tau)
    late, never = (federation(config, Losing(3, how)) for how in (lost, absent))
    for t in (1, 2):
        late.round(t)
        never.round(t)
    a, b = (flat(f, f.state.client.params | f.state.server.params) for f in (late, never))
    assert torch.isfinite(a).all()
    if turn == 1 and tau == 1:  # lost before it could contribute anything
        assert torch.allclose(a, b, atol=1e-6)


def test_others_take_the_place_of_a_site_that_is_gone():
    config = settings("psl", participation=0.3)
    fed = federation(config, transport := Losing(3, lambda *_: False))
    first = fed.round(1).clients
    drawn = set(participants(config.train, 3, 2).tolist())
    transport.lost = lambda method, n, request: method == "begin" and n in drawn
    report = fed.round(2)
    assert len(first) == 1 and set(report.clients).isdisjoint(drawn) and report.clients


def test_a_delivery_that_is_lost_at_the_end_does_not_end_the_run():
    config = settings("psl", participation=0.3)
    fed = federation(config, Losing(3, lambda method, n, request: method == "proceed"))
    assert np.isfinite(fed.round(1).loss)


def test_the_only_half_of_a_round_may_be_refused_without_a_traceback():
    def spoil(method, n, request, answer):
        if request.get("round_", 0) < 3 or not isinstance(answer.get("messages"), list):
            return answer
        return answer | {"messages": [m | {"data": b"\xff" * len(m["data"])} for m in answer["messages"]]}

    fed = federation(settings("fl", participation=0.3), Wired(3, spoil))
    fed.round(1)
    fed.round(2)
    with pytest.raises(NoSites, match="site-"):
        fed.round(3)


@pytest.mark.parametrize("name", ["sl", "psl"])
def test_overflow_in_turn_is_the_sites_fault(name):
    def spoil(method, n, request, answer):
        if method != "begin" or n != 0:
            return answer
        first, *rest = answer["messages"]
        huge = np.full(len(first["data"]) // 4, 3e38, np.float32).tobytes()
        return answer | {"messages": [first | {"data": huge}, *rest]}

    report = federation(settings(name), Wired(3, spoil)).round(1)
    assert 0 not in report.clients and list(report.measured.failures) == ["site-1"]
    assert np.isfinite(report.loss)


def test_momentum_is_judged_as_weights_are():
    def spoil(method, n, request, answer):
        if n != 1 or request.get("round_") != 3:
            return answer
        changed = []
        for m in answer["messages"]:
            values = np.frombuffer(m["data"], np.float32).copy()
            values[len(values) // 2 :] = 1e6
            changed.append(m | {"data": values.tobytes()})
        return answer | {"messages": changed}

    fed = federation(settings("fl", momentum=0.9), Wired(3, spoil))
    reports = [fed.round(t) for t in range(1, 5)]
    assert list(reports[2].measured.failures) == ["site-2"]
    assert max(float(v.abs().max()) for v in fed.state.client.slots["opt/momentum"].values()) < 100


def test_a_site_with_an_old_half_takes_no_part():
    fed = federation(settings("sfl"), transport := Losing(3, lambda *_: False))
    fed.round(1)
    transport.lost = lambda method, n, request: method == "adopt" and n == 1
    fed.round(2)
    assert fed.round(3).clients == [0, 2]
    transport.lost = lambda *_: False
    assert fed.round(4).clients == [0, 1, 2]


def test_an_honest_site_is_never_accused_of_being_larger_than_two():
    def small(method, n, request, answer):
        if method != "begin" or n != 0:
            return answer
        first, *rest = answer["messages"]
        tiny = (np.frombuffer(first["data"], np.float32) * 1e-9).tobytes()
        return answer | {"messages": [first | {"data": tiny}, *rest]}

    for name in ("psl", "sl"):
        fed = federation(settings(name, clients=2), Wired(2, small))
        assert all(fed.round(t).measured.failures.keys() <= {"site-1"} for t in range(1, 5))


def test_dead_activations_and_repeated_rows_are_no_crime():
    def dead(input_shape, classes):
        first = nn.Linear(784, 8)
        nn.init.constant_(first.bias, -1e3)
        return [nn.Sequential(nn.Flatten(), first, nn.ReLU()), nn.Linear(8, classes)]

    globals()["dead"] = dead
    config = with_values(settings("sfl"), arch="test_losses:dead", rounds=5)
    fed = federation(config, Wired(3))
    assert all(fed.round(t).clients == [0, 1, 2] for t in range(1, 6))


@pytest.mark.parametrize("config", [own("Seldom"), at_home(sync_every=0), own("TurnsAtHome")])
def test_rounds_of_any_shape_are_those_of_the_simulator(config):
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 5):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.clients == theirs.clients and ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.ledger.by_kind() == theirs.ledger.by_kind()
    assert difference(fed, sim) < 1e-6


def test_a_late_call_is_refused():
    fed = federation(settings("fl"), transport := Wired(2 + 1))
    fed.round(1)
    fed.round(2)
    site = transport.sites[0]
    before = {k: v.clone() for k, v in site.weights.params.items()}
    with pytest.raises(SplitcastError, match="came late"):
        site.begin(call=2, cut=5, round_=1, turn=0, messages=[])
    assert all(torch.equal(v, site.weights.params[k]) for k, v in before.items())


def test_what_an_abandoned_round_gathered_is_forgotten():
    fed = federation(at_home(), transport := Wired(1 + 2))
    fed.round(1)
    site, call = transport.sites[0], fed.sites.calls
    site.begin(call=call + 1, cut=1, round_=2, turn=0, messages=[])
    site.weights.pending = {"4.weight": torch.ones(10, 16)}
    site.begin(call=call + 2, cut=1, round_=3, turn=0, messages=[])
    assert site.weights.pending == {}


class Twice(nn.Module):
    """Two parameters that share one gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(36)), nn.Parameter(torch.zeros(36))

    def forward(self, x):
        return x.flatten(1) + (self.a + self.b)


def test_parameters_that_share_a_gradient_step_alike():
    from test_engine import CLASSES, data

    x, y, parts = data([20, 20, 20, 20])
    made = [Twice(), nn.Linear(36, CLASSES)]
    config = with_values(Config(), scheme="sfl", clients=4, batch=6, lr=0.1, dtype="float64")
    shared, copies = (
        Simulator(c, SplitModel(made, (1, 6, 6)), Classification(CLASSES), x, y, parts)
        for c in (config, with_values(config, sync_every=0))
    )
    for sim in (shared, copies):
        sim.round(1)
    for name in ("0.a", "0.b"):
        expected = copies.state.averaged(copies.weights)[name]
        assert torch.allclose(shared.state.averaged(shared.weights)[name], expected, atol=1e-12)


def test_a_subclass_of_sfl_gb_keeps_its_step():
    Half.steps = 0
    make_simulator(own("Half"), IMAGES).round(1)
    assert Half.steps == 1


def test_clipping_where_a_segment_has_no_parameters():
    def flat_first(input_shape, classes):
        return [nn.Flatten(), nn.Linear(784, classes), nn.Identity()]

    globals()["flat_first"] = flat_first
    for cut in (1, 2):
        config = with_values(settings("psl"), arch="test_losses:flat_first", cut=cut, clip_norm=0.1)
        assert np.isfinite(make_simulator(config, IMAGES).round(1).loss)


def test_the_servers_random_layers_draw_from_the_seed():
    def dropping(input_shape, classes):
        return [nn.Sequential(nn.Flatten(), nn.Linear(784, 8)), nn.Dropout(0.5), nn.Linear(8, classes)]

    globals()["dropping"] = dropping
    config = with_values(settings("psl"), arch="test_losses:dropping")
    first, second = (federation(config, Wired(3)).round(1).loss for _ in range(2))
    assert first == second


def test_gamma_of_three_segments_is_refused_in_one_line():
    config = with_values(at_home(), gamma_draws=1)
    with pytest.raises(SplitcastError, match="two segments"):
        measure_gamma(config, make_simulator(config, IMAGES), IMAGES)


def test_a_schedule_forbids_more_rounds(tmp_path):
    config = with_values(settings("sfl"), schedule="cosine", rounds=2)
    train(config, tmp_path / "run")
    with pytest.raises(SplitcastError, match="rounds"):
        train(with_values(config, rounds=4), tmp_path / "run", resume=True)
