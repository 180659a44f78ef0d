"""The one error a user can cause, and the checks of names that users give."""

import importlib
from collections.abc import Iterable
from typing import Any


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


def imported(field: str, path: str) -> Any:
    """What ``module:name`` stands for.

    >>> imported("policy", "math:pi") > 3
    True
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SplitcastError(f"{field}: cannot import {path!r}: {error}") from None
