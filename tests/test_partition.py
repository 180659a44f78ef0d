"""Division of data among clients, and mini-batches: what must hold for every input."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitcast.base.errors import SplitcastError
from splitcast.data import draw_batches, partition

kinds = st.sampled_from(["iid", "dirichlet", "shards"])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def problems(draw):
    """Labels (with classes of any size and gaps between their numbers) and a number of clients."""
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    labels = np.repeat(3 * np.arange(len(counts)), counts)
    labels = np.random.default_rng(draw(seeds)).permutation(labels)
    return labels, draw(st.integers(1, len(labels)))


def classes_held(labels, parts):
    return np.array([len(np.unique(labels[rows])) for rows in parts])


@given(problems(), kinds, st.sampled_from(["equal", "unequal"]), st.floats(1e-6, 1e6), seeds, st.data())
@settings(max_examples=200, deadline=None)
def test_rows_are_used_once_and_no_client_is_empty(problem, kind, sizes, alpha, seed, data):
    labels, clients = problem
    number = len(np.unique(labels))
    k = data.draw(st.integers(1, number))
    rng = np.random.default_rng(seed)
    parts = partition(labels, clients, kind, alpha=alpha, classes_per_client=k, sizes=sizes, rng=rng)

    assert len(parts) == clients
    assert all(len(rows) > 0 for rows in parts)
    used = np.concatenate(parts)
    assert len(np.unique(used)) == len(used)
    if kind != "shards" or clients * k >= number:
        assert len(used) == len(labels)
    if kind != "shards" and sizes == "equal":
        assert np.ptp([len(rows) for rows in parts]) <= 1


@given(problems(), st.sampled_from(["equal", "unequal"]), seeds, st.data())
@settings(max_examples=200, deadline=None)
def test_shards_give_exactly_k_classes_whenever_that_is_possible(problem, sizes, seed, data):
    labels, clients = problem
    counts = np.unique(labels, return_counts=True)[1]
    k = data.draw(st.integers(1, len(counts)))
    rng = np.random.default_rng(seed)
    held = classes_held(labels, partition(labels, clients, "shards", classes_per_client=k, sizes=sizes, rng=rng))
    places = np.minimum(counts, clients).sum()  # a class can go to as many clients as it has rows
    if places >= clients * k:
        assert (held == k).all()
    else:
        assert held.min() == places // clients


def test_shards_of_balanced_classes_are_equal():
    labels = np.tile(np.arange(10), 100)
    parts = partition(labels, 10, "shards", classes_per_client=2, rng=np.random.default_rng(0))
    assert [len(rows) for rows in parts] == [100] * 10


def test_shards_of_unbalanced_classes_are_nearly_equal():
    labels = np.repeat(np.arange(10), 500 + 20 * np.arange(10))
    parts = partition(labels, 50, "shards", classes_per_client=4, rng=np.random.default_rng(0))
    assert np.ptp([len(rows) for rows in parts]) <= 4  # whole rows in each of 4 classes


def test_fewer_places_than_classes_leaves_whole_classes_out():
    labels = np.tile(np.arange(10), 30)
    parts = partition(labels, 2, "shards", classes_per_client=2, rng=np.random.default_rng(0))
    assert (classes_held(labels, parts) == 2).all()
    assert len(np.concatenate(parts)) == 4 * 30


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_label_shares_have_the_variance_of_the_distribution(alpha):
    """Share K/m, K ~ Binomial(m, q), q ~ Beta(alpha, (C-1) alpha): Var = Var(q) + E[q (1-q)] / m."""
    C, m, clients = 5, 30, 2000
    labels = np.tile(np.arange(C), m * clients // C)
    parts = partition(labels, clients, "dirichlet", alpha=alpha, rng=np.random.default_rng(1))
    shares = np.stack([np.bincount(labels[rows], minlength=C) / m for rows in parts])
    var_q = (1 / C) * (1 - 1 / C) / (C * alpha + 1)
    expected = var_q + (1 / C - 1 / C**2 - var_q) / m
    assert shares.var() == pytest.approx(expected, rel=0.06)


def test_dirichlet_runs_from_one_label_to_the_common_mix():
    labels = np.tile(np.arange(10), 6000)
    rng = np.random.default_rng(2)
    top = {
        alpha: np.mean(
            [
                np.bincount(labels[rows]).max() / len(rows)
                for rows in partition(labels, 100, "dirichlet", alpha=alpha, rng=rng)
            ]
        )
        for alpha in (1e-3, 1e3)
    }
    assert top[1e-3] > 0.9
    assert top[1e3] < 0.15


def test_unequal_sizes_spread_as_a_log_normal():
    labels = np.zeros(100_000, dtype=int)
    parts = partition(labels, 200, "iid", sizes="unequal", rng=np.random.default_rng(3))
    assert np.std(np.log([len(rows) for rows in parts])) == pytest.approx(1.0, abs=0.15)


@given(problems(), kinds, seeds)
@settings(max_examples=30, deadline=None)
def test_same_seed_same_partition(problem, kind, seed):
    labels, clients = problem
    first, second = (
        partition(labels, clients, kind, classes_per_client=1, rng=np.random.default_rng(seed)) for _ in range(2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards"])
@pytest.mark.parametrize("alpha", [1e-3, 1e3])
def test_ten_thousand_clients_take_less_than_two_seconds(kind, alpha):
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    start = time.perf_counter()
    parts = partition(labels, 10_000, kind, alpha=alpha, sizes="unequal", rng=np.random.default_rng(0))
    assert time.perf_counter() - start < 2
    assert len(np.concatenate(parts)) == 60_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clients": 0}, ["clients = 0", "1 to 20"]),
        ({"clients": 21}, ["clients = 21", "1 to 20"]),
        ({"kind": "sorted"}, ["partition", "'sorted'", "iid, dirichlet, shards"]),
        ({"sizes": "random"}, ["sizes", "'random'", "equal, unequal"]),
        ({"kind": "dirichlet", "alpha": 0.0}, ["alpha = 0.0", "above 0"]),
        ({"kind": "dirichlet", "alpha": -1.0}, ["alpha = -1.0", "above 0"]),
        ({"kind": "dirichlet", "alpha": float("nan")}, ["alpha = nan", "finite"]),
        ({"kind": "dirichlet", "alpha": float("inf")}, ["alpha = inf", "finite"]),
        ({"kind": "shards", "classes_per_client": 0}, ["classes_per_client = 0", "1 to 4"]),
        ({"kind": "shards", "classes_per_client": 5}, ["classes_per_client = 5", "1 to 4"]),
    ],
)
def test_bad_input_is_named_in_one_line(arguments, words):
    labels = np.tile(np.arange(4), 5)
    arguments = {"clients": 2, "kind": "iid"} | arguments
    with pytest.raises(SplitcastError) as caught:
        partition(labels, rng=np.random.default_rng(0), **arguments)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 40), seeds)
@settings(deadline=None)
def test_batches_lie_within_the_client_and_repeat_only_if_they_must(sizes, batch, seed):
    rows = draw_batches(np.array(sizes), batch, np.random.default_rng(seed))
    assert rows.shape == (len(sizes), batch)
    for row, size in zip(rows, sizes, strict=True):
        assert row.min() >= 0
        assert row.max() < size
        if size >= batch:
            assert len(set(row.tolist())) == batch


@given(st.lists(st.integers(1, 40), min_size=2, max_size=10), st.integers(1, 20), seeds)
@settings(deadline=None)
def test_a_clients_batch_does_not_depend_on_other_sizes(sizes, batch, seed):
    rows = draw_batches(np.array(sizes), batch, np.random.default_rng(seed))
    others = draw_batches(np.array([sizes[0], *(s + 7 for s in sizes[1:])]), batch, np.random.default_rng(seed))
    assert np.array_equal(rows[0], others[0])


@pytest.mark.parametrize(("size", "batch", "outcomes"), [(5, 3, 5 * 4 * 3), (4, 4, 24), (3, 4, 3**4)])
def test_every_ordered_batch_is_equally_likely(size, batch, outcomes):
    draws = 12_000
    rows = draw_batches(np.full(draws, size), batch, np.random.default_rng(4))
    seen = np.unique(rows, axis=0, return_counts=True)[1]
    assert len(seen) == outcomes
    chi_square = ((seen - draws / outcomes) ** 2 / (draws / outcomes)).sum()
    freedom = outcomes - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_batches_refuse_an_empty_client_and_an_empty_batch():
    rng = np.random.default_rng(0)
    with pytest.raises(SplitcastError, match="sizes = 0 of client 1"):
        draw_batches(np.array([3, 0]), 2, rng)
    with pytest.raises(SplitcastError, match="batch = 0"):
        draw_batches(np.array([3, 2]), 0, rng)
