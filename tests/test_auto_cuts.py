"""Cuts from the planner: `--cut auto` before the first round, written down as numbers."""

import pytest

from resuming import resumes_exactly
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cost.memory import GB, client_memory
from splitcast.cutting.auto import DRAWS, best_placed, open_cut, with_cuts
from splitcast.cutting.fleet import mean_round
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from splitcast.schemes.schemes import SCHEMES
from splitcast.studies.compare import compare
from splitcast.studies.per_client import plan_per_client
from splitcast.studies.plan import plan, scenario_of

SPEEDS = (0.12e9, 2e9, 2e9, 2e9)
UNEVEN = {"arch": "cnn-small", "clients": 4, "bandwidth_hz": 5e6, "client_flops_per_s": SPEEDS, "rounds": 4, "batch": 8}


def uneven(**values):
    return with_values(Config(), **UNEVEN | values)


def taken(config):
    return with_cuts(config, scenario_of(config)).split.cut


@pytest.mark.parametrize("further", [{}, {"client_memory_gb": (1, 1, 1, 0.0003)}, {"energy_weight": 0.5}])
def test_each_client_takes_what_the_plan_says(further):
    config = uneven(scheme="psl", **further)
    found = plan_per_client(config, DRAWS)
    assert len(set(found.cuts)) == (3 if "client_memory_gb" in further else 2)
    assert taken(with_values(config, cut="auto")) == tuple(found.cuts)


def test_a_run_with_auto_is_the_run_with_its_numbers(tmp_path):
    config = uneven(scheme="sfl", sync_every=2)
    auto = train(with_values(config, cut="auto"), tmp_path / "auto")
    cuts = RunFolder(tmp_path / "auto").config().split.cut
    assert cuts == (1, 2, 2, 2)
    assert auto.rounds == train(with_values(config, cut=cuts)).rounds
    assert auto.summary["cuts"] == list(cuts)


def test_a_stopped_run_goes_on_with_its_own_cuts(tmp_path):
    resumes_exactly(uneven(scheme="psl", cut="auto", checkpoint_every=1), tmp_path / "run", stop_at=2)


@pytest.mark.parametrize("scheme", ["epsl", "merge-sfl", "cse-fsl", "sfl-gb", "fed-pairing"])
def test_who_needs_one_cut_takes_that_of_the_plan(scheme):
    for further in ({}, {"gamma_weight": 20.0}):
        config = uneven(scheme=scheme, **further)
        assert taken(with_values(config, cut="auto")) == plan(config, DRAWS).best.cut


@pytest.mark.long
def test_every_scheme_has_cuts_that_it_can_train():
    for scheme in SCHEMES:
        config = uneven(scheme=scheme, cut="auto", rounds=1)
        assert len(train(config).rounds) == 1, scheme


def test_a_server_that_does_not_wait_and_a_cap_have_one_cut():
    for further in ({"wait_for": 2}, {"energy_cap_j": 5.0}):
        assert isinstance(taken(uneven(scheme="psl", cut="auto", **further)), int)


def test_equal_shares_never_take_a_fleet_that_is_slower_than_one_cut():
    for band in (1e6, 2e7):
        config = uneven(scheme="psl", cut="auto", allocation="equal", bandwidth_hz=band)
        scenario = scenario_of(config)
        met = scenario.conditions(range(1, DRAWS + 1))
        seconds = [mean_round(scenario, place, met, scenario.allocator)[0] for place in scenario.placements()]
        assert mean_round(scenario, best_placed(scenario), met, scenario.allocator)[0] <= min(seconds) * (1 + 1e-9)


def test_limits_that_leave_nothing():
    private = uneven(scheme="psl", cut="auto", epsilon=0.01)
    assert taken(private) == 4
    scenario = scenario_of(private)
    needs = {
        place.cut: client_memory(scenario.model, place, scenario.optimiser, 8).total / GB
        for place in scenario.placements()
    }
    with pytest.raises(SplitcastError, match="cut: none is left for client 0"):  # 2 is the first that is private
        taken(with_values(private, client_memory_gb=(needs[2] * 0.99, 1.0, 1.0, 1.0)))
    with pytest.raises(SplitcastError, match="cut: 'auto' finds none that all clients may have"):
        taken(with_values(private, client_memory_gb=(needs[2] * 0.99, 1.0, 1.0, 1.0), wait_for=2))


@pytest.mark.long
def test_a_comparison_plans_for_every_scheme_and_seed(tmp_path):
    config = uneven(cut="auto", rounds=1, fading="none")
    for _ in range(2):  # the second time everything is there
        compare(config, ["psl", "epsl"], tmp_path, seeds=2)
    for seed, name in enumerate(("psl", "psl,seed=1")):
        own = with_values(config, scheme="psl", seed=seed)
        assert RunFolder(tmp_path / name).config().split.cut == taken(own)
    assert isinstance(RunFolder(tmp_path / "epsl").config().split.cut, int)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"policy": "greedy"}, "cut: 'auto' needs policy fixed; greedy chooses cuts by itself"),
        ({"lora.side": "client"}, "cut: 'auto' needs lora.side both, not 'client'"),
    ],
)
def test_what_auto_cannot_do_is_one_line(values, said):
    config = uneven(cut="auto", **values)
    with pytest.raises(SplitcastError, match=said):
        with_cuts(config, scenario_of(with_values(open_cut(config), **{"lora.side": "both"})))


def test_numbers_are_asked_for_where_nothing_is_planned():
    with pytest.raises(SplitcastError, match="cut: 'auto' is chosen when a training begins; give a number here"):
        _ = with_values(Config(), cut="auto").split.cuts
    with pytest.raises(SplitcastError, match="give a number, one for every client as in 1,1,2,4, or auto"):
        with_values(Config(), cut="every")
