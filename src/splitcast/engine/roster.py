"""Who the sites are, how they are called, and what becomes of those that fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from splitcast.engine.wire import Refused, payload_bytes
from splitcast.errors import SplitcastError

PARTS = ("upload", "server", "download", "client")
Answer = dict[str, Any]
Request = Mapping[str, Any]
T = TypeVar("T")


class Reply(NamedTuple):
    """What a call brought back: an answer, or None and the reason."""

    answer: Answer | None
    reason: str
    seconds: float
    """of the whole call, both ways"""


class Line(Protocol):
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
    """Failures in a row after which a site is called no more."""
    min_sites: int = 1
    """Sites without which training stops."""
    site_bytes: int = 0
    """Most bytes of messages to and from one site in a job; 0 is no limit."""
    total_bytes: int = 0
    """The same for all sites together; 0 is no limit."""


@dataclass
class Roster:
    """The sites of a job and the book that is kept about them."""

    names: Sequence[str]
    line: Line
    limits: Limits
    present: set[int]
    """numbers of the sites that are still called"""
    strikes: dict[int, int] = field(default_factory=dict)
    """failures in a row"""
    failures: dict[int, str] = field(default_factory=dict)
    """last reason of every site that failed since the last page"""
    traffic: dict[int, int] = field(default_factory=dict)
    """bytes of messages per site"""
    seconds: dict[str, float] = field(default_factory=dict)
    """wall-clock seconds since the last page, by `PARTS`"""

    def turn_page(self) -> tuple[dict[str, float], dict[str, str]]:
        """Seconds and failures since the last page; who did not fail since then has a clean record."""
        page = {part: self.seconds.get(part, 0.0) for part in PARTS}, self.named_failures()
        self.strikes = {n: count for n, count in self.strikes.items() if n in self.failures}
        self.failures, self.seconds = {}, {}
        return page

    def ask(self, method: str, requests: Mapping[int, Request], part: str) -> dict[int, Answer]:
        """Call sites and return the answers that came; the slowest call counts as ``part``, its own work apart."""
        open_ = {n: request for n, request in requests.items() if self._allowed(n, request)}
        replies = self.line.call(method, open_) if open_ else {}
        if replies:
            slowest = max(replies.values(), key=lambda reply: reply.seconds)
            own = float((slowest.answer or {}).get("seconds", 0.0))
            self.spend("client", own)
            self.spend(part, slowest.seconds - own)
        for n, reply in replies.items():
            if reply.answer is None:
                self.fault(n, reply.reason)
            else:
                self.traffic[n] = self.traffic.get(n, 0) + payload_bytes(reply.answer)
        self._check_total()
        return {n: reply.answer for n, reply in replies.items() if reply.answer is not None}

    def read(self, answers: Mapping[int, Answer], read: Callable[[Answer], T]) -> dict[int, T]:
        """What the answers hold, in the order of the clients; who sent something else has failed."""
        found: dict[int, T] = {}
        for n in sorted(answers):
            try:
                found[n] = read(answers[n])
            except Refused as error:
                self.fault(n, f"refused: {error}")
            except (KeyError, TypeError, ValueError):
                self.fault(n, "refused: not an answer to what was asked")
        return found

    def spend(self, part: str, seconds: float) -> None:
        """Add to a part of this round's time."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def fault(self, n: int, reason: str) -> None:
        """Note that a site failed; too often, and it is dropped."""
        first_today = n not in self.failures
        self.failures[n] = reason
        if first_today:
            self.strikes[n] = self.strikes.get(n, 0) + 1
        if self.strikes[n] >= self.limits.drop_after:
            self.drop(n, f"{reason} (failure {self.strikes[n]} in a row: dropped)")

    def drop(self, n: int, reason: str) -> None:
        """Call a site no more."""
        self.failures[n] = reason
        self.present.discard(n)
        if len(self.present) < self.limits.min_sites:
            left = f"{len(self.present)} of {len(self.names)} left, {self.limits.min_sites} needed"
            raise NoSites(f"sites: {left}; {self.why()}")

    def named_failures(self) -> dict[str, str]:
        """Reasons by name of site."""
        return {self.names[n]: reason for n, reason in sorted(self.failures.items())}

    def why(self) -> str:
        """The reasons in one line."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.named_failures().items()) or "none answered"

    def _allowed(self, n: int, request: Request) -> bool:
        if n not in self.present:
            return False
        used = self.traffic.get(n, 0) + payload_bytes(dict(request))
        if self.limits.site_bytes and used > self.limits.site_bytes:
            self.drop(n, f"more than site_bytes = {self.limits.site_bytes} travelled: dropped")
            return False
        self.traffic[n] = used
        return True

    def _check_total(self) -> None:
        if self.limits.total_bytes and sum(self.traffic.values()) > self.limits.total_bytes:
            raise SplitcastError(f"total_bytes: more than {self.limits.total_bytes} travelled; raise it to go on")
