"""The bounds along real runs on quadratics, where every constant is known, and the estimators against slow loops."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream, torch_seed
from splitcast.data.batches import draw_batches
from splitcast.engine.simulator import Simulator
from splitcast.model.split import SplitModel
from splitcast.schemes.schemes import make_scheme
from splitcast.theory import (
    Assumptions,
    Scalability,
    estimate_gamma,
    estimate_heterogeneity,
    estimate_smoothness,
    estimate_variance,
    full_batch_gamma,
    isotonic,
    largest_lr,
    lemma1,
    monotone,
    theorem1,
)
from splitcast.theory.probe import Watcher, probe, vectors
from splitcast.training.placement import Placement
from splitcast.training.task import Classification

L, HALF = 2.0, 2  # smoothness, coordinates on the client


class Quadratics:
    """F^n(w) = 1/2 sum_d h^n_d (w_d - c^n_d)^2, trained by local steps whose noise and error are known exactly.

    The gradient of the client half is off by a vector of squared length ``gamma`` that points uphill, and noise has
    variance ``variance``, drawn per client or once for all of them (``common``). 300 replicas stand for E.
    """

    def __init__(self, clients, *, spread=0.0, opposed=False, gamma=0.0, variance=0.0, common=False, unequal=False):
        rng = self.rng = np.random.default_rng(0)
        rho = np.arange(1.0, clients + 1) if unequal else np.ones(clients)
        self.rho = rho / rho.sum()
        self.curve = np.tile(np.linspace(0.2, 1.0, 4), (clients, 1))
        self.centre = np.zeros((clients, 4))
        if spread:
            self.curve = rng.uniform(0.1, 1.0, (clients, 4))
            self.centre = spread * rng.normal(size=(clients, 4))
        if opposed:  # every other client is all but linear and pulls the other way: local steps hurt most
            self.curve[::2], self.curve[1::2] = 1.0, 0.01
            self.centre[::2], self.centre[1::2] = 1.0, -100.0
        self.curve *= L / self.curve.max()
        self.gamma, self.variance, self.common = gamma, variance, common
        total = self.rho @ self.curve
        self.best = self.rho @ (self.curve * self.centre) / total

    def loss(self, w):
        return np.einsum("n,nd,rnd->r", self.rho, self.curve, (w[:, None] - self.centre) ** 2) / 2

    def gradient(self, w):
        """Global gradient (R, 4) at w (R, 4)."""
        return np.einsum("n,nd,rnd->rd", self.rho, self.curve, w[:, None] - self.centre)

    def heterogeneity(self, w):
        local = self.curve * (w[:, None] - self.centre)
        return float((self.rho * ((local - self.gradient(w)[:, None]) ** 2).sum(-1)).sum(-1).max())

    def round(self, w, lr, steps):
        local = np.repeat(w[:, None], len(self.rho), axis=1)
        for _ in range(steps):
            grads = self.curve * (local - self.centre)
            uphill = np.einsum("n,rnd->rd", self.rho, grads)[:, :HALF]
            uphill /= np.maximum(np.linalg.norm(uphill, axis=1, keepdims=True), 1e-300)
            noise = self.rng.normal(0, math.sqrt(self.variance / 4), (len(w), 1 if self.common else len(self.rho), 4))
            off = np.zeros_like(local)
            off[:, :, :HALF] -= math.sqrt(self.gamma) * uphill[:, None]
            local = local - lr * (grads + off + noise)
        return np.einsum("n,rnd->rd", self.rho, local)

    def assumptions(self, zeta=0.0):
        if self.common:
            return Assumptions(L, self.variance, self.variance, zeta)
        return Assumptions.independent(L, self.variance, self.rho, zeta)

    def run(self, start, lr, steps, rounds):
        """Average of ||grad F||^2, the largest zeta^2, and F(w_1), F(w_T) above the minimum."""
        w = np.tile(np.asarray(start, dtype=float), (300, 1))
        squares, zeta, losses = [], 0.0, []
        for _ in range(rounds):
            squares.append((self.gradient(w) ** 2).sum(1).mean())
            losses.append(self.loss(w).mean())
            zeta = max(zeta, self.heterogeneity(w))
            w = self.round(w, lr, steps)
        least = self.loss(self.best[None])[0]
        return np.mean(squares), zeta, max(losses[0] - least, 0.0), losses[-1] - least


@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize("clients", [1, 4, 20])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_theorem_1_holds_along_a_run_and_is_not_vacuous(steps, clients, fraction):
    problem = Quadratics(clients, spread=0.5, gamma=0.3, variance=2.0, unequal=True)
    lr, rounds = fraction * largest_lr(L, steps), 60
    average, zeta, gap, _ = problem.run([2.0, -1.0, 1.5, 1.0], lr, steps, rounds)
    bound = theorem1(problem.assumptions(zeta), lr=lr, steps=steps, rounds=rounds, gap=gap, gamma=0.3)
    assert average <= bound.total <= 10 * average


@pytest.mark.parametrize(
    ("effect", "problem", "start", "steps"),
    [
        ("initialisation", {}, [3.0, 3.0, 3.0, 3.0], 1),
        ("initialisation", {}, [3.0, 3.0, 3.0, 3.0], 5),
        ("cutting_point", {"gamma": 1.0}, [0.1] * 4, 1),
        ("cutting_point", {"gamma": 1.0}, [0.1] * 4, 5),
        ("gradient_variance", {"variance": 1.0}, [0.0] * 4, 1),
        ("gradient_variance", {"variance": 1.0, "common": True}, [0.0] * 4, 1),
        ("gradient_variance", {"variance": 1.0, "common": True}, [0.0] * 4, 5),
        ("heterogeneity", {"opposed": True}, "best", 5),
    ],
)
def test_every_effect_of_theorem_1_is_needed(effect, problem, start, steps):
    """With one source of error alone, its term bounds the average gradient, and nothing else could."""
    quadratics = Quadratics(5, **problem)
    lr = largest_lr(L, steps)
    average, zeta, gap, _ = quadratics.run(quadratics.best if start == "best" else start, lr, steps, 200)
    bound = theorem1(
        quadratics.assumptions(zeta), lr=lr, steps=steps, rounds=200, gap=gap, gamma=problem.get("gamma", 0.0)
    )
    assert average <= bound.total
    assert bound.total - getattr(bound, effect) < average / 10
    assert bound.total <= average * (500 if effect == "heterogeneity" else 20)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("clients", [1, 6])
def test_lemma_1_holds_in_every_round(steps, clients):
    problem = Quadratics(clients, spread=0.5, gamma=0.2, variance=1.0)
    lr = largest_lr(L, steps)
    point = np.array([[2.0, -1.0, 1.5, 1.0]])
    for _ in range(15):
        w = np.tile(point, (4000, 1))
        change = problem.round(w, lr, steps)
        gained = (problem.loss(change) - problem.loss(w)).mean()
        gradient = (problem.gradient(point) ** 2).sum()
        # zeta^2 is needed at the start of the round only
        known = problem.assumptions(problem.heterogeneity(point))
        assert gained <= lemma1(known, lr=lr, steps=steps, gradient=gradient, gamma=0.2).total
        point = change[:1]


def test_constants_by_hand():
    known = Assumptions(smoothness=2.0, variance=0.5, mean_variance=0.1, heterogeneity=0.2)  # A = 0.18
    bound = theorem1(known, lr=0.05, steps=3, rounds=4, gap=3.0, gamma=[1.0, 1.0, 2.0, 4.0])
    assert bound.initialisation == pytest.approx(20.0)
    assert bound.cutting_point == pytest.approx(4.9 * 2)
    assert bound.gradient_variance == pytest.approx(0.04 + 0.05)
    assert bound.heterogeneity == pytest.approx(0.18)
    assert bound.total == pytest.approx(20 + 9.8 + 0.09 + 0.18)
    printed = theorem1(known, lr=0.05, steps=3, rounds=4, gap=3.0, gamma=2.0, as_printed=True)
    assert printed.total == pytest.approx(20 + 8 + 0.09)
    change = lemma1(known, lr=0.05, steps=3, gradient=10.0, gamma=2.0)
    assert change.descent == pytest.approx(-0.375)
    assert change.cutting_point == pytest.approx(0.0375 * 9.8)
    assert change.gradient_variance == pytest.approx(0.0375 * 0.09)
    assert change.heterogeneity == pytest.approx(0.0375 * 0.18)
    assert change.total == pytest.approx(0.0375 * (9.8 + 0.09 + 0.18 - 10))
    printed_change = lemma1(known, lr=0.05, steps=3, gradient=10.0, gamma=2.0, as_printed=True)
    assert printed_change.total == pytest.approx(0.0375 * (8 + 0.09 - 10))


class TestThePrintedTheorem:
    """Runs within its stated condition that break it."""

    def test_the_gap_at_the_end_is_no_bound(self):
        problem = Quadratics(3)
        lr = largest_lr(L, 2)
        average, _, first, last = problem.run([3.0] * 4, lr, 2, 200)
        options = {"lr": lr, "steps": 2, "rounds": 200, "gamma": 0.0}
        assert theorem1(problem.assumptions(), gap=last, **options, as_printed=True).total < average / 10
        assert average <= theorem1(problem.assumptions(), gap=first, **options).total

    def test_one_local_step_needs_a_limit_on_lr(self):
        problem = Quadratics(3)
        average, _, gap, _ = problem.run([1.0] * 4, 2.5 / L, 1, 30)
        options = {"lr": 2.5 / L, "steps": 1, "rounds": 30, "gap": gap, "gamma": 0.0}
        assert theorem1(problem.assumptions(), **options, as_printed=True).total < average
        with pytest.raises(SplitcastError, match=re.escape("choose at most 0.25")):
            theorem1(problem.assumptions(), **options)

    def test_clients_that_differ_are_not_covered(self):
        problem = Quadratics(4, opposed=True)
        lr = largest_lr(L, 5)
        average, zeta, gap, _ = problem.run(problem.best, lr, 5, 100)
        options = {"lr": lr, "steps": 5, "rounds": 100, "gap": gap, "gamma": 0.0}
        assert theorem1(problem.assumptions(), **options, as_printed=True).total < average / 10
        assert average <= theorem1(problem.assumptions(zeta), **options).total

    def test_noise_that_clients_share_does_not_average_out(self):
        problem = Quadratics(100, variance=1.0, common=True)
        average, _, gap, _ = problem.run([0.0] * 4, largest_lr(L, 1), 1, 100)
        options = {"lr": largest_lr(L, 1), "steps": 1, "rounds": 100, "gap": gap, "gamma": 0.0}
        independent = Assumptions.independent(L, 1.0, problem.rho)
        assert theorem1(independent, **options, as_printed=True).total < average
        assert average <= theorem1(problem.assumptions(), **options).total


@pytest.mark.parametrize("as_printed", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_lr_is_checked_and_the_error_names_the_limit(steps, as_printed):
    known = Assumptions(3.0, 1.0, 1.0)
    options = {"steps": steps, "gradient": 1.0, "gamma": 0.0, "as_printed": as_printed}
    limit = largest_lr(3.0, steps, as_printed=as_printed)
    assert (limit == math.inf) == (as_printed and steps == 1)
    if math.isfinite(limit):
        lemma1(known, lr=limit, **options)
        with pytest.raises(SplitcastError, match=rf"^lr: .*choose at most {re.escape(repr(limit))}$"):
            lemma1(known, lr=limit * 1.0001, **options)
    with pytest.raises(SplitcastError, match="^lr: 0"):
        lemma1(known, lr=0, **options)


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_the_limit_is_where_the_conditions_bind(steps):
    lr = largest_lr(3.0, steps)
    conditions = [2 * 3.0 * lr * steps, 5 * 3 * 9.0 * lr**2 * steps * (steps - 1)]
    assert max(conditions) == pytest.approx(1)
    if steps > 1:
        lr = largest_lr(3.0, steps, as_printed=True)
        assert 2 * 9.0 * lr**2 * steps * (steps - 1) == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"known": (0.0, 1.0, 1.0)}, "smoothness: 0.0; choose a finite number above 0"),
        ({"known": (1.0, -1.0, 1.0)}, "variance: -1.0; choose a finite number of at least 0"),
        ({"known": (1.0, 1.0, math.nan)}, "mean_variance: nan; choose"),
        ({"gamma": [0.1, 0.2]}, "gamma: 2 values for 3 rounds; give one, or one per round"),
        ({"gamma": [0.1, -0.2, 0.1]}, "gamma: -0.2; choose"),
        ({"gap": -1.0}, "gap: -1.0; choose"),
        ({"rounds": 0}, "rounds: 0; choose"),
        ({"steps": 0}, "steps: 0; choose"),
    ],
)
def test_bad_input_is_named(change, message):
    options = {"known": (1.0, 1.0, 1.0), "lr": 0.1, "steps": 1, "rounds": 3, "gap": 1.0, "gamma": 0.1} | change
    with pytest.raises(SplitcastError, match=re.escape(message)):
        theorem1(Assumptions(*options.pop("known")), **options)


positive = st.floats(0.01, 10)


@given(st.floats(0.3, 10), positive, positive, st.floats(0, 1), st.integers(1, 8), st.integers(1, 400), st.floats(0, 2))
@settings(max_examples=200, deadline=None)
def test_best_number_of_clients_is_that_of_a_scan_of_theorem_1(smooth, variance, gap, gamma, steps, rounds, zeta):
    curve = Scalability(smooth, variance, gap, gamma, steps, rounds, zeta)
    limit = largest_lr(smooth, steps)
    totals = []
    for n in itertools.count(1):
        lr = math.sqrt(n / (steps * rounds))
        if lr > limit * (1 + 1e-12):
            break
        known = Assumptions(smooth, variance, variance / n, zeta)
        bound = theorem1(known, lr=min(lr, limit), steps=steps, rounds=rounds, gap=gap, gamma=gamma)
        totals.append(bound.total)
    if not totals:
        with pytest.raises(SplitcastError, match=f"rounds: {rounds} make lr"):
            curve.best()
        return
    assert curve.most == len(totals)
    assert [curve.at(n).total for n in (1, curve.most)] == pytest.approx([totals[0], totals[-1]])
    assert totals[curve.best() - 1] == pytest.approx(min(totals), rel=1e-9)


def test_rounds_that_are_too_few_and_clients_that_are_too_many_are_named():
    curve = Scalability(smoothness=2.0, variance=1.0, gap=1.0, gamma=0.0, steps=1, rounds=15)
    with pytest.raises(SplitcastError, match="rounds: 15 .* above the largest allowed 0.25; choose at least 16"):
        _ = curve.most
    curve = Scalability(smoothness=2.0, variance=1.0, gap=1.0, gamma=0.0, steps=1, rounds=16)
    assert (curve.most, curve.best()) == (1, 1)
    with pytest.raises(SplitcastError, match="clients: 2 .*choose 1..1"):
        curve.at(2)


values = st.lists(st.tuples(st.floats(-100, 100), st.floats(0.1, 10)), min_size=1, max_size=7)


@given(values)
@settings(max_examples=300, deadline=None)
def test_isotonic_fit(pairs):
    y, w = (np.array(column) for column in zip(*pairs, strict=True))
    fit = np.array(isotonic(y.tolist(), w.tolist()))
    assert (np.diff(fit) >= 0).all()
    assert isotonic(fit.tolist(), w.tolist()) == fit.tolist()
    assert w @ fit == pytest.approx(w @ y, abs=1e-9 * (w @ abs(y)) + 1e-12)
    # the optimum is constant on blocks, each at its weighted mean: try every division into blocks
    best = math.inf
    for walls in itertools.product([False, True], repeat=len(y) - 1):
        blocks = np.split(np.arange(len(y)), 1 + np.flatnonzero(walls))
        means = [w[b] @ y[b] / w[b].sum() for b in blocks]
        if all(a <= b for a, b in itertools.pairwise(means)):
            tried = np.concatenate([np.full(len(b), mean) for b, mean in zip(blocks, means, strict=True)])
            best = min(best, float(w @ (tried - y) ** 2))
    assert float(w @ (fit - y) ** 2) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_equal_phi_share_a_value():
    assert monotone([5, 5, 9], [4.0, 2.0, 1.0]) == pytest.approx([7 / 3] * 3)
    assert monotone([5, 5, 9], [4.0, 2.0, 8.0]) == [3.0, 3.0, 8.0]


SIZES, CLASSES = [14, 9, 5], 3


def blocks():
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh()),
        nn.ReLU(),
        nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.ReLU()),
        nn.Linear(5, CLASSES),
    ]


@pytest.fixture(scope="module")
def training():
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 1, 4, 4)))
    y = torch.from_numpy(rng.integers(CLASSES, size=sum(SIZES)))
    parts = np.split(rng.permutation(sum(SIZES)), np.cumsum(SIZES)[:-1])
    model = SplitModel(blocks(), (1, 4, 4))
    return model, Classification(CLASSES), model.initial(torch.float64), x, y, parts


def scheme(name, **values):
    return make_scheme(with_values(Config(), scheme=name, **values))


def drawn(parts, batch, draw, seed=0):
    rows = draw_batches(np.array([len(p) for p in parts]), batch, stream(seed, "batch", 0, draw))
    return [part[mine] for part, mine in zip(parts, rows, strict=True)]


def flat(grads):
    return torch.cat([g.flatten() for g in grads])


def applied(cut, x, y, rows, rho):
    """Per client, by plain autograd on modules: gradient of SFL, gradient of SFL-GA, number of client values."""
    whole = nn.Sequential(*blocks()).double()
    client, server = list(whole[:cut].parameters()), list(whole[cut:].parameters())
    smashed = [whole[:cut](x[mine]) for mine in rows]
    seen = [s.detach().requires_grad_() for s in smashed]
    losses = [F.cross_entropy(whole[cut:](s), y[mine]) for s, mine in zip(seen, rows, strict=True)]
    backs = [torch.autograd.grad(loss, s, retain_graph=True)[0] for loss, s in zip(losses, seen, strict=True)]
    mean = sum(r * s for r, s in zip(rho, backs, strict=True))
    result = []
    for s, loss, own in zip(smashed, losses, backs, strict=True):
        on_server = flat(torch.autograd.grad(loss, server))
        pulled = [flat(torch.autograd.grad(s, client, back, retain_graph=True)) for back in (own, mean)]
        result.append(tuple(torch.cat([p, on_server]) for p in pulled))
    return [own for own, _ in result], [mixed for _, mixed in result]


def shares(parts):
    sizes = np.array([len(p) for p in parts])
    return sizes / sizes.sum()


def test_gamma_equals_a_slow_loop(training):
    model, task, params, x, y, parts = training
    found = estimate_gamma(model, task, params, x, y, parts, batch=6, draws=3, seed=0)
    rho = shares(parts)
    per_draw = []
    for k in range(3):
        row = []
        for cut in model.cuts:
            own, mixed = applied(cut, x, y, drawn(parts, 6, k), rho)
            row.append(sum(r * float((a - b).square().sum()) for r, a, b in zip(rho, own, mixed, strict=True)))
        per_draw.append(row)
    assert found.raw == pytest.approx(np.mean(per_draw, axis=0), rel=1e-10)
    assert found.error == pytest.approx(np.std(per_draw, axis=0, ddof=1) / math.sqrt(3), rel=1e-10)
    assert found.phi == (20, 20, 185)
    assert found.fitted == pytest.approx(monotone(found.phi, found.raw))
    assert found.at(3) == found.fitted[2]
    with pytest.raises(SplitcastError, match=r"cut: 0 is not legal; choose 1\.\.3"):
        found.at(0)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_gamma_is_the_distance_between_the_steps_of_the_engine(training, cut):
    _, _, _, x, y, parts = training
    halves = []
    for name in ("sfl-ga", "psl"):
        config = with_values(Config(), scheme=name, cut=cut, batch=6, lr=1.0, dtype="float64", seed=4)
        sim = Simulator(config, SplitModel(blocks(), (1, 4, 4)), Classification(CLASSES), x, y, parts)
        sim.round(0)
        halves.append(torch.cat([p.flatten(1) for p in sim.state.client.params.values()], 1))
    distance = float(sim.weights @ (halves[0] - halves[1]).square().sum(1))
    model, task, params = training[:3]
    assert estimate_gamma(model, task, params, x, y, parts, 6, 1, seed=4).raw[cut - 1] == pytest.approx(
        distance, rel=1e-9
    )


def test_gamma_is_zero_for_one_client_and_for_unicast(training):
    model, task, params, x, y, parts = training
    assert estimate_gamma(model, task, params, x, y, [np.arange(20)], 6, 2, 0).raw == (0.0, 0.0, 0.0)
    assert full_batch_gamma(model, task, params, x, y, [np.arange(20)]) == [0.0, 0.0, 0.0]
    assert estimate_gamma(model, task, params, x, y, parts, 6, 2, 0, scheme=scheme("psl")).raw == (0.0, 0.0, 0.0)
    whole = estimate_gamma(model, task, params, x, y, parts, 6, 2, 0)
    assert min(whole.raw) > 1e-6
    assert estimate_gamma(
        model, task, params, x, y, parts, 6, 2, 0, scheme=scheme("epsl-cut", aggregate=1.0)
    ).raw == pytest.approx(whole.raw)


def test_full_batch_gamma_is_the_mean_over_all_meetings(training):
    """Batches of one row: every pair of rows of two clients is equally likely."""
    model, task, params, x, y, _ = training
    parts = [np.array([0, 1, 2]), np.array([5, 9])]
    rho = shares(parts)
    slow, spread = [], []
    for cut in model.cuts:
        pairs = [applied(cut, x, y, [[i], [j]], rho) for i in parts[0] for j in parts[1]]
        off = [[mixed[n] - own[n] for own, mixed in pairs] for n in (0, 1)]
        slow.append(sum(r * float(sum(d).div(6).square().sum()) for r, d in zip(rho, off, strict=True)))
        spread.append(sum(r * sum(float(v.square().sum()) for v in d) / 6 for r, d in zip(rho, off, strict=True)))
    found = full_batch_gamma(model, task, params, x, y, parts)
    assert found == pytest.approx(slow, rel=1e-9)
    assert all(full < mini for full, mini in zip(found, spread, strict=True))


def test_full_batch_gamma_in_chunks_and_with_equal_clients(training, monkeypatch):
    model, task, params, x, y, parts = training
    whole = full_batch_gamma(model, task, params, x, y, parts)
    zeta = estimate_heterogeneity(model, task, params, x, y, parts)
    for module in ("gamma", "estimate"):
        monkeypatch.setattr(f"splitcast.theory.{module}.CHUNK", 4)
    assert full_batch_gamma(model, task, params, x, y, parts) == pytest.approx(whole, rel=1e-10)
    assert estimate_heterogeneity(model, task, params, x, y, parts) == pytest.approx(zeta, rel=1e-10)
    two, four = (full_batch_gamma(model, task, params, x, y, [parts[0]] * n) for n in (2, 4))
    assert np.array(two) * 9 / 4 == pytest.approx(np.array(four), rel=1e-9)  # (1 - 1/N)^2 ||Cov(J, s)||^2


def test_gamma_is_no_function_of_phi(training):
    """Cuts 1 and 2 lie before and after a ReLU: the same parameters, another Gamma; the fit gives both one value."""
    found, full = estimate_gamma(*training, batch=6, draws=2, seed=0), full_batch_gamma(*training)
    assert found.phi[0] == found.phi[1]
    assert abs(full[0] - full[1]) > 0.02 * full[0]
    assert found.raw[0] != found.raw[1]
    assert found.fitted[0] == found.fitted[1]


def test_gamma_may_fall_when_phi_grows():
    """One class, and a one-number bottleneck behind a ReLU: after it all samples have nearly the same gradient."""
    torch.manual_seed(0)
    model = SplitModel(
        [nn.Linear(4, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 1, bias=False)), nn.Linear(1, 2)], (4,)
    )
    params = model.initial(torch.float64)
    x, y = torch.randn(200, 4, dtype=torch.float64), torch.zeros(200, dtype=torch.int64)
    parts = np.split(np.arange(200), 4)
    task = Classification(2)
    found = estimate_gamma(model, task, params, x, y, parts, 32, 5, 0)
    assert found.phi[0] < found.phi[1]
    assert found.raw[0] > 2 * found.raw[1]
    assert found.fitted[0] == found.fitted[1] == pytest.approx(sum(found.raw) / 2)
    full = full_batch_gamma(model, task, params, x, y, parts)
    assert full[0] > 2 * full[1]


def softmax_at_zero():
    """Softmax regression where all four classes are equally likely, and its rows with a one for the bias."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 1, 6)) * np.arange(1, 7)
    y = torch.from_numpy(rng.integers(4, size=80))
    model = SplitModel([nn.Flatten(), nn.Linear(6, 4)], (1, 6))
    params = {name: torch.zeros_like(p) for name, p in model.initial(torch.float64).items()}
    return model, Classification(4), params, torch.from_numpy(x), y, np.c_[x.reshape(80, 6), np.ones(80)]


