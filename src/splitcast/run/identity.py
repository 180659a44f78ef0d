"""`run.json`: who a run is, and the digest of the configuration it was asked for last."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from splitcast.base.errors import SplitcastError
from splitcast.base.files import read_bounded, write_atomically
from splitcast.run.strict import parsed

FORMAT = "splitcast-run-1"
FILE = "run.json"
FILE_BYTES = 10_000
_SHAPES = {"format": FORMAT, "run": "[0-9a-f]{16}", "config": "[0-9a-f]{32}", "next": "([0-9a-f]{32})?"}


@dataclass(frozen=True)
class Identity:
    """The content of `run.json`."""

    run: str
    config: str
    """digest of `config.toml`"""
    next: str = ""
    """digest of the `config.toml` that is about to take its place: a crash leaves either"""


def read_identity(folder: Path) -> Identity | None:
    """The identity of a run; None for a folder of an older version, which has none."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        found = parsed(read_bounded(file, FILE_BYTES))
    except ValueError:
        raise SplitcastError(f"run: {file} is damaged: not JSON") from None
    if not isinstance(found, dict) or ({"next": ""} | found).keys() != _SHAPES.keys():
        raise SplitcastError(f"run: {file} is damaged: its keys are not format, run and config")
    found = {"next": ""} | found
    for name, shape in _SHAPES.items():
        if not isinstance(found[name], str) or not re.fullmatch(shape, found[name]):
            raise SplitcastError(f"run: {file} is damaged: bad {name}")
    del found["format"]
    return Identity(**found)


def write_identity(folder: Path, identity: Identity) -> None:
    """Write `run.json`."""
    content = {"format": FORMAT} | {name: value for name, value in asdict(identity).items() if value}
    write_atomically(folder / FILE, (json.dumps(content) + "\n").encode())


def digest_of(content: bytes) -> str:
    """The digest by which content is compared: blake2b, 16 bytes.

    >>> digest_of(b"")
    'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(content, digest_size=16).hexdigest()
