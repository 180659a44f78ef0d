"""Formats for tokens: rotations against their matrices, levels against Lloyd and Max, exact rows, hostile bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.base.rounding import RoundingNoise
from splitcast.base.tokens import Lloyd, rotated, rotated_back

NAMES = [
    "rotated:8",
    "rotated:4",
    "rotated:2",
    "lloyd:4",
    "lloyd:3",
    "lloyd:2",
    "lloyd:1",
    "int4+first",
    "lloyd:2+first",
    "rotated:4+outliers",
    "int8+outliers",
]
SHAPES = [(2, 5, 24), (3, 7), (4, 2, 3, 3), (5,), (2, 1, 9), (4, 0), (0, 4), (1, 1), (3, 0, 4)]


def sample(shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed=0, shape=(4, 16, 96)):
    """As a transformer has them: a feature thirty times the others, and a first token a hundred times that."""
    x = sample(shape, seed)
    x[:, :, 7] *= 30
    x[:, 0] *= 100
    return x


@pytest.mark.parametrize("n", [1, 2, 8, 12, 64, 96])
def test_a_rotation_is_a_fixed_orthogonal_matrix(n):
    matrix = rotated(torch.eye(n, dtype=torch.float64)).T
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-12)
    x = sample((3, 5, n)).double()
    assert torch.allclose(rotated(x), x @ matrix.T, atol=1e-12)
    assert torch.allclose(rotated_back(rotated(x)), x, atol=1e-12)


def test_of_a_power_of_two_it_is_hadamards_matrix_with_signs():
    matrix = rotated(torch.eye(16, dtype=torch.float64)).T
    plain = torch.from_numpy(hadamard(16)).double() / 4
    signs = (matrix / plain)[0]
    assert torch.equal(matrix, plain * signs) and set(signs.tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("n", [64, 96])
def test_one_large_feature_is_spread_over_all(n):
    for at in (0, 7, n - 1):
        x = torch.zeros(n)
        x[at] = 1.0
        assert float(rotated(x).abs().max()) <= 0.36  # of 1; evenly it would be 0.1


def test_levels_are_those_of_the_tables():
    """Max, 1960: two bits +-0.4528, +-1.510 with a mean squared error of 0.1175; three bits 0.03454; four 0.009497."""
    assert Lloyd(1).levels.tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    assert Lloyd(2).levels.tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=1e-3)
    x = sample((1, 40, 10_000))
    for bits, error in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        assert float((Lloyd(bits).through(x) - x).square().mean()) == pytest.approx(error, rel=0.02)


def test_levels_by_hand():
    """A row of root mean square 2: thresholds at 0 and 2 * 0.9816."""
    x = torch.tensor([[0.5, -0.5, 1.9, 2.0, -3.45]])
    rms = float(x.square().mean().sqrt())
    assert rms == pytest.approx(2.0, abs=4e-3)  # rounds to 2 in bfloat16
    assert Lloyd(2).through(x[None])[0, 0].tolist() == pytest.approx(
        [0.9056, -0.9056, 0.9056, 3.0208, -3.0208], abs=1e-3
    )
    assert Lloyd(2).encode(x).tolist() == [0x00, 0x40, 0b10 | 0b01 << 2 | 0b10 << 4 | 0b11 << 6, 0b00]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drawn", [False, True])
def test_what_is_counted_is_what_is_packed_and_decoded(name, shape, drawn):
    made, clients = codec(name), [0, 1, 4]
    x = torch.stack([sample(shape, n, 10.0**n) for n in clients])

    def noise(who):
        return RoundingNoise(0, 1, 0).of("gradient", who) if drawn else None

    values, sizes = made.measured(x, noise(clients))
    assert values.shape == x.shape and values.dtype == x.dtype
    assert torch.equal(made.through(x, noise(clients)), values)
    for at, n in enumerate(clients):
        payload = made.encode(x[at], noise([n]))
        assert len(payload) == sizes[at] <= made.bound(shape)
        assert made.varies or sizes[at] == made.nbytes(shape)
        assert torch.equal(made.decode(payload, shape), values[at])


@pytest.mark.parametrize("name", ["rotated:4", "rotated:2", "rotated:8"])
def test_rotated_grids_are_right_on_average(name):
    row = sample((1, 24)) + 0.3
    seen = codec(name).through(row.expand(1, 4000, 24).contiguous(), RoundingNoise(0, 1, 0).of("gradient", [0]))[0]
    assert float((seen.mean(0) - row).abs().max()) < 5 * float((seen - row).std()) / math.sqrt(4000)


def test_sizes_by_hand():
    shape = (2, 10, 64)
    assert codec("rotated:4").nbytes(shape) == codec("lloyd:4").nbytes(shape) == 20 * 2 + 640
    assert codec("lloyd:3").nbytes(shape) == 20 * 2 + 480 and codec("lloyd:3").nbytes((1, 3)) == 2 + 2
    assert codec("lloyd:2").nbytes(shape) == 20 * 2 + 320
    assert codec("lloyd:2+first").nbytes(shape) == 2 * 64 * 4 + 18 * 2 + 18 * 16
    assert codec("lloyd:2+outliers").nbytes(shape) == 3 + 20 * 2 + 320
    assert codec("lloyd:2+outliers").bound(shape) == 3 + 10 * 64 * 4 + 10 * 2 + 160


def test_on_tokens_rotation_and_exact_rows_save_what_a_plain_grid_loses():
    x = tokens()
    rest = x[:, 1:].clone()
    rest[..., 7] = 0  # the features that a plain grid has nothing left for

    def error(name):
        seen = codec(name).through(x[None])[0][:, 1:].clone()
        seen[..., 7] = 0
        return float((seen - rest).square().sum() / rest.square().sum())

    assert error("int4") > 0.5
    assert error("rotated:4") < 0.25 * error("int4")
    first = codec("rotated:4+first").through(x[None])[0]
    assert torch.equal(first[:, 0], x[:, 0])


def test_outliers_are_exact_and_found_wherever_they_are():
    x = sample((3, 8, 32))
    x[0, 0] *= 50
    x[2, 5] *= 50
    made = codec("lloyd:2+outliers")
    payload = made.encode(x)
    seen = made.decode(payload, x.shape)
    assert torch.equal(seen[0, 0], x[0, 0]) and torch.equal(seen[2, 5], x[2, 5])
    assert payload[:3].tolist() == [1, 0, 1 << 5]
    assert len(payload) == made.nbytes(x.shape) + 2 * (4 * 32 - 2 - 8)
    assert torch.equal(seen[1], codec("lloyd:2").through(x[None])[0, 1])


def test_values_that_are_not_finite():
    for name in NAMES:
        made = codec(name)
        assert not made.through(torch.full((1, 2, 3, 8), torch.nan)).isfinite().any()
        seen = made.through(torch.full((1, 2, 3, 8), torch.finfo(torch.float32).max / 4))
        assert bool(seen.isfinite().all())


@pytest.mark.parametrize(
    "name", ["rotated:3", "rotated:", "lloyd:8", "lloyd:x", "fp32+first", "int4+last", "int4+first+first", "int4+"]
)
def test_names_that_do_not_exist_are_refused(name):
    with pytest.raises(SplitcastError, match="^uplink_codec: unknown '.*'; .*choose one of|go with") as error:
        codec(name, "uplink_codec")
    assert "\n" not in str(error.value)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["lloyd:2+outliers", "int4+outliers"]), st.integers(0, 99), st.data())
def test_rows_that_nobody_sent_are_refused_or_decoded_within_their_shape(name, seed, data):
    made, x = codec(name), tokens(seed, (2, 5, 12))
    payload = made.encode(x)
    what = data.draw(st.sampled_from(["cut", "flip", "random", "longer"]))
    if what == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    elif what == "flip":
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "random":
        payload = torch.tensor(list(data.draw(st.binary(max_size=200))), dtype=torch.uint8)
    else:
        payload = torch.cat([payload, torch.zeros(data.draw(st.integers(1, 9)), dtype=torch.uint8)])
    try:
        seen = made.decode(payload, x.shape)
    except SplitcastError as error:
        assert "\n" not in str(error)
    else:
        assert seen.shape == x.shape and what not in ("cut", "longer")
