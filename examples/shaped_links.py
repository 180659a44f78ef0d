"""Predicted against measured: real sites behind shaped links. Run as root: python shaped_links.py [FOLDER]

Every site is a process in a network namespace of its own; `tc` (tbf) holds its link to the rates that the planner's
allocation gives it. Seconds are of each part of a round: uplink, server, downlink, client. The prediction is that of
the same deployment without shaping (computing and overhead per call, as measured) plus the planner's seconds on the
air. Needs the extra `deploy`, `ip` and `tc`; where namespaces are not allowed, it says so and ends. Writes shaped.csv
and shaped.png.
"""

import csv
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

from splitcast import Config, with_values
from splitcast.cost.clock import time_rounds
from splitcast.deploy.kits import make_kits
from splitcast.deploy.processes import start, stop
from splitcast.deploy.supervise import supervise
from splitcast.run.records import RunFolder
from splitcast.studies.plan import scenario_of

SERVER, PORT = "10.77.0.1", 18_002
SITES = ("site-a", "site-b")
SCHEMES = ("psl", "sfl-ga")
MEGAHERTZ = (0.5, 1.0, 2.0)
ROUNDS, WARM_UP = 8, 2
PARTS = {"uplink": "upload", "server": "server", "downlink": "download", "client": "client"}
"""What the parts are called in the records of real sites."""
COLOURS = ("#56B4E9", "#009E73", "#E69F00", "#0072B2")
Row = dict[str, float | str]
CONFIG = with_values(
    Config(), clients=len(SITES), batch=16, rounds=ROUNDS, eval_every=ROUNDS, distance_m=(100.0, 200.0), fading="none"
)


def run(*words: object) -> None:
    """A command, with its complaint if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


@contextmanager
def namespaces() -> Iterator[None]:
    """A namespace per site, linked to this one by a pair of devices."""
    try:
        run("ip", "addr", "add", f"{SERVER}/32", "dev", "lo")
        for n, name in enumerate(SITES):
            inside = ("ip", "netns", "exec", name)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"to-{name}", "up")
            run("ip", "route", "add", f"10.77.1.{n + 1}/32", "dev", f"to-{name}")
            run(*inside, "ip", "addr", "add", f"10.77.1.{n + 1}/32", "dev", "eth0")
            for device in ("lo", "eth0"):
                run(*inside, "ip", "link", "set", device, "up")
            run(*inside, "ip", "route", "add", f"{SERVER}/32", "dev", "eth0")
        yield
    finally:
        for name in SITES:
            for words in (("ip", "netns", "del", name), ("ip", "link", "del", f"to-{name}")):
                with suppress(OSError):
                    run(*words)
        with suppress(OSError):
            run("ip", "addr", "del", f"{SERVER}/32", "dev", "lo")


def shape(up: Sequence[float], down: Sequence[float]) -> None:
    """Hold the links of the sites to these rates, in bit/s."""
    for name, sending, receiving in zip(SITES, up, down, strict=True):
        for where, device, rate in (
            (("ip", "netns", "exec", name), "eth0", sending),
            ((), f"to-{name}", receiving),
        ):
            shaper = ("tbf", "rate", f"{round(rate)}bit", "burst", "32kb", "latency", "500ms")
            run(*where, "tc", "qdisc", "replace", "dev", device, "root", *shaper)


def unshape() -> None:
    """Let everything through."""
    for name in SITES:
        for where, device in ((("ip", "netns", "exec", name), "eth0"), ((), f"to-{name}")):
            with suppress(OSError):
                run(*where, "tc", "qdisc", "del", "dev", device, "root")


def planned(config: Config) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Rates of each site up and down in bit/s, and the seconds on the air that the planner expects of a round: those of
    the site that holds up each stage."""
    scenario = scenario_of(config)
    stages = scenario.stages(scenario.place(1), 1)
    timed = time_rounds([stages], scenario.cell, scenario.conditions([1])[0], scenario.allocator)[0]
    sent, heard, up, down = (np.zeros(len(SITES)) for _ in range(4))
    air = {"uplink": 0.0, "downlink": 0.0}
    for stage in timed.stages:
        who = list(stage.stage.clients)
        sent[who] += [stage.stage.of("uplink_bits", n) for n in who]
        heard[who] += [stage.stage.of("broadcast_bits", n) + stage.stage.of("unicast_bits", n) for n in who]
        up[who] += stage.uplink_s
        down[who] += stage.downlink_s
        slowest = (stage.uplink_s + stage.downlink_s).argmax()
        air["uplink"] += float(stage.uplink_s[slowest])
        air["downlink"] += float(stage.downlink_s[slowest])
    return sent / up, heard / down, air


