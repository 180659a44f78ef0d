"""Make the embedded MNIST subset out of the full set: `python -m splitcast.data.embed`.

5,000 training and 1,000 test images, the same number of each digit, evenly spaced over the rows of that
digit (so that all writers have their share) and kept in the original order. No random draw: the same full
set always gives the same subset.
"""

import numpy as np
from numpy.typing import NDArray

from splitcast.data.fetch import fetch
from splitcast.data.loading import EMBEDDED

TRAIN_ROWS = 5000
TEST_ROWS = 1000


def spread_rows(labels: NDArray[np.uint8], rows: int) -> NDArray[np.int64]:
    """Ascending row numbers (rows,): the same number of each class, evenly spaced within the class."""
    classes = np.unique(labels)
    each = rows // len(classes)
    of_class = [np.flatnonzero(labels == c) for c in classes]
    return np.sort(np.concatenate([own[np.arange(each) * len(own) // each] for own in of_class]))


def main() -> None:
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
