"""The paper's claims beside what was measured, kept over several calls: `claims.json`, and `claims.md` for people.

The paper makes its claims for all data sets: `across.md` has those that were judged on more than one, with their
weakest verdict.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitcast.run.records import write_atomically
from splitcast.studies.reproduce.draw import Drawn
from splitcast.studies.reproduce.verdicts import Verdict, all_of

HEADINGS = ("figure", "paper", "measured", "verdict", "command")


def keep(folder: Path, figure: str, drawn: Drawn, command: str, order: Sequence[str]) -> None:
    """Add or replace what one figure says; ``order`` are all figures."""
    file = folder / "claims.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known[figure] = {"caption": drawn.caption, "command": command, "claims": [asdict(claim) for claim in drawn.claims]}
    known = {name: known[name] for name in order if name in known}
    write_atomically(file, (json.dumps(known, indent=2, ensure_ascii=False) + "\n").encode())
    write_atomically(folder / "claims.md", markdown(known).encode())


def across(out: Path) -> None:
    """Claims that were judged on several data sets, as far as there are any: `across.md`."""
    files = sorted(out.glob("*/claims.json"))
    known = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    verdicts: dict[tuple[str, str], dict[str, Verdict]] = {}
    for dataset, figures in known.items():
        for name, page in figures.items():
            for claim in page["claims"]:
                verdicts.setdefault((name, claim["paper"]), {})[dataset] = claim["verdict"]
    several = {claim: found for claim, found in verdicts.items() if len(found) > 1}
    if not several:
        return
    lines = ["| figure | paper | " + " | ".join(known) + " | on all of these |", "|" + "---|" * (len(known) + 3)]
    for (name, paper), found in several.items():
        cells = (name, paper, *(found.get(dataset, "–") for dataset in known), f"**{all_of(found.values())}**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    write_atomically(out / "across.md", ("\n".join(lines) + "\n").encode())


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
