"""Networks of attackers: a decoder from smashed data to samples, a critic, and fitting."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from splitcast.base.seeds import torch_stream

Progress = Callable[[int, int], None]
"""Called with the steps that are done and those there are."""
Looks = dict[int, Tensor]
"""What an attack had made of the victim's samples (M, *shape) after so many steps."""
FINEST = 8
"""Most pixels along an edge that one place of a feature map stands for."""
WIDEST = 16
"""Most places along an edge that a decoder's convolutions work on; finer maps are folded, 2 x 2 places into one."""
RATE = 2e-3
"""Of a decoder's Adam, at first."""


class Decoder(nn.Module):
    """Smashed data (M, *d) to samples (M, *shape). Between feature maps (C, h, w) and images: convolutions on the maps,
    the last of which gives the r^2 pixels behind every place (r = H // h). Else dense layers."""

    def __init__(self, enters: Sequence[int], shape: Sequence[int], width: int = 64) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.maps = len(enters) == 3 and len(shape) == 3 and shape[1] <= FINEST * enters[1]
        if self.maps:
            fold = 2 if min(enters[1:]) > WIDEST and not (enters[1] % 2 or enters[2] % 2) else 1
            pixels = max(1, fold * shape[1] // enters[1])
            first = nn.Conv2d(enters[0] * fold**2, width, 3, padding=1)
            convs = [nn.PixelUnshuffle(fold), first, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
            last = nn.Conv2d(width, shape[0] * pixels**2, 3, padding=1)
            self.body = nn.Sequential(*convs, nn.ReLU(), last, nn.PixelShuffle(pixels))
        else:
            hidden = 8 * width
            dense = [nn.Linear(math.prod(enters), hidden), nn.ReLU(), nn.Linear(hidden, 2 * hidden), nn.ReLU()]
            self.body = nn.Sequential(nn.Flatten(), *dense, nn.Linear(2 * hidden, math.prod(shape)))

    def forward(self, s: Tensor) -> Tensor:
        made: Tensor = self.body(s)
        if self.maps and made.shape[2:] != self.shape[1:]:
            made = interpolate(made, size=self.shape[1:], mode="bilinear")
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


def decoded(
    smashed: Tensor,
    x: Tensor,
    asked: Tensor,
    budgets: Sequence[int],
    *,
    seed: int = 0,
    batch: int = 16,
    progress: Progress | None = None,
) -> Looks:
    """What a decoder that learns from pairs (smashed, x) to give x back, by mean squared error and Adam, makes of
    ``asked``: one training, looked at after every budget of steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Scaled(Decoder(smashed.shape[1:], x.shape[1:]), smashed)
    steps = max(budgets)
    optimiser = torch.optim.Adam(made.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    looks: Looks = {}
    for done, rows in enumerate(minibatches(len(x), batch, steps, seed), 1):
        loss = (made(smashed[rows]) - x[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if progress:
            progress(done, steps)
        if done in budgets:
            with torch.no_grad():
                looks[done] = made(asked)
    return looks
