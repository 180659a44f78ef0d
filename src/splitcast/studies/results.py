"""Runs of a folder as a tidy table, and what they have in common over seeds: mean and 95 % confidence interval.

One row per run: the options in which runs differ, how it ended, the task's measures, megabytes, simulated seconds,
median and 95 % quantile of a round's, the share of rounds that missed their deadline, joules of all clients, and the
memory that the client needs which needs most.
"""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from splitcast.base.config import leaves
from splitcast.base.errors import SplitcastError
from splitcast.run.records import RunFolder
from splitcast.studies.sweep.sweep import read_plan

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
STATUS, SEED = "status", "seed"
DONE = "done"
COSTS = {"outage": "outage", "joules": "energy_j", "client_mb": "client_memory_mb"}
"""Columns, and where summaries have them: outage with a deadline only, others in those of later versions"""


def results(folder: Path | str) -> "pd.DataFrame":
    """The runs below a folder, a sweep's or any others', as a pandas frame (extra `tables`)."""
    try:
        import pandas as pd
    except ImportError:
        raise SplitcastError("results: pandas is not installed; install the extra `tables`") from None
    return pd.DataFrame(read_rows(Path(folder)))


def read_rows(folder: Path) -> list[Row]:
    """One row for every run below a folder."""
    runs = read_plan(folder) or _found(folder)
    if not runs:
        raise SplitcastError(f"results: no runs in {folder}; give the folder of a sweep or of a comparison")
    options = list(dict.fromkeys(name for run in runs.values() for name in run["values"]))
    rows = [_row(folder / name, run, options) for name, run in runs.items()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [{column: row.get(column) for column in columns} for row in rows]


def _found(folder: Path) -> dict[str, Any]:
    """Runs that no sweep made, with the options in which they differ."""
    paths = sorted(path.parent for path in folder.glob("*/config.toml")) if folder.is_dir() else []
    configs = {path.name: leaves(RunFolder(path).config()) for path in paths}
    differing = [
        name
        for name in next(iter(configs.values()), {})
        if name == "scheme" or len({repr(config[name]) for config in configs.values()}) > 1
    ]
    return {
        name: {"values": {option: config[option] for option in differing}, "failed": ""}
        for name, config in configs.items()
    }


def _row(path: Path, run: Any, options: Sequence[str]) -> Row:
    row: Row = {option: run["values"].get(option) for option in options}
    folder = RunFolder(path)
    if not folder.summary_file.is_file():
        begun = len(folder.rounds()) if folder.config_file.is_file() else 0
        return row | {STATUS: run["failed"] or (f"stopped after round {begun}" if begun else "not begun")}
    summary = folder.summary()
    return row | {
        STATUS: DONE,
        "rounds": summary["rounds"],
        **summary.get("test", {"accuracy": summary["accuracy"]}),
        "megabytes": (summary["up_bytes"] + summary["down_bytes"]) / 1e6,
        "seconds": summary["latency_s"],
        **{f"round_{name}_s": s for name, s in summary.get("round_s", {}).items() if name in ("median", "p95")},
        **{name: summary[key] for name, key in COSTS.items() if key in summary},
    }


class Estimate(NamedTuple):
    """A mean over seeds with the half width of its 95 % confidence interval (Student's t); NaN from one run."""

    mean: float
    half: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of some runs.

    >>> mean, half, n = estimate([1.0, 2.0, 3.0])
    >>> mean, round(half, 3), n  # 4.3027 * 1 / sqrt(3)
    (2.0, 2.484, 3)
    """
    n = len(values)
    half = _T[min(n - 2, len(_T) - 1)] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(statistics.fmean(values), half, n)


_T = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last serves for more."""


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ only in the seed as one: estimates in place of numbers, and ``n``; failures keep a row each."""
    columns = list(rows[0]) if rows else []
    options = [column for column in columns[: columns.index(STATUS)] if column != SEED]
    measures = columns[columns.index(STATUS) + 1 :]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(repr(row[option]) for option in options)
        groups.setdefault((*key, "" if row[STATUS] == DONE else row[STATUS]), []).append(row)
    found = []
    for group in groups.values():
        first = group[0]
        merged = {option: first[option] for option in options} | {STATUS: first[STATUS], "n": len(group)}
        for measure in measures:
            values = [row[measure] for row in group if row[measure] is not None]
            merged[measure] = estimate(values) if values else None
        found.append(merged)
    return found


def as_csv(rows: Sequence[Row]) -> str:
    """Comma-separated, numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def shown(value: Any, plus_minus: str = "±") -> str:
    """A cell for people.

    >>> shown(Estimate(0.91234, 0.0123, 3)), shown(Estimate(12.5, math.nan, 1)), shown(None), shown("sfl")
    ('0.912 ± 0.012', '12.5', '', 'sfl')
    """
    if isinstance(value, Estimate):
        if not value.half > 0:  # one run, or all alike
            return f"{value.mean:.5g}"
        digits = max(0, 1 - math.floor(math.log10(value.half)))
        return f"{value.mean:.{digits}f} {plus_minus} {value.half:.{digits}f}"
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def as_markdown(rows: Sequence[Row]) -> str:
    """A table for a README or a page."""
    heads = list(rows[0])
    body = [[shown(row[head]).replace("|", "\\|") for head in heads] for row in rows]
    lines = [heads, ["---"] * len(heads), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SPECIAL |= {"\\": r"\textbackslash{}"}


def as_latex(rows: Sequence[Row]) -> str:
    """A ``tabular`` for a paper; needs the package booktabs."""

    def escaped(text: str) -> str:
        return "".join(_SPECIAL.get(letter, letter) for letter in text).replace("±", "$\\pm$")

    heads = list(rows[0])
    numeric = [all(isinstance(row[head], int | float | Estimate | None) for row in rows) for head in heads]
    lines = [
        f"\\begin{{tabular}}{{{''.join('r' if right else 'l' for right in numeric)}}}",
        "\\toprule",
        " & ".join(escaped(head) for head in heads) + r" \\",
        "\\midrule",
        *(" & ".join(escaped(shown(row[head])) for head in heads) + r" \\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def write_tables(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """``results.csv`` with every run, and the table over seeds as ``table.md`` and ``table.tex``."""
    merged = over_seeds(rows)
    texts = {"results.csv": as_csv(rows), "table.md": as_markdown(merged), "table.tex": as_latex(merged)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]
