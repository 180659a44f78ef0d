"""Several schemes on the same data with the same seeds: one table, one figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.run.headline import headline
from splitcast.run.loop import (
    OnRound,
    ended,
    load_data,
    make_clock,
    make_selector,
    make_simulator,
    resolved,
    train,
    with_clients,
)
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.studies.compare_figure import plot_comparison
from splitcast.studies.target import all_reach, spent, to_reach
from splitcast.training.measure import ACCURACY, Measure

Watch = Callable[[str, Config], OnRound | None]


@dataclass(frozen=True)
class Row:
    """One scheme in the comparison."""

    name: str
    value: float | None
    """what it is judged by, of the test after the last round"""
    megabytes: float
    """bytes on the air of the whole run / 10^6"""
    seconds: float
    """simulated seconds of the whole run"""
    rounds_to_target: int | None
    megabytes_to_target: float | None
    seconds_to_target: float | None
    drift: float


def compare(
    config: Config, schemes: Sequence[str], out: Path, watch: Watch = lambda name, config: None
) -> dict[str, list[RoundRecord]]:
    """Train every scheme, in a run folder each, and draw the figure. Finished runs are kept, stopped ones go on."""
    if len(set(schemes)) != len(schemes) or not schemes:
        raise SplitcastError(f"schemes: name each scheme once, got {' '.join(schemes) or 'none'}")
    if RunFolder(out).config_file.is_file():
        raise SplitcastError(f"out: {out} is a run itself; choose another folder")
    dataset, judged = load_data(config), headline(config)
    config = with_clients(config, dataset)
    configs = {name: resolved(with_values(config, scheme=name)) for name in schemes}
    for each in configs.values():  # refuse bad input before anything is trained
        simulator = make_simulator(each, dataset)
        make_selector(each, simulator, make_clock(each, simulator), dataset)
    runs = {}
    for name, each in configs.items():
        folder = RunFolder(out / name)
        known = folder.config_file.is_file()
        if known and resolved(folder.config()) != each:
            raise SplitcastError(f"out: {folder.path} holds a run with another configuration; choose another folder")
        if not known and not folder.is_vacant():
            raise SplitcastError(f"out: {folder.path} holds something else; choose another folder")
        if not folder.summary_file.is_file():
            train(each, folder.path, resume=known, on_round=watch(name, each), dataset=dataset)
        runs[name] = folder.rounds()
        if not ended(each, runs[name], judged):
            raise SplitcastError(f"run: {folder.rounds_file} has lost rounds; delete {folder.path} to train it again")
    plot_comparison(runs, out / "comparison", title_of(config), judged)
    return runs


def title_of(config: Config) -> str:
    """What the runs of a comparison have in common, for people."""
    spread = {
        "iid": "IID",
        "dirichlet": f"Dirichlet({config.data.alpha:g})",
        "shards": f"{config.data.classes_per_client} classes per client",
    }.get(config.data.partition, config.data.partition)
    policy = config.policy.policy
    cut = f"cut {','.join(str(cut) for cut in config.split.cuts)}" if policy == "fixed" else f"policy {policy}"
    return (
        f"{config.data.dataset}, {spread}, {config.data.clients} clients, {cut}, "
        f"batch {config.train.batch}, {config.train.local_steps} local step(s), lr {config.train.lr:g}"
    )


def rows(
    runs: Mapping[str, Sequence[RoundRecord]], target: float | None = None, judged: Measure = ACCURACY
) -> tuple[float, list[Row]]:
    """The table, and the target: given, or the best round number (a whole per cent) that every run reaches."""
    if target is None:
        target = all_reach(runs.values(), judged)
    else:
        judged.check("target", target)
    return target, [_row(name, records, target, judged) for name, records in runs.items()]


def _row(name: str, records: Sequence[RoundRecord], target: float, judged: Measure) -> Row:
    whole, first = spent(records), to_reach(records, target, judged)
    return Row(
        name=name,
        value=records[-1].test(judged.name),
        megabytes=whole.megabytes,
        seconds=whole.seconds,
        rounds_to_target=first.rounds if first else None,
        megabytes_to_target=first.megabytes if first else None,
        seconds_to_target=first.seconds if first else None,
        drift=records[-1].drift or 0.0,
    )
