"""Where each client's time went: the rounds of a run, timed again from its configuration.

A run folder keeps the seconds of a round and who held it up, not the seconds of every client. But all that decides
them is in the configuration (seeds, cell, scheme, model) and the record (cut, bytes), so the rounds are worked out
again, and trusted only if they take as long as the record says.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.cost.cell import Array
from splitcast.cost.clock import time_rounds
from splitcast.cost.deadline import taking_part
from splitcast.cost.latency import PARTS
from splitcast.cost.memory import client_memory
from splitcast.cost.scenario import Scenario
from splitcast.cost.stages import Stage
from splitcast.cutting.reassign import move_events
from splitcast.run.records import RoundRecord
from splitcast.schemes.messages import Event, Ledger, Message
from splitcast.schemes.schemes import placed
from splitcast.studies.plan import scenario_of
from splitcast.training.placement import Fleet, Placed, Placement

MOST = 20_000
"""Rounds of a long run that are timed again, evenly spaced."""
TOLERANCE = 0.01
"""Rounds that differ more than this from the record, relatively, are not the ones that were run."""


@dataclass(frozen=True)
class Breakdown:
    """Mean seconds per round of every client, (N,) each; with waiting and absent they sum to the mean round."""

    parts_s: dict[str, list[float]]
    """compute, uplink, server, downlink, backward; then waiting (for others, while taking part) and absent"""
    joules: list[float]
    """mean energy per round of every client, (N,)"""
    air_j: list[float]
    """of it on the air, (N,)"""
    busy_s: list[list[float] | None]
    """median and 95 % quantile of a client's own seconds, waiting left out, over the rounds that it takes part in"""
    mismatch: float
    """greatest relative difference of a round's seconds from the record"""
    rounds: int
    """so many were timed again"""
    holds: list["Holding"]
    """what each client held in the last round, (N,)"""


@dataclass(frozen=True)
class Holding:
    """What a client holds."""

    cut: int
    parameters: int
    memory_mb: float
    """weights, the optimiser's state and a gradient, and what is kept of a batch (`cost.memory`)"""


