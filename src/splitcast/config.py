"""One frozen, validated configuration; TOML in and out; unknown keys are refused by name.

Names of things that live in other layers (schemes, codecs, data sets, models) are plain strings here and are
looked up, and refused with the allowed names, by the layer that owns them.
"""

import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from splitcast.errors import SplitcastError

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decibel = Annotated[float, Field(ge=-300, le=300, allow_inf_nan=False)]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) else value


Numbers = Annotated[tuple[NonNegative, ...], BeforeValidator(_listed)]
"""One number, or one per client or cut; empty where a default is worked out."""
Positives = Annotated[tuple[Positive, ...], BeforeValidator(_listed)]
Decibels = Annotated[tuple[Decibel, ...], BeforeValidator(_listed)]


def _one_line(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        return f"{name}: unknown key"
    return f"{name}: {first['msg'].lower()}, got {first['input']!r}"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """A frozen pydantic dataclass whose validation errors are one-line `SplitcastError`s."""
    made: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls)
    init: Callable[..., None] = made.__init__

    @wraps(init)
    def checked(self: Any, **values: Any) -> None:
        try:
            init(self, **values)
        except pydantic.ValidationError as error:
            raise SplitcastError(_one_line(error)) from None

    made.__init__ = checked
    validated: type[T] = made
    return validated


@section
class DataConfig:
    """What the clients learn from, and how it is spread over them."""

    dataset: str = "mnist-mini"
    """mnist-mini (embedded), mnist, fashion-mnist or cifar10 (after `splitcast data get`)."""
    clients: Count = 10
    """Number of clients N."""
    partition: str = "iid"
    """iid, dirichlet (label skew `alpha`) or shards (`classes_per_client` labels each)."""
    alpha: Positive = 0.5
    """Dirichlet concentration; small is very unequal."""
    classes_per_client: Count = 2
    """Labels per client with `shards`."""
    sizes: str = "equal"
    """equal or unequal numbers of samples per client."""


@section
class ModelConfig:
    """What is trained."""

    arch: str = "cnn"
    """cnn (the paper's), cnn-small, or module:function building your blocks from (input_shape, classes)."""


@section
class SplitConfig:
    """How the model is split and what travels."""

    scheme: str = "sfl-ga"
    """sfl-ga, sfl, psl, epsl, sfl-gb, fl or sl."""
    cut: int = 1
    """Blocks on the client, 1..V-1."""
    aggregate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """epsl: fraction of the batch rows whose gradients are aggregated and broadcast."""
    rank: Annotated[int, Field(ge=0)] = 0
    """sfl-gb: directions in the broadcast basis of the gradients, or the most there may be if `drop` is given; 0 is 8
    at cut 1, else 32."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """sfl-gb: share of the gradients' energy a step may drop, with as few directions as that takes."""
    sync_every: Annotated[int, Field(ge=-1)] = -1
    """Rounds between averagings of the client halves; 0 is never, -1 is the scheme's own rhythm (sfl-gb: 2 at cut 2,
    else 1)."""
    uplink_codec: str = "auto"
    """Format of smashed data on the wire: fp32, fp16, int8, int4 or int2. auto: fp32; for sfl-gb int2 up
    to cut 2, else int8."""
    downlink_codec: str = "auto"
    """Format of smashed-data gradients on the wire, as above. auto: int8 for sfl-gb, else fp32."""
    client_update: str = "own"
    """own (each client applies its own pull-back) or identical (the idealised theory: all apply the mean)."""


@section
class TrainConfig:
    """The optimisation."""

    rounds: Count = 100
    """Communication rounds T."""
    batch: Count = 32
    """Samples per client and local step b."""
    local_steps: Count = 1
    """Local steps per round, tau."""
    lr: Positive = 0.02
    """Learning rate eta."""
    momentum: Probability = 0.0
    """SGD momentum; its state is averaged and moved with the weights, and counted in the bytes."""
    participation: Fraction = 1.0
    """Fraction of the clients chosen each round."""
    dropout: Probability = 0.0
    """Probability that a chosen client fails in a round; at least one stays."""
    eval_every: Count = 5
    """Rounds between test-set evaluations; the last round is always evaluated."""
    checkpoint_every: Count = 10
    """Rounds between checkpoints."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of every random stream (data, model, batches, ...), each drawn apart."""
    dtype: str = "float32"
    """float32, or float64 to check arithmetic."""


