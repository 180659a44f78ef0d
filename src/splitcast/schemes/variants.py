"""Schemes that are others with one thing changed.

- sglr, `sfl-ga` with two rates: Pal et al., Server-side local gradient averaging and learning rate acceleration for
  scalable split learning, arXiv 2112.05929.
- psl-personal, `psl` judged client by client: Kim et al., Bargaining game for personalized energy efficient split
  learning over wireless networks, WCNC 2023.
- fed-pairing, `fl` with a helper: Shen et al., Effectively heterogeneous federated learning: a pairing and split
  learning based approach, GLOBECOM 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitcast.base.config import Config
from splitcast.schemes.feedback import Mean
from splitcast.schemes.program import Batch, Clients, KnownCohort, Link, Party
from splitcast.schemes.split import Split
from splitcast.training.placement import Placement, Segment


class Sglr(Split):
    """SGLR (Pal et al. 2021): the gradient averaged at the split layer is broadcast as in SFL-GA, and both sides have
    learning rates of their own: the server, whose batch is N times as large, eta_s = r_s eta, clients eta_c = r_c eta.

    r_s = 0 stands for sqrt(N), the usual rule for a larger batch; the paper tunes both.
    """

    name = "sglr"
    feedback = Mean()

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        own = config.sglr
        self.rates = (own.client_rate, own.server_rate or config.data.clients**0.5)


class PersonalPsl(Split):
    """Personalised parallel split learning (Kim et al., WCNC 2023): `psl`, whose client halves are meant to differ. So
    what is tested is every client's own model, on test samples of the labels that it has (all, where targets are no
    labels), and the measures are means over the clients.

    Their cut by bargaining is the policy ``bargain`` (`cutting.bargain`).
    """

    name = "psl-personal"
    personal = True
    sites = False


@dataclass
class _Helpers:
    """Those who hear what is meant for others."""

    ids: Sequence[int]
    place: tuple[int, int]
    rows: None = None


class FedPairing(Split):
    """FedPairing (Shen et al., GLOBECOM 2023): no server computes. Clients come in pairs; of client n's samples it runs
    blocks 1..v_n itself, and its partner the others, so that a slow client with few blocks leans on a fast one. Whole
    models are averaged in every round. ``cut`` has the v_n, which the paper takes as V f_n / (f_n + f_m).

    Sends smashed data and labels to the partner, the gradient back, over the server's cell; and the model as `fl` does.

    Not in the paper: the partner works with a copy of the sender's blocks instead of its own ones, which makes it `fl`
    to rounding, whatever the cuts and pairs; and pairs are neighbours in the order of their numbers (an odd one out is
    its own).
    """

    name = "fed-pairing"
    u_shape = False
    sync_every = 1
    sites = False

    def place(self, cut: int, depth: int) -> Placement:
        here, there = Placement.split(cut, depth).segments
        return Placement((here, Segment("client", there.start, there.stop)))

    def round(self, t: int, clients: KnownCohort, server: Any, link: Link) -> None:  # type: ignore[override]
        ids = list(clients.ids)
        self.partner = {n: ids[k ^ 1] if k ^ 1 < len(ids) else n for k, n in enumerate(ids)}
        super().round(t, clients, server, link)

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        helpers: Any = _Helpers([self.partner[n] for n in clients.ids], clients.place)
        clients.helped = {1: helpers.ids}
        sent = clients.forward(0, batch.x)
        smashed = link.up("smashed", sent.out, self.uplink, clients).whole()
        labels = link.up("labels", batch.y, clients.task.target_codec, clients)
        smashed = link.unicast("smashed", smashed, self.uplink, helpers)
        link.unicast("labels", labels.whole(), clients.task.target_codec, helpers)
        _, grads = clients.descend(1, smashed, labels)
        grads = link.up("gradient", grads, self.downlink, helpers).whole()
        clients.backward(sent, link.unicast("gradient", grads, self.downlink, clients))
