"""Things chosen by name: those built in, and the user's own as module:function."""

import re
from collections.abc import Mapping
from typing import TypeVar

from splitcast.base.errors import SplitcastError, imported, shown

T = TypeVar("T")

_NAME = re.compile(r"\w[\w.-]*")


class Registry(dict[str, T]):
    """Built-in names of one kind of thing, in order. Other names are of the form module:function.

    >>> shapes = Registry("shape", takes=1)
    >>> shapes["round"] = abs
    >>> list(shapes), shapes.find("round")(-3), shapes.find("math:sqrt")(9)
    (['round'], 3, 3.0)
    >>> shapes.find("rund")
    Traceback (most recent call last):
    splitcast.base.errors.SplitcastError: shape: unknown 'rund'; choose one of round, or module:function of yours
    """

    def __init__(self, field: str, takes: int, entries: Mapping[str, T] | None = None, forms: tuple[str, ...] = ()):
        """``field`` appears in errors, ``takes`` is how many arguments a function of the user's must take; ``forms``
        are further names that an error lists, and that whoever looks up treats apart, such as fixed:V."""
        super().__init__()
        self.field, self.takes, self.forms = field, takes, forms
        for name, entry in (entries or {}).items():
            self[name] = entry

    def __setitem__(self, name: str, entry: T) -> None:
        if not _NAME.fullmatch(name):  # a colon would hide someone's module
            raise SplitcastError(f"{self.field}: {shown(name)} cannot be a name; use letters, digits, _, - and .")
        super().__setitem__(name, entry)

    def find(self, name: str, field: str | None = None) -> T:
        """What a name stands for; errors begin with ``field``, which is the registry's own if not given."""
        if name in self:
            return self[name]
        if ":" not in name:
            raise self.unknown(name, field)
        own: T = imported(field or self.field, name, self.takes)
        return own

    def unknown(self, name: str, field: str | None = None) -> SplitcastError:
        """The error for a name that stands for nothing."""
        names = ", ".join((*self, *self.forms))
        return SplitcastError(
            f"{field or self.field}: unknown {shown(name)}; choose one of {names}, or module:function of yours"
        )
