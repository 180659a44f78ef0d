"""Basis broadcast: exact at full rank, the best at any other, within its budget, and counted to the byte."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import splitcast.schemes.basis as basis_module
from lengths import now
from splitcast.base.codec import FP32
from splitcast.base.config import Config, with_values
from splitcast.base.formats import CODECS
from splitcast.base.rounding import RoundingNoise
from splitcast.data.batches import draw_batches
from splitcast.engine import simulator as engine_module
from splitcast.engine.dry import dry_round
from splitcast.engine.links import SimulatedLink
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.schemes.basis import decomposition_flops, factorise, fit
from splitcast.schemes.feedback import Basis, Unicast
from splitcast.schemes.messages import Ledger
from splitcast.schemes.schemes import make_scheme
from splitcast.training.optimiser import make_optimiser
from splitcast.training.task import Classification
from stand_in import StandIn
from test_engine import close, engine, flat, run

EXACT = {"uplink_codec": "fp32", "downlink_codec": "fp32"}
WIDTHS = [5, 4, 3, 2, 3]


def scheme(**values):
    return make_scheme(with_values(Config(), **values))


def gradients(m, d, seed=0, decay=0.7):
    """Rows with a spectrum that falls like decay^k."""
    rng = np.random.default_rng(seed)
    k = min(m, d)
    u, v = np.linalg.qr(rng.normal(size=(m, k)))[0], np.linalg.qr(rng.normal(size=(d, k)))[0]
    return torch.from_numpy(u * decay ** np.arange(k) @ v.T), torch.from_numpy(rng.uniform(0.1, 1, m))


def naive(g, weights, rank):
    """The truncated description by a plain singular value decomposition, row by row."""
    root = weights.sqrt()
    v = torch.linalg.svd(torch.stack([r * row for r, row in zip(root, g, strict=True)])).Vh[:rank]
    rows = torch.stack([sum((row @ direction) * direction for direction in v) for row in g])
    dropped = sum(w * (row - kept).square().sum() for w, row, kept in zip(weights, g, rows, strict=True))
    return rows, float(dropped)


@pytest.mark.parametrize("cut", now([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("tau", now([1, 3], 3))
@pytest.mark.parametrize(("rhythm", "other"), [(1, "sfl"), (0, "psl"), (2, "psl")])
def test_full_rank_is_unicast(cut, tau, rhythm, other):
    split = {"sync_every": rhythm, **EXACT}
    ours = engine("sfl-gb", cut, tau, split={"rank": 999, **split}, momentum=0.5, participation=0.8)
    theirs = engine(other, cut, tau, split=split, momentum=0.5, participation=0.8)
    assert close(run(ours, 4), run(theirs, 4))
    noted = ours.round(5).ledger.metrics()
    assert noted["rank"] == min(6 * 3, np.prod(ours.model.smashed_shape(cut)))
    assert noted["dropped_energy"] < 1e-12
    assert theirs.round(5).ledger.metrics() == {}


@pytest.mark.parametrize(("m", "d"), [(12, 40), (40, 12), (20, 20), (1, 9), (9, 1)])
@pytest.mark.parametrize("rank", [1, 4, 99])
def test_any_rank_is_the_naive_decomposition(m, d, rank):
    g, weights = gradients(m, d)
    found = factorise(g, weights, rank)
    rows, dropped = naive(g, weights, rank)
    assert found.basis.shape == (min(rank, m, d), d)
    assert close(found.coefficients @ found.basis, rows)
    assert found.dropped == pytest.approx(dropped, abs=1e-12)
    assert found.energy == pytest.approx(float((weights[:, None] * g.square()).sum()))
    greatest = found.basis.gather(1, found.basis.abs().argmax(1, keepdim=True))
    assert bool((greatest > 0).all())
    gram = found.basis @ found.basis.T
    assert close(gram, torch.diag(gram.diag()))


def test_weights_make_the_basis_the_best_for_the_weighted_error():
    g, weights = gradients(30, 50)
    weights[0] = 100
    ours = factorise(g, weights, 3)
    plain = factorise(g, torch.ones_like(weights), 3)
    error = (weights[:, None] * (g - plain.coefficients @ plain.basis).square()).sum()
    assert ours.dropped < 0.9 * float(error)


def test_a_step_in_the_simulator_is_a_naive_loop():
    """One averaged round at rank 2 with unequal weights, from per-client modules and a plain SVD."""
    sim = engine("sfl-gb", 2, 1, split={"rank": 2, "sync_every": 1, **EXACT})
    from test_engine import blocks, data

    x, y, parts = data(sim.sizes)
    whole = nn.Sequential(*blocks()).double()
    rho = sim.sizes / sim.sizes.sum()
    drawn = draw_batches(sim.sizes, 6, np.random.default_rng([0, 2, 1, 0]))
    smashed, rows, server_loss = [], [], 0
    for n, part in enumerate(parts):
        out = whole[:2](x[part[drawn[n]]])
        seen = out.detach().requires_grad_()
        loss = nn.functional.cross_entropy(whole[2:](seen), y[part[drawn[n]]])
        rows.append(torch.autograd.grad(loss, seen, retain_graph=True)[0].flatten(1))
        server_loss = server_loss + rho[n] * loss
        smashed.append(out)
    kept, dropped = naive(torch.cat(rows), torch.from_numpy(rho).repeat_interleave(6), 2)
    (
        server_loss + sum(rho[n] * (s.flatten(1) * kept[6 * n : 6 * n + 6]).sum() for n, s in enumerate(smashed))
    ).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in whole.parameters()])
    noted = sim.round(1).ledger.metrics()
    assert close(flat(sim), expected)
    assert noted["gamma"] == pytest.approx(dropped, rel=1e-9)
    assert noted["rank"] == 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.floats(0.05, 1),
    st.floats(1e-6, 0.9),
    st.integers(1, 30),
    st.integers(0, 99),
)
def test_adaptive_rank_is_the_least_within_its_budget(m, d, decay, budget, cap, seed):
    g, weights = gradients(m, d, seed, decay)
    found = factorise(g, weights, cap, budget)
    rank = len(found.basis)
    assert 1 <= rank <= min(cap, m, d)
    if rank < min(cap, m, d):
        assert found.dropped <= budget * found.energy
    if rank > 1:
        assert naive(g, weights, rank - 1)[1] > budget * found.energy * (1 - 1e-9)
    real = (weights[:, None] * (g - found.coefficients @ found.basis).square()).sum()
    assert found.dropped == pytest.approx(float(real), abs=1e-12)


@pytest.mark.parametrize("tau", [1, 3])
def test_adaptive_rank_holds_its_budget_in_every_step_of_a_training(tau):
    sim = engine("sfl-gb", 1, tau, split={"rank": 24, "drop": 0.1, "sync_every": 1, **EXACT})
    ranks = set()
    for t in range(1, 11):
        ledger = sim.round(t).ledger
        shares = ledger.notes["max_dropped_energy"]
        assert len(shares) == len(ledger.notes["rank"]) == len(ledger.notes["gamma"]) == tau
        assert all(share <= 0.1 for share in shares)
        assert ledger.metrics()["dropped_energy"] == max(shares)
        assert ledger.metrics()["gamma"] == pytest.approx(sum(ledger.notes["gamma"]) / tau)
        ranks |= set(ledger.notes["rank"])
    assert max(ranks) < 24


def test_the_range_finder_comes_close_to_the_best_and_knows_what_it_dropped(monkeypatch):
    monkeypatch.setattr(basis_module, "GRAM_SIZE", 10)
    g, weights = gradients(90, 120, decay=0.9)
    found = factorise(g, weights, 8)
    best = naive(g, weights, 8)[1]
    assert best <= found.dropped <= 1.01 * best
    real = (weights[:, None] * (g - found.coefficients @ found.basis).square()).sum()
    assert found.dropped == pytest.approx(float(real), rel=1e-9)
    assert torch.equal(factorise(g, weights, 8).basis, found.basis)
    exact = factorise(g, weights, 90)  # too many directions for it
    assert close(exact.coefficients @ exact.basis, g)


def test_gradients_that_vanish():
    g = torch.zeros(6, 9)
    for budget in (0.0, 0.1):
        found = factorise(g, torch.ones(6), 3, budget)
        assert found.energy == found.dropped == 0
        assert torch.equal(found.coefficients @ found.basis, g)
        assert torch.equal(fit(g, found.basis), torch.zeros(6, len(found.basis)))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_coefficients_fit_the_rounded_basis(name):
    g, weights = gradients(40, 200, decay=0.6)
    g, weights = g.float(), weights.float()
    found = factorise(g, weights, 6)
    rounded = CODECS[name].through(found.basis[None], RoundingNoise(0, 1, 0).of("basis"))[0]
    error = (g - fit(g, rounded) @ rounded).square().sum()
    assert error < (g - found.coefficients @ rounded).square().sum()
    best = torch.linalg.lstsq(rounded.T.double(), g.T.double()).solution.T
    assert float(error) == pytest.approx(float((g - best @ rounded.double()).square().sum()), rel=1e-4)


@example(basis=np.array([[-1.0, 3, 1], [1, 1, 1], [1, 1, 1]]), shrink=1.0, seed=0)  # singular to the last bit
@given(
    basis=arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.integers(-2, 2)),
    shrink=st.sampled_from([1.0, 1e-8]),
    seed=st.integers(0, 99),
)
def test_coefficients_are_the_best_for_directions_that_depend_on_each_other(basis, shrink, seed):
    basis[-1] *= shrink
    g = np.random.default_rng(seed).standard_normal((4, basis.shape[1]))
    even = basis / np.maximum(abs(basis).max(1, keepdims=True), 1e-9)  # the same span
    best = np.linalg.lstsq(even.T, g.T)[0].T @ even
    found = fit(torch.tensor(g, dtype=torch.float32), torch.tensor(basis, dtype=torch.float32)).numpy()
    assert np.abs(found @ basis - best).max() < 1e-4


def test_one_reply_by_hand():
    """Two clients with one sample each, rank 1: the weighted dominant direction, and each one's share of it."""
    grads = torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]])
    ledger = Ledger()
    clients = StandIn([0, 1], torch.tensor([0.5, 0.5]))
    received = Basis(1).reply(grads, clients, SimulatedLink(ledger, seed=0), FP32)
    assert torch.allclose(received, torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]]))
    assert ledger.by_kind() == {"down.basis": 8, "down.coefficients": 8}
    # of 0.5 * 4 + 0.5 * 1 the smaller is dropped
    assert ledger.metrics() == {"rank": 1, "gamma": pytest.approx(0.5), "dropped_energy": pytest.approx(0.5 / 2.5)}


