"""Everything the page shows, as one JSON document. Pure functions of what the run folders hold."""

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from splitcast.base.config import Config, leaves, to_toml
from splitcast.base.errors import NotAllowedError, SplitcastError
from splitcast.run.headline import headline
from splitcast.run.recording import outage
from splitcast.run.records import RoundRecord
from splitcast.studies.compare import title_of
from splitcast.studies.curves import COLOURS, looks
from splitcast.studies.report.attacked import attack_document
from splitcast.studies.report.clients import breakdown, held_up
from splitcast.studies.report.groups import Group, grouped, mean_kinds, merged
from splitcast.studies.report.runs import Run
from splitcast.studies.results import estimate
from splitcast.studies.target import all_reach
from splitcast.training.measure import Measure, measure

FORMAT = "splitcast-report-1"


def document(runs: Sequence[Run]) -> dict[str, Any]:
    """What `report.js` reads."""
    judged = headline(runs[0].config, runs[0].rounds, runs[0].summary)
    tested = [run.rounds for run in runs if any(r.test(judged.name) is not None for r in run.rounds)]
    target = all_reach(tested, judged) if tested else None
    groups = grouped(runs)
    drawn = looks([group.runs[0].config.split.scheme for group in groups])
    made: dict[str, Any] = clean(
        {
            "format": FORMAT,
            "title": heading(runs),
            "headline": f"test_{judged.name}",
            "measures": measures(runs, judged),
            "target": target,
            "colours": COLOURS,
            "defaults": flat(Config()),
            "runs": [group_document(group, judged) | look._asdict() for group, look in zip(groups, drawn, strict=True)],
        }
    )
    return made


def measures(runs: Sequence[Run], judged: Measure) -> dict[str, dict[str, Any]]:
    """What tests of these runs measured, by column, the headline first, and how it is shown."""
    names = dict.fromkeys([judged.name, *(name for run in runs for r in run.rounds for name in r.tests())])
    known = [judged if name == judged.name else measure(name) for name in names]
    found = {f"test_{m.name}": asdict(m) | {"label": f"test {m.name}", "scale": m.scale} for m in known}
    of_clients = {"clients_worst": f"worst client's {judged.name}", "clients_mean": f"clients' mean {judged.name}"}
    return found | {
        key: asdict(judged) | {"label": label, "scale": judged.scale}
        for key, label in of_clients.items()
        if any(key in r.metrics for run in runs for r in run.rounds)
    }


def heading(runs: Sequence[Run]) -> str:
    """What the runs have in common."""
    if len(runs) == 1:
        return f"{runs[0].name}: {title_of(runs[0].config)}"
    shared = {title_of(run.config) for run in runs}
    if len(shared) == 1:
        return shared.pop()
    return f"{len(runs)} runs on {', '.join(dict.fromkeys(run.config.data.dataset for run in runs))}"


