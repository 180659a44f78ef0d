"""Policies: exact where they claim it, legal always, and what they do to a training."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lengths import now
from splitcast import data
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.cost.clock import round_seconds
from splitcast.cost.scenario import Scenario
from splitcast.cost.stages import Stage
from splitcast.cutting.costs import CutCosts, EpisodeCosts
from splitcast.cutting.ddqn import Agent, QNetwork
from splitcast.cutting.encoder import Encoder
from splitcast.cutting.policies import CutSelector, Situation, best_path, greedy, make_policy, myopic, rollout
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.schemes.messages import Ledger
from splitcast.studies.learn import _judged
from splitcast.studies.weights import gamma_weight
from splitcast.training.task import Classification
from test_cli import refused
from test_run import unchained

QUICK = with_values(
    Config(), arch="cnn-small", clients=4, batch=4, rounds=8, checkpoint_every=3, workload="paper", gamma_weight=0.05
)
TINY = ["--arch", "cnn-small", "--rounds", "2", "--batch", "4", "--clients", "3"]
MODEL, TASK = build("cnn-small", (1, 28, 28), 10, seed=0), Classification(10)
SIZES = [MODEL.client_size(cut) for cut in MODEL.cuts]


def make_cut_costs(charge=True, **values):
    return CutCosts(Scenario.of(with_values(QUICK, **values), MODEL, TASK), charge_moves=charge)


def zigzag(here: Situation) -> int:
    """A user's policy: a different cut every round."""
    return here.legal[here.round % len(here.legal)]


def lawless(here: Situation) -> int:
    return 17


NOT_A_FUNCTION = 3


def total(cost, move, path):
    moved = sum(move[t, path[t - 1], path[t]] for t in range(1, len(path)))
    return sum(cost[t, v] for t, v in enumerate(path)) + moved


@st.composite
def problems(draw, rounds, cuts):
    t, c = draw(st.integers(1, rounds)), draw(st.integers(1, cuts))
    numbers = st.floats(0, 100, allow_subnormal=False)
    move = draw(arrays(np.float64, (t, c, c), elements=numbers))
    move[:, np.arange(c), np.arange(c)] = 0
    return draw(arrays(np.float64, (t, c), elements=numbers)), move


@given(problems(rounds=5, cuts=3))
@settings(max_examples=60, deadline=None)
def test_the_clairvoyant_path_is_the_best_of_all(problem):
    cost, move = problem
    least = min(total(cost, move, path) for path in product(range(cost.shape[1]), repeat=len(cost)))
    assert total(cost, move, best_path(cost, move)) == pytest.approx(least, abs=1e-9)


