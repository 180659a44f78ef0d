"""The named schemes: each is a feedback, a rhythm of client-model averaging, and a codec each way.

| scheme | feedback  | client halves averaged | from |
|--------|-----------|------------------------|------|
| sfl-ga | `Mean`    | never                  | Liang et al., SFL with gradient aggregation |
| sfl    | `Unicast` | every round            | Thapa et al., SplitFed, AAAI 2022 |
| psl    | `Unicast` | never                  | Jeon and Kim, Parallel split learning, ICOIN 2020 |
| epsl   | `Partial` | never                  | Lin et al., Efficient parallel split learning, TMC 2024 |
| sfl-gb | `Basis`   | depends on the cut     | ours: docs/basis-broadcast.md |
| fl     | none: the whole model is on the client | every round | McMahan et al., AISTATS 2017 |
| sl     | `Unicast`, clients one after another | half handed on | Vepakomma et al. 2018 |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from splitcast.config import SplitConfig
from splitcast.errors import SplitcastError, one_of
from splitcast.schemes.codec import CODECS, FP32, Codec, label_bytes
from splitcast.schemes.feedback import Basis, Feedback, Mean, Partial, Unicast
from splitcast.schemes.messages import Ledger


@dataclass(frozen=True)
class Scheme:
    """How a round runs."""

    name: str
    feedback: Feedback
    sync_every: int = 0
    """Rounds between averagings of the client halves; 0 is never."""
    whole_model: bool = False
    """The client holds all blocks (FedAvg); nothing is smashed."""
    sequential: bool = False
    """Clients take turns; the client half is handed on."""
    identical: bool = False
    """Every client applies sum_n rho^n g^n: the idealisation behind the paper's theory."""
    uplink: Codec = FP32
    downlink: Codec = FP32
    suited: SplitConfig | None = None
    """The configuration whose cut it is suited to; None suits every cut."""

    def at(self, cut: int) -> "Scheme":
        """The scheme as it runs at another cut.

        >>> scheme(SplitConfig(scheme="sfl-gb", cut=1)).at(3) == scheme(SplitConfig(scheme="sfl-gb", cut=3))
        True
        """
        return self if self.suited is None or self.suited.cut == cut else scheme(replace(self.suited, cut=cut))

    def syncs(self, round_: int) -> bool:
        """Whether the client halves are averaged at the end of a round, counted from 1."""
        return self.sync_every > 0 and round_ % self.sync_every == 0

    def send_smashed(self, shape: Sequence[int], classes: int, ledger: Ledger, clients: Sequence[int]) -> None:
        """Count the upload of smashed data (b, *d) and b labels."""
        if not self.whole_model:
            ledger.unicast("up", "smashed", self.uplink.nbytes(shape), clients)
            ledger.unicast("up", "labels", label_bytes(shape[0], classes), clients)

    def send_models(self, values: int, ledger: Ledger, clients: Sequence[int], everyone: Sequence[int]) -> None:
        """Count the exchange of client halves of ``values`` fp32 values each, optimiser state included.

        Averaging is one upload from each of ``clients`` and one broadcast to ``everyone``, those included that did not
        take part; handing on is one upload and one download each.
        """
        ledger.unicast("up", "model", 4 * values, clients)
        if self.sequential:
            ledger.unicast("down", "model", 4 * values, clients)
        else:
            ledger.broadcast("model", 4 * values, everyone)


def _basis_broadcast(config: SplitConfig) -> Scheme:
    """What weighs least on the air is sent with most care: smashed data at a deep cut, client halves at cut 1."""
    uplink, rank, sync_every = {1: ("int2", 8, 1), 2: ("int2", 32, 2)}.get(config.cut, ("int8", 32, 1))
    return Scheme(
        "sfl-gb",
        Basis(config.rank or rank, config.drop),
        sync_every=sync_every,
        uplink=CODECS[uplink],
        downlink=CODECS["int8"],
        suited=config,
    )


SCHEMES: dict[str, Callable[[SplitConfig], Scheme]] = {
    "sfl-ga": lambda config: Scheme("sfl-ga", Mean()),
    "sfl": lambda config: Scheme("sfl", Unicast(), sync_every=1),
    "psl": lambda config: Scheme("psl", Unicast()),
    "epsl": lambda config: Scheme("epsl", Partial(config.aggregate)),
    "sfl-gb": _basis_broadcast,
    "fl": lambda config: Scheme("fl", Unicast(), sync_every=1, whole_model=True),
    "sl": lambda config: Scheme("sl", Unicast(), sequential=True),
}


def scheme(config: SplitConfig) -> Scheme:
    """The scheme a configuration names.

    >>> scheme(SplitConfig(scheme="sfl")).sync_every
    1
    """
    made = SCHEMES[one_of("scheme", config.scheme, SCHEMES)](config)
    identical = one_of("client_update", config.client_update, ["own", "identical"]) == "identical"
    if identical and (made.whole_model or made.sequential):
        raise SplitcastError(f"client_update: 'identical' needs a parallel split scheme, not {made.name}")
    if config.sync_every >= 0 and (made.whole_model or made.sequential):
        raise SplitcastError(f"sync_every: {config.sync_every} needs a parallel split scheme, not {made.name}")
    return replace(
        made,
        identical=identical,
        sync_every=made.sync_every if config.sync_every < 0 else config.sync_every,
        uplink=_codec("uplink_codec", config.uplink_codec, made.uplink),
        downlink=_codec("downlink_codec", config.downlink_codec, made.downlink),
    )


def _codec(field: str, name: str, own: Codec) -> Codec:
    return ({"auto": own} | CODECS)[one_of(field, name, ["auto", *CODECS])]
