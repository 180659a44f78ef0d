"""A cut for every site: equal to the simulator, whatever fails."""

import pytest
import torch

from lengths import now
from splitcast.base.config import with_values
from splitcast.base.errors import SplitcastError
from splitcast.remote.federation import Federation
from splitcast.remote.sites import Limits
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from test_federation import IMAGES, Wired, federation, flat, settings

CUTS = (2, 1, 2, 3)


def config_of(scheme, cuts=CUTS, **values):
    return settings(scheme, clients=len(cuts), cut=cuts, **values)


def away(fed, sim):
    return float((flat(fed, fed.averaged()) - flat(sim, sim.averaged())).abs().max())


@pytest.mark.parametrize(
    "name", now(["sfl-ga", "sfl", "psl", "epsl-cut", "local-loss", "sl"], "sfl-ga", "local-loss", "sl")
)
@pytest.mark.parametrize("tau", now([1, 2], 2))
def test_rounds_equal_the_simulator(name, tau):
    config = config_of(name, local_steps=tau, momentum=0.5 if tau == 2 else 0.0, participation=0.8)
    fed, sim = federation(config, Wired(4)), make_simulator(config, IMAGES)
    for t in range(1, 6):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.ledger.events == theirs.ledger.events  # so that the clock says the same
        assert sorted(ours.clients) == sorted(theirs.clients)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert away(fed, sim) < 1e-6
    assert fed.drift() == pytest.approx(sim.drift(), abs=1e-5)


def test_sites_hold_what_their_cuts_say():
    line = Wired(4)
    fed = federation(config_of("sfl"), line)
    fed.round(1)
    for site, cut in zip(line.sites, CUTS, strict=True):
        assert site.placement.cut == cut
        assert set(site.weights.params) == {name for name in fed.model.initial() if int(name.split(".")[0]) < cut}


def dead(n, since=2, until=99):
    def spoil(method, site, request, answer):
        now = request.get("round_", 0)
        if site == n and method in ("begin", "proceed") and since <= now < until:
            raise ValueError("gone")
        return answer

    return spoil


@pytest.mark.parametrize("name", ["sfl", "psl", "sfl-ga"])
def test_a_cohort_without_sites_is_left_out(name):
    """Site 1 is alone at its cut: what is left is a federation of the others, in which it keeps its place."""
    fed = federation(config_of(name), Wired(4, dead(1)), min_sites=2)
    fed.round(1)
    report = fed.round(2)
    assert sorted(report.clients) == [0, 2, 3]
    assert report.measured.failures == {"site-2": "gone"}
    assert flat(fed, fed.averaged()).isfinite().all()


def test_blocks_are_averaged_over_those_that_are_left():
    """Of `sfl`, a round without site 1 is federated averaging in which it has no weight."""
    config = config_of("sfl")
    fed = federation(config, Wired(4, dead(1, since=1)), min_sites=2)
    fed.round(1)
    sim = make_simulator(with_values(config, scheme="fl", cut=1), IMAGES)
    sim.shares = sim.weights = sim.shares * torch.tensor([1.0, 0.0, 1.0, 1.0])
    sim.round(1)
    assert away(fed, sim) < 1e-6


@pytest.mark.parametrize("name", ["psl", "sfl"])
def test_a_site_alone_at_its_cut_comes_back(name):
    fed = federation(config_of(name), Wired(4, dead(1, since=2, until=3)), min_sites=2)
    there = [fed.round(t).clients for t in range(1, 12)]
    assert 1 in there[0] and 1 not in there[1] and 1 in there[-1]
    assert flat(fed, fed.averaged()).isfinite().all()


@pytest.mark.parametrize("name", now(["psl", "sfl", "sl"], "sfl"))
def test_a_resumed_federation_goes_on_exactly(name):
    config = config_of(name, momentum=0.5)
    whole, line = federation(config, Wired(4)), Wired(4)
    first = federation(config, line)
    for t in (1, 2, 3):
        whole.round(t)
        first.round(t)
    kept = first.snapshot(3)
    again = Wired(4)
    again.memories[:] = line.memories
    second = Federation(config, first.model, IMAGES.classes, first.sites.names, again, Limits())
    second.resume(*kept, 3)
    for t in (4, 5):
        assert second.round(t).loss == whole.round(t).loss
    assert torch.equal(flat(second, second.averaged()), flat(whole, whole.averaged()))


def test_the_round_loop_runs_over_sites(tmp_path):
    config = config_of("sfl", rounds=3)
    there = train(config, tmp_path / "sites", dataset=IMAGES, engine=federation(config, Wired(4)))
    here = train(config, dataset=IMAGES)
    assert [r.latency_s for r in there.rounds] == pytest.approx([r.latency_s for r in here.rounds])
    assert there.rounds[-1].test_accuracy == pytest.approx(here.rounds[-1].test_accuracy, abs=0.01)
    assert there.summary["cuts"] == list(CUTS)


@pytest.mark.parametrize(
    ("values", "words"),
    [({"scheme": "cse-fsl"}, "cse-fsl with its settings needs one cut"), ({"cuts": (1, 2)}, "cut: 2 cuts for 4")],
)
def test_what_cannot_be_is_one_line(values, words):
    config = settings(values.get("scheme", "sfl"), clients=4, cut=values.get("cuts", CUTS))
    with pytest.raises(SplitcastError, match=words):
        federation(config, Wired(4))