@given(problems(rounds=7, cuts=4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_no_path_beats_the_clairvoyant(problem, chance):
    cost, move = problem
    best = total(cost, move, best_path(cost, move))
    there = cost.argmin(1)
    anywhere = [chance.randrange(cost.shape[1]) for _ in cost]
    for path in (there, anywhere, *np.repeat(np.arange(cost.shape[1])[:, None], len(cost), axis=1)):
        assert best <= total(cost, move, path) + 1e-9


@pytest.mark.parametrize("values", [{}, {"epsilon": 0.05}, {"scheme": "sfl"}, {"gamma_weight": 1.0}])
def test_flights_of_every_policy_are_legal_and_the_clairvoyant_is_first(values):
    world = make_cut_costs(**values)
    known = world.trace(30)
    costs = {}
    for name in ("clairvoyant", "greedy", "myopic", "random", "fixed:4"):
        flight = rollout(CutSelector(world, make_policy(name, world, known, 1), known))
        assert world.legal[flight.cuts - 1].all()
        assert flight.cost == pytest.approx(total(known.cost, known.move_s, flight.cuts - 1))
        costs[name] = flight.cost
    assert costs["clairvoyant"] == min(costs.values())


@pytest.mark.parametrize("scheme", now(["sfl-ga", "sfl", "sfl-gb"], "sfl-gb"))
def test_costs_of_a_training_are_those_of_who_takes_part(scheme):
    values = {"scheme": scheme, "participation": 0.5, "dropout": 0.3}
    costs = make_cut_costs(**values).trace(8).cost - make_cut_costs(**values).weighted_gamma
    for cut in (1, 2, 4):
        run = train(with_values(QUICK, cut=cut, **values))
        assert costs[:, cut - 1] == pytest.approx([record.latency_s for record in run.rounds], rel=1e-9)


def test_greedy_is_the_minimum_over_the_cuts_and_exact_while_moves_are_free():
    world = make_cut_costs(charge=False, epsilon=0.01)
    known = world.trace(40)
    masked = np.where(world.legal, known.cost, np.inf)
    flown = {
        name: rollout(CutSelector(world, make_policy(name, world, known, 1), known))
        for name in ("greedy", "clairvoyant")
    }
    np.testing.assert_array_equal(flown["greedy"].cuts, masked.argmin(1) + 1)
    assert flown["greedy"].cost == pytest.approx(masked.min(1).sum()) == pytest.approx(flown["clairvoyant"].cost)


def test_greedy_ignores_moves_and_myopic_counts_them():
    here = Situation(
        2, np.ones(1), (1, 2, 3), (2, 3), 2, np.array([0.0, 2.0, 1.0]), np.array([0.0, 0.0, 5.0]), 0.0, None
    )
    assert greedy(here) == 3
    assert myopic(here) == 2


def test_a_learned_policy_never_leaves_the_legal_cuts():
    world = make_cut_costs(epsilon=0.05)
    code = Encoder.of(world, 8)
    network = QNetwork(code.size, 4, 4)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([9.0, 8.0, 1.0, 2.0]))  # wants an illegal cut
    from splitcast.cutting.policies import learned

    assert not world.legal[0]
    known = world.trace(8)
    best = int(np.where(world.legal, [9, 8, 1, 2], -np.inf).argmax()) + 1
    assert set(rollout(CutSelector(world, learned(Agent(network, code, "")), known)).cuts) == {best}


def test_training_moves_the_cut_and_charges_bytes_and_seconds_by_hand(tmp_path):
    config = with_values(QUICK, policy=f"{__name__}:zigzag", rounds=5)
    charged = train(config, tmp_path / "a")
    free = train(with_values(config, charge_migration=False))
    cuts = [record.cut for record in charged.rounds]
    assert cuts == [2, 3, 4, 1, 2]  # legal[t % 4]
    world = make_cut_costs()
    gains = world.trace(5).gains
    for t, (mine, theirs) in enumerate(zip(charged.rounds, free.rounds, strict=True)):
        assert mine.loss == theirs.loss and mine.cut == theirs.cut
        moved = SIZES[cuts[t] - 1] - SIZES[cuts[t - 1] - 1] if t else 0
        down, up = max(0, 4 * moved), 4 * max(0, -4 * moved)  # one broadcast; an upload from each of 4 clients
        assert mine.kinds.get("down.migration", 0) == mine.down_bytes - theirs.down_bytes == down
        assert mine.kinds.get("up.migration", 0) == mine.up_bytes - theirs.up_bytes == up
        bits = {"broadcast_bits": 8 * down} if down else {"uplink_bits": 8 * up // 4}
        stage = [Stage("re-cut", (0, 1, 2, 3), **bits)]
        seconds = float(round_seconds([stage], world.scenario.cell, gains[t])[0]) if moved else 0.0
        assert mine.latency_s - theirs.latency_s == pytest.approx(seconds, rel=1e-6, abs=1e-12)
    assert charged.summary["moves"] == 4
    assert charged.summary["rounds_per_cut"] == {"1": 1, "2": 2, "3": 1, "4": 1}


@pytest.mark.parametrize("name", ["greedy", "clairvoyant", "random", "zigzag"])
def test_the_world_foresees_what_a_training_costs(name):
    config = with_values(QUICK, policy=f"{__name__}:zigzag" if name == "zigzag" else name)
    result = train(config)
    pilot = CutSelector.of(make_cut_costs(), config.policy.policy, 8)
    flight = rollout(pilot)
    assert [record.cut for record in result.rounds] == flight.cuts.tolist()
    assert sum(pilot.cost(r.cut, r.latency_s) for r in result.rounds) == pytest.approx(flight.cost, rel=1e-6)


@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl", "sl"])
def test_moving_the_cut_never_changes_the_averaged_model(monkeypatch, scheme):
    images = data.load("mnist-mini")
    moved = []
    place = Simulator.place

    def watched(self, cut, ledger, *, charge=True):
        def logits():
            return self.model.forward(self.state.averaged(self.weights), images.test_x[:50], 0, self.model.depth)

        before, was = logits(), self.state.placement.cut
        place(self, cut, ledger, charge=charge)
        torch.testing.assert_close(logits(), before, rtol=0, atol=1e-5)
        moved.append(was != cut)

    monkeypatch.setattr(Simulator, "place", watched)
    train(with_values(QUICK, scheme=scheme, policy="random", momentum=0.5, rounds=6))
    assert sum(moved) >= 3


@pytest.mark.parametrize("stop", now([1, 5, 7], 5))
@pytest.mark.parametrize("name", now(["random", "clairvoyant", "ddqn"], "ddqn"))
def test_a_run_with_changing_cuts_resumes_bit_exactly(tmp_path, name, stop):
    config = with_values(QUICK, policy=name, momentum=0.5, partition="dirichlet", participation=0.8)
    if name == "ddqn":
        torch.manual_seed(2)
        code = Encoder.of(make_cut_costs(), 8)
        network = QNetwork(code.size, 16, 4)
        with torch.no_grad():
            network.body[0].weight[:, 4].mul_(20)  # a policy that heeds the cost so far
        Agent(network, code, make_cut_costs(momentum=0.5).digest()).save(tmp_path / "p.safetensors")
        config = with_values(config, policy=f"ddqn:{tmp_path / 'p.safetensors'}")

    def die(record):
        if record.round == stop:
            raise KeyboardInterrupt

    whole = train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", on_round=die)
    resumed = train(config, tmp_path / "broken", resume=True)
    assert unchained(tmp_path / "whole") == unchained(tmp_path / "broken")
    a, b = whole.engine.state.tensors(), resumed.engine.state.tensors()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_gamma_is_measured_once_and_kept_with_the_run(tmp_path, monkeypatch):
    config = with_values(QUICK, policy="greedy", gamma_draws=2, rounds=4, checkpoint_every=1)
    whole = train(config, tmp_path / "a")
    gamma = RunFolder(tmp_path / "a").measured("gamma")
    assert len(gamma) == 4 and all(g > 0 for g in gamma) and list(gamma) == sorted(gamma)
    (tmp_path / "a" / "summary.json").unlink()
    monkeypatch.setattr("splitcast.run.selecting.estimate_gamma", None)  # must not be asked again
    assert train(config, tmp_path / "a", resume=True).rounds == whole.rounds
    (tmp_path / "a" / "gamma.json").write_text("[]")
    with pytest.raises(SplitcastError, match="gamma.json is damaged"):
        train(config, tmp_path / "a", resume=True)


def test_a_huge_weight_on_gamma_keeps_the_cut_shallow():
    deep = train(with_values(QUICK, policy="greedy", gamma=[9.0, 9.0, 9.0, 0.0], gamma_weight=1e3, rounds=3))
    assert {record.cut for record in deep.rounds} == {4}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "gredy"], ["policy", "'gredy'", "greedy, myopic"]),
        (["--policy", "ddqn"], ["policy", "'ddqn'", "ddqn:FILE"]),
        (["--policy", "ddqn:absent.safetensors"], ["policy", "absent.safetensors", "splitcast learn"]),
        (["--policy", "fixed:9"], ["cut", "9", "1..4"]),
        (["--policy", "fixed:two"], ["policy", "'fixed:two'", "number"]),
        (["--policy", "fixed:1", "--epsilon", "0.1"], ["cut", "1", "epsilon 0.1"]),
        (["--policy", "nosuchmodule:f"], ["policy", "cannot import 'nosuchmodule:f'"]),
        (["--policy", f"{__name__}:nothing"], ["policy", "cannot import"]),
        (["--policy", f"{__name__}:NOT_A_FUNCTION"], ["policy", "is not a function of 1 argument"]),
        (["--policy", "greedy", "--scheme", "fl"], ["policy", "fl has no cut"]),
        (["--policy", "greedy", "--epsilon", "0.7"], ["epsilon", "0.7", "largest feasible"]),
        (
            ["--policy", "greedy", "--gamma-draws", "2", "--gamma", "1", "2", "3", "4"],
            ["gamma_draws", "gamma is given"],
        ),
    ],
)
def test_bad_policies_are_one_line_and_leave_nothing_behind(capsys, tmp_path, flags, words):
    out = tmp_path / "run"
    line = refused(capsys, "train", *TINY, *flags, "--out", str(out))
    for word in words:
        assert word in line
    assert not out.exists()


