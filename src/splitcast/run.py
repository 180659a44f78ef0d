"""THE round loop: build the parts a configuration names, train, record every round.

Read this first; everything else is a part of it.
"""

import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from splitcast import data
from splitcast.ccc.policies import Pilot, fixed_cut
from splitcast.ccc.scenario import RoundClock, Scenario
from splitcast.ccc.world import World
from splitcast.config import Config, to_toml, with_values
from splitcast.data import ImageData
from splitcast.engine.engine import Engine
from splitcast.engine.simulator import RoundReport, Simulator
from splitcast.errors import SplitcastError, one_of
from splitcast.models import build
from splitcast.records import RoundRecord, RunFolder
from splitcast.schemes.feedback import Basis
from splitcast.schemes.messages import Ledger
from splitcast.schemes.schemes import scheme
from splitcast.seeds import stream, torch_seed
from splitcast.split import SplitModel
from splitcast.theory import estimate_gamma

OnRound = Callable[[RoundRecord], None]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Result:
    """A finished run."""

    rounds: list[RoundRecord]
    summary: dict[str, Any]
    simulator: Engine
    """what it ran on, real sites included"""


def train(
    config: Config,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    on_round: OnRound | None = None,
    images: ImageData | None = None,
    model: SplitModel | nn.Sequential | None = None,
    engine: Engine | None = None,
) -> Result:
    """Train as ``config`` says; write a run folder if ``out`` is given.

    ``images`` and ``model`` stand in for the data set and architecture that the configuration names, ``engine`` for
    the simulator.

    >>> from splitcast.config import Config, ModelConfig, TrainConfig
    >>> quick = Config(model=ModelConfig(arch="cnn-small"), train=TrainConfig(rounds=2))
    >>> result = train(quick)
    >>> [record.round for record in result.rounds], result.summary["rounds"]
    ([1, 2], 2)
    """
    config = settled(config)
    images = images or data.load(config.data.dataset)
    given = {"images": images.name != config.data.dataset, "model": model is not None}
    own = [] if engine else [part for part, mine in given.items() if mine]
    samples = images.fingerprint()
    folder = RunFolder(Path(out)) if out else None
    if folder and resume:
        _refuse_another(folder, config)
    engine = engine or make_simulator(config, images, model)
    clock = make_clock(config, engine)
    pilot = make_pilot(config, engine, clock, images, folder if resume else None)
    records: list[RoundRecord] = []
    if folder and resume:
        records = _continue(folder, engine, samples)
        if len(records) == config.train.rounds and folder.summary_file.is_file():
            return Result(records, folder.summary(), engine)
        folder.reconfigure(config)
    elif folder:
        folder.create(config)
        if pilot and config.policy.gamma_draws:
            folder.save_gamma(pilot.world.scenario.config.network.gamma)
    spent = 0.0
    if pilot:
        for record in records:  # one by one, as below: a resumed run must get the same bits
            spent += pilot.cost(record.cut, record.latency_s)

    dtype = DTYPES[config.train.dtype]
    test_x, test_y = images.test_x.to(dtype), images.test_y
    started = time.perf_counter()
    for t in range(len(records) + 1, config.train.rounds + 1):
        ledger = Ledger()
        if pilot:
            cut = pilot.choose(t, engine.state.cut if t > 1 else None, spent)
            engine.recut(cut, ledger, charge=config.policy.charge_migration and t > 1)
        report = engine.round(t, ledger)
        if not math.isfinite(report.loss):
            raise SplitcastError(
                f"lr: the loss became {report.loss} in round {t}; choose a value below {config.train.lr}"
            )
        last = t == config.train.rounds
        tested = engine.evaluate(test_x, test_y) if last or t % config.train.eval_every == 0 else None
        records.append(_record(t, engine, report, clock, tested))
        if pilot:
            spent += pilot.cost(records[-1].cut, records[-1].latency_s)
        if folder:
            folder.append(records[-1])
            if last or t % config.train.checkpoint_every == 0:
                folder.save(engine.snapshot(t), t, samples)
        if on_round:
            on_round(records[-1])
    summary = summarise(config, records, time.perf_counter() - started) | ({"own": own} if own else {})
    if folder:
        folder.finish(summary)
    return Result(records, summary, engine)


