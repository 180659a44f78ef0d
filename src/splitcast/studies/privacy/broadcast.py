"""What other clients learn from a broadcast: the mean of `sfl-ga`, the basis of `sfl-gb`.

A broadcast row is the gradient s_i = sum_n rho^n s_i^n of N clients' i-th samples, or a direction that gradients of all
share. The attacker is given more than a client has: an oracle that shows it broadcasts together with the victim's
samples, made from auxiliary samples. A decoder learns from these pairs. If even so it stays at the floor, a client that
has no oracle learns nothing of the victim's samples by this way.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splitcast.schemes.basis import factorise, fit
from splitcast.studies.privacy.networks import Looks, Progress, decoded
from splitcast.studies.privacy.view import View

Reply = Callable[[Tensor], Tensor]
"""Gradients (N, b, *d) of all clients to what is broadcast for every row (b, *d)."""


def mean(grads: Tensor) -> Tensor:
    """sfl-ga: the mean over clients of equal shares."""
    return grads.mean(0)


def basis(rank: int) -> Reply:
    """sfl-gb: for each row of the victim's, C_i B, its share in the common directions of all rows: what the basis gives
    away of it at most, since coefficients C_i are sent to their owner alone."""

    def project(grads: Tensor) -> Tensor:
        rows, everybody = grads[0].flatten(1), grads.flatten(0, 1).flatten(1)
        common = factorise(everybody, torch.ones(len(everybody)), rank).basis
        return (fit(rows, common) @ common).view(grads.shape[1:])

    return project


def gradients(seen: View, x: Tensor, y: Tensor) -> Tensor:
    """dF/dS of single samples (M, *d)."""
    found = []
    for xs, ys in zip(torch.split(x, 50), torch.split(y, 50), strict=True):
        smashed = seen.send(xs).requires_grad_()
        output = seen.model.forward(seen.server, smashed, seen.cut, seen.model.depth)
        found.append(torch.autograd.grad(seen.task.losses(output, ys).sum(), smashed)[0])
    return torch.cat(found)


def overhear(seen: View, clients: int, reply: Reply, budgets: Sequence[int], progress: Progress | None = None) -> Looks:
    """Reconstructions of the victim's samples by a client that hears broadcasts of ``clients``.

    The others' samples are drawn from the auxiliary ones.
    """
    generator = torch.Generator().manual_seed(7)
    own, theirs = gradients(seen, seen.x, seen.y), gradients(seen, seen.auxiliary, seen.auxiliary_y)

    def heard(first: Tensor, b: int = 32) -> Tensor:
        rows = []
        for some in torch.split(first, b):
            others = torch.randint(len(theirs), (clients - 1, len(some)), generator=generator)
            rows.append(reply(torch.cat([some[None], theirs[others]])))
        return torch.cat(rows)

    return decoded(heard(theirs), seen.auxiliary, heard(own), budgets, progress=progress)
