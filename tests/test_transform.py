"""Transform coding: decoded as measured, within bound and rate, against a plain copy, and with streams nobody made."""

import math

import numpy as np
import pytest
import torch
from constriction import stream as ans
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn

from splitcast.base.entropy import LIMIT, _pop, _push, coded, decoded
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.base.spectrum import ladder
from splitcast.base.transform import Shape, Spectrum

RATES = ["0.7", "2.5", "40B", "140B", "5%", "0.1%", "4..1@10"]
SHAPES = [(8, 6, 7, 5), (1, 3, 4, 4), (5, 40), (3, 6, 16), (7,), (2, 2, 3, 4, 5), (0, 4), (4, 0), (1, 1), (300, 2)]


def features(shape, seed=0, scale=1.0):
    """Smooth, rectified maps whose channels hang together, as convolutions give them."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=rng)
    if x.dim() == 4 and x.numel():
        mixed = torch.randn(shape[1], 2, generator=rng) @ torch.randn(2, shape[1], generator=rng)
        x = torch.einsum("dc,bchw->bdhw", mixed, x.cumsum(2).cumsum(3)).relu()
    return scale * x


ADVERSARIAL = {
    "zeros": torch.zeros(4, 3, 6, 6),
    "constant": torch.full((4, 3, 6, 6), 3.3),
    "one outlier": torch.zeros(4, 3, 6, 6).index_put((torch.tensor(1),) * 4, torch.tensor(1e20)),
    "tiny": torch.full((4, 3, 6, 6), 1e-44),
    "noise": torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * 1e5,
    "largest": torch.full((4, 3, 6, 6), torch.finfo(torch.float32).max),
    "both signs, largest": torch.finfo(torch.float32).max * torch.tensor([1.0, -1.0]).repeat(216).view(4, 3, 6, 6),
    "infinite": torch.full((4, 3, 6, 6), -torch.inf),
    "one NaN": torch.zeros(4, 3, 6, 6).index_put((torch.tensor(0),) * 4, torch.tensor(torch.nan)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", RATES)
def test_what_is_measured_is_what_is_packed_and_decoded(rate, shape):
    made = codec(f"transform:{rate}").at(3)
    x = torch.stack([features(shape, n, 3.0**n) for n in range(3)])
    values, sizes = made.measured(x)
    assert values.shape == x.shape
    for one, seen, size in zip(x, values, sizes, strict=True):
        payload = made.encode(one)
        assert len(payload) == size <= made.bound(shape)
        assert torch.equal(made.decode(payload, shape), seen)
    assert torch.equal(made.through(x), values)


@pytest.mark.parametrize("what", ADVERSARIAL)
@pytest.mark.parametrize("rate", RATES)
def test_whatever_is_sent_stays_within_the_bound_and_comes_back(rate, what):
    made, x = codec(f"transform:{rate}"), ADVERSARIAL[what]
    payload = made.encode(x)
    seen = made.decode(payload, x.shape)
    assert len(payload) <= made.bound(x.shape) == 1 + 4 * x.numel()
    assert torch.equal(made.through(x[None])[0].nan_to_num(-7), seen.nan_to_num(-7))
    top = torch.finfo(torch.float32).max
    if not float(x.abs().max()) < 1e30:  # as they are, saturated; NaN stays and is refused by whoever receives it
        assert torch.equal(seen.nan_to_num(-7), x.clamp(-top, top).nan_to_num(-7))
    elif made.rate.by == "step":
        assert float((seen - x).norm()) <= max(0.65 * made.value, 1e-6 * float(x.norm())) * math.sqrt(x.numel())


def test_of_nothing_but_zeros_only_the_head_is_sent():
    made = codec("transform:2.5")
    assert len(made.encode(torch.zeros(32, 8, 14, 14))) == 1 + 2 + 2 + 2  # format, step, channels, empty stream
    assert not made.decode(made.encode(torch.zeros(32, 8, 14, 14)), (32, 8, 14, 14)).any()


def test_flat_levels_by_hand():
    """Without KLT and DCT the levels are those of the dead zone: sign(x) floor(|x| / 2 + 0.35)."""
    x = torch.tensor([[1.29, 1.31, -1.31, 3.29, 3.31, 0.0, -100.0]])
    seen = codec("transform:2").through(x[None])[0]
    assert seen.tolist() == [[0.0, 2.0, -2.0, 2.0, 4.0, 0.0, -100.0]]
    assert codec("transform:2").through(x.relu()[None])[0].tolist() == [[0.0, 2.0, 0.0, 2.0, 4.0, 0.0, 0.0]]


def test_maps_without_klt_are_quantised_in_their_dct():
    """Against scipy: one channel, where there is nothing to decorrelate."""
    x = torch.randn(5, 1, 6, 9, generator=torch.Generator().manual_seed(0)) * 5
    spectrum = dctn(x.numpy(), axes=(2, 3), norm="ortho")
    levels = np.sign(spectrum) * np.floor(np.abs(spectrum) / 2 + 0.35)
    seen = dctn(codec("transform:2").through(x[None])[0].numpy(), axes=(2, 3), norm="ortho")
    assert np.allclose(seen, 2 * levels, atol=1e-4)


def test_channels_that_hang_together_cost_as_much_as_one():
    """Sixteen copies of a map, with any weights, are one direction."""
    one = features((32, 1, 14, 14), scale=0.2)
    weights = torch.randn(16, generator=torch.Generator().manual_seed(0))
    weights /= weights.norm()
    many = one * weights.view(16, 1, 1)
    alone, together = (len(codec("transform:2").encode(x)) for x in (one, many))
    assert together <= alone + 100  # columns at 2 to 4 bits: rounding the first may leave a level in any of the others
    error = (codec("transform:2").through(many[None])[0] - many).square().sum()
    assert float(error / many.square().sum()) < 0.1


def uneven():
    """Messages of which every second or fourth sample tells little of the others; their rate, and most error."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, 8, 8, generator=rng)
    rare = 3 * x.relu() * (torch.rand(64, 16, 1, 1, generator=rng) < 0.1)  # channels that most samples do not have
    half, loud, quarter = x[:16, :8].clone(), x[:32, :8].clone(), x[:32, :8].clone()
    half[::2], quarter[::4] = 0, 0
    loud[1] *= 300
    one = torch.zeros(100, 1)
    one[1] = 1
    return [
        (half, "0.5", 0.03),
        (rare, "0.5", 0.03),
        (rare, "5%", 0.05),
        (loud, "40B", 0.1),
        (quarter, "140B", 0.1),
        (one, "1B", 1e-3),
    ]


