"""The paper's claims beside what was measured, kept over several calls: `claims.json`, and `claims.md` for people."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitcast.run.records import write_atomically
from splitcast.studies.reproduce.draw import Drawn

HEADINGS = ("figure", "paper", "measured", "verdict", "command")


def keep(folder: Path, figure: str, drawn: Drawn, command: str, order: Sequence[str]) -> None:
    """Add or replace what one figure says; ``order`` are all figures."""
    file = folder / "claims.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known[figure] = {"caption": drawn.caption, "command": command, "claims": [asdict(claim) for claim in drawn.claims]}
    known = {name: known[name] for name in order if name in known}
    write_atomically(file, (json.dumps(known, indent=2, ensure_ascii=False) + "\n").encode())
    write_atomically(folder / "claims.md", markdown(known).encode())


def rows(figure: str, drawn: Drawn, command: str) -> list[tuple[str, ...]]:
    """`HEADINGS` of every claim of a figure."""
    return [(figure, claim.paper, claim.measured, claim.verdict, command) for claim in drawn.claims]


def markdown(known: dict[str, Any]) -> str:
    """A table of claims and the captions of all figures."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for name, page in known.items():
        for claim in page["claims"]:
            cells = (name, claim["paper"], claim["measured"], f"**{claim['verdict']}**", f"`{page['command']}`")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for name, page in known.items():
        lines += [
            "",
            f"**{name}** ([CSV]({name}.csv), [SVG]({name}.svg)). {page['caption']}",
            "",
            f"![{name}]({name}.png)",
        ]
    return "\n".join(lines) + "\n"
