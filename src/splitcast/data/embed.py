"""Make the embedded data out of the full sets: `python -m splitcast.data.embed`.

Images: 5,000 training and 1,000 test images, the same number of each digit, evenly spaced over the rows of that
digit (so that all writers have their share) and kept in the original order. No random draw: the same full
set always gives the same subset.

Texts: four authors, of each the first documents up to 40,000 letters, the last of them cut there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitcast.data.fetch import fetch
from splitcast.data.loading import EMBEDDED, EMBEDDED_TEXT, read_text
from splitcast.data.text.corpus import Document
from splitcast.data.text.packages import lines

TRAIN_ROWS = 5000
TEST_ROWS = 1000
LETTERS = 40_000
AUTHORS = {"Abraham Lincoln": "sotu", "George Washington": "sotu", "Herman Melville": "moby-dick", "King James": "kjv"}


def spread_rows(labels: NDArray[np.uint8], rows: int) -> NDArray[np.int64]:
    """Ascending row numbers (rows,): the same number of each class, evenly spaced within the class."""
    classes = np.unique(labels)
    each = rows // len(classes)
    of_class = [np.flatnonzero(labels == c) for c in classes]
    return np.sort(np.concatenate([own[np.arange(each) * len(own) // each] for own in of_class]))


def opening(documents: Sequence[Document], letters: int) -> list[str]:
    """The first documents, of so many letters together."""
    texts: list[str] = []
    for document in documents:
        left = letters - sum(map(len, texts))
        texts += [document.text[:left]] if left > 0 else []
    return texts


def main() -> None:
    made = []
    for author, source in AUTHORS.items():
        fetch(source)
        own = [each for each in read_text(source) if each.about.get("president", author) == author]
        made += [{"author": author, "text": text} for text in opening(own, LETTERS)]
    EMBEDDED_TEXT.write_bytes(lines(made))
    print(f"{EMBEDDED_TEXT}: {len(made)} texts, {EMBEDDED_TEXT.stat().st_size / 1e6:.2f} MB")
    with np.load(fetch("mnist"), allow_pickle=False) as full:
        train = spread_rows(full["train_y"], TRAIN_ROWS)
        test = spread_rows(full["test_y"], TEST_ROWS)
        np.savez_compressed(
            EMBEDDED,
            train_x=full["train_x"][train],
            train_y=full["train_y"][train],
            test_x=full["test_x"][test],
            test_y=full["test_y"][test],
        )
    print(f"{EMBEDDED}: {len(train)} + {len(test)} images, {EMBEDDED.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
