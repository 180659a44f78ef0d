"""The protocol over NVIDIA FLARE's Collab API: calls with a timeout, and a site whose methods the server may call.

FLARE's own serialiser carries plain dictionaries, numbers, strings and bytes; no pickle is involved, and messages are
the bytes of `remote.wire`. Clients are long-lived processes, so a program that waits is still there in the next call.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from importlib import import_module
from time import perf_counter
from typing import Any

import numpy as np
import torch
from nvflare.collab import collab
from nvflare.collab.api.exceptions import CollabCallError, RunAborted
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

from splitcast.remote.site import Site
from splitcast.remote.sites import Reply, Request
from splitcast.remote.wire import Refused, shown

SERVER = "server"
"""What FLARE calls the server of a job. It knows callers by their certificates, whatever they say themselves."""
MOST_TEXT = 10_000


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
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text[:MOST_TEXT].split()))
    return "unreachable" if "target_unreachable" in text else text[:300]


class _Unknown(fobs.Decomposer):  # type: ignore[misc]
    """Stands for a type that is not spoken here."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def supported_type(self) -> type:
        return self.kind

    def decompose(self, target: Any, manager: Any = None) -> Any:
        raise Refused(f"message: holds a {self.kind.__name__}, which is not a plain value")

    def recompose(self, data: Any, manager: Any = None) -> Any:
        raise Refused(f"message: holds a {self.kind.__name__}, which is not a plain value")


def speak_plainly() -> None:
    """Unlearn the types that FLARE sends as a reference and fetches from the sender: no limit of a message's size holds
    for them. The protocol has dictionaries, lists, numbers, texts and bytes."""
    registry = import_module("nvflare.fuel.utils.fobs.fobs")
    for kind in (np.ndarray, torch.Tensor):
        registry._decomposers[registry.get_class_name(kind)] = _Unknown(kind)
    for dot, handler in list(registry._dot_handlers.items()):
        if isinstance(handler, ViaDownloaderDecomposer):
            del registry._dot_handlers[dot]


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
