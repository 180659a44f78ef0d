"""Several schemes on the same data with the same seeds: one table, one figure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.sections import shown_cut
from splitcast.data import Dataset
from splitcast.run.auto import as_begun, decided
from splitcast.run.headline import headline
from splitcast.run.loop import OnRound, ended, train
from splitcast.run.parts import load_data, make_simulator, resolved, with_clients
from splitcast.run.recording import outage
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.run.selecting import make_clock, make_selector
from splitcast.schemes.schemes import PAPERS
from splitcast.studies.compare_figure import plot_comparison
from splitcast.studies.curves import Runs
from splitcast.studies.results import estimate
from splitcast.studies.target import Spent, all_reach, spent, to_reach
from splitcast.training.measure import ACCURACY, Measure

Watch = Callable[[str, Config], OnRound | None]
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Row:
    """One scheme in the comparison: means over its seeds."""

    name: str
    value: float | None
    """what it is judged by, of the test after the last round"""
    megabytes: float
    """bytes on the air of the whole run / 10^6"""
    seconds: float
    """simulated seconds of the whole run"""
    median_s: float
    p95_s: float
    """of the simulated seconds of its rounds: a few deep fades carry their mean"""
    outage: float | None
    """share of rounds that missed their deadline; None without one"""
    joules: float
    """of all clients, the whole run"""
    rounds_to_target: float | None
    """None if a seed never gets there; so are the next two"""
    megabytes_to_target: float | None
    seconds_to_target: float | None
    drift: float
    n: int
    """seeds"""
    half: float | None
    """half width of the 95 % confidence interval of ``value``; None for one seed"""
    memory_mb: float | None
    """that the client needs which needs most; None where a run does not say"""
    paper: str
    """where the scheme is from; empty for one of the user's"""


def compare(
    config: Config,
    schemes: Sequence[str],
    out: Path,
    watch: Watch = lambda name, config: None,
    seeds: int = 1,
) -> dict[str, list[list[RoundRecord]]]:
    """Train every scheme with ``seeds`` seeds from the configuration's on, in a run folder each, and draw the figure.

    Finished runs are kept, stopped ones go on. Returns the rounds by scheme and seed.
    """
    if len(set(schemes)) != len(schemes) or not schemes:
        raise SplitcastError(f"schemes: name each scheme once, got {' '.join(schemes) or 'none'}")
    if not 1 <= seeds <= MOST_SEEDS:
        raise SplitcastError(f"seeds: {seeds}; must be 1..{MOST_SEEDS}")
    if RunFolder(out).config_file.is_file():
        raise SplitcastError(f"out: {out} is a run itself; choose another folder")
    dataset, judged = load_data(config), headline(config)
    config = with_clients(config, dataset)
    configs = {name: resolved(with_values(config, scheme=name)) for name in schemes}
    for each in configs.values():  # refuse bad input before anything is trained
        made = resolved(decided(each, dataset))
        simulator = make_simulator(made, dataset)
        make_selector(made, simulator, make_clock(made, simulator), dataset)
    first = config.train.seed
    runs: dict[str, list[list[RoundRecord]]] = {name: [] for name in schemes}
    for seed in range(first, first + seeds):  # all schemes with one seed, then with the next: more seeds may come later
        for name, each in configs.items():
            folder = out / (name if seed == first else f"{name},seed={seed}")
            runs[name].append(_run(with_values(each, seed=seed), folder, dataset, watch, judged))
    plot_comparison(runs, out / "comparison", title_of(config), judged)
    return runs


def _run(config: Config, path: Path, dataset: Dataset, watch: Watch, judged: Measure) -> list[RoundRecord]:
    """The rounds of one training: done, continued, or read."""
    folder = RunFolder(path)
    known = folder.config_file.is_file()
    config = resolved(as_begun(config, folder) if known else decided(config, dataset))
    if known and resolved(folder.config()) != config:
        raise SplitcastError(f"out: {path} holds a run with another configuration; choose another folder")
    if not known and not folder.is_vacant():
        raise SplitcastError(f"out: {path} holds something else; choose another folder")
    if not folder.summary_file.is_file():
        train(config, path, resume=known, on_round=watch(path.name, config), dataset=dataset)
    rounds = folder.rounds()
    if not ended(config, rounds, judged):
        raise SplitcastError(f"run: {folder.rounds_file} has lost rounds; delete {path} to train it again")
    return rounds


def title_of(config: Config) -> str:
    """What the runs of a comparison have in common, for people."""
    spread = {
        "iid": "IID",
        "dirichlet": f"Dirichlet({config.data.alpha:g})",
        "shards": f"{config.data.classes_per_client} classes per client",
    }.get(config.data.partition, config.data.partition)
    policy = config.policy.policy
    cut = f"cut {shown_cut(config.split.cut)}" if policy == "fixed" else f"policy {policy}"
    return (
        f"{config.data.dataset}, {spread}, {config.data.clients} clients, {cut}, "
        f"batch {config.train.batch}, {config.train.local_steps} local step(s), lr {config.train.lr:g}"
    )


def memories(out: Path, schemes: Sequence[str]) -> dict[str, float]:
    """What the runs of a comparison say that a client needs, in MB."""
    found = {name: RunFolder(out / name).summary().get("client_memory_mb") for name in schemes}
    return {name: float(need) for name, need in found.items() if isinstance(need, int | float)}


def rows(
    runs: Mapping[str, Runs],
    target: float | None = None,
    judged: Measure = ACCURACY,
    memory_mb: Mapping[str, float] | None = None,
    deadline_s: float = 0.0,
) -> tuple[float, list[Row]]:
    """The table, and the target: given, or the best round number (a whole per cent) that every run reaches."""
    if target is None:
        target = all_reach([records for each in runs.values() for records in each], judged)
    else:
        judged.check("target", target)
    needs = memory_mb or {}
    return target, [_row(name, each, target, judged, needs.get(name), deadline_s) for name, each in runs.items()]


def _quantile(records: Sequence[RoundRecord], share: float) -> float:
    return float(np.quantile([record.latency_s for record in records], share))


def _row(name: str, runs: Runs, target: float, judged: Measure, memory_mb: float | None, deadline_s: float) -> Row:
    whole = [spent(records) for records in runs]
    hits = [hit for records in runs if (hit := to_reach(records, target, judged))]
    values = [value for records in runs if (value := records[-1].test(judged.name)) is not None]

    def to_target(cost: Callable[[Spent], float]) -> float | None:
        return statistics.mean(map(cost, hits)) if len(hits) == len(runs) else None

    return Row(
        name=name,
        value=statistics.fmean(values) if values else None,
        megabytes=statistics.fmean(each.megabytes for each in whole),
        seconds=statistics.fmean(each.seconds for each in whole),
        median_s=statistics.fmean(_quantile(records, 0.5) for records in runs),
        p95_s=statistics.fmean(_quantile(records, 0.95) for records in runs),
        outage=statistics.fmean(outage(records, deadline_s) for records in runs) if deadline_s else None,
        joules=statistics.fmean(sum(r.metrics.get("energy_j", 0.0) for r in records) for records in runs),
        rounds_to_target=to_target(lambda hit: hit.rounds),
        megabytes_to_target=to_target(lambda hit: hit.megabytes),
        seconds_to_target=to_target(lambda hit: hit.seconds),
        drift=statistics.fmean(records[-1].drift or 0.0 for records in runs),
        n=len(runs),
        half=estimate(values).half if len(values) > 1 else None,
        memory_mb=memory_mb,
        paper=PAPERS.get(name, ""),
    )
