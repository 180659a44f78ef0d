"""How weights follow gradients. State of an optimiser lives in slots of the weights, so it is averaged, moved, sent,
counted and stored with them, and nobody else needs its names.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from splitcast.base.config import TrainConfig
from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.registry import Registry
from splitcast.model.split import Params
from splitcast.training.factored import Affine, Factors, Gradient


class Optimiser(Protocol):
    """A rule that changes weights in place."""

    linear: bool
    """Whether a step is linear in gradient and state: then the step along a mean is the mean of steps, and `step` takes
    gradients left as two factors. Else every client steps a copy of its own, along gradients multiplied out (unless it
    ``takes_factors`` nevertheless)."""

    def init(self, params: Params) -> dict[str, Params]:
        """Its state at the start, by slot, for these parameters; empty if it has none."""
        ...

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        """One step on the parameters that have a gradient. All tensors may have a leading dimension of clients."""
        ...


class SGD:
    """w -= lr m with m = momentum m + g + decay w; Nesterov: w -= lr (g + decay w + momentum m).

    >>> w, sgd = {"w": torch.ones(2)}, SGD(lr=0.1, momentum=0.5)
    >>> state = sgd.init(w)
    >>> for _ in range(2):
    ...     sgd.step(w, state, {"w": torch.ones(2)})
    >>> w["w"].tolist(), state["momentum"]["w"].tolist()
    ([0.75, 0.75], [1.5, 1.5])
    """

    linear = True

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, *, nesterov: bool = False) -> None:
        self.lr, self.momentum, self.weight_decay, self.nesterov = lr, momentum, weight_decay, nesterov

    def init(self, params: Params) -> dict[str, Params]:
        return {"momentum": {name: torch.zeros_like(p) for name, p in params.items()}} if self.momentum else {}

    @property
    def affine(self) -> Affine | None:
        """(a, c) if a step is w = a w + c g."""
        return None if self.momentum else (1 - self.lr * self.weight_decay, -self.lr)

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        for name, g in grads.items():
            w, decay = params[name], self.weight_decay
            if not self.momentum:
                _add(g, w, scale=-self.lr, keep=1 - self.lr * decay)
                continue
            m = _add(g, state["momentum"][name], scale=1.0, keep=self.momentum)
            if decay:
                m.add_(w, alpha=decay)
            if self.nesterov:
                _add(g, w, scale=-self.lr, keep=1 - self.lr * decay)
                w.add_(m, alpha=-self.lr * self.momentum)
            else:
                w.add_(m, alpha=-self.lr)


class Adam:
    """Kingma and Ba, ICLR 2015: w -= lr m^ / (sqrt(v^) + eps), with m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
    m^ = m / (1 - b1^k) and v^ = v / (1 - b2^k) after k steps of the parameter.

    Weight decay is added to the gradient, or, ``decoupled``, taken from the weight: w -= lr decay w (AdamW, Loshchilov
    and Hutter, ICLR 2019).
    """

    linear, takes_factors = False, True
    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, *, decoupled: bool = False) -> None:
        self.lr, self.weight_decay, self.decoupled = lr, weight_decay, decoupled
        self.betas = (momentum or self.betas[0], self.betas[1])

    def init(self, params: Params) -> dict[str, Params]:
        return {
            "mean": {name: torch.zeros_like(p) for name, p in params.items()},
            "square": {name: torch.zeros_like(p) for name, p in params.items()},
            "steps": {name: p.new_zeros(()) for name, p in params.items()},
        }

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        for name, g in grads.items():
            own = (params[name], state["mean"][name], state["square"][name], state["steps"][name].add_(1))
            if isinstance(g, Factors) and own[0].is_cpu:  # client by client: what is formed stays in the cache
                for one, *row in zip(g.each(), *(v.unbind() for v in own), strict=True):
                    self._step(one, *row)
            else:
                self._step(g.formed() if isinstance(g, Factors) else g, *own)

    def _step(self, g: Tensor, w: Tensor, m: Tensor, v: Tensor, k: Tensor) -> None:
        """One tensor, or copies of it for clients who may have made different numbers of steps k (K,)."""
        if w.is_cpu and all(t.is_contiguous() for t in (w, m, v)):
            if k.dim() and not bool((k == k[0]).all()):
                for row in zip(*(t.unbind() for t in (g, w, m, v, k)), strict=True):
                    self._fused(*row)
            else:
                self._fused(g, w, m, v, k.flatten()[0])
            return
        (b1, b2), decay = self.betas, self.weight_decay
        if decay and self.decoupled:
            w.mul_(1 - self.lr * decay)
        elif decay:
            g = g.add(w, alpha=decay)
        k = k.view(*k.shape, *[1] * (w.dim() - k.dim()))
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        root = v.sqrt().div_((1 - b2**k).sqrt()).add_(self.eps)
        w.sub_((m / root).mul_(self.lr / (1 - b1**k)))

    def _fused(self, g: Tensor, w: Tensor, m: Tensor, v: Tensor, k: Tensor) -> None:
        """All of it in one pass over memory."""
        rule: Any = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        (b1, b2), decay = self.betas, self.weight_decay
        options = {"lr": self.lr, "beta1": b1, "beta2": b2, "weight_decay": decay, "eps": self.eps}
        rule([w], [g.contiguous()], [m], [v], [], [k.float()], amsgrad=False, maximize=False, **options)


STATES = ("average", "local", "reset")
"""What may become of the state of clients when halves are averaged."""


class Scheduled:
    """An optimiser whose rate follows the rounds, and how long its gradients may be.

    Round t = 1..T has lr times t / (w + 1) in the first w rounds (warm-up), then, with p = (t - w - 1) / (T - w), times
    1 (constant), (1 + cos(pi p)) / 2 (cosine), or 0.1 from p = 1/2 and 0.01 from p = 3/4 on (step). With ``clip_norm``
    a longer gradient of a client's half, or of its copy of the server half, is shortened to that length.

    >>> rates = Scheduled(SGD(1.0), "cosine", warmup=1, rounds=5)
    >>> [round(rates.begin(t).lr, 3) for t in range(1, 6)]
    [0.5, 1.0, 0.854, 0.5, 0.146]
    """

    def __init__(
        self,
        inner: Any,
        schedule: str = "constant",
        warmup: int = 0,
        rounds: int = 1,
        clip_norm: float = 0.0,
        at_sync: str = "average",
    ) -> None:
        """``at_sync``: what becomes of the state of clients (`TrainConfig.optimizer_state`)."""
        self.inner, self.factor, self.clip_norm = inner, SCHEDULES[one_of("schedule", schedule, SCHEDULES)], clip_norm
        self.at_sync = one_of("optimizer_state", at_sync, STATES)
        self.warmup, self.rounds = warmup, rounds
        self.linear: bool = inner.linear and not clip_norm
        self.takes_factors: bool = getattr(inner, "takes_factors", inner.linear)
        self.changes = warmup > 0 or schedule != "constant"
        self.base = getattr(inner, "lr", math.nan)
        if self.changes and math.isnan(self.base):
            raise SplitcastError(f"schedule: {type(inner).__name__} has no lr that could change; use constant")

    @property
    def affine(self) -> Affine | None:
        """(a, c) if a step is w = a w + c g."""
        return None if self.clip_norm else getattr(self.inner, "affine", None)

    def begin(self, t: int) -> Any:
        """A round begins; returns the optimiser with its rate."""
        if self.changes:
            into = t - self.warmup - 1
            share = self.factor(into / max(1, self.rounds - self.warmup)) if into >= 0 else t / (self.warmup + 1)
            self.inner.lr = self.base * share
        return self.inner

    def init(self, params: Params) -> dict[str, Params]:
        state: dict[str, Params] = self.inner.init(params)
        return state

    def step(self, params: Params, state: Mapping[str, Params], grads: Mapping[str, Gradient]) -> None:
        self.inner.step(params, state, grads)


def at_sync(optimiser: Any) -> str:
    """What becomes of the state of clients when weights are averaged: average, local or reset."""
    return str(getattr(optimiser, "at_sync", "average"))


def clipped(grads: Mapping[str, Gradient], norm: float, *, stacked: bool) -> dict[str, Gradient]:
    """Gradients no longer than ``norm`` over all parameters, each client's by its own length, as
    `torch.nn.utils.clip_grad_norm_` does it.

    >>> clipped({"a": torch.tensor([[3.0], [0.3]]), "b": torch.tensor([[4.0], [0.4]])}, 1.0, stacked=True)["a"].tolist()
    [[0.5999999046325684], [0.30000001192092896]]
    """
    formed = {k: g.formed() if isinstance(g, Factors) else g for k, g in grads.items()}
    lead = int(stacked)
    squares = torch.stack([g.double().flatten(lead).square().sum(-1) for g in formed.values()]).sum(0)
    shorten = (norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return {k: g * shorten.to(g.dtype).view(*shorten.shape, *[1] * (g.dim() - lead)) for k, g in formed.items()}


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "step": lambda p: 1.0 if p < 0.5 else 0.1 if p < 0.75 else 0.01,
}


def _add(grad: Gradient, target: Tensor, *, scale: float, keep: float = 1.0) -> Tensor:
    """target = keep * target + scale * grad, in place."""
    if isinstance(grad, Factors):
        grad.add_to(target, scale=scale, keep=keep)
        return target
    return (target.mul_(keep) if keep != 1 else target).add_(grad, alpha=scale)


OPTIMISERS: Registry[Callable[..., Any]] = Registry("optimizer", takes=2)
OPTIMISERS["sgd"] = SGD
OPTIMISERS["nesterov"] = partial(SGD, nesterov=True)
OPTIMISERS["adam"] = Adam
OPTIMISERS["adamw"] = partial(Adam, decoupled=True)


def make_optimiser(train: TrainConfig, rate: float = 1.0, *, exact: bool = True, server: bool = False) -> Scheduled:
    """The optimiser a configuration names for the clients, or for the ``server``, at ``rate`` times its learning rate;
    ``module:function`` takes lr and momentum. ``exact``: client halves are averaged as they are, and not as rounded
    differences."""
    own = train.server_optimizer if server else ""
    name = own or train.optimizer
    made = OPTIMISERS.find(name, "server_optimizer" if own else None)
    if name == "nesterov" and not train.momentum:
        raise SplitcastError("momentum: nesterov needs one above 0, such as 0.9")
    if name not in OPTIMISERS and train.weight_decay:
        raise SplitcastError(f"weight_decay: {train.weight_decay:g} is not known to {name}; build it in there")
    lr = rate * ((server and train.server_lr) or train.lr)
    inner = made(lr, train.momentum, train.weight_decay) if name in OPTIMISERS else made(lr, train.momentum)
    state = one_of("optimizer_state", train.optimizer_state, ("auto", *STATES))
    if state == "auto":  # rounded, squares of gradients may become negative
        state = "average" if exact or inner.linear else "local"
    return Scheduled(inner, train.schedule, train.warmup, train.rounds, train.clip_norm, state)