def breakdown(config: Config, records: Sequence[RoundRecord]) -> Breakdown:
    """Time the recorded rounds again. A `SplitcastError` says why they cannot be."""
    if config.train.wait_for:
        raise SplitcastError(f"latency: with wait_for {config.train.wait_for} the server did not wait; rounds overlap")
    before = {record.round + 1: record.cuts for record in records}
    records = records[:: -(-len(records) // MOST)]
    scenario = scenario_of(config)
    placements = {placement.cut: placement for placement in scenario.placements()}
    mixed = placed(config, scenario.scheme, scenario.model.depth) if len(config.split.cuts) > 1 else None

    def held_at(cuts: Sequence[int]) -> Placed:
        if unknown := [cut for cut in cuts if cut not in placements]:
            raise SplitcastError(f"latency: the model of this configuration cannot be cut at {unknown[0]}")
        return Fleet.of_clients([placements[cut] for cut in cuts])

    formats = {uplink: scenario.sending(uplink) if uplink else scenario for uplink in {r.uplink for r in records}}
    alike: dict[tuple[Stage, ...], list[RoundRecord]] = defaultdict(list)
    known: dict[Any, tuple[Stage, ...]] = {}
    for record in records:
        placement, last = mixed or held_at(record.cuts or [record.cut]), before.get(record.round)
        here = formats[record.uplink]
        clients = taking_part(here, placement, record.round)
        kind = scenario.scheme.at(placement).pattern(record.round)
        sent = (placement, record.uplink, last and tuple(last), kind, clients.tobytes(), *sorted(record.kinds.items()))
        if sent not in known:
            moved = _moved(scenario, record)
            if last and "down.migration" in record.kinds:
                moved = move_events(scenario, held_at(last), placement)
            known[sent] = tuple(_stages(here, placement, record, clients.tolist(), moved))
        alike[known[sent]].append(record)
    total = np.zeros((scenario.cell.clients, len(PARTS) + 2))
    spent, own, mismatch = np.zeros((2, scenario.cell.clients)), [], 0.0
    for stages, rounds in alike.items():
        met = scenario.conditions(record.round for record in rounds)  # (I, N)
        timed = time_rounds([stages], scenario.cell, met, scenario.allocator)[0]
        recorded = np.array([record.latency_s for record in rounds])
        mismatch = max(mismatch, float(np.max(np.abs(timed.seconds - recorded) / np.maximum(recorded, 1e-12))))
        if mismatch > TOLERANCE:
            raise SplitcastError(
                f"latency: rounds that this configuration gives differ by {100 * mismatch:.3g} % from the recorded ones"
            )
        spent += np.stack(timed.spent_j(scenario.cell.clients)).sum(1)
        busy, alone = np.zeros_like(total), np.zeros(met.gains.shape)
        for stage in timed.stages:
            who = list(stage.stage.clients)
            parts = np.stack([stage.part(name) for name in PARTS], axis=-1)  # (I, K, 5)
            busy[who, : len(PARTS)] += parts.sum(0)
            alone[:, who] += parts.sum(-1)
        working = {n for stage in stages if stage.uplink_bits and stage.name != "re-cut" for n in stage.clients}
        total += _with_rest(busy, float(timed.seconds.sum()), working)
        alone[:, [n for n in range(scenario.cell.clients) if n not in working]] = np.nan
        own.append(alone)
    mean, (compute_j, air_j) = total.T / len(records), spent / len(records)  # (7, N), (N,) each
    seconds = dict(zip((*PARTS, "waiting", "absent"), mean.tolist(), strict=True))
    held = holdings(scenario, mixed or held_at(records[-1].cuts or [records[-1].cut]))
    busy_s = [_quantiles(each[np.isfinite(each)]) for each in np.concatenate(own).T]
    return Breakdown(seconds, (compute_j + air_j).tolist(), air_j.tolist(), busy_s, mismatch, len(records), held)


def _quantiles(seconds: Array) -> list[float] | None:
    return np.quantile(seconds, (0.5, 0.95)).tolist() if len(seconds) else None


def holdings(scenario: Scenario, held: Placed) -> list[Holding]:
    """Who holds what, client by client."""
    model, train, kinds = scenario.model, scenario.config.train, dict[Placement, Holding]()
    for place in held.kinds:
        need = client_memory(model, place, scenario.optimiser, train.batch, recompute=train.recompute)
        values = sum(p.numel() for name, p in model.shapes().items() if place.on_client(name))
        kinds[place] = Holding(place.cut, values, need.total / 1e6)
    return [kinds[held.of(n)] for n in range(scenario.cell.clients)]


def held_up(records: Sequence[RoundRecord]) -> dict[int, tuple[int, str]]:
    """How many rounds each client held up, and with what most often."""
    blame: dict[int, Counter[str]] = defaultdict(Counter)
    for record in records:
        blame[record.slowest_client][record.slowest_part] += 1
    return {client: (parts.total(), parts.most_common(1)[0][0]) for client, parts in sorted(blame.items())}


def _with_rest(busy: Array, seconds: float, present: set[int]) -> Array:
    """Fill the last two columns of (N, 7): what is left of ``seconds`` is waiting, or absence."""
    rest = np.maximum(seconds - busy.sum(1), 0.0)
    here = np.isin(np.arange(len(busy)), list(present))
    busy[:, -2], busy[:, -1] = np.where(here, rest, 0.0), np.where(here, 0.0, rest)
    return busy


def _stages(
    scenario: Scenario, placement: Placed, record: RoundRecord, clients: list[int], moved: list[Event]
) -> list[Stage]:
    planned = scenario.dry(placement, record.round, clients)
    return scenario.stages_of([*moved, *_as_recorded(planned, record.kinds)], placement)


def _moved(scenario: Scenario, record: RoundRecord) -> list[Event]:
    """A move of the one cut of all clients."""
    moved, everyone = Ledger(), scenario.cell.clients
    moved.broadcast("migration", record.kinds.get("down.migration", 0), range(everyone))
    moved.unicast("up", "migration", record.kinds.get("up.migration", 0) // everyone, range(everyone))
    return moved.events


def _as_recorded(planned: Ledger, kinds: dict[str, int]) -> list[Event]:
    """The events with the bytes that were really sent: an adaptive rank is known only afterwards."""
    expected = planned.by_kind()

    def scaled(event: Event) -> Event:
        if not isinstance(event, Message) or isinstance(event.nbytes, tuple):
            return event
        key = f"{event.direction}.{event.kind}"
        return replace(event, nbytes=round(event.nbytes * kinds.get(key, 0) / expected[key]))

    return [scaled(event) for event in planned.events]
