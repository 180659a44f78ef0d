"""Who the sites are, how they are called, and what becomes of those that fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from splitcast.base.errors import SplitcastError
from splitcast.remote.guard import Guard
from splitcast.remote.wire import Refused, number, payload_bytes

PARTS = ("upload", "server", "download", "client")
ROWS = 10**6
FIRST_PAUSE, LONGEST_PAUSE = 2, 64
"""Rounds for which a site is left alone after it failed too often; they double each time."""
AGAIN = ("join", "restore", "adopt", "hand_in", "keep", "begin", "proceed")
"""Calls that may be repeated when they were lost: the second does what the first did."""
QUICK_S = 5.0
"""A call that was lost later than this is not worth repeating."""
LONGEST_S = 1e6
"""No call takes longer, whatever a site says."""
Answer = dict[str, Any]
Request = Mapping[str, Any]
T = TypeVar("T")
Read = Callable[[int, Answer], T]
"""What is in the answer of a site."""


class Reply(NamedTuple):
    """What a call brought back: an answer, or None and the reason."""

    answer: Answer | None
    reason: str
    seconds: float
    """of the whole call, both ways"""
    said: bool = False
    """whether the site itself said no; else the call was lost on the way"""


class Transport(Protocol):
    """Calls the sites; every failure, a late answer included, is a `Reply` with a reason."""

    def call(self, method: str, requests: Mapping[int, Request]) -> dict[int, Reply]:
        """Call one method of several sites at once, each with arguments of its own."""
        ...


class NoSites(SplitcastError):  # noqa: N818
    """Nobody is left to train with."""


@dataclass(frozen=True)
class Limits:
    """What the server puts up with."""

    drop_after: int = 3
    """Failures in a row after which a site is left alone for a while."""
    min_sites: int = 1
    """Sites without which training stops."""
    site_bytes: int = 0
    """Most bytes of messages to and from one site in a job; 0 is no limit."""
    total_bytes: int = 0
    """The same for all sites together; 0 is no limit."""
    max_rows: tuple[int, ...] = ()
    """Most rows that each site may say it has: its weight in the average follows from them. A million if empty."""
    outlier: float = 100.0
    """How many times larger than usual what a site sends may be before it is refused; 0 lets everything pass."""
    average: str = "mean"
    """How client halves are averaged: mean, clipped, median or trimmed."""

    def rows_of(self, n: int) -> int:
        """Most rows of a site."""
        return self.max_rows[n] if self.max_rows else ROWS


@dataclass
class Sites:
    """The sites of a job and the book that is kept about them."""

    names: Sequence[str]
    transport: Transport
    limits: Limits
    present: set[int]
    """numbers of the sites that are called"""
    strikes: dict[int, int] = field(default_factory=dict)
    """failures in a row"""
    failures: dict[int, str] = field(default_factory=dict)
    """last reason of every site that failed since the last page"""
    traffic: dict[int, int] = field(default_factory=dict)
    """bytes of messages per site"""
    seconds: dict[str, float] = field(default_factory=dict)
    """wall-clock seconds since the last page, by `PARTS`"""
    resting: dict[int, tuple[int, int]] = field(default_factory=dict)
    """sites that failed too often: the round in which they are asked again, and for how long they rested"""
    round: int = 0
    """the present round"""
    calls: int = 0
    """numbers every call, so that a site knows a late one"""

    def __post_init__(self) -> None:
        self.guard = Guard(self.limits.outlier)

    def turn_page(self) -> tuple[dict[str, float], dict[str, str]]:
        """Seconds and failures since the last page; who did not fail since then has a clean record."""
        page = {part: self.seconds.get(part, 0.0) for part in PARTS}, self.named_failures()
        self.strikes = {n: count for n, count in self.strikes.items() if n in self.failures}
        self.failures, self.seconds = {}, {}
        return page

    def ask(
        self, method: str, requests: Mapping[int, Request], part: str, read: Callable[[int, Answer], T]
    ) -> dict[int, T]:
        """Call sites and return what `read` finds in the answers that came, in the order of the clients.

        Who answers with anything else has failed. The slowest call counts as ``part``, its own work apart.
        """
        self.calls += 1
        open_ = {n: {**request, "call": self.calls} for n, request in requests.items() if self._allowed(n, request)}
        replies = self.transport.call(method, open_) if open_ else {}
        lost = {n: open_[n] for n, r in replies.items() if r.answer is None and not r.said and r.seconds < QUICK_S}
        if lost and method in AGAIN:
            replies = replies | self.transport.call(method, lost)
        found: dict[int, T] = {}
        slowest, own = 0.0, 0.0
        for n in sorted(replies):
            answer, reason, seconds, _ = replies[n]
            if answer is None:
                self.fault(n, reason)
                continue
            self.traffic[n] = self.traffic.get(n, 0) + payload_bytes(answer)
            try:
                mine = number(answer.pop("seconds", None), "seconds", 0, LONGEST_S)
                found[n] = read(n, answer)
            except Refused as error:
                self.fault(n, f"refused: {error}")
            except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, RecursionError):
                self.fault(n, "refused: not an answer to what was asked")
            else:
                if seconds > slowest:
                    slowest, own = seconds, min(mine, seconds)
        self.spend("client", own)
        self.spend(part, slowest - own)
        self._check_total()
        return found

    def spend(self, part: str, seconds: float) -> None:
        """Add to a part of this round's time."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def fault(self, n: int, reason: str) -> None:
        """Note that a site failed; too often, and it is dropped."""
        first_today = n not in self.failures
        self.failures[n] = reason
        if first_today or n not in self.strikes:  # one that was welcomed back today begins anew
            self.strikes[n] = self.strikes.get(n, 0) + 1
        if self.strikes[n] >= self.limits.drop_after:
            self.drop(n, f"{reason} (failure {self.strikes[n]} in a row: left alone for a while)")

    def drop(self, n: int, reason: str, *, for_good: bool = False) -> None:
        """Leave a site alone for a while, or for good."""
        self.failures[n] = reason
        self.present.discard(n)
        pause = min(2 * self.resting.get(n, (0, FIRST_PAUSE // 2))[1], LONGEST_PAUSE)
        self.resting[n] = (self.round + 1 + pause, pause)
        if for_good:
            self.resting.pop(n)
        if len(self.present) < self.limits.min_sites:
            left = f"{len(self.present)} of {len(self.names)} left, {self.limits.min_sites} needed"
            raise NoSites(f"sites: {left}; {self.why()}")

    def due(self) -> list[int]:
        """Sites that have rested long enough."""
        return sorted(n for n, (again, _) in self.resting.items() if again <= self.round and n not in self.present)

    def welcome(self, n: int) -> None:
        """A site is back; if it fails again soon, it will rest longer."""
        self.present.add(n)
        self.strikes.pop(n, None)

    def named_failures(self) -> dict[str, str]:
        """Reasons by name of site."""
        return {self.names[n]: reason for n, reason in sorted(self.failures.items())}

    def why(self) -> str:
        """The reasons in one line."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.named_failures().items()) or "none answered"

    def _allowed(self, n: int, request: Request) -> bool:
        if n not in self.present and n not in self.resting:
            return False
        used = self.traffic.get(n, 0) + payload_bytes(dict(request))
        if self.limits.site_bytes and used > self.limits.site_bytes:
            self.drop(n, f"more than site_bytes = {self.limits.site_bytes} travelled: dropped", for_good=True)
            return False
        self.traffic[n] = used
        return True

    def _check_total(self) -> None:
        if self.limits.total_bytes and sum(self.traffic.values()) > self.limits.total_bytes:
            raise SplitcastError(f"total_bytes: more than {self.limits.total_bytes} travelled; raise it to go on")
