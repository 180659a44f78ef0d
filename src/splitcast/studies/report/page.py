"""The page: one file that needs nothing else, neither a network nor a folder beside it."""

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from splitcast.base.errors import SplitcastError, imports_allowed
from splitcast.run.records import write_atomically
from splitcast.studies.report.document import document
from splitcast.studies.report.runs import read_runs

_PLACES = {
    "style": "report.css",
    "library": "vendor/echarts.common.min.js",
    "library_notice": "vendor/NOTICE",
    "script": "report.js",
}


def write_report(paths: Sequence[Path], out: Path | None = None, *, trust: bool = False) -> Path:
    """Write the page about these runs, by default into the first folder, and say where it is.

    A run folder may be anybody's: modules that its configuration names are imported only with ``trust``.
    """
    with nullcontext() if trust else imports_allowed([]):
        page = render(document(read_runs(paths)))
    target = out or paths[0] / "report.html"
    if target.is_dir():
        raise SplitcastError(f"out: {target} is a folder; name a file, such as {target / 'report.html'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page.encode())
    except OSError as error:
        raise SplitcastError(f"out: cannot write {target}: {error.strerror}") from None
    return target


def render(content: dict[str, Any], *, live: bool = False) -> str:
    """Template, style, script, chart library and data in one; ``live``, it asks its server what is new."""
    parts = {name: _asset(file) for name, file in _PLACES.items()}
    parts |= {"connect": "; connect-src 'self'" if live else ""}
    parts |= {"live": f"<script>\n{_asset('live.js')}\n</script>\n" if live else ""}
    parts |= {"title": escape(content["title"]), "data": embed(content)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("template.html"))


def embed(content: Any) -> str:
    r"""JSON that cannot end the script element it stands in.

    >>> embed("</script>")
    '"\\u003c/script\\u003e"'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("splitcast.studies.report") / "assets" / name).read_text(encoding="utf-8").strip()
