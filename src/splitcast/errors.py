"""The one error a user can cause, and the checks of names that users give."""

import importlib
import inspect
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


def imported(field: str, path: str, takes: int) -> Any:
    """The function that ``module:name`` stands for, which can be called with so many arguments.

    >>> imported("policy", "math:sqrt", takes=1)(9)
    3.0
    >>> imported("policy", "math:pi", takes=1)
    Traceback (most recent call last):
    splitcast.errors.SplitcastError: policy: 'math:pi' is not a function of 1 argument(s)
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SplitcastError(f"{field}: cannot import {path!r}: {error}") from None
    try:
        inspect.signature(found).bind(*range(takes))
    except TypeError:
        raise SplitcastError(f"{field}: {path!r} is not a function of {takes} argument(s)") from None
    except ValueError:  # written in C, without a signature
        pass
    return found
