"""SplitFed V2, EPSL, MergeSFL, CPSL, FedPairing, SGLR and personalised PSL: identities, naive loops, closed forms."""

import warnings

import numpy as np
import pytest
import torch

from lengths import now
from naive import NaiveOneServer
from resuming import resumes_exactly
from splitcast.base.config import Config, from_toml, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.stages import Stage, fold
from splitcast.data.batches import draw_batches
from splitcast.engine.dry import dry_round
from splitcast.run.loop import train
from splitcast.studies.plan import plan
from splitcast.training.placement import Placement
from test_engine import SIZES, blocks, close, data, engine, plain_sgd, run

ALL = ["splitfed-v2", "epsl", "merge-sfl", "cpsl", "fed-pairing", "psl-personal", "sglr"]
RHO = np.array(SIZES) / sum(SIZES)
EVEN = [20, 20, 20]
WIDTH = {1: 27, 2: 36, 4: 7}  # smashed values of a sample, by the cut
PHI = {1: 30, 2: 142, 4: 401}
Q = 425


def batches_of(sim, t, sizes=SIZES):
    x, y, parts = data(sizes)
    rows = [draw_batches(np.array(sizes), 6, stream(0, "batch", t, i)) for i in range(sim.train.local_steps)]
    return {n: [(x[parts[n][r[n]]], y[parts[n][r[n]]]) for r in rows] for n in range(len(sizes))}


# identities


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("name", [name for name in ALL if name != "psl-personal"])
def test_one_client_is_plain_sgd(name, cut, tau):
    split = {"cpsl.clusters": 3, "sglr.server_rate": 1.0}
    assert close(run(engine(name, cut, tau, sizes=[20], split=split)), plain_sgd(blocks, tau))


@pytest.mark.parametrize("tau", [1, 3])
def test_one_cluster_is_splitfed_and_one_each_is_split_learning(tau):
    for clusters, same in ((1, "sfl"), (len(SIZES), "sl"), (99, "sl")):
        split = {"cpsl.clusters": clusters}
        assert close(run(engine("cpsl", 2, tau, split=split, momentum=0.9)), run(engine(same, 2, tau, momentum=0.9)))


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_merging_equal_batches_is_splitfed(cut):
    assert close(run(engine("merge-sfl", cut, 1, sizes=EVEN)), run(engine("sfl", cut, 1, sizes=EVEN)))


def test_epsl_without_aggregation_is_psl():
    assert close(run(engine("epsl", 2, 1, split={"epsl.aggregate": 0.0})), run(engine("psl", 2, 1)))


@pytest.mark.parametrize("cuts", [2, (1, 4, 3, 2)])
@pytest.mark.parametrize("tau", [1, 3])
def test_pairs_do_what_federated_averaging_does(cuts, tau):
    assert close(run(engine("fed-pairing", cuts, tau)), run(engine("fl", 1, tau)))


@pytest.mark.parametrize("tau", [1, 2])
def test_two_rates(tau):
    with_ga = run(engine("sfl-ga", 2, tau))
    assert close(run(engine("sglr", 2, tau, split={"sglr.server_rate": 1.0})), with_ga)
    sim, ga = engine("sglr", 2, 1), engine("sfl-ga", 2, 1)
    for one in (sim, ga):
        one.round(1)
    start = sim.model.initial(torch.float64)
    ours, theirs = (one.state.averaged(one.weights) for one in (sim, ga))
    for name, value in start.items():
        rate = 1 if int(name[0]) < 2 else 2.0  # four clients: sqrt(4)
        assert close(ours[name] - value, rate * (theirs[name] - value))


# against the naive loops


@pytest.mark.parametrize("tau", [1, 2])
@pytest.mark.parametrize("name", ["splitfed-v2", "merge-sfl", "epsl", "cpsl"])
def test_the_naive_loop(name, tau):
    sizes = (6, 2, 4, 5)
    split = {"merge-sfl.batches": sizes, "cpsl.clusters": 3, "epsl.aggregate": 0.5}
    sim, ref = engine(name, 2, tau, split=split), NaiveOneServer(blocks(), 2, 0.1, len(SIZES))
    rho = np.array(sizes) / sum(sizes) if name == "merge-sfl" else RHO
    for t in range(1, 4):
        batches = batches_of(sim, t)
        if name == "splitfed-v2":
            ref.splitfed_v2(batches, rho, [stream(0, "order", t, i).permutation(4) for i in range(tau)])
        elif name == "merge-sfl":
            ref.merge_sfl(batches, sizes)
        elif name == "epsl":
            ref.epsl(batches, rho, 0.5)
        else:
            ref.cpsl(batches, rho, [[0, 1], [2], [3]])
        sim.round(t)
    params = sim.state.averaged(torch.from_numpy(rho))
    assert close(torch.cat([params[k].flatten() for k in sim.model.initial()]), ref.averaged(rho))


