"""Ours in the cell: a round against its compute-only floor, and seconds to an accuracy for three bandwidths.

SFL-GB trains as those of the paper. SFL-TC and SFL-replay have momentum, and so has one more SFL beside them, and the
images themselves, sent as SFL-replay sends features; of these a sample takes 300 B, since bytes cost next to nothing
here. FedAvg has twenty local steps and int8 halves, as the study of bytes finds best. All end once they are at the
target, for which they are tested often: ten rounds are twice what SFL-replay takes. So RandTopk is not among them,
which is to be tested with its format: only last tests are.
"""

from typing import Any

import numpy as np

from splitcast.studies.reproduce.basis import target_of
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, line, panels
from splitcast.studies.reproduce.methods import RAW, Setting, methods
from splitcast.studies.reproduce.study import Study, round_seconds
from splitcast.studies.reproduce.verdicts import all_of, larger, spread
from splitcast.studies.target import to_reach

PLAIN = ("sfl-gb", "sfl-ga", "psl", "sfl")
MOMENTUM = {"lr": 0.02, "momentum": 0.9}
FEDAVG = methods()["fl, int8"]
SERIES: dict[str, dict[str, Any]] = {
    **{scheme: {"scheme": scheme} for scheme in PLAIN},
    "sfl, momentum": {"scheme": "sfl", **MOMENTUM},
    "fl, int8": {**FEDAVG.values, **Setting(0.02, 0.9, 4).values(FEDAVG)},
    "sfl-tc": {"scheme": "sfl-tc", **MOMENTUM},
    "sfl-replay": {
        "scheme": "sfl-replay",
        **MOMENTUM,
        "batch": 64,
        "sfl-replay.steps": 40,
        "uplink_codec": "transform:300B",
    },
}
IMAGES = "images, jpeg"
MEGAHERTZ = (1, 5, 20)
TESTED = 2
"""Rounds between tests."""
FLOOR = 1.1
"""Times its compute-only floor that a round of ours may take."""


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    whole = "small" if study.base.model.arch == "cnn-small" else "whole"
    images = SERIES["sfl-replay"] | {"arch": f"{RAW}:{whole}", "uplink_codec": f"{RAW}:Jpeg"}
    series = {**SERIES, IMAGES: images}
    target = study.target or target_of(study.runs(scheme="sfl", rounds=rounds))
    ends = {"stop_at": round(max(target, 0.01), 4)} | ({"eval_every": TESTED} if study.full else {})
    runs = {
        name: study.runs(rounds=rounds, **values, **(ends if study.full or name not in PLAIN else {}))
        for name, values in series.items()  # a quick study has trained the plain ones for other figures
    }
    rows: list[Row] = []
    ratio = np.zeros((len(series), len(MEGAHERTZ), len(study.seeds)))
    total = np.full((len(series), len(MEGAHERTZ), len(study.seeds)), np.inf)
    for k, (name, values) in enumerate(series.items()):
        for b, mhz in enumerate(MEGAHERTZ):
            times, floors = [], list[float]()
            for s, (seed, records) in enumerate(zip(study.seeds, runs[name], strict=True)):
                config = study.config(seed=seed, bandwidth_hz=mhz * 1e6, **values)
                seconds = round_seconds(config, [1] * rounds)
                times.append(seconds.mean())
                floors.append(round_seconds(config, [1] * rounds, computing_only=True).mean())
                if needed := to_reach(records, target):
                    total[k, b, s] = seconds[: needed.rounds].sum()
            ratio[k, b] = np.array(times) / floors
            mean = float(total[k, b].mean())
            rows.append(
                {"scheme": name, "MHz": mhz, "seconds_per_round": float(np.mean(times))}
                | {"compute_floor_s": float(np.mean(floors)), "over_floor": float(ratio[k, b].mean())}
                | {"target_percent": 100 * target, "seconds_to_target": mean if np.isfinite(mean) else "never"}
            )
    figure, axes = panels(2)
    for axis, table, label in zip(
        axes,
        (ratio.mean(-1), total.mean(-1)),
        ("round ÷ compute-only round", f"seconds to {100 * target:.1f} %"),
        strict=True,
    ):
        for k, name in enumerate(series):
            line(axis, k, MEGAHERTZ, np.where(np.isfinite(table[k]), table[k], np.nan).tolist(), name)
        axis.set_xscale("log")
        if np.isfinite(table).any():
            axis.set_yscale("log")
        axis.set_xticks(MEGAHERTZ, [str(mhz) for mhz in MEGAHERTZ])
        axis.set_xlabel("bandwidth (MHz)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{study.base.data.dataset}, IID, cut 1, optimal allocation")
    at20 = dict(zip(series, ratio[:, -1], strict=True))
    to_target, ours = dict(zip(series, total, strict=True)), at20["sfl-gb"]
    claims = [
        Claim(
            f"ours: a round at 20 MHz takes at most {FLOOR}x its compute-only floor",
            ", ".join(f"{name} {spread(each, 3)}" for name, each in at20.items()),
            all_of(
                larger(at20[name], ours, size=larger([FLOOR] * len(ours), ours) == "holds")
                for name in PLAIN
                if name != "sfl-gb"
            ),
        ),
        fewest("ours", target, {name: to_target[name] for name in PLAIN}, "sfl-gb"),
        fewest("ours by replay", target, {name: to_target[name] for name in SERIES}, "sfl-replay"),
        fewest("ours by replay, images too", target, to_target, "sfl-replay"),
    ]
    caption = (
        "Not in the paper. The paper's cell; the floor is the same round if nothing took time on the air. All but "
        f"sfl-gb and the paper's have momentum {MOMENTUM['momentum']:g} and learning rate {MOMENTUM['lr']:g}; "
        "fl has twenty local steps, sfl-replay sends 300 B a sample."
    )
    return Drawn(caption, rows, figure, claims)


def fewest(who: str, target: float, seconds: dict[str, np.ndarray], ours: str) -> Claim:
    """One of all needs the fewest seconds (bandwidths, seeds) to a target at every bandwidth, judged by ratios: a deep
    fade multiplies the seconds of whoever sends much, so that differences spread most where they are largest."""
    said = [
        f"{mhz} MHz: " + ", ".join(f"{name} {spread(each[b].tolist(), 0)}" for name, each in seconds.items())
        for b, mhz in enumerate(MEGAHERTZ)
    ]
    others = [each for name, each in seconds.items() if name != ours]
    return Claim(
        f"{who}: fewest seconds to {100 * target:.1f} % at 1, 5 and 20 MHz",
        "; ".join(said),
        all_of(larger(np.log(other[b]), np.log(seconds[ours][b])) for other in others for b in range(len(MEGAHERTZ))),
    )
