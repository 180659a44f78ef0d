"""Values of the clients of a group, (K, b, *d), worked out chunk by chunk when they are needed."""

from collections.abc import Callable, Sequence

from torch import Tensor

from splitcast.schemes.program import Values


class Rows(Values):
    """Rows of stored data: ``rows`` (K, b) of ``data`` (rows, *d)."""

    def __init__(self, data: Tensor, rows: Tensor, spans: Sequence[slice]) -> None:
        super().__init__(spans, (*rows.shape, *data.shape[1:]))
        self.data, self.rows = data, rows

    def chunk(self, k: int) -> Tensor:
        return self.data[self.rows[self.spans[k]]]


class Mapped(Values):
    """Values changed on their way; the last chunk is kept, since it may be asked for again."""

    def __init__(self, source: Values, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(source.spans, source.shape)
        self.source, self.change = source, change
        self.last: tuple[int, Tensor] | None = None

    def chunk(self, k: int) -> Tensor:
        if self.last is None or self.last[0] != k:
            self.last = k, self.change(self.source.chunk(k))
        return self.last[1]


class PerClient(Values):
    """Values changed, client by client: ``change`` takes a chunk and who of the group is in it."""

    def __init__(self, source: Values, change: Callable[[Tensor, slice], Tensor]) -> None:
        super().__init__(source.spans, source.shape)
        self.source, self.change = source, change

    def chunk(self, k: int) -> Tensor:
        return self.change(self.source.chunk(k), self.spans[k])


class Known(Values):
    """A tensor."""

    def __init__(self, values: Tensor, spans: Sequence[slice] | None = None) -> None:
        super().__init__([slice(0, len(values))] if spans is None else spans, values.shape)
        self.values = values

    def chunk(self, k: int) -> Tensor:
        return self.values[self.spans[k]] if len(self.spans) > 1 else self.values

    def whole(self) -> Tensor:
        return self.values


def chunked(values: Values | Tensor, spans: Sequence[slice]) -> Values:
    """Values in the chunks of a group."""
    return Known(values, spans) if isinstance(values, Tensor) else values


def whole(values: Values | Tensor) -> Tensor:
    """All of them, as a tensor."""
    return values if isinstance(values, Tensor) else values.whole()