def test_epsl_in_chunks(monkeypatch):
    whole = run(engine("epsl", 2, 2))
    monkeypatch.setattr("splitcast.engine.simulator.CHUNK_BYTES", 1)
    monkeypatch.setattr("splitcast.engine.simulator.ACTIVATION_BYTES", 1)
    assert close(run(engine("epsl", 2, 2)), whole)


def test_everybody_is_tested_by_a_model_of_its_own():
    sim = engine("psl-personal", 2, 1)
    run(sim, 2)
    assert close(
        run(engine("psl", 2, 1), 2),
        torch.cat([sim.state.averaged(sim.weights)[k].flatten() for k in sim.model.initial()]),
    )
    x, y, parts = data(SIZES)
    scores = []
    for n in range(4):
        mine = torch.isin(y, y[parts[n]])
        own = sim.state.client.take(slice(n, n + 1)).mean(torch.ones(1)).everything() | sim.state.server.everything()
        right = sim.model.forward(own, x[mine], 0, sim.model.depth).argmax(1) == y[mine]
        scores.append(float(right.double().mean()))
    assert sim.evaluate(x, y)["accuracy"] == pytest.approx(np.mean(scores))
    assert len(set(scores)) > 1


# what travels, and how long it takes


@pytest.mark.parametrize("tau", [1, 2])
@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize("name", ALL)
def test_ledger_is_the_closed_form_and_the_plan(name, cut, tau):
    sizes = (6, 2, 4, 5)
    split = {"merge-sfl.batches": sizes, "cpsl.clusters": 3, "epsl.aggregate": 0.5}
    sim = engine(name, cut, tau, split=split)
    ledger = sim.round(1).ledger
    n, b, d, phi = 4, 6, WIDTH[cut], PHI[cut]
    smashed, back = tau * n * (4 * b * d + b), tau * n * 4 * b * d
    total = sum(sizes)
    up, down = {
        "splitfed-v2": (smashed + n * 4 * phi, back + 4 * phi),
        "epsl": (smashed, tau * 4 * d * (3 + n * 3)),  # 3 of 6 rows together
        "merge-sfl": (tau * total * (4 * d + 1) + n * 4 * phi, tau * total * 4 * d + 4 * phi),
        "cpsl": (smashed + n * 4 * phi, back + 3 * 4 * phi),
        "fed-pairing": (smashed + back + n * 4 * Q, smashed + back + 4 * Q),
        "psl-personal": (smashed, back),
        "sglr": (smashed, tau * 4 * b * d),
    }[name]
    assert (ledger.total("up"), ledger.total("down")) == (up, down)
    placement = sim.state.placement
    assert dry_round(
        sim.scheme, sim.model, sim.task, placement, sim.optimiser, 1, range(4), batch=b, steps=tau
    ).events == (ledger.events)


FLOPS = {(0, "forward"): 1.0, (0, "backward"): 2.0, (1, "forward"): 10.0, (1, "backward"): 20.0, (1, "both"): 30.0}


def stages(name, **split):
    sim = engine(name, 1, 1, sizes=[10, 10], split=split)
    flops = {part: list(sim.model.flops(*part)) for part in ((0, 1), (1, 5))}
    return fold(sim.round(1).ledger.events, Placement.split(1, 5), FLOPS), flops


def test_the_server_of_splitfed_v2_works_through_all_before_it_answers():
    (up, answer, model, average), flops = stages("splitfed-v2")
    assert (up.compute_flops, up.server_flops) == (1.0, 0.0)
    assert (answer.joint_flops, answer.unicast_bits) == (2 * 6 * sum(flops[1, 5]), 8 * 4 * 6 * 27)
    assert (model.uplink_bits, average.broadcast_bits) == (8 * 4 * 30, 8 * 4 * 30)


def test_epsl_saves_server_work():
    (first, together, own), flops = stages("epsl", **{"epsl.aggregate": 0.5})
    assert first.server_flops == 10.0 + 0.5 * 20.0  # half of the rows go back
    assert (together.joint_flops, together.broadcast_bits) == (3 * sum(flops[1, 5]), 8 * 4 * 3 * 27)  # three for all
    assert (own.unicast_bits, own.backward_flops) == (8 * 4 * 3 * 27, 2.0)


