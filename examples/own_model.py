"""A model of your own, any module: what each cut costs, then a training. Run: python own_model.py"""

import sys

import torch
from torch import Tensor, nn

from splitcast import Config, SplitModel, train, with_values


class Residual(nn.Module):
    """A small network with skips: it can be cut where a single tensor is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 5, stride=2, padding=2)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = x + torch.relu(self.second(x))
        x = x + torch.relu(self.norm(self.third(x)))
        x = nn.functional.max_pool2d(x, 2)
        return self.head(x.flatten(1))


def main(rounds: int = 30) -> None:
    """Print the cuts, train at the second one."""
    torch.manual_seed(0)
    model = SplitModel.of(Residual(), torch.zeros(1, 1, 28, 28))
    for cut in model.profile():
        print(f"cut {cut.cut}: {cut.client_parameters} parameters at the client, {cut.smashed_values} values travel")
    config = with_values(Config(), scheme="sfl", cut=2, rounds=rounds, eval_every=10, lr=0.05)
    result = train(config, model=model)
    print(f"accuracy {100 * result.summary['accuracy']:.1f} % after {len(result.rounds)} rounds")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
