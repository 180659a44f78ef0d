"""Client halves as differences: against a plain copy, in the simulator and on sites, resumed, moved and joined late."""

import pytest
import torch

from lengths import now
from resuming import resumes_exactly
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.deploy.store import SiteStore
from splitcast.run.parts import make_simulator
from splitcast.schemes.messages import Ledger
from splitcast.schemes.schemes import make_scheme
from splitcast.studies.plan import plan
from splitcast.training.differences import Differences, as_rows, from_rows, row_shape
from splitcast.training.weights import TRAINED, Weights
from test_federation import IMAGES, Wired, at, difference, federation, settings

SYNCED = ["sfl", "sfl-gb", "fl", "psl"]
FORMATS = ["int8", "int4", "transform:5%", "rotated:4", "topk:20%"]


def configured(scheme, sync_codec, **values):
    every = {} if scheme == "fl" else {"sync_every": 2}
    return settings(scheme, **every, sync_codec=sync_codec, **values)


def halves(*values):
    """One parameter, a copy for each client."""
    return Weights({TRAINED: {"0.w": torch.tensor(values)}}, stacked=True)


def test_rows():
    values = torch.arange(600.0)
    assert as_rows(values).shape == row_shape(600) == (3, 200)
    assert row_shape(602) == (3, 201)
    assert torch.equal(from_rows(as_rows(values), 600), values)


def test_what_rounding_leaves_over_is_sent_the_next_time():
    """Two clients and a value each, by hand: fp16 cannot hold 2049, and sends 2048 now and the 1 with what follows."""
    kept, fp16 = Differences(torch.zeros(1)), codec("fp16")
    new, sizes, size = kept.average(halves([2049.0], [0.0]), [0, 1], torch.tensor([0.5, 0.5]), fp16)
    assert new.params["0.w"].tolist() == [1024.0] and sizes == [2, 2] and size == 2
    assert kept.left[0].tolist() == [1.0] and kept.left[1].tolist() == [0.0]
    new, _, _ = kept.average(halves([1027.0], [1024.0]), [0, 1], torch.tensor([0.5, 0.5]), fp16)
    assert new.params["0.w"].tolist() == [1024.0 + (3 + 1) / 2]
    assert kept.left[0].tolist() == [0.0]


def test_over_many_averagings_nothing_is_lost():
    """What clients want to add, in int4, arrives in the long run: the error does not grow with the rounds."""
    rng, kept = torch.Generator().manual_seed(0), Differences(torch.zeros(300))
    wanted, rho, coarse = torch.zeros(300), torch.tensor([0.3, 0.7]), codec("int4")
    for _ in range(100):
        moves = torch.randn(2, 300, generator=rng)
        wanted += rho @ moves
        new, _, _ = kept.average(halves(*(kept.last + moves).tolist()), [0, 1], rho, coarse)
        assert float((new.params["0.w"] - wanted).abs().max()) < 2.0
    assert float(wanted.abs().max()) > 15


@pytest.mark.parametrize("sync_codec", now(FORMATS, *FORMATS[:3]))
@pytest.mark.parametrize("scheme", SYNCED)
def test_sites_do_what_the_simulator_does(scheme, sync_codec):
    links = {} if scheme == "fl" else {"uplink_codec": "fp32", "downlink_codec": "fp32"}
    config = configured(scheme, sync_codec, **links)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 7):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
    assert difference(fed, sim) < (1e-4 if scheme == "fl" else 1e-6)  # a last bit can be a level of int8, of one value
    fp32 = 4 * sim.state.client.travelling()
    model = [m for m in fed.round(8).ledger.messages if m.kind == "model"]
    assert len(model) == 2 and all(m.on_air / (1 if m.broadcast else 3) < 0.5 * fp32 for m in model)


HEADED = ["local-loss", "cse-fsl", "fsl-sage"]


