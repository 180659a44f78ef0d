"""Links in one process: every byte passes here and is counted.

`SimulatedLink` gives the receiver what it would decode, without packing; `CountingLink` only counts, for planning.
`remote.link` really sends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.rounding import Draw, RoundingNoise
from splitcast.engine.values import Known, Mapped
from splitcast.schemes.messages import Coding, Direction, Ledger
from splitcast.schemes.program import Clients, Values


class CountingLink:
    """Sizes only: values arrive as they are."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def up(self, kind: str, x: Values | Tensor, codec: Codec, who: Clients) -> Values:
        codec = codec.at(who.place[0])
        self.count("up", kind, sizes(codec, x.shape, who), who.ids, coding=coding_of(codec, x.shape, who))
        return Known(x) if isinstance(x, Tensor) else x

    def unicast(self, kind: str, x: Tensor, codec: Codec, who: Clients) -> Tensor:
        codec = codec.at(who.place[0])
        self.count("down", kind, sizes(codec, x.shape, who), who.ids, coding=codec.work(x.shape[1:]))
        return x

    def broadcast(self, kind: str, x: Tensor, codec: Codec, who: Clients, *, rows: int = 0) -> Tensor:
        codec, shape = codec.at(who.place[0]), x.shape[1:]
        self.count("down", kind, codec.nbytes(shape), who.ids, broadcast=True, coding=codec.work(shape))
        return x

    def echo(self, arrived: Values) -> Tensor:
        return arrived.whole()

    def sent(self, kind: str) -> int:
        return next((m.on_air for m in reversed(self.ledger.messages) if m.kind == kind), 0)

    def compute(self, flops: float, who: Clients) -> None:
        self.ledger.joint(flops, who.ids)

    def note(self, name: str, value: float) -> None:
        self.ledger.note(name, value)

    def count(
        self,
        direction: Direction,
        kind: str,
        nbytes: int | Sequence[int],
        clients: Sequence[int],
        *,
        broadcast: bool = False,
        coding: Coding = (0.0, 0.0),
    ) -> None:
        """A message of so many bytes, or of so many each; one of no bytes is none."""
        if broadcast:
            self.ledger.broadcast(kind, nbytes, clients, coding)
        else:
            self.ledger.unicast(direction, kind, nbytes, clients, coding)

    def models(
        self, direction: Direction, values: int | Sequence[int], clients: Sequence[int], *, broadcast: bool = False
    ) -> None:
        """Weights of so many values to or from each client."""
        sizes = FP32.nbytes((values,)) if isinstance(values, int) else [FP32.nbytes((n,)) for n in values]
        self.count(direction, "model", sizes, clients, broadcast=broadcast)


class RoundingLink(CountingLink):
    """What goes down is rounded at random, in the same way wherever the clients are."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        super().__init__(ledger)
        self.seed = seed

    def noise(self, kind: str, codec: Codec, who: Clients, ids: Sequence[int] | None) -> Draw | None:
        """The draw of the present step for a message to or from each of these; None: for one broadcast."""
        return RoundingNoise(self.seed, *who.place).of(kind, ids, always=codec.draws)


class SimulatedLink(RoundingLink):
    """Values pass the codec and are not packed, unless only packing tells how large a message is."""

    def up(self, kind: str, x: Values | Tensor, codec: Codec, who: Clients) -> Values:
        values = Known(x) if isinstance(x, Tensor) else x
        codec = codec.at(who.place[0])
        # to the nearest grid point: what comes next is not linear, so being right on average would not help
        if who.rows is not None and not codec.exact:
            return Known(self._some_rows(kind, values.whole(), codec, who, who.rows), values.spans)
        if codec.varies or codec.draws:
            draw = self.noise(kind, codec, who, who.ids) if codec.draws else None
            return Known(self._sent("up", kind, values.whole(), codec, who, draw), values.spans)
        self.count("up", kind, sizes(codec, values.shape, who), who.ids, coding=coding_of(codec, values.shape, who))
        return values if codec.exact else Mapped(values, codec.through)

    def _some_rows(self, kind: str, x: Tensor, codec: Codec, who: Clients, rows: Sequence[int]) -> Tensor:
        """What arrives of the first rows of each client, each message without the others; these are zero."""
        arrived, each = torch.zeros_like(x), list[int]()
        for k, (n, count) in enumerate(zip(who.ids, rows, strict=True)):
            draw = self.noise(kind, codec, who, [n]) if codec.draws else None
            seen, (size,) = codec.measured(x[k : k + 1, :count], draw) if count else (arrived[k : k + 1, :0], [0])
            arrived[k, :count] = seen[0]
            each.append(size)
        self.count("up", kind, each, who.ids, coding=coding_of(codec, x.shape, who))
        return arrived

    def unicast(self, kind: str, x: Tensor, codec: Codec, who: Clients) -> Tensor:
        return self._sent("down", kind, x, codec, who, self.noise(kind, codec, who, who.ids))

    def broadcast(self, kind: str, x: Tensor, codec: Codec, who: Clients, *, rows: int = 0) -> Tensor:
        draw = self.noise(kind, codec, who, None)
        return self._sent("down", kind, x, codec, who, draw, broadcast=True, samples=not rows)

    def _sent(
        self,
        direction: Direction,
        kind: str,
        x: Tensor,
        codec: Codec,
        who: Clients,
        draw: Draw | None,
        *,
        broadcast: bool = False,
        samples: bool = True,
    ) -> Tensor:
        """``samples``: whether rows are those of a batch, of which each client may have fewer."""
        codec = codec.at(who.place[0])
        coding = codec.work(x.shape[1:])
        if codec.varies:
            values, each = codec.measured(x, draw)
            self.count(direction, kind, each[0] if broadcast else each, who.ids, broadcast=broadcast, coding=coding)
            return values
        nbytes = sizes(codec, x.shape, who) if samples else codec.nbytes(x.shape[1:])
        self.count(direction, kind, nbytes, who.ids, broadcast=broadcast, coding=coding)
        return codec.through(x, draw)


def sizes(codec: Codec, shape: Sequence[int], who: Clients) -> int | list[int]:
    """Bytes of a message (b, *d) of each client, or of so many of its rows as count."""
    if who.rows is None:
        return codec.nbytes(shape[1:])
    return [codec.nbytes((n, *shape[2:])) for n in who.rows]


def coding_of(codec: Codec, shape: Sequence[int], who: Clients) -> Coding:
    """Operations of a message (b, *d) of each client; where they differ, of the largest."""
    return codec.work((shape[1] if who.rows is None else max(who.rows, default=0), *shape[2:]))