def test_coefficients_in_a_format_of_their_own():
    """Four rows of rank 2, whose coefficients travel in int4: 2 bytes and 2 values of 4 bits a row; nearly the same."""
    rng = torch.Generator().manual_seed(0)
    grads = (torch.randn(4, 2, generator=rng) @ torch.randn(2, 6, generator=rng)).view(2, 2, 6)
    clients, ledger = StandIn([0, 1], torch.tensor([0.5, 0.5])), Ledger()
    received = Basis(2, coefficients=CODECS["int4"]).reply(grads, clients, SimulatedLink(ledger, seed=0), FP32)
    assert ledger.by_kind() == {"down.basis": 2 * 6 * 4, "down.coefficients": 2 * (2 * 2 + 2)}
    assert 0 < float((received - grads).square().sum() / grads.square().sum()) < 0.02


def simulator(cut, clients, batch, tau, **options):
    torch.manual_seed(0)
    blocks = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    rows = 4 * clients
    x, y = torch.randn(rows, WIDTHS[0]), torch.arange(rows) % 3
    parts = np.split(np.arange(rows), clients)
    values = {"scheme": "sfl-gb", "cut": cut, "clients": clients, "batch": batch, "local_steps": tau, **options}
    config = with_values(Config(), **values)
    return Simulator(config, SplitModel(blocks, (WIDTHS[0],)), Classification(3), x, y, parts)


