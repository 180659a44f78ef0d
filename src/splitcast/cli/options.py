"""What each command takes: its positional words and flags, with the help that --help prints."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
from tyro.conf import OmitArgPrefixes
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from splitcast.base.config import SCHEME_SECTIONS, SECTIONS, Config, LearnConfig
from splitcast.base.sections import Cut, shown_cut

FLAGS = ConstructorRegistry()
"""How flags are made: keys of a scheme's section keep its name (--sfl-gb.rank), all others stand alone (--lr)."""
Settings = Annotated[Config, tyro.conf.arg(name="")]


@FLAGS.struct_rule
def _sections(info: StructTypeInfo) -> StructConstructorSpec | None:
    if info.type is not Config:
        return None
    default = info.default if isinstance(info.default, Config) else Config()

    def flags(name: str, kind: Any) -> StructFieldSpec:
        attribute = name.replace("-", "_")
        made: Any = kind if name in SCHEME_SECTIONS else Annotated[kind, OmitArgPrefixes]
        return StructFieldSpec(attribute, made, getattr(default, attribute))

    return StructConstructorSpec(Config, tuple(flags(name, kind) for name, kind in SECTIONS.items()))


@FLAGS.primitive_rule
def _cuts(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """One number, one for every client with commas, or auto."""
    if info.type != get_args(Cut)[0]:
        return None

    return PrimitiveConstructorSpec(
        1, "INT[,INT...]|auto", lambda words: words[0], lambda cut: True, lambda cut: [shown_cut(cut)]
    )


@dataclass(frozen=True)
class Output:
    """What is printed."""

    quiet: bool = False
    """No progress, only the result."""
    json: bool = False
    """The result as JSON on stdout, nothing else."""

    @property
    def silent(self) -> bool:
        """Whether there is no progress to be seen."""
        return self.quiet or self.json


@dataclass(frozen=True)
class TrainOptions:
    """Train one scheme. Options override the values of --config FILE."""

    settings: Settings = field(default_factory=Config)
    out: Path | None = None
    """Run folder; must be new. Default: runs/<time>-<scheme>."""
    resume: Path | None = None
    """Continue this run folder bit-exactly from its last checkpoint, with its own settings; --rounds may be raised."""
    track: tuple[str, ...] = ()
    """Also write rounds to tensorboard, mlflow, wandb or csv, or to a tracker of yours (module:function)."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class CompareOptions:
    """Train several schemes with the same data and seeds. Finished runs in --out are kept, stopped ones go on. Options
    override the values of --config FILE."""

    schemes: Annotated[tuple[str, ...], tyro.conf.Positional] = ("sfl-ga", "sfl", "psl")
    """Schemes to compare."""
    settings: Settings = field(default_factory=Config)
    seeds: int = 1
    """Trainings of every scheme: --seed and the next ones. Several give means, intervals and bands."""
    out: Path = Path("runs/compare")
    """Folder for one run folder per training and the figure."""
    target: Annotated[float | None, tyro.conf.arg(name="to")] = None
    """Value for the columns "to target", of what the task is judged by: an accuracy (0..1), a perplexity, ... Default:
    the best round number, of accuracies a whole per cent, that every scheme reaches."""
    track: tuple[str, ...] = ()
    """Also write rounds to tensorboard, mlflow, wandb or csv, or to a tracker of yours (module:function)."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class SweepOptions:
    """Train a grid, a list or a random draw of options, several at a time; results as CSV, Markdown and LaTeX. Finished
    runs in --out are kept, stopped ones go on. Other options hold for all runs and override those of --config FILE."""

    over: tuple[str, ...] = ()
    """Options and their values: --over scheme=sfl,sfl-ga cut=1,2 seed=0..4 trains all combinations."""
    plan: Path | None = None
    """The same as TOML: [over] with a list for each option, [[runs]] with the options of one run."""
    draw: int = 0
    """Train only so many of them, drawn at random from --seed; 0 trains all."""
    settings: Settings = field(default_factory=Config)
    out: Path = Path("runs/sweep")
    """Folder for one run folder per training, results.csv, table.md and table.tex."""
    jobs: int = 0
    """Trainings at a time, with one thread each; 0 is one for each core."""
    on: str = "processes"
    """processes of this machine, or ray (a cluster whose nodes all see --out; needs the extra `cluster`)."""
    track: tuple[str, ...] = ()
    """Also write rounds to tensorboard, mlflow, wandb or csv, or to a tracker of yours (module:function)."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class PlanOptions:
    """Plan a cell without training: latency of every cut, the best legal one, shares of every client, a time line.
    Options override the values of --config FILE."""

    settings: Settings = field(default_factory=Config)
    draws: int = 100
    """Channel draws to average over: the first rounds of a training with these settings."""
    per_client: bool = False
    """A cut for every client instead, with a bound on how far from the best it can be; over up to 8 draws."""
    input_shape: tuple[int, ...] = ()
    """Shape of one sample. Default: the data set's."""
    classes: int | None = None
    """Number of labels. Default: the data set's."""
    client_device: str = ""
    """phone, jetson or laptop: sets --client-flops-per-s and --client-memory-gb."""
    out: Path = Path("runs/plan")
    """Folder for the figure (gantt.png, gantt.svg)."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class LearnOptions:
    """Learn a cut policy by Algorithm 1 (DDQN) and judge it on held-out channels; --rounds is the episode's length.
    Options override the values of --config FILE."""

    settings: Settings = field(default_factory=Config)
    learning: OmitArgPrefixes[LearnConfig] = field(default_factory=LearnConfig)
    quick: bool = False
    """Three fifths of the episodes, in less than a minute; overrides --episodes, --explore-episodes and --held-out."""
    out: Path = Path("runs/learn")
    """Folder for policy.safetensors, learned.json and the learning curve (learning.png, learning.svg)."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class ReproduceOptions:
    """Draw the paper's figures from trainings of this machine, and judge its claims. Trainings are kept in --out and
    shared; a reproduction that was stopped goes on where it was."""

    figures: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """fig3 fig4 fig5 fig6 fig7 fig8 scalability rate settings; of ours basis depth bandwidth ablation parts privacy
    bytes policies blockage formats per-client fleet waiting text text-home; or all (but texts)."""
    dataset: str = ""
    """With --full: mnist (the default), fashion-mnist or cifar10."""
    partition: str = "iid"
    """iid, or shards: two classes per client. Its figures and claims are kept apart."""
    quick: bool = False
    """Embedded data and short trainings: minutes."""
    full: bool = False
    """The paper's sizes: hours."""
    seeds: int = 0
    """Trainings per curve. Default: 3 with --full, 2 with --quick."""
    eval_samples: int = 0
    """Test along the way on so many test samples, the same ones in all trainings; the last test is of all. 0: all."""
    out: Path = Path("runs/reproduce")
    """Folder for trainings and, under the data set's name, figures (PNG, SVG, CSV), claims.md and claims.json."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class ReportOptions:
    """One self-contained HTML page about runs: summary, charts, latency per client, configuration, commands."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders, or folders of run folders such as `compare --out` writes."""
    out: Path | None = None
    """The page. Default: report.html in the first folder."""
    trust: bool = False
    """Also import the modules that the runs name (own models, schemes): only for folders you trust."""


@dataclass(frozen=True)
class AttackOptions:
    """Attack what a run sends: reconstruct a client's samples from its smashed data by every method there is, and
    measure how close they come, beside what guessing gives. Writes attack.json and attack.png into the run folder."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    attacks: tuple[str, ...] = ()
    """Only these: network, optimise, unsplit, pseudo, hijack, ... Default: all."""
    samples: int = 32
    """Samples of the victim."""
    auxiliary: int = 2000
    """Samples of the attacker's own, from the test set."""
    client: int = 0
    """The victim."""
    quick: bool = False
    """Small budgets: a look in a minute."""
    trust: bool = False
    """Also import the modules that the run names (own model, scheme): only for folders you trust."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class VerifyOptions:
    """Whether run folders are as splitcast left them: prints every problem, and exits with 1 if there is any."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders."""


@dataclass(frozen=True)
class ExportOptions:
    """The trained model of a run as safetensors, under the names of its own module: splitcast export RUN FILE."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    file: Annotated[Path, tyro.conf.Positional] = Path("model.safetensors")
    """The file to write; must be new."""


@dataclass(frozen=True)
class ProfileOptions:
    """What each cut of a model costs."""

    arch: str = "cnn"
    """cnn, cnn-small, resnet8, resnet18, hf:CONFIG.json, timm:NAME, or module:function building a model from
    (input_shape, classes)."""
    input_shape: tuple[int, ...] = (1, 28, 28)
    """Shape of one sample."""
    classes: int = 10
    """Number of labels."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class DataOptions:
    """Fetch data sets, or list what is there."""

    action: Annotated[str, tyro.conf.Positional]
    """get or list."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """mnist, fashion-mnist, cifar10; the texts sotu, moby-dick, kjv, spam-assassin; the model smollm2."""
    cache: Path | None = None
    """Cache folder. Default: $SPLITCAST_DATA, else ~/.cache/splitcast."""


@dataclass(frozen=True)
class BenchOptions:
    """Speed as ratios measured in one run, medians of interleaved repetitions."""

    what: Annotated[str, tyro.conf.Positional]
    """engine, models, text, codecs, gb, allocate, assign, ccc, flare, or peers (other frameworks, which it installs for
    themselves)."""
    repeats: int = 7
    """Interleaved repetitions per figure."""
    json: bool = False
    """Print one list of {"name", "value", "unit"} rows."""


@dataclass(frozen=True)
class DeployOptions:
    """Train on real sites: init FILE, start, stop, status, run CONFIG, renew, revoke SITE (docs/deployment.md). Needs
    extra `deploy`."""

    action: Annotated[str, tyro.conf.Positional]
    """init, start, stop, status, run, renew (new certificates) or revoke (and one site less)."""
    file: Annotated[Path | None, tyro.conf.Positional] = None
    """init: the deployment file. run: the configuration of the training. revoke: the site."""
    folder: Path = Path("deployment")
    """Where the start-up kits are."""
    only: tuple[str, ...] = ()
    """start, stop: only the server or these sites."""
    out: Path | None = None
    """run: run folder; must be new. Default: runs/<time>-<scheme>."""
    resume: Path | None = None
    """run: go on with this run folder from its last checkpoint; takes no configuration."""
    track: tuple[str, ...] = ()
    """run: also write rounds to tensorboard, mlflow, wandb or csv, or to a tracker of yours (module:function)."""
    output: OmitArgPrefixes[Output] = field(default_factory=Output)


@dataclass(frozen=True)
class ZooOptions:
    """Train models and tasks of many kinds, a few rounds each, under every scheme: a table of what trains."""

    models: tuple[str, ...] = ()
    """Rows of the table that are wanted, by their names. Default: all."""
    schemes: tuple[str, ...] = ()
    """Columns. Default: all."""
    out: Path = Path("runs/zoo")
    """Folder for the table (models.md) and the configurations of the models."""
    quiet: bool = False
    """No progress."""


@dataclass(frozen=True)
class DoctorOptions:
    """What this machine has for splitcast: versions, devices, threads, data sets, extras, and what to do about gaps."""

    json: bool = False
    """Print JSON instead of lines."""


@dataclass(frozen=True)
class InitOptions:
    """Write a configuration with every setting, its default and what it means."""

    file: Annotated[Path, tyro.conf.Positional] = Path("config.toml")
    """The file to write; must be new."""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands and flags: eval "$(splitcast completion bash)" in your shell's profile."""

    shell: Annotated[str, tyro.conf.Positional] = "bash"
    """bash or zsh."""


@dataclass(frozen=True)
class WatchOptions:
    """The report page, live while trainings, sweeps and deployments run. Read-only."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders, or folders of run folders such as `sweep --out` and `compare --out` write."""
    port: int = 8765
    """Port of the page."""
    host: str = "127.0.0.1"
    """Address to listen on. Other than this machine's own, visitors need the token of the address that is printed."""
    folder: Path | None = None
    """The kits of a deployment, to show its sites too."""
    trust: bool = False
    """Also import the modules that the runs name (own models, schemes): only for folders you trust."""
