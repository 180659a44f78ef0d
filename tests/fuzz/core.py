"""What a case is, the limits it runs under, and what counts as a finding.

A case is a function of (class, seed, number) alone, so that a finding can be run again from these three.
"""

import random
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from splitcast.base.errors import SplitcastError

SECONDS = 60.0
"""Of one case."""
BYTES = 3 * 2**29
"""That a case may ask for, above what the process has."""
LONGEST_LINE = 3000
STATM = Path("/proc/self/statm")


class Finding(Exception):  # noqa: N818
    """What was done with bad input is not what it should be."""


class Hang(BaseException):
    """A case took too long."""


class Subject:
    """A class of cases; made once, in a folder of its own."""

    name = ""

    def __init__(self, folder):
        self.folder = folder

    def case(self, rng):
        """One case: returns a word for the statistics, or raises."""
        raise NotImplementedError


@dataclass
class Outcome:
    """What came of the cases of a class."""

    name: str
    seed: int
    cases: int = 0
    words: Counter = field(default_factory=Counter)
    findings: list = field(default_factory=list)
    """(number, text)"""

    def lines(self):
        """For people."""
        words = ", ".join(f"{count} {word}" for word, count in self.words.most_common())
        yield f"{self.name:12} {self.cases:6} cases: {words}; {len(self.findings)} findings"
        alike = Counter(text.splitlines()[-1] for _, text in self.findings)
        for number, text in self.findings:
            many = alike.pop(text.splitlines()[-1], 0)
            if many:
                yield f"  --class {self.name} --seed {self.seed} --number {number} ({many} like it)"
                yield from (f"    {line}" for line in text.splitlines())


def one_line(text):
    """A message as a user may see it."""
    if not text or len(text) > LONGEST_LINE or any(letter in text for letter in "\n\r\x00\u2028\u2029\x1b"):
        raise Finding(f"not a message of one line: {text[:300]!r}")
    return text


def attempt(call, /, *args, **kwargs):
    """(result, None), or (None, the refusal in one line); whatever else is raised goes on."""
    try:
        return call(*args, **kwargs), None
    except SplitcastError as error:
        return None, one_line(str(error))


def expect(good, text):
    """A finding unless it is as it should be."""
    if not good:
        raise Finding(text)


@contextmanager
def limited(seconds=SECONDS, more_bytes=BYTES):
    """Within, too long a time is a `Hang` and too much memory a MemoryError."""

    def stop(*_):
        raise Hang(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if STATM.exists():
        used = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_case(subject, seed, number):
    """The word of one case, and the text of its finding, if it is one."""
    rng = random.Random(f"{subject.name}/{seed}/{number}")
    try:
        with warnings.catch_warnings(), limited():
            warnings.simplefilter("ignore")
            return subject.case(rng), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error)[:2000]}"
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        return "found", f"{said}\n{' > '.join(where[-8:])}"


def run_cases(subject, seed, seconds, most=None, most_findings=100, least=0):
    """Cases 0, 1, 2 ... of a subject, for so long or so many, and ``least`` however long they take."""
    outcome, end = Outcome(subject.name, seed), time.monotonic() + seconds
    while (outcome.cases < least or time.monotonic() < end) and outcome.cases != most:
        if len(outcome.findings) == most_findings:
            break
        word, finding = run_case(subject, seed, outcome.cases)
        outcome.words[word] += 1
        if finding:
            outcome.findings.append((outcome.cases, finding))
        outcome.cases += 1
    return outcome
