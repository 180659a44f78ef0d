"""Schemes whose client halves learn from a loss of their own, that of an auxiliary head on the client.

With a^n the head of client n, S^n = w^c,n(x^n) and F_a^n = F(a^n; S^n, y^n), the client steps along
dF_a^n/d(w^c,n, a^n), and no gradient comes down. Heads are averaged, sent and counted with the client halves.

| scheme     | from                                                                                              |
|------------|---------------------------------------------------------------------------------------------------|
| local-loss | Han et al., Accelerating FL with split learning on locally generated losses, ICML workshop 2021   |
| cse-fsl    | Mu and Shen, Communication and storage efficient federated split learning, ICC 2023               |
| fsl-sage   | Nair et al., FSL via smashed activation gradient estimation, ICML 2025                            |
"""

from typing import Any

from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.model.heads import linear_head
from splitcast.model.split import SplitModel
from splitcast.schemes.program import Batch, Clients, Cohort, Link, Party, Scheme, Values, codec_of
from splitcast.training.placement import Placement

CLIENT, SERVER, HEAD = range(3)
"""Segments."""
Came = tuple[Values, Values]
"""Smashed data and targets, as the server decodes them."""


class Headed(Scheme):
    """Clients hold a head beside their half."""

    sync_every = 1
    fixed_cut = True

    def __init__(self, config: Config) -> None:
        split = config.split
        if split.sync_every >= 0:
            self.sync_every = split.sync_every
        if split.client_update != "own":
            raise SplitcastError(f"client_update: {split.client_update!r} needs a feedback, and {self.name} has none")
        self.uplink = codec_of("uplink_codec", split.uplink_codec, self.uplink)
        self.downlink = codec_of("downlink_codec", split.downlink_codec, self.downlink)
        self.sync = codec_of("sync_codec", split.sync_codec, self.sync)
        self.pool_edge, self.local_steps = config.heads.pool, config.train.local_steps

    def place(self, cut: int, depth: int) -> Placement:
        return Placement.split(cut, depth).with_head()

    def fitted(self, model: SplitModel) -> SplitModel:
        return model.with_heads(linear_head(self.pool_edge))

    def upload(self, clients: Clients, server: Party, link: Link, out: Values, y: Values) -> Came:
        """Smashed data and labels, as the server decodes them."""
        smashed = link.up("smashed", out, self.uplink, clients)
        return smashed, link.up("labels", y, server.task.target_codec, clients)


class LocalLoss(Headed):
    """Local-loss SFL (Han et al. 2021): every batch goes up, the server steps a copy of its half for each client along
    dF(w^s,n; S^n, y^n)/dw^s,n and averages the copies; (w^c, a) = sum_n rho^n (w^c,n, a^n) in every round.

    Not in the paper: one step a round by default (its rounds are epochs).
    """

    name = "local-loss"
    mixes = False

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        sent = clients.forward(CLIENT, batch.x)
        smashed, labels = self.upload(clients, server, link, sent.out, batch.y)
        server.descend(SERVER, smashed, labels)
        _, grads = clients.descend(HEAD, sent.out, batch.y)
        clients.backward(sent, grads)


class CseFsl(Headed):
    """CSE-FSL (Mu and Shen, ICC 2023): of every h batches one goes up, and the server has one half, which steps along
    dF(w^s; S^n, y^n)/dw^s for one client after the other: w^s <- w^s - eta dF(w^s; S^n, y^n)/dw^s, n = 1..N.

    Not in the paper: clients come in the order of their numbers instead of that of their arrival.
    """

    name = "cse-fsl"
    one_server = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.every = config.cse_fsl.every

    def round(self, t: int, clients: Cohort, server: Any, link: Link) -> None:
        averaged = self.syncs(t)
        for some, half in clients.in_parallel(server, mixes=True, averaged=averaged and self.sync.exact):
            for step, batch in enumerate(some.batches()):
                sent, came, done = some.forward(CLIENT, batch.x), None, (t - 1) * self.local_steps + step
                if done % self.every == 0:
                    came = self.upload(some, half, link, sent.out, batch.y)
                    for x, y in zip(*(values.whole() for values in came), strict=True):
                        half.train(SERVER, x, y)
                grads = self.local(some, half, link, batch, sent.out, came, done)
                some.backward(sent, grads)
        if averaged:
            clients.average(link, self.sync)

    def local(
        self, clients: Clients, server: Party, link: Link, batch: Batch, out: Values, came: Came | None, done: int
    ) -> Tensor:
        """The gradients at the cut after ``done`` local steps, ``came`` being what went up in this one."""
        return clients.descend(HEAD, out, batch.y)[1]

    def kind(self, t: int) -> int:
        return 2 * ((t - 1) * self.local_steps % self.every) + super().kind(t)


class FslSage(CseFsl):
    """FSL-SAGE (Nair et al., ICML 2025): as CSE-FSL, but heads learn to give the gradient that the server would. Every
    l steps the server sends s^n = dF(w^s; S^n, y^n)/dS^n of the batch that came up, and

        a^n <- a^n - eta dA^n/da^n,  A^n = 1/b sum_i ||b (dF(a^n; S^n, y^n)/dS_i^n - s_i^n)||^2;

    in every step the client pulls dF(a^n; S^n, y^n)/dS^n back through its half.

    Not in the paper: heads are averaged with the halves, and the last batch is aligned to instead of all since the last
    alignment; so l is a multiple of h.
    """

    name = "fsl-sage"
    many_steps = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        own = config.fsl_sage
        self.every, self.align_every, self.fits = own.every, own.align_every, own.fits
        if self.align_every % self.every:
            raise SplitcastError(f"fsl-sage.align_every: {self.align_every} is no multiple of every = {self.every}")

    def local(
        self, clients: Clients, server: Party, link: Link, batch: Batch, out: Values, came: Came | None, done: int
    ) -> Tensor:
        if came and done % self.align_every == 0:
            told = link.unicast("gradient", server.estimate(SERVER, *came), self.downlink, clients)
            for _ in range(self.fits):
                clients.align(HEAD, out, batch.y, told)
                clients.step()
        return clients.estimate(HEAD, out, batch.y)

    def kind(self, t: int) -> int:
        return 2 * ((t - 1) * self.local_steps % self.align_every) + Scheme.kind(self, t)
