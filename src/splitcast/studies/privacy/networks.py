"""Networks of attackers: a decoder from smashed data to samples, a critic, and fitting."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from splitcast.base.seeds import torch_stream

Progress = Callable[[int, int], None]
"""Called with the steps that are done and those there are."""


class Decoder(nn.Module):
    """Smashed data (M, *d) to samples (M, *shape): convolutions between feature maps and images, else dense layers."""

    def __init__(self, enters: Sequence[int], shape: Sequence[int], width: int = 64) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.maps = len(enters) == 3 and len(shape) == 3
        if self.maps:
            layers: list[nn.Module] = []
            channels = enters[0]
            for _ in range(3):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            self.body = nn.Sequential(*layers, nn.Conv2d(width, shape[0], 3, padding=1))
        else:
            hidden = 8 * width
            dense = [nn.Linear(math.prod(enters), hidden), nn.ReLU(), nn.Linear(hidden, 2 * hidden), nn.ReLU()]
            self.body = nn.Sequential(nn.Flatten(), *dense, nn.Linear(2 * hidden, math.prod(shape)))

    def forward(self, s: Tensor) -> Tensor:
        if self.maps:
            s = interpolate(s, size=self.shape[1:], mode="nearest")
        made: Tensor = self.body(s)
        return made.view(len(s), *self.shape)


def critic(enters: Sequence[int], width: int = 128) -> nn.Module:
    """One number for smashed data (M, *d)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(enters), width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, 1),
    )


class Scaled(nn.Module):
    """A network that sees its input with the mean and spread of ``like`` taken out."""

    mean: Tensor
    spread: Tensor

    def __init__(self, body: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("mean", like.mean(0, keepdim=True))
        self.register_buffer("spread", like.std().clamp(min=1e-6))

    def forward(self, s: Tensor) -> Tensor:
        made: Tensor = self.body((s - self.mean) / self.spread)
        return made


def minibatches(rows: int, batch: int, steps: int, seed: int) -> list[Tensor]:
    """Rows of so many steps, epoch by epoch in random order."""
    generator, order = torch_stream(seed, "defence"), torch.empty(0, dtype=torch.int64)
    found = []
    for _ in range(steps):
        while len(order) < min(batch, rows):
            order = torch.cat([order, torch.randperm(rows, generator=generator)])
        found.append(order[:batch])
        order = order[batch:]
    return found


def fit_decoder(
    smashed: Tensor, x: Tensor, steps: int, *, seed: int = 0, batch: int = 32, progress: Progress | None = None
) -> nn.Module:
    """A decoder that learned from pairs (smashed, x) to give x back, by mean squared error and Adam."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Scaled(Decoder(smashed.shape[1:], x.shape[1:]), smashed)
    optimiser = torch.optim.Adam(made.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    for done, rows in enumerate(minibatches(len(x), batch, steps, seed), 1):
        loss = (made(smashed[rows]) - x[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if progress:
            progress(done, steps)
    return made
