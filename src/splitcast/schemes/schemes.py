"""The named schemes, each a program over parties and a link (`schemes.program`).

Further ones are in `sequential`, `merged`, `variants`, `auxiliary` and `replay`.

| scheme | program         | sends back | halves averaged    | from                                              |
|--------|-----------------|------------|--------------------|---------------------------------------------------|
| sfl-ga | `SflGa`         | `Mean`     | never              | Liang et al., SFL with gradient aggregation       |
| sfl    | `Sfl`           | `Unicast`  | every round        | Thapa et al., SplitFed, AAAI 2022                 |
| psl    | `Psl`           | `Unicast`  | never              | Jeon and Kim, Parallel split learning, ICOIN 2020 |
| epsl-cut | `EpslCut`     | `Partial`  | never              | after Lin et al., TMC 2024; aggregates at the cut |
| sfl-gb | `SflGb`         | `Basis`    | depends on the cut | ours: docs/basis-broadcast.md                     |
| sfl-tc | `SflTc`         | `Basis`    | depends on the cut | ours: docs/bytes.md                               |
| fl     | `FedAvg`        | nothing    | every round        | McMahan et al., AISTATS 2017                      |
| sl     | `SplitLearning` | `Unicast`  | half handed on     | Vepakomma et al. 2018                             |
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from splitcast.base.codec import Codec
from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.formats import codec
from splitcast.base.registry import Registry
from splitcast.data.loading import TEXT_NAMES
from splitcast.data.text.corpus import SUFFIXES
from splitcast.schemes.auxiliary import CseFsl, FslSage, LocalLoss
from splitcast.schemes.feedback import Basis, Feedback, Mean, Partial, Unicast
from splitcast.schemes.merged import Epsl, MergeSfl
from splitcast.schemes.program import Batch, Clients, Cohort, Link, Party, Scheme, codec_of, refuse_sync
from splitcast.schemes.replay import Ampere, Replay
from splitcast.schemes.sequential import Cpsl, SplitFedV2
from splitcast.schemes.split import Split
from splitcast.schemes.variants import FedPairing, PersonalPsl, Sglr
from splitcast.training.optimiser import make_optimiser
from splitcast.training.placement import Fleet, Placed, Placement


class SflGa(Split):
    """SFL with gradient aggregation (Liang et al.): all clients receive s = sum_n rho^n s^n, one broadcast; nobody's
    client half is ever sent."""

    name = "sfl-ga"
    feedback = Mean()


class Sfl(Split):
    """SplitFed V1 (Thapa et al., AAAI 2022): each client receives its s^n; w^c = sum_n rho^n w^c,n in every round."""

    name = "sfl"
    sync_every = 1


class Psl(Split):
    """Parallel split learning (Jeon and Kim, ICOIN 2020): each client receives its s^n and keeps its half."""

    name = "psl"


class EpslCut(Split):
    """A share of the rows as in SFL-GA, the others as in PSL: the idea of EPSL (Lin et al., TMC 2024), who aggregate at
    the last layer (`merged.Epsl`), here at the cut."""

    name = "epsl-cut"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.feedback = Partial(config.epsl.aggregate)


class Lean(NamedTuple):
    """What a scheme takes at a cut, unless it is told otherwise."""

    uplink: str
    downlink: str
    sync: str
    rank: int
    """of the basis; 0: none, gradients are unicast"""
    sync_every: int = 1
    coefficients: str = "auto"
    home: tuple[str, ...] = ()
    """formats of features and of their gradients with labels at home, if others than of the uplink and downlink"""
    idle: str = ""
    """of gradients where adapters are trained and no client has any, if another than that of the downlink"""


def of_texts(config: Config) -> bool:
    """Whether samples are texts, as far as a configuration tells on every machine: by the task, or by the name of the
    data set or file.

    >>> from splitcast.base.config import with_values
    >>> of_texts(with_values(Config(), dataset="spam-assassin")), of_texts(Config())
    (True, False)
    """
    source = config.data.dataset
    return config.model.task == "next-token" or source in TEXT_NAMES or Path(source).suffix in SUFFIXES


class SflGb(Split):
    """Basis broadcast, ours (docs/basis-broadcast.md): s_i^n ~ C_i^n B, the basis B for all, coefficients for each.

    What weighs least on the air is sent with most care: smashed data at a deep cut, client halves at cut 1. Of texts
    (`of_texts`) rows are tokens, whatever the cut (docs/language-models.md).
    """

    name = "sfl-gb"
    usual: Mapping[int, Lean] = {1: Lean("int2", "int8", "fp32", 8), 2: Lean("int2", "int8", "fp32", 32, 2)}
    deeper = Lean("int8", "int8", "fp32", 32)
    tokens: Mapping[int, Lean] = {1: Lean("lloyd:4", "int8", "int8", 32, 5, "rotated:4")}
    deeper_tokens = Lean("lloyd:4+first", "int8", "int8", 32, 5, "rotated:4")

    def __init__(self, config: Config, placement: Placed | None = None) -> None:
        usual, deeper = (self.tokens, self.deeper_tokens) if of_texts(config) else (self.usual, self.deeper)
        own = usual.get(min(config.split.cuts) if placement is None else placement.cut, deeper)
        down = own.idle if own.idle and config.lora.rank else own.downlink
        self.uplink, self.downlink, self.sync = (codec(name) for name in (own.uplink, down, own.sync))
        self.sync_every, self.config = own.sync_every, config
        super().__init__(config)
        self.home_formats = bool(own.home) and self.home
        if self.home_formats:
            features, gradient = (codec(name) for name in own.home)
            self.features = codec_of("feature_codec", config.split.feature_codec, features)
            named = config.split.feature_gradient_codec
            self.feature_gradient = codec_of("feature_gradient_codec", named, gradient)
        told, rank = config.sfl_gb, config.sfl_gb.rank or own.rank
        form = own.coefficients if told.coefficients == "auto" and not self.downlink.exact else told.coefficients
        coefficients = None if form == "auto" else codec(form, "sfl-gb.coefficients")
        self.feedback: Feedback = Basis(rank, told.drop, coefficients) if rank else Unicast()

    def at(self, placement: Placed) -> Scheme:
        return type(self)(self.config, placement)

    def settings(self) -> dict[str, Any]:
        split, told, chosen = self.config.split, self.config.sfl_gb.coefficients, dict[str, Any]()
        down = _named(split.downlink_codec, self.downlink)
        if isinstance(self.feedback, Basis):
            wire = self.feedback.wire(self.downlink)
            chosen["sfl-gb.rank"] = self.feedback.rank
            chosen["sfl-gb.coefficients"] = down if wire is self.downlink else _named(told, wire)
        at_sync = make_optimiser(self.config.train, exact=self.sync.exact).at_sync
        chosen |= {"optimizer_state": at_sync} if at_sync == "local" else {}
        if self.home_formats:
            chosen["feature_codec"] = _named(split.feature_codec, self.features)
            chosen["feature_gradient_codec"] = _named(split.feature_gradient_codec, self.feature_gradient)
        return chosen | {
            "sync_every": self.sync_every,
            "uplink_codec": _named(split.uplink_codec, self.uplink),
            "downlink_codec": down,
            "sync_codec": _named(split.sync_codec, self.sync),
        }


def _named(told: str, codec: Codec) -> str:
    """As a configuration names a codec: yours are not found by the names they give themselves."""
    return codec.name if told == "auto" else told


class SflTc(SflGb):
    """Transform coding, ours (docs/bytes.md): basis broadcast with transform-coded smashed data and directions, and
    client halves as differences of four bits. Tokens are rotated rows instead, and gradients unicast."""

    name = "sfl-tc"
    usual: Mapping[int, Lean] = {
        1: Lean("transform:150B", "transform:20%", "int4", 2),
        2: Lean("transform:5%", "int4", "int4", 16, 2),
    }
    deeper = Lean("transform:5%", "int8", "int4", 32, 2)
    tokens: Mapping[int, Lean] = {
        1: Lean("lloyd:4", "lloyd:2", "int8", 0, 5, home=("lloyd:4", "lloyd:3"), idle="lloyd:1")
    }
    deeper_tokens = Lean("lloyd:4+first", "lloyd:4", "int4", 0, 3, home=("lloyd:4", "lloyd:4"))


class FedAvg(Scheme):
    """Federated averaging (McMahan et al., AISTATS 2017): w = sum_n rho^n w^n after tau steps of the whole model."""

    name = "fl"
    sync_every = 1
    mixes = False

    def __init__(self, config: Config) -> None:
        refuse_sync(config, self.name)
        self.sync = codec_of("sync_codec", config.split.sync_codec, self.sync)

    def place(self, cut: int, depth: int) -> Placement:
        return Placement.whole(depth)

    def step(self, clients: Clients, server: Party, link: Link, batch: Batch) -> None:
        clients.descend(0, batch.x, batch.y)


class SplitLearning(Split):
    """Vanilla split learning (Vepakomma et al. 2018): clients in turn, one server half, the client half handed on."""

    name = "sl"
    clients_keep_halves = False

    def __init__(self, config: Config) -> None:
        refuse_sync(config, self.name)
        super().__init__(config)
        if not self.sync.exact:
            raise SplitcastError(f"sync_codec: {config.split.sync_codec!r}; {self.name} hands halves on exactly")

    def round(self, t: int, clients: Cohort, server: Any, link: Link) -> None:
        for client, party in clients.in_turn(server):
            client.receive(link)
            for batch in client.batches():
                self.step(client, party, link, batch)
            client.hand_in(link)

    def equal_after(self, t: int) -> bool:
        return True

    def moved(self, link: Any, down: int | Sequence[int], up: int, everyone: Sequence[int]) -> None:
        """Nothing: who is next is handed the whole half anyway."""


__all__ = ["PAPERS", "SCHEMES", "Split", "make_scheme", "placed"]
SCHEMES: Registry[type[Scheme]] = Registry("scheme", takes=1)
for _scheme in (
    SflGa,
    Sfl,
    Psl,
    Epsl,
    SflGb,
    FedAvg,
    SplitLearning,
    SplitFedV2,
    EpslCut,
    MergeSfl,
    Cpsl,
    FedPairing,
    PersonalPsl,
    Sglr,
    SflTc,
    Replay,
    LocalLoss,
    CseFsl,
    FslSage,
    Ampere,
):
    SCHEMES[_scheme.name] = _scheme


PAPERS = {
    "sfl-ga": "Liang et al., the paper",
    "sfl": "Thapa et al., AAAI 2022",
    "psl": "Jeon and Kim, ICOIN 2020",
    "epsl": "Lin et al., TMC 2024",
    "epsl-cut": "after Lin et al.",
    "sfl-gb": "ours",
    "fl": "McMahan et al., AISTATS 2017",
    "sl": "Vepakomma et al., 2018",
    "splitfed-v2": "Thapa et al., AAAI 2022",
    "merge-sfl": "Liao et al., ICDE 2024",
    "cpsl": "Wu et al., JSAC 2023",
    "fed-pairing": "Shen et al., GLOBECOM 2023",
    "psl-personal": "Kim et al., WCNC 2023",
    "sglr": "Pal et al., 2021",
    "local-loss": "Han et al., ICML workshop 2021",
    "cse-fsl": "Mu and Shen, ICC 2023",
    "fsl-sage": "Nair et al., ICML 2025",
    "ampere": "Zhang et al., 2025",
    "sfl-replay": "ours",
    "sfl-tc": "ours",
}
"""Where a scheme is from."""


def make_scheme(config: Config) -> Scheme:
    """The scheme a configuration names; ``module:function`` takes the configuration.

    >>> make_scheme(Config()).name
    'sfl-ga'
    """
    one_of("client_update", config.split.client_update, ["own", "identical"])
    made = SCHEMES.find(config.split.scheme)(config)  # type: ignore[call-arg]
    if not isinstance(made, Scheme):
        raise SplitcastError(f"scheme: {config.split.scheme!r} gives a {type(made).__name__}, not a Scheme")
    if config.split.labels_at_home and not getattr(made, "home", False):
        able = ", ".join(name for name, scheme in SCHEMES.items() if scheme.u_shape)
        raise SplitcastError(f"labels_at_home: {made.name} has no U-shape; choose one of {able}")
    if config.split.gradient_correction and not made.corrects:
        able = ", ".join(name for name, scheme in SCHEMES.items() if scheme.step is Split.step)
        raise SplitcastError(f"gradient_correction: {made.name} has none; choose one of {able}")
    return made


def placed(config: Config, scheme: Scheme, depth: int) -> Placed:
    """Who holds which of the V blocks: one cut for all, or one for each client."""
    cuts = config.split.cuts
    if len(cuts) not in (1, config.data.clients):
        raise SplitcastError(f"cut: {len(cuts)} cuts for {config.data.clients} clients; give one, or one for each")
    found = Fleet.of_clients([scheme.place(cut, depth) for cut in cuts])
    if isinstance(found, Fleet):
        settings = [scheme.at(place).settings() for place in found.kinds]
        if config.policy.policy != "fixed":
            raise SplitcastError(f"policy: {config.policy.policy!r} moves one cut; with one for every client use fixed")
        if scheme.one_server:
            raise SplitcastError(f"cut: {scheme.name} with its settings needs one cut for all clients")
        if not scheme.sync.exact:
            own = _named(config.split.sync_codec, scheme.sync)
            raise SplitcastError(f"sync_codec: {own!r} of {scheme.name} needs one cut for all clients; or give fp32")
        if config.train.optimizer_state in ("local", "reset") and not scheme.clients_keep_halves:
            state = config.train.optimizer_state
            raise SplitcastError(f"optimizer_state: {state!r} with {scheme.name} needs one cut for all clients")
        if config.split.client_update != "own":
            raise SplitcastError("client_update: 'identical' needs one cut for all clients")
        if any(other != settings[0] for other in settings):
            named = ", ".join(name for name in settings[0] if len({str(each[name]) for each in settings}) > 1)
            raise SplitcastError(f"cut: {scheme.name} has other settings at each of these cuts; give {named}")
    return found
