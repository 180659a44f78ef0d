"""`splitcast reproduce` in the terminal: progress, figures, and the table of claims."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError, one_of
from splitcast.cli.options import Output
from splitcast.cli.show import Watch
from splitcast.studies.reproduce import FIGURES, TEXTS, claims, text
from splitcast.studies.reproduce.study import Study

FULL = ("mnist", "fashion-mnist", "cifar10")


def run_reproduction(
    figures: Sequence[str], dataset: str, quick: bool, full: bool, seeds: int, out: Path, output: Output
) -> None:
    """`splitcast reproduce`."""
    for name in figures:
        one_of("figure", name, [*FIGURES, "all"])
    known = [name for name in FIGURES if name not in TEXTS] if "all" in figures else []
    names = list(dict.fromkeys([*known, *(name for name in figures if name != "all")]))
    if not names:
        raise SplitcastError(f"figure: name at least one of {', '.join(FIGURES)}, or all")
    watch = Watch()
    study, flags = make_study(dataset, quick, full, seeds, out)
    if not output.silent:
        study = replace(study, watch=watch.briefly)
    if set(names) - set(TEXTS):
        _ = study.dataset  # a data set that is not there is refused before anything is trained
    console, rows = Console(stderr=True, quiet=output.silent), []
    with watch:
        for name in names:
            started, command = time.perf_counter(), f"splitcast reproduce {name} {flags}"
            folder = out / study.base.data.dataset
            if name in TEXTS:
                folder, command = out / text.DATASET, command.replace(f" --dataset {study.base.data.dataset}", "")
            drawn = FIGURES[name](study)
            drawn.save(folder / name)
            claims.keep(folder, name, drawn, command, list(FIGURES))
            claims.across(out)
            rows += claims.rows(name, drawn, command)
            console.print(f"{name}: {folder / name}.png ({time.perf_counter() - started:.0f} s)", highlight=False)
    if output.json:
        print(json.dumps([dict(zip(claims.HEADINGS, row, strict=True)) for row in rows]))
        return
    table = Table(*claims.HEADINGS[:-1], title="claims")
    for row in rows:
        table.add_row(*row[:-1])
    Console().print(table)
    Console().print(f"figures, CSV files and claims.md: {folder}", highlight=False)


def make_study(dataset: str, quick: bool, full: bool, seeds: int, out: Path) -> tuple[Study, str]:
    """The study that the options describe, and the flags that say so."""
    if seeds < 0:
        raise SplitcastError(f"seeds: {seeds}; must be at least 1")
    if quick == full:
        raise SplitcastError("reproduce: choose --quick (embedded data, minutes) or --full (real data, hours)")
    if quick and dataset not in ("", "mnist-mini"):
        raise SplitcastError(f"dataset: {dataset!r} with --quick, which uses the embedded mnist-mini; use --full")
    if full:
        dataset = one_of("dataset", dataset or "mnist", FULL)
        sizes = {"batch": 32, "rounds": 100, "eval_every": 10, "checkpoint_every": 50}
    else:
        dataset, sizes = "mnist-mini", {"batch": 16, "rounds": 40, "eval_every": 4, "checkpoint_every": 20}
    base = with_values(Config(), dataset=dataset, **sizes)
    flags = (f"--full --dataset {dataset}" if full else "--quick") + (f" --seeds {seeds}" if seeds else "")
    target = 0.94 if dataset == "mnist" else None
    return Study(base, tuple(range(seeds or (3 if full else 2))), out, full, target), flags
