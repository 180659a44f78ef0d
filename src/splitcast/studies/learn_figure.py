"""The learning curve of a cut policy."""

from pathlib import Path

import matplotlib.pyplot as plt

from splitcast.studies.curves import COLOURS, DASHES
from splitcast.studies.learn import Learned


def plot_learning(learned: Learned, path: Path, title: str) -> None:
    """Mean cost per round against episodes, and what other policies cost on held-out episodes; PNG and SVG.

    The cost axis is logarithmic: early rounds break privacy and cost C.
    """
    figure, axis = plt.subplots(figsize=(8.2, 4.4), layout="constrained")
    episodes, rewards = zip(*learned.curve, strict=True)
    axis.plot(episodes, [-reward for reward in rewards], color=COLOURS[0], linewidth=1.6, label="while learning")
    fixed = [row for row in learned.rows if row.name.startswith("fixed")]
    shown = [learned.row("ddqn"), learned.row("greedy"), learned.row("clairvoyant"), learned.row("random")]
    labels = ["learned", "greedy", "clairvoyant", "random"]
    best = min(fixed, key=lambda row: row.cost)
    for k, (row, label) in enumerate(
        zip([*shown, best], [*labels, f"best fixed cut, {best.name[6:]}"], strict=True), 1
    ):
        level = row.cost / learned.rounds
        axis.axhline(level, color=COLOURS[k], linestyle=DASHES[k], linewidth=1.4, label=f"{label}: {level:.3g} s")
    axis.set_yscale("log")
    axis.set_xlabel("episode")
    axis.set_ylabel("cost per round, w Γ + seconds")
    axis.grid(alpha=0.3, which="both")
    axis.legend(title=f"held out, {learned.held_out} episodes of {learned.rounds} rounds", fontsize=9)
    axis.set_title(title, fontsize=10)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)
