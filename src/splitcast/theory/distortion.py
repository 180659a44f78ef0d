"""What formats do to smashed data before anything is trained, the counterpart of Gamma for them.

    e(v, f) = sum_n rho^n E ||Q_f(S^n_v) - S^n_v||^2 / ||S^n_v||^2

with S^n_v what leaves client n at cut v for a mini-batch, Q_f the encoding and decoding of format f, and the mean over
some mini-batches: those from which Gamma is measured.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import Codec
from splitcast.base.rounding import RoundingNoise
from splitcast.cost.cell import Array
from splitcast.model.split import Params, SplitModel
from splitcast.theory.passes import Parts, batches, boundaries, check_draws, shares
from splitcast.training.defence import Defence


@torch.no_grad()
def relative_errors(
    model: SplitModel,
    params: Params,
    x: Tensor,
    parts: Parts,
    batch: int,
    draws: int,
    seed: int,
    stops: Sequence[int],
    codecs: Sequence[Codec],
    defence: Defence | None = None,
) -> Array:
    """e(v, f) at ``params``, (F, C), for the blocks ``stops`` (C,) that clients hold and F formats, which send as in
    round 1."""
    check_draws(draws, 1)
    rho, total = shares(parts, x).double(), np.zeros((len(codecs), len(stops)))
    for draw in range(draws):
        for n, rows in enumerate(batches(parts, batch, seed, draw)):
            outs = boundaries(model, params, x[rows.to(x.device)])
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                smashed = [defence.guard(outs[stop][None]) if defence else outs[stop][None] for stop in stops]
            noise = RoundingNoise(seed, 0, draw)
            for f, codec in enumerate(codecs):
                drawn = noise.of("smashed", [n], always=True) if codec.draws else None
                found = [_error(codec.at(1).through(each.clone(), drawn), each) for each in smashed]
                total[f] += float(rho[n]) / draws * np.array(found)
    return total


def _error(seen: Tensor, sent: Tensor) -> float:
    energy = float(sent.double().square().sum())
    return float((seen - sent).double().square().sum()) / energy if energy else 0.0
