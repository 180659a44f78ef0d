"""Originals beside what attacks made of them."""

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from splitcast.base.files import write_atomically

SHOWN = 8
"""Samples in the grid."""


def save_grid(pictures: Mapping[str, Tensor], path: Path, shown: int = SHOWN) -> None:
    """One row for each attack, one column for each sample, on the grey or colour scale of the originals."""
    original = pictures["original"]
    low, high = float(original.min()), float(original.max())
    shown = min(shown, len(original))
    figure, axes = plt.subplots(
        len(pictures), shown, figsize=(1.05 * shown + 2.2, 1.08 * len(pictures)), squeeze=False, layout="constrained"
    )
    for row, (name, images) in zip(axes, pictures.items(), strict=True):
        for axis, image in zip(row, images[:shown], strict=True):
            scaled = ((image - low) / (high - low or 1.0)).clamp(0, 1).permute(1, 2, 0).numpy()
            axis.imshow(np.squeeze(scaled), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(name.replace(": ", ":\n"), rotation=0, ha="right", va="center", fontsize=10)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    plt.close(figure)
    write_atomically(path, drawn.getvalue())