def test_smoothness_of_softmax_regression():
    """The Hessian is (I/C - 11^T/C^2) (x) X^T X / m."""
    model, task, params, x, y, rows = softmax_at_zero()
    known = np.linalg.eigvalsh(rows.T @ rows / 80)[-1] / 4
    assert estimate_smoothness(model, task, params, x, y, seed=0) == pytest.approx(known, rel=0.02)
    assert estimate_smoothness(model, task, params, x, y, seed=1, tolerance=1e-6) == pytest.approx(known, rel=1e-6)
    with pytest.raises(SplitcastError, match="iterations: 1 do not reach tolerance 0.01"):
        estimate_smoothness(model, task, params, x, y, seed=0, iterations=1)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_smoothness_equals_the_dense_hessian(training, scale):
    model, task, params, x, y, _ = training
    params = {name: scale * p for name, p in params.items()}
    names, sizes = list(params), [p.numel() for p in params.values()]

    def loss(vector):
        pieces = zip(names, torch.split(vector, sizes), strict=True)
        return F.cross_entropy(model.forward({k: v.view_as(params[k]) for k, v in pieces}, x, 0, model.depth), y)

    dense = torch.autograd.functional.hessian(loss, flat(params.values()))
    known = float(torch.linalg.eigvalsh(dense).abs().max())
    assert estimate_smoothness(model, task, params, x, y, seed=0, tolerance=1e-4) == pytest.approx(known, rel=1e-3)


