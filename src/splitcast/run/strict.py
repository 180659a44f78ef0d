"""Checks of what was read from a file that anybody may have written: the value, or `ValueError`."""

import json
from collections.abc import Callable
from typing import Any

LINE_BYTES = 1_000_000
"""Longest line of `rounds.jsonl`, largest JSON or TOML file."""
ENTRIES = 1000
"""Most entries of a table, most characters of a text."""


def parsed(content: bytes) -> Any:
    """JSON in UTF-8, without NaN and Infinity."""
    try:
        text = content.decode().strip(" \t\r\n")
        value, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if end != len(text):
        raise ValueError("more than one value")
    return value


def whole(value: Any) -> int:
    """An integer of 64 bits.

    >>> whole(-3)
    -3
    >>> whole(True)
    Traceback (most recent call last):
    ValueError: True
    """
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    raise ValueError(shortened(value))


def count(value: Any) -> int:
    """An integer of 64 bits that is not negative."""
    if type(value) is int and 0 <= value < 2**63:
        return value
    raise ValueError(shortened(value))


def number(value: Any) -> float:
    """A finite number."""
    if type(value) is float and value - value == 0.0:
        return value
    return float(whole(value))


def text(value: Any) -> str:
    """A short text that can be written as UTF-8."""
    if type(value) is str and len(value) <= ENTRIES:
        if not value.isascii():
            value.encode()  # UnicodeEncodeError is a ValueError
        return value
    raise ValueError(shortened(value))


def maybe_number(value: Any) -> float | None:
    """A finite number or None."""
    return None if value is None else number(value)


def optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What ``check`` allows, or None."""
    return lambda value: None if value is None else check(value)


def table(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """A table, as JSON has them, of not too many short texts and what ``check`` allows."""

    def checked(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > ENTRIES:
            raise ValueError(shortened(value))
        for key, entry in value.items():
            if len(key) > ENTRIES or not key.isascii():
                text(key)
            check(entry)
        return value

    return checked


def row(check: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """A list of what ``check`` allows; the line that it is in limits how many."""

    def checked(value: Any) -> list[Any]:
        if type(value) is not list:
            raise ValueError(shortened(value))
        return [check(entry) for entry in value]

    return checked


def shortened(value: Any) -> str:
    """A foreign value for a message of one line.

    >>> shortened("line 1\\nline 2"), shortened([[1]])
    ("'line 1\\\\nline 2'", 'a list')
    """
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:40] + "...")
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