def test_policies_for_another_cell_are_refused(capsys, tmp_path):
    code = Encoder.of(make_cut_costs(), 8)  # 4 clients
    Agent(QNetwork(code.size, 4, 4), code, "").save(tmp_path / "p.safetensors")
    line = refused(
        capsys, "train", *TINY, "--policy", f"ddqn:{tmp_path / 'p.safetensors'}", "--out", str(tmp_path / "r")
    )
    assert "learned for 4 clients, not 3" in line


def test_an_illegal_choice_of_a_users_policy_is_named():
    with pytest.raises(SplitcastError, match=r"policy: .*:lawless chose cut 17 in round 1; legal are \[1, 2, 3, 4\]"):
        train(with_values(QUICK, policy=f"{__name__}:lawless"))


@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl-gb"])
def test_fixed_policies_are_plain_training(scheme):
    short = with_values(QUICK, scheme=scheme, rounds=3)
    plain, named = (train(with_values(short, **v)) for v in ({"cut": 3}, {"policy": "fixed:3"}))
    assert plain.rounds == named.rounds
    assert {record.cut for record in named.rounds} == {3}


def test_sfl_gb_suits_itself_to_the_cut_that_a_policy_picks():
    config = with_values(QUICK, scheme="sfl-gb", policy=f"{__name__}:down_and_up")
    moved = train(config).rounds
    for cut in (1, 4):
        still = train(with_values(config, cut=cut, policy="fixed")).rounds
        for here, there in zip(moved, still, strict=True):
            sent = {kind: n for kind, n in here.kinds.items() if not kind.endswith("migration")}
            assert here.cut != cut or sent == there.kinds
    assert [r.cut for r in moved if "up.migration" in r.kinds] == []  # cut 4 averages in every round
    world = CutCosts(Scenario.of(config, MODEL, TASK))
    assert world.trace(8).move_s[3, 3, 0] == 0 < world.trace(8).move_s[3, 1, 0]


