"""THE round loop: train with the parts that a configuration names (`run.parts`), record every round.

Read this first; everything else is a part of it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from splitcast.base.config import Config, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.cost.deadline import taking_part
from splitcast.cost.memory import client_memory, refuse_large
from splitcast.cutting.auto import is_auto
from splitcast.cutting.formats import measures
from splitcast.cutting.policies import CutSelector
from splitcast.cutting.reassign import Reassign
from splitcast.data import Dataset
from splitcast.engine.engine import Engine
from splitcast.engine.simulator import Simulator
from splitcast.model.split import Blocks, SplitModel
from splitcast.model.whole import whole
from splitcast.run import writing
from splitcast.run.auto import as_begun, decided
from splitcast.run.export import inputs_of
from splitcast.run.parts import (
    as_split,
    fitted,
    load_data,
    make_simulator,
    resolved,
    with_clients,
)
from splitcast.run.recording import recorded, summarise
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.run.selecting import make_clock, make_selector, reachable
from splitcast.schemes.messages import Ledger
from splitcast.training.measure import Measure
from splitcast.training.optimiser import make_optimiser
from splitcast.training.task import headline_of

OnRound = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    rounds: list[RoundRecord]
    summary: dict[str, Any]
    engine: Engine
    """what it ran on, with the weights"""

    def model(self) -> nn.Module:
        """The trained module, with its buffers and the averaged client half; it shares nothing with the engine."""
        return whole(self.engine.model, self.engine.averaged())


def train(
    config: Config,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    dataset: Dataset | None = None,
    model: Blocks | SplitModel | None = None,
    engine: Engine | None = None,
) -> Result:
    """Train as ``config`` says; write a run folder if ``out`` is given.

    ``dataset`` and ``model`` stand in for those that the configuration names, ``engine`` for the simulator. The model
    may be any module that `SplitModel.of` can cut.

    >>> from splitcast.base.config import Config, ModelConfig, TrainConfig
    >>> quick = Config(model=ModelConfig(arch="cnn-small"), train=TrainConfig(rounds=2))
    >>> result = train(quick)
    >>> [record.round for record in result.rounds], result.summary["rounds"]
    ([1, 2], 2)
    """
    folder = RunFolder(Path(out)) if out else None
    with _writing(folder):
        return _train(config, folder, resume, on_round, dataset, model, engine)


@contextmanager
def _writing(folder: RunFolder | None) -> Iterator[None]:
    """The only writer of the folder; one that was made for nothing goes again."""
    if folder is None:
        yield
        return
    new = not folder.path.exists()
    try:
        with folder.lock():
            yield
    except BaseException:
        if new and not folder.config_file.exists():
            folder.discard()
        raise


def _train(
    config: Config,
    folder: RunFolder | None,
    resume: bool,
    on_round: OnRound | None,
    dataset: Dataset | None,
    model: Blocks | SplitModel | None,
    engine: Engine | None,
) -> Result:
    config = resolved(config)
    dataset = dataset or load_data(config)
    if engine is None:
        config = with_clients(config, dataset)
    if model is not None:
        model = as_split(config, model, dataset)
        config = with_values(config, arch=model.arch)
    if is_auto(config):
        begun = as_begun(config, folder) if folder and resume else config
        config = resolved(decided(begun, dataset, model))
    given = {"dataset": dataset.name != config.data.dataset, "model": model is not None}
    own = [] if engine else [part for part, mine in given.items() if mine]
    samples = dataset.fingerprint() if folder else ""
    if folder and resume:
        _refuse_another(folder, config)
    elif folder and not folder.is_vacant():
        raise SplitcastError(f"out: {folder.path} is not empty; choose another folder, or --resume")
    engine = engine or make_simulator(config, dataset, model)
    dataset, judged = fitted(dataset, engine.task, engine.model), headline_of(engine.task)
    if config.train.stop_at:
        judged.check("stop_at", config.train.stop_at)
    fingerprint = engine.model.fingerprint()
    clock = make_clock(config, engine)
    refuse_large(config, engine.model, clock.scenario.optimiser, reachable(config, engine, clock))
    selector = make_selector(config, engine, clock, dataset, folder if resume else None)
    records: list[RoundRecord] = []
    if folder and resume:
        records = _continue(folder, engine, samples, fingerprint)
        if ended(config, records, judged) and folder.summary_file.is_file():
            return Result(records, folder.summary(), engine)
        folder.reconfigure(config)
    elif folder:
        folder.create(config)
        if isinstance(selector, CutSelector) and config.policy.gamma_draws:
            folder.save_measured("gamma", selector.world.scenario.config.network.gamma)
        if isinstance(selector, CutSelector) and measures(config.policy):
            folder.save_measured("errors", selector.world.scenario.config.policy.uplink_errors)
    spent = 0.0
    if selector:
        for record in records:  # one by one, as below: a resumed run must get the same bits
            spent += spent_on(record, selector)

    started = time.perf_counter()
    while not ended(config, records, judged):
        t, ledger, scenario, uplink = len(records) + 1, Ledger(), clock.scenario, ""
        if selector:
            placement = selector.choose(t, engine.state.placement if t > 1 else None, spent)
            engine.place(placement, ledger, charge=config.policy.charge_migration and t > 1)
            uplink, scenario = selector.format(t, placement)
            if uplink:
                engine.send_as(uplink)
        drawn = taking_part(scenario, engine.state.placement, t) if config.train.deadline_s else None
        report = engine.round(t, ledger, drawn)
        if not math.isfinite(report.loss):
            raise SplitcastError(
                f"lr: the loss became {report.loss} in round {t}; choose a value below {config.train.lr}"
            )
        tested, own_tests = dict[str, float](), dict[str, float]()
        if t == config.train.rounds or t % config.train.eval_every == 0:
            tested = _tested(config, engine, dataset, judged, last=t == config.train.rounds)
            own_tests = evaluate_clients(config, engine, judged)
        records.append(replace(recorded(t, engine, report, clock, tested, own_tests), uplink=uplink or None))
        if selector:
            spent += spent_on(records[-1], selector)
        if folder:
            folder.append(records[-1])
            if t % config.train.checkpoint_every == 0 or ended(config, records, judged):
                tensors, about = engine.snapshot(t)
                about |= {"model": fingerprint, "threads": str(torch.get_num_threads())}
                about |= inputs_of(engine.model, dataset.classes)
                folder.save(tensors, about, t, samples)
        if on_round:
            on_round(records[-1])
    summary = summarise(config, records, time.perf_counter() - started, judged)
    summary |= {"own": own} if own else {}
    summary["client_memory_mb"] = round(most_memory(config, engine) / 1e6, 3)
    if written := writing.samples(config, engine, dataset):
        summary["samples"] = written
    if folder:
        folder.finish(summary)
    return Result(records, summary, engine)


def spent_on(record: RoundRecord, selector: CutSelector | Reassign) -> float:
    """What a recorded round cost."""
    return selector.cost(record.cut, record.latency_s, record.metrics.get("energy_j", 0.0), record.uplink or "")


def most_memory(config: Config, engine: Engine) -> int:
    """Bytes that the client needs which needs most, as things are placed now."""
    model, optimiser, train = engine.model, make_optimiser(config.train), config.train
    places = engine.state.placement.kinds
    return max(client_memory(model, place, optimiser, train.batch, recompute=train.recompute).total for place in places)


def ended(config: Config, records: Sequence[RoundRecord], judged: Measure) -> bool:
    """Whether a run is over: all rounds are done, or the last test is as good as it shall be."""
    if len(records) >= config.train.rounds:
        return True
    value = records[-1].test(judged.name) if records and config.train.stop_at else None
    return value is not None and judged.reached(value, config.train.stop_at)


def _tested(config: Config, engine: Engine, dataset: Dataset, judged: Measure, *, last: bool) -> dict[str, float]:
    """The measures of a test: of some samples along the way, of all of them in what is the last test."""
    x, y, some = dataset.test_x, dataset.test_y, config.train.eval_samples
    if not last and 0 < some < len(y):
        rows = torch.from_numpy(stream(0, "test").permutation(len(y))[:some])
        found, goal = engine.evaluate(x[rows], y[rows]), config.train.stop_at
        value = found.get(judged.name)
        if not goal or value is None or not judged.reached(value, goal):
            return found
    return engine.evaluate(x, y)


def evaluate_clients(config: Config, engine: Engine, judged: Measure) -> dict[str, float]:
    """Mean, worst and spread of what each client's model is judged by on its own rows, if that is asked for."""
    if not config.train.eval_clients:
        return {}
    assert isinstance(engine, Simulator)  # others refuse it: a site has its half only
    values = [found[judged.name] for found in engine.evaluate_clients(config.train.eval_clients)]
    worst = max(values) if judged.lower else min(values)
    return {"mean": float(np.mean(values)), "worst": worst, "spread": float(np.std(values))}