@section
class NetworkConfig:
    """The wireless cell in which rounds take time. Defaults are the paper's; it counts one CPU cycle as one FLOP.

    What differs between clients is one number for all, one number per client, or a range `low high` from which
    each client's is drawn once.
    """

    bandwidth_hz: Positive = 20e6
    """Bandwidth B, shared by all transmissions of one direction."""
    noise_dbm_per_hz: Decibel = -174.0
    """Noise power density N0."""
    server_power_dbm: Decibel = 33.0
    """Transmit power P of the server."""
    client_power_dbm: Decibels = (25.0,)
    """Transmit power of the clients."""
    client_power_dbm_range: Decibels = ()
    """Draw each client's power uniformly (in dBm) from `low high` instead."""
    server_flops_per_s: Positive = 100e9
    """Speed of the server, shared by the clients' server halves."""
    client_flops_per_s: Positives = (0.1e9,)
    """Speed of the clients."""
    client_flops_per_s_range: Positives = ()
    """Draw each client's speed uniformly from `low high` instead."""
    radius_m: Positive = 500.0
    """Clients are spread evenly over a disc of this radius around the server."""
    min_distance_m: Positive = 10.0
    """No client is closer to the server than this."""
    distance_m: Positives = ()
    """Distances of the clients from the server, instead of drawing them."""
    shadowing_db: NonNegative = 0.0
    """Standard deviation of log-normal shadowing, drawn once per client."""
    trace: str = ""
    """CSV file of channel gains (columns round,client,gain) to replay instead of the channel model."""
    workload: str = "profiled"
    """profiled (FLOPs counted on the model) or paper (its constants, the same for every cut)."""
    allocation: str = "optimal"
    """How bandwidth and server speed are shared: optimal or equal."""
    epsilon: NonNegative = 0.0
    """Privacy: a cut must keep log(1 + phi(v)/q) at or above this."""
    gamma: Numbers = ()
    """Gamma(phi(v)) for every cut, the convergence penalty of P1. Default: phi(v)/q."""
    gamma_weight: NonNegative = 1.0
    """Weight w of Gamma against seconds in P1."""


@section
class PolicyConfig:
    """Which cut every round uses."""

    policy: str = "fixed"
    """fixed (the cut given), fixed:V, random, greedy, myopic, clairvoyant, ddqn:FILE, or module:function of yours."""
    charge_migration: bool = True
    """Charge the bytes and seconds of moving the cut; the paper takes moves as free."""
    gamma_draws: Annotated[int, Field(ge=0)] = 0
    """Measure Gamma(phi(v)) at the start, from so many mini-batches per client, instead of taking `gamma`."""


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


@section
class Config:
    """Everything that determines a run.

    >>> Config(train=TrainConfig(rounds=3)).train.rounds
    3
    >>> TrainConfig(lr=-1)
    Traceback (most recent call last):
    splitcast.errors.SplitcastError: lr: input should be greater than 0, got -1
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)


def with_values(config: Config, **values: Any) -> Config:
    """A copy with some leaf values changed; leaf names are unique across sections.

    >>> with_values(Config(), scheme="psl", rounds=7).split.scheme
    'psl'
    """
    for part in fields(config):
        current = getattr(config, part.name)
        mine = {f.name: values.pop(f.name) for f in fields(current) if f.name in values}
        config = replace(config, **{part.name: replace(current, **mine)})
    if values:
        raise SplitcastError(f"{next(iter(values))}: unknown key; allowed are {', '.join(leaf_names())}")
    return config


def leaf_names() -> list[str]:
    """Every key of the configuration, without its section."""
    return [leaf.name for part in fields(Config()) for leaf in fields(getattr(Config(), part.name))]


def to_toml(config: Any) -> str:
    """Sections of scalars, in declaration order."""
    lines: list[str] = []
    for name, values in asdict(config).items():
        # characters as they are: JSON's escapes of those beyond 16 bits are not TOML
        rows = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        lines += [f"[{name}]", *rows, ""]
    return "\n".join(lines)


def from_toml(text: str, source: str = "config") -> Config:
    """Parse and validate; every problem is one line that names the key and the file.

    >>> from_toml(to_toml(Config())) == Config()
    True
    >>> anywhere = with_values(Config(), trace="häuser/🏠 1.csv")
    >>> from_toml(to_toml(anywhere)) == anywhere
    True
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SplitcastError(f"{source}: not valid TOML: {error}") from None
    parts: dict[str, Any] = {}
    default = Config()
    known = {part.name: type(getattr(default, part.name)) for part in fields(default)}
    for name, values in raw.items():
        home = next((section for section, kind in known.items() if name in kind.__dataclass_fields__), "")
        if name not in known and home:
            raise SplitcastError(f"{source}: {name!r} belongs into the section [{home}]")
        if name not in known or not isinstance(values, dict):
            raise SplitcastError(f"{source}: unknown section [{name}]; allowed are {', '.join(known)}")
        kind = known[name]
        assert is_dataclass(kind)
        allowed = [f.name for f in fields(kind)]
        for key in values:
            if key not in allowed:
                raise SplitcastError(f"{source}: unknown key {key!r} in [{name}]; allowed are {', '.join(allowed)}")
        try:
            parts[name] = kind(**values)
        except SplitcastError as error:
            raise SplitcastError(f"{source}: {error}") from None
    return Config(**parts)


def load(path: Path) -> Config:
    """Read a TOML configuration."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SplitcastError(f"config: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SplitcastError(f"config: {path} is not a text in UTF-8") from None
    return from_toml(text, str(path))
