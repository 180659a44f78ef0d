"""Max pooling of images: bit for bit that of PyTorch, alone and under vmap."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from splitcast.training import pooling
from splitcast.training.pooling import FastPooling

POOLS = {
    "halves": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, 1),
    "oblong, rounded up": nn.MaxPool2d((2, 3), ceil_mode=True),
    "dilated": nn.MaxPool2d(2, stride=(1, 2), dilation=2),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor that the fast way pools."""
    seen: list[Tensor] = []

    def pool(x: Tensor, *window: object) -> object:
        seen.append(x)
        return torch.ops.aten.max_pool2d_with_indices(x, *window)

    monkeypatch.setattr(pooling, "_pool", pool)
    return seen


def samples(channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """3 clients with 2 images; many zeros, so that windows have ties, and a value that is not a number."""
    x = torch.relu(torch.randn(3, 2, channels, 9, 11, dtype=dtype, generator=torch.Generator().manual_seed(1)))
    x[0, 0, 0, 3, 3] = torch.nan
    return x


def values_and_gradient(pool: object, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = pool(x)  # type: ignore[operator]
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS.keys())
def test_the_same_to_the_bit(pool: nn.MaxPool2d, dtype: torch.dtype, counted: list[Tensor]) -> None:
    x = samples(16, dtype)

    def each(x: Tensor) -> Tensor:
        return torch.stack([pool(images) for images in x])

    expected = values_and_gradient(each, x)
    assert not counted
    ways = [
        each,
        vmap(pool),
        lambda x: vmap(pool, 1)(x.transpose(0, 1)),
        lambda x: vmap(pool, 2)(x.movedim(0, 2)),
        lambda x: vmap(pool)(x.transpose(0, 1).contiguous().transpose(0, 1)),  # samples before clients in memory
    ]
    for way in ways:
        with FastPooling():
            found = values_and_gradient(way, x)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert len(counted) == len(x) + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 16])
def test_without_gradients_halves_are_larger_values_of_neighbours(
    channels: int, dtype: torch.dtype, counted: list[Tensor]
) -> None:
    x = samples(channels, dtype)
    expected = torch.stack([POOLS["halves"](images) for images in x])
    with torch.no_grad(), FastPooling():
        for found in (torch.stack([POOLS["halves"](images) for images in x]), vmap(POOLS["halves"])(x)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert not counted
        for name, pool in POOLS.items():  # other windows are those of PyTorch
            if name != "halves":
                torch.testing.assert_close(pool(x[0]), pool(x[0].double()).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_few_channels_single_images_and_indices_go_the_usual_way(counted: list[Tensor]) -> None:
    x = samples(16)[0]
    with FastPooling():
        nn.MaxPool2d(2)(x[:, :3])
        nn.MaxPool2d(2)(x[0])
        _, places = nn.MaxPool2d(2, return_indices=True)(x)
    assert not counted and places.dtype == torch.int64
