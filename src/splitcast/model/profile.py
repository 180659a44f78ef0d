"""What every cut of a model costs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitcast.model.split import SplitModel


@dataclass(frozen=True)
class CutProfile:
    """What one cut costs, per sample and in parameters."""

    cut: int
    behind: str
    """name of the last block before it"""
    client_parameters: int
    """phi(v)"""
    client_fraction: float
    """phi(v)/q"""
    privacy: float
    """log(1 + phi(v)/q), at least epsilon in P1"""
    smashed_values: int
    """values per sample that cross the cut, each way"""
    client_forward_flops: int
    client_backward_flops: int
    server_forward_flops: int
    server_backward_flops: int


def profile(model: "SplitModel") -> list[CutProfile]:
    """Parameters, traffic, FLOPs (a multiply-add is two) and privacy of every legal cut."""
    rows = []
    for cut in model.cuts:
        phi = model.client_size(cut)
        client, server = model.flops(0, cut), model.flops(cut, model.depth)
        rows.append(
            CutProfile(
                cut=cut,
                behind=model.names[cut - 1],
                client_parameters=phi,
                client_fraction=phi / model.size,
                privacy=math.log1p(phi / model.size),
                smashed_values=math.prod(model.smashed_shape(cut)),
                client_forward_flops=client[0],
                client_backward_flops=client[1],
                server_forward_flops=server[0],
                server_backward_flops=server[1],
            )
        )
    return rows


def as_rows(profile: Sequence[CutProfile]) -> list[dict[str, float | str]]:
    """The profile as JSON-ready rows."""
    return [asdict(row) for row in profile]
