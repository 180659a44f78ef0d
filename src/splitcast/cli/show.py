"""What a person sees in the terminal: progress, tables, results."""

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.bench import Row as BenchRow
from splitcast.bench.rows import heard_by
from splitcast.cli.options import CompareOptions, Output
from splitcast.cli.progress import Bars
from splitcast.cutting.auto import is_auto
from splitcast.data.loading import kind_of
from splitcast.model.split import SplitModel
from splitcast.run.headline import headline
from splitcast.run.loop import OnRound, train
from splitcast.run.parts import chosen
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.run.track import tracking
from splitcast.studies import compare as comparison
from splitcast.training.measure import ACCURACY, Measure, measure


class Watch(Bars):
    """A bar per run with what it is judged by, MB, simulated seconds and rounds per second."""

    def __call__(self, name: str, config: Config, before: Sequence[RoundRecord] = ()) -> OnRound:
        """Watch a run; ``before`` are the rounds of one that goes on."""
        return self._watched(self.add(name, config.train.rounds), config, before)

    def _watched(self, task: TaskID, config: Config, before: Sequence[RoundRecord]) -> OnRound:
        tokens = tokens_per_client(config)
        started, seen, sent, clock, value = time.perf_counter(), 0, 0, 0.0, ""

        def show(record: RoundRecord) -> None:
            nonlocal seen, sent, clock, value
            if not seen:
                done = [r for r in before if r.round < record.round]
                sent, clock = sum(r.bytes for r in done), sum(r.latency_s for r in done)
            seen += 1
            sent += record.bytes
            clock += record.latency_s
            if record.tests():
                value = _told(headline(config, [record]), record)
            speed = seen / (time.perf_counter() - started)
            pace = f"{tokens * record.clients * speed:,.0f} tokens/s" if tokens else f"{speed:4.1f}/s"
            self.move(task, record.round, f"{value:>7} {sent / 1e6:7.1f} MB {clock:7.1f} s in the cell {pace}")

        return show

    def briefly(self, name: str, config: Config) -> OnRound:
        """The same, gone when the run is done."""
        task = self.add(name, config.train.rounds)
        show = self._watched(task, config, ())

        def show_and_go(record: RoundRecord) -> None:
            show(record)
            if record.round == config.train.rounds:
                self.remove(task)

        return show_and_go


def run_training(config: Config, out: Path | None, resume: Path | None, track: Sequence[str], output: Output) -> None:
    """`splitcast train`."""
    if resume:
        if out:
            raise SplitcastError("out: a run goes on in its own folder; leave --out out")
        run, folder = RunFolder(resume), resume
        before = run.rounds(run.checkpointed())
    else:
        before = []
        folder = out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.split.scheme}"
    watch = Watch()
    show = None if output.silent else watch(config.split.scheme, config, before)
    told = False
    try:
        with watch, tracking(track, folder, config) as tracked:

            def on_round(record: RoundRecord) -> None:
                nonlocal told
                tracked(record)
                if show and not told:  # not before: bad input prints one line only
                    _say_chosen(watch, config, RunFolder(folder).config())
                    told = True
                if show:
                    show(record)

            result = train(config, folder, resume=resume is not None, on_round=on_round)
    except KeyboardInterrupt:
        known = RunFolder(folder).config_file.is_file()
        raise KeyboardInterrupt(f"go on with: splitcast train --resume {folder}" if known else "") from None
    summary = result.summary
    if output.json:
        print(json.dumps(summary | {"folder": str(folder)}))
    else:
        print(line_of(summary, f"{summary['latency_s']:.1f} s simulated", folder))


def _say_chosen(watch: Watch, config: Config, taken: Config) -> None:
    """What a run takes where its configuration left it open."""
    found = chosen(config, taken)
    if cut := found.pop("cut", None):
        found = {"cut": told_cuts(cut)} | found
    if found:
        watch.say(f"{taken.split.scheme} takes " + ", ".join(f"{name} {value}" for name, value in found.items()))


def told_cuts(cut: int | tuple[int, ...] | str) -> str:
    """Cuts of all clients in a few words.

    >>> told_cuts((1, 4, 1, 4, 4)), told_cuts(2)
    ('1 for 2 clients, 4 for 3 clients', '2 for all clients')
    """
    if not isinstance(cut, tuple):
        return f"{cut} for all clients"
    return ", ".join(f"{v} for {n} client{'s' * (n > 1)}" for v, n in sorted(Counter(cut).items()))


def tokens_per_client(config: Config) -> int:
    """Of a client's batches of texts in a round; 0 of other data."""
    if kind_of(config.data.dataset) != "text":
        return 0
    return config.train.batch * config.train.local_steps * config.data.sequence_length


def line_of(summary: Mapping[str, Any], seconds: str, folder: Path) -> str:
    """The result of a training: accuracy, or what else it is judged by first of all measures; drift where known."""
    drift = summary["drift"]
    said = [
        f"{summary['scheme']}: {_judged(summary)}",
        f" after {summary['rounds']} rounds, {(summary['up_bytes'] + summary['down_bytes']) / 1e6:.1f} MB, {seconds}",
        "" if drift is None else f", drift {drift:.3g}",
        _worst_client(summary),
        f"; run folder {folder}",
    ]
    return "".join(said)


def _told(judged: Measure, record: RoundRecord) -> str:
    value = record.test(judged.name)
    said = "" if value is None else judged.text(value)
    return said if judged == ACCURACY or not said else f"{judged.name} {said}"


