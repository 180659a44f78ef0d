"""How weights follow gradients. State of an optimiser lives in slots of the weights, so it is averaged, moved, sent,
counted and stored with them, and nobody else needs its names.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from splitcast.base.config import TrainConfig
from splitcast.base.registry import Registry
from splitcast.model.split import Params
from splitcast.training.factored import Factors, Gradient


class Optimiser(Protocol):
    """A rule that changes weights in place."""

    linear: bool
    """Whether `step` takes gradients that are left as two factors; else they are multiplied out first."""

    def init(self, params: Params) -> dict[str, Params]:
        """Its state at the start, by slot, for these parameters; empty if it has none."""
        ...

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        """One step on the parameters that have a gradient. All tensors may have a leading dimension of clients."""
        ...


class SGD:
    """w -= lr m with m = momentum m + g.

    >>> w, sgd = {"w": torch.ones(2)}, SGD(lr=0.1, momentum=0.5)
    >>> state = sgd.init(w)
    >>> for _ in range(2):
    ...     sgd.step(w, state, {"w": torch.ones(2)})
    >>> w["w"].tolist(), state["momentum"]["w"].tolist()
    ([0.75, 0.75], [1.5, 1.5])
    """

    linear = True

    def __init__(self, lr: float, momentum: float = 0.0) -> None:
        self.lr, self.momentum = lr, momentum

    def init(self, params: Params) -> dict[str, Params]:
        return {"momentum": {name: torch.zeros_like(p) for name, p in params.items()}} if self.momentum else {}

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        for name, g in grads.items():
            if self.momentum:
                g = _add(g, state["momentum"][name], scale=1.0, keep=self.momentum)
            _add(g, params[name], scale=-self.lr)


def _add(grad: Gradient, target: Tensor, *, scale: float, keep: float = 1.0) -> Tensor:
    """target = keep * target + scale * grad, in place."""
    if isinstance(grad, Factors):
        grad.add_to(target, scale=scale, keep=keep)
        return target
    return (target.mul_(keep) if keep != 1 else target).add_(grad, alpha=scale)


OPTIMISERS: Registry[type[SGD]] = Registry("optimizer", takes=2)
OPTIMISERS["sgd"] = SGD


def make_optimiser(train: TrainConfig) -> Optimiser:
    """The optimiser a configuration names; ``module:function`` takes lr and momentum."""
    return OPTIMISERS.find(train.optimizer)(train.lr, train.momentum)
