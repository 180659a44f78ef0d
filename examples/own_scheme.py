"""A scheme of your own, beside a built-in one: a quarter of the gradients come back. Run: python own_scheme.py"""

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torch import Tensor

from splitcast import Config, with_values
from splitcast.base.codec import Codec
from splitcast.schemes.feedback import Feedback
from splitcast.schemes.program import Clients, Link
from splitcast.schemes.schemes import Split
from splitcast.studies.compare import compare, rows


@dataclass(frozen=True)
class Quarter(Feedback):
    """Each client gets the gradients of a quarter of its rows, times four, and zeros for the others."""

    mixes_clients: ClassVar[bool] = False

    def reply(self, grads: Tensor, clients: Clients, link: Link, codec: Codec) -> Tensor:
        kept = max(1, grads.shape[1] // 4)  # grads (K, b, *d)
        sent = link.unicast("gradient", grads[:, :kept] * (grads.shape[1] / kept), codec, clients)
        return torch.cat([sent, sent.new_zeros(len(sent), grads.shape[1] - kept, *sent.shape[2:])], dim=1)


class QuarterScheme(Split):
    """SplitFed with a quarter of the gradients."""

    name = "quarter"
    sync_every = 1
    feedback = Quarter()


def main(rounds: int = 30) -> None:
    """Compare it with SplitFed: a quarter of the bytes down, and what that costs."""
    config = with_values(Config(), arch="cnn-small", rounds=rounds, eval_every=10, cut=1, batch=16)
    with TemporaryDirectory() as folder:
        runs = compare(config, ["own_scheme:QuarterScheme", "sfl"], Path(folder))
    for row in rows(runs)[1]:
        print(f"{row.name}: {100 * (row.value or 0):.1f} %, {row.megabytes:.1f} MB")
    quarter, sfl = (each[0][0].kinds["down.gradient"] for each in runs.values())
    assert 4 * quarter == sfl


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
