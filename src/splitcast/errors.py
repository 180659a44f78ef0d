"""The one error a user can cause."""

from collections.abc import Iterable


class SplitcastError(Exception):
    """Bad input. The message is one line: the field, the bad value, and what is allowed.

    The command line prints it and exits with code 2.
    """


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is allowed.

    >>> one_of("partition", "iid", ["iid", "shards"])
    'iid'
    >>> one_of("partition", "iidd", ["iid", "shards"])
    Traceback (most recent call last):
    splitcast.errors.SplitcastError: partition: unknown 'iidd'; choose one of iid, shards
    """
    names = list(allowed)
    if value not in names:
        raise SplitcastError(f"{field}: unknown {value!r}; choose one of {', '.join(names)}")
    return value
