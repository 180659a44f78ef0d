"""What a language model writes before and after a training: it goes on from the opening of texts that were held out."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from splitcast.base.config import Config
from splitcast.base.seeds import torch_seed
from splitcast.data import Dataset
from splitcast.data.text.tokens import Tokenizer
from splitcast.engine.engine import Engine
from splitcast.engine.simulator import Simulator
from splitcast.model.split import Params, SplitModel

OPENING, WRITTEN = 60, 120
"""Letters, about, that are given, and that are written."""
TEMPERATURE = 0.7


def samples(config: Config, engine: Engine, dataset: Dataset) -> list[dict[str, str]]:
    """For the first clients: who it is, the opening, and how the text, the model before and the model after go on.

    The opening is of a text that was held out, the client's own where clients are natural. The model after is the
    client's, with its own half where halves differ.
    """
    writing, count = dataset.writing, config.train.text_samples
    if not (writing and count and config.model.task == "next-token" and isinstance(engine, Simulator)):
        return []
    rows = dict(list(openings(dataset, len(engine.sizes)).items())[:count])
    if not rows:
        return []
    tokens = dataset.test_x[list(rows.values())]
    sizes = [_sizes(writing.tokenizer, row) for row in tokens]
    given, length = (min(size) for size in zip(*sizes, strict=True))
    seed = torch_seed(config.train.seed, "writing")
    one = torch.ones_like(engine.weights[:1])
    models = [engine.initial().everything()], [engine.state.of(n).averaged(one) for n in rows]
    before, after = (written(engine.model, each, tokens, given, length, seed) for each in models)

    def text(ids: Tensor) -> str:
        end = (ids == writing.tokenizer.end).nonzero() if writing.tokenizer.end is not None else ids[:0]
        return writing.tokenizer.decode(ids[: int(end[0])].tolist() if len(end) else ids.tolist())

    named = [writing.clients[n] if writing.clients else f"client {n}" for n in rows]
    return [
        {
            "client": named[k],
            "opening": text(tokens[k, :given]),
            "text": text(tokens[k, given : given + length]),
            "before": text(before[k]),
            "after": text(after[k]),
        }
        for k in range(len(rows))
    ]


def openings(dataset: Dataset, clients: int) -> dict[int, int]:
    """A test row for every client that has one."""
    owners = dataset.writing.owners if dataset.writing else None
    if owners is None:
        return {n: n for n in range(min(clients, len(dataset.test_x)))}
    return {n: int((owners == n).nonzero()[0]) for n in range(clients) if bool((owners == n).any())}


@torch.no_grad()
def written(model: SplitModel, params: Sequence[Params], rows: Tensor, given: int, length: int, seed: int) -> Tensor:
    """How models, one for each row or one for all, go on from the first ``given`` tokens of rows (n, T): (n, length).
    Tokens are drawn with probabilities softmax(logits / T), of a row with the same noise whatever the model."""
    out = rows.clone()
    out[:, given:] = rows[:, :1]  # of no account: a token is judged by those before it
    noise = torch.rand(len(rows), length, generator=torch.Generator().manual_seed(seed))
    with model.evaluating():
        grows = _grows(model, params[0], rows[:1], given)
        for step in range(length):
            at = given + step
            upto = at if grows else out.shape[1]
            ids = out[:, :upto].to(next(iter(params[0].values())).device)
            if len(params) == 1:
                logits = model.forward(params[0], ids, 0, model.depth)[:, at - 1]
            else:
                each = (model.forward(p, x[None], 0, model.depth)[0, at - 1] for p, x in zip(params, ids, strict=True))
                logits = torch.stack(list(each))
            total = (logits.float().cpu() / TEMPERATURE).softmax(-1).cumsum(-1)  # (rows, tokens)
            out[:, at] = (total < noise[:, step, None] * total[:, -1:]).sum(-1).clamp(max=total.shape[-1] - 1)
    return out[:, given : given + length]


def _grows(model: SplitModel, params: Params, row: Tensor, given: int) -> bool:
    """Whether a model takes shorter rows than it was made for, to the same effect."""
    row = row.to(next(iter(params.values())).device)
    try:
        short = model.forward(params, row[:, :given], 0, model.depth)
    except Exception:  # of many kinds: models are anybody's
        return False
    full = model.forward(params, row, 0, model.depth)[:, :given]
    return short.shape == full.shape and torch.allclose(short, full, rtol=1e-3, atol=1e-3)


def _sizes(tokenizer: Tokenizer, row: Tensor) -> tuple[int, int]:
    """Tokens of an opening, and tokens to write, within a row (T,)."""
    letters = max(1.0, len(tokenizer.decode(row.tolist())) / len(row))
    given = max(1, min(len(row) // 2, math.ceil(OPENING / letters)))
    return given, min(len(row) - given, math.ceil(WRITTEN / letters))