@pytest.mark.parametrize(("x", "rate", "worst"), uneven())
def test_samples_that_were_not_looked_at_arrive_as_well(x, rate, worst):
    made = codec(f"transform:{rate}")
    (seen,), (size,) = made.measured(x[None])
    assert float((seen - x).square().sum()) <= worst * float(x.square().sum())
    assert size <= (float(rate[:-1]) * len(x) if rate.endswith("B") else 4 * x.numel() / 8)
    assert torch.equal(made.decode(made.encode(x), x.shape), seen)


def test_a_stream_is_the_same_on_every_machine():
    """Classes with runs, without, and with bits that travel as they are; decoders rely on tables to the last unit."""
    levels = [0, 0, 3, -1, 0, 0, 0, 1, 0, 0, -2, 0, 0, 0, 0, 5, -7, 9, 1, 0, 40, -300, 2, 0] * 4
    stream = coded(np.array(levels, np.int32), np.array([2, 3, 1, 18] * 4, np.int32))
    assert stream.hex() == (
        "0b0d0000000f0424807e6b000025903c7a382e2783786b00001969d385193dca876b6b00001f4a64829a518583d76b"
        "00003438ff973f211979ffa643fae40b86d9202307f2ffe9bd1c152a7c18"
    )


@pytest.mark.parametrize(
    ("scale", "rate"), [(1e6, "0.0001"), (1e12, "0.1B"), (2.0**49, "90%"), (2.0**49, "1B"), (1e-30, "40B")]
)
def test_levels_and_steps_that_cannot_be_coded_travel_as_they_are(scale, rate):
    """Levels beyond 2^22, and steps beyond 2^50, which no receiver takes."""
    x = scale * torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(0)).clamp(-1.9, 1.9)
    for one in (x, x * torch.tensor([1e-20, 1.0]).repeat(8).view(16, 1, 1, 1)):
        made = codec(f"transform:{rate}")
        (seen,), (size,) = made.measured(one[None])
        assert torch.equal(made.decode(made.encode(one), one.shape), seen)
        if rate == "0.0001":
            assert torch.equal(seen, one) and size == made.bound(one.shape)


