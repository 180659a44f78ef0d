"""How large the messages of a run are, before anything travels."""

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.cutting.policies import fixed_cut
from splitcast.engine.dry import client_values, dry_round
from splitcast.model.split import SplitModel
from splitcast.remote.wire import MODEL
from splitcast.run.parts import first_placement
from splitcast.schemes.choices import schemes_by_format
from splitcast.schemes.schemes import make_scheme
from splitcast.training.optimiser import make_optimiser
from splitcast.training.task import make_task

ENVELOPE = 4096
"""Bytes that a call has beside its messages, and more."""


def largest_messages(config: Config, model: SplitModel, classes: int) -> tuple[int, int]:
    """Bytes of the largest client half, and of what one local step sends in one direction, at any cut and in
    any format of the run."""
    scheme = make_scheme(config)
    optimiser = make_optimiser(config.train, exact=scheme.sync.exact)
    task, model = make_task(config.model.task, classes), scheme.fitted(model)
    open_ = fixed_cut(config.policy.policy, config.split.cuts[0]) is None
    half, step = 0, 0
    every = [scheme.place(cut, model.depth) for cut in scheme.cuts(model.depth)]
    for placement in every if open_ else [*first_placement(config, model).kinds]:
        half = max(half, 4 * client_values(model, placement, optimiser))
        for each in schemes_by_format(config).values() or [scheme]:
            ledger = dry_round(
                each.at(placement), model, task, placement, optimiser, 1, [0], batch=config.train.batch, steps=1
            )
            for direction in ("up", "down"):
                sent = (m.of(0) for m in ledger.messages if m.direction == direction and m.kind != MODEL)
                step = max(step, sum(sent))
    return half, step


def refuse_large_messages(config: Config, model: SplitModel, classes: int, most: int) -> None:
    """Refuse a run that FLARE would not carry."""
    half, step = largest_messages(config, model, classes)
    what, size = ("a client half", half) if half > step else ("a step's messages", step)
    if size + ENVELOPE > most:
        raise SplitcastError(
            f"message_bytes: {most}, but {what} of this run has {size} bytes; raise it in [limits] of the deployment "
            f"file and in every kit's local/comm_config.json (deploy renew does), or choose another cut or batch"
        )
