"""Attacks that give the samples back from smashed data: each takes a `View` and a budget of steps.

| attack    | needs                                   | from                                                     |
|-----------|-----------------------------------------|----------------------------------------------------------|
| network   | the client half to ask, own samples     | He et al., Model inversion, ACSAC 2019 (black box)       |
| optimise  | the client half                         | the same (white box): min ||w^c(z) - S||^2 + lambda TV(z) |
| unsplit   | the architecture                        | Erdoğan et al., UnSplit, WPES 2022                        |
| pseudo    | architecture, server half, own samples  | after Gao and Zhang, PCAT, USENIX Security 2023          |

Not in the papers: all samples are worked on together; `optimise` uses L-BFGS; `unsplit` takes fewer steps; `pseudo`
sees the server half of the end only, and matches means and spreads of features where SDAR has a discriminator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from splitcast.model.split import Params, SplitModel
from splitcast.studies.privacy.networks import Progress, fit_decoder, minibatches
from splitcast.studies.privacy.view import View

SMOOTHNESS = (0.0, 1e-3, 1e-2)
"""Weights of the total variation that `optimise` tries."""


@torch.no_grad()
def mean_image(seen: View) -> Tensor:
    """The floor: the mean of the attacker's own samples, whatever was sent."""
    return seen.auxiliary.mean(0, keepdim=True).expand_as(seen.x)


def network(seen: View, steps: int, progress: Progress | None = None) -> Tensor:
    """A decoder that learned from the attacker's own samples, sent through the victim's half."""
    decoder = fit_decoder(seen.send(seen.auxiliary), seen.auxiliary, steps, progress=progress)
    with torch.no_grad():
        made: Tensor = decoder(seen.smashed)
    return made


def variation(z: Tensor) -> Tensor:
    """Mean squared difference of neighbouring pixels; 0 for what is no image."""
    if z.dim() != 4:
        return z.new_zeros(())
    return (z[..., 1:, :] - z[..., :-1, :]).square().mean() + (z[..., 1:] - z[..., :-1]).square().mean()


def optimise(seen: View, steps: int, progress: Progress | None = None, smoothness: float = 0.0) -> Tensor:
    """z that minimises ||w^c(z) - S||^2 / ||S||^2 + lambda TV(z) by L-BFGS, from the mean image."""
    z = mean_image(seen).clone().requires_grad_()
    scale = seen.smashed.square().sum().clamp(min=torch.finfo(seen.smashed.dtype).tiny)
    optimiser = torch.optim.LBFGS(
        [z],
        max_iter=steps,
        history_size=20,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        optimiser.zero_grad()
        loss = (seen.features(z) - seen.smashed).square().sum() / scale + smoothness * variation(z)
        loss.backward()  # type: ignore[no-untyped-call]
        calls += 1
        if progress:
            progress(min(calls, steps), steps)
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return z.detach()


def unsplit(seen: View, steps: int, progress: Progress | None = None) -> Tensor:
    """Samples and a client half from nothing, in turn: z, v <- min ||v(z) - S||^2 + lambda TV(z)."""
    half = fresh_half(seen.model, seen.cut, seed=1)
    z = torch.zeros_like(seen.x).requires_grad_()
    by_z, by_half = torch.optim.Adam([z], lr=0.02), torch.optim.Adam(learned(half), lr=1e-3)
    turn, done = 20, 0
    while done < steps:
        for mover in (by_z, by_half):
            for _ in range(turn):
                loss = (seen.model.forward(half, z, 0, seen.cut) - seen.smashed).square().mean() + 0.1 * variation(z)
                z.grad = None
                by_half.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                mover.step()
        done += turn
        if progress:
            progress(min(done, steps), steps)
    return z.detach()


def pseudo(seen: View, steps: int, progress: Progress | None = None) -> Tensor:
    """A client half of the attacker's own that works with the server half on its samples and gives features of the same
    means and spreads; then a decoder for it, used on what the victim sent."""
    half = fresh_half(seen.model, seen.cut, seed=2)
    optimiser = torch.optim.Adam(learned(half), lr=1e-3)
    mean, spread = seen.smashed.mean(0), seen.smashed.std(0)
    for done, rows in enumerate(minibatches(len(seen.auxiliary), 32, steps, seed=3), 1):
        features = seen.model.forward(half, seen.auxiliary[rows], 0, seen.cut)
        output = seen.model.forward(seen.server, features, seen.cut, seen.model.depth)
        apart = (features.mean(0) - mean).square().mean() + (features.std(0) - spread).square().mean()
        loss = seen.task.losses(output, seen.auxiliary_y[rows]).mean() + apart
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if progress:
            progress(done, 2 * steps)
    with torch.no_grad():
        theirs = torch.cat([seen.model.forward(half, x, 0, seen.cut) for x in torch.split(seen.auxiliary, 50)])
    decoder = fit_decoder(
        theirs,
        seen.auxiliary,
        steps,
        progress=None if progress is None else lambda done, _: progress(steps + done, 2 * steps),
    )
    with torch.no_grad():
        made: Tensor = decoder(seen.smashed)
    return made


def fresh_half(model: SplitModel, cut: int, seed: int) -> Params:
    """A client half of the same shapes with weights drawn anew, of the mean and spread that the architecture begins
    with; buffers, which are not learned, as it has them."""
    generator = torch.Generator().manual_seed(seed)
    half: Params = {name: value.clone() for name, value in model.buffers().items()}
    for name, value in model.initial().items():
        mean, spread = float(value.mean()), float(value.std()) if value.numel() > 1 else 0.0
        half[name] = (mean + torch.randn(value.shape, generator=generator) * spread).requires_grad_()
    return {name: value for name, value in half.items() if int(name.split(".", 1)[0]) < cut}


def learned(half: Params) -> list[Tensor]:
    """What of a half an optimiser moves."""
    return [value for value in half.values() if value.requires_grad]


Attack = Callable[[View, int, Progress | None], Tensor]


@dataclass(frozen=True)
class Method:
    """An attack, with the budgets (steps) of which the strongest counts."""

    run: Attack
    budgets: tuple[int, ...]
    quick: tuple[int, ...]
    needs_half: bool
    """whether the attacker must know, or be able to ask, the client half"""


def _smooth(seen: View, steps: int, progress: Progress | None, smoothness: float) -> Tensor:
    return optimise(seen, steps, progress, smoothness)


METHODS: dict[str, Method] = {
    "network": Method(network, (500, 2000), (60,), needs_half=True),
    "optimise": Method(optimise, (50, 300), (40,), needs_half=True),
    **{
        f"optimise, smooth {weight:g}": Method(partial(_smooth, smoothness=weight), (300,), (40,), needs_half=True)
        for weight in SMOOTHNESS[1:]
    },
    "unsplit": Method(unsplit, (400, 1600), (60,), needs_half=False),
    "pseudo": Method(pseudo, (500, 2000), (60,), needs_half=False),
}
"""Reconstructions by name."""