def test_variance_is_that_of_sampling_without_replacement():
    """sigma_n^2 = (1 - b/D) S^2 / b, S^2 the variance of the gradient (p - e_y) (x) x over samples.

    Clients draw independently, so nu = sum (rho^n)^2 sigma_n^2.
    """
    model, task, params, x, y, rows = softmax_at_zero()
    parts, known = np.split(np.arange(80), [40, 65]), []
    rho = shares(parts)
    for part in parts:
        grads = np.einsum("mc,md->mcd", 1 / 4 - np.eye(4)[y[part]], rows[part])
        known.append(grads.var(0, ddof=1).sum() * (1 - 8 / len(part)) / 8)
    found = estimate_variance(model, task, params, x, y, parts, batch=8, draws=400, seed=0)
    assert found.per_client == pytest.approx(rho @ known, rel=0.03)
    assert found.of_mean == pytest.approx(rho**2 @ known, rel=0.03)


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("name", ["sfl", "sfl-ga"])
def test_variance_equals_a_slow_loop(training, cut, name):
    model, task, params, x, y, parts = training
    rho = torch.from_numpy(shares(parts))
    found = estimate_variance(
        model, task, params, x, y, parts, 4, 6, 0, Placement.split(cut, model.depth), scheme(name)
    )
    kind = int(name == "sfl-ga")
    grads = torch.stack([torch.stack(applied(cut, x, y, drawn(parts, 4, k), rho)[kind]) for k in range(6)])  # (6, N, p)
    assert found.per_client == pytest.approx(float(rho @ grads.var(0).sum(1)), rel=1e-9)
    assert found.of_mean == pytest.approx(float((rho[:, None] * grads).sum(1).var(0).sum()), rel=1e-9)


