"""Training samples changed at random, afresh in every step: by name, or ``module:function`` of the user's.

A function takes samples (b, ...) and a `torch.Generator`, from which it draws all that is random, and returns samples
of the same shape. For a client's batch the generator is a function of seed, round, local step and client, for a pool
of seed, round and step: a run can be repeated and resumed exactly, and a site draws what the simulator would have drawn
for it.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError, imported, shown
from splitcast.base.seeds import torch_stream

Augment = Callable[[Tensor, torch.Generator], Tensor]
_SHIFT = re.compile(r"shift:([1-9][0-9]{0,2})")


def mirror(x: Tensor, generator: torch.Generator) -> Tensor:
    """Maps (b, C, H, W), each with left and right exchanged at a chance of one half."""
    _maps(x, "mirror")
    return torch.where(_below(2, x, generator).bool().view(-1, 1, 1, 1), x.flip(-1), x)


def shift(most: int, x: Tensor, generator: torch.Generator) -> Tensor:
    """Maps (b, C, H, W), each moved by up to ``most`` places up or down and left or right; edges are repeated.

    >>> moved = shift(1, torch.tensor([1.0, 2.0]).expand(90, 1, 1, 2), torch.Generator().manual_seed(0))
    >>> moved.view(90, 2).unique(dim=0).tolist()
    [[1.0, 1.0], [1.0, 2.0], [2.0, 2.0]]
    """
    _maps(x, f"shift:{most}")
    moved, places = torch.empty_like(x), [torch.arange(size, device=x.device) for size in x.shape[2:]]
    down, right = (_below(2 * most + 1, x, generator) for _ in range(2))
    for by in set(zip(down.tolist(), right.tolist(), strict=True)):
        rows = (down == by[0]) & (right == by[1])
        i, j = ((at + k - most).clamp(0, len(at) - 1) for at, k in zip(places, by, strict=True))  # no memory by `most`
        moved[rows] = x[rows][:, :, i][..., j]
    return moved


def _below(many: int, x: Tensor, generator: torch.Generator) -> Tensor:
    """An integer below ``many`` for every sample."""
    return torch.randint(many, (len(x),), generator=generator, device="cpu").to(x.device)


def _maps(x: Tensor, name: str) -> None:
    if x.dim() != 4:
        raise SplitcastError(f"{name} takes images or feature maps, not samples of {tuple(x.shape[1:])}")


def find_augment(name: str, field: str = "augment") -> Augment | None:
    """The function of a name, or those of several with commas between, one after the other; None for none.

    >>> find_augment("mirror,shift:2")(torch.ones(3, 1, 4, 4), torch.Generator()).shape
    torch.Size([3, 1, 4, 4])
    """
    found = [_named(each, field) for each in name.split(",")] if name else []
    if len(found) < 2:
        return found[0] if found else None

    def every(x: Tensor, generator: torch.Generator) -> Tensor:
        for each in found:
            x = each(x, generator)
        return x

    return every


def _named(name: str, field: str) -> Augment:
    if name == "mirror":
        return mirror
    if found := _SHIFT.fullmatch(name):
        return partial(shift, int(found[1]))
    module, _, function = name.partition(":")
    if module in ("mirror", "shift") or not (module and function.isidentifier()):
        raise SplitcastError(
            f"{field}: {shown(name)} is unknown; allowed are mirror, shift:1 to shift:999, module:function, or several "
            "with commas"
        )
    made: Augment = imported(field, name, takes=2)
    return made


def changed(augment: Augment, x: Tensor, generator: torch.Generator, field: str = "augment") -> Tensor:
    """Samples (b, ...) as a function, which need not be ours, changes them."""
    try:
        made = augment(x, generator)
    except Exception as error:  # of whatever kind the function raises
        said = " ".join(str(error).split()) or type(error).__name__
        raise SplitcastError(f"{field}: {said}") from error
    if not isinstance(made, Tensor) or made.shape != x.shape:
        what = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise SplitcastError(f"{field}: returned {what}; allowed is a tensor of {tuple(x.shape)}, as it was given")
    return made


def augmented(augment: Augment, x: Tensor, seed: int, round_: int, step: int, clients: Sequence[int]) -> Tensor:
    """The samples (K, b, ...) of these clients in a local step."""
    made = torch.empty_like(x)
    for k, client in enumerate(clients):
        made[k] = changed(augment, x[k], torch_stream(seed, "augment", round_, step, client))
    return made
