"""Where the format of smashed data as a decision of every round pays, in training: all clients are blocked at times.

Fixed formats against the one that costs least in each round (`cutting.formats`), at the same cut. What an error is
worth is measured as docs/planning.md says, from the fixed formats: for a seed from the trainings of the other seeds.
"""

from typing import Any

import numpy as np

from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy, accuracy_rows, costs_to, panels, reached
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import larger, spread
from splitcast.studies.weights import error_weight

FORMATS = ("int8", "int2", "transform:40B")
CHOSEN = "chosen in every round"
CELL: dict[str, Any] = {
    "scheme": "sfl-gb",  # what goes down is small, so that sending up is what a round waits for
    "arch": "cnn-small",
    "cut": 1,
    "lr": 0.05,
    "fading": "none",
    "blockage": "common",
    "blockage_db": 35.0,
    "clear_rounds": 10.0,
    "blocked_rounds": 5.0,
}


def draw(study: Study) -> Drawn:
    figure, (by_seconds, by_rounds) = panels(2)
    values = CELL | {"rounds": 2 * study.base.train.rounds}
    fixed: dict[str, Runs] = {name: study.runs(**values, uplink_codec=name) for name in FORMATS}
    prices = [_price(study, values, seed, reached(fixed.values())) for seed in study.seeds]
    chosen = [
        study.run(**values, uplink_choices=FORMATS, error_weight=price, seed=seed)
        for seed, price in zip(study.seeds, prices, strict=True)
    ]
    series = fixed | {CHOSEN: chosen}
    for axis, against in ((by_seconds, "seconds"), (by_rounds, "rounds")):
        accuracy(axis, series, against)
        axis.set_title(f"{study.base.data.dataset}, SFL-GB, cut 1, all clients blocked at times")
    target = reached(series.values())
    seconds, rounds = (
        {n: costs_to(runs, target, cost) for n, runs in series.items()} for cost in ("seconds", "rounds")
    )
    best = min(FORMATS, key=lambda name: np.mean(seconds[name]))
    sooner = [a / b for a, b in zip(seconds[best], seconds[CHOSEN], strict=True)]
    used = [np.mean([record.uplink == name for records in chosen for record in records]) for name in FORMATS]
    listed = ", ".join(f"{n} {spread(seconds[n], 1)} s in {spread(rounds[n], 0)} rounds" for n in series)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in zip(FORMATS, used, strict=True))
    said = f"to {100 * target:.0f} %: {listed}; {spread(sooner, 2)} times as fast as {best}; rounds chosen: {shares}"
    wanted = "ours: the format that costs least in each round reaches an accuracy sooner than the best fixed format"
    priced = ", ".join(f"{price:.2f}" for price in prices)
    caption = (
        "Not in the paper. A small CNN; all clients lose 35 dB for 5 rounds on average, after 10 without. "
        f"Seconds of a unit of error, from the fixed formats of the other seeds: {priced}."
    )
    return Drawn(
        caption, accuracy_rows(series, study.seeds), figure, [Claim(wanted, said, larger(sooner, [1.0] * len(sooner)))]
    )


def _price(study: Study, values: dict[str, Any], seed: int, target: float) -> float:
    """Seconds of a unit of error, from the fixed formats of all other seeds; of a single seed from its own."""
    others = [other for other in study.seeds if other != seed] or [seed]
    runs = [study.folder(**values, uplink_codec=name, seed=other) for name in FORMATS for other in others]
    return error_weight(runs, target)