def test_gradients_that_are_looked_at_hang_on_no_graph(training):
    """Else the running sums over many draws would keep every draw in memory."""
    _, task, _, _, y, parts = training
    model = SplitModel([nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 6)), nn.Linear(6, CLASSES)], (4,))
    client, server = Watcher(vectors), Watcher(vectors)
    given = (scheme("sfl"), Placement.split(2, 3), model, task, model.initial(), torch.randn(28, 4), y, parts, 4, 0, 0)
    probe(*given, client=client, server=server)
    assert client.found().shape == (3, 4 * 8 + 8 + 8 * 6 + 6)
    assert server.found().shape == (3, 6 * CLASSES + CLASSES)
    assert not client.found().requires_grad
    assert not server.found().requires_grad


def test_heterogeneity_equals_a_slow_loop(training):
    model, task, params, x, y, parts = training
    rho = shares(parts)
    local = [applied(1, x, y, [part], [1.0])[0][0] for part in parts]
    mean = sum(r * g for r, g in zip(rho, local, strict=True))
    slow = sum(r * float((g - mean).square().sum()) for r, g in zip(rho, local, strict=True))
    assert estimate_heterogeneity(model, task, params, x, y, parts) == pytest.approx(slow, rel=1e-9)
    same = [parts[0], parts[0]]
    assert estimate_heterogeneity(model, task, params, x, y, same) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("together", [True, False])
