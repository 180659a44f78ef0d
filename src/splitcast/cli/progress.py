"""How far something is: bars in a terminal, elsewhere a plain line now and then. Always on stderr."""

import time
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

EVERY_S = 15.0
"""Between two plain lines."""


@dataclass
class _Task:
    name: str
    total: int
    began: float = field(default_factory=lambda: time.monotonic())
    first: int | None = None
    """where it was when it was seen first: what goes on did not start at 0"""

    def text(self, done: int, status: str) -> str:
        self.first = done if self.first is None else self.first
        pace = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        left = f", {clock((self.total - done) / pace)} left" if pace else ""
        return f"{self.name}: {done} of {self.total}{' ' if status else ''}{' '.join(status.split())}{left}"


class Bars:
    """Any number of bars; nothing is shown before the first is moved, since bad input must print one line only."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.console = Console(stderr=True) if stream is None else Console(file=stream)
        self._bars = Progress(
            TextColumn("{task.description:8}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._tasks: dict[TaskID, _Task] = {}
        self._said = time.monotonic()

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars.live.is_started:  # else it would print an empty line
            self._bars.stop()

    def add(self, name: str, total: int) -> TaskID:
        """A new bar."""
        task = self._bars.add_task(name, total=total, status="")
        self._tasks[task] = _Task(name, total)
        return task

    def move(self, task: TaskID, done: int, status: str = "") -> None:
        """To where a bar is now."""
        if self.console.is_terminal:
            self._bars.start()
            self._bars.update(task, completed=done, status=status)
            return
        line = self._tasks[task].text(done, status)
        if time.monotonic() - self._said >= EVERY_S:
            self._said = time.monotonic()
            self.say(line)

    def remove(self, task: TaskID) -> None:
        """A bar that is done and of no more interest."""
        self._bars.remove_task(task)

    def say(self, text: str) -> None:
        """A line above the bars, as it is."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """For people.

    >>> clock(42.4), clock(200), clock(7300)
    ('42 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
