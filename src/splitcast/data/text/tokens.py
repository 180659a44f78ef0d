"""Tokenizers, and documents as tokens, worked out once and kept."""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from splitcast.base.errors import SplitcastError, shown
from splitcast.base.files import write_atomically
from splitcast.data.npz import read_npz
from splitcast.data.text.gguf import TOKENIZER
from splitcast.data.text.located import HF, located

Ids = NDArray[np.uint32]
FILE_BYTES = 2**27
"""Of a tokenizer."""
AT_A_TIME = 256
"""Documents that are handed over together."""


class Tokenizer(Protocol):
    """Texts as whole numbers and back."""

    @property
    def size(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def end(self) -> int | None:
        """Comes after the last token of a text."""
        ...

    @property
    def padding(self) -> int:
        """Fills up what is too short."""
        ...

    @property
    def frame(self) -> tuple[int, ...]:
        """What is set around a text that is read as a whole; more than one: the last of them after it."""
        ...

    @property
    def digest(self) -> str:
        """Tells other tokenizers apart; empty where keeping tokens saves nothing."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of each text, with nothing around them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without those that stand for none."""
        ...


class Bytes:
    """Every byte of the text in UTF-8 is a token; 256 ends a text, 257 fills up.

    >>> [tokens.tolist() for tokens in Bytes().encode(["Aé"])], Bytes().decode([65, 195, 169, 256, 257])
    ([[65, 195, 169]], 'Aé')
    """

    size, end, padding, frame, digest = 258, 256, 257, (), ""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FromFile:
    """A tokenizer.json of the library tokenizers. Which tokens end a text and fill up is said by tokenizer_config.json
    beside it, if it is there."""

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise SplitcastError("tokenizer: needs tokenizers; pip install 'splitcast[llm]'") from None
        if not file.is_file():
            raise SplitcastError(f"tokenizer: {file} is not a file; give a tokenizer.json, its folder, or bytes")
        if file.stat().st_size > FILE_BYTES:
            raise SplitcastError(f"tokenizer: {file} is larger than {FILE_BYTES:,} bytes")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns whenever a process is started
        content = file.read_bytes()
        try:
            self.library: Any = Library.from_buffer(content)
        except Exception as error:  # of many kinds, for a file that anybody may have written
            said = shown(" ".join(str(error).split()) or type(error).__name__)
            raise SplitcastError(f"tokenizer: {file} is not a tokenizer.json, whole: {said}") from None
        self.library.no_truncation()
        self.library.no_padding()
        self.digest = hashlib.sha256(content).hexdigest()
        self.size = max(self.library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        named = _named(file.with_name("tokenizer_config.json"))
        known = [self._number(named.get(role)) for role in ("eos_token", "sep_token", "pad_token")]
        self.end: int | None = next((number for number in known[:2] if number is not None), None)
        self.padding: int = next((number for number in (known[2], self.end) if number is not None), 0)

    @cached_property
    def frame(self) -> tuple[int, ...]:
        return tuple(self.library.encode("").ids)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.library.decode(list(tokens)))

    def _number(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self.library.token_to_id(text) if isinstance(text, str) else None


def find_tokenizer(name: str, arch: str, cache: Path) -> Tokenizer:
    """The tokenizer of a name: bytes, a tokenizer.json or its folder, a model in the cache; auto: that of the model."""
    if name != "auto":
        return _stored(cache / name, name) if (cache / name).is_dir() else _given(name)
    if arch.startswith(HF):
        return _beside(located(arch, weights=False))
    return _stored(cache / arch, arch) if (cache / arch / TOKENIZER).is_file() else Bytes()


def tokens_of(texts: Sequence[str], tokenizer: Tokenizer, cache: Path) -> list[Ids]:
    """The tokens of each text, taken from the folder `tokens` of the cache if they are known there, else put there."""
    if not tokenizer.digest:
        return tokenizer.encode(texts)
    key = hashlib.sha256(tokenizer.digest.encode())
    for text in texts:
        raw = text.encode()
        key.update(len(raw).to_bytes(8, "little") + raw)
    file = cache / "tokens" / f"{key.hexdigest()[:32]}.npz"
    try:
        kept = read_npz(file, ("ids", "lengths")) if file.is_file() else {}
        if kept and _agree(kept["ids"], kept["lengths"], len(texts), tokenizer.size):
            return np.split(kept["ids"], np.cumsum(kept["lengths"])[:-1])
    except SplitcastError:  # damaged: worked out again
        pass
    made = [each for at in range(0, len(texts), AT_A_TIME) for each in tokenizer.encode(texts[at : at + AT_A_TIME])]
    _keep(file, made)
    return made


def _agree(ids: NDArray[Any], lengths: NDArray[Any], texts: int, size: int) -> bool:
    if ids.dtype != np.uint32 or lengths.dtype != np.int64 or ids.ndim != 1 or lengths.shape != (texts,):
        return False
    return bool((lengths >= 0).all() and lengths.sum() == len(ids) and ids.max(initial=0) < size)


def _keep(file: Path, made: list[Ids]) -> None:
    content = io.BytesIO()
    np.savez(content, ids=np.concatenate(made), lengths=np.array([len(each) for each in made], np.int64))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content.getvalue())
    except OSError:  # nobody needs to be able to write there
        pass


def _given(name: str) -> Tokenizer:
    if name == "bytes":
        return Bytes()
    path = Path(name).expanduser()
    if not path.exists():
        raise SplitcastError(f"tokenizer: {shown(name)} is not there; give bytes, a tokenizer.json, or its folder")
    return _stored(path, name)


def _stored(path: Path, name: str) -> Tokenizer:
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise SplitcastError(f"tokenizer: {name} has no {TOKENIZER}; give one with --tokenizer, or bytes")
    return FromFile(file)


def _beside(path: Path) -> Tokenizer:
    """Of a model of transformers: that in its folder; bytes for a bare configuration, whose weights are fresh."""
    folder = path if path.is_dir() else path.parent
    if (folder / TOKENIZER).is_file():
        return FromFile(folder / TOKENIZER)
    if not path.exists():
        raise SplitcastError(
            f"arch: hf:{path} is not there; give a folder or a config.json, or the name of a model on huggingface.co"
        )
    if path.is_dir():
        raise SplitcastError(f"tokenizer: {path} has no {TOKENIZER}; give one with --tokenizer, or bytes")
    return Bytes()


def _named(file: Path) -> dict[str, Any]:
    if not file.is_file() or file.stat().st_size > FILE_BYTES:
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