@pytest.mark.parametrize("scheme", ["sfl-ga", "epsl-cut", "splitfed-v2", *HEADED])
def test_so_do_those_of_every_scheme_that_averages(scheme):
    config = settings(scheme, sync_codec="int8", sync_every=2)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 5):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
    assert difference(fed, sim) < (1e-4 if scheme in HEADED else 1e-6)  # as above


@pytest.mark.parametrize("scheme", ["sl", "cpsl"])
def test_who_hands_halves_on_refuses(scheme):
    with pytest.raises(SplitcastError, match=f"sync_codec: 'int8'; {scheme} hands halves on exactly"):
        make_scheme(settings(scheme, sync_codec="int8"))


@pytest.mark.parametrize("sync_codec", ["int4", "transform:5%"])
@pytest.mark.parametrize("stop_at", now([2, 3], 3))
def test_a_run_is_resumed_to_the_bit(tmp_path, sync_codec, stop_at):
    config = configured("sfl", sync_codec, rounds=6, checkpoint_every=1, momentum=0.5)
    resumes_exactly(config, tmp_path / "run", stop_at)


def test_a_site_keeps_what_rounding_left_over_on_its_disk(tmp_path):
    sim = make_simulator(configured("sfl", "int8"), IMAGES)
    for t in (1, 2):
        sim.round(t)
    like = sim.state.client
    kept = Differences(sim.differences.last, {0: sim.differences.left[1]})
    store = SiteStore(tmp_path / "run")
    store.save(like, kept, sim.state.placement, 2)
    weights, found = store.load(sim.state.placement, 2, like)
    assert torch.equal(weights.flat(), like.flat())
    assert torch.equal(found.last, kept.last) and torch.equal(found.left[0], kept.left[0])
    assert float(found.left[0].abs().max()) > 0 and found.left_here is None
    store.save(like, Differences(kept.last[1:], {}), sim.state.placement, 2)
    assert store.load(sim.state.placement, 2, like) is None, "of another half"


def test_a_move_sends_whole_halves_unless_all_are_equal():
    config = configured("sfl", "int8")
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t, cut in enumerate([1, 2, 2, 1, 1, 3], start=1):  # odd rounds leave halves apart
        ours, theirs = Ledger(), Ledger()
        fed.place(at(fed, cut), ours)
        sim.place(at(sim, cut), theirs)
        assert fed.round(t, ours).ledger.messages == sim.round(t, theirs).ledger.messages
        sent = {m.nbytes for m in theirs.messages if m.kind == "model"}
        whole = 4 * sim.state.client.travelling()
        assert sent == ({whole} if t in (2, 4, 6) else set())
    assert difference(fed, sim) < 1e-6


def test_who_missed_a_broadcast_is_given_the_whole_half():
    lost = {"now": False}

    def spoil(method, n, request, answer):
        return None if method == "adopt" and n == 1 and lost["now"] else answer

    config = settings("sfl", sync_codec="int8")
    fed = federation(config, Wired(3, spoil))
    whole = 4 * fed.state.client.travelling()
    fed.round(1)
    lost["now"] = True
    assert list(fed.round(2).measured.failures) == ["site-2"]
    lost["now"] = False
    report = fed.round(3)
    given = [m for m in report.ledger.messages if m.kind == "model" and m.nbytes == whole]
    assert [(m.direction, m.clients) for m in given] == [("down", (1,))]
    assert report.clients == [0, 1, 2]
    held = [site.weights.flat() for site in fed.sites.transport.sites]
    assert all(torch.equal(half, fed.state.client.flat()) for half in held)


def test_plans_count_differences():
    """cnn-small at cut 3: labels and smashed data of 32 values, and a half of 13,500 values."""
    values = 104 + 808 + 32 * 393
    fp32, int4 = (plan(settings("sfl", sync_codec=name), draws=5).cuts[2].up_bits for name in ("fp32", "int4"))
    assert fp32 == 8 * 3 * (8 * 33 * 4 - 8 * 3 + 4 * values)
    assert fp32 - int4 == 8 * 3 * (4 * values - codec("int4").nbytes(row_shape(values)))
