"""Formats of other papers: against slow copies and cases worked out by hand; packed bytes; bytes that nobody packed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitcast.base.comparators.fedlite import clustered
from splitcast.base.comparators.splitfc import POINTS, _chances, _drawn, _levels
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.base.rounding import RoundingNoise

NAMES = ["topk:10%", "randtopk:10%", "randtopk:60%@0.5", "c3sl:1", "c3sl:4", "fedlite:6,5", "fedlite:1000,2"]
NAMES += ["splitfc:0.5/4", "splitfc:2/1", "splitfc:0.01/8"]
SHAPES = [(8, 6, 7, 5), (3, 7), (2, 3, 16), (5,), (4, 0), (0, 4), (1, 1), (33, 10)]


def sample(shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def noise(clients=(0,), t=1):
    return RoundingNoise(0, t, 0).of("smashed", list(clients), always=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drawn", [False, True])
def test_what_is_counted_is_what_is_packed_and_decoded(name, shape, drawn):
    made, clients = codec(name), [0, 1, 4]
    x = torch.stack([sample(shape, n, 10.0**n) for n in clients])
    values, sizes = made.measured(x, noise(clients) if drawn else None)
    assert values.shape == x.shape and made.name == name
    for at, n in enumerate(clients):
        payload = made.encode(x[at], noise([n]) if drawn else None)
        assert len(payload) == sizes[at] <= made.bound(shape)
        assert made.varies or sizes[at] == made.nbytes(shape)
        assert torch.equal(made.decode(payload, shape), values[at])


def test_sizes_by_hand():
    shape = (32, 32, 14, 14)  # 6272 values a sample
    assert codec("topk:1%").nbytes(shape) == 32 * 63 * 4 + 32 * 63 * 13 // 8
    assert codec("randtopk:50%").nbytes(shape) == 32 * 3136 * 4 + 32 * 6272 // 8  # a bit for every value
    assert codec("c3sl:4").nbytes(shape) == 8 * 6272 * 4
    assert codec("c3sl:5").nbytes(shape) == 7 * 6272 * 4
    assert codec("fedlite:1568,16").nbytes(shape) == 16 * 4 * 4 + 32 * 1568 // 2
    assert codec("fedlite:1568,5").nbytes(shape) == 5 * 4 * 4 + 32 * 1568 * 3 // 8
    assert codec("splitfc:0.2/16").nbytes(shape) == math.ceil(0.2 * 32 * 6272 / 8)


def test_the_largest_values_by_hand():
    x = torch.tensor([[0.1, -3.0, 0.0, 2.0], [5.0, 1.0, -1.5, 0.0]])
    made = codec("topk:50%")
    assert made.through(x[None])[0].tolist() == [[0.0, -3.0, 0.0, 2.0], [5.0, 0.0, -1.5, 0.0]]
    assert made.encode(x)[16:].tolist() == [1 | 3 << 2 | 0 << 4 | 2 << 6]  # places
    assert torch.equal(codec("randtopk:50%").through(x[None])[0], made.through(x[None])[0])  # nothing is drawn


def test_others_are_chosen_as_often_as_they_should():
    """k = 4 of 12 values, a = 0.25: each of the largest 4 in 3/4 of all samples, each of the others in 1/8."""
    x = torch.arange(1.0, 13).expand(3000, 12)
    seen = codec("randtopk:33%@0.25").through(x[None].contiguous(), noise())[0]
    assert torch.equal(seen[seen != 0], x[seen != 0])
    assert bool(((seen != 0).sum(1) == 4).all())
    often = (seen != 0).double().mean(0)
    within = 5 * 0.45 / math.sqrt(3000)
    assert often[8:].tolist() == pytest.approx([0.75] * 4, abs=within)
    assert often[:8].tolist() == pytest.approx([0.125] * 8, abs=within)
    others = (seen[:, :8] != 0).sum(1).double()  # binomial
    assert float(others.var()) == pytest.approx(4 * 0.25 * 0.75, rel=0.1)


def test_what_is_drawn_depends_on_client_and_round_alone():
    made, x = codec("randtopk:10%"), sample((4, 100))
    again = made.encode(x, noise([3]))
    assert torch.equal(made.measured(torch.stack([x, x]), noise([1, 3]))[0][1], made.decode(again, x.shape))
    assert not torch.equal(made.encode(x, noise([2])), again)
    assert not torch.equal(made.encode(x, noise([3], t=2)), again)


def test_binding_is_circular_convolution_and_its_adjoint():
    """Against sums over all places: S_m = sum_i sum_j k_i[j] z_i[m - j], and z'_i[m] = sum_j k_i[j] S[m + j]."""
    d, ratio = 9, 2
    made, z = codec(f"c3sl:{ratio}"), sample((ratio, d))
    keys = made.decode(made.encode(torch.eye(d)[:1].repeat(1, 1)), (1, d))  # correlation of a key with itself
    assert float(keys[0, 0]) == pytest.approx(1.0, abs=1e-6)  # a key has length one
    parts = torch.stack([torch.stack([_sent(made, i, shift, d, ratio) for shift in range(d)]) for i in range(ratio)])
    key = parts[:, 0]  # what an impulse at place 0 becomes
    for i in range(ratio):
        for shift in range(d):
            assert torch.allclose(parts[i, shift], key[i].roll(shift), atol=1e-6)
    bound = sum(z[i, j] * key[i].roll(j) for i in range(ratio) for j in range(d))
    assert torch.allclose(made.encode(z).view(torch.float32), bound, atol=1e-5)
    back = torch.stack([torch.stack([(key[i].roll(m) * bound).sum() for m in range(d)]) for i in range(ratio)])
    assert torch.allclose(made.decode(made.encode(z), z.shape), back, atol=1e-5)


