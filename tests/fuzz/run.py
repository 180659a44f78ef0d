"""Run random cases: python tests/fuzz/run.py --seconds 60 --seed 1 [--class NAME] [--number N]."""

import argparse
import faulthandler
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.commands import Commands
from fuzz.core import run_case, run_cases
from fuzz.files import Arrays, Policies, Traces
from fuzz.folders import Folders
from fuzz.settings import Configurations, Deployments
from fuzz.sources import Photos, Tables
from fuzz.wire import Servers, Sites

SUBJECTS = {
    each.name: each
    for each in (
        Configurations,
        Commands,
        Folders,
        Servers,
        Sites,
        Traces,
        Policies,
        Arrays,
        Tables,
        Photos,
        Deployments,
    )
}


def main():
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="for all classes together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--class", dest="name", choices=SUBJECTS, help="only this class")
    options.add_argument("--number", type=int, help="only this case of the class")
    options.add_argument("--cases", type=int, help="at most so many of each class")
    given = options.parse_args()
    names = [given.name] if given.name else list(SUBJECTS)
    found = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            subject = SUBJECTS[name](Path(folder))
            if given.number is not None:
                word, finding = run_case(subject, given.seed, given.number)
                print(f"{name} {given.seed} {given.number}: {word}\n{finding or ''}")
                found += finding is not None
                continue
            faulthandler.dump_traceback_later(given.seconds + 120, exit=True)  # a hang that no signal ends
            outcome = run_cases(subject, given.seed, given.seconds / len(names), given.cases)
            faulthandler.cancel_dump_traceback_later()
            print("\n".join(outcome.lines()), flush=True)
            found += len(outcome.findings)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
