"""What travels between a server and sites elsewhere: packed on one side, checked and unpacked on the other.

A message is {"kind", "format", "shape", "data"}: what it is, the name of its format, the shape of what it holds, and
exactly the bytes that the ledger counts. Whoever unpacks one knows from the scheme's program what it must be, and
refuses everything else before anything is allocated for it. There is nothing in a message that could run: no pickle, no
names of classes. Plain values beside messages (numbers, texts) pass the checks below, and nothing else is looked at.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.errors import SplitcastError
from splitcast.base.rounding import Draw
from splitcast.training.differences import row_shape
from splitcast.training.weights import Weights

Packed = dict[str, Any]
MODEL = "model"
SHORT = 200
"""Most characters of a text from elsewhere."""


class Refused(SplitcastError):  # noqa: N818
    """Something that is not what the protocol allows; the text says why."""


def pack(kind: str, x: Tensor, codec: Codec, draw: Draw | None = None) -> Packed:
    """Pack x (b, *d)."""
    return {"kind": kind, "format": codec.name, "shape": list(x.shape), "data": codec.encode(x, draw).numpy().tobytes()}


def unpack(message: Any, kind: str, codec: Codec, shape: Sequence[int], *, rows: int = 0) -> Tensor:
    """Unpack what must be of this kind, format and shape, and finite; with ``rows`` the sender chose the first size."""
    if not isinstance(message, dict) or set(message) != {"kind", "format", "shape", "data"}:
        raise Refused(f"{kind}: is not a message")
    if message["kind"] != kind:
        raise Refused(f"{kind}: was expected, not {shown(message['kind'])}")
    if message["format"] != codec.name:
        raise Refused(f"{kind}: has format {shown(message['format'])}, not {codec.name!r}")
    found = message["shape"]
    if not isinstance(found, list | tuple) or len(found) != len(shape) or any(type(n) is not int for n in found):
        raise Refused(f"{kind}: has shape {shown(found)}, not {list(shape)}")
    if rows and 1 <= found[0] <= rows:
        shape = (found[0], *shape[1:])
    if list(found) != list(shape):
        raise Refused(f"{kind}: has shape {shown(found)}, not {list(shape)}")
    data = message["data"]
    if not isinstance(data, bytes):
        raise Refused(f"{kind}: holds a {type(data).__name__}, not bytes")
    if codec.varies:
        if len(data) > codec.bound(shape):
            raise Refused(f"{kind}: has {len(data)} bytes, more than {codec.bound(shape)}")
    elif len(data) != codec.nbytes(shape):
        raise Refused(f"{kind}: has {len(data)} bytes, not {codec.nbytes(shape)}")
    payload = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    try:
        values = codec.decode(payload, shape)
    except SplitcastError as error:
        raise Refused(f"{kind}: {error}") from None
    if tuple(values.shape) != tuple(shape):
        raise Refused(f"{kind}: decodes to shape {tuple(values.shape)}, not {tuple(shape)}")
    if not all_finite(values):
        raise Refused(f"{kind}: holds NaN or infinite values")
    return values


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no infinity; one pass without a mask."""
    return not values.numel() or all(bool(torch.as_tensor(bound).isfinite()) for bound in torch.aminmax(values))


def pack_weights(weights: Weights) -> Packed:
    """Parameters with all that moves with them."""
    return pack(MODEL, weights.flat(), FP32)


def unpack_weights(message: Any, like: Weights) -> Weights:
    """Weights of the slots and shapes of ``like``."""
    return Weights.unflat(unpack(message, MODEL, FP32, (like.travelling(),)), like)


def pack_change(rows: Tensor, codec: Codec) -> Packed:
    """What a half has moved (`training.differences`)."""
    return pack(MODEL, rows, codec)


def unpack_change(message: Any, values: int, codec: Codec) -> Tensor:
    """The same for a half of so many values, in rows."""
    return unpack(message, MODEL, codec, row_shape(values))


def payload_bytes(value: Any) -> int:
    """Bytes of all messages in a request or an answer, however deep they are nested."""
    total, rest = 0, [value]
    while rest:
        part = rest.pop()
        if isinstance(part, bytes):
            total += len(part)
        elif isinstance(part, dict | list | tuple):
            rest.extend(part.values() if isinstance(part, dict) else part)
    return total


def shown(value: Any) -> str:
    """A value from elsewhere for a message to people: one short line of printable characters."""
    text = repr(value) if isinstance(value, str | int | float | bool | type(None)) else f"a {type(value).__name__}"
    text = text if len(text) <= 60 else text[:60] + "…"
    return "".join(c if c.isprintable() else "?" for c in text)


def integer(value: Any, name: str, low: int, high: int) -> int:
    """A whole number within bounds."""
    if type(value) is not int or not low <= value <= high:
        raise Refused(f"{name}: {shown(value)} is not a whole number from {low} to {high}")
    return value


def number(value: Any, name: str, low: float, high: float) -> float:
    """A finite number within bounds."""
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise Refused(f"{name}: {shown(value)} is not a number from {low:g} to {high:g}")
    return float(value)


def text(value: Any, name: str, most: int = SHORT) -> str:
    """A text of at most so many characters."""
    if type(value) is not str or len(value) > most:
        raise Refused(f"{name}: {shown(value)} is not a text of at most {most} characters")
    return value


def flag(value: Any, name: str) -> bool:
    """True or False."""
    if type(value) is not bool:
        raise Refused(f"{name}: {shown(value)} is neither True nor False")
    return value


def items(value: Any, name: str, most: int) -> list[Any]:
    """A list of at most so many things."""
    if not isinstance(value, list | tuple) or len(value) > most:
        raise Refused(f"{name}: {shown(value)} is not a list of at most {most}")
    return list(value)