def _sent(made, i, shift, d, ratio):
    z = torch.zeros(ratio, d)
    z[i, shift] = 1.0
    return made.encode(z).view(torch.float32)


def test_a_gradient_through_binding_is_the_chain_rule():
    """<g, D E z> = <D E g, z>: the down link in the same format pulls back through what the up link did."""
    made, z, g = codec("c3sl:4"), sample((8, 50), 1), sample((8, 50), 2)
    left, right = (g * made.through(z[None])[0]).sum(), (made.through(g[None])[0] * z).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-4)


def test_the_noise_of_bound_samples_is_as_large_as_the_other_samples():
    z = sample((400, 512))
    error = (codec("c3sl:2").through(z[None])[0] - z).square().sum() / z.square().sum()
    assert float(error) == pytest.approx(2.0, rel=0.15)  # one from the own key, which is not flat, one from the other


def test_codebooks_against_plain_k_means():
    """Pieces around five points: the points are found, and every piece goes to the nearest."""
    rng = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(5, 3, generator=rng)
    member = torch.randint(0, 5, (4000,), generator=rng)
    points = centres[member] + 0.1 * torch.randn(4000, 3, generator=rng)
    book, nearest = clustered(points, 5)
    distance = torch.cdist(points.double(), book.double())
    assert torch.equal(distance.argmin(1), nearest)
    for k in range(5):
        assert torch.allclose(book[k], points[nearest == k].mean(0), atol=1e-3)
    assert float(torch.cdist(centres, book).min(1).values.max()) < 0.05


def test_as_many_centroids_as_different_pieces_lose_nothing():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 1.0, 2.0], [3.0, 4.0, 1.0, 2.0, 0.0, 0.0]])
    assert torch.equal(codec("fedlite:3,3").through(x[None])[0], x)
    one = codec("fedlite:3,1").through(x[None])[0]
    assert torch.allclose(one, torch.tensor([9 / 6, 14 / 6]).repeat(2, 3), atol=1e-6)  # the mean piece


def test_columns_that_vary_are_sent_more_often_and_are_right_on_average():
    x = sample((16, 8, 2, 2), scale=1.0) * torch.linspace(0.1, 2, 4).view(1, 1, 2, 2)
    chance = _chances(x.double().reshape(16, -1).numpy(), x.shape, 8)
    assert chance.sum() == pytest.approx(8) and chance.max() <= 1
    order = chance.reshape(8, 4)
    assert bool((order[:, 0] < order[:, 3]).all())
    often = np.zeros(32)
    for start in (np.arange(1000) + 0.5) / 1000:
        at = _drawn(chance, start)
        assert len(set(at)) == 8
        often[at] += 1
    assert often / 1000 == pytest.approx(chance, abs=2e-3)


