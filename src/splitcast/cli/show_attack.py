"""`splitcast attack`: what came of attacks on a run, in the terminal."""

import json
from contextlib import nullcontext

from rich.console import Console
from rich.table import Table

from splitcast.base.errors import SplitcastError, imports_allowed
from splitcast.cli.options import AttackOptions
from splitcast.cli.progress import Bars
from splitcast.studies.privacy.attack import FILE, PICTURE, Findings, Told, attack, half_known
from splitcast.studies.privacy.networks import Progress
from splitcast.studies.privacy.view import view


def run_attack(options: AttackOptions) -> None:
    """Attack, show, keep."""
    for name in ("samples", "auxiliary"):
        if not 2 <= getattr(options, name) <= 100_000:
            raise SplitcastError(f"{name}: {getattr(options, name)}; choose 2..100000")
    with nullcontext() if options.trust else imports_allowed([]):
        small = options.quick
        seen = view(
            options.run, min(options.samples, 16 if small else options.samples), options.auxiliary, options.client
        )
    with Bars() as bars:
        told = None if options.output.silent else _told(bars)
        found = attack(seen, options.attacks, effort="quick" if options.quick else "all", told=told)
    found.save(options.run)
    if options.output.json:
        print(json.dumps(found.as_json()))
    else:
        print_findings(found, options)


def _told(bars: Bars) -> Told:
    """A bar for every attack; where there is no terminal, a line now and then."""

    def begin(name: str) -> Progress:
        task = None

        def move(done: int, steps: int) -> None:
            nonlocal task
            task = bars.add(name, steps) if task is None else task
            bars.move(task, done)

        return move

    return begin


def print_findings(found: Findings, options: AttackOptions) -> None:
    """A table of attacks, labels, and one line that says what it means."""
    console = Console()
    if found.rows:
        headings = ("attack", "client half", "steps", "MSE", "PSNR dB", "SSIM", "features", "recognised")
        table = Table(
            *headings, title=f"cut {found.cut}, {found.codec}: {found.samples} samples of client {options.client}"
        )
        for row in found.rows:
            known = half_known(row.knows_half, row.possible)
            numbers = (f"{row.mse:.4f}", f"{row.psnr:.1f}", f"{row.ssim:.3f}", f"{row.features:.2f}")
            table.add_row(row.attack, known if row.steps else "", str(row.steps), *numbers, f"{row.recognised:.0%}")
        console.print(table)
        floor = found.rows[0]
        worst = found.worst if any(row.possible for row in found.rows[1:]) else floor
        console.print(
            f"strongest: {worst.attack}, SSIM {worst.ssim:.3f} (guessing the mean image: {floor.ssim:.3f}); "
            f"distance correlation of samples and smashed data {found.correlation:.3f}",
            highlight=False,
        )
    if found.epsilon is not None:
        console.print(
            f"differential privacy: ε {found.epsilon:.3g} at δ = 1e-5 of a sample that was sent in every step",
            highlight=False,
        )
    for name, share in found.labels.items():
        console.print(f"labels or tokens, {name}: {share:.1%}", highlight=False)
    kept = f"{options.run / FILE}" + (f", {options.run / PICTURE}" if found.rows else "")
    console.print(f"kept: {kept}", highlight=False)
