"""Defences: what a client does to its smashed data before anybody sees them. Parts of a scheme, whatever it is.

    kept channels      S <- S * m, m in {0, 1}^C drawn once, the same for all clients
    clipping           S_i <- S_i min(1, c / ||S_i||), so that no sample weighs more than c
    noise              S_i <- S_i + sigma z, z ~ N(0, I): with clipping, a Gaussian mechanism (`cost.privacy`)
    NoPeek             the client half also learns to lessen alpha dCor(x^n, S^n)

Dropping channels after Singh et al., DISCO, CVPR 2021 (who learn which); clipping and noise after Abadi et al., CCS
2016 (who noise gradients); NoPeek by Vepakomma et al., ICDM Workshops 2020. Gradients pass the same operations on their
way back, so clients learn with the defence that they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitcast.base.config import DefenceConfig
from splitcast.base.seeds import torch_stream
from splitcast.training.correlation import distance_correlation


@dataclass(frozen=True)
class Defence:
    """What is done to S (K, b, *d)."""

    clip: float = 0.0
    noise: float = 0.0
    drop: float = 0.0
    nopeek: float = 0.0
    seed: int = 0

    @staticmethod
    def of(config: DefenceConfig, seed: int) -> "Defence | None":
        """What a configuration asks for, if anything."""
        made = Defence(config.clip, config.noise, config.drop, config.nopeek, seed)
        return made if made != Defence(seed=seed) else None

    @property
    def name(self) -> str:
        """What it does, in words.

        >>> Defence(clip=1.0, noise=0.5).name
        'clip 1, noise 0.5'
        """
        done = {"clip": self.clip, "noise": self.noise, "drop": self.drop, "nopeek": self.nopeek}
        return ", ".join(f"{what} {how:g}" for what, how in done.items() if how)

    def guard(self, smashed: Tensor) -> Tensor:
        """What leaves the client; noise is drawn from torch's own stream, as that of random layers."""
        if self.drop:
            smashed = smashed * self.channels(smashed.shape[2:]).to(smashed)
        if self.clip:
            norms = torch.linalg.vector_norm(smashed.flatten(2), dim=2).clamp(min=self.clip)
            smashed = smashed * (self.clip / norms).view(*norms.shape, *[1] * (smashed.dim() - 2))
        if self.noise:
            smashed = smashed + self.noise * torch.randn_like(smashed)
        return smashed

    def channels(self, shape: Sequence[int]) -> Tensor:
        """Which channels of samples (C, ...) are kept: 1 or 0, (C, 1, ...); at least one is."""
        count = shape[0]
        kept = max(1, round((1 - self.drop) * count))
        chosen = torch.randperm(count, generator=torch_stream(self.seed, "defence"))[:kept]
        mask = torch.zeros(count, device="cpu").index_fill_(0, chosen, 1.0)
        return mask.view(count, *[1] * (len(shape) - 1))

    def pull(self, x: Tensor, smashed: Tensor) -> Tensor:
        """alpha d dCor(x^n, S^n)/dS^n of every client (K, b, *d)."""
        leaf = smashed.detach().requires_grad_()
        correlation = distance_correlation(x.detach().flatten(2).to(leaf.dtype), leaf.flatten(2))
        return self.nopeek * torch.autograd.grad(correlation.sum(), leaf)[0]
