"""THE round loop: build the parts a configuration names, train, record every round.

Read this first; everything else is a part of it.
"""

import math
import sys
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

from splitcast import data
from splitcast.base.config import Config, DataConfig, leaves, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.base.seeds import stream
from splitcast.cost.deadline import taking_part
from splitcast.cost.memory import client_memory, refuse_large
from splitcast.cost.pace import EqualShares
from splitcast.cost.scenario import RoundClock, Scenario
from splitcast.cutting.auto import is_auto
from splitcast.cutting.costs import CutCosts
from splitcast.cutting.formats import measures
from splitcast.cutting.policies import CutSelector, fixed_cut
from splitcast.cutting.reassign import Reassign, period
from splitcast.data import Dataset
from splitcast.engine.asynchronous import AsyncSimulator
from splitcast.engine.engine import Engine
from splitcast.engine.simulator import Simulator
from splitcast.model import make_model, prepared, split
from splitcast.model.split import Blocks, SplitModel
from splitcast.model.vocabulary import check_padding, check_tokens
from splitcast.model.whole import whole
from splitcast.run import writing
from splitcast.run.auto import as_begun, decided
from splitcast.run.export import inputs_of
from splitcast.run.recording import recorded, summarise
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.schemes.messages import Ledger
from splitcast.schemes.schemes import make_scheme, placed
from splitcast.theory import estimate_gamma
from splitcast.theory.distortion import relative_errors
from splitcast.training.measure import Measure
from splitcast.training.optimiser import make_optimiser
from splitcast.training.placement import Placed
from splitcast.training.runtime import device_name
from splitcast.training.task import Task, fit_targets, headline_of, make_task

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


def as_split(config: Config, model: Blocks | SplitModel, dataset: Dataset) -> SplitModel:
    """A model of the user's, cut for the samples of a data set."""
    return prepared(split(model, dataset.train_x[:64], config.model, config.lora), config)


def make_simulator(config: Config, dataset: Dataset, model: Blocks | SplitModel | None = None) -> Simulator:
    """The parts a configuration names, put together."""
    shape = tuple(dataset.train_x.shape[1:])
    if model is None:
        model = make_model(config, shape, dataset.classes, dataset.train_x.dtype)
    elif not isinstance(model, SplitModel):
        model = as_split(config, model, dataset)
    if model.input_shape != shape:
        raise SplitcastError(f"model: takes samples of {model.input_shape}, the data has {shape}")
    check_tokens(model, dataset.train_x, dataset.test_x)
    if dataset.writing and dataset.train_y.ndim == 1:
        check_padding(model, dataset.writing.tokenizer.padding)
    task = make_task(config.model.task, dataset.classes)
    task.check(model.smashed_shape(model.depth))
    dataset = fitted(dataset, task, model)
    placement = first_placement(config, model)
    parts = make_parts(config, dataset)
    made = (config, model, task, dataset.train_x, dataset.train_y, parts)
    if not config.train.wait_for:
        return Simulator(*made, placement=placement)
    return AsyncSimulator(*made, placement=placement, pace=EqualShares(Scenario.of(config, model, task)))


def fitted(dataset: Dataset, task: Task, model: SplitModel) -> Dataset:
    """The dataset with its targets as the task takes them, or a refusal."""
    shape = model.smashed_shape(model.depth)
    train_y, test_y = (fit_targets(task, getattr(dataset, name), shape, name) for name in ("train_y", "test_y"))
    return replace(dataset, train_y=train_y, test_y=test_y)


def load_data(config: Config) -> Dataset:
    """The data a configuration names."""
    return data.load(config.data, task=config.model.task, arch=config.model.arch)


def with_clients(config: Config, dataset: Dataset) -> Config:
    """The configuration with as many clients as the column has that tells them; any other number but the default is
    refused."""
    column = data.natural_column(config.data.partition)
    if not column:
        return config
    if column not in dataset.groups:
        known = ", ".join(dataset.groups) or "none"
        raise SplitcastError(f"partition: {dataset.name} has no column {column!r} of clients; it has {known}")
    count, asked = int(dataset.groups[column].max()) + 1, config.data.clients
    if asked not in (count, DataConfig().clients):
        raise SplitcastError(f"clients: {asked}, but column {column!r} has {count}; leave the number out")
    return with_values(config, clients=count)


def make_parts(config: Config, dataset: Dataset) -> list[np.ndarray]:
    """The rows of the training set that each client owns."""
    spread = config.data
    if column := data.natural_column(spread.partition):
        return data.natural(dataset.groups[column].numpy())
    return data.partition(
        dataset.train_y.numpy(),
        spread.clients,
        spread.partition,
        alpha=spread.alpha,
        classes_per_client=spread.classes_per_client,
        sizes=spread.sizes,
        rng=stream(config.train.seed, "data"),
    )


def first_placement(config: Config, model: SplitModel) -> Placed:
    """The placement of the first round, unless a policy chooses it."""
    scheme = make_scheme(config)
    if config.policy.policy == "fixed" or len(config.split.cuts) > 1:
        return placed(config, scheme, model.depth)
    fixed = fixed_cut(config.policy.policy, config.split.cuts[0])
    return scheme.place(config.split.cuts[0] if fixed is None else fixed, model.depth)