def _refuse_another(folder: RunFolder, config: Config) -> None:
    """A run goes on as it began; only its number of rounds may grow."""
    begun = resolved(folder.config())
    fixed = begun.train.schedule != "constant"  # its rates follow from the number of rounds
    grown = with_values(begun, rounds=begun.train.rounds if fixed else max(begun.train.rounds, config.train.rounds))
    if grown != config:
        old, new = (to_toml(each).splitlines() for each in (grown, config))
        was, asked = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
        raise SplitcastError(f"resume: {folder.path} was begun with {was}, not {asked}; use another folder")


def _continue(folder: RunFolder, engine: Engine, samples: str, model: str) -> list[RoundRecord]:
    """Put the engine where the last checkpoint was, or at the start if the run stopped before the first."""
    if not folder.checkpoint_file.exists():
        return folder.rewind(0)
    stored = folder.restore(samples)
    if stored.about.get("model", model) != model:
        raise SplitcastError(f"run: {folder.path} trained another model; resume it from Python, with its model")
    threads = str(torch.get_num_threads())
    if stored.about.get("threads", threads) != threads:
        warnings.warn(
            f"run: {folder.path} was trained with {stored.about['threads']} threads and goes on with {threads}: last "
            "bits differ from those of a run that was never stopped",
            stacklevel=2,
        )
    engine.resume(stored.tensors, stored.about, stored.round)
    return folder.rewind(stored.round)
