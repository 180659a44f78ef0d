"""Schemes that take some things one after the other.

- splitfed-v2: Thapa et al., SplitFed: when federated learning meets split learning, AAAI 2022.
- cpsl: Wu et al., Split learning over wireless networks: parallel design and resource management, JSAC 2023.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.schemes.program import Batch, Clients, KnownCohort, Link, Party, refuse_sync
from splitcast.schemes.split import Split


class SplitFedV2(Split):
    """SplitFed V2 (Thapa et al., AAAI 2022): client halves as in `sfl`, but one server half, which steps along
    dF(w^s; S^n, y^n)/dw^s for one client after the other in random order; client n receives dF(w^s; S^n, y^n)/dS^n of
    the half as it found it.

    Sends what `sfl` sends. The server works through all clients on its whole CPU before anybody is answered.

    Not in the paper: with several local steps all clients are taken through one before the next, in a new order.
    """

    name = "splitfed-v2"
    u_shape = False
    sync_every = 1
    one_server = True
    mixes = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seed = config.train.seed

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        sent = clients.forward(0, batch.x)
        smashed, labels = self.upload(sent.out, clients, server, link, batch)
        order = stream(self.seed, "order", *clients.place).permutation(len(clients.ids)).tolist()
        found = {k: server.train(1, smashed[k], labels[k], back=True) for k in order}
        grads = torch.stack([found[k] for k in range(len(order))]) if order else smashed
        clients.backward(sent, link.unicast("gradient", grads, self.downlink, clients))


class Cpsl(Split):
    """Cluster-based parallel split learning (Wu et al., JSAC 2023): M clusters in turn. Those of a cluster are given
    the client half by a broadcast, train as in `sfl`, and send their halves, whose average the next cluster begins
    with; so does it with the server half. One cluster is `sfl`, a cluster for every client is `sl`.

    Not in the paper: clusters are equal parts of the clients by their numbers; there they are searched for.
    """

    name = "cpsl"
    clients_keep_halves = False
    sites = False

    def __init__(self, config: Config) -> None:
        refuse_sync(config, self.name)
        super().__init__(config)
        if not self.sync.exact:
            raise SplitcastError(f"sync_codec: {config.split.sync_codec!r}; {self.name} hands halves on exactly")
        self.clusters = config.cpsl.clusters

    def round(self, t: int, clients: KnownCohort, server: Any, link: Link) -> None:  # type: ignore[override]
        for ids in np.array_split(np.array(clients.ids), min(self.clusters, len(clients.ids))):
            cluster = clients.part(ids.tolist())
            cluster.receive(link)
            for some, copies in cluster.in_parallel(server, mixes=self.mixes, averaged=True):
                for batch in some.batches():
                    self.step(some, copies, link, batch)
            cluster.average(link)

    def equal_after(self, t: int) -> bool:
        return True

    def moved(self, link: Any, down: int | Sequence[int], up: int, everyone: Sequence[int]) -> None:
        """Nothing: who is next is given the whole half anyway."""