@pytest.mark.parametrize(("samples", "sent"), [(2, False), (4, True)])
def test_a_channel_is_sent_if_its_levels_are_as_many_as_its_column_has_entries(samples, sent):
    """Three channels of constant maps: of the second so many samples have a level of one, 4 x 0.5 / 2 + 0.35 = 1.35."""
    x = torch.zeros(8, 3, 4, 4)
    x[:, 0] = 10 * torch.tensor([1.0, -1.0]).repeat(4).view(8, 1, 1)
    x[:samples, 1] = 0.5  # as often with one sign of the first as with the other: channels are uncorrelated as they are
    wanted = x.clone() if sent else x * torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    assert torch.allclose(codec("transform:2").through(x[None])[0], wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 8, 10, 10), (32, 60), (4, 9, 24)])
def test_finer_steps_lose_less_until_nothing_is_lost(shape):
    x = features(shape, scale=3.0)
    errors = [
        float((codec(f"transform:{step}").through(x[None])[0] - x).square().mean()) for step in (4, 2, 1, 0.1, 0.01)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01**2
    assert torch.equal(codec("transform:0.000000001").through(x[None])[0], x)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 500), st.sampled_from([(16, 8, 10, 10), (32, 60), (4, 9, 24), (1, 3, 8, 8)]), st.integers(0, 99))
def test_bytes_per_sample_are_kept_and_used(budget, shape, seed):
    made, x = codec(f"transform:{budget:.3f}B"), features(shape, seed)
    size = len(made.encode(x))
    assert size <= max(round(budget, 3) * shape[0], 7)
    assert made.nbytes(shape) == min(math.ceil(round(budget, 3) * shape[0]), made.bound(shape))
    if size >= 40 and 2 * budget < x[0].numel():
        assert size >= 0.6 * budget * shape[0]


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 60), st.sampled_from([(16, 8, 10, 10), (32, 60), (4, 9, 24), (1, 3, 8, 8)]), st.integers(0, 99))
def test_error_is_kept(percent, shape, seed):
    x = features(shape, seed)
    seen = codec(f"transform:{percent:.3f}%").through(x[None])[0]
    assert float((seen - x).double().square().sum()) <= percent / 100 * 1.001 * float(x.double().square().sum())


