"""The sections of a configuration: every option with its type, its bounds, its default and the help that --help prints.

Names of things that live in other layers (schemes, codecs, data sets, models) are plain strings here and are
looked up, and refused with the allowed names, by the layer that owns them.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from splitcast.base.errors import SplitcastError, shown

T = TypeVar("T")

_LAST = 2**63 - 1

Count = Annotated[int, Field(ge=1, le=_LAST)]
CountOrNone = Annotated[int, Field(ge=0, le=_LAST)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e100, allow_inf_nan=False)]
Decibel = Annotated[float, Field(ge=-300, le=300, allow_inf_nan=False)]
Metres = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0, le=1e21, allow_inf_nan=False)]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) else value


def _plain(value: str) -> str:
    if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in value):
        raise ValueError("control characters and line breaks are not allowed")
    return value


Text = Annotated[str, Field(max_length=1000), AfterValidator(_plain)]
Numbers = Annotated[tuple[NonNegative, ...], Field(max_length=100_000), BeforeValidator(_listed)]
"""One number, or one per client or cut; empty where a default is worked out."""
Counts = Annotated[tuple[Count, ...], Field(max_length=100_000), BeforeValidator(_listed)]
Distances = Annotated[tuple[Metres, ...], Field(max_length=100_000), BeforeValidator(_listed)]
Speeds = Annotated[tuple[Speed, ...], Field(max_length=100_000), BeforeValidator(_listed)]
Decibels = Annotated[tuple[Decibel, ...], Field(max_length=100_000), BeforeValidator(_listed)]


def _separated(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return value
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


Names = Annotated[tuple[Text, ...], Field(max_length=1000), BeforeValidator(_separated)]
"""Names, also as one text with commas."""


AUTO = "auto"


def _numbered(value: Any) -> Any:
    if isinstance(value, str) and value != AUTO:
        if not re.fullmatch(r"-?[0-9]{1,18}(,-?[0-9]{1,18})*", value):
            raise ValueError("give a number, one for every client as in 1,1,2,4, or auto")
        value = [int(part) for part in value.split(",")]
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


_Block = Annotated[int, Field(ge=-_LAST, le=_LAST)]
_Blocks = Annotated[tuple[_Block, ...], Field(min_length=1, max_length=100_000)]
Cut = Annotated[_Block | _Blocks | Literal["auto"], BeforeValidator(_numbered)]
"""One number, or one for every client, also as one text with commas; or auto, until a planner has chosen."""


def shown_cut(cut: int | tuple[int, ...] | str) -> str:
    """As the command line takes it.

    >>> shown_cut((1, 1, 2, 4)), shown_cut(1)
    ('1,1,2,4', '1')
    """
    return ",".join(str(part) for part in cut) if isinstance(cut, tuple) else str(cut)


SCHEME_SECTIONS = (
    "lora",
    "epsl",
    "sfl-gb",
    "merge-sfl",
    "cpsl",
    "sglr",
    "sfl-replay",
    "heads",
    "cse-fsl",
    "fsl-sage",
    "ampere",
    "defence",
)
"""Their keys are known by their full names, such as sfl-gb.rank; other keys are unique without their section."""


def _one_line(error: pydantic.ValidationError, prefix: str) -> str:
    first = error.errors()[0]
    name = prefix + ".".join(bare(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        return f"{name}: unknown key"
    if first["type"] == "missing":
        return f"{name}: must be given"
    return f"{name}: {first['msg'].lower()}, got {shown(first['input'])}"


def bare(name: Any) -> str:
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]{1,80}", name) else shown(name)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """A frozen pydantic dataclass whose validation errors are one-line `SplitcastError`s, with the names of keys as
    the command line has them."""
    made: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls)
    init: Callable[..., None] = made.__init__
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__.removesuffix("Config")).lower()
    prefix = f"{name}." if name in SCHEME_SECTIONS else ""

    @wraps(init)
    def checked(self: Any, **values: Any) -> None:
        try:
            init(self, **values)
        except pydantic.ValidationError as error:
            raise SplitcastError(_one_line(error, prefix)) from None

    made.__init__ = checked
    validated: type[T] = made
    return validated


@section
class DataConfig:
    """What the clients learn from, and how it is spread over them."""

    dataset: Text = "mnist-mini"
    """mnist-mini, text-mini (embedded); mnist, fashion-mnist, cifar10, sotu, moby-dick, kjv, spam-assassin (`splitcast
    data get`); yours: a folder of images with a sub-folder per class, a .npz, .csv or .parquet file, a .txt, .md or
    .jsonl file or a folder of these, or module:function."""
    clients: Annotated[int, Field(ge=1, le=10**7)] = 10
    """Number of clients N."""
    partition: Text = "iid"
    """iid, dirichlet (label skew `alpha`), shards (`classes_per_client` labels each), or by:COLUMN, a client for every
    value. A column is that of a table, an array of a .npz file, a key of texts, or by:file; the number of values
    replaces the default of `clients`."""
    alpha: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 0.5
    """Dirichlet concentration; small is very unequal."""
    classes_per_client: Count = 2
    """Labels per client with `shards`."""
    sizes: Text = "equal"
    """equal or unequal numbers of samples per client."""
    target: Text = ""
    """Column of a table (.csv, .parquet) that is learned; the others are features. Of texts, the class of each."""
    labels: Annotated[tuple[Text, ...], Field(max_length=10_000)] = ()
    """Names of the classes, in the order of their numbers. Default: those found, sorted."""
    image_size: Annotated[int, Field(ge=0, le=8192)] = 0
    """Height and width to which the images of a folder are cut and resized. Default: their own, if all are alike."""
    sequence_length: Annotated[int, Field(ge=1, le=2**20)] = 128
    """Tokens of a row of text."""
    tokenizer: Text = "auto"
    """How texts become tokens: auto (the model's own, else bytes), bytes, or a tokenizer.json or its folder."""
    augment: Text = ""
    """How the samples of a training batch are changed at random: mirror, shift:K (by up to K places; edges repeated),
    module:function of yours, (x, generator) -> x, or several with commas."""


@section
class ModelConfig:
    """What is trained."""

    arch: Text = "cnn"
    """cnn (the paper's), cnn-small, resnet8, resnet18; for texts gpt-small, smollm2 (`splitcast data get smollm2`); of
    transformers hf:NAME, hf:FOLDER (with weights), hf:CONFIG.json (fresh weights); timm:NAME; or module:function
    building your model from (input_shape, classes). A NAME is one of huggingface.co, or in its cache here."""
    batch_norm: Text = "local"
    """BatchNorm: local (each client's own batch), frozen (running statistics used and kept), group (GroupNorm)."""
    task: Text = "classification"
    """What is learned: classification, multi-label, regression, pixel (a class for every pixel), next-token, or
    module:function of yours building a task from the number of classes."""


@section
class LoraConfig:
    """Low-rank adapters: only they are trained."""

    rank: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Rank of the adapters; 0: none, everything is trained."""
    modules: Names = ()
    """Linear layers that get one, by the end of their names, as in q_proj,v_proj."""
    alpha: NonNegative = 0.0
    """Adapters are scaled by alpha / rank; 0: by 1."""
    side: Text = "both"
    """Whose blocks get them: client, server or both. Of one side they are in blocks that are there for every client."""


@section
class SplitConfig:
    """How the model is split and what travels."""

    scheme: Text = "sfl-ga"
    """sfl-ga, sfl, psl, epsl, sfl-gb, sfl-tc, fl, sl, splitfed-v2, epsl-cut, merge-sfl, cpsl, fed-pairing,
    psl-personal, sglr, sfl-replay, local-loss, cse-fsl, fsl-sage, ampere, or module:function of yours."""
    cut: Cut = 1
    """Blocks on the client, 1..V-1; or one number for each, as in 1,1,2,4; or auto (planned)."""
    labels_at_home: bool = False
    """Labels stay with the clients, who hold the last block too (U-shape). A scheme that has none is refused with those
    that do."""
    sync_every: Annotated[int, Field(ge=-1, le=_LAST)] = -1
    """Rounds between averagings of the client halves; 0: never; -1: as the scheme does (sfl-gb: 2 at cut 2, on
    texts 5, else 1; sfl-tc on texts beyond cut 1: 3)."""
    uplink_codec: Text = "auto"
    """Format of smashed data on the wire: fp32, fp16, int8, int4, int2, transform:2.5 (step; or 140B per sample, 5%
    error, 80..160B@60 over 60 rounds), for tokens rotated:4 or lloyd:2; more in docs/codecs.md; module:function.
    auto: fp32; of sfl-gb int2 or int8, of sfl-tc transform:150B or 5%, of both on texts lloyd:4, of sfl-replay
    transform:100B."""
    downlink_codec: Text = "auto"
    """Format of smashed-data gradients on the wire, as above, or module:function. auto: fp32; of sfl-gb int8; of sfl-tc
    transform:20% at cut 1, int4 at cut 2, else int8, and on texts lloyd:4, at cut 1 lloyd:2 or, with adapters, which
    are all behind it, lloyd:1; of sfl-replay transform:20%."""
    feature_codec: Text = "auto"
    """With labels at home, format of the features that go down. auto: as the uplink; of sfl-tc on texts lloyd:4."""
    feature_gradient_codec: Text = "auto"
    """With labels at home, format of their gradients, which go up. auto: that of the downlink; of sfl-tc on texts
    lloyd:3 at cut 1, else lloyd:4."""
    sync_codec: Text = "auto"
    """Format of client halves when they are averaged, as above: other than fp32, as differences to the last average,
    with what rounding leaves over added to the next. auto: fp32; of sfl-gb on texts and of sfl-replay int8; of sfl-tc
    int4, on texts at cut 1 int8."""
    gradient_correction: NonNegative = 0.0
    """What clients add to the gradient of each sample that they receive: so many times what the format of the uplink
    has changed its smashed data by (FedLite's correction)."""
    client_update: Text = "own"
    """own (each client applies its own pull-back) or identical (the idealised theory: all apply the mean)."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """One cut for all clients, or one for each."""
        if isinstance(self.cut, str):
            raise SplitcastError(f"cut: {self.cut!r} is chosen when a training begins; give a number here")
        return self.cut if isinstance(self.cut, tuple) else (self.cut,)


@section
class EpslConfig:
    """Options of the schemes epsl and epsl-cut."""

    aggregate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fraction of the batch rows whose gradients are aggregated and broadcast."""


@section
class SflGbConfig:
    """Options of the scheme sfl-gb."""

    rank: CountOrNone = 0
    """Directions in the broadcast basis of the gradients, at most that many with `drop`; 0: 8 at cut 1, else 32."""
    drop: Probability = 0.0
    """Share of the gradients' energy a step may drop, with as few directions as that takes."""
    coefficients: Text = "auto"
    """Format of the coefficients of the basis, such as rotated:4. auto: fp16, or fp32 where the basis is."""


@section
class MergeSflConfig:
    """Options of the scheme merge-sfl."""

    batches: Counts = ()
    """Samples of each client in a local step, up to `batch`; default: `batch`."""


@section
class CpslConfig:
    """Options of the scheme cpsl."""

    clusters: Count = 2
    """Clusters that take turns, M."""


@section
class SglrConfig:
    """Options of the scheme sglr."""

    server_rate: NonNegative = 0.0
    """The server's learning rate, in units of `lr`; 0: the square root of the number of clients."""
    client_rate: Positive = 1.0
    """The clients' learning rate, in units of `lr`."""


@section
class HeadsConfig:
    """Auxiliary heads of the schemes whose clients have a loss of their own."""

    pool: CountOrNone = 4
    """Feature maps are averaged to so many by so many values before the head's one layer; 0: left as they are."""


@section
class CseFslConfig:
    """Options of the scheme cse-fsl."""

    every: Count = 1
    """Of so many local steps one sends its smashed data, h."""


@section
class FslSageConfig:
    """Options of the scheme fsl-sage."""

    every: Count = 1
    """Of so many local steps one sends its smashed data."""
    align_every: Count = 10
    """Local steps between alignments of the heads to the server's gradients, l; a multiple of `every`."""
    fits: Count = 10
    """Steps of the head in an alignment."""


@section
class AmpereConfig:
    """Options of the scheme ampere."""

    device_rounds: Count = 50
    """Rounds in which the client halves learn, before the activations are sent."""
    samples: Count = 2000
    """Samples of each client whose activations are sent."""
    steps: Count = 20
    """Steps of the server half in a round after that."""
    minibatch: Count = 64
    """Samples of each of these steps."""
    augment_pool: Text = ""
    """How activations are changed at random in every step, as `--augment` changes samples."""
    memory_mb: CountOrNone = 2048
    """Memory for the activations, in MiB."""
    disk_mb: CountOrNone = 8192
    """Disk for those that do not fit there."""


@section
class SflReplayConfig:
    """Options of the scheme sfl-replay."""

    learn: Text = "none"
    """How client halves learn: none, local (a loss of their own, from an auxiliary head), feedback (a basis of the
    server's gradients on the samples that are sent)."""
    start: CountOrNone = 0
    """Rounds before the first samples are sent."""
    until: CountOrNone = 0
    """Last round in which client halves learn; 0: the last there is."""
    samples: Count = 2000
    """Samples that each client sends, once; a batch of them in every round."""
    stale: NonNegative = 0.0
    """Relative change of its features from which on a sample is sent again; 0: never."""
    checks: Count = 4
    """With `stale`: batches of sent samples that a client runs in a round, to see how far their features have moved."""
    steps: Count = 20
    """Steps of the server half in a round, on minibatches of what was sent."""
    minibatch: Count = 64
    """Samples of each of these steps."""
    augment_pool: Text = ""
    """How the server changes smashed data at random in every step, as `--augment` changes samples."""
    directions: Count = 8
    """Directions in the basis of the feedback."""
    memory_mb: CountOrNone = 2048
    """Memory for decoded smashed data, in MiB; two bytes a value."""
    disk_mb: CountOrNone = 8192
    """Disk for those that do not fit there; beyond, the oldest are given up."""


@section
class DefenceConfig:
    """What clients do to their smashed data before they send them; nothing by default."""

    clip: NonNegative = 0.0
    """Greatest norm of a sample's smashed data; 0: no limit."""
    noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise on every value of the smashed data."""
    drop: Probability = 0.0
    """Share of the channels that is never sent, drawn once."""
    nopeek: NonNegative = 0.0
    """Weight of the distance correlation between samples and smashed data in the loss of the client half (NoPeek)."""


@section
class TrainConfig:
    """The optimisation."""

    rounds: Annotated[int, Field(ge=1, le=10**9)] = 100
    """Communication rounds T."""
    batch: Annotated[int, Field(ge=1, le=10**6)] = 32
    """Samples per client and local step b."""
    local_steps: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Local steps per round, tau."""
    lr: Positive = 0.02
    """Learning rate eta."""
    optimizer: Text = "sgd"
    """sgd, nesterov, adam, adamw, or module:function of yours made from (lr, momentum)."""
    server_lr: NonNegative = 0.0
    """Learning rate of the server half, if another; 0: lr."""
    server_optimizer: Text = ""
    """Optimiser of the server half, if another, with the same momentum, decay, schedule and clipping."""
    optimizer_state: Text = "auto"
    """Its state when client halves are averaged, handed on or moved: average (sent with them, and counted), local
    (every client keeps its own), reset (begins anew). The server averages the states of its own copies in any case.
    auto: average, but local of adam and adamw where halves are sent as rounded differences."""
    momentum: Probability = 0.0
    """Momentum of sgd and nesterov; of adam and adamw the first beta, 0.9 if 0."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decay of the weights: added to the gradient; adamw takes it from the weights."""
    schedule: Text = "constant"
    """How the rate follows the rounds: constant, cosine (to 0), or step (a tenth at a half, a hundredth at 3/4)."""
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Rounds in which the rate rises to lr."""
    clip_norm: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Longest gradient of a client's half, and of its copy of the server half; 0 is no limit."""
    participation: Fraction = 1.0
    """Fraction of the clients chosen each round."""
    dropout: Probability = 0.0
    """Probability that a chosen client fails in a round; at least one stays."""
    deadline_s: NonNegative = 0.0
    """Simulated seconds after which a round ends: clients that cannot be done by then are left out of it; at least one
    stays. With `wait_for` they go on and count in a later round. 0: a round ends with its slowest client."""
    wait_for: CountOrNone = 0
    """A round ends when so many clients have delivered, K, however long ago they began; 0: when all have."""
    staleness: NonNegative = 0.5
    """With `wait_for`: what a client sends that began a versions ago counts (1 + a)^-staleness."""
    eval_every: Count = 5
    """Rounds between test-set evaluations; the last round is always evaluated."""
    eval_samples: CountOrNone = 0
    """Test along the way on so many test samples, the same ones in all runs; the last test is of all. 0: always all."""
    eval_clients: CountOrNone = 0
    """With every test, also test each client's model (its own half, where halves differ) on up to so many of its own
    training rows: mean, worst and spread (standard deviation) over the clients are recorded. 0: no."""
    text_samples: CountOrNone = 4
    """Of texts: so many clients whose model goes on writing from an opening, before and after, in the report."""
    stop_at: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """End the run at the first test that is as good as this: an accuracy of 0.94, or what else the task is judged by,
    such as a perplexity of 2.9. 0: after all rounds."""
    checkpoint_every: Count = 10
    """Rounds between checkpoints."""
    seed: CountOrNone = 0
    """Seed of every random stream (data, model, batches, ...), each drawn apart."""
    dtype: Text = "float32"
    """float32, or float64 to check arithmetic."""
    precision: Text = "fp32"
    """Numbers of the passes: fp32, or bf16 where torch's autocast takes them. Weights, gradients, losses and what
    travels stay float32, but for the frozen matrices of a model with adapters: they are kept as bf16."""
    recompute: bool = False
    """Clients keep what enters a block instead of all its activations, and run it again on the way back (gradient
    checkpointing): less memory for one more forward pass."""
    device: Text = "cpu"
    """Where it is computed: cpu, cuda, cuda:1, mps ...; auto: the first of cuda, mps and cpu that there is."""


@section
class NetworkConfig:
    """The wireless cell in which rounds take time. Defaults are the paper's; it counts one CPU cycle as one FLOP.

    What differs between clients is one number for all, one number per client, or a range `low high` from which
    each client's is drawn once.
    """

    bandwidth_hz: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] = 20e6
    """Bandwidth B, shared by all transmissions of one direction."""
    noise_dbm_per_hz: Decibel = -174.0
    """Noise power density N0."""
    server_power_dbm: Decibel = 33.0
    """Transmit power P of the server."""
    client_power_dbm: Decibels = (25.0,)
    """Transmit power of the clients."""
    client_power_dbm_range: Decibels = ()
    """Draw each client's power uniformly (in dBm) from `low high` instead."""
    server_flops_per_s: Speed = 100e9
    """Speed of the server, shared by the clients' server halves."""
    client_flops_per_s: Speeds = (0.1e9,)
    """Speed of the clients."""
    client_flops_per_s_range: Speeds = ()
    """Draw each client's speed uniformly from `low high` instead."""
    client_memory_gb: Numbers = ()
    """Memory of the clients: a cut that needs more is refused. Default: no limit."""
    kappa: Annotated[float, Field(ge=1e-40, le=1, allow_inf_nan=False)] = 1e-28
    """Energy of the clients' CPUs: a cycle at f FLOP/s takes kappa f^2 joules."""
    energy_weight: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] = 0.0
    """Seconds that a joule of a client is worth in P1. Above 0, clients send with less power and compute more slowly
    where that pays; at 0, both are at their maxima."""
    energy_cap_j: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] = 0.0
    """Joules that a client may spend in a round, at most: it sends with less power and computes more slowly to stay
    within them. 0: no limit."""
    radius_m: Metres = 500.0
    """Clients are spread evenly over a disc of this radius around the server."""
    min_distance_m: Metres = 10.0
    """No client is closer to the server than this."""
    distance_m: Distances = ()
    """Distances of the clients from the server, instead of drawing them."""
    shadowing_db: Annotated[float, Field(ge=0, le=300, allow_inf_nan=False)] = 0.0
    """Standard deviation of log-normal shadowing, drawn once per client."""
    channel: Text = "rayleigh"
    """rayleigh (path loss, shadowing, block fading), or module:function making yours from (network, clients, seed)."""
    trace: Text = ""
    """CSV file of channel gains (columns round,client,gain) to replay instead of the channel model."""
    workload: Text = "profiled"
    """profiled (FLOPs counted on the model) or paper (its constants, the same for every cut)."""
    multiply_add: Annotated[int, Field(ge=1, le=2)] = 2
    """FLOPs that one multiply-add of a profiled model counts as: 2, or 1 as in papers that count MACs."""
    allocation: Text = "optimal"
    """How bandwidth and server speed are shared: optimal, equal, or module:function of yours."""
    epsilon: NonNegative = 0.0
    """Privacy: a cut must keep log(1 + phi(v)/q) at or above this."""
    leakage: Text = ""
    """Privacy as measured: a file that `splitcast attack` or `reproduce privacy` wrote. A cut and uplink codec must
    have been attacked, and the strongest attack must have stayed at or below `max_ssim`."""
    max_ssim: Annotated[float, Field(ge=-1, le=1)] = 0.3
    """Greatest structural similarity that an attack may reach, with `leakage`."""
    gamma: Numbers = ()
    """Gamma(phi(v)) for every cut, the convergence penalty of P1. Default: phi(v)/q."""
    gamma_weight: NonNegative = 1.0
    """Weight w of Gamma against seconds in P1."""


