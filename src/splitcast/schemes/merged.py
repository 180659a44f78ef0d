"""Schemes whose server puts the samples of several clients together.

- epsl: Lin et al., Efficient parallel split learning over resource-constrained wireless edge networks, TMC 2024.
- merge-sfl: Liao et al., MergeSFL: split federated learning with feature merging and batch size regulation, ICDE 2024.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.model.split import SplitModel
from splitcast.schemes.program import Batch, Clients, Link, Party
from splitcast.schemes.split import Split


class Epsl(Split):
    """EPSL (Lin et al., TMC 2024): gradients are aggregated at the *last* layer, for r = round(phi b) rows.

    With z_j^n = dF^n/do_j^n at the output o_j^n of row j, the server takes z_j = sum_n rho^n z_j^n for j <= r and goes
    back once for all clients, and back for each of them for the other rows: r + N (b - r) instead of N b rows. What
    comes out at the cut is broadcast for j <= r and unicast for the others; client halves are never averaged.

    The paper does not say through which activations the aggregated z_j go back; here they are those of
    S_j = sum_n rho^n S_j^n, which costs r more rows forward. There is one server half. phi = 0 is `psl` with one.
    """

    name = "epsl"
    u_shape = False
    one_server = True
    mixes = True
    sites = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fraction = config.epsl.aggregate

    def fitted(self, model: SplitModel) -> SplitModel:
        if model.mixes(0, model.depth):
            raise SplitcastError("scheme: epsl puts rows of several clients together; it needs layers that mix none")
        return model

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        sent = clients.forward(0, batch.x)
        smashed = link.up("smashed", sent.out, self.uplink, clients)
        labels = link.up("labels", batch.y, server.task.target_codec, clients)
        rows = round(self.fraction * smashed.shape[1])
        together, own = server.aggregate(1, smashed, labels, rows)
        together = link.broadcast("gradient", together, self.downlink, clients)
        own = link.unicast("gradient", own, self.downlink, clients)
        clients.backward(sent, torch.cat([together.expand(len(own), *together.shape[1:]), own], dim=1))


class MergeSfl(Split):
    """MergeSFL (Liao et al., ICDE 2024): features of all clients make one batch of the one server half, and client n
    brings b^n samples of it, as many as its speed allows.

        w^s <- w^s - eta dF(w^s)/dw^s,  F the mean over all B = sum_n b^n samples,
        client n receives B/b^n dF/dS^n, the gradient of the mean over its own,  w^c = sum_n b^n/B w^c,n.

    With one local step and equal batches it is `sfl` of clients with equally many samples. ``batches`` are from
    `studies.per_client.regulated`, say; without, all have ``batch``.

    Not in the paper: all clients take part, where theirs are selected so that labels are balanced.
    """

    name = "merge-sfl"
    u_shape = False
    sync_every = 1
    one_server = True
    mixes = True
    sites = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        given, count, most = config.merge_sfl.batches, config.data.clients, config.train.batch
        if len(given) not in (0, 1, count) or max(given, default=0) > most:
            said = (
                f"{len(given)} numbers up to {max(given)}; give one for each of {count} clients, up to batch = {most}"
            )
            raise SplitcastError(f"merge-sfl.batches: {said}")
        self.batches = given if len(given) == count else (given or (most,)) * count

    def fitted(self, model: SplitModel) -> SplitModel:
        if len(set(self.batches)) > 1 and model.mixes(0, model.depth):
            raise SplitcastError("merge-sfl.batches: unequal ones need layers that do not mix a batch")
        return model

    def shares(self, sizes: np.ndarray) -> np.ndarray:
        return np.array(self.batches[: len(sizes)]) / sum(self.batches[: len(sizes)])

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        clients.rows = [self.batches[n] for n in clients.ids]
        sent = clients.forward(0, batch.x)
        smashed, labels = self.upload(sent.out, clients, server, link, batch)
        merged = (torch.cat([each[:n] for each, n in zip(x, clients.rows, strict=True)]) for x in (smashed, labels))
        back = server.train(1, *merged, back=True)
        grads = _divided(back, clients.rows, smashed)
        clients.backward(sent, link.unicast("gradient", grads, self.downlink, clients))


def _divided(back: Tensor, rows: Sequence[int], like: Tensor) -> Tensor:
    """The merged gradient (B, *d) as the gradients of each client's own mean (K, b, *d), zeros where it has no rows."""
    grads, total = torch.zeros_like(like), sum(rows)
    for k, part in enumerate(torch.split(back, list(rows))):
        grads[k, : rows[k]] = part * (total / rows[k])
    return grads
