"""The report page, live: a small read-only server whose page grows while runs do.

    /            the page
    /data.json   what it shows now
    /events      server-sent events: a number that grows whenever there is something new

All visitors share one document, which is made again when a run folder changed, and so seldom that making it takes a
small share of one core. Who is not on this machine needs a token.
"""

import hmac
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from html import escape
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from splitcast.base.errors import SplitcastError, imports_allowed
from splitcast.base.files import writer
from splitcast.run.records import RunFolder
from splitcast.studies.report.document import clean, document
from splitcast.studies.report.page import render
from splitcast.studies.report.runs import Run, read_runs

EVERY_S = 1.0
"""Between two looks at the folders."""
SHARE = 0.02
"""Of one core that is spent on making documents, at most."""
PAUSE_S = 60.0
"""Between two documents, at most."""
VISITORS = 100
"""Who listen at the same time; more are sent away."""

Sites = Callable[[], list[dict[str, Any]]]
"""A deployment's parties: name, connected, certificate days."""


class Live:
    """What is shown now, and a number that grows with it."""

    def __init__(self, paths: Sequence[Path], *, trust: bool = False, sites: Sites | None = None) -> None:
        self.paths, self.trust, self.sites = paths, trust, sites
        self.changed = threading.Condition()
        self.version, self.content = 0, b""
        self.page = waiting_page("no round has ended yet")
        self._seen: Any = None
        self._made: dict[str, Any] | SplitcastError | None = None
        self._runs: list[dict[str, Any]] = []
        self._pace: dict[str, tuple[float, int, float | None]] = {}
        self._next = 0.0

    def look(self) -> None:
        """Make the document again if a folder changed, and tell if that or a party of a deployment did."""
        parties, folders = self.sites() if self.sites else [], self._signature()
        before, known = self._seen or (None, None)
        changed = folders != before and time.monotonic() >= self._next
        if not changed and parties == known:
            return
        if changed:
            self._make()
        if isinstance(self._made, dict):
            failing = {name: reason for run in self._runs for name, reason in run["failures"].items()}
            told = [party | {"trouble": failing.get(party["name"], "")} for party in parties]
            made = self._made | {"live": clean({"runs": self._runs, "sites": told})}
            content, page = json.dumps(made, allow_nan=False).encode(), render(made, live=True).encode()
        else:
            content, page = b"", waiting_page(str(self._made or "no round has ended yet"))
        with self.changed:
            self._seen, self.content, self.page = (folders if changed else before, parties), content, page
            self.version += 1
            self.changed.notify_all()

    def _make(self) -> None:
        """The document; the next one after a pause that is as much longer as this one took work."""
        first, started = not isinstance(self._made, dict), time.thread_time()
        try:
            with nullcontext() if self.trust else imports_allowed([]):
                runs = read_runs(self.paths)
                self._made = document(runs)
            self._runs = [self._state(run) for run in runs]
        except SplitcastError as error:  # nothing yet, or a folder that is being made
            self._made = error
        if not first:  # which imports what it needs
            self._next = time.monotonic() + min((time.thread_time() - started) / SHARE, PAUSE_S)

    def wait(self, known: int, seconds: float) -> int:
        """The number of the document once it is another than ``known``, or after some time."""
        with self.changed:
            self.changed.wait_for(lambda: self.version != known, seconds)
            return self.version

    def _signature(self) -> list[tuple[str, int, int]]:
        found = []
        for path in self.paths:
            for folder in [path, *(entry for entry in sorted(path.glob("*")) if entry.is_dir())]:
                run = RunFolder(folder)
                found.append((str(folder), writer(folder) or 0, 0))
                for file in (run.rounds_file, run.summary_file, run.config_file):
                    try:
                        about = file.stat()
                    except OSError:
                        continue
                    found.append((str(file), about.st_mtime_ns, about.st_size))
        return found

    def _state(self, run: Run) -> dict[str, Any]:
        """Where a run stands: its pace is measured between looks."""
        now, done, planned = time.monotonic(), len(run.rounds), run.config.train.rounds
        path = str(run.path)
        before, then, pace = self._pace.get(path, (now, done, None))
        if done > then and now > before:
            pace = (done - then) / (now - before)
        if done != then or path not in self._pace:
            self._pace[path] = (now, done, pace)
        finished, training = run.summary is not None, writer(run.path) is not None
        return {
            "name": run.name,
            "state": "finished" if finished else "training" if training else "stopped",
            "round": done,
            "rounds": planned,
            "rounds_per_s": pace if training and not finished else None,
            "left_s": (planned - done) / pace if pace and training and not finished else None,
            "failures": {} if finished else failing(run),
        }