def resolved(config: Config) -> Config:
    """The configuration with what the scheme chooses for the cut written out: a record does not lean on defaults.

    Where a policy moves the cut, the choice moves along and stays open.

    >>> gb = with_values(Config(), scheme="sfl-gb", uplink_codec="int4")
    >>> resolved(gb).sfl_gb.rank, resolved(gb).split.uplink_codec, resolved(gb).split.downlink_codec
    (8, 'int4', 'int8')
    """
    config = with_values(config, device=device_name(config.train.device))
    if is_auto(config):  # the planner needs the model
        return config
    cut, cuts = fixed_cut(config.policy.policy, config.split.cuts[0]), config.split.cuts
    if cut is None or cut < 1 or min(cuts) < 1:  # refused where the model is known
        return config
    scheme = make_scheme(config)
    held = scheme.place(cut, sys.maxsize) if len(cuts) == 1 else placed(config, scheme, sys.maxsize)
    settings = scheme.at(held).settings()
    if config.policy.uplink_choices:  # chosen anew in every round
        settings.pop("uplink_codec", None)
    return with_values(config, **settings)


def chosen(config: Config, taken: Config | None = None) -> dict[str, Any]:
    """What `resolved` wrote out for the scheme, or a run has ``taken``, where the configuration left it open.

    >>> chosen(with_values(Config(), scheme="sfl-tc", uplink_codec="int4", task="next-token"))["downlink_codec"]
    'lloyd:2'
    """
    left = leaves(with_values(config, device=device_name(config.train.device)))
    return {name: value for name, value in leaves(taken or resolved(config)).items() if value != left[name]}


def reachable(config: Config, engine: Engine, clock: RoundClock) -> Sequence[Placed]:
    """Where blocks may be in a run; assignments keep to the memory of every client by themselves."""
    if period(config.policy.policy):
        return []
    moves = fixed_cut(config.policy.policy, config.split.cuts[0]) is None
    return clock.scenario.placements() if moves else [engine.state.placement]


def make_clock(config: Config, engine: Engine) -> RoundClock:
    """The cell in which the engine's rounds take time."""
    scenario = Scenario.of(config, engine.model, engine.task)
    if config.policy.uplink_choices or fixed_cut(config.policy.policy, config.split.cuts[0]) is None:
        scenario.channel.at(config.train.rounds)
    else:
        scenario.check(engine.state.placement, config.train.rounds)
    return RoundClock(scenario)


def make_selector(
    config: Config, engine: Engine, clock: RoundClock, dataset: Dataset, folder: RunFolder | None = None
) -> CutSelector | Reassign | None:
    """Who chooses cut and format of every round; None if both are fixed. A folder may hold what was measured before."""
    choice = config.policy
    if choice.gamma_draws and config.network.gamma:
        raise SplitcastError(f"gamma_draws: {choice.gamma_draws}, but gamma is given; leave one of them out")
    if fixed_cut(choice.policy, config.split.cuts[0]) is not None and not choice.uplink_choices:
        return None
    scenario = clock.scenario
    if scenario.scheme.fixed_cut:
        raise SplitcastError(f"policy: {choice.policy!r} moves the cut; {scenario.scheme.name} needs fixed")
    if period(choice.policy):
        if choice.gamma_draws:
            raise SplitcastError(f"gamma_draws: {choice.gamma_draws}, but {choice.policy} weighs seconds; leave it out")
        return Reassign(scenario, choice.policy, charge=choice.charge_migration)
    if choice.gamma_draws:
        if not isinstance(engine, Simulator):
            raise SplitcastError("gamma_draws: measuring needs all data in one place; give gamma instead")
        gamma = folder.measured("gamma") if folder else ()
        config = with_values(config, gamma=gamma or measure_gamma(config, engine, dataset))
    if measures(choice):
        if not isinstance(engine, Simulator):
            raise SplitcastError("uplink_choices: measuring their errors needs all data here; give uplink_errors")
        errors = folder.measured("errors") if folder else ()
        config = with_values(config, uplink_errors=errors or measure_errors(config, engine, dataset))
    scenario = replace(scenario, config=config)
    world = CutCosts(scenario, charge_moves=choice.charge_migration)
    return CutSelector.of(world, choice.policy, config.train.rounds, config.split.cuts[0])


def measure_gamma(config: Config, simulator: Simulator, dataset: Dataset) -> tuple[float, ...]:
    """Gamma(phi(v)) of every cut at the initial weights, from the clients' own data and the scheme's program."""
    model, scheme = simulator.model, make_scheme(config)
    found = estimate_gamma(
        model,
        simulator.task,
        simulator.initial().params,
        simulator.x,
        simulator.y,
        make_parts(config, dataset),
        config.train.batch,
        config.policy.gamma_draws,
        config.train.seed,
        [scheme.at(scheme.place(cut, model.depth)) for cut in model.cuts],
    )
    return found.fitted


def measure_errors(config: Config, simulator: Simulator, dataset: Dataset) -> tuple[float, ...]:
    """e(v, f) of every format and cut at the initial weights (`theory.distortion`), format by format."""
    model, scheme = simulator.model, make_scheme(config)
    places = dict.fromkeys(scheme.place(cut, model.depth) for cut in scheme.cuts(model.depth))
    found = relative_errors(
        model,
        simulator.initial().everything(),
        simulator.x,
        make_parts(config, dataset),
        config.train.batch,
        config.policy.error_draws,
        config.train.seed,
        [place.segments[0].stop for place in places],
        [codec(name, "uplink_choices") for name in config.policy.uplink_choices],
        simulator.kit.defence,
    )
    return tuple(found.ravel().tolist())
