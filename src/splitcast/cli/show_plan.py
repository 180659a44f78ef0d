"""What a person sees of a plan."""

import json
from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.table import Table

from splitcast.base.config import Config
from splitcast.base.errors import SplitcastError
from splitcast.cost.latency import PARTS
from splitcast.cost.memory import GB, least_room
from splitcast.model.split import SplitModel
from splitcast.studies.per_client import plan_batches, plan_per_client
from splitcast.studies.plan import CutPlan, Plan, plan
from splitcast.studies.plan_figure import plot_gantt

MOST_ROWS = 20


def run_plan(
    config: Config, draws: int, out: Path, model: SplitModel | None, classes: int | None, as_json: bool
) -> None:
    """`splitcast plan`."""
    made = plan(config, draws, model, classes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [f"client {c.client}" + (f" ({c.distance_m:.0f} m)" if c.distance_m else "") for c in made.clients]
        plot_gantt(
            {"optimal shares": made.optimal, "equal shares": made.equal}, names, out / "gantt", title_of(made, config)
        )
    except OSError as error:
        raise SplitcastError(f"out: cannot write to {out}: {error.strerror}") from None
    if as_json:
        print(json.dumps(made.as_json() | {"figure": str(out / "gantt.png")}, indent=2))
        return
    console = Console()
    net = config.network
    console.print(
        f"{made.scheme}: mean of {made.draws} rounds, {len(made.clients)} clients, {net.bandwidth_hz / 1e6:g} MHz, "
        f"{net.allocation} shares, {net.workload} workload, "
        f"privacy at least {net.epsilon:g}, cost = {net.gamma_weight:g} Γ + latency"
        + (f" + {net.energy_weight:g} s/J" if net.energy_weight else "")
        + (f", at most {net.energy_cap_j:g} J per client and round" if net.energy_cap_j else ""),
        Columns(cut_tables(made, config)),
        *([privacy_table(made)] if net.leakage else []),
        *([format_table(made)] if config.policy.uplink_choices else []),
        *(f"ruled out: cut {row.cut}, {why}" for row in made.pairs for why in _reasons(row, config)),
        title_of(made, config),
        Columns(client_tables(made)),
        f"figure: {out / 'gantt.png'}",
        sep="\n",
        highlight=False,
    )


def run_per_client(config: Config, draws: int, model: SplitModel | None, as_json: bool) -> None:
    """`splitcast plan --per-client`."""
    if config.split.scheme == "merge-sfl":
        run_batches(config, draws, model, as_json)
        return
    made = plan_per_client(config, draws, model)
    if as_json:
        print(json.dumps(made.as_json() | {"common_s": made.common_s if made.common_cut else None}, indent=2))
        return
    table = _table(f"cuts of {len(made.cuts)} clients", "cut", "clients", "GB each", "which")
    for cut in sorted(set(made.cuts)):
        mine = [n for n, own in enumerate(made.cuts) if own == cut]
        shown = ", ".join(str(n) for n in mine[:MOST_ROWS]) + (" ..." if len(mine) > MOST_ROWS else "")
        table.add_row(str(cut), str(len(mine)), f"{made.memory_gb[mine[0]]:.4f}", shown)
    common = (
        f"{made.common_s:.4g} s at cut {made.common_cut} for all" if made.common_cut else "no cut is allowed to all"
    )
    net = config.network
    weighed = f"{made.objective:.4g} s with {net.energy_weight:g} s/J" if net.energy_weight else f"{made.seconds:.4g} s"
    Console().print(
        f"{made.scheme}: mean of {made.draws} rounds, {net.bandwidth_hz / 1e6:g} MHz",
        table,
        f"round {made.seconds:.4g} s (median {made.median_s:.4g}, 95 % {made.p95_s:.4g}) and {made.energy_j:.4g} J, "
        f"{made.most_j:.4g} J at most of a client",
        f"{weighed}, at least {made.lower_bound_s:.4g} s whatever the cuts (gap {made.gap:.2%})",
        common + (f", {made.gain:.3g} times as much" if made.common_cut else ""),
        f"to train it: --cut {','.join(str(cut) for cut in made.cuts)}" if len(made.cuts) <= 100 else "",
        sep="\n",
        highlight=False,
    )


def run_batches(config: Config, draws: int, model: SplitModel | None, as_json: bool) -> None:
    """`splitcast plan --per-client` of a scheme with one cut and a batch size for every client."""
    made = plan_batches(config, draws, model)
    if as_json:
        print(json.dumps(made.as_json(), indent=2))
        return
    table = _table(f"batches of {len(made.batches)} clients", "samples", "clients", "which")
    for size in sorted(set(made.batches)):
        mine = [n for n, own in enumerate(made.batches) if own == size]
        shown = ", ".join(str(n) for n in mine[:MOST_ROWS]) + (" ..." if len(mine) > MOST_ROWS else "")
        table.add_row(str(size), str(len(mine)), shown)
    Console().print(
        f"{made.scheme}, cut {made.cut}: mean of {made.draws} rounds, {config.network.bandwidth_hz / 1e6:g} MHz",
        table,
        f"round {made.seconds:.4g} s, {made.samples_per_s:.4g} samples/s",
        f"{made.equal_s:.4g} s with {config.train.batch} for all, {made.equal_samples_per_s:.4g} samples/s",
        f"to train it: --merge-sfl.batches {' '.join(map(str, made.batches))}" if len(made.batches) <= 100 else "",
        sep="\n",
        highlight=False,
    )


def title_of(made: Plan, config: Config) -> str:
    """What the tables and the figure are about."""
    return (
        f"{made.scheme}, {_cut(made.best, config)}, {len(made.clients)} clients, "
        f"{config.network.bandwidth_hz / 1e6:g} MHz, batch {config.train.batch}: round {made.shown_round}"
    )


def _cut(row: CutPlan, config: Config) -> str:
    sent = f", {row.codec} up" if config.network.leakage or config.policy.uplink_choices else ""
    return "whole model on the client" if config.split.scheme == "fl" else f"cut {row.cut}{sent}"


def cut_tables(made: Plan, config: Config) -> list[Table]:
    """Loads and latency of every cut; the best is marked, and so are those that violate privacy or memory."""
    loads = _table("load", "cut", "privacy", "Mbit up", "Mbit down", "client MFLOP", "server MFLOP", "client MB", "J")
    late = ["outage"] if config.train.deadline_s else []
    times = _table("seconds", "cut", *PARTS, "mean", "median", "p95", *late, "if equal", "cost")
    for row in made.cuts:
        name, style = _marked("all" if config.split.scheme == "fl" else row.cut, row, made)
        amounts = (row.up_bits, row.down_bits, row.client_flops, row.server_flops, row.memory.total)
        loads.add_row(
            name, f"{row.privacy:.3g}", *(f"{x / 1e6:,.1f}" for x in amounts), f"{row.energy_j:.3g}", style=style
        )
        spread = [f"{x:.3f}" for x in (*row.parts_s.values(), row.latency_s, row.median_s, row.p95_s)]
        missed = [] if row.outage is None else [f"{row.outage:.1%}"]
        times.add_row(name, *spread, *missed, f"{row.equal_share_s:.3f}", f"{row.objective:.3f}", style=style)
    return [loads, times]


def privacy_table(made: Plan) -> Table:
    """Privacy of every cut and format as modelled and as measured."""
    table = _table("privacy", "cut", "format", "log(1+φ/q)", "SSIM", "strongest attack", "cost")
    for row in sorted(made.pairs, key=lambda row: row.cut):
        name, style = _marked(row.cut, row, made)
        measured = ("", "never attacked") if row.ssim is None else (f"{row.ssim:.3f}", row.attack)
        table.add_row(name, row.codec, f"{row.privacy:.3g}", *measured, f"{row.objective:.3f}", style=style)
    return table


def format_table(made: Plan) -> Table:
    """Every cut in every format to choose from."""
    table = _table("formats", "cut", "format", "Mbit up", "mean s", "median", "p95", "cost")
    for row in sorted(made.pairs, key=lambda row: row.cut):
        name, style = _marked(row.cut, row, made)
        seconds = [f"{x:.3f}" for x in (row.latency_s, row.median_s, row.p95_s, row.objective)]
        table.add_row(name, row.codec, f"{row.up_bits / 1e6:,.2f}", *seconds, style=style)
    return table


def _marked(name: object, row: CutPlan, made: Plan) -> tuple[str, str]:
    """Name and style of a row: an arrow for the best, a cross for what is ruled out."""
    if row == made.best:
        return f"→ {name}", "bold"
    return (str(name), "") if row.allowed else (f"✗ {name}", "strike dim")


def _reasons(row: CutPlan, config: Config) -> Iterator[str]:
    """Why a cut may not be taken."""
    room = least_room(config.network.client_memory_gb)
    if row.leak:
        yield row.leak
    if room and row.memory.total > room * GB:
        yield f"needs {row.memory.total / GB:.3g} GB of the {room:g} GB of a client"


def client_tables(made: Plan) -> list[Table]:
    """Who gets what at the best cut, and how long each part takes it."""
    shares = _table("shares", "client", "m", "gain dB", "W", "MHz up", "MHz down", "server GFLOP/s")
    times = _table("seconds", "client", *PARTS, "waits", "J compute", "J air")
    for row in made.clients[:MOST_ROWS]:
        shares.add_row(
            str(row.client),
            "" if row.distance_m is None else f"{row.distance_m:.0f}",
            f"{row.gain_db:.1f}",
            f"{row.power_w:.3f}",
            f"{row.uplink_hz / 1e6:.3f}",
            f"{row.downlink_hz / 1e6:.3f}" if row.downlink_hz else "all",
            f"{row.server_flops_per_s / 1e9:.3f}",
        )
        joules = (f"{x:.3g}" for x in (row.compute_j, row.air_j))
        times.add_row(str(row.client), *(f"{x:.3f}" for x in (*row.parts_s.values(), row.waiting_s)), *joules)
    if len(made.clients) > MOST_ROWS:
        shares.caption = f"the first {MOST_ROWS} of {len(made.clients)} clients; --json lists all"
    return [shares, times]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
