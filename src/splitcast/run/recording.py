"""What is kept of a round, and of a run: its record and its summary."""

import math
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splitcast.base.config import Config
from splitcast.cost.pace import energy_of_beginning
from splitcast.cost.privacy import run_epsilon
from splitcast.cost.scenario import RoundClock, RoundCost
from splitcast.cutting.reassign import period
from splitcast.data.batches import participants
from splitcast.engine.engine import Engine, RoundReport
from splitcast.run.records import RoundRecord
from splitcast.training.measure import Measure

QUANTILES = {"median": 0.5, "p95": 0.95, "most": 1.0}
"""Of the seconds of rounds: a few deep fades carry their mean."""


def summarise(config: Config, records: list[RoundRecord], seconds: float, judged: Measure) -> dict[str, Any]:
    """What a reader wants to know first."""
    last = records[-1]
    values = [value for r in records if (value := r.test(judged.name)) is not None]
    accuracies = [r.test_accuracy for r in records if r.test_accuracy is not None]
    seconds_of = [r.latency_s for r in records]
    return {
        "scheme": config.split.scheme,
        "policy": config.policy.policy,
        "cut": last.cut,
        **({"cuts": cuts} if len(cuts := last.cuts or list(config.split.cuts)) > 1 else {}),
        "rounds_per_cut": dict(sorted(Counter(str(r.cut) for r in records).items())),
        **_per_uplink(records),
        "moves": sum((a.cut, a.cuts) != (b.cut, b.cuts) for a, b in pairwise(records)),
        "rounds": len(records),
        "accuracy": last.test_accuracy,
        "best_accuracy": max(accuracies, default=None),
        "headline": asdict(judged) | {"value": last.test(judged.name), "best": judged.best(values)},
        "test": last.tests(),
        **_of_clients(last),
        "loss": records[-1].loss,
        "drift": records[-1].drift,
        "up_bytes": sum(r.up_bytes for r in records),
        "down_bytes": sum(r.down_bytes for r in records),
        "latency_s": sum(r.latency_s for r in records),
        "round_s": {name: float(np.quantile(seconds_of, q)) for name, q in QUANTILES.items()},
        **_outage(config, records),
        **({} if (spent := run_epsilon(config, len(records))) is None else {"epsilon": spent}),
        "energy_j": sum(r.metrics.get("energy_j", 0.0) for r in records),
        "wall_seconds": round(seconds, 3),  # since the start, or since the last resume
        "versions": {name: version(name) for name in ("splitcast", "torch", "numpy")},
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _per_uplink(records: Sequence[RoundRecord]) -> dict[str, dict[str, int]]:
    """How many rounds had each format, where it was chosen."""
    counts = Counter(r.uplink for r in records if r.uplink)
    return {"rounds_per_uplink": dict(sorted(counts.items()))} if counts else {}


def _outage(config: Config, records: Sequence[RoundRecord]) -> dict[str, float]:
    """With a deadline: the share of rounds that missed it, and clients late for a round, mean."""
    if not config.train.deadline_s:
        return {}
    late = sum(r.metrics.get("late", 0.0) for r in records)
    return {"outage": outage(records, config.train.deadline_s), "late": late / len(records)}


def outage(records: Sequence[RoundRecord], deadline_s: float) -> float:
    """The share of rounds that took longer than the deadline."""
    return sum(r.latency_s > deadline_s for r in records) / len(records)


def _of_clients(last: RoundRecord) -> dict[str, dict[str, float]]:
    prefix = "clients_"
    found = {name.removeprefix(prefix): value for name, value in last.metrics.items() if name.startswith(prefix)}
    return {"clients": found} if found else {}


def recorded(
    t: int,
    engine: Engine,
    report: RoundReport,
    clock: RoundClock,
    tested: dict[str, float],
    own_tests: dict[str, float],
) -> RoundRecord:
    """The record of a round."""
    placement, ledger = engine.state.placement, report.ledger
    train, held, clients = clock.scenario.config.train, report.waited, clock.scenario.cell.clients
    if held:
        joules = energy_of_beginning(clock.scenario, placement, t, report.clients)
        cost = RoundCost(held.seconds, held.client, held.part, joules)
    else:
        cost = clock.round(t, placement, ledger)
    further = {f"test_{name}": value for name, value in tested.items() if name not in ("loss", "accuracy")}
    further |= {f"clients_{name}": value for name, value in own_tests.items()}
    if train.deadline_s and not held:
        further["late"] = len(participants(train, clients, t)) - len(report.clients)
    every = ledger.metrics() | cost.energy_j | further
    metrics = {name: value for name, value in every.items() if math.isfinite(value)}
    return RoundRecord(
        round=t,
        cut=placement.cut,
        clients=len(report.clients),
        loss=report.loss,
        up_bytes=ledger.total("up"),
        down_bytes=ledger.total("down"),
        kinds=ledger.by_kind(),
        drift=_finite(engine.drift()),
        latency_s=cost.latency_s,
        slowest_client=cost.slowest_client,
        slowest_part=cost.slowest_part,
        test_loss=_finite(tested.get("loss")),
        test_accuracy=_finite(tested.get("accuracy")),
        metrics=metrics,
        wall_s=report.measured.seconds if report.measured else None,
        failures=report.measured.failures or None if report.measured else None,
        cuts=[placement.of(n).cut for n in range(clients)] if period(clock.scenario.config.policy.policy) else None,
    )


def _finite(value: float | None) -> float | None:
    """What a record can hold: a model on its way to infinity has no drift."""
    return value if value is not None and math.isfinite(value) else None
