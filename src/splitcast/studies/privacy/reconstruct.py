"""Attacks that give the samples back from smashed data: each takes a `View` and budgets of steps, and says
what it had after each of them.

| attack    | needs                                   | from                                                     |
|-----------|-----------------------------------------|----------------------------------------------------------|
| network   | the client half to ask, own samples     | He et al., Model inversion, ACSAC 2019 (black box)       |
| optimise  | the client half                         | the same (white box): min ||w^c(z) - S||^2 + lambda TV(z) |
| unsplit   | the architecture                        | Erdoğan et al., UnSplit, WPES 2022                        |
| pseudo    | architecture, server half, own samples  | after Gao and Zhang, PCAT, USENIX Security 2023          |

Not in the papers: all samples are worked on together; `optimise` uses L-BFGS; `unsplit` takes fewer steps; `pseudo`
sees the server half of the end only, and matches means and spreads of features where SDAR has a discriminator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from splitcast.model.split import Params, SplitModel
from splitcast.studies.privacy.networks import Looks, Progress, decoded, minibatches
from splitcast.studies.privacy.view import View

SMOOTHNESS = (1e-3, 1e-2)
"""Weights of the total variation that `optimise` tries beside none."""


@torch.no_grad()
def mean_image(seen: View) -> Tensor:
    """The floor: the mean of the attacker's own samples, whatever was sent."""
    return seen.auxiliary.mean(0, keepdim=True).expand_as(seen.x)


def network(seen: View, budgets: Sequence[int], progress: Progress | None = None) -> Looks:
    """A decoder that learned from the attacker's own samples, sent through the victim's half."""
    return decoded(seen.send(seen.auxiliary), seen.auxiliary, seen.smashed, budgets, progress=progress)


def variation(z: Tensor) -> Tensor:
    """Mean squared difference of neighbouring pixels; 0 for what is no image."""
    if z.dim() != 4:
        return z.new_zeros(())
    return (z[..., 1:, :] - z[..., :-1, :]).square().mean() + (z[..., 1:] - z[..., :-1]).square().mean()


def optimise(seen: View, budgets: Sequence[int], progress: Progress | None = None, *, smoothness: float = 0.0) -> Looks:
    """z that minimises ||w^c(z) - S||^2 / ||S||^2 + lambda TV(z) by L-BFGS, from the mean image."""
    z = mean_image(seen).clone().requires_grad_()
    scale = seen.smashed.square().sum().clamp(min=torch.finfo(seen.smashed.dtype).tiny)
    optimiser = torch.optim.LBFGS(
        [z], history_size=20, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        optimiser.zero_grad()
        loss = (seen.features(z) - seen.smashed).square().sum() / scale + smoothness * variation(z)
        loss.backward()  # type: ignore[no-untyped-call]
        calls += 1
        if progress:
            progress(min(calls, max(budgets)), max(budgets))
        return loss

    looks: Looks = {}
    for done, steps in pairwise([0, *sorted(budgets)]):
        optimiser.param_groups[0] |= {"max_iter": steps - done, "max_eval": (steps - done) * 5 // 4}
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        looks[steps] = z.detach().clone()
    return looks


TURN = 20
"""Steps of `unsplit` along the samples, then along the half."""


def unsplit(seen: View, budgets: Sequence[int], progress: Progress | None = None) -> Looks:
    """Samples and a client half from nothing, in turn: z, v <- min ||v(z) - S||^2 + lambda TV(z)."""
    half = fresh_half(seen.model, seen.cut, seed=1)
    noise = torch.randn(seen.x.shape, generator=torch.Generator().manual_seed(1)).to(seen.x)
    z = (0.1 * noise).requires_grad_()  # zeros, as in the paper, would never leave a half without biases
    movers = [torch.optim.Adam(moved, lr=lr) for moved, lr in (([z], 0.02), (learned(half), 1e-3))]
    looks: Looks = {}
    for done in range(1, max(budgets) + 1):
        mover = movers[(done - 1) // TURN % 2]
        moved = mover.param_groups[0]["params"]
        loss = (seen.model.forward(half, z, 0, seen.cut) - seen.smashed).square().mean() + 0.1 * variation(z)
        for value, slope in zip(moved, torch.autograd.grad(loss, moved), strict=True):
            value.grad = slope
        mover.step()
        if progress:
            progress(done, max(budgets))
        if done in budgets:
            looks[done] = z.detach().clone()
    return looks


def pseudo(seen: View, budgets: Sequence[int], progress: Progress | None = None) -> Looks:
    """A client half of the attacker's own that works with the server half on its samples and gives features of the same
    means and spreads; then a decoder for it, used on what the victim sent."""
    half, steps = fresh_half(seen.model, seen.cut, seed=2), max(budgets)
    optimiser = torch.optim.Adam(learned(half), lr=1e-3)
    mean, spread = seen.smashed.mean(0), seen.smashed.std(0)
    for done, rows in enumerate(minibatches(len(seen.auxiliary), 16, steps, seed=3), 1):
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
    further = None if progress is None else lambda done, _: progress(steps + done, 2 * steps)
    return decoded(theirs, seen.auxiliary, seen.smashed, budgets, progress=further)


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


Effort = Literal["all", "some", "quick"]
"""How many steps: all that an attack is known to gain by, those of a study of many runs, or those of a quick look."""


@dataclass(frozen=True)
class Budget:
    """Steps of an attack by effort."""

    all: int
    some: int
    quick: int

    def looks(self, effort: Effort) -> tuple[int, ...]:
        """Steps after which what was made is looked at, of which the strongest counts: a quarter, half, all.

        >>> Budget(1200, 400, 100).looks("some")
        (100, 200, 400)
        """
        steps: int = getattr(self, effort)
        return steps // 4, steps // 2, steps


@dataclass(frozen=True)
class Method:
    """An attack."""

    run: Callable[[View, Sequence[int], Progress | None], Looks]
    budget: Budget
    needs_half: bool
    """whether the attacker must know, or be able to ask, the client half"""


METHODS: dict[str, Method] = {
    "network": Method(network, Budget(1200, 300, 100), needs_half=True),
    "optimise": Method(optimise, Budget(200, 60, 40), needs_half=True),
    **{
        f"optimise, smooth {weight:g}": Method(
            partial(optimise, smoothness=weight), Budget(200, 60, 40), needs_half=True
        )
        for weight in SMOOTHNESS
    },
    "unsplit": Method(unsplit, Budget(1000, 400, 60), needs_half=False),
    "pseudo": Method(pseudo, Budget(1200, 300, 100), needs_half=False),
}
"""Reconstructions by name."""
