"""For the reference: examples of docstrings (>>> and what they print) become blocks of code."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with >>>."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that may have a docstring."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with its examples in fences."""
    blocks = re.split(r"(\n[ \t]*\n)", text)
    return "".join(f"```pycon\n{block}\n```" if block.lstrip().startswith(">>>") else block for block in blocks)
