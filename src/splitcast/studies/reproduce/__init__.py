"""Every experiment of the paper, and ours beside them: one file per figure, trainings shared between them."""

from collections.abc import Callable

from splitcast.studies.reproduce import (
    ablation,
    bandwidth,
    basis,
    blockage,
    bytes,
    depth,
    fig3,
    fig4,
    fig5,
    fig6,
    fig7,
    fig8,
    fleet,
    formats,
    parts,
    per_client,
    policies,
    privacy,
    rate,
    scalability,
    settings,
    text,
    waiting,
)
from splitcast.studies.reproduce.draw import Drawn
from splitcast.studies.reproduce.study import Study

FIGURES: dict[str, Callable[[Study], Drawn]] = {
    "fig3": fig3.draw,
    "fig4": fig4.draw,
    "fig5": fig5.draw,
    "fig6": fig6.draw,
    "fig7": fig7.draw,
    "fig8": fig8.draw,
    "scalability": scalability.draw,
    "rate": rate.draw,
    "settings": settings.draw,
    "basis": basis.draw,
    "depth": depth.draw,
    "bandwidth": bandwidth.draw,
    "ablation": ablation.draw,
    "parts": parts.draw,
    "privacy": privacy.draw,
    "bytes": bytes.draw,
    "policies": policies.draw,
    "blockage": blockage.draw,
    "formats": formats.draw,
    "text": text.draw,
    "text-home": text.draw_home,
    "per-client": per_client.draw,
    "fleet": fleet.draw,
    "waiting": waiting.draw,
}
TEXTS = ("text", "text-home")
"""Those of texts, whatever the data set is; `all` is all others."""