@section
class WorldConfig:
    """How the cell changes from round to round. By default only the fading does, anew in every round."""

    path_loss: Text = "paper"
    """paper (128.1 + 37.6 log10 d_km dB), or uma, umi: 3GPP TR 38.901, with its line of sight and shadowing."""
    carrier_ghz: Annotated[float, Field(ge=0.5, le=100)] = 3.5
    """Carrier frequency of uma and umi."""
    fading: Text = "block"
    """block (new in every round), gauss-markov or jakes (both correlated by `doppler_hz`), or none."""
    doppler_hz: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Doppler frequency f_D of correlated fading; J0(2 pi f_D T) is the correlation of two rounds."""
    interval_s: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Time T between two rounds, for fading and walking."""
    walk_m_per_s: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    """Speed of clients who walk from one random point of the disc to the next; 0: they stay."""
    blockage: Text = "none"
    """none, common (of all clients at once) or each (of every client on its own)."""
    blockage_db: Annotated[float, Field(ge=0, le=200)] = 30.0
    """Loss while blocked."""
    blocked_rounds: Annotated[float, Field(ge=1, le=1e9)] = 10.0
    """Mean rounds that a blockage lasts."""
    clear_rounds: Annotated[float, Field(ge=1, le=1e9)] = 10.0
    """Mean rounds between two blockages."""
    load: Text = "none"
    """Background load of the clients: none, common or each."""
    busy_speed: Fraction = 0.25
    """Share of its speed that a client has left while it is busy."""
    busy_rounds: Annotated[float, Field(ge=1, le=1e9)] = 5.0
    """Mean rounds that a client is busy."""
    idle_rounds: Annotated[float, Field(ge=1, le=1e9)] = 15.0
    """Mean rounds that it is not."""


