"""The one error a user can cause, and the checks of names that users give."""

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_limits: tuple[tuple[str, ...], ...] = ()  # of the whole process: calls come in on other threads
_lock = Lock()
LONGEST = 2500
"""Letters of an error."""


class SplitcastError(Exception):
    """Bad input. The message is one line: the field, the bad value, and what is allowed.

    The command line prints it and exits with code 2. Whatever a name or value brings along, it stays one line of
    printable characters, and not a long one.

    >>> print(SplitcastError("out: a\\nb is a file"))
    out: a?b is a file
    """

    def __init__(self, message: str = "") -> None:
        line = "".join(letter if letter.isprintable() else "?" for letter in f"{message}"[:LONGEST])
        super().__init__(line if len(f"{message}") <= LONGEST else f"{line[:-4]} ...")


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is allowed.

    >>> one_of("partition", "iid", ["iid", "shards"])
    'iid'
    >>> one_of("partition", "iidd", ["iid", "shards"])
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: partition: unknown 'iidd'; choose one of iid, shards
    """
    names = list(allowed)
    if value not in names:
        raise SplitcastError(f"{field}: unknown {shown(value)}; choose one of {', '.join(names)}")
    return value


def shown(value: Any, most: int = 80) -> str:
    """A value as it appears in an error: on one line, and not long.

    >>> shown("a\\nb"), shown("a" * 999, most=8)
    ("'a\\\\nb'", "'aaa ...")
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a list nested too deeply
        return f"an unprintable {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def said_by(error: BaseException) -> str:
    """What somebody else's error says, on one line, and not long."""
    return " ".join(f"{error}".split())[:300] or type(error).__name__


def imported(field: str, path: str, takes: int) -> Any:
    """The function that ``module:function`` stands for, which can be called with so many arguments.

    >>> imported("policy", "math:sqrt", takes=1)(9)
    3.0
    >>> imported("policy", "math:pi", takes=1)
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: policy: 'math:pi' is not a function of 1 argument(s)
    """
    module, name = _parts(path)
    if not (_MODULE.fullmatch(module) and name.isidentifier()):
        raise SplitcastError(f"{field}: {shown(path)} is not of the form module:function")
    limits = _limits
    if not all(_allows(limit, module, name) for limit in limits):  # before the module runs
        raise _refusal(field, path, limits)
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a module does while it is imported
        raise SplitcastError(f"{field}: cannot import {shown(path)}: {said_by(error)}") from error
    if not callable(found):
        raise SplitcastError(f"{field}: {shown(path)} is not a function of {takes} argument(s)")
    home = f"{found.__module__}" if inspect.isroutine(found) or inspect.isclass(found) else module
    if not all(path in limit or _allows(limit, home, name) for limit in limits):  # what a module itself has imported
        raise _refusal(field, path, limits)
    try:
        inspect.signature(found).bind(*range(takes))
    except TypeError:
        raise SplitcastError(f"{field}: {shown(path)} is not a function of {takes} argument(s)") from None
    except ValueError:  # written in C, without a signature
        pass
    return found


@contextmanager
def imports_allowed(prefixes: Sequence[str]) -> Iterator[None]:
    """Within, `imported` takes only from these modules and those below them, in every thread of the process.

    An entry is a module or package, or an exact ``module:function``; no entry, no import. Where several are in force,
    all must allow. Under a module's entry come the functions that are defined there or below, not those that it
    imports from elsewhere; these need their exact entry.

    >>> with imports_allowed(["my_pkg"]):
    ...     imported("arch", "cProfile:run", takes=2)
    Traceback (most recent call last):
    splitcast.base.errors.NotAllowedError: arch: 'cProfile:run' may not be imported here; allowed are my_pkg
    """
    global _limits
    limit = _entries(prefixes)
    with _lock:
        _limits = (*_limits, limit)
    try:
        yield
    finally:
        with _lock:  # other threads may have come or gone: take out one that is equal to ours
            at = _limits.index(limit)
            _limits = _limits[:at] + _limits[at + 1 :]


def limit_imports(prefixes: Sequence[str]) -> None:
    """As `imports_allowed`, until the process ends."""
    global _limits
    limit = _entries(prefixes)
    with _lock:
        _limits = (*_limits, limit)


def _parts(path: str) -> tuple[str, str]:
    module, _, name = path.partition(":")
    return module, name


def _entries(prefixes: Sequence[str]) -> tuple[str, ...]:
    entries = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
    for entry in entries:
        module, name = _parts(entry)
        if not _MODULE.fullmatch(module) or (":" in entry and not name.isidentifier()):
            raise SplitcastError(f"imports: {shown(entry)} is not a module, nor of the form module:function")
    return entries


def _allows(limit: tuple[str, ...], module: str, name: str) -> bool:
    return any(f"{module}:{name}" == entry or f"{module}.".startswith(f"{entry}.") for entry in limit)


class NotAllowedError(SplitcastError):
    """A module that may not be imported here."""


def _refusal(field: str, path: str, limits: tuple[tuple[str, ...], ...]) -> NotAllowedError:
    entries = dict.fromkeys(entry for limit in limits for entry in limit)
    allowed = [each for each in entries if all(_allows(limit, *_parts(each)) for limit in limits)]
    return NotAllowedError(
        f"{field}: {shown(path)} may not be imported here; allowed are {', '.join(allowed) or 'none'}"
    )
