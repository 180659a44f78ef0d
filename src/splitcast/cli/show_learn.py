"""What a person sees of learning a policy."""

import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from splitcast.base.config import Config, LearnConfig, with_values
from splitcast.base.files import write_atomically
from splitcast.cli.options import Output
from splitcast.cli.progress import Bars
from splitcast.studies.learn import Learned, flat_after, learn_policy
from splitcast.studies.learn_figure import plot_learning
from splitcast.studies.report.document import train_command


def run_learning(config: Config, settings: LearnConfig, out: Path, output: Output) -> None:
    """`splitcast learn`."""
    bars = Bars()
    task = bars.add("learning", settings.episodes)

    def show(done: int, reward: float) -> None:
        if not output.silent:
            bars.move(task, done, f"reward per round {reward:9.3f}")

    absent = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)  # what cannot be written had better be known before
    try:
        with bars:
            learned = learn_policy(config, settings, show)
    except BaseException:
        for folder in absent:
            folder.rmdir()
        raise
    learned.agent.save(out / "policy.safetensors")
    facts = learned.as_json() | {"flat_after_episode": flat_after(learned.curve)}
    write_atomically(out / "learned.json", (json.dumps(facts, indent=2) + "\n").encode())
    plot_learning(learned, out / "learning", title_of(config))
    if output.json:
        print(json.dumps(facts | {"policy": str(out / "policy.safetensors"), "figure": str(out / "learning.png")}))
        return
    Console().print(
        table_of(learned),
        f"learned in {learned.seconds:.1f} s; legal cuts {list(learned.legal)}, penalty {learned.penalty:.4g}; "
        f"{100 * learned.regret:+.2f} % against greedy, {learned.row('ddqn').violations} privacy violations",
        f"use it:  {train_command(with_values(config, policy=f'ddqn:{out}/policy.safetensors'))}",
        f"figure: {out / 'learning.png'}",
        sep="\n",
        highlight=False,
    )


def title_of(config: Config) -> str:
    """What was learned for."""
    net = config.network
    moves = "moves charged" if config.policy.charge_migration else "moves free"
    return (
        f"{config.split.scheme}, {config.model.arch}, {config.data.clients} clients, {net.bandwidth_hz / 1e6:g} MHz, "
        f"{net.workload} workload, ε = {net.epsilon:g}, w = {net.gamma_weight:g}, {moves}"
    )


def table_of(learned: Learned) -> Table:
    """Every policy on the held-out episodes."""
    title = f"{learned.held_out} held-out episodes of {learned.rounds} rounds"
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in ("policy", "cost", "median, p95", "above best", "moves", "violations", "rounds at each cut"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in sorted(learned.rows, key=lambda row: row.cost):
        table.add_row(
            row.name,
            f"{row.cost:.1f}",
            f"{row.median:.1f}, {row.p95:.1f}",
            f"{100 * row.above_best:.2f} %",
            f"{row.moves:.1f}",
            str(row.violations),
            " ".join(str(count) for count in row.rounds_per_cut),
            style="bold" if row.name == "ddqn" else "",
        )
    return table
