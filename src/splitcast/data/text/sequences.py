"""Documents as rows of tokens.

To learn the next token, a document is cut into pieces of T tokens, of which the last may be shorter; the target of a
position is the token after it, also across pieces. To classify, a document is one row: its first T tokens. No row holds
parts of two documents, so whatever is known of a document (author, year, file) is known of its rows. What is short is
filled up with the tokenizer's padding, and padding is no target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitcast.base.codec import IGNORE
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.sections import DataConfig
from splitcast.data.datasets import Dataset, codes, held_out
from splitcast.data.partition import natural_column
from splitcast.data.text.corpus import Document, column, columns
from splitcast.data.text.tokens import Ids, Tokenizer

LABEL = "label"
"""The column that is learned, if none is named."""
MOST_TOKENS = 2**28
"""Of all rows together."""


@dataclass(frozen=True)
class Writing:
    """How rows of tokens are read, and whose they are."""

    tokenizer: Tokenizer
    clients: tuple[str, ...] = ()
    """Names of the natural clients, by their numbers; empty without."""
    owners: Tensor | None = None
    """To which of them each test row belongs, (m,)."""


def text_dataset(
    documents: Sequence[Document], tokens: Sequence[Ids], tokenizer: Tokenizer, asked: DataConfig, task: str
) -> Dataset:
    """A data set of which a fifth of the rows is held out (`held_out`), of every natural client or class alike."""
    x, y, owner, labels = text_rows(documents, tokens, tokenizer, asked, task)
    by, strata = natural_column(asked.partition), torch.zeros(len(y)) if y.ndim > 1 else y
    names: tuple[str, ...] = ()
    if by:
        values = np.asarray(column(documents, by, "partition", asked.dataset))[owner]
        strata, names = codes(f"by:{by}", values), tuple(str(value) for value in np.unique(values))
    test = torch.from_numpy(held_out(strata))
    return Dataset(
        x[~test],
        y[~test],
        x[test],
        y[test],
        tokenizer.size if y.ndim > 1 else len(labels),
        asked.dataset,
        {by: strata[~test]} if by else {},
        labels,
        Writing(tokenizer, names, strata[test] if by else None),
    )


def text_rows(
    documents: Sequence[Document], tokens: Sequence[Ids], tokenizer: Tokenizer, asked: DataConfig, task: str
) -> tuple[Tensor, Tensor, np.ndarray, tuple[str, ...]]:
    """Rows (n, T), targets (n, T) or (n,), the document of each row (n,), and the names of the classes."""
    length = asked.sequence_length
    if task == "classification":
        names, classes = labels_of(documents, asked)
        x = torch.from_numpy(np.stack([whole(ids, length, tokenizer) for ids in tokens]))
        return x, classes, np.arange(len(documents)), names
    if asked.target:
        raise SplitcastError(f"target: {asked.target!r}, but {task} learns from the text itself; leave it out")
    ends = [] if tokenizer.end is None else [tokenizer.end]
    cut = [pieces(np.append(ids, ends), length, tokenizer.padding) for ids in tokens]
    if 2 * length * sum(len(x) for x, _ in cut) > MOST_TOKENS:
        raise SplitcastError(f"dataset: {asked.dataset} makes more than {MOST_TOKENS:,} tokens; give it in parts")
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*cut, strict=True))
    if not len(x):
        raise SplitcastError(f"dataset: {asked.dataset} has no text of two tokens")
    return x, y, np.repeat(np.arange(len(cut)), [len(x) for x, _ in cut]), ()


def labels_of(documents: Sequence[Document], asked: DataConfig) -> tuple[tuple[str, ...], Tensor]:
    """Names of the classes, and the class of every document (n,)."""
    known = columns(documents)
    target = asked.target or (LABEL if LABEL in known else "")
    if not target:
        raise SplitcastError(
            f"target: not given; choose what to learn out of {', '.join(known)}, or --task next-token to learn the text"
        )
    values = [str(value) for value in column(documents, target, "target", asked.dataset)]
    names = asked.labels or tuple(sorted(set(values)))
    unknown = next((value for value in values if value not in names), None)
    if unknown is not None:
        raise SplitcastError(f"target: column {target!r} has {shown(unknown)}, none of the classes {', '.join(names)}")
    number = {name: place for place, name in enumerate(names)}
    return names, torch.tensor([number[value] for value in values])


def pieces(ids: np.ndarray, length: int, padding: int) -> tuple[np.ndarray, np.ndarray]:
    """A document's tokens (L,) as rows (n, T) and targets (n, T), n = ceil((L - 1) / T).

    >>> x, y = pieces(np.array([5, 6, 7, 8]), 2, padding=0)
    >>> x.tolist(), y.tolist()
    ([[5, 6], [7, 0]], [[6, 7], [8, -100]])
    """
    rows = max(0, -(-(len(ids) - 1) // length))
    x, y = np.full(rows * length, padding, np.int64), np.full(rows * length, IGNORE, np.int64)
    if rows:
        x[: len(ids) - 1], y[: len(ids) - 1] = ids[:-1], ids[1:]
    return x.reshape(rows, length), y.reshape(rows, length)


def whole(ids: np.ndarray, length: int, tokenizer: Tokenizer) -> np.ndarray:
    """A document's first tokens within the tokenizer's frame, filled up to (T,)."""
    before, after = tokenizer.frame[:-1] or tokenizer.frame, tokenizer.frame[1:][-1:]
    kept = [*before, *ids[: max(0, length - len(before) - len(after))].tolist(), *after][:length]
    return np.array([*kept, *[tokenizer.padding] * (length - len(kept))], np.int64)
