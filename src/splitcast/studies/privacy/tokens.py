"""Tokens from activations of a causal model, one after the other.

The activation at place t depends on tokens 1..t alone. Who knows the client half tries candidates for the token at t
behind the tokens found so far, and takes the one whose activation is nearest:

    u_t = argmin_u || w^c(u_1 .. u_{t-1}, u)_t - S_t ||.

After Morris et al., Language model inversion, 2023, and Qu et al., 2025, on split learning of language models.
"""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def recover(features: Callable[[Tensor], Tensor], smashed: Tensor, vocabulary: int, batch: int = 256) -> Tensor:
    """Tokens (M, T) whose activations, ``features`` of (rows, t) tokens as (rows, t, d), come nearest to S (M, T, d).

    Every candidate is tried at every place: for small vocabularies."""
    rows, length = smashed.shape[:2]
    found = torch.zeros(rows, length, dtype=torch.int64)
    candidates = torch.arange(vocabulary)
    for m in range(rows):
        for t in range(length):
            best = (float("inf"), 0)
            for some in torch.split(candidates, batch):
                tried = torch.cat([found[m, :t].expand(len(some), t), some[:, None]], dim=1)
                apart = (features(tried)[:, t] - smashed[m, t]).square().sum(1)
                least = int(apart.argmin())
                best = min(best, (float(apart[least]), int(some[least])))
            found[m, t] = best[1]
    return found


def accuracy(found: Tensor, truth: Tensor) -> float:
    """Share of tokens that are right."""
    return float((found == truth).double().mean())
