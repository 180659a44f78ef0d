"""The protocol over NVIDIA FLARE's Collab API: calls with a timeout, and a site whose methods the server may call.

FLARE's own serialiser carries plain dictionaries, numbers, strings and bytes; no pickle is involved, and messages are
the bytes of `remote.wire`. Clients are long-lived processes, so a program that waits is still there in the next call.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from time import perf_counter
from typing import Any

from nvflare.collab import collab
from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from splitcast.remote.site import Site
from splitcast.remote.sites import Reply, Request
from splitcast.remote.wire import Refused, shown

SERVER = "server"
"""What FLARE calls the server of a job. It knows callers by their certificates, whatever they say themselves."""


class FlareTransport:
    """Calls sites through their proxies; all at once, each with its own arguments."""

    def __init__(self, proxies: Mapping[int, Any], timeout_s: float) -> None:
        self.proxies, self.timeout_s = proxies, timeout_s
        self.pool = ThreadPoolExecutor(max(1, len(proxies)), thread_name_prefix="call")

    def call(self, method: str, requests: Mapping[int, Request]) -> dict[int, Reply]:
        calls = {n: self.pool.submit(self._one, n, method, request) for n, request in requests.items()}
        return {n: call.result() for n, call in calls.items()}

    def _one(self, n: int, method: str, request: Request) -> Reply:
        started = perf_counter()
        try:
            answer = getattr(self.proxies[n](timeout=self.timeout_s), method)(**request)
        except RunAborted:
            raise
        except CollabCallError as error:
            # a site that raised has said of what kind; a timeout comes as itself, anything else lost as a bare text
            said = isinstance(error.cause, str) and error.cause_type != "str"
            return Reply(None, _one_line(error), perf_counter() - started, said)
        if not isinstance(answer, dict):
            return Reply(None, "refused: not an answer to what was asked", perf_counter() - started, said=True)
        return Reply(answer, "", perf_counter() - started)


def _one_line(error: CollabCallError) -> str:
    text = str(error.cause).strip() or error.cause_type
    for name in ("Refused", "SplitcastError"):
        text = text.removeprefix(f"{name}: ")
    return "unreachable" if "target_unreachable" in text else " ".join(text.split())[:300]


def for_the_server(call: Callable[..., Any]) -> Any:
    """Publish a method of a `FlareSite`: for the server of its job and nobody else."""

    @wraps(call)
    def guarded(site: "FlareSite", /, *args: Any, **kwargs: Any) -> Any:
        if collab.caller != SERVER:
            raise Refused(f"caller: {shown(collab.caller)} is not the server of this job")
        site.prepare()
        return call(site, *args, **kwargs)

    return collab.publish(guarded)


class FlareSite(Site):
    """A `Site` that the server of its job, and nobody else, may call."""

    def prepare(self) -> None:
        """What has to be done in this process before the first call of the server."""

    join = for_the_server(Site.join)
    restore = for_the_server(Site.restore)
    adopt = for_the_server(Site.adopt)
    hand_in = for_the_server(Site.hand_in)
    keep = for_the_server(Site.keep)
    begin = for_the_server(Site.begin)
    proceed = for_the_server(Site.proceed)
    move = for_the_server(Site.move)
