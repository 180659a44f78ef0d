"""Who takes part in a round, and mini-batches for all clients at once."""

import numpy as np
from numpy.typing import NDArray

from splitcast.base.config import TrainConfig
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream


def draw_batches(sizes: NDArray[np.int64], batch: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `batch` local rows for every client.

    `sizes` (N,) is the number of rows each client owns. Returns positions (N, batch), row n in
    [0, sizes[n]): a uniform sample without replacement, in uniform order, when the client owns at least
    `batch` rows, and with replacement otherwise. Row n depends only on the state of `rng`, on N, on
    `batch` and on sizes[n], so one client's size never disturbs another client's batch.

    Without replacement is Floyd's algorithm (Bentley and Floyd, 1987): for j = 0 .. b - 1 draw t from
    [0, D - b + j]; if t was taken already, take D - b + j instead. The draws of all clients are one array
    operation, and only clients with a repeated draw are walked through.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    if batch < 1:
        raise SplitcastError(f"batch = {batch}: allowed is a whole number of at least 1")
    if sizes.size and sizes.min() < 1:
        raise SplitcastError(f"sizes = {sizes.min()} of client {sizes.argmin()}: allowed is at least 1 row")
    enough = sizes >= batch  # (N,)
    first = sizes - batch  # (N,) the D - b of Floyd's algorithm
    span = np.where(enough[:, None], first[:, None] + np.arange(1, batch + 1), sizes[:, None])  # (N, batch)
    scaled = rng.random(span.shape) * span
    rows = scaled.astype(np.int64)
    # Floyd's sample is a uniform set, but large positions come late. The fractions are uniform and
    # independent of the whole parts, so sorting by them makes the order uniform without another draw.
    order = np.argsort(scaled - rows, axis=1)
    repeats = (np.diff(np.sort(rows, axis=1), axis=1) == 0).any(axis=1)
    for n in np.flatnonzero(enough & repeats):
        rows[n] = _floyd(rows[n].tolist(), int(first[n]))
    return np.take_along_axis(rows, order, axis=1)


def draw_batch(size: int, batch: int, rng: np.random.Generator, client: int) -> NDArray[np.int64]:
    """The row of one client in `draw_batches`, without drawing those of the others.

    >>> sizes, seed = np.array([9, 7, 8]), 5
    >>> together = draw_batches(sizes, 3, stream(seed, "batch")).tolist()
    >>> [draw_batch(sizes[n], 3, stream(seed, "batch"), n).tolist() for n in range(3)] == together
    True
    """
    bits = rng.bit_generator
    assert isinstance(bits, np.random.PCG64)
    bits.advance(client * batch)  # a number of the others each
    return np.asarray(draw_batches(np.array([size]), batch, rng)[0])


def _floyd(draws: list[int], first: int) -> list[int]:
    taken: set[int] = set()
    for j, draw in enumerate(draws):
        if draw in taken:
            draws[j] = first + j
        taken.add(draws[j])
    return draws


def own_order(seed: int, client: int, size: int) -> NDArray[np.int64]:
    """The rows 0..size-1 of a client in a random order, the same for the whole run."""
    return stream(seed, "pool", client).permutation(size)


def in_turn(order: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows at these places of an order; after the last comes the first again.

    >>> in_turn(np.array([2, 0, 1]), np.array([2, 3])).tolist()
    [1, 2]
    """
    return order[places % len(order)]


def participants(train: TrainConfig, clients: int, t: int) -> NDArray[np.int64]:
    """The clients of round ``t`` (K,): a fraction is chosen, some of them drop out, at least one stays."""
    if train.participation == 1 and not train.dropout:
        return np.arange(clients)
    rng = stream(train.seed, "participation", t)
    chosen = np.sort(rng.permutation(clients)[: max(1, round(train.participation * clients))])
    luck = rng.random(len(chosen))
    return np.asarray(chosen[luck >= min(train.dropout, luck.max())])
