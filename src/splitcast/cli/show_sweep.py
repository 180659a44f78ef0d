"""What a person sees of a sweep."""

import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from splitcast.cli.options import SweepOptions
from splitcast.cli.progress import Bars
from splitcast.studies.results import over_seeds, read_rows, shown, write_tables
from splitcast.studies.sweep.points import Point, parse_axis, points, read_plan
from splitcast.studies.sweep.sweep import OnProgress, sweep


def run_sweep(options: SweepOptions) -> None:
    """`splitcast sweep`."""
    over, runs = read_plan(options.plan) if options.plan else ({}, [])
    over |= dict(parse_axis(axis) for axis in options.over)
    chosen = points(options.settings, over, runs, options.draw)
    again = f"splitcast sweep with the same options goes on in {shlex.quote(str(options.out))}"
    with Bars() as bars:
        told = None if options.output.silent else _told(bars, chosen)
        try:
            failed = sweep(chosen, options.out, options.jobs, options.on, options.track, told)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(again) from None
    rows = read_rows(options.out)
    files = write_tables(options.out, rows)
    if options.output.json:
        print(json.dumps({"rows": rows, "failed": failed}))
        return
    console = Console()
    console.print(_table(options.out, rows))
    console.print("written: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} of {len(chosen)} failed; {again}", highlight=False, soft_wrap=True)


def _told(bars: Bars, chosen: list[Point]) -> OnProgress:
    """One bar over the rounds of all runs."""
    task = bars.add(f"{len(chosen)} runs, rounds", sum(point.config.train.rounds for point in chosen))
    done: dict[str, int] = {}

    def told(point: Point, rounds: int) -> None:
        done[point.name] = rounds
        bars.move(task, sum(done.values()))

    return told


def _table(out: Path, rows: list[dict[str, object]]) -> Table:
    merged = over_seeds(rows)
    table = Table(title=f"{out}: mean ± half width of the 95 % confidence interval")
    for head in merged[0]:
        table.add_column(head, justify="left" if isinstance(merged[0][head], str) else "right")
    for row in merged:
        table.add_row(*(shown(value) for value in row.values()))
    return table
