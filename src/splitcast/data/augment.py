"""Training samples changed at random, afresh in every step: ``module:function`` of the user's.

A function takes the samples of one client's batch (b, ...) and a `torch.Generator`, from which it draws all that is
random, and returns samples of the same shape. The generator is a function of seed, round, local step and client: a run
can be repeated and resumed exactly, and a site draws what the simulator would have drawn for it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError, imported
from splitcast.base.seeds import torch_stream

Augment = Callable[[Tensor, torch.Generator], Tensor]


def find_augment(name: str) -> Augment | None:
    """The function of a name; None for none."""
    found: Augment | None = imported("augment", name, takes=2) if name else None
    return found


def augmented(augment: Augment, x: Tensor, seed: int, round_: int, step: int, clients: Sequence[int]) -> Tensor:
    """The samples (K, b, ...) of these clients in a local step."""
    made = torch.empty_like(x)
    for k, client in enumerate(clients):
        try:
            changed = augment(x[k], torch_stream(seed, "augment", round_, step, client))
        except Exception as error:  # of whatever kind the function, which is not ours, raises
            said = " ".join(str(error).split()) or type(error).__name__
            raise SplitcastError(f"augment: {said}") from error
        if not isinstance(changed, Tensor) or changed.shape != x.shape[1:]:
            what = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise SplitcastError(
                f"augment: returned {what}; allowed is a tensor of {tuple(x.shape[1:])}, as it was given"
            )
        made[k] = changed
    return made
