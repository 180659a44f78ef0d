"""Feature-space hijacking (Pasquini et al., CCS 2021): a server that sends other gradients than those of the task.

The attacker has samples of its own, a pilot e (a client half of its own), a decoder d of it, and a critic c that tells
e(a) from w^c(x):

    e, d   <- min ||d(e(a)) - a||^2           on the attacker's samples a
    c      <- max c(e(a)) - c(w^c(x)) - gradient penalty
    s      =  d(-c(w^c(x)))/dS                sent to the victim instead of its gradient

so that the victim's half maps its samples into the space that d reads. Not in the paper: smaller networks, fewer steps,
a pilot of the client's architecture.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitcast.model.split import Params
from splitcast.studies.privacy.networks import Decoder, Looks, Progress, critic, minibatches
from splitcast.studies.privacy.reconstruct import fresh_half, learned
from splitcast.studies.privacy.view import View

PENALTY = 10.0


@dataclass
class Hijacked:
    """What came of it."""

    looks: Looks
    """d(w^c(x)) of the victim's samples (M, *shape), after every budget"""
    gradients: Tensor
    """what the victim received in its last step (b, *d)"""
    smashed: Tensor
    """what it had sent (b, *d)"""
    labels: Tensor
    """of that step (b,)"""


def hijack(
    seen: View, budgets: Sequence[int], progress: Progress | None = None, *, lr: float = 1e-3, batch: int = 32
) -> Hijacked:
    """Train the victim's half (a copy) on its samples under a hijacking server."""
    own_half = {name for name in seen.model.initial() if int(name.split(".", 1)[0]) < seen.cut}
    half: Params = {name: p.detach().clone().requires_grad_(name in own_half) for name, p in seen.client.items()}
    trained = learned(half)
    enters = seen.smashed.shape[1:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder, judge = Decoder(enters, seen.x.shape[1:]), critic(enters)
    pilot = fresh_half(seen.model, seen.cut, seed=4)
    by_pilot = torch.optim.Adam([*learned(pilot), *decoder.parameters()], lr=1e-3)
    by_judge, by_client = (
        torch.optim.Adam(judge.parameters(), lr=5e-4, betas=(0.5, 0.9)),
        torch.optim.Adam(trained, lr=lr),
    )
    steps, looks = max(budgets), Looks()
    private, own = (minibatches(len(x), batch, steps, seed) for seed, x in enumerate((seen.x, seen.auxiliary)))
    mixing = torch.Generator().manual_seed(5)
    received = arrived = torch.empty(0)
    rows = torch.empty(0, dtype=torch.int64)
    for done, (rows, mine) in enumerate(zip(private, own, strict=True), 1):
        features = seen.model.forward(half, seen.x[rows], 0, seen.cut)
        arrived = seen.codec.through(features.detach()[None])[0].requires_grad_()
        (received,) = torch.autograd.grad(-judge(arrived).mean(), arrived)
        by_client.zero_grad()
        features.backward(received)  # type: ignore[no-untyped-call]
        by_client.step()
        known = seen.model.forward(pilot, seen.auxiliary[mine], 0, seen.cut)
        by_pilot.zero_grad()
        (decoder(known) - seen.auxiliary[mine]).square().mean().backward()
        by_pilot.step()
        real, fake = known.detach(), arrived.detach()
        count = min(len(real), len(fake))
        share = torch.rand(count, *[1] * (real.dim() - 1), generator=mixing)
        between = (share * real[:count] + (1 - share) * fake[:count]).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        by_judge.zero_grad()
        (judge(fake).mean() - judge(real).mean() + PENALTY * penalty).backward()
        by_judge.step()
        if progress:
            progress(done, steps)
        if done in budgets:
            with torch.no_grad():
                arrives = seen.codec.through(seen.model.forward(half, seen.x, 0, seen.cut)[None])[0]
                looks[done] = decoder(arrives)
    return Hijacked(looks, received.detach(), arrived.detach(), seen.y[rows])