def _judged(summary: Mapping[str, Any]) -> str:
    judged, tested = _headline(summary), dict(summary.get("test", {}))
    value = tested.pop(judged.name, summary["accuracy"] if judged == ACCURACY else None)
    if judged == ACCURACY and value is not None:
        return judged.text(value)
    first = [f"{judged.name} {judged.text(value)}"] if value is not None else []
    return ", ".join(first + [f"{name} {measure(name).text(each)}" for name, each in tested.items()])


def _worst_client(summary: Mapping[str, Any]) -> str:
    worst = summary.get("clients", {}).get("worst")
    return "" if worst is None else f", worst client {_headline(summary).text(worst)}"


def _headline(summary: Mapping[str, Any]) -> Measure:
    told = summary.get("headline") or asdict(ACCURACY)
    return Measure(told["name"], told["unit"], lower=told["lower"])


def run_comparison(options: CompareOptions) -> None:
    """`splitcast compare`."""
    config, out, output, target = options.settings, options.out, options.output, options.target
    judged = headline(config)
    if target is not None:
        judged.check("target", target)
    watch = Watch()
    with watch, ExitStack() as stack:

        def watched(name: str, each: Config) -> OnRound:
            show = None if output.silent else watch(name, each)
            if show and is_auto(config):
                watch.say(f"{name} takes cut {told_cuts(each.split.cut)}")
            tracked = stack.enter_context(tracking(options.track, out / name, each))

            def on_round(record: RoundRecord) -> None:
                tracked(record)
                if show:
                    show(record)

            return on_round

        try:
            runs = comparison.compare(config, options.schemes, out, watched, options.seeds)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"go on with the same command; {out} keeps what is done") from None
    deadline_s, needs = config.train.deadline_s, comparison.memories(out, options.schemes)
    target, rows = comparison.rows(runs, target, judged, needs, deadline_s)
    if output.json:
        named = [{judged.name if key == "value" else key: v for key, v in asdict(row).items()} for row in rows]
        print(json.dumps({"target": target if math.isfinite(target) else None, "rows": named}))
        return
    goal = f"to {judged.goal(target)}"
    several = options.seeds > 1
    title = comparison.title_of(config) + (f"; mean of {options.seeds} seeds ± 95 % interval" if several else "")
    table = Table(title=title, padding=(0, 0), show_edge=False)
    table.add_column("scheme", min_width=max(len(row.name) for row in rows))
    goals = (f"rounds {goal}", f"MB {goal}", f"s {goal}")
    late = ("outage",) if deadline_s else ()
    for heading in (judged.name, "MB", "s", "median, p95 of a round", *late, "J", *goals, "drift", "client MB"):
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))  # no word is broken
    for row in rows:
        table.add_row(
            row.name,
            _with_half(judged, row.value, row.half),
            f"{row.megabytes:.1f}",
            f"{row.seconds:.1f}",
            f"{row.median_s:.3g}, {row.p95_s:.3g}",
            *([] if row.outage is None else [f"{row.outage:.1%}"]),
            f"{row.joules:.3g}",
            "never" if row.rounds_to_target is None else f"{row.rounds_to_target:.4g}",
            "never" if row.megabytes_to_target is None else f"{row.megabytes_to_target:.1f}",
            "never" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}",
            f"{row.drift:.3g}",
            "–" if row.memory_mb is None else f"{row.memory_mb:.1f}",
        )
    console = Console()
    console.print(table)
    from_ = "; ".join(f"{row.name}: {row.paper}" for row in rows if row.paper)
    console.print(f"from {from_}", highlight=False)
    console.print(f"figure: {out / 'comparison.png'}", highlight=False)
    console.print(f"as an interactive page: splitcast report {shlex.quote(str(out))}", highlight=False, soft_wrap=True)


def _with_half(judged: Measure, value: float | None, half: float | None) -> str:
    """A mean with the half width of its interval.

    >>> _with_half(ACCURACY, 0.932, 0.0123), _with_half(ACCURACY, 0.932, None)
    ('93.20 ± 1.2 %', '93.20 %')
    """
    if value is None:
        return "–"
    number, space, unit = judged.text(value).partition(" ")
    return number + ("" if half is None else f" ± {judged.scale * half:.2g}") + space + unit


def print_profile(model: SplitModel) -> None:
    """`splitcast profile`."""
    title = f"{model.size:,} parameters; per sample: smashed values, MFLOP forward / backward"
    table = Table(title=title, padding=(0, 0))
    table.add_column("cut", justify="right")
    table.add_column("behind")
    for heading in ("φ(v)", "φ/q", "privacy", "smashed", "client MFLOP", "server MFLOP"):
        table.add_column(heading, justify="right")
    for row in model.profile():
        table.add_row(
            str(row.cut),
            model.names[row.cut - 1],
            f"{row.client_parameters:,}",
            f"{row.client_fraction:.4g}",
            f"{row.privacy:.4g}",
            f"{row.smashed_values:,}",
            f"{row.client_forward_flops / 1e6:.3f} / {row.client_backward_flops / 1e6:.3f}",
            f"{row.server_forward_flops / 1e6:.3f} / {row.server_backward_flops / 1e6:.3f}",
        )
    Console().print(table)


def measured(bench: Callable[[int], list[BenchRow]], repeats: int) -> list[BenchRow]:
    """The figures of a benchmark, with a bar while it runs."""
    tasks: dict[str, TaskID] = {}
    with Bars() as bars:

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add(what, total)
            bars.move(tasks[what], done)

        with heard_by(told):
            return bench(repeats)


def print_bench(rows: Sequence[BenchRow]) -> None:
    """`splitcast bench`."""
    table = Table()
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for row in rows:
        table.add_row(row.name, f"{row.value:.4g}", row.unit)
    Console().print(table)