def test_batches_of_their_own_take_their_own_time():
    (up, answer, *_), flops = stages("merge-sfl", **{"merge-sfl.batches": (6, 3)})
    assert (up.compute_flops, up.uplink_bits) == ((1.0, 0.5), (8 * 6 * 109, 8 * 3 * 109))
    assert (answer.joint_flops, answer.backward_flops) == (9 * sum(flops[1, 5]), (2.0, 1.0))


def test_clusters_take_turns():
    found, _ = stages("cpsl", **{"cpsl.clusters": 2})
    one = [stage for stage in found if stage.clients == (0,)]
    assert len(one) == len(found) / 2
    assert [stage.clients for stage in found] == [(0,)] * len(one) + [(1,)] * len(one)


def test_a_pair_by_hand():
    sim = engine("fed-pairing", (1, 4), 1, sizes=[10, 10])
    flops = {
        (0, "forward"): (1.0, 4.0),
        (0, "backward"): (2.0, 8.0),
        (1, "both"): (40.0, 5.0),
    }
    up, there, back, home, *average = fold(sim.round(1).ledger.events, sim.state.placement, flops)
    data_bits = (8 * (4 * 6 * 27 + 6), 8 * (4 * 6 * 7 + 6))
    assert up == Stage("forward", (0, 1), compute_flops=(1.0, 4.0), uplink_bits=data_bits)
    # client 1 hears client 0's features and runs its last four blocks; client 0 has one block of client 1's to run
    assert there == Stage("feedback", (1, 0), unicast_bits=data_bits, backward_flops=(40.0, 5.0))
    grads = (8 * 4 * 6 * 27, 8 * 4 * 6 * 7)
    assert back == Stage("forward", (1, 0), uplink_bits=grads)
    assert home == Stage("feedback", (0, 1), unicast_bits=grads, backward_flops=(2.0, 8.0))
    assert [stage.name for stage in average] == ["model", "model"]


# from the outside


@pytest.mark.parametrize("name", now(ALL, *list(ALL)[::2]))
def test_a_stopped_run_goes_on_exactly_and_can_be_planned(name, tmp_path):
    config = with_values(Config(), scheme=name, clients=3, rounds=3, arch="cnn-small", batch=4, checkpoint_every=1)
    resumes_exactly(config, tmp_path / "run", 2)
    assert plan(config, draws=2).best.latency_s > 0


def test_the_old_epsl_is_read_from_what_runs_wrote():
    text = to_toml(with_values(Config(), scheme="epsl", **{"epsl.aggregate": 0.25}))
    assert from_toml(text).split.scheme == "epsl"
    old = text.replace("[cpsl]\nclusters = 2\n", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = from_toml(old, "old.toml")
    assert (found.split.scheme, found.epsl.aggregate) == ("epsl-cut", 0.25)
    assert [str(w.message) for w in caught] == ["old.toml: the scheme epsl is now epsl-cut"]
    assert from_toml('[split]\nscheme = "epsl"').split.scheme == "epsl"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"scheme": "merge-sfl", "merge-sfl.batches": (1, 2)}, "merge-sfl.batches: 2 numbers up to 2; give one for"),
        ({"scheme": "merge-sfl", "merge-sfl.batches": (64,)}, "merge-sfl.batches: 1 numbers up to 64; give one for"),
        (
            {"scheme": "merge-sfl", "merge-sfl.batches": (0, 1, 1)},
            "merge-sfl.batches.0: input should be greater",
        ),
        ({"scheme": "cpsl", "sync_every": 2}, "sync_every: 2 needs a parallel split scheme, not cpsl"),
        ({"scheme": "cpsl", "sync_codec": "int8"}, "sync_codec: 'int8'; cpsl hands halves on exactly"),
        ({"scheme": "epsl", "arch": "resnet18"}, "scheme: epsl puts rows of several clients together; it needs"),
        ({"scheme": "splitfed-v2", "cut": (1, 2, 1)}, "cut: splitfed-v2 with its settings needs one cut for all"),
    ],
)
def test_one_line_says_what_is_wrong(values, said):
    with pytest.raises(SplitcastError) as error:
        train(with_values(Config(), clients=3, rounds=1, **values))
    assert str(error.value).startswith(said)
