"""One frozen, validated configuration; TOML in and out; unknown keys are refused by name."""

import json
import re
import tomllib
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any

from splitcast.base.errors import SplitcastError, shown
from splitcast.base.renames import moved
from splitcast.base.sections import (
    SCHEME_SECTIONS,
    AmpereConfig,
    CpslConfig,
    CseFslConfig,
    DataConfig,
    DefenceConfig,
    EpslConfig,
    FslSageConfig,
    HeadsConfig,
    LearnConfig,
    LoraConfig,
    MergeSflConfig,
    ModelConfig,
    NetworkConfig,
    PolicyConfig,
    SflGbConfig,
    SflReplayConfig,
    SglrConfig,
    SplitConfig,
    TrainConfig,
    WorldConfig,
    bare,
    section,
)

__all__ = [
    "SCHEME_SECTIONS",
    "AmpereConfig",
    "Config",
    "CpslConfig",
    "CseFslConfig",
    "DataConfig",
    "DefenceConfig",
    "EpslConfig",
    "FslSageConfig",
    "HeadsConfig",
    "LearnConfig",
    "LoraConfig",
    "MergeSflConfig",
    "ModelConfig",
    "NetworkConfig",
    "PolicyConfig",
    "SflGbConfig",
    "SflReplayConfig",
    "SglrConfig",
    "SplitConfig",
    "TrainConfig",
    "WorldConfig",
    "from_toml",
    "leaf_names",
    "leaves",
    "load",
    "to_toml",
    "with_values",
]

MAX_BYTES = 1_000_000
"""Of a configuration as TOML."""