def down_and_up(situation):
    return 4 if situation.round < 5 else 1


def test_learn_then_train_from_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    main(["learn", *TINY, "--episodes", "20", "--hidden", "8", "--held-out", "2", "--out", str(tmp_path), "--quiet"])
    assert "privacy violations" in capsys.readouterr().out
    for name in ("policy.safetensors", "learned.json", "learning.png", "learning.svg"):
        assert (tmp_path / name).stat().st_size > 0
    policy = f"ddqn:{tmp_path / 'policy.safetensors'}"
    main(["train", *TINY, "--policy", policy, "--quiet", "--out", str(tmp_path / "run")])
    assert RunFolder(tmp_path / "run").summary()["policy"] == policy
    assert capsys.readouterr().err == ""
    main(["train", *TINY, "--policy", policy, "--quiet", "--out", str(tmp_path / "other"), "--bandwidth-hz", "1e6"])
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1 and "learned for another scenario" in warned
    assert "episodes" in refused(capsys, "learn", *TINY, "--episodes", "0", "--out", str(tmp_path / "x"))
    assert "fl has no cut" in refused(capsys, "learn", *TINY, "--scheme", "fl", "--out", str(tmp_path / "x/y"))
    assert not (tmp_path / "x").exists()


def test_placing_before_the_first_round_is_free():
    sim = make_simulator(QUICK, data.load("mnist-mini"))
    ledger = Ledger()
    sim.place(sim.scheme.place(3, sim.model.depth), ledger)
    assert ledger.total("up") == 0 and ledger.total("down") == 4 * (SIZES[2] - SIZES[0])
    assert (
        train(with_values(QUICK, policy=f"{__name__}:zigzag", rounds=1)).rounds[0].kinds.keys() & {"down.migration"}
        == set()
    )