@section
class PolicyConfig:
    """Which cut every round uses."""

    policy: Text = "fixed"
    """fixed (the cut given), fixed:V, random, greedy, myopic, lookahead (value iteration), rollout (sampled futures),
    clairvoyant, bargain (time, energy, privacy), assign:K (of each client, every K rounds), ddqn:FILE, or
    module:function."""
    charge_migration: bool = True
    """Charge the bytes and seconds of moving the cut; the paper takes moves as free."""
    gamma_draws: CountOrNone = 0
    """Measure Gamma(phi(v)) at the start, from so many mini-batches per client, instead of taking `gamma`."""
    uplink_choices: Names = ()
    """Formats of smashed data (see `uplink_codec`) of which every round has the one that costs least at its cut, as in
    transform:80B,transform:150B,int8. Default: always `uplink_codec`."""
    error_weight: NonNegative = 1.0
    """Seconds that the relative squared error of a format costs a round, per unit, where there are several."""
    error_draws: Count = 4
    """Measure these errors at the start, from so many mini-batches per client."""
    uplink_errors: Numbers = ()
    """Errors of `uplink_choices`: one of each, or of each at every cut, instead of measuring them."""


@section
class LearnConfig:
    """How the DDQN of Algorithm 1 learns. Not part of a run: a policy is learned once and then used by many."""

    episodes: Count = 500
    """Episodes L_max; an episode is as long as a training."""
    parallel: Count = 10
    """Episodes that run side by side; they share each gradient step."""
    hidden: Count = 64
    """Units of each of the two hidden layers of the Q-network."""
    learning_rate: Positive = 2e-3
    """Adam's learning rate at the start; it falls linearly to zero."""
    discount: Probability | None = None
    """Discount gamma. Default: 0 while moves are free, since then a cut changes nothing but its own round, else 0.9."""
    minibatch: Count = 128
    """Transitions per gradient step."""
    buffer: Count = 100_000
    """Transitions that are remembered."""
    target_every: Count = 50
    """Gradient steps between copies of the Q-network to the target network."""
    explore_episodes: Count = 100
    """Episodes over which the chance of a random cut falls from 1 to `explore_end`."""
    explore_end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Chance of a random cut from then on; it is 0 in use."""
    held_out: Count = 20
    """Episodes, never learned from, on which the policy is judged."""
