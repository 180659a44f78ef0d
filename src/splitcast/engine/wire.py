"""Messages between a server and sites elsewhere: packed on one side, checked and unpacked on the other.

A message is {"format", "shape", "data"}: the name of its format, the shape of what it holds, and exactly the bytes that
the ledger counts. Whoever opens one knows from the cut and the codec what it must be, and refuses everything else.
There is nothing in a message that could run: no pickle, no names of classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitcast.engine.state import Half
from splitcast.errors import SplitcastError
from splitcast.schemes.codec import FP32, Codec, label_bytes
from splitcast.schemes.messages import Kind, Ledger
from splitcast.schemes.noise import Draw, Noise
from splitcast.split import Params

Message = dict[str, Any]
_LABELS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Refused(SplitcastError):  # noqa: N818
    """A message that is not what the protocol allows; the text says why."""


def sealed(x: Tensor, codec: Codec, draw: Draw | None = None) -> Message:
    """Pack x (b, *d)."""
    return {"format": codec.name, "shape": list(x.shape), "data": codec.encode(x, draw).numpy().tobytes()}


def opened(message: Any, what: str, codec: Codec, shape: Sequence[int]) -> Tensor:
    """Unpack what must have this format and shape and be finite."""
    data = _checked(message, what, codec.name, shape, codec.nbytes(shape))
    values = codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _EMPTY, shape)
    if not all_finite(values):
        raise Refused(f"{what}: holds NaN or infinite values")
    return values


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no infinity; one pass without a mask."""
    return not values.numel() or all(bound.isfinite() for bound in torch.aminmax(values))


_EMPTY = torch.empty(0, dtype=torch.uint8)


def sealed_labels(y: Tensor, classes: int) -> Message:
    """Pack labels (b,) with as few bytes as the number of classes allows."""
    width = _LABELS[label_bytes(1, classes)]
    return {"format": width.__name__, "shape": list(y.shape), "data": y.numpy().astype(width).tobytes()}


def opened_labels(message: Any, classes: int, count: int) -> Tensor:
    """Unpack ``count`` labels below ``classes``."""
    width = _LABELS[label_bytes(1, classes)]
    data = _checked(message, "labels", width.__name__, (count,), label_bytes(count, classes))
    labels = torch.from_numpy(np.frombuffer(data, width).astype(np.int64))
    if count and int(labels.max()) >= classes:
        raise Refused(f"labels: {int(labels.max())} is not below {classes}, the number of classes")
    return labels


def sealed_params(groups: Iterable[Params], names: Sequence[str]) -> Message:
    """Pack some parameters, group after group (weights, then momentum), in the order of ``names``."""
    values = [group[name].detach().flatten() for group in groups if group for name in names]
    return sealed(torch.cat(values) if values else torch.empty(0), FP32)


def opened_params(message: Any, what: str, names: Sequence[str], like: Params, *, momentum: bool) -> Half:
    """Unpack parameters that have the shapes of ``like``, with their momentum if there is one."""
    count = sum(like[name].numel() for name in names)
    values = opened(message, what, FP32, ((2 if momentum else 1) * count,))
    halves = [
        {
            name: part.view(like[name].shape).clone()
            for name, part in zip(names, torch.split(group, [like[name].numel() for name in names]), strict=True)
        }
        for group in (torch.split(values, count) if count else [values])
    ]
    return Half(halves[0], halves[1] if momentum and count else {})


def payload_bytes(value: Any) -> int:
    """Bytes of all messages in a request or an answer."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(payload_bytes(part) for part in value.values())
    return sum(payload_bytes(part) for part in value) if isinstance(value, list | tuple) else 0


def _checked(message: Any, what: str, format_: str, shape: Sequence[int], nbytes: int) -> bytes:
    if not isinstance(message, dict) or set(message) != {"format", "shape", "data"}:
        raise Refused(f"{what}: is not a message")
    if message["format"] != format_:
        raise Refused(f"{what}: has format {str(message['format'])[:20]!r}, not {format_!r}")
    if not isinstance(message["shape"], list | tuple) or list(message["shape"]) != list(shape):
        raise Refused(f"{what}: has shape {str(message['shape'])[:60]}, not {list(shape)}")
    data = message["data"]
    if not isinstance(data, bytes):
        raise Refused(f"{what}: holds a {type(data).__name__}, not bytes")
    if len(data) != nbytes:
        raise Refused(f"{what}: has {len(data)} bytes, not {nbytes}")
    return data


@dataclass
class Transcript(Ledger):
    """A ledger that also keeps every message a feedback sends, packed."""

    packed: list[tuple[Sequence[int] | None, list[Message]]] = field(default_factory=list)
    """who each message is for, None for all; in the order of the feedback's layout"""

    def carry(self, kind: Kind, x: Tensor, codec: Codec, noise: Noise, clients: Sequence[int] | None = None) -> Tensor:
        ones = [None] if clients is None else [[n] for n in clients]
        messages = [sealed(one, codec, noise.of(kind, who)) for one, who in zip(x, ones, strict=True)]
        self.packed.append((clients, messages))
        shape = tuple(x.shape[1:])
        return torch.stack([opened(message, kind, codec, shape) for message in messages])

    def of(self, client: int) -> list[Message]:
        """The messages for one client."""
        return [messages[0 if who is None else list(who).index(client)] for who, messages in self.packed]