def message(name, rows, row):
    """Bytes of rows x row values."""
    if name.startswith("fp"):
        return int(name[2:]) // 8 * rows * row
    return 2 * rows + -(-int(name[3:]) * rows * row // 8)


@settings(max_examples=60, deadline=None)
@given(
    cut=st.integers(1, 3),
    clients=st.integers(1, 6),
    batch=st.integers(1, 7),
    tau=st.integers(1, 3),
    rank=st.integers(1, 9),
    rhythm=st.integers(0, 3),
    up=st.sampled_from(["auto", *CODECS]),
    down=st.sampled_from(["auto", *CODECS]),
    participation=st.floats(0.1, 1),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_ledger_is_the_closed_form(cut, clients, batch, tau, rank, rhythm, up, down, participation, momentum):
    sim = simulator(
        cut,
        clients,
        batch,
        tau,
        rank=rank,
        sync_every=rhythm,
        uplink_codec=up,
        downlink_codec=down,
        participation=participation,
        momentum=momentum,
    )
    up = ("int8" if cut > 2 else "int2") if up == "auto" else up
    down = "int8" if down == "auto" else down
    d, phi = WIDTHS[cut], sum(WIDTHS[i] * WIDTHS[i + 1] + WIDTHS[i + 1] for i in range(cut))
    for t in range(1, 4):
        ledger = sim.round(t).ledger
        k = max(1, round(participation * clients))
        r = min(rank, k * batch, d)
        model = 4 * phi * (2 if momentum else 1) if rhythm and t % rhythm == 0 else 0
        assert ledger.by_kind() == {
            "up.smashed": tau * k * message(up, batch, d),
            "up.labels": tau * k * batch,
            "down.basis": tau * message(down, r, d),
            "down.coefficients": tau * k * message("fp32" if down == "fp32" else "fp16", batch, r),
            **({"up.model": k * model, "down.model": model} if model else {}),
        }
        dry = dry_round(
            sim.scheme,
            sim.model,
            sim.task,
            sim.state.placement,
            make_optimiser(sim.config.train),
            t,
            ledger.messages[0].clients,
            batch=batch,
            steps=tau,
            everyone=range(clients),
        )
        assert dry.messages == ledger.messages
        assert dry.events == ledger.events


@pytest.mark.parametrize("name", now(["sfl-gb", "sfl", "psl", "epsl-cut", "sfl-ga", "sl"], "sfl-gb", "psl", "sl"))
@pytest.mark.parametrize("tau", now([1, 3], 3))
@pytest.mark.parametrize("budget", ["ACTIVATION_BYTES", "CHUNK_BYTES"])
def test_chunks_change_nothing_with_integers_on_both_links(name, tau, budget, monkeypatch):
    split = {"uplink_codec": "int2", "downlink_codec": "int8", "rank": 3}
    whole = run(engine(name, 2, tau, split=split))
    monkeypatch.setattr(engine_module, budget, 1)
    assert close(run(engine(name, 2, tau, split=split)), whole)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    first, second, other = (engine("sfl-gb", 1, 2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(run(first), run(second))
    assert not torch.equal(run(first), run(other))


def test_integer_uplink_and_downlink_of_psl_are_right_on_average():
    """With one linear block on the client its gradient is linear in what it receives."""
    g = gradients(8, 5)[0].view(2, 4, 5).float()
    rho, link = torch.tensor([0.3, 0.7]), SimulatedLink(Ledger(), seed=0)
    seen = [Unicast().reply(g, StandIn([0, 1], rho, place=(t, 0)), link, CODECS["int4"]) for t in range(3000)]
    step = (g.amax(2) - g.amin(2)).max() / 15
    assert float((torch.stack(seen).mean(0) - g).abs().max()) < 5 * 0.5 * 1.02 * step / 3000**0.5


def test_sync_every_overrides_the_rhythm_of_a_scheme():
    assert scheme(scheme="sfl").sync_every == 1
    assert scheme(scheme="sfl", sync_every=4).sync_every == 4
    assert scheme(scheme="sfl-ga", sync_every=2).sync_every == 2
    assert scheme(scheme="sfl", sync_every=0).sync_every == 0
    assert close(run(engine("sfl", 2, 1, split={"sync_every": 0})), run(engine("psl", 2, 1)))
    assert close(run(engine("psl", 2, 3, split={"sync_every": 1})), run(engine("sfl", 2, 3)))
    ledgers = [engine("psl", 1, 1, split={"sync_every": 2})]
    kinds = [ledgers[0].round(t).ledger.by_kind() for t in (1, 2, 3, 4)]
    assert ["up.model" in kind for kind in kinds] == [False, True, False, True]


def test_sfl_gb_suits_itself_to_the_cut():
    made = [scheme(scheme="sfl-gb", cut=cut) for cut in (1, 2, 3, 4)]
    assert [(one.feedback.rank, one.uplink.name, one.sync_every) for one in made] == [
        (8, "int2", 1),
        (32, "int2", 2),
        (32, "int8", 1),
        (32, "int8", 1),
    ]
    assert scheme(scheme="sfl-gb", cut=3, rank=5).feedback.rank == 5


def test_a_users_codec_overrides_the_schemes_own():
    own, mixed, plain = (
        scheme(**split)
        for split in ({"scheme": "sfl-gb"}, {"scheme": "sfl-gb", "uplink_codec": "fp32"}, {"scheme": "sfl"})
    )
    assert [(s.uplink.name, s.downlink.name) for s in (own, mixed, plain)] == [
        ("int2", "int8"),
        ("fp32", "int8"),
        ("fp32", "fp32"),
    ]


def test_the_last_cut_has_fewer_directions_than_classes():
    """Behind the cut is one linear layer: rows are (p - y) W with sum(p - y) = 0, of rank classes - 1."""
    sim = engine("sfl-gb", 4, 1, split={"rank": 2, "sync_every": 1, **EXACT})
    assert all(sim.round(t).ledger.metrics()["dropped_energy"] < 1e-12 for t in (1, 2, 3))


def test_flops_follow_the_way_that_is_taken():
    assert decomposition_flops(10, 100, 4) == 2 * 10 * 10 * 100 + 9 * 10**3 + 2 * 10 * 100 * 4
    assert decomposition_flops(100, 10, 4) == decomposition_flops(10, 100, 4)
    assert decomposition_flops(1000, 6272, 8) < 0.1 * (2 * 1000**2 * 6272 + 9 * 1000**3)


def test_smashed_data_goes_to_the_nearest_grid_point(monkeypatch):
    """No noise is drawn for it; what is smaller than half a step becomes zero."""
    monkeypatch.setattr("splitcast.base.rounding.stream", lambda *where: pytest.fail("noise was drawn"))
    sim = engine("psl", 1, 1, split={"uplink_codec": "int2", "downlink_codec": "fp32"})
    seen = []
    through = type(sim.scheme.uplink).through
    monkeypatch.setattr(type(sim.scheme.uplink), "through", lambda *args: seen.append(args) or through(*args))
    sim.round(1)
    (args,) = seen
    assert len(args) == 2, "codec and data, no noise"
    row = torch.tensor([[[0.0, 0.16, 0.17, 0.49, 0.51, 1.0]]])
    assert torch.allclose(through(CODECS["int2"], row), torch.tensor([[[0, 0, 1 / 3, 1 / 3, 2 / 3, 1.0]]]))


@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_which_most_vanish(seed):
    """Dead units leave most samples without a gradient; in single precision eigensolvers have failed on such."""
    rng = torch.Generator().manual_seed(seed)
    g = torch.zeros(160, 1024)
    g[torch.randperm(160, generator=rng)[:20]] = 1e-3 * torch.randn(20, 1024, generator=rng)
    found = factorise(g, torch.full((160,), 0.1), rank=8)
    best = torch.linalg.svdvals(g.double())[8:].square().sum() * 0.1
    assert found.dropped == pytest.approx(float(best), rel=1e-4)
    assert torch.isfinite(fit(g, found.basis)).all()
