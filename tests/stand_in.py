"""Stand-ins for what the tests of a part need of others."""

from dataclasses import dataclass

import torch

from splitcast.base.codec import Codec


@dataclass
class StandIn:
    """Clients as a feedback and a link see them: who they are, their weights, and where in the training they are."""

    ids: list[int]
    rho: torch.Tensor | None = None
    place: tuple[int, int] = (1, 0)
    rows: list[int] | None = None


class Nonzero(Codec):
    """Positions (one byte) and values (four) of what is not zero: the size depends on what is sent."""

    name, varies, exact = "nonzero", True, True

    def nbytes(self, shape):
        return 5 * (torch.Size(shape).numel() // 2)  # half of it, expected

    def bound(self, shape):
        return 5 * torch.Size(shape).numel()

    def encode(self, x, draw=None):
        flat = x.flatten().float()
        at = flat.nonzero()[:, 0]
        return torch.cat([at.to(torch.uint8), flat[at].view(torch.uint8)])

    def decode(self, payload, shape):
        count = len(payload) // 5
        flat = torch.zeros(torch.Size(shape).numel())
        flat[payload[:count].long()] = payload[count:].clone().view(torch.float32)
        return flat.view(*shape)