def failing(run: Run) -> dict[str, str]:
    """Sites that failed since everybody took part last, and why; who is left alone for a while is still one of them."""
    found = dict(run.rounds[-1].failures or {})
    if run.config.train.participation < 1:
        return found
    for record in reversed(run.rounds):
        if record.clients >= run.config.data.clients:
            break
        found = (record.failures or {}) | found
    return found


def waiting_page(reason: str) -> bytes:
    """Until there is something to show; asks again by itself."""
    head = '<meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>splitcast</title>'
    body = f"<p>Nothing to show yet: {escape(reason)}</p>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'.encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], live: Live, token: str) -> None:
        self.live, self.token, self.listeners = live, token, threading.BoundedSemaphore(VISITORS)
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version, timeout = "splitcast", "", 30

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not self._allowed(parts.query):
            self._answer(b"401: ask whoever started splitcast watch for the address with its token\n", status=401)
        elif parts.path == "/":
            self._answer(self.server.live.page, "text/html; charset=utf-8")
        elif parts.path == "/data.json":
            self._answer(self.server.live.content, "application/json")
        elif parts.path == "/events":
            self._events()
        else:
            self._answer(b"404\n", status=404)

    def _allowed(self, query: str) -> bool:
        """The token, or this machine by its own name: a page elsewhere must not read through a visitor's browser."""
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get("splitcast")
        except CookieError:
            cookie = None
        for offered in (*parse_qs(query).get("token", [])[:1], *([cookie.value] if cookie else [])):
            if self.server.token and hmac.compare_digest(offered.encode(), self.server.token.encode()):
                return True
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        here = ipaddress.ip_address(self.client_address[0]).is_loopback
        return here and (host == "localhost" or _is_loopback(host))

    def _answer(self, content: bytes, kind: str = "text/plain", status: int = 200) -> None:
        self.send_response(HTTPStatus(status))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self._close_head()
        self.wfile.write(content)

    def _close_head(self) -> None:
        given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        if self.server.token and hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.send_header("Set-Cookie", f"splitcast={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        for name, value in (("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer")):
            self.send_header(name, value)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def _events(self) -> None:
        if not self.server.listeners.acquire(blocking=False):
            self._answer(b"503: too many visitors\n", status=503)
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self._close_head()
            known = -1
            while True:
                version = self.server.live.wait(known, 15)
                self.wfile.write(b": still here\n\n" if version == known else f"data: {version}\n\n".encode())
                self.wfile.flush()
                known = version
        except OSError:  # the visitor left
            pass
        finally:
            self.server.listeners.release()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: visits are nobody's business."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(live: Live, host: str, port: int, token: str) -> tuple[ThreadingHTTPServer, str]:
    """Start serving; returns the server, to be shut down, and the address to visit."""
    if not token and not (host == "localhost" or _is_loopback(host)):
        raise SplitcastError(f"host: {host} can be reached from elsewhere and needs a token")
    try:
        server = _Server((host, port), live, token)
    except (OSError, OverflowError) as error:
        raise SplitcastError(f"port: cannot listen on {host}:{port}: {error}") from None
    live.look()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=_look_on, args=(live,), daemon=True).start()
    where = f"http://{host if ':' not in host else f'[{host}]'}:{server.server_address[1]}/"
    return server, where + (f"?token={token}" if token else "")


def _look_on(live: Live) -> None:
    while True:
        time.sleep(EVERY_S)
        live.look()