def _refuse_another(folder: RunFolder, config: Config) -> None:
    """A run goes on as it began; only its number of rounds may grow."""
    begun = settled(folder.config())
    grown = with_values(begun, rounds=max(begun.train.rounds, config.train.rounds))
    if grown != config:
        old, new = (to_toml(each).splitlines() for each in (grown, config))
        was, asked = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
        raise SplitcastError(f"resume: {folder.path} was begun with {was}, not {asked}; use another folder")


def _continue(folder: RunFolder, engine: Engine, samples: str) -> list[RoundRecord]:
    """Put the engine where the last checkpoint was, or at the start if the run stopped before the first."""
    if not folder.checkpoint_file.exists():
        return folder.rewind(0)
    state, done = folder.restore(engine.model.initial(), samples)
    engine.resume(state, done)
    return folder.rewind(done)


def make_simulator(config: Config, images: ImageData, model: SplitModel | nn.Sequential | None = None) -> Simulator:
    """The parts a configuration names, put together."""
    seed, shape = config.train.seed, tuple(images.train_x.shape[1:])
    dtype = DTYPES[one_of("dtype", config.train.dtype, DTYPES)]
    if isinstance(model, nn.Sequential):
        model = SplitModel(model, shape)
    model = model or build(config.model.arch, shape, images.classes, torch_seed(seed, "model"))
    if model.input_shape != shape:
        raise SplitcastError(f"model: takes samples of {model.input_shape}, the data has {shape}")
    if model.smashed_shape(model.depth)[-1:] < (images.classes,):
        outputs = model.smashed_shape(model.depth)
        raise SplitcastError(f"model: ends in {outputs} values, the data has {images.classes} classes")
    return Simulator(
        model,
        scheme(config.split),
        first_cut(config),
        images.train_x.to(dtype),
        images.train_y,
        make_parts(config, images),
        config.train,
    )


def make_parts(config: Config, images: ImageData) -> list[np.ndarray]:
    """The rows of the training set that each client owns."""
    spread = config.data
    return data.partition(
        images.train_y.numpy(),
        spread.clients,
        spread.partition,
        alpha=spread.alpha,
        classes_per_client=spread.classes_per_client,
        sizes=spread.sizes,
        rng=stream(config.train.seed, "data"),
    )


def first_cut(config: Config) -> int:
    """The cut of the first round, unless a policy chooses it."""
    fixed = fixed_cut(config.policy.policy, config.split.cut)
    return config.split.cut if fixed is None else fixed


def settled(config: Config) -> Config:
    """The configuration with what sfl-gb chooses for the cut written out: a record of it does not lean on defaults.

    Where a policy moves the cut, the choice moves along and stays open.

    >>> gb = with_values(Config(), scheme="sfl-gb", uplink_codec="int4")
    >>> settled(gb).split.rank, settled(gb).split.uplink_codec, settled(gb).split.downlink_codec
    (8, 'int4', 'int8')
    """
    cut = fixed_cut(config.policy.policy, config.split.cut)
    if cut is None:
        return config
    made = scheme(config.split).at(cut)
    if not isinstance(made.feedback, Basis):
        return config
    return with_values(
        config,
        rank=made.feedback.rank,
        sync_every=made.sync_every,
        uplink_codec=made.uplink.name,
        downlink_codec=made.downlink.name,
    )


