"""State of the optimiser when halves are averaged, handed on or moved: against a naive loop with torch's optimisers, in
float64; its bytes by hand; sites as the simulator; resumed to the bit."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.memory import client_memory
from splitcast.data.batches import draw_batches, participants
from splitcast.remote.federation import Federation
from splitcast.remote.guard import AVERAGES
from splitcast.remote.sites import Limits
from splitcast.run.export import trained_model
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.schemes.messages import Ledger
from splitcast.studies.plan import plan
from splitcast.training.optimiser import make_optimiser
from splitcast.training.placement import Placement
from splitcast.training.weights import Weights
from test_engine import SIZES, blocks, data, engine, flat
from test_federation import IMAGES, Wired, at, difference, federation, settings

RULES = ["average", "local", "reset"]
TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
}
OURS = {"sgd": {"momentum": 0.9}, "adamw": {"optimizer": "adamw", "weight_decay": 0.1}}


class Block:
    """One block with an optimiser of its own; a copy has both."""

    def __init__(self, module, name):
        self.module, self.name = module, name
        self.renew()

    def renew(self):
        params = list(self.module.parameters())
        self.optimiser = TORCH[self.name](params) if params else None

    def step(self):
        if self.optimiser:
            self.optimiser.step()
            self.optimiser.zero_grad()

    def weigh(self, copies):
        """Parameters as the weighted mean of (share, block)."""
        with torch.no_grad():
            together = zip(*(block.module.parameters() for _, block in copies), strict=True)
            means = [sum(r * p for (r, _), p in zip(copies, ps, strict=True)) for ps in together]
            for p, mean in zip(self.module.parameters(), means, strict=True):
                p.copy_(mean)

    def weigh_state(self, copies):
        if self.optimiser:
            states = [block.optimiser.state_dict()["state"] for _, block in copies]
            mean = {
                k: {s: sum(r * each[k][s] for (r, _), each in zip(copies, states, strict=True)) for s in states[0][k]}
                for k in states[0]
            }
            self.optimiser.load_state_dict(self.optimiser.state_dict() | {"state": mean})


class Naive:
    """Clients as lists of blocks, each with the optimiser that it keeps; the server has all blocks and uses some."""

    def __init__(self, cuts, name, rule, every):
        whole = [Block(module.double(), name) for module in blocks()]
        self.cuts, self.rule, self.every = cuts, rule, every
        self.clients, self.server = [copy.deepcopy(whole[:cut]) for cut in cuts], whole

    def step(self, mine, theirs, x, y):
        value = x
        for block in [*mine, *theirs]:
            value = block.module(value)
        nn.functional.cross_entropy(value, y).backward()
        for block in [*mine, *theirs]:
            block.step()

    def round(self, t, batches, rho):
        theirs = {n: copy.deepcopy(self.server[self.cuts[n] :]) for n in batches}
        for n, own in batches.items():
            for x, y in own:
                self.step(self.clients[n], theirs[n], x, y)
        for b, block in enumerate(self.server):
            below = [(rho[n], self.clients[n][b]) for n in batches if b < self.cuts[n]]
            above = [(rho[n], theirs[n][b - self.cuts[n]]) for n in batches if b >= self.cuts[n]]
            sync = self.every and t % self.every == 0
            if above:
                share(block, above, above)
            if sync:
                ours = below + above
                holders = [mine[b] for mine, cut in zip(self.clients, self.cuts, strict=True) if b < cut]
                mean = copy.deepcopy(block)
                share(mean, ours, ours if self.rule == "average" else above)
                for one in [*holders, *([block] if above else [])]:
                    one.weigh([(1.0, mean)])
                    if self.rule == "average":
                        one.weigh_state([(1.0, mean)])
                    elif self.rule == "reset" and one is not block:
                        one.renew()

    def averaged(self, rho):
        found = []
        for b, block in enumerate(self.server):
            target = copy.deepcopy(block)
            holders = [mine[b] if b < cut else block for mine, cut in zip(self.clients, self.cuts, strict=True)]
            target.weigh(list(zip(rho, holders, strict=True)))
            found += [p.detach().flatten() for p in target.module.parameters()]
        return torch.cat(found)


def share(block, copies, states):
    total = sum(r for r, _ in copies)
    block.weigh([(r / total, one) for r, one in copies])
    if states:
        total = sum(r for r, _ in states)
        block.weigh_state([(r / total, one) for r, one in states])


def drawn(sim, t):
    """Batches of a round and the shares of who takes part, worked out apart from the engine."""
    x, y, parts = data(SIZES)
    ids = participants(sim.train, len(SIZES), t).tolist()
    rows = [draw_batches(sim.sizes, 6, stream(0, "batch", t, i)) for i in range(sim.train.local_steps)]
    batches = {n: [(x[parts[n][r[n]]], y[parts[n][r[n]]]) for r in rows] for n in ids}
    return batches, {n: SIZES[n] / sum(SIZES[m] for m in ids) for n in ids}


CASES = [("sfl", 2, 1), ("sfl", 2, 2), ("fl", 5, 1), ("psl", 2, 0), ("sfl", (1, 3, 1, 4), 2)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("case", now(CASES, CASES[0], CASES[1], CASES[4]))
@pytest.mark.parametrize("tau", now([1, 3], 3))
def test_every_rule_is_the_naive_loop(case, tau, name, rule):
    scheme, cut, every = case
    split = {"sync_every": every} if every > 1 else None
    here = 1 if scheme == "fl" else cut
    sim = engine(scheme, here, tau, split=split, participation=0.75, optimizer_state=rule, **OURS[name])
    ref = Naive(cut if isinstance(cut, tuple) else (cut,) * len(SIZES), name, rule, every)
    for t in range(1, 6):
        ref.round(t, *drawn(sim, t))
        sim.round(t)
    params = sim.state.averaged(sim.weights)
    ours = torch.cat([params[k].flatten() for k in sim.model.initial()])
    assert float((ours - ref.averaged(np.array(SIZES) / sum(SIZES))).abs().max()) < 1e-8


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TORCH)
def test_halves_handed_on_are_the_naive_loop(name, rule):
    sim = engine("sl", 2, 2, participation=0.75, optimizer_state=rule, **OURS[name])
    half, server = ([Block(m.double(), name) for m in part] for part in (blocks()[:2], blocks()[2:]))
    own = {n: copy.deepcopy(half) for n in range(len(SIZES))}
    for t in range(1, 5):
        for n, batches in drawn(sim, t)[0].items():
            mine = half if rule == "average" else own[n]
            for new, old in zip(mine, half, strict=True):
                new.weigh([(1.0, old)])
                if rule == "reset":
                    new.renew()
            for x, y in batches:
                Naive.step(None, mine, server, x, y)
            half = mine
        sim.round(t)
    theirs = torch.cat([p.detach().flatten() for block in [*half, *server] for p in block.module.parameters()])
    assert float((flat(sim) - theirs).abs().max()) < 1e-8


def test_rules_differ_where_they_should():
    """After one round halves are the same for all; then state matters."""
    ends = {rule: engine("sfl", 2, 3, optimizer_state=rule, **OURS["adamw"]) for rule in RULES}
    for sim in ends.values():
        sim.round(1)
    first = {rule: flat(sim) for rule, sim in ends.items()}
    assert torch.allclose(first["average"], first["local"], atol=1e-12, rtol=0)
    assert torch.allclose(first["average"], first["reset"], atol=1e-12, rtol=0)
    for sim in ends.values():
        sim.round(2)
    second = [flat(sim) for sim in ends.values()]
    assert min(float((a - b).abs().max()) for k, a in enumerate(second) for b in second[:k]) > 1e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scheme", ["sfl", "fl", "sl"])
def test_bytes_are_those_by_hand(scheme, rule):
    """cnn-small, cut 2: a half of 104 + 808 values in four tensors; of the whole model 14,186 in ten."""
    values, tensors = {"fl": (104 + 808 + 32 * 393 + 16 * 33 + 170, 10)}.get(scheme, (104 + 808, 4))
    config = with_values(
        Config(), arch="cnn-small", scheme=scheme, cut=2, rounds=1, clients=5, optimizer="adamw", optimizer_state=rule
    )
    sent = train(config).rounds[0].kinds
    expected = 4 * (3 * values + tensors if rule == "average" else values)
    assert sent["up.model"] == 5 * expected
    assert sent["down.model"] == (5 * expected if scheme == "sl" else expected)


def test_plans_and_memory_count_what_is_sent_and_what_is_held():
    config = with_values(settings("sfl", cut=2), optimizer="adamw")
    made = {rule: plan(with_values(config, optimizer_state=rule), draws=3).cuts[1] for rule in RULES}
    assert made["average"].up_bits - made["local"].up_bits == 8 * 3 * 4 * (2 * 912 + 4)
    assert made["reset"].up_bits == made["local"].up_bits
    model, place = make_simulator(config, IMAGES).model, Placement.split(2, 5)
    needs = [
        client_memory(model, place, make_optimiser(with_values(config, optimizer_state=r).train), 8) for r in RULES
    ]
    assert needs[0] == needs[1] == needs[2] and needs[0].optimiser == 4 * (3 * 912 + 4)


@pytest.mark.parametrize("rule", now(["local", "reset"], "local"))
@pytest.mark.parametrize(("scheme", "changes"), [("sfl", {}), ("sfl", {"sync_codec": "int8"}), ("fl", {}), ("sl", {})])
def test_sites_do_what_the_simulator_does(scheme, changes, rule):
    every = {"sync_every": 2} if scheme == "sfl" else {}
    config = settings(
        scheme, optimizer="adamw", lr=0.002, local_steps=2, participation=0.7, optimizer_state=rule, **every, **changes
    )
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t, cut in enumerate([1, 1, 2, 2, 1, 3] if scheme != "fl" else [1] * 6, start=1):
        ours, theirs = Ledger(), Ledger()
        if scheme != "fl":
            fed.place(at(fed, cut), ours)
            sim.place(at(sim, cut), theirs)
        assert fed.round(t, ours).ledger.messages == sim.round(t, theirs).ledger.messages
    assert difference(fed, sim) < 1e-3  # sqrt(v) magnifies last bits of tiny gradients


def test_a_site_keeps_its_state_when_the_server_starts_again():
    config = settings("sfl", optimizer="adamw", lr=0.002, optimizer_state="local", local_steps=2)
    line, whole = Wired(3), federation(config, Wired(3))
    first = federation(config, line)
    for t in (1, 2, 3):
        first.round(t)
        whole.round(t)
    kept = first.snapshot(3)
    again = Wired(3)
    again.memories[:] = line.memories
    second = Federation(config, first.model, IMAGES.classes, ["a", "b", "c"], again, Limits())
    second.resume(*kept, 3)
    for t in (4, 5):
        assert second.round(t).loss == whole.round(t).loss
    for ours, theirs in zip(again.sites, whole.sites.transport.sites, strict=True):
        for slot, values in theirs.weights.slots.items():
            assert all(torch.equal(ours.weights.slots[slot][k], v) for k, v in values.items())
        assert {float(v) for v in ours.weights.slots["home/steps"].values()} == {10.0}


RESUMED = [
    {"scheme": "sfl", "sync_every": 2, "policy": "random", "optimizer_state": "local"},
    {"scheme": "sfl", "policy": "random", "optimizer_state": "reset"},
    {"scheme": "sl", "policy": "random", "optimizer_state": "local"},
    {"scheme": "fl", "sync_codec": "int8", "optimizer_state": "local"},
    {"scheme": "sfl", "cut": (1, 2, 1, 3), "sync_every": 2, "optimizer_state": "local"},
]


@pytest.mark.parametrize("changes", now(RESUMED, RESUMED[4]))
def test_a_stopped_run_resumes_exactly(changes, tmp_path):
    config = with_values(
        Config(), arch="cnn-small", rounds=7, clients=4, checkpoint_every=2, optimizer="adamw", lr=0.003,
        participation=0.7, local_steps=2, **changes,
    )  # fmt: skip
    resumes_exactly(config, tmp_path / "run", stop_at=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_state": "mean"}, "optimizer_state: unknown 'mean'"),
        ({"optimizer_state": "reset", "client_update": "identical"}, "client_update: 'identical' has one state"),
        ({"optimizer_state": "local", "scheme": "sl", "cut": (1, 2, 1)}, "optimizer_state: 'local' with sl needs one"),
    ],
)
def test_what_makes_no_sense_is_one_line(changes, words):
    with pytest.raises(SplitcastError, match=words):
        make_simulator(with_values(Config(), clients=3, arch="cnn-small", **changes), IMAGES)


SIDES = {"server_optimizer": "adamw", "server_lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl", "sl"])
@pytest.mark.parametrize("tau", [1, 3])
def test_sides_may_have_optimisers_of_their_own(scheme, tau):
    """One client is plain PyTorch with two optimisers."""
    sim, (x, y, _) = engine(scheme, 2, tau, sizes=[20], **SIDES), data([20])
    module = nn.Sequential(*blocks()).double()
    both = [
        torch.optim.SGD(module[:2].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(module[2:].parameters(), lr=0.02, weight_decay=0.1),
    ]
    for t in range(1, 5):
        for i in range(tau):
            rows = sim.rows(t, i, np.array([0]))[0]
            for optimiser in both:
                optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            for optimiser in both:
                optimiser.step()
        sim.round(t)
    assert float((flat(sim) - torch.cat([p.detach().flatten() for p in module.parameters()])).abs().max()) < 1e-8


def test_a_rate_of_the_server_alone_moves_cuts_and_mixes():
    """With sgd a server that learns at a tenth of the rate steps a tenth as far, wherever its blocks are."""
    slow = engine("sfl", (2, 4, 2, 4), 1, server_lr=0.01)
    fast = engine("sfl", (2, 4, 2, 4), 1)
    start = flat(slow)
    for sim in (slow, fast):
        sim.round(1)
    ours, theirs = ((flat(sim) - start)[-len(slow.model.initial()["4.bias"]) :] for sim in (slow, fast))
    assert torch.allclose(ours, 0.1 * theirs, atol=1e-12, rtol=0) and float(theirs.abs().max()) > 1e-3


@pytest.mark.parametrize("scheme", ["sfl", "psl", "sl"])
def test_sites_have_the_optimiser_of_their_side(scheme):
    config = settings(scheme, local_steps=2, **SIDES | {"server_lr": 0.002})
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in range(1, 5):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
    assert difference(fed, sim) < 1e-3
    assert all(set(site.weights.slots) == {"trained", "opt/momentum"} for site in fed.sites.transport.sites)


def test_sides_resume_exactly_and_are_exported(tmp_path):
    config = with_values(
        Config(), arch="cnn-small", rounds=6, clients=4, checkpoint_every=2, scheme="sfl", cut=2, **SIDES | {"lr": 0.01}
    )
    resumes_exactly(config, tmp_path / "run", stop_at=3)
    ours = dict(trained_model(tmp_path / "run").named_parameters())
    assert all(torch.equal(v, ours[k]) for k, v in train(config).model().named_parameters())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_lr": 0.1, "scheme": "fl"}, "server_lr: 0.1, but with fl the server has no half"),
        ({"server_optimizer": "adam", "policy": "random"}, "server_optimizer: 'adam' needs one fixed cut"),
        ({"server_optimizer": "adam", "scheme": "sfl", "cut": (1, 2, 1)}, "server_optimizer: 'adam' needs one fixed"),
        ({"server_optimizer": "adam2"}, "server_optimizer: unknown 'adam2'"),
    ],
)
def test_sides_that_make_no_sense_are_one_line(changes, words):
    with pytest.raises(SplitcastError, match=words):
        make_simulator(with_values(Config(), clients=3, arch="cnn-small", **changes), IMAGES)


@pytest.mark.parametrize("name", AVERAGES)
def test_robust_averages_leave_what_is_frozen_and_whole_numbers(name):
    def half(value):
        slots = {"trained": {"0.w": torch.full((2,), value)}, "buffers": {"0.n": torch.tensor(7)}}
        return Weights(slots | {"frozen": {"0.f": torch.arange(3.0)}})

    copies = Weights.stacked_of([half(1.0), half(2.0), half(3.0)])
    made = AVERAGES[name](copies, torch.full((3,), 1 / 3), half(0.0))
    assert made.slots["frozen"]["0.f"].tolist() == [0.0, 1.0, 2.0]
    assert made.slots["buffers"]["0.n"].item() == 7
    assert made.params["0.w"].tolist() == pytest.approx([2.0] * 2 if name != "clipped" else [5 / 3] * 2)
