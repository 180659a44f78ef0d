"""Fig. 6: test accuracy against latency under cut strategies (Algorithm 1, fixed, random) and allocations.

Allocation and workload change when things happen, not what is learned: one training is timed in several cells.
Moves of the cut are free, as in the paper.
"""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.axes import Axes

from splitcast.base.config import Config, with_values
from splitcast.cutting.policies import CutSelector, rollout
from splitcast.run.records import RoundRecord
from splitcast.studies.compare_figure import draw_band, log_scale
from splitcast.studies.curves import COLOURS, band, looks
from splitcast.studies.learn import make_cut_costs
from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy_rows, costs_to, label_accuracy, panels, reached
from splitcast.studies.reproduce.study import Runs, Study, round_seconds
from splitcast.studies.reproduce.verdicts import all_of, larger, larger_by, spread

WORKLOADS = ("profiled", "paper")
ALLOCATIONS = ("optimal", "equal")
STRATEGIES = {"Algorithm 1": "ddqn", **{f"fixed cut {v}": f"fixed:{v}" for v in (1, 2, 3, 4)}, "random cut": "random"}


def draw(study: Study) -> Drawn:
    seeds = study.seeds
    figure, axes = panels(len(WORKLOADS), height=4.8)
    rows = []
    claims = []
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        series: dict[str, Runs] = {}
        for allocation in ALLOCATIONS:
            for name, policy in STRATEGIES.items():
                cell = study.config(workload=workload, allocation=allocation, charge_migration=False)
                label = f"{name}, {allocation}"
                series[label] = [_timed(study, with_values(cell, seed=seed), policy) for seed in seeds]
        _lines(axis, series)
        axis.set_title(f"{study.name}, {workload} workload")
        rows += [{"workload": workload, **row} for row in accuracy_rows(series, seeds)]
        target = reached(runs for name, runs in series.items() if name.startswith(("Algorithm", "random")))
        seconds = {name: costs_to(runs, target, "seconds") for name, runs in series.items()}
        ours = seconds["Algorithm 1, optimal"]
        others = [value for name, value in seconds.items() if name != "Algorithm 1, optimal"]
        claims.append(
            Claim(
                f"Algorithm 1 has the shortest latency to an accuracy ({workload} workload)",
                f"seconds to {100 * target:.0f} %: "
                + ", ".join(f"{name} {spread(value, 0)}" for name, value in seconds.items()),
                all_of(larger(value, ours) for value in others),
            )
        )
        pairs = {a: (seconds[f"random cut, {a}"], seconds[f"Algorithm 1, {a}"]) for a in ALLOCATIONS}
        claims.append(
            Claim(
                f"Algorithm 1 is much faster than a random cut with the same resources ({workload} workload)",
                f"seconds to {100 * target:.0f} %: "
                + ", ".join(f"{a} {spread(mine, 0)} against {spread(other, 0)}" for a, (other, mine) in pairs.items())
                + "; much is a third less",
                all_of(larger_by(other, mine, 2 / 3) for other, mine in pairs.values()),
            )
        )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=9)
    caption = (
        "The paper draws accuracy against latency for Algorithm 1 and for fixed and random cuts, each with optimal and "
        "fixed resources: Algorithm 1 is leftmost. The fixed cut is not stated there; here are all four. Γ(φ(v)) is "
        "measured at the start. Where Algorithm 1 finds one cut best in every round, its line is that of the fixed cut."
        " Claims are of an accuracy that it and the random cut reach with all seeds. Dotted: equal shares."
    )
    return Drawn(caption, rows, figure, claims)


def _lines(axis: Axes, series: Mapping[str, Runs]) -> None:
    """A colour for every strategy; its band and marks are those of optimal shares, equal ones are dotted."""
    for name, look in zip(STRATEGIES, looks([""] * len(STRATEGIES)), strict=True):
        optimal, equal = (band(series[f"{name}, {allocation}"], "seconds") for allocation in ALLOCATIONS)
        draw_band(axis, optimal, look, name)
        axis.plot(equal.x, equal.mean, ":", color=COLOURS[look.colour], linewidth=1)
    axis.plot([], [], ":", color="0.3", linewidth=1, label="equal shares")
    log_scale(axis)
    label_accuracy(axis, "seconds")


def _timed(study: Study, config: Config, policy: str) -> list[RoundRecord]:
    """The training that a strategy leads to, with the seconds of this cell."""
    rounds, seed = config.train.rounds, config.train.seed
    if policy == "ddqn":
        config = with_values(config, gamma_draws=3)
        file, _ = study.learned(config, briefly=True)
        cuts = set(rollout(CutSelector.of(make_cut_costs(config), f"ddqn:{file}", rounds)).cuts.tolist())
        if len(cuts) > 1:
            net = config.network
            cell = {"workload": net.workload, "allocation": net.allocation, "charge_migration": False}
            return study.run(policy=f"ddqn:{file}", seed=seed, gamma_draws=3, **cell)
        policy = f"fixed:{cuts.pop()}"
    if policy.startswith("fixed"):
        records = study.run(scheme="sfl-ga", cut=int(policy[6:]), seed=seed)
    else:
        records = study.run(scheme="sfl-ga", policy=policy, seed=seed, charge_migration=False)
    seconds = round_seconds(config, [record.cut for record in records])
    return [replace(record, latency_s=float(s)) for record, s in zip(records, seconds, strict=True)]