def group_document(group: Group, judged: Measure) -> dict[str, Any]:
    """Runs that differ only in the seed as one; what cannot be a mean is the first one's."""
    first = run_document(group.runs[0], judged) | {"name": group.name, "n": len(group.runs)}
    if len(group.runs) == 1:
        return first
    every = [outcome(run, judged) for run in group.runs]
    means, edges = merged([each["columns"] for each in every])
    values, bests = ([each[key] for each in every if each[key] is not None] for key in ("value", "best"))
    spent = [(run.summary or {}).get("wall_seconds") for run in group.runs]
    against = ("rounds", "mb", "seconds", f"test_{judged.name}")
    return first | {
        "columns": means,
        "edges": edges,
        "round_s": np.mean([each["round_s"] for each in every], axis=0).tolist(),
        **{name: _mean([each[name] for each in every]) for name in ("outage", "joules")},
        "value": statistics.fmean(values) if values else None,
        "half": estimate(values).half if len(values) > 1 else None,
        "best": statistics.fmean(bests) if bests else None,
        "members": [{name: each["columns"].get(name) for name in against} for each in every],
        "cuts": segments(group.runs[0].rounds[: len(means["rounds"])]),
        "kinds": mean_kinds([each["kinds"] for each in every]),
        "config": first["config"] | {"train.seed": [run.config.train.seed for run in group.runs]},
        "wall_seconds": sum(s for s in spent if isinstance(s, int | float)),
        "folder": ", ".join(str(run.path) for run in group.runs),
        "command": "\n".join(train_command(run.config) for run in group.runs),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def run_document(run: Run, judged: Measure) -> dict[str, Any]:
    """One run."""
    records, summary = run.rounds, run.summary or {}
    versions = summary.get("versions")  # the file may be anybody's
    memory = summary.get("client_memory_mb")
    around = {name: summary[name] for name in ("python", "threads") if name in summary}
    versions = around | versions if isinstance(versions, dict) else {}
    return outcome(run, judged) | {
        "name": run.name,
        "scheme": run.config.split.scheme,
        "policy": run.config.policy.policy,
        "title": title_of(run.config),
        "folder": str(run.path),
        "whole_model": run.config.split.scheme == "fl",
        "finished": run.summary is not None,
        "planned_rounds": run.config.train.rounds,
        "cuts": segments(records),
        "clients": clients_document(run),
        "measured": measured(records),
        "memory_mb": memory if isinstance(memory, int | float) else None,
        "gamma_per_cut": list(run.gamma),
        "config": flat(run.config),
        "toml": to_toml(run.config),
        "versions": versions,
        "wall_seconds": summary.get("wall_seconds"),
        "recorded_command": summary.get("command"),
        "command": train_command(run.config),
        "own": summary.get("own", []),
        "samples": samples_document(summary.get("samples")),
        "attacked": attack_document(run.path),
    }


def outcome(run: Run, judged: Measure) -> dict[str, Any]:
    """What came out of a run, of which several seeds have a mean."""
    tested = [value for r in run.rounds if (value := r.test(judged.name)) is not None]
    return {
        "value": tested[-1] if tested else None,
        "best": judged.best(tested),
        "columns": columns(run.rounds),
        "round_s": np.quantile([r.latency_s for r in run.rounds], (0.5, 0.95)).tolist(),
        "outage": outage(run.rounds, run.config.train.deadline_s) if run.config.train.deadline_s else None,
        "joules": sum(spent) if (spent := [j for r in run.rounds if (j := r.metrics.get("energy_j"))]) else None,
        "kinds": bytes_per_kind(run.rounds),
    }


def samples_document(found: Any) -> list[dict[str, str]]:
    """What models wrote, as far as a summary, which may be anybody's, has it in that form."""
    parts = ("client", "opening", "text", "before", "after")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    kept = [{part: said for part in parts if isinstance(said := row.get(part), str)} for row in rows[:100]]
    return [row for row in kept if len(row) == len(parts) and all(len(said) < 10_000 for said in row.values())]


def columns(records: Sequence[RoundRecord]) -> dict[str, list[Any]]:
    """One list per quantity, all as long as the run; absent values are None, quantities that never occur are left out.

    ``mb`` (10^6 bytes) and ``seconds`` are sums from the start, the other costs are of the round alone.
    """
    sent = [r.bytes / 1e6 for r in records]
    found = [r.tests() for r in records]
    optional: dict[str, list[Any]] = {
        **{f"test_{name}": [f.get(name) for f in found] for name in dict.fromkeys(name for f in found for name in f)},
        **{name: [r.metrics.get(name) for r in records] for name in ("clients_worst", "clients_mean")},
        "gamma": [r.metrics.get("gamma") for r in records],
        "dropped": [r.metrics.get("dropped_energy") for r in records],
        "rank": [r.metrics.get("rank") for r in records],
        "joules": [r.metrics.get("energy_j") for r in records],
        "late": [r.metrics.get("late") for r in records],
        "drift": [r.drift for r in records],
        "wall_s": [sum(parts.values()) if parts else None for parts in (r.wall_s for r in records)],
    }
    return {
        "rounds": [r.round for r in records],
        "mb": list(accumulate(sent)),
        "seconds": list(accumulate(r.latency_s for r in records)),
        "loss": [r.loss for r in records],
        "round_s": [r.latency_s for r in records],
        "round_mb": sent,
        **{name: values for name, values in optional.items() if any(value is not None for value in values)},
    }


def segments(records: Sequence[RoundRecord]) -> list[dict[str, int]]:
    """Stretches of rounds at one cut; ``first`` and ``last`` are positions in the columns."""
    found = []
    for cut, group in groupby(range(len(records)), key=lambda k: records[k].cut):
        stretch = list(group)
        found.append({"cut": cut, "first": stretch[0], "last": stretch[-1]})
    return found


def bytes_per_kind(records: Sequence[RoundRecord]) -> dict[str, int]:
    """Bytes on the air of the whole run, per direction and kind; uplink first."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.kinds)
    return dict(sorted(total.items(), key=lambda item: (not item[0].startswith("up."), item[0])))


def clients_document(run: Run) -> dict[str, Any]:
    """Where each client's time went, or why that is not known."""
    blame = {str(client): {"rounds": n, "part": part} for client, (n, part) in held_up(run.rounds).items()}
    try:
        return {"held_up": blame, **asdict(breakdown(run.config, run.rounds))}
    except NotAllowedError as error:
        missing = f"{error}; for folders you trust: splitcast report --trust"
    except SplitcastError as error:
        missing = str(error)
    except Exception as error:  # of a scheme or model of somebody's that trains but cannot be planned
        missing = f"the run cannot be planned: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return {"held_up": blame, "missing": missing}


def measured(records: Sequence[RoundRecord]) -> dict[str, Any] | None:
    """Real sites: mean measured seconds of a round's parts, and how often a site failed. None for a simulation."""
    timed = [r.wall_s for r in records if r.wall_s]
    if not timed:
        return None
    names = dict.fromkeys(name for parts in timed for name in parts)
    mean = {name: sum(parts.get(name, 0.0) for parts in timed) / len(timed) for name in names}
    return {"parts_s": mean, "failures": sum(len(r.failures or {}) for r in records)}


def flat(config: Config) -> dict[str, Any]:
    """Every value of a configuration under `section.key`."""
    return {f"{name}.{key}": value for name, values in asdict(config).items() for key, value in values.items()}


def train_command(config: Config) -> str:
    """The command that trains with this configuration again.

    >>> from splitcast.base.config import with_values
    >>> train_command(with_values(Config(), scheme="sfl", lr=0.05, charge_migration=False))
    'splitcast train --scheme sfl --lr 0.05 --no-charge-migration'
    """
    words, default = ["splitcast", "train"], leaves(Config())
    for name, value in leaves(config).items():
        if value != default[name]:
            words += _flag(name.replace("_", "-"), value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *(str(each) for each in (value if isinstance(value, tuple) else (value,)))]


def clean(value: Any) -> Any:
    """Ready for strict JSON: floats to seven digits, and None where they are not finite.

    >>> clean({"a": (0.123456789, math.nan)})
    {'a': [0.1234568, None]}
    """
    if isinstance(value, float):  # first: nearly all are
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(each) for each in value]
    return value