def make_clock(config: Config, engine: Engine) -> RoundClock:
    """The cell in which the engine's rounds take time."""
    scenario = Scenario.of(config, engine.model, engine.classes)
    if fixed_cut(config.policy.policy, config.split.cut) is None:
        scenario.channel.at(config.train.rounds)
    else:
        scenario.check(engine.state.cut, config.train.rounds)
    return RoundClock(scenario)


def make_pilot(
    config: Config, engine: Engine, clock: RoundClock, images: ImageData, folder: RunFolder | None = None
) -> Pilot | None:
    """Who chooses the cut of every round; None if it is fixed. A folder may hold a Gamma that was measured before."""
    choice = config.policy
    if choice.gamma_draws and config.network.gamma:
        raise SplitcastError(f"gamma_draws: {choice.gamma_draws}, but gamma is given; leave one of them out")
    if fixed_cut(choice.policy, config.split.cut) is not None:
        return None
    scenario = clock.scenario
    if choice.gamma_draws:
        if not isinstance(engine, Simulator):
            raise SplitcastError("gamma_draws: measuring needs all data in one place; give gamma instead")
        gamma = folder.gamma() if folder else ()
        scenario = replace(scenario, config=with_values(config, gamma=gamma or measure_gamma(config, engine, images)))
    world = World(scenario, charge_moves=choice.charge_migration)
    return Pilot.of(world, choice.policy, config.train.rounds, config.split.cut)


def measure_gamma(config: Config, simulator: Simulator, images: ImageData) -> tuple[float, ...]:
    """Gamma(phi(v)) of every cut at the initial weights, from the clients' own data and the scheme's feedback."""
    found = estimate_gamma(
        simulator.model,
        simulator.model.initial(simulator.x.dtype),
        simulator.x,
        simulator.y,
        make_parts(config, images),
        config.train.batch,
        config.policy.gamma_draws,
        config.train.seed,
        [simulator.scheme.at(cut).feedback for cut in simulator.model.cuts],
    )
    return found.fitted


def summarise(config: Config, records: list[RoundRecord], seconds: float) -> dict[str, Any]:
    """What a reader wants to know first."""
    tested = [r for r in records if r.test_accuracy is not None]
    return {
        "scheme": config.split.scheme,
        "policy": config.policy.policy,
        "cut": records[-1].cut,
        "rounds_per_cut": dict(sorted(Counter(str(r.cut) for r in records).items())),
        "moves": sum(a.cut != b.cut for a, b in pairwise(records)),
        "rounds": len(records),
        "accuracy": tested[-1].test_accuracy,
        "best_accuracy": max(r.test_accuracy or 0.0 for r in tested),
        "loss": records[-1].loss,
        "drift": records[-1].drift,
        "up_bytes": sum(r.up_bytes for r in records),
        "down_bytes": sum(r.down_bytes for r in records),
        "latency_s": sum(r.latency_s for r in records),
        "wall_seconds": round(seconds, 3),  # since the start, or since the last resume
        "versions": {name: version(name) for name in ("splitcast", "torch", "numpy")},
        "python": platform.python_version(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _record(
    t: int, engine: Engine, report: RoundReport, clock: RoundClock, tested: tuple[float, float] | None
) -> RoundRecord:
    latency_s, slowest_client, slowest_part = clock.round(t, engine.state.cut, report.ledger, report.clients)
    return RoundRecord(
        round=t,
        cut=engine.state.cut,
        clients=len(report.clients),
        loss=report.loss,
        up_bytes=report.ledger.total("up"),
        down_bytes=report.ledger.total("down"),
        kinds=report.ledger.by_kind(),
        drift=engine.drift(),
        latency_s=latency_s,
        slowest_client=slowest_client,
        slowest_part=slowest_part,
        test_loss=tested[0] if tested else None,
        test_accuracy=tested[1] if tested else None,
        rank=report.rank,
        dropped_energy=report.dropped_energy,
        gamma=report.gamma,
        wall_s=report.measured.seconds if report.measured else None,
        failures=report.measured.failures or None if report.measured else None,
    )