def test_a_schedule_goes_from_coarse_to_fine():
    made = codec("transform:4..1@10")
    assert made.at(10).value == made.at(99).value == 1.0
    assert made.at(5).value == pytest.approx(2.0)
    x = features((16, 8, 10, 10), scale=3.0)
    sizes = [len(made.at(t).encode(x)) for t in (1, 5, 10)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    late = made.at(10)
    assert torch.equal(
        made.decode(late.encode(x), x.shape), late.through(x[None])[0]
    )  # whoever receives knows no round
    assert late.name == made.name


def test_expected_sizes_are_stated():
    assert codec("transform:2.5").nbytes((32, 32, 14, 14)) == math.ceil(0.2 * 32 * 6272 / 8)
    assert codec("transform:25%").nbytes((32, 32, 14, 14)) == 32 * 6272 // 8  # a bit a value
    assert codec("transform:2.5~160B").nbytes((32, 32, 14, 14)) == 32 * 160
    assert codec("transform:5%~9.5B").nbytes((3, 2)) == 25  # the bound
    encode, decode = codec("transform:2.5").work((32, 32, 14, 14))
    assert encode > decode > 2 * 32 * 32 * 14 * 14 * 32


REFUSED = ", x, -1, 0, 1e3, 1000000000, 4..2, 4..0@3, 101%, 4..2@0, 80B@3, 2.5~, 2.5~3, 9B~0B, 1BB, 1.2.3, \u0663B"


@pytest.mark.parametrize("rate", REFUSED.split(", "))
def test_a_rate_that_cannot_be_is_refused(rate):
    with pytest.raises(SplitcastError, match="uplink_codec: 'transform:"):
        codec(f"transform:{rate}", "uplink_codec")


def test_layouts():
    assert Shape.of((32, 8, 14, 14)).klt and not Shape.of((1, 32, 7, 7)).klt
    assert not Shape.of((4000, 300)).klt and Shape.of((320, 40)).klt


def alike(rate="40B", shape=(8, 6, 7, 5)):
    """A format that all share, learned from samples of two kinds."""
    made = codec(f"transform:{rate}")
    columns, step = made.learned(torch.cat([features(shape, 0), features(shape, 1, 3.0)]))
    return made.alike(columns, step)


@pytest.mark.parametrize("rate", RATES[:-1])
def test_with_a_common_basis_a_sample_is_decoded_the_same_in_any_company(rate):
    together, other = alike(rate), codec(f"transform:{rate}")
    x, companions = features((8, 6, 7, 5), 0), [features((8, 6, 7, 5), n, 3.0) for n in (1, 2)]
    seen, own = (
        [made.through(torch.cat([x[:2], some])[None])[0][:2] for some in companions] for made in (together, other)
    )
    assert torch.allclose(*seen, atol=1e-4 * float(x.max()))
    if other.rate.by != "step":
        assert not torch.allclose(*own, atol=1e-2)
    payload, shape = together.encode(x), x.shape
    assert payload[0] == 7 and torch.equal(together.decode(payload, shape), together.through(x[None])[0])
    assert torch.equal(together.decode(other.encode(x), shape), other.through(x[None])[0])  # who has not heard of it
    with pytest.raises(SplitcastError, match="not a message"):
        other.decode(payload, shape)


def test_levels_of_a_common_basis_by_hand():
    """Two channels, one place: q = sign floor(|Q^T x| / step + 0.35) along the one direction that all were told."""
    x = torch.tensor([[3.0, 3.0], [1.0, -1.0], [-2.0, 0.0]]).repeat(8, 1)
    made = codec("transform:9").alike(torch.tensor([[0.5, 0.5]]), 2.0)  # of which only the direction counts
    levels = torch.tensor([2.0, 0.0, -1.0])  # |x (1, 1) / sqrt 2| / 2: 2.12, 0, 0.71
    wanted = (2 * levels[:, None] * torch.tensor([1.0, 1.0]) / math.sqrt(2)).repeat(8, 1)
    assert torch.allclose(made.through(x[None])[0], wanted, atol=1e-6)


def test_without_a_common_step_each_message_is_coded_by_itself():
    x, made = features((8, 6, 7, 5)), codec("transform:40B")
    assert torch.equal(made.alike(torch.eye(6), 0.0).encode(x), made.encode(x))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streams_give_back_what_was_coded(data):
    sizes = np.array(data.draw(st.lists(st.integers(1, 40), max_size=12)), np.int32)
    scales = data.draw(
        st.lists(st.sampled_from([0, 1, 3, 300, 10**5, LIMIT - 1]), min_size=len(sizes), max_size=len(sizes))
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    levels = np.concatenate([rng.integers(-a, a + 1, n) for a, n in zip(scales, sizes, strict=True)] or [np.zeros(0)])
    levels = levels.astype(np.int32)
    assert np.array_equal(decoded(coded(levels, sizes), sizes), levels)


def test_streams_of_more_numbers_than_the_coder_counts():
    """Beyond 2^24 in a class, how many are not zero is told in two digits; no gap may have more bits than that."""
    sizes = np.array([2**24 + 7], np.int32)
    levels = np.zeros(sizes[0], np.int32)
    levels[[5, 2**23, 2**24 + 6]] = 1, -1, 1
    stream = coded(levels, sizes)
    assert len(stream) < 60 and np.array_equal(decoded(stream, sizes), levels)
    coder = ans.stack.AnsCoder()
    header, of = [3, 0, 31, 0], [2**16, (2**24 >> 16) + 1, 32, 8]  # three numbers, runs of 31 bits, the largest of one
    coder.encode_reverse(np.array(header, np.int32), ans.model.Uniform(), np.array(of, np.int32))
    told = np.frombuffer(stream, np.uint8)
    words = np.frombuffer(stream[2:] + bytes(-(len(stream) - 2) % 4), "<u4").astype(np.uint32)
    head = ans.stack.AnsCoder(words)
    changes, steps = _pop(head, int(told[0]), 1), _pop(head, int(told[1]), 1)
    for kind, part in ((told[1], steps), (told[0], changes)):
        _push(coder, int(kind), part)
    forged = bytes(told[:2]) + coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")
    with pytest.raises(SplitcastError, match="a group that cannot be"):
        decoded(forged, sizes)


@pytest.mark.parametrize("a", [0.01, 0.2, 1.0, 6.0, 300.0])
def test_streams_take_what_entropy_allows(a):
    """20,000 two-sided geometric numbers: within 3 % and 16 bytes of their entropy."""
    t = (math.sqrt(1 + a * a) - 1) / a
    rng = np.random.default_rng(0)
    levels = (rng.geometric(1 - t, 20_000) - rng.geometric(1 - t, 20_000)).astype(np.int32)
    q = np.arange(-20_000, 20_001)
    chance = (1 - t) / (1 + t) * t ** np.abs(q)
    bits = -(chance[chance > 0] * np.log2(chance[chance > 0])).sum() * 20_000
    assert len(coded(levels, np.array([20_000], np.int32))) <= 1.03 * bits / 8 + 16


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streams_that_nobody_made_are_refused_or_decoded_within_their_shape(data):
    shape = data.draw(st.sampled_from([(8, 6, 7, 5), (5, 40), (3, 6, 16), (1, 1), (2, 3, 4, 4)]))
    made = codec("transform:0.5")
    if shape == (8, 6, 7, 5) and data.draw(st.booleans()):
        made = alike("0.5")
    payload = made.encode(features(shape, data.draw(st.integers(0, 9)), 3.0)).numpy().copy()
    what = data.draw(st.sampled_from(["cut", "flip", "random", "longer"]))
    if what == "cut":
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    elif what == "flip":
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "random":
        payload = np.frombuffer(
            bytes([data.draw(st.sampled_from([1, 3, 5, 7]))]) + data.draw(st.binary(max_size=200)), np.uint8
        )
    else:
        payload = np.concatenate([payload, np.frombuffer(data.draw(st.binary(min_size=1, max_size=9)), np.uint8)])
    try:
        seen = made.decode(torch.from_numpy(payload.copy()), shape)
    except SplitcastError as error:
        assert "\n" not in str(error)
    else:
        assert seen.shape == shape
        assert payload[0] == 0 or bool(seen.isfinite().all())  # of values as they are `wire.unpack` looks at each


@pytest.mark.parametrize("scale", [2.0**49, 2.0**59, 2.0**126])
def test_values_however_large_are_coded_or_sent_as_they_are(scale):
    x = scale * torch.rand(32, 8, 14, 14, generator=torch.Generator().manual_seed(0))
    made = codec("transform:5%")
    seen, (size,) = made.measured(x[None])
    assert float((seen[0] / scale - x / scale).square().sum()) <= 0.05 * float((x / scale).square().sum())
    assert size == len(made.encode(x)) <= made.bound(x.shape)


@pytest.mark.parametrize("shape", [(8, 6, 7, 7), (16, 40)])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_step_is_found_as_if_all_had_been_tried(shape, share):
    """Bits fall and errors rise with the step: the first that is coarse enough, by looking at each."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).cumsum(0)
    spectrum = Spectrum(x, clamped=False)
    worst = share * float(x.square().sum())
    for size, goal in ((spectrum.bits, 8 * share * x.numel()), (lambda step: 1 / spectrum.error(step), 1 / worst)):
        slow = next(k for k in range(-200, 400) if size(ladder(k)) <= goal)
        assert spectrum.search(size, goal) == slow
