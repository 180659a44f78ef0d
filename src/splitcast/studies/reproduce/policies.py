"""Cut policies where moves are charged: what each costs above the one that knows the future, in four channels."""

from typing import Any

import numpy as np

from splitcast.studies.curves import COLOURS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import larger, most_of, spread

SMALL: dict[str, Any] = {"scheme": "psl", "arch": "cnn-small", "client_flops_per_s": 2e7, "gamma_weight": 0.0}
BLOCKED: dict[str, Any] = {"blockage": "common", "blockage_db": 35.0, "clear_rounds": 20.0, "blocked_rounds": 5.0}
DEAR: dict[str, Any] = SMALL | BLOCKED | {"fading": "none", "arch": "cnn", "client_flops_per_s": 1e8, "batch": 16}
"""Blocks of the paper's CNN take longer to send than a round: whoever follows short blockages pays for it twice, and
whoever waits for a round that pays for the move by itself misses long ones."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "all blocked,\nmoves cheap": SMALL | BLOCKED | {"fading": "none"},
    "for long,\nmoves dear": DEAR,
    "for short,\nmoves dear": DEAR | {"blocked_rounds": 2.5, "clear_rounds": 8.0},
    "each blocked,\nmoves cheap": SMALL | BLOCKED | {"fading": "none", "blockage": "each", "clients": 4},
    "fading alone": SMALL,
}
SHOWN = ("lookahead", "rollout", "ddqn", "myopic", "greedy")
NEAR, MANY = 0.1, 4


def draw(study: Study) -> Drawn:
    rounds = study.episode
    above: dict[str, dict[str, list[float]]] = {}
    rows: list[Row] = []
    for name, world in SCENARIOS.items():
        found: dict[str, list[float]] = {}
        for seed in study.seeds:
            config = study.config(**world, rounds=rounds, seed=seed)
            judged = {row["name"]: row for row in study.learned(config, briefly=True)[1]["rows"]}
            fixed = min(row["cost"] for policy, row in judged.items() if policy.startswith("fixed"))
            costs = {policy: judged[policy]["cost"] for policy in SHOWN} | {"best fixed cut": fixed}
            for policy, cost in costs.items():
                more = cost / judged["clairvoyant"]["cost"] - 1
                found.setdefault(policy, []).append(100 * more)
                rows.append(
                    {
                        "scenario": name.replace("\n", " "),
                        "seed": seed,
                        "policy": policy,
                        "seconds_per_round": cost / rounds,
                    }
                    | {"above_clairvoyant_percent": 100 * more}
                )
        above[name] = found
    figure, (axis,) = panels(1)
    every = [*SHOWN, "best fixed cut"]
    for k, policy in enumerate(every):
        heights = [float(np.mean(found[policy])) for found in above.values()]
        axis.bar(np.arange(len(above)) + 0.13 * (k - 2.5), heights, 0.12, label=policy, color=COLOURS[k])
    axis.set_xticks(range(len(above)), list(above), fontsize=8)
    axis.set_yscale("symlog", linthresh=1)
    axis.set_ylabel("above the clairvoyant (%)")
    axis.set_title(f"psl, {rounds} rounds, moves charged, held-out channels")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=8, ncols=2)
    gaps = {
        name: [100 * ((100 + a) / (100 + b) - 1) for a, b in zip(found["ddqn"], found["lookahead"], strict=True)]
        for name, found in above.items()
    }
    claims = [
        Claim(
            f"ours: a DDQN is within 10 % of the lookahead policy in at least {MANY} of {len(SCENARIOS)} scenarios",
            ", ".join(f"{name.replace(chr(10), ' ')} {spread(gap)} %" for name, gap in gaps.items()) + " above",
            most_of([larger([100 * NEAR] * len(gap), gap) for gap in gaps.values()], MANY),
        )
    ]
    caption = (
        "Not in the paper. Mean cost of held-out episodes above that of the best path through channels known before. "
        "Lookahead is value iteration on the chain of blockages; the DDQN sees gains, cost so far and the cut, and has "
        "a discount of 0.9."
    )
    return Drawn(caption, rows, figure, claims)