def test_random_layers_are_the_same_forward_and_back(together, monkeypatch):
    """One draw for all clients whose gradients fit into memory; else one after the other, run again on the way back."""
    if not together:
        monkeypatch.setattr("splitcast.theory.probe.CHUNK_BYTES", 1)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)]
    model, whole = SplitModel(layers, (4,)), nn.Sequential(*layers)
    x, y, parts = torch.randn(12, 4), torch.arange(12) % 2, np.split(np.arange(12), 2)
    before = torch.get_rng_state()
    found = estimate_gamma(model, Classification(2), model.initial(), x, y, parts, 6, 2, 0)
    assert torch.equal(before, torch.get_rng_state())
    slow = 0.0
    for k in range(2):
        passes, backs = [], []
        rows = drawn(parts, 6, k)
        torch.manual_seed(torch_seed(0, "layers", 0, k))
        masks = whole[1](torch.ones(2, 6, 8)) if together else [whole[1](torch.ones(1, 6, 8))[0] for _ in rows]
        for mask, mine in zip(masks, rows, strict=True):
            smashed = whole[0](x[mine]) * mask
            seen = smashed.detach().requires_grad_()
            F.cross_entropy(whole[2:](seen), y[mine]).backward()
            passes.append(smashed)
            backs.append(seen.grad)
        for smashed, own in zip(passes, backs, strict=True):
            off = torch.autograd.grad(smashed, list(whole[0].parameters()), sum(backs) / 2 - own)
            slow += float(flat(off).square().sum()) / 4
    assert found.raw[1] == pytest.approx(slow, rel=1e-5)


def test_too_few_draws_are_named(training):
    model, task, params, x, y, parts = training
    with pytest.raises(SplitcastError, match="draws: 0; choose at least 1"):
        estimate_gamma(model, task, params, x, y, parts, 4, 0, 0)
    with pytest.raises(SplitcastError, match="draws: 1; choose at least 2"):
        estimate_variance(model, task, params, x, y, parts, 4, 1, 0)
