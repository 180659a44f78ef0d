"""A sweep from Python: schemes and seeds, several trainings at a time, a table with intervals. Run: python sweep.py"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from splitcast import Config, with_values
from splitcast.studies.results import as_latex, as_markdown, over_seeds, read_rows, write_tables
from splitcast.studies.sweep.points import points
from splitcast.studies.sweep.sweep import sweep


def main(rounds: int = 20) -> None:
    """Two schemes, two seeds each."""
    config = with_values(Config(), arch="cnn-small", rounds=rounds, eval_every=10, batch=16)
    chosen = points(config, {"scheme": ["sfl", "sfl-ga"], "seed": [0, 1]})
    with TemporaryDirectory() as folder:
        failed = sweep(chosen, Path(folder), jobs=2)
        rows = read_rows(Path(folder))
        write_tables(Path(folder), rows)  # results.csv, table.md, table.tex
    assert not failed and len(rows) == 4
    table = over_seeds(rows)
    print(as_markdown(table))
    print(as_latex(table))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