def test_costs_of_one_episode_can_be_taken_apart():
    known = make_cut_costs().trace(3)
    assert isinstance(known, EpisodeCosts)
    assert known.gains.shape == (3, 4) and known.cost.shape == (3, 4) and known.move_s.shape == (3, 4, 4)


def test_policies_are_told_by_median_and_quantile_too():
    """Of costs 1 to 5: the 95 % quantile is 4.8."""
    row = _judged("x", np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.ones((5, 2), dtype=int), 2.0, make_cut_costs(), 0)
    assert (row.cost, row.median, row.p95, row.above_best) == (3.0, 3.0, pytest.approx(4.8), 0.5)


def trained(path, reached, seconds=2.0, **values):
    """A run folder whose first test at 50 % is after round ``reached``, in rounds of ``seconds``."""
    folder = RunFolder(path)
    folder.create(with_values(QUICK, gamma=(0.5, 1.0, 3.0, 9.0), policy="fixed", rounds=20, stop_at=0.5, **values))
    rest = {"clients": 4, "loss": 1.0, "up_bytes": 1, "down_bytes": 1, "kinds": {"up.smashed": 1, "down.gradient": 1}}
    rest |= {"drift": 0.0, "slowest_client": 0, "slowest_part": "uplink", "cut": values["cut"]}
    for t in range(1, reached + 1):
        folder.append(RoundRecord(round=t, latency_s=seconds, test_accuracy=0.5 if t == reached else 0.1, **rest))
    return path


def test_the_weight_of_gamma_from_run_folders(tmp_path):
    """Γ = 0.5, 1 and 3 took 6, 7 and (10 + 12) / 2 rounds, 5 + 2 Γ; of 2, 2, 1 and 3 s: w = 2 · 2 / 5."""
    rounds = {(1, 0): (6, 2.0), (2, 0): (7, 2.0), (3, 0): (10, 1.0), (3, 1): (12, 3.0)}
    runs = [trained(tmp_path / f"{cut}-{seed}", *each, cut=cut, seed=seed) for (cut, seed), each in rounds.items()]
    assert gamma_weight(runs) == gamma_weight(runs, 0.5) == pytest.approx(0.8)
    assert gamma_weight(runs, gamma=[1.0, 2.0, 6.0, 7.0]) == pytest.approx(0.4), "Γ in other units, w Γ the same"
    other = trained(tmp_path / "other", 6, cut=4, lr=0.5)
    for which, target, said in (
        ([], None, "differ in cut and seed only"),
        (runs[:1], None, "at least two that differ"),
        ([*runs, other], None, "differ in cut and seed only"),
        (runs, 0.9, "never gets to 90 %"),
    ):
        with pytest.raises(SplitcastError, match=said) as refused_:
            gamma_weight(which, target)
        assert "\n" not in str(refused_.value)