@section
class Config:
    """Everything that determines a run.

    >>> Config(train=TrainConfig(rounds=3)).train.rounds
    3
    >>> TrainConfig(lr=-1)
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: lr: input should be greater than 0, got -1
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    epsl: EpslConfig = field(default_factory=EpslConfig)
    sfl_gb: SflGbConfig = field(default_factory=SflGbConfig)
    merge_sfl: MergeSflConfig = field(default_factory=MergeSflConfig)
    cpsl: CpslConfig = field(default_factory=CpslConfig)
    sglr: SglrConfig = field(default_factory=SglrConfig)
    sfl_replay: SflReplayConfig = field(default_factory=SflReplayConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    cse_fsl: CseFslConfig = field(default_factory=CseFslConfig)
    fsl_sage: FslSageConfig = field(default_factory=FslSageConfig)
    ampere: AmpereConfig = field(default_factory=AmpereConfig)
    defence: DefenceConfig = field(default_factory=DefenceConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)


SECTIONS: dict[str, Any] = {part.name.replace("_", "-"): type(getattr(Config(), part.name)) for part in fields(Config)}
"""Sections by their names in TOML; in Python, sfl-gb is sfl_gb."""
NEVER_BARE = ("lora", "defence")
"""Their keys are known by no other name: another section has a key of the same name."""


def leaves(config: Config) -> dict[str, Any]:
    """Every value under the name that `with_values` and the command line know it by.

    >>> leaves(Config())["lr"], leaves(Config())["sfl-gb.rank"]
    (0.02, 0)
    """
    found: dict[str, Any] = {}
    for name in SECTIONS:
        part = getattr(config, name.replace("-", "_"))
        prefix = f"{name}." if name in SCHEME_SECTIONS else ""
        found |= {f"{prefix}{leaf.name}": getattr(part, leaf.name) for leaf in fields(part)}
    return found


def leaf_names() -> list[str]:
    """The names of `leaves`."""
    return list(leaves(Config()))


def with_values(config: Config, **values: Any) -> Config:
    """A copy with some values changed, each named by its key, or as section.key where it is not unique.

    >>> with_values(Config(), scheme="psl", rounds=7).split.scheme
    'psl'
    >>> with_values(Config(), **{"sfl-gb.rank": 8}).sfl_gb.rank
    8
    """
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        home, key = _home(name)
        mine = changes.setdefault(home, {})
        if key in mine:
            raise SplitcastError(f"{bare(name)}: given twice")
        mine[key] = value
    return replace(config, **{home: replace(getattr(config, home), **mine) for home, mine in changes.items()})


def _home(name: str) -> tuple[str, str]:
    """The attributes that a key, with its section or without, is found under."""
    given, dot, key = name.rpartition(".")
    homes = [part.replace("-", "_") for part in _having(key) if dot or part not in NEVER_BARE]
    if dot:
        homes = [home for home in homes if home == given.replace("-", "_")]
    if len(homes) != 1:
        raise SplitcastError(f"{bare(name)}: unknown key; allowed are {', '.join(leaf_names())}")
    return homes[0], key


def _having(key: str) -> list[str]:
    """The sections that have a key of that name."""
    return [part for part, kind in SECTIONS.items() if key in kind.__dataclass_fields__]


def to_toml(config: Config) -> str:
    """Sections of scalars, in declaration order."""
    lines: list[str] = []
    for name, values in asdict(config).items():
        # characters as they are: JSON's escapes of those beyond 16 bits are not TOML
        rows = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        lines += [f"[{name.replace('_', '-')}]", *rows, ""]
    text = "\n".join(lines)
    _fits(text, "config")
    return text


def from_toml(text: str, source: str = "config") -> Config:
    """Parse and validate; every problem is one line that names the key and the file. Keys of earlier versions are
    moved to where they are now, with a warning.

    >>> from_toml(to_toml(Config())) == Config()
    True
    >>> anywhere = with_values(Config(), trace="häuser/🏠 1.csv")
    >>> from_toml(to_toml(anywhere)) == anywhere
    True
    """
    raw = moved(tables(text, source), source)
    parts: dict[str, Any] = {}
    for name, values in raw.items():
        home = next((part for part in _having(name) if part not in NEVER_BARE), "")
        if name not in SECTIONS and home:
            raise SplitcastError(f"{source}: {name!r} belongs into the section [{home}]")
        if name not in SECTIONS:
            raise SplitcastError(f"{source}: unknown section [{bare(name)}]; allowed are {', '.join(SECTIONS)}")
        if not isinstance(values, dict):
            raise SplitcastError(f"{source}: {name!r} is a section, written [{name}] with its keys below it")
        allowed = list(SECTIONS[name].__dataclass_fields__)
        for key in values:
            if key not in allowed:
                raise SplitcastError(
                    f"{source}: unknown key {shown(key)} in [{name}]; allowed are {', '.join(allowed)}"
                )
        try:
            parts[name.replace("-", "_")] = SECTIONS[name](**values)
        except SplitcastError as error:
            raise SplitcastError(f"{source}: {error}") from None
    return Config(**parts)


def tables(text: str, source: str) -> dict[str, Any]:
    """What TOML holds, if it is not too much."""
    _fits(text, source)
    if _LONG_KEY.search(_QUOTED.sub("q", text)):
        raise SplitcastError(f"{source}: not valid TOML: a key of too many parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise SplitcastError(f"{source}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of too many digits
        raise SplitcastError(f"{source}: not valid TOML: {' '.join(str(error).split())}") from None


_QUOTED = re.compile(r"""\"[^"\n]*\"|'[^'\n]*'""")
_LONG_KEY = re.compile(r"(?:\.[^.,\n]*){100}")  # tomllib takes the square of their number in time


def _fits(text: str, source: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise SplitcastError(f"{source}: {size:,} bytes as TOML; at most {MAX_BYTES:,} are allowed")


def load(path: Path) -> Config:
    """Read a TOML configuration."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise SplitcastError(f"config: {path} is larger than {MAX_BYTES:,} bytes")
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise SplitcastError(f"config: {path} is not a text in UTF-8") from None
    except OSError as error:
        raise SplitcastError(f"config: cannot read {path}: {error.strerror}") from None
    return from_toml(text, str(path))
