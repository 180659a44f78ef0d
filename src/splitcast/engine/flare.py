"""The protocol over NVIDIA FLARE's Collab API: calls with a timeout, and a site whose methods the server may call.

FLARE's own serialiser carries plain dictionaries, numbers, strings and bytes; no pickle is involved, and messages are
the bytes of `engine.wire`. Clients are long-lived processes, so the graph of `forward` is still there in `backward`.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from nvflare.collab import collab
from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from splitcast.engine.roster import Reply, Request
from splitcast.engine.site import Site


class FlareLine:
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
            return Reply(None, _one_line(error), perf_counter() - started)
        if not isinstance(answer, dict):
            return Reply(None, "refused: not an answer to what was asked", perf_counter() - started)
        return Reply(answer, "", perf_counter() - started)


def _one_line(error: CollabCallError) -> str:
    text = str(error.cause).strip() or error.cause_type
    for name in ("Refused", "SplitcastError"):
        text = text.removeprefix(f"{name}: ")
    return "unreachable" if "target_unreachable" in text else " ".join(text.split())[:300]


class FlareSite(Site):
    """A `Site` that the server of its job, and nobody else, may call."""

    join = collab.publish(Site.join)
    restore = collab.publish(Site.restore)
    adopt = collab.publish(Site.adopt)
    hand_in = collab.publish(Site.hand_in)
    keep = collab.publish(Site.keep)
    forward = collab.publish(Site.forward)
    backward = collab.publish(Site.backward)
    train = collab.publish(Site.train)
    recut = collab.publish(Site.recut)
