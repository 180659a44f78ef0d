"""What `splitcast attack` left in a run folder, for the page."""

import base64
import math
from pathlib import Path
from typing import Any

from splitcast.base.errors import SplitcastError
from splitcast.base.files import read_bounded
from splitcast.run.strict import LINE_BYTES, parsed
from splitcast.studies.privacy.attack import FILE, PICTURE, half_known

PICTURE_BYTES = 4_000_000
PNG = b"\x89PNG\r\n\x1a\n"
NUMBERS = ("ssim", "psnr", "mse", "recognised")
MOST_ROWS = 50


def attack_document(run: Path) -> dict[str, Any] | None:
    """Findings and the picture as a data address, as far as the files, which may be anybody's, have them in that form;
    None if the run was never attacked."""
    try:
        found = parsed(read_bounded(run / FILE, LINE_BYTES))
        rows = [_row(row) for row in found["rows"][:MOST_ROWS]]
        labels = [[str(name)[:100], _share(share)] for name, share in found.get("labels", {}).items()][:MOST_ROWS]
        about = {"cut": int(found["cut"]), "codec": str(found["codec"])[:100], "samples": int(found["samples"])}
    except (SplitcastError, ValueError, KeyError, TypeError, OverflowError, AttributeError):
        return None
    return about | {"rows": rows, "labels": labels, "picture": _picture(run / PICTURE)}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: float(row[name]) for name in NUMBERS}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("not a finding")
    known = half_known(row["knows_half"], row["possible"])
    return numbers | {"attack": str(row["attack"])[:100], "half": known if row["steps"] else ""}


def _share(value: Any) -> float:
    share = float(value)
    if not 0 <= share <= 1:
        raise ValueError("not a share")
    return share


def _picture(file: Path) -> str:
    try:
        content = read_bounded(file, PICTURE_BYTES)
    except SplitcastError:
        return ""
    return "data:image/png;base64," + base64.b64encode(content).decode() if content.startswith(PNG) else ""
