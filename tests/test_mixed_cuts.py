"""A cut for every client: every block averaged over all its copies, cohort by cohort, in float64 to 1e-10."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lengths import now
from resuming import resumes_exactly
from splitcast.base.config import Config, from_toml, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.cell import Cell
from splitcast.cost.clock import time_rounds
from splitcast.cost.stages import Stage, fold
from splitcast.data.batches import draw_batches, participants
from splitcast.engine import simulator
from splitcast.engine.dry import dry_round
from splitcast.run.loop import train
from splitcast.schemes.messages import Message
from splitcast.studies.report.clients import breakdown
from splitcast.training.placement import Fleet, Placement
from test_buffers import normed
from test_engine import SIZES, blocks, close, data, engine, run

RNG = np.random.default_rng(18)


def drawn():
    return tuple(int(v) for v in RNG.integers(1, 5, size=len(SIZES)))


@pytest.mark.parametrize("cuts", [(1, 4, 2, 1), drawn(), drawn(), drawn()])
@pytest.mark.parametrize("tau", now([1, 3], 3))
@pytest.mark.parametrize("optimiser", [{}, {"momentum": 0.9, "participation": 0.7}, {"optimizer": "adam"}])
def test_sfl_with_any_cuts_is_fedavg(cuts, tau, optimiser):
    assert close(run(engine("sfl", cuts, tau, **optimiser)), run(engine("fl", 1, tau, **optimiser)))


def unbiased():
    """BatchNorm takes biases before it away: their gradient is rounding, which Adam would divide by rounding."""
    made = normed()
    made[0][0].bias = made[2][1].bias = None
    return made


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("optimiser", [{}, {"optimizer": "adam"}])
def test_running_statistics_are_averaged_over_all_copies(tau, optimiser):
    mixed, whole = (
        engine(name, cut, tau, made=unbiased, **optimiser) for name, cut in (("sfl", (3, 1, 2, 1)), ("fl", 1))
    )
    assert close(run(mixed), run(whole))
    ours, theirs = (sim.state.averaged(sim.weights) for sim in (mixed, whole))
    assert all(close(ours[k].double(), theirs[k].double()) for k in mixed.model.buffers())


class NaiveMixed:
    """Every client a list of blocks of its own, and the server one of all blocks, of which it uses some for each."""

    def __init__(self, cuts, scheme, lr, sync_every=0):
        whole = [block.double() for block in blocks()]
        self.cuts, self.scheme, self.lr, self.sync_every = cuts, scheme, lr, sync_every
        self.clients = [copy.deepcopy(whole[:cut]) for cut in cuts]
        self.server = copy.deepcopy(whole)

    def round(self, t, batches, rho):
        ids = sorted(batches)
        theirs = {n: copy.deepcopy(self.server[self.cuts[n] :]) for n in ids}
        for i in range(len(batches[ids[0]])):
            out, grads = {}, {}
            for n in ids:
                x, y = batches[n][i]
                out[n] = nn.Sequential(*self.clients[n])(x)
                seen = out[n].detach().requires_grad_()
                nn.functional.cross_entropy(nn.Sequential(*theirs[n])(seen), y).backward()
                grads[n] = seen.grad
                self.descend(theirs[n])
            for n in ids:
                mates = [m for m in ids if self.cuts[m] == self.cuts[n]]
                total = sum(rho[m] for m in mates)
                mean = sum(rho[m] * grads[m] for m in mates) / total
                out[n].backward(mean if self.scheme == "sfl-ga" else grads[n])
                self.descend(self.clients[n])
        sync = self.sync_every and t % self.sync_every == 0
        with torch.no_grad():
            for b in range(len(self.server)):
                copies = [(rho[n], theirs[n][b - self.cuts[n]]) for n in ids if b >= self.cuts[n]]
                if sync:
                    copies += [(rho[n], self.clients[n][b]) for n in ids if b < self.cuts[n]]
                targets = [self.server[b]] if copies else []
                if sync:
                    targets += [mine[b] for mine, cut in zip(self.clients, self.cuts, strict=True) if b < cut]
                total = sum(r for r, _ in copies)
                for params in zip(
                    *(block.parameters() for _, block in copies), *(t.parameters() for t in targets), strict=True
                ):
                    mean = sum(r * p for (r, _), p in zip(copies, params, strict=False)) / total
                    for p in params[len(copies) :]:
                        p.copy_(mean)

    def descend(self, some):
        with torch.no_grad():
            for block in some:
                for p in block.parameters():
                    p -= self.lr * p.grad
                    p.grad = None

    def averaged(self, rho):
        found = []
        for b in range(len(self.server)):
            holders = [self.clients[n][b] if b < cut else self.server[b] for n, cut in enumerate(self.cuts)]
            together = zip(*(block.parameters() for block in holders), strict=True)
            found += [sum(r * p.detach() for r, p in zip(rho, ps, strict=True)).flatten() for ps in together]
        return torch.cat(found)


@pytest.mark.parametrize("tau", [1, 2])
@pytest.mark.parametrize("name", ["psl", "sfl-ga", "sfl"])
def test_mixed_cuts_equal_the_naive_loop(name, tau):
    cuts, split = (1, 3, 1, 4), {"sync_every": 2} if name == "sfl" else None
    sim = engine(name, cuts, tau, participation=0.75, split=split)
    ref, (x, y, parts) = NaiveMixed(cuts, name, 0.1, 2 if name == "sfl" else 0), data(SIZES)
    for t in range(1, 6):
        ids = participants(sim.train, len(SIZES), t).tolist()
        rows = [draw_batches(sim.sizes, 6, stream(0, "batch", t, i)) for i in range(tau)]
        batches = {n: [(x[parts[n][r[n]]], y[parts[n][r[n]]]) for r in rows] for n in ids}
        ref.round(t, batches, {n: SIZES[n] / sum(SIZES[m] for m in ids) for n in ids})
        sim.round(t)
    params = sim.state.averaged(sim.weights)
    ours = torch.cat([params[k].flatten() for k in sim.model.initial()])
    assert close(ours, ref.averaged(np.array(SIZES) / sum(SIZES)))
    assert sim.drift() > 1e-3  # round 5 does not average


def test_split_learning_in_turn_does_not_depend_on_the_cuts():
    assert close(run(engine("sl", (2, 1, 4, 3), 2, momentum=0.9)), run(engine("sl", 1, 2, momentum=0.9)))


@pytest.mark.parametrize("name", ["psl", "sfl-ga", "sfl"])
def test_chunks_change_nothing(name, monkeypatch):
    whole = run(engine(name, (1, 3, 1, 4), 2))
    monkeypatch.setattr(simulator, "CHUNK_BYTES", 1)
    assert close(run(engine(name, (1, 3, 1, 4), 2)), whole)


def test_local_losses_have_a_head_at_every_cut():
    sim = engine("local-loss", (1, 3, 1, 4), 1)
    before = sim.state.averaged(sim.weights)
    heads = {k for k in before if int(k.split(".")[0]) >= 5}
    assert {int(k.split(".")[0]) - 4 for k in heads} == {1, 3, 4}
    sim.round(1)
    after = sim.state.averaged(sim.weights)
    assert all(float((after[k] - before[k]).abs().max()) > 0 for k in heads)


# what travels, and how long it takes

WIDTH = {1: 27, 3: 36, 4: 7}  # smashed values of a sample after so many blocks
PHI = {1: 30, 3: 30 + 112, 4: 30 + 112 + 259}


@pytest.mark.parametrize("name", ["sfl", "sfl-ga", "psl", "sl"])
def test_ledger_is_the_closed_form_and_the_plan(name):
    cuts, tau, b = (1, 3, 1, 4), 2, 6
    sim = engine(name, cuts, tau)
    ledger = sim.round(1).ledger
    smashed = tau * sum(4 * b * WIDTH[v] + b for v in cuts)
    gradients = tau * sum(4 * b * WIDTH[v] for v in cuts)
    halves = 4 * sum(PHI[v] for v in cuts)
    up, down = {
        "sfl": (smashed + halves, gradients + 4 * PHI[4]),  # the average goes block by block; each stops after its cut
        "sfl-ga": (smashed, tau * 4 * b * (27 + 36 + 7)),  # one broadcast for every cohort
        "psl": (smashed, gradients),
        "sl": (smashed + halves, gradients + halves),
    }[name]
    assert (ledger.total("up"), ledger.total("down")) == (up, down)
    dry = dry_round(
        sim.scheme, sim.model, sim.task, sim.state.placement, sim.optimiser, 1, range(4), batch=b, steps=tau
    )
    assert dry.events == ledger.events


def test_stages_by_hand():
    fleet = Fleet((Placement.split(1, 3), Placement.split(2, 3)))
    sim = engine("sfl-ga", (1, 3), 1, sizes=[10, 10])
    flops = {(0, "forward"): (1.0, 4.0), (0, "backward"): (2.0, 8.0), (1, "both"): (30.0, 3.0)}
    first, second = fold(sim.round(1).ledger.events, fleet, flops)
    up = (8 * (4 * 6 * 27 + 6), 8 * (4 * 6 * 36 + 6))
    assert first == Stage("forward", (0, 1), compute_flops=(1.0, 4.0), uplink_bits=up, server_flops=(30.0, 3.0))
    both = 8 * 4 * 6 * (27 + 36)  # two broadcasts share the band and end together
    assert second == Stage("feedback", (0, 1), broadcast_bits=both, backward_flops=(2.0, 8.0))


def test_each_listens_to_its_own_blocks_of_a_broadcast():
    said = Message("down", "model", (125_000, 250_000), (0, 1), broadcast=True)
    assert said.on_air == 250_000
    stages = fold([said], Placement.split(1, 2), {})
    cell = Cell(1e6, 1e-12, 1.0, 1e9, np.ones(2), np.ones(2))
    (timed,) = time_rounds([stages], cell, np.full(2, 1e-6))  # log2(1 + 1) = 1 bit/s/Hz: 1 and 2 Mbit at 1 Mbit/s
    assert timed.stages[0].downlink_s.tolist() == pytest.approx([1.0, 2.0])


# from the outside


def test_cuts_in_a_configuration():
    config = with_values(Config(), cut="1,1,2,4", clients=4)
    assert config.split.cut == (1, 1, 2, 4)
    assert from_toml(to_toml(config)) == config
    assert with_values(Config(), cut="3").split.cut == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cut": (1, 2)}, "cut: 2 cuts for 4 clients; give one, or one for each"),
        ({"cut": (1, 2, 9, 1)}, "cut: 9 is not legal; choose 1..4"),
        ({"cut": (1, 2, 0, 1)}, "cut: 0 is not legal; choose 1..4"),
        ({"cut": "1,x"}, "cut: value error, give a number, one for every client as in 1,1,2,4, or auto, got '1,x'"),
        ({"cut": (1, 2, 1, 1), "policy": "greedy"}, "policy: 'greedy' moves one cut; with one for every client use"),
        ({"cut": (1, 2, 1, 1), "scheme": "cse-fsl"}, "cut: cse-fsl with its settings needs one cut for all clients"),
        (
            {"cut": (1, 2, 1, 1), "sync_codec": "int8", "scheme": "sfl"},
            "sync_codec: 'int8' of sfl needs one cut",
        ),
        ({"cut": (1, 2, 1, 1), "client_update": "identical"}, "client_update: 'identical' needs one cut"),
        (
            {"cut": (1, 2, 1, 1), "scheme": "sfl-gb"},
            "cut: sfl-gb has other settings at each of these cuts; give sfl-gb",
        ),
        ({"cut": (1, 2, 1, 1), "epsilon": 0.01}, "cut: 1 violates epsilon 0.01; choose one of"),
    ],
)
def test_one_line_says_what_is_wrong(values, said):
    with pytest.raises(SplitcastError) as error:
        train(with_values(Config(), clients=4, rounds=1, arch="cnn", **values))
    assert str(error.value).startswith(said)


def test_a_basis_within_every_cohort():
    full = {"sfl-gb.rank": 1000, "sync_every": 1, "uplink_codec": "fp32", "downlink_codec": "fp32"}
    assert close(run(engine("sfl-gb", (1, 3, 1, 4), 2, split=full)), run(engine("fl", 1, 2)))


@pytest.mark.parametrize("scheme", ["psl", "sfl"])
def test_a_stopped_run_goes_on_exactly(tmp_path, scheme):
    config = with_values(Config(), scheme=scheme, cut=(1, 2, 1), clients=3, rounds=4, arch="cnn-small", batch=4)
    records = resumes_exactly(with_values(config, checkpoint_every=1, eval_every=2), tmp_path / "run", 2)
    found = breakdown(config, records)
    assert found.mismatch < 1e-9
    assert sum(part[2] for part in found.parts_s.values()) == pytest.approx(np.mean([r.latency_s for r in records]))
