"""The bargained cut: by hand, its axioms, and in a training."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from splitcast.base.config import Config, with_values
from splitcast.cost.cell import KAPPA
from splitcast.cost.clock import time_rounds
from splitcast.cutting.bargain import energies, kalai_smorodinsky
from splitcast.run.loop import train
from splitcast.studies.plan import scenario_of

HUNDREDTHS = st.integers(0, 10_000).map(lambda number: number / 100)  # spreads that no shift swallows


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (3, 5), elements=HUNDREDTHS), st.floats(0.1, 10), st.floats(-5, 5))
def test_units_do_not_matter_and_nobody_can_have_a_larger_least_share(cost, scale, shift):
    everything = np.ones(5, dtype=bool)
    chosen = kalai_smorodinsky(cost, everything)
    spread = np.ptp(cost, axis=1, keepdims=True)
    gain = np.where(spread > 0, (cost.max(1, keepdims=True) - cost) / np.maximum(spread, 0.01), 1.0)
    assert gain[:, chosen].min() >= gain.min(0).max() - 1e-6
    other = kalai_smorodinsky(cost * scale + shift, everything)
    assert gain[:, other].min() == pytest.approx(gain[:, chosen].min(), abs=1e-6)


def test_only_what_is_allowed():
    cost = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert kalai_smorodinsky(cost, np.array([True, True, True])) == 0
    assert kalai_smorodinsky(cost, np.array([False, True, True])) == 1


def test_energy_by_hand():
    config = with_values(Config(), clients=2, arch="cnn-small", client_flops_per_s=(1e8, 2e8), scheme="psl")
    scenario = scenario_of(config)
    met = scenario.conditions([1])
    stages = scenario.stages(scenario.placements()[0], 1)
    (timed,) = time_rounds([stages], scenario.cell, met)
    forward, back = stages
    flops = forward.compute_flops + back.backward_flops
    sending = sum(stage.uplink_s[0] @ scenario.cell.client_power_w for stage in timed.stages)
    assert energies(scenario, met)[0, 0] == pytest.approx(KAPPA * flops * (1e16 + 4e16) + sending)


def test_a_training_bargains_in_every_round():
    config = with_values(Config(), policy="bargain", clients=3, rounds=3, arch="cnn-small", batch=4)
    records = train(config).rounds
    assert {record.cut for record in records} <= {1, 2, 3, 4}
    private = train(with_values(config, epsilon=0.1)).rounds
    assert min(record.cut for record in private) > 1