def test_chances_by_hand():
    """Spreads 1, 1, 2 of which two are sent: 2 * 2 / 4 = 1 is just possible; of 1, 1, 6: c = (12 - 8) / 1 = 4."""
    plain = np.array([[-1.0, -1.0, -2.0], [1.0, 1.0, 2.0]])
    assert _chances(plain, (2, 3), 2) == pytest.approx([0.5, 0.5, 1.0])
    wide = np.array([[-1.0, -1.0, -6.0], [1.0, 1.0, 6.0]])
    assert _chances(wide, (2, 3), 2) == pytest.approx([2 * 5 / 20, 2 * 5 / 20, 1.0])


def test_levels_solve_their_equation_and_are_the_best_there_are():
    ranges = np.array([3, 40, 199], np.int32)
    for k in (1e-3, 0.7, 40.0):
        found = _levels(ranges, k)
        for levels, width in zip(found, ranges, strict=True):
            u = np.roots([1, 0, -k * width**2, -k * width**2])
            exact = 1 + max(u[np.isreal(u)].real)
            assert levels == max(2, math.floor(exact + 1e-9))
    # among all whole numbers with as many bits in all, none has a smaller error than a few percent
    k, bits = 40.0, float(np.log2(_levels(ranges[:2], 40.0)).sum())
    ours = sum((w / (q - 1)) ** 2 for w, q in zip(ranges[:2], _levels(ranges[:2], k), strict=True))
    pairs = ((a, b) for a in range(2, 2000) for b in [math.floor(2**bits / a)] if b >= 2)
    best = min((3 / (a - 1)) ** 2 + (40 / (b - 1)) ** 2 for a, b in pairs)
    assert ours <= 1.1 * best


def test_quantised_columns_are_as_good_as_their_bits():
    x = sample((32, 64)) * torch.logspace(-1, 1, 64)
    errors = []
    for bits in (1, 2, 4, 8):
        made = codec(f"splitfc:{bits}/1")
        seen = made.through(x[None])[0]
        errors.append(float((seen - x).square().sum() / x.square().sum()))
        assert len(made.encode(x)) <= bits * 32 * 64 / 8 + 16
    assert errors == sorted(errors, reverse=True) and errors[1] < 0.1 and errors[3] < 1e-3
    constant = torch.full((4, 5), 3.25)
    assert torch.allclose(codec("splitfc:1/1").through(constant[None])[0], constant, atol=1e-5)
    assert POINTS == 200


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite_are_seen_by_whoever_receives(name):
    made = codec(name)
    x = sample((4, 24))
    x[1, 3] = torch.nan
    seen = made.decode(made.encode(x), x.shape)
    assert not seen.isfinite().all() or name.startswith(("topk", "randtopk"))
    big = torch.full((4, 24), torch.finfo(torch.float32).max)
    assert len(made.encode(big)) <= made.bound(big.shape)
    made.decode(made.encode(big), big.shape)


@pytest.mark.parametrize(
    "name",
    [
        "topk:",
        "topk:0%",
        "topk:101%",
        "topk:5",
        "topk:5%@0.1",
        "randtopk:5%@2",
        "randtopk:x",
        "c3sl:0",
        "c3sl:x",
        "c3sl:²",
        "c3sl:2000",
        "fedlite:3",
        "fedlite:0,2",
        "fedlite:2,0",
        "fedlite:a,b",
        "splitfc:0/2",
        "splitfc:1",
        "splitfc:33/1",
    ],
)
def test_names_that_cannot_be_are_refused(name):
    with pytest.raises(SplitcastError, match="^uplink_codec: unknown '.*'; give ") as error:
        codec(name, "uplink_codec")
    assert "\n" not in str(error.value)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from([(8, 6, 2, 5), (3, 7), (1, 1), (5, 40)]), st.data())
def test_bytes_that_nobody_packed_are_refused_or_decoded_within_their_shape(name, shape, data):
    made = codec(name)
    payload = made.encode(sample(shape, data.draw(st.integers(0, 9)))).clone()
    what = data.draw(st.sampled_from(["cut", "flip", "random"])) if made.varies else "random"
    if what == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    elif what == "flip":
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:  # where sizes are fixed, no other gets as far as this
        size = data.draw(st.integers(0, made.bound(shape))) if made.varies else len(payload)
        rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
        payload = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    try:
        seen = made.decode(payload, shape)
    except SplitcastError as error:
        assert "\n" not in str(error)
    else:
        assert seen.shape == shape
