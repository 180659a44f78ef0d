"""`splitcast reproduce` in the terminal: progress, figures, and the table of claims."""

import json
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError, one_of
from splitcast.cli.options import ReproduceOptions
from splitcast.cli.show import Watch
from splitcast.studies.reproduce import FIGURES, TEXTS, claims, text
from splitcast.studies.reproduce.study import Study

FULL = ("mnist", "fashion-mnist", "cifar10")
PARTITIONS = ("iid", "shards")


def run_reproduction(options: ReproduceOptions) -> None:
    """`splitcast reproduce`."""
    figures, out, output = options.figures, options.out, options.output
    for name in figures:
        one_of("figure", name, [*FIGURES, "all"])
    known = [name for name in FIGURES if name not in TEXTS] if "all" in figures else []
    names = list(dict.fromkeys([*known, *(name for name in figures if name != "all")]))
    if not names:
        raise SplitcastError(f"figure: name at least one of {', '.join(FIGURES)}, or all")
    watch = Watch()
    study, flags = make_study(options)
    if not output.silent:
        study = replace(study, watch=watch.briefly)
    if set(names) - set(TEXTS):
        _ = study.dataset  # a data set that is not there is refused before anything is trained
    console, rows, began = Console(stderr=True, quiet=output.silent), [], time.perf_counter()
    with watch:
        for name in names:
            started, command = time.perf_counter(), f"splitcast reproduce {name} {flags}"
            folder = out / study.name
            if name in TEXTS:
                folder, command = out / text.DATASET, command.replace(f" --dataset {study.base.data.dataset}", "")
            drawn = FIGURES[name](study)
            drawn.save(folder / name)
            claims.keep(folder, name, drawn, command, list(FIGURES))
            claims.across(out)
            rows += claims.rows(name, drawn, command)
            console.print(f"{name}: {folder / name}.png ({time.perf_counter() - started:.0f} s)", highlight=False)
    console.print(f"in all {(time.perf_counter() - began) / 60:.1f} min", highlight=False)
    if output.json:
        print(json.dumps([dict(zip(claims.HEADINGS, row, strict=True)) for row in rows]))
        return
    table = Table(*claims.HEADINGS[:-1], title="claims")
    for row in rows:
        table.add_row(*row[:-1])
    Console().print(table)
    Console().print(f"figures, CSV files and claims.md: {folder}", highlight=False)


def make_study(options: ReproduceOptions) -> tuple[Study, str]:
    """The study that the options describe, and the flags that say so."""
    dataset, full, seeds, some = options.dataset, options.full, options.seeds, options.eval_samples
    for field, value in (("seeds", seeds), ("eval_samples", some)):
        if value < 0:
            raise SplitcastError(f"{field}: {value}; must be at least 1, or 0 for the default")
    if options.quick == full:
        raise SplitcastError("reproduce: choose --quick (embedded data, minutes) or --full (real data, hours)")
    if options.quick and dataset not in ("", "mnist-mini"):
        raise SplitcastError(f"dataset: {dataset!r} with --quick, which uses the embedded mnist-mini; use --full")
    partition = one_of("partition", options.partition, PARTITIONS)
    sizes: dict[str, Any] = {"batch": 32, "rounds": 100, "eval_every": 10, "checkpoint_every": 50}
    if full:
        dataset = one_of("dataset", dataset or "mnist", FULL)
    else:
        dataset = "mnist-mini"
        sizes = {"arch": "cnn-small", "lr": 0.07, "batch": 16, "rounds": 80, "eval_every": 8, "checkpoint_every": 20}
    base = with_values(Config(), dataset=dataset, partition=partition, eval_samples=some, **sizes)
    said = [
        f"--full --dataset {dataset}" if full else "--quick",
        f"--partition {partition}" if partition != "iid" else "",
        f"--seeds {seeds}" if seeds else "",
        f"--eval-samples {some}" if some else "",
    ]
    target = 0.94 if dataset == "mnist" else None
    study = Study(base, tuple(range(seeds or (3 if full else 2))), options.out, full, target)
    return study, " ".join(filter(None, said))
