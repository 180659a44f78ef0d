"""The trainings behind the figures: each is done once, whichever figures ask for it, and stopped ones go on.

A training is known by its configuration without the number of rounds. Whoever asks for fewer rounds than there are gets
the first ones; whoever asks for more has it continued.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from splitcast.base.config import Config, LearnConfig, to_toml, with_values
from splitcast.cost.cell import Array
from splitcast.cost.clock import time_rounds
from splitcast.cost.scenario import Scenario
from splitcast.cutting.policies import fixed_cut
from splitcast.data import Dataset
from splitcast.model import build
from splitcast.model.split import SplitModel
from splitcast.run.loop import OnRound, train
from splitcast.run.parts import load_data, resolved
from splitcast.run.records import RoundRecord, RunFolder, write_atomically
from splitcast.studies.learn import QUICK, learn_policy
from splitcast.studies.plan import SHAPES, scenario_of

Runs = list[list[RoundRecord]]
"""One training per seed."""
Watch = Callable[[str, Config], OnRound | None]


@dataclass(frozen=True)
class Study:
    """What all figures of one reproduction share."""

    base: Config
    """What every training has, unless its figure says otherwise"""
    seeds: tuple[int, ...]
    out: Path
    full: bool
    target: float | None = None
    """Accuracy for "to target" columns; None is the highest whole per cent that all reach"""
    episode: int = 100
    """Rounds of an episode of Fig. 7"""
    learning: LearnConfig = field(default_factory=LearnConfig)
    """How policies are learned"""
    watch: Watch = field(default=lambda name, config: None)

    @property
    def name(self) -> str:
        """Of the folder of its figures: the data set, and how clients share it if not evenly."""
        data = self.base.data
        return data.dataset if data.partition == "iid" else f"{data.dataset}-{data.partition}"

    @property
    def of_digits(self) -> bool:
        """Whether figures that the paper gives for MNIST can be compared."""
        return self.base.data.dataset.startswith("mnist")

    @property
    def long_rounds(self) -> int:
        """Rounds of trainings that are to reach an accuracy; a quick study cannot afford more than the usual."""
        return self.base.train.rounds * (2 if self.full else 1)

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, read once."""
        return load_data(self.base)

    def config(self, **values: Any) -> Config:
        """The base with some values changed."""
        return with_values(self.base, **values)

    def runs(self, **values: Any) -> Runs:
        """The training with these values, for every seed."""
        return [self.run(seed=seed, **values) for seed in self.seeds]

    def run(self, **values: Any) -> list[RoundRecord]:
        """One training: read it, continue it, or do it."""
        config = self.config(**values)
        rounds, name = config.train.rounds, name_of(config)
        folder = RunFolder(self.folder(**values))
        done = folder.config().train.rounds if folder.config_file.is_file() else 0
        config = with_values(config, rounds=max(rounds, done))
        if done < rounds or not folder.summary_file.is_file():
            train(config, folder.path, resume=done > 0, on_round=self.watch(name, config), dataset=self.dataset)
        return folder.rounds()[:rounds]

    def averaged(self, **values: Any) -> Runs:
        """Federated averaging: what `sfl` learns, averaged in every round and sent exactly, with the bytes and seconds
        of `fl`. The two differ by rounding only, so that one training stands for both."""
        config = self.config(scheme="fl", **values)
        return [
            priced(records, with_values(config, seed=seed))
            for seed, records in zip(self.seeds, self.runs(scheme="sfl", **values), strict=True)
        ]

    def folder(self, **values: Any) -> Path:
        """Where the training with these values is kept."""
        return self.out / "runs" / name_of(self.config(**values))

    def learned(self, config: Config, *, briefly: bool = False) -> tuple[Path, dict[str, Any]]:
        """The file of a cut policy that Algorithm 1 learned for a configuration, and how it went; ``briefly``: from
        fewer episodes, if the study is quick."""
        file = self.out / "policies" / f"{name_of(config)}-{config.train.rounds}.safetensors"
        facts = file.with_suffix(".json")
        if not facts.is_file():
            found = learn_policy(
                config, replace(self.learning, **QUICK) if briefly and not self.full else self.learning
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            found.agent.save(file)
            write_atomically(facts, (json.dumps(found.as_json()) + "\n").encode())
        return file, json.loads(facts.read_text(encoding="utf-8"))


def name_of(config: Config) -> str:
    """A folder name: what a person looks for, and a digest of all that is not as usual, but for the number of rounds
    where the first rounds of a longer training are a shorter one.

    >>> name_of(Config()) == name_of(with_values(Config(), rounds=7))
    True
    >>> name_of(with_values(Config(), schedule="cosine")) == name_of(with_values(Config(), schedule="cosine", rounds=7))
    False
    >>> name_of(with_values(Config(), scheme="psl", lr=0.05)).rpartition("-")[0]
    'mnist-mini-psl-cut1-seed0'
    """
    fixed = fixed_cut(config.policy.policy, config.split.cuts[0])
    if fixed is not None:
        config = resolved(config)
        if config.train.schedule == "constant":  # other schedules and policies know how long the training is
            config = with_values(config, rounds=Config().train.rounds)
    usual = set(to_toml(Config()).splitlines())
    unusual = "\n".join(line for line in to_toml(config).splitlines() if line not in usual)
    digest = hashlib.blake2b(unusual.encode(), digest_size=5).hexdigest()
    where = config.policy.policy.partition(":")[0] if fixed is None else f"cut{fixed}"
    return f"{config.data.dataset}-{config.split.scheme}-{where}-seed{config.train.seed}-{digest}"


def priced(records: Sequence[RoundRecord], config: Config) -> list[RoundRecord]:
    """These rounds with the bytes and seconds that ``config`` has for them, without training; other costs left out."""
    scenario = scenario_of(config, _model(config.model.arch, config.data.dataset))
    seconds = round_seconds(config, [record.cut for record in records])
    return [
        replace(sent(record, scenario, record.cut), latency_s=float(s), metrics={})
        for record, s in zip(records, seconds, strict=True)
    ]


def sent(record: RoundRecord, scenario: Scenario, cut: int) -> RoundRecord:
    """The record of a round with what another placement or scheme sends."""
    place = scenario.place(cut)
    ledger = scenario.dry(place, record.round)
    up, down = ledger.total("up"), ledger.total("down")
    return replace(record, cut=place.cut, up_bytes=up, down_bytes=down, kinds=ledger.by_kind())


def round_seconds(config: Config, cuts: Sequence[int], *, computing_only: bool = False) -> Array:
    """Simulated seconds of rounds 1..T at these cuts in the cell of ``config``, without training; moves are free.

    With ``computing_only`` nothing needs time on the air.
    """
    scenario = scenario_of(config, _model(config.model.arch, config.data.dataset))
    met = scenario.conditions(range(1, len(cuts) + 1))
    placements = [scenario.place(cut) for cut in cuts]
    rounds = [(place, scenario.scheme.at(place).pattern(t)) for t, place in enumerate(placements, 1)]
    kinds = list(dict.fromkeys(rounds))
    stages = [scenario.stages(place, rounds.index((place, syncs)) + 1) for place, syncs in kinds]
    if computing_only:
        stages = [
            [replace(stage, uplink_bits=0, broadcast_bits=0, unicast_bits=0) for stage in each] for each in stages
        ]
    seconds = np.stack([timed.seconds for timed in time_rounds(stages, scenario.cell, met, scenario.allocator)])
    return seconds[[kinds.index(kind) for kind in rounds], np.arange(len(cuts))]


def model_of(base: Config) -> SplitModel:
    """The model of a study, for plans."""
    return _model(base.model.arch, base.data.dataset)


@cache
def _model(arch: str, dataset: str) -> SplitModel:
    """Its weights do not matter for the time that a round takes."""
    return build(arch, *SHAPES[dataset], seed=0)