def measured(kits: Path, config: Config, out: Path) -> dict[str, float]:
    """Wall-clock seconds of a round on the sites and of its parts, the median of each."""
    supervise(kits, config, out)
    walls = [record.wall_s or {} for record in RunFolder(out).rounds()[WARM_UP:]]
    found = {part: statistics.median(wall[name] for wall in walls) for part, name in PARTS.items()}
    return found | {"round": statistics.median(sum(wall.values()) for wall in walls)}


def main(folder: str = "shaped") -> None:
    """Every scheme and rate."""
    here = Path(folder)
    with ExitStack() as made:
        try:
            made.enter_context(namespaces())
        except OSError as error:
            print(f"shaped links are skipped: {error}")
            return
        rows = table(Path(made.enter_context(TemporaryDirectory())))
    here.mkdir(parents=True, exist_ok=True)
    with (here / "shaped.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, here / "shaped.png")
    off = [abs(float(row["predicted_round_s"]) / float(row["measured_round_s"]) - 1) for row in rows]
    print(f"off by {100 * statistics.median(off):.1f} % in the median, {100 * max(off):.1f} % at most")


def table(here: Path) -> list[Row]:
    """Predicted and measured seconds of a round and its parts."""
    file, kits = here / "deployment.toml", here / "kits"
    sites = "".join(f'[sites.{name}]\ndata = "part:{n}"\n' for n, name in enumerate(SITES))
    file.write_text(f'[server]\nhost = "{SERVER}"\nport = {PORT}\n{sites}', encoding="utf-8")
    make_kits(file, kits)
    rows: list[Row] = []
    try:
        start(kits, ["server"])
        for name in SITES:
            begin = f"from splitcast.deploy.processes import start; start(Path({str(kits)!r}), [{name!r}])"
            run("ip", "netns", "exec", name, sys.executable, "-c", f"from pathlib import Path; {begin}")
        for scheme in SCHEMES:
            config = with_values(CONFIG, scheme=scheme)
            unshape()
            base = measured(kits, config, here / f"{scheme}-free")
            for mhz in MEGAHERTZ:
                up, down, air = planned(with_values(config, bandwidth_hz=mhz * 1e6))
                shape(up.tolist(), down.tolist())
                found = measured(kits, config, here / f"{scheme}-{mhz}")
                expected = {part: base[part] + air.get(part, 0.0) for part in PARTS}
                expected["round"] = base["round"] + sum(air.values())
                row: Row = {"scheme": scheme, "MHz": mhz, "slowest_up_Mbit_s": float(up.min()) / 1e6}
                for part in ("round", *PARTS):
                    row |= {f"predicted_{part}_s": expected[part], f"measured_{part}_s": found[part]}
                rows.append(row)
                print({key: value if isinstance(value, str) else round(value, 3) for key, value in row.items()})
    finally:
        stop(kits)
    return rows


def draw(rows: list[Row], file: Path) -> None:
    """Measured against predicted, and the parts of both."""
    figure, (axis, bars) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for scheme, marker in zip(SCHEMES, "os", strict=True):
        mine = [row for row in rows if row["scheme"] == scheme]
        of = [[row[f"{kind}_round_s"] for row in mine] for kind in ("predicted", "measured")]
        axis.plot(*of, marker, label=scheme)
    most = 1.1 * max(float(row[f"{kind}_round_s"]) for row in rows for kind in ("predicted", "measured"))
    line = np.array([0, most])
    axis.plot(line, line, color="0.4", linewidth=1)
    axis.fill_between(line, 0.85 * line, 1.15 * line, color="0.8", alpha=0.5, label="within 15 %")
    axis.set_xlabel("predicted seconds of a round")
    axis.set_ylabel("measured seconds of a round")
    axis.set_title("two real sites behind shaped links")
    axis.legend()
    for k, (kind, hatch) in enumerate((("predicted", ""), ("measured", "//"))):
        below = np.zeros(len(rows))
        for part, colour in zip(PARTS, COLOURS, strict=True):
            seconds = np.array([float(row[f"{kind}_{part}_s"]) for row in rows])
            at = np.arange(len(rows)) + 0.4 * k - 0.2
            bars.bar(at, seconds, 0.36, below, color=colour, hatch=hatch, edgecolor="white", label=None if k else part)
            below += seconds
    bars.set_xticks(range(len(rows)), [f"{row['scheme']}\n{row['MHz']} MHz" for row in rows], fontsize=8)
    bars.set_ylabel("seconds")
    bars.set_title("parts: predicted, and measured (hatched)")
    bars.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
