"""Cuts, profile and models."""

import math

import pytest
import torch
from torch import nn

from splitcast.base.errors import SplitcastError
from splitcast.cost.privacy import client_fraction, legal, privacy
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.training.placement import Placement, Segment


def test_profile_by_hand():
    model = SplitModel(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,))
    first, second = model.profile()
    assert (first.client_parameters, second.client_parameters, model.size) == (15, 15, 23)
    assert first.privacy == pytest.approx(math.log(1 + 15 / 23))
    assert first.smashed_values == 3
    # a multiply-add is two FLOPs: 4x3 forward, the weight gradient alone backward on the client
    assert (first.client_forward_flops, first.client_backward_flops) == (24, 24)
    # 3x2 forward; weight and input gradients backward on the server
    assert (first.server_forward_flops, first.server_backward_flops) == (12, 24)


def test_paper_cnn_has_the_layers_of_mcmahan():
    model = build("cnn", (1, 28, 28), 10, seed=0)
    sizes = [model.client_size(cut) for cut in model.cuts]
    assert sizes == [832, 832 + 51264, 832 + 51264 + 1606144, 832 + 51264 + 1606144 + 65664]
    assert [model.smashed_shape(cut) for cut in model.cuts] == [(32, 14, 14), (64, 7, 7), (512,), (128,)]
    assert list(build("cnn", (3, 32, 32), 10, seed=0).cuts) == [1, 2, 3, 4]


def test_halves_compose_to_the_whole():
    model = build("cnn-small", (1, 28, 28), 10, seed=1)
    params, x = model.initial(), torch.randn(5, 1, 28, 28)
    whole = nn.Sequential(*model.blocks)(x)
    for cut in model.cuts:
        smashed = model.forward(params, x, 0, cut)
        assert torch.equal(model.forward(params, smashed, cut, model.depth), whole)


def test_same_seed_same_weights_and_the_global_generator_is_untouched():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    a, b, c = (build("cnn-small", (1, 28, 28), 10, seed=s).initial() for s in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["0.0.weight"], c["0.0.weight"])


@pytest.mark.parametrize("cut", [-1, 0, 5])
def test_illegal_cuts_are_refused_with_the_legal_ones(cut):
    with pytest.raises(SplitcastError, match=rf"cut: {cut} is not legal; choose 1\.\.4"):
        build("cnn", (1, 28, 28), 10, seed=0).check_cut(cut)
    with pytest.raises(SplitcastError, match=rf"cut: {cut} is not legal; choose 1\.\.4"):
        Placement.split(cut, depth=5)


def test_segments_by_hand():
    """Three segments of three linear layers: parameters 4·3 + 3, 3·2 + 2 and 2·5 + 5."""
    model = SplitModel([nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 5)], (4,))
    ends = Placement((Segment("client", 0, 1), Segment("server", 1, 2), Segment("client", 2, 3)))
    assert (ends.cut, ends.depth) == (1, 3)
    assert [ends.side(name) for name in model.initial()] == ["client"] * 2 + ["server"] * 2 + ["client"] * 2
    # backward: the weight gradient, and the gradient at the input wherever somebody is before
    assert [model.flops(s.start, s.stop) for s in ends.segments] == [(24, 24), (12, 24), (20, 40)]
    assert client_fraction(model, ends) == 30 / 38
    assert privacy(model, ends) == pytest.approx(math.log(1 + 30 / 38))
    assert legal(model, [ends, Placement.split(1, 3), Placement.whole(3)], 0.5) == [True, False, True]
    with pytest.raises(SplitcastError, match="epsilon: 0.7 leaves no cut; the largest feasible value is 0.693147"):
        legal(model, [Placement.whole(3)], 0.7)
    with pytest.raises(SplitcastError, match="placement: segments must follow each other"):
        Placement((Segment("client", 0, 1), Segment("server", 2, 3)))


def test_unsplittable_models_are_refused():
    with pytest.raises(SplitcastError, match="at least 2 blocks"):
        SplitModel([nn.Linear(2, 2)], (2,))
    shared = nn.Linear(3, 3)
    with pytest.raises(SplitcastError, match="entry 0 is a function"):
        SplitModel([lambda x: x, shared], (3,))  # type: ignore[list-item]


def test_frozen_parameters_and_buffers_are_told_apart():
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad = False
    model = SplitModel([nn.Linear(3, 3), nn.Sequential(frozen, nn.BatchNorm1d(3))], (3,))
    assert list(model.initial()) == ["0.weight", "0.bias", "1.0.bias", "1.1.weight", "1.1.bias"]
    assert list(model.frozen()) == ["1.0.weight"]
    assert list(model.buffers()) == ["1.1.running_mean", "1.1.running_var", "1.1.num_batches_tracked"]
    assert model.size == 12 + 12 + 6 and model.client_size(1) == 12


def test_unknown_architectures_are_refused():
    known = "cnn, cnn-small, resnet8, resnet18, gpt-small, smollm2, hf"
    with pytest.raises(SplitcastError, match=f"arch: unknown 'vgg'; choose one of {known}"):
        build("vgg", (1, 28, 28), 10, seed=0)
    with pytest.raises(SplitcastError, match="arch: cannot import 'nowhere:f'"):
        build("nowhere:f", (1, 28, 28), 10, seed=0)
