"""Divide one labelled dataset among clients.

A partition is found in three steps: how many rows each client gets (`sizes`), which labels they carry
(`kind`), and at last which rows, always a random choice within a label.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splitcast.base.errors import SplitcastError, one_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

KINDS = ("iid", "dirichlet", "shards")
BY = "by:"
SIZES = ("equal", "unequal")
FIT_SWEEPS = 50
MOST_CELLS = 10**8
"""Clients times classes, of which there is a table."""


def partition(
    labels: ArrayLike,
    clients: int,
    kind: str,
    *,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    sizes: str = "equal",
    rng: np.random.Generator,
) -> list[Ints]:
    """Row numbers of each client: `clients` ascending arrays, disjoint, none empty.

    `labels` (n,) are the class labels of the rows. Kinds:

    - `iid`: rows at random.
    - `dirichlet`: the label mix of client n is q_n ~ Dirichlet(alpha * C * p), where p is the label mix of
      the whole dataset over its C classes (Hsu, Qi and Brown, 2019, whose concentration is our alpha * C;
      with balanced classes this is the common symmetric Dirichlet(alpha)). Small alpha: few labels per
      client; large alpha: close to iid. Labels that run out are replaced by the client's next likely ones,
      the clients that go without being chosen at random.
    - `shards`: every client holds exactly `classes_per_client` classes (after McMahan et al., 2017). It
      holds fewer only if the classes have too few rows to share out.

    Sizes: `equal` clients own the same number of rows, give or take one; `unequal` sizes are log-normal
    (the logarithm has a standard deviation of 1), with at least one row each. For `shards`, sizes come as
    near to these as the number of classes allows.

    Every row is used, save where `shards` has fewer places (clients * classes_per_client) than classes:
    then that many classes are chosen at random and the others are left out.
    """
    labels = np.asarray(labels)
    if kind == "iid" and labels.ndim:
        labels = np.zeros(len(labels), np.int64)  # whatever they are
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise SplitcastError(
            f"partition: {kind} needs one label per row, the targets are {labels.dtype} of shape {labels.shape}; "
            "choose iid"
        )
    classes, label, counts = np.unique(labels, return_inverse=True, return_counts=True)
    _check(len(labels), len(classes), clients, kind, alpha, classes_per_client, sizes)
    wish = _sizes(len(labels), clients, sizes, rng)
    if kind == "iid":
        order = rng.permutation(len(labels))
        return _gather(order, np.repeat(np.arange(clients), wish), clients)
    table = (
        _dirichlet_counts(counts, wish, alpha, rng)
        if kind == "dirichlet"
        else _shard_counts(counts, wish, classes_per_client, rng)
    )  # (N, C) rows of each client and class
    order = rng.permutation(len(labels))
    order = order[np.argsort(label[order], kind="stable")]  # by class, shuffled within a class
    order = order[table.sum(axis=0)[label[order]] > 0]  # a class is used as a whole or not at all
    owner = np.repeat(np.tile(np.arange(clients), len(counts)), table.T.ravel())
    return _gather(order, owner, clients)


def natural_column(kind: str) -> str:
    """COLUMN of by:COLUMN; empty for other kinds.

    >>> natural_column("by:hospital"), natural_column("iid")
    ('hospital', '')
    """
    if kind == BY:
        raise SplitcastError("partition: by: without a column; give its name, as in by:hospital")
    return kind.removeprefix(BY) if kind.startswith(BY) else ""


def natural(clients: Ints) -> list[Ints]:
    """Row numbers of each client, where ``clients`` (n,) tells for every row to whom it belongs, from 0 on.

    >>> [rows.tolist() for rows in natural(np.array([1, 0, 1]))]
    [[1], [0, 2]]
    """
    return _gather(np.arange(len(clients)), clients, int(clients.max()) + 1)


def _check(n: int, classes: int, clients: int, kind: str, alpha: float, classes_per_client: int, sizes: str) -> None:
    one_of("partition", kind, (*KINDS, f"{BY}COLUMN"))
    one_of("sizes", sizes, SIZES)
    if not 1 <= clients <= n:
        raise SplitcastError(f"clients = {clients}: allowed are 1 to {n}, the number of samples")
    if kind != "iid" and clients * classes > MOST_CELLS:
        raise SplitcastError(
            f"clients = {clients}: with {classes} classes, allowed are 1 to {MOST_CELLS // classes} for {kind}"
        )
    if kind == "dirichlet" and not 0 < alpha < np.inf:
        raise SplitcastError(f"alpha = {alpha}: allowed is a finite number above 0")
    if kind == "shards" and not 1 <= classes_per_client <= classes:
        raise SplitcastError(
            f"classes_per_client = {classes_per_client}: allowed are 1 to {classes}, the number of classes"
        )


def _gather(rows: Ints, owner: Ints, clients: int) -> list[Ints]:
    """Rows (m,) and the client that owns each (m,) -> ascending rows of each client."""
    by_owner = np.lexsort((rows, owner))
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(rows[by_owner], ends[:-1])


def _sizes(n: int, clients: int, sizes: str, rng: np.random.Generator) -> Ints:
    """Rows per client (N,): at least 1 each, n together."""
    if sizes == "equal":
        return np.diff(np.arange(clients + 1) * n // clients)
    return _apportion(n, rng.lognormal(0.0, 1.0, clients))


def _apportion(total: int, weights: Floats) -> Ints:
    """Whole shares of `total`, in proportion to `weights` (m,), each at least 1; total >= m."""
    rest = total - len(weights)
    above = np.maximum(weights / weights.sum() * total - 1, 0)  # what each is due above its first
    due = above * (rest / max(float(above.sum()), 1.0))  # the sum is at least `rest`, or nothing is left
    shares: Ints = due.astype(np.int64)
    largest_remainders = np.argsort(shares - due, kind="stable")[: rest - int(shares.sum())]
    shares[largest_remainders] += 1
    shares += 1
    return shares


def _dirichlet_counts(counts: Ints, wish: Ints, alpha: float, rng: np.random.Generator) -> Ints:
    """Rows (N, C) of each client and class, with row sums `wish` and column sums `counts`.

    Every pass draws what each client still needs from its mix over the labels left, and shares out
    uniformly a label in too high demand. A pass serves everyone or uses up a label: at most C passes.
    """
    # Gamma variates as logarithms, log G(a) = log G(a + 1) - Exp(1) / a, because plain ones underflow to 0
    # for small alpha, and then a client whose labels have run out has no next likely one.
    a = np.clip(alpha * len(counts) * counts / counts.sum(), 1e-100, 1e100)
    shape = (len(wish), len(counts))
    log_mix = np.log(rng.standard_gamma(a + 1, shape)) - rng.standard_exponential(shape) / a
    table = np.zeros(shape, dtype=np.int64)
    need, left = wish.copy(), counts.copy()
    while need.any():
        who, what = np.flatnonzero(need), np.flatnonzero(left)
        logs = log_mix[np.ix_(who, what)]
        mix = np.exp(logs - logs.max(axis=1, keepdims=True))
        drawn = rng.multinomial(need[who], mix / mix.sum(axis=1, keepdims=True))
        for j in np.flatnonzero(drawn.sum(axis=0) > left[what]):
            drawn[:, j] = rng.multivariate_hypergeometric(drawn[:, j], left[what[j]], method="marginals")
        table[np.ix_(who, what)] += drawn
        need[who] -= drawn.sum(axis=1)
        left[what] -= drawn.sum(axis=0)
    return table


def _shard_counts(counts: Ints, wish: Ints, k: int, rng: np.random.Generator) -> Ints:
    """Rows (N, C) of each client and class, k classes per client, row sums near `wish`."""
    holds = _deal_classes(counts, len(wish), k, rng)
    client, cls = np.nonzero(holds)
    rows = np.bincount(cls, minlength=len(counts)).clip(0, 1) * counts  # (C,) none of a class nobody holds
    wish = wish * (rows.sum() / wish.sum())
    # Iterative proportional fitting: scale the held cells to the wished sizes and to the class counts.
    cell = np.ones(len(cls))
    for _ in range(FIT_SWEEPS):
        cell = np.maximum(cell * (wish / np.bincount(client, cell))[client], 1.0)
        cell *= (rows / np.bincount(cls, cell, minlength=len(rows)).clip(1.0))[cls]
    table = np.zeros(holds.shape, dtype=np.int64)
    for c in np.unique(cls):
        table[holds[:, c], c] = _apportion(int(rows[c]), cell[cls == c])
    return table


def _deal_classes(counts: Ints, clients: int, k: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which client holds which class (N, C): k per client, a class in proportion to its rows."""
    # Sainte-Lague: of all places a class could offer, the N k with the highest quotients; the first place
    # of a class goes before all others, so that no class is left out if it can be helped.
    shuffled = rng.permutation(len(counts))
    offered = np.minimum(counts, clients)[shuffled]
    cls = np.repeat(shuffled, offered)
    place = np.arange(len(cls)) - np.repeat(np.cumsum(offered) - offered, offered)
    quotient = np.where(place == 0, np.inf, counts[cls] / (place + 0.5))
    places = np.bincount(cls[np.argsort(-quotient, kind="stable")[: clients * k]], minlength=len(counts))
    # Always to the clients with the fewest classes: these numbers never differ by more than one, hence
    # they all end at k if there are N k places.
    holds = np.zeros((clients, len(counts)), dtype=np.bool_)
    for c in rng.permutation(len(counts)):
        fewest_first = np.lexsort((rng.random(clients), holds.sum(axis=1)))
        holds[fewest_first[: places[c]], c] = True
    return holds
