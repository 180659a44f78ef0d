"""`checkpoint.safetensors`: the tensors of a run after some round, and what they belong to.

The metadata holds the format, the run's identity, the round, the chain of `rounds.jsonl` at that round, the fingerprint
of the data, what the trainer tells about the tensors, and a digest of all this and of every tensor's name, type, shape
and content.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from splitcast.base.errors import SplitcastError
from splitcast.base.files import read_bounded
from splitcast.run.strict import ENTRIES, parsed, shortened

FORMAT = "splitcast-checkpoint-2"
OLD_FORMAT = "splitcast-checkpoint-1"
OWN = ("format", "run", "round", "chain", "samples", "digest")
"""Names of the metadata that are not the trainer's."""
HEADER_BYTES = 10_000_000
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in a file of safetensors."""
OLD_NAMES = {
    "client": "client/trained",
    "client_momentum": "client/opt/momentum",
    "server": "server/trained",
    "server_momentum": "server/opt/momentum",
}
"""First parts of the tensors' names in the older format, and what stands for them."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    tensors: dict[str, Tensor]
    about: dict[str, str]
    """what the trainer told about them"""
    round: int


@dataclass(frozen=True)
class Stored:
    """A checkpoint file whose digest is right, before it is compared with its folder."""

    checkpoint: Checkpoint
    old: bool
    """of the older format: without identity and chain"""
    run: str
    chain: str
    samples: str | None


def pack(
    tensors: Mapping[str, Tensor], about: Mapping[str, str], round_: int, run: str, chain: str, samples: str
) -> list[bytes | memoryview]:
    """The content of a checkpoint file, in parts: a head, and the tensors where they lie."""
    for name in about:
        if name in OWN:
            raise SplitcastError(f"about: {name} is a name of the checkpoint itself; choose another")
    metadata = {"format": FORMAT, "run": run, "round": str(round_), "chain": chain, "samples": samples, **about}
    kept, seen = {}, set[int]()
    for name, value in tensors.items():
        plain = value.detach().cpu().contiguous()
        at = plain.untyped_storage().data_ptr()
        kept[name] = plain.clone() if at in seen else plain  # a file holds no tensor under two names
        seen.add(at)
    metadata["digest"] = _digest(kept, metadata)
    _check(metadata, "about")
    order = sorted(kept, key=lambda name: (-kept[name].element_size(), name))  # so that all are aligned
    head: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        size = kept[name].nbytes
        head[name] = {"dtype": DTYPES[kept[name].dtype], "shape": kept[name].shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(_bytes(kept[name]) for name in order)]


def unpack(file: Path) -> Stored:
    """The content of a checkpoint file, verified in itself; nothing of it is run."""
    content = read_bounded(file, file.stat().st_size if file.is_file() else 0)
    try:
        tensors = load(content)
    except Exception as error:  # of many kinds: the header is foreign
        told = shortened(" ".join(str(error).split()))
        raise SplitcastError(f"checkpoint: {file} is corrupt or truncated ({told})") from None
    metadata = _metadata(file, content)
    version = metadata.get("format")
    if version not in (FORMAT, OLD_FORMAT):
        raise SplitcastError(f"checkpoint: {file} has format {shortened(version)}, not {FORMAT}")
    old = version == OLD_FORMAT
    wanted = ("round", "cut", "copies", "digest") if old else OWN
    for name in wanted:
        if name not in metadata:
            raise SplitcastError(f"checkpoint: {file} is corrupt (its metadata has no {name})")
    if metadata["digest"] != (_old_digest(tensors) if old else _digest(tensors, metadata)):
        raise SplitcastError(f"checkpoint: {file} is corrupt (its contents do not match their digest)")
    about = {name: value for name, value in metadata.items() if name not in OWN}
    found = Checkpoint(_renamed(file, tensors) if old else tensors, about, _round(file, metadata))
    return Stored(found, old, metadata.get("run", ""), metadata.get("chain", ""), metadata.get("samples"))


def round_of(file: Path) -> int:
    """The round of a checkpoint file, from its header alone, which is not verified; 0 if there is no file."""
    if not file.is_file():
        return 0
    with file.open("rb") as opened:
        start = opened.read(8)
        return _round(file, _metadata(file, start + opened.read(min(int.from_bytes(start, "little"), HEADER_BYTES))))


def _metadata(file: Path, content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    try:
        if length > HEADER_BYTES:
            raise ValueError
        header = parsed(content[8 : 8 + length])
        return _check(header.get("__metadata__", {}), f"{file}")
    except (ValueError, AttributeError):
        raise SplitcastError(f"checkpoint: {file} is corrupt (its header is no table of texts)") from None


def _check(metadata: Any, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or len(metadata) > ENTRIES:
        raise SplitcastError(f"checkpoint: {where} is not a table of at most {ENTRIES} texts")
    for name, value in metadata.items():
        if not isinstance(value, str) or max(len(name), len(value)) > ENTRIES:
            raise SplitcastError(
                f"checkpoint: {where} has {shortened(value)} as {shortened(name)}, not a text of {ENTRIES} characters"
            )
        (name + value).encode()
    return metadata


def _round(file: Path, metadata: dict[str, str]) -> int:
    text = metadata.get("round", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise SplitcastError(f"checkpoint: {file} is corrupt (its round is {shortened(text)})")
    return int(text)


def _renamed(file: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for name, value in tensors.items():
        part, _, rest = name.partition("/")
        if part not in OLD_NAMES or not rest:
            raise SplitcastError(f"checkpoint: {file} has an unknown tensor {shortened(name)}")
        made[f"{OLD_NAMES[part]}/{rest}"] = value
    return made


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that is contiguous, where they lie."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _digest(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> str:
    told = sorted((name, value) for name, value in metadata.items() if name != "digest")
    kinds = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in sorted(tensors)]
    total = hashlib.blake2b(json.dumps([told, kinds]).encode(), digest_size=16)
    for name in sorted(tensors):
        total.update(_bytes(tensors[name]))
    return total.hexdigest()


def _old_digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(_bytes(tensors[name]))
    return total.hexdigest()
