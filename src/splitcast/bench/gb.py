"""What the basis and the integer formats cost: a round of SFL-GB against a round of SFL (paper CNN, cut 1).

Both average the client halves every round, so that they differ only in what is sent. The parts are timed alone on
gradients of the same shape.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from splitcast.base.config import Config, with_values
from splitcast.base.formats import CODECS
from splitcast.bench.engine import CLASSES, LR, SHAPE, samples
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.engine.simulator import Simulator
from splitcast.model import build
from splitcast.schemes.basis import factorise
from splitcast.training.task import Classification

CASES = [(10, 32), (1000, 1)]
"""Clients, batch."""


def gb(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench gb`."""
    rows: list[Row] = []
    for clients, batch in CASES:
        rows += _overhead(clients, batch, repeats)
    return rows


def _overhead(clients: int, batch: int, repeats: int) -> list[Row]:
    model = build("cnn", SHAPE, CLASSES, seed=0)
    x, y = samples(2 * clients * batch)
    parts = np.split(np.arange(len(y)), clients)
    turns: dict[str, Callable[[], object]] = {}
    for name in ("sfl", "sfl-gb"):
        config = with_values(Config(), scheme=name, sync_every=1, clients=clients, batch=batch, lr=LR)
        turns[name] = partial(Simulator(config, model, Classification(CLASSES), x, y, parts).round, 1)
    shape = model.smashed_shape(1)
    smashed = torch.randn(clients, batch, *shape, generator=torch.Generator().manual_seed(0))
    flat, weights = smashed.flatten(0, 1).flatten(1), torch.full((clients * batch,), 1 / clients)
    turns["decomposition"] = partial(factorise, flat, weights, 8)
    turns["uplink codec"] = partial(CODECS["int2"].through, smashed)
    seconds = interleaved_medians(turns, repeats, f"{clients} clients, batch {batch}")
    case, sfl = f"gb.n{clients}_b{batch}", seconds.pop("sfl")
    return [
        Row(f"{case}.sfl", 1e3 * sfl, "ms"),
        Row(f"{case}.overhead", 100 * (seconds.pop("sfl-gb") / sfl - 1), "% of an sfl round"),
        *(
            Row(f"{case}.{name.replace(' ', '_')}", 100 * value / sfl, "% of an sfl round")
            for name, value in seconds.items()
        ),
    ]
