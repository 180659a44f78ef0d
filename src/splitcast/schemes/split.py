"""What most schemes have in common: smashed data and labels up, a feedback down."""

from torch import Tensor

from splitcast.base.codec import Codec
from splitcast.base.comparators.sparse import Sparse
from splitcast.base.config import Config
from splitcast.schemes.feedback import Feedback, Unicast
from splitcast.schemes.program import Batch, Clients, Link, Party, Scheme, Values, codec_of
from splitcast.training.placement import Placement


class Split(Scheme):
    """Smashed data and labels up, a feedback down. Subclasses choose the feedback and the rhythm.

    With S^n = w^c,n(x^n), client n uploads codec(S^n) and y^n; the server takes F^n = F(w^s,n; S^n, y^n), steps its
    copy along dF^n/dw^s,n, and has s^n = dF^n/dS^n; client n pulls what it receives back through its own activations.

    With labels at home (the U-shape of Vepakomma et al. 2018) the last block is the client's too: the server sends
    codec(Z^n) with Z^n = w^s,n(S^n), the client takes F^n = F(w^h,n; Z^n, y^n) and uploads codec(dF^n/dZ^n).
    Unless told otherwise, features have the codec of the uplink and their gradients that of the downlink.

    With ``gradient_correction`` l, clients pull s^n + l (S^n - codec(S^n)) / b back, b samples being in a mean: the
    gradient at what was sent plus that of l/2 ||S_i^n - codec(S_i^n)||^2 of each sample i, which draws smashed data to
    where the format can say them (Wang et al., FedLite, arXiv 2201.11865).
    """

    feedback: Feedback = Unicast()
    u_shape = True
    home = False
    """Whether labels stay at home."""
    features: Codec
    feature_gradient: Codec
    """Of what only travels then"""

    def __init__(self, config: Config) -> None:
        split = config.split
        self.home = split.labels_at_home and self.u_shape
        if split.sync_every >= 0:
            self.sync_every = split.sync_every
        self.uplink = codec_of("uplink_codec", split.uplink_codec, self.uplink)
        self.downlink = codec_of("downlink_codec", split.downlink_codec, self.downlink)
        self.sync = codec_of("sync_codec", split.sync_codec, self.sync)
        self.features = codec_of("feature_codec", split.feature_codec, self.uplink)
        self.correction = split.gradient_correction
        self.feature_gradient = codec_of("feature_gradient_codec", split.feature_gradient_codec, self.downlink)

    def formats(self) -> tuple[Codec, ...]:
        return *super().formats(), self.features, self.feature_gradient

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self.feedback.mixes_clients

    @property
    def corrects(self) -> bool:  # type: ignore[override]
        return type(self).step is Split.step

    def place(self, cut: int, depth: int) -> Placement:
        return Placement.at_home(cut, depth) if self.home else Placement.split(cut, depth)

    def cuts(self, depth: int) -> range:
        return range(1, depth - 1 if self.home else depth)

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        sent = clients.forward(0, batch.x)
        smashed = link.up("smashed", sent.out, self.uplink, clients)
        if self.home:
            grads = self.round_trip(clients, server, link, smashed, batch)
        else:
            labels = link.up("labels", batch.y, server.task.target_codec, clients)
            _, grads = server.descend(1, smashed, labels)
        received = self.replied(grads, sent.out, smashed, clients, link)
        clients.backward(sent, self.corrected(received, sent.out, smashed, link) if self.correction else received)

    def replied(self, grads: Tensor, out: Values, smashed: Values, clients: Clients, link: Link) -> Tensor:
        """The feedback for what clients sent of ``out``; where each gets its own gradient and some values alone were
        sent (`Sparse`), the gradients of these."""
        form = self.uplink
        if not isinstance(form, Sparse) or not isinstance(self.feedback, Unicast):
            return self.feedback.reply(grads, clients, link, self.downlink)
        own, at = out.whole(), form.places(link.echo(smashed).flatten(2))
        some = grads.new_empty(at.shape) if grads.is_meta else grads.flatten(2).gather(2, at)
        received = link.unicast("gradient", some, self.downlink, clients)
        if own.is_meta:  # elsewhere
            return grads
        back = own.new_zeros(own.flatten(2).shape).scatter_(2, at, received.to(own))
        return (back * form.slope(own)).view(own.shape)

    def corrected(self, received: Tensor, out: Values, smashed: Values, link: Link) -> Tensor:
        """What clients pull back (K, b, *d), having sent ``out`` of which ``smashed`` arrived."""
        own = out.whole()
        if own.is_meta:  # elsewhere
            return received
        return received + self.correction / own.shape[1] * (own - link.echo(smashed))

    def upload(self, out: Values, clients: Clients, server: Party, link: Link, batch: Batch) -> tuple[Tensor, Tensor]:
        """Smashed data and labels of all clients, as the server decodes them."""
        smashed = link.up("smashed", out, self.uplink, clients)
        return smashed.whole(), link.up("labels", batch.y, server.task.target_codec, clients).whole()

    def round_trip(self, clients: Clients, server: Party, link: Link, smashed: Values, batch: Batch) -> Tensor:
        """Through the server and back to the labels: the gradients s^n (K, b, *d)."""
        middle = server.forward(1, smashed)
        features = link.unicast("features", middle.out.whole(), self.features, clients)
        _, grads = clients.descend(2, features, batch.y)
        return server.backward(middle, link.up("feature gradient", grads, self.feature_gradient, clients).whole())
