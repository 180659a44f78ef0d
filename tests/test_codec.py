"""Wire formats: unbiased, exact in size, bit-exact through packing; and the noise that rounds them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitcast.base.codec import Integer, Labels
from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import CODECS, codec
from splitcast.base.packing import pack, unpack
from splitcast.base.rounding import RoundingNoise
from splitcast.data import load
from splitcast.engine.engine import TEST_BATCH
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator
from stand_in import Nonzero

INTEGERS = ["int8", "int4", "int2"]
SHAPES = [(1, 1), (3, 7), (32, 2, 3, 3), (5,), (2, 1, 9), (4, 0), (0, 4)]


def noise(clients=(0,), t=1, step=0, seed=0):
    return RoundingNoise(seed, t, step).of("gradient", clients)


def sample(shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CODECS)
def test_payload_has_exactly_the_counted_bytes(name, shape):
    payload = CODECS[name].encode(sample(shape), noise())
    assert payload.dtype == torch.uint8
    assert len(payload) == CODECS[name].nbytes(shape)
    assert CODECS[name].decode(payload, shape).shape == shape


def test_sizes_by_hand():
    shape = (32, 8, 5, 5)
    assert [CODECS[name].nbytes(shape) for name in ("fp32", "fp16", "int8", "int4", "int2")] == [
        25600,
        12800,
        512 + 6400,
        512 + 3200,
        512 + 1600,
    ]
    assert Integer(2).nbytes((3, 3)) == 6 + 3  # 18 bits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("drawn", [False, True])
def test_through_many_messages_is_encode_and_decode_of_each(name, shape, drawn):
    codec, clients = CODECS[name], [0, 1, 4]
    x = torch.stack([sample(shape, n, 10.0**n) for n in clients])
    seen = codec.through(x, noise(clients) if drawn else None)
    assert seen.dtype == x.dtype
    for at, n in enumerate(clients):
        payload = codec.encode(x[at], noise([n]) if drawn else None)
        assert torch.equal(codec.decode(payload, shape), seen[at])


@pytest.mark.parametrize("name", INTEGERS)
def test_the_slow_way_of_a_codec_without_a_through_of_its_own_is_the_same(name):
    """What `Codec` makes of `encode` and `decode`, against the vectorised `through`."""
    codec, clients = CODECS[name], [0, 1, 4]
    x = torch.stack([sample((3, 7), n, 10.0**n) for n in clients])
    for draw in (None, noise(clients)):
        values, sizes = codec.measured(x, draw)
        assert torch.equal(values, codec.through(x, draw))
        assert sizes == [codec.nbytes((3, 7))] * 3


def test_sizes_that_vary_are_measured():
    x = torch.zeros(3, 2, 4)
    x[1, 0, 3], x[2] = 7.0, 1.0
    values, sizes = Nonzero().measured(x)
    assert torch.equal(values, x)
    assert sizes == [0, 5, 40]
    assert torch.equal(Nonzero().through(x), x)


@pytest.mark.parametrize(("classes", "width"), [(2, 1), (256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_labels_take_the_fewest_bytes(classes, width):
    labels, y = Labels(classes), torch.tensor([0, 1, classes - 1])
    assert labels.nbytes((3,)) == 3 * width
    payload = labels.encode(y)
    assert payload.tolist() == list(b"".join(v.to_bytes(width, "little") for v in y.tolist()))
    assert torch.equal(labels.decode(payload, (3,)), y)
    assert torch.equal(labels.through(y[None]), y[None])
    assert len(labels.encode(y[:0])) == labels.nbytes((0,)) == 0


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(SplitcastError, match="7 is not below 3"):
        Labels(3).decode(torch.tensor([0, 7], dtype=torch.uint8), (2,))


@given(st.sampled_from(list(range(1, 9))), st.data())
def test_packing_is_bit_exact(bits, data):
    levels = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    tensor = torch.tensor(levels, dtype=torch.uint8)
    packed = pack(tensor, bits)
    assert len(packed) == math.ceil(len(levels) * bits / 8)
    assert int.from_bytes(bytes(packed.tolist()), "little") == sum(q << (bits * k) for k, q in enumerate(levels))
    assert torch.equal(unpack(packed, bits, len(levels)), tensor)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(INTEGERS),
    st.integers(-20, 20),
    st.floats(-3, 3),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_integers_are_unbiased_and_within_a_step(name, exponent, shift, rectified, seed):
    """The mean of many roundings lies within 5 standard errors of every value."""
    codec, draws = CODECS[name], 4000
    row = (sample((6,), seed) + shift) * 10.0**exponent
    row = row.relu() if rectified else row
    seen = codec.through(row.expand(1, draws, 6), noise(seed=seed))[0].double()
    size = float(row.abs().max())
    half = 2 ** (codec.bits - 1)
    step = 1.02 * size / (half - 1 if float(row.min()) < 0 else codec.top)  # bfloat16 rounds up, by less than 1/64
    assert float((seen - row).abs().max()) <= step
    error = (seen.mean(0) - row.double()).abs()
    assert bool((error <= 5 * 0.5 * step / math.sqrt(draws) + 1e-5 * size).all())


@pytest.mark.parametrize("name", INTEGERS)
def test_rounding_to_nearest_without_noise(name):
    codec = CODECS[name]
    grid = torch.arange(codec.top + 1.0)
    x = grid + 0.3 * (-1.0) ** grid
    x[0], x[-1] = 0, codec.top
    assert torch.equal(codec.through(x[None, None]), grid[None, None])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("mirror", [1.0, -1.0])
def test_grids_with_negative_values_by_hand(name, mirror):
    """-2^(n-1) + 1 to 2^(n-1) where the positive side is the longer one, and the mirror image; all are kept."""
    codec, half = CODECS[name], 2 ** (CODECS[name].bits - 1)
    grid = mirror * torch.arange(1.0 - half, half + 1).repeat(20)
    assert torch.equal(codec.through(grid[None, None], noise())[0, 0], grid)
    payload = codec.encode(grid[None])
    assert payload[:2].tolist() == list(
        torch.tensor([-float(half)]).bfloat16().view(torch.uint8) | torch.tensor([mirror < 0, 0])
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(INTEGERS), st.floats(-4, 4), st.integers(0, 2**20))
def test_zero_is_always_on_the_grid(name, shift, seed):
    row = sample((9,), seed) + shift
    row[seed % 9] = 0.0
    seen = CODECS[name].through(row.expand(1, 50, 9), noise(seed=seed))
    assert not seen[:, :, seed % 9].any()


@pytest.mark.parametrize("name", INTEGERS)
def test_grid_points_zero_and_constant_rows_are_kept(name):
    codec = CODECS[name]
    grid = torch.arange(codec.top + 1.0).repeat(50)
    assert torch.equal(codec.through(grid[None, None], noise())[0, 0], grid)
    for value in (0.0, 1.5, -0.25, 2.0**-100):  # representable in bfloat16
        x = torch.full((1, 4, 100), value)
        assert torch.allclose(codec.through(x, noise()), x, rtol=2e-7, atol=0)
    sparse = torch.zeros(1, 1, 1000)
    sparse[0, 0, 0] = 3.7
    assert int((codec.through(sparse, noise()) != 0).sum()) == 1
    odd = torch.full((1, 200, 100), 1 / 3)  # not representable: right on average
    assert float(codec.through(odd, noise()).mean()) == pytest.approx(1 / 3, rel=1e-4)


@pytest.mark.parametrize("name", INTEGERS)
def test_extreme_values(name):
    codec, top = CODECS[name], torch.finfo(torch.float32).max
    x = torch.tensor([[[-top, 0.0, top], [1e-44, 0.0, 3e-44], [1e6, 1e6 + 1, 1e6 + 2], [-1.0, 0.0, torch.inf]]])
    seen = codec.through(x, noise())
    assert bool(seen.isfinite().all())
    assert seen[0, 0, 2] == 2.0**126 and seen[0, 0, 0] == -(2.0**126) * (1 - 2.0 ** (1 - codec.bits))
    assert float((seen[0, 2] - x[0, 2]).abs().max()) <= 1.01e6 / codec.top
    assert bool(codec.through(torch.tensor([[[1.0, torch.nan]]]), noise()).isnan().all())


def test_every_feature_map_has_its_own_grid():
    """A map of small values beside one of large values is rounded as if it were alone."""
    x = torch.rand(1, 8, 3, 10, 10, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 1e3]).view(
        3, 1, 1
    )
    for name in INTEGERS:
        error = (CODECS[name].through(x, noise()) - x).square().mean((0, 1, 3, 4)).sqrt()
        assert torch.allclose(error / torch.tensor([1e-3, 1, 1e3]), error[1], rtol=0.1)


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_a_row_that_is_never_negative_uses_the_whole_grid(name):
    x = torch.rand(1, 64, 400, generator=torch.Generator().manual_seed(0))
    codec = CODECS[name]
    mse = (codec.through(x, noise()) - x).square().mean()
    assert float(mse) == pytest.approx((1 / codec.top) ** 2 / 6, rel=0.05)  # E f (1 - f) = 1/6 of a squared step


def test_float64_keeps_its_type():
    x = sample((1, 3, 5)).double()
    assert all(codec.through(x, noise()).dtype == torch.float64 for codec in CODECS.values())
    assert CODECS["fp32"].through(x) is x


def test_noise_belongs_to_the_client_whoever_else_takes_part():
    alone = {n: noise([n])(37) for n in range(6)}
    for clients in ([0, 1, 2, 3, 4, 5], [1, 2, 5], [4]):
        together = noise(clients)(37)
        assert together.shape == (len(clients), 37)
        assert all(torch.equal(together[at], alone[n][0]) for at, n in enumerate(clients))
    assert not torch.equal(alone[0], alone[1])


def test_noise_differs_between_places_and_repeats_at_one():
    draws = [
        RoundingNoise(seed, t, i).of(kind, clients)
        for seed, t, i, kind, clients in [
            (0, 1, 0, "coefficients", [0]),
            (1, 1, 0, "coefficients", [0]),
            (0, 2, 0, "coefficients", [0]),
            (0, 1, 1, "coefficients", [0]),
            (0, 1, 0, "gradient", [0]),
            (0, 1, 0, "gradient", None),
        ]
    ]
    seen = [draw(8).tolist() for draw in draws]
    assert len({str(each) for each in seen}) == len(seen)
    assert [draw(8).tolist() for draw in draws] == seen
    assert RoundingNoise().of("coefficients", [0]) is None


def test_noise_is_evenly_spread_and_symmetric():
    r = noise()(400_000).double() / 2**16
    assert bool((r.abs() < 0.5).all())
    assert float(r.mean()) == pytest.approx(0, abs=5 * math.sqrt(1 / 12 / 400_000))
    assert float(r.var()) == pytest.approx(1 / 12, rel=0.01)
    counts = np.histogram(r.numpy(), bins=32, range=(-0.5, 0.5))[0]
    assert counts.min() > 0.95 * 12500 and counts.max() < 1.05 * 12500


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_last_test_tells_what_the_format_of_the_uplink_costs(clip):
    """By hand: the first block, clipped if there is a defence, then the codec, then the other blocks."""
    told = {"arch": "cnn-small", "rounds": 3, "eval_every": 2, "uplink_codec": "transform:5B", "defence.clip": clip}
    result = train(with_values(Config(), scheme="sfl", batch=8, lr=0.1, **told))
    assert "test_accuracy_lost" not in result.rounds[1].metrics
    data, (first, *others) = load("mnist-mini"), result.model().children()
    x, y = data.test_x[:1000], data.test_y[:1000]
    right = {"plain": 0, "sent": 0}
    with torch.no_grad():
        for xs, ys in zip(x.split(TEST_BATCH), y.split(TEST_BATCH), strict=True):
            smashed = first(xs)
            if clip:
                smashed = smashed * (clip / smashed.flatten(1).norm(dim=1).clamp(min=clip)).view(-1, 1, 1, 1)
            for name, seen in (("plain", smashed), ("sent", codec("transform:5B").through(smashed[None])[0])):
                right[name] += int((torch.nn.Sequential(*others)(seen).argmax(1) == ys).sum())
    lost = (right["plain"] - right["sent"]) / len(y)
    assert result.rounds[-1].metrics["test_accuracy_lost"] == pytest.approx(lost, abs=0.0021) and lost != 0
    exact = make_simulator(with_values(Config(), scheme="sfl", arch="cnn-small", rounds=1), data)
    exact.round(1)
    assert set(exact.evaluate(x, y)) == {"loss", "accuracy"}


def test_operations_of_coding_by_hand():
    """Of (32, 8, 28, 28): KLT 2 C^2 a place, DCT 2 (28 + 28) a value, 8 a value and 80 a byte; encoding also, on a
    quarter of the samples, a Gram matrix, KLT and DCT, and 9 C^3; and a search of 8 times 8 operations a value there,
    with a tenth of making it again. With three columns in common, KLT and DCT of three channels and their levels."""
    shape, values, places = (32, 8, 28, 28), 32 * 8 * 28 * 28, 32 * 28 * 28
    turned = 2 * 64 * places + 2 * 56 * values
    both = turned + 8 * values + 80 * 32 * 150
    learned = (128 * places + turned) / 4 + 9 * 512
    again = 64 * values / 4 + 0.1 * both
    assert codec("transform:150B").work(shape) == pytest.approx((both + learned + again, both))
    assert codec("transform:2.5~150B").work(shape) == pytest.approx((both + learned, both))
    alike = 2 * 8 * 3 * places + (2 * 56 + 8) * 3 * places + 80 * 32 * 150
    assert codec("transform:150B").alike(torch.eye(8)[:3], 1.0).work(shape) == pytest.approx((alike, alike))


@pytest.mark.parametrize(
    "name, shape, encode, decode",
    [
        ("int8", (4, 128), 0, 0),  # plain integers take the seconds of version 0.1.0
        ("rotated:4", (4, 128), 2 + 7 + 2 + 9, 2 + 7 + 4),  # signs, 7 sums and scale; clamp; the grid
        ("rotated:4", (4, 100), 2 * (2 + 6) + 2 + 9, 2 * (2 + 6) + 4),  # twice, over 64 each
        ("lloyd:2", (4, 128), 2 + 7 + 2 + 5 + 2, 2 + 7 + 4),
        ("int4+first", (4, 10, 128), 0.9 * 9, 0.9 * 4),
        ("int4+outliers", (4, 10, 128), 9 + 2, 4),
    ],
)
def test_operations_a_value_by_hand(name, shape, encode, decode):
    values = math.prod(shape)
    assert codec(name).work(shape) == pytest.approx((encode * values, decode * values))
