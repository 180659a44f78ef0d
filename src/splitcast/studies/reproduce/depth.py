"""SFL-GB and SFL-TC at every cut: accuracy after the same rounds as SFL, whose accuracy does not depend on the cut."""

from typing import Any

import numpy as np

from splitcast.run.records import RoundRecord
from splitcast.studies.curves import COLOURS, MARKERS
from splitcast.studies.plan import scenario_of
from splitcast.studies.reproduce.basis import PARTITIONS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, final_accuracy, finals, panels
from splitcast.studies.reproduce.study import Runs, Study, model_of, sent
from splitcast.studies.reproduce.verdicts import all_of, larger
from splitcast.studies.reproduce.verdicts import spread as told

CUTS = (1, 2, 3, 4)
OURS = ("sfl-gb", "sfl-tc")
FEWER = {2: 20.0, 3: 8.0, 4: 8.0}
"""Times fewer bytes than SFL that SFL-TC shall send, by cut."""


def draw(study: Study) -> Drawn:
    rounds = _rounds(study)
    partitions = PARTITIONS if study.full else {"IID": PARTITIONS["IID"]}
    figure, axes = panels(len(partitions))
    rows: list[Row] = []
    claims = []
    for axis, (spread, values) in zip(axes, partitions.items(), strict=True):
        sfl = study.runs(scheme="sfl", rounds=rounds, **values)
        by_cut: dict[str, list[Runs]] = {
            "sfl": [_at(study, sfl, cut, values) for cut in CUTS],
            **{scheme: [_ours(study, scheme, cut, values) for cut in CUTS] for scheme in OURS},
        }
        ends = {scheme: [final_accuracy(runs) for runs in every] for scheme, every in by_cut.items()}
        for k, (scheme, every) in enumerate(by_cut.items()):
            of_seeds = [finals(runs) for runs in every]
            below = [end - min(seeds) for end, seeds in zip(ends[scheme], of_seeds, strict=True)]
            above = [max(seeds) - end for end, seeds in zip(ends[scheme], of_seeds, strict=True)]
            at = [cut - 0.12 + 0.12 * k for cut in CUTS]
            look: dict[str, Any] = {"color": COLOURS[k], "marker": MARKERS[k], "linestyle": "none", "capsize": 4}
            axis.errorbar(at, ends[scheme], (below, above), label=f"{scheme}, mean and range of seeds", **look)
            for cut, runs, found in zip(CUTS, every, of_seeds, strict=True):
                for seed, records, end in zip(study.seeds, runs, found, strict=True):
                    row = {"partition": spread, "scheme": scheme, "cut": cut, "seed": seed, "rounds": rounds}
                    rows.append(row | {"accuracy_percent": end, "MB": _megabytes(records)})
        axis.axhline(ends["sfl"][0] - 0.5, color="0.4", linestyle=":", label="mean of sfl, less 0.5 points")
        axis.set_xticks(CUTS)
        axis.set_xlabel("cut")
        axis.set_ylabel(f"test accuracy after {rounds} rounds (%)")
        axis.set_title(f"{study.base.data.dataset}, {spread}")
        axis.grid(alpha=0.3)
        claims += [_near(spread, scheme, by_cut, rounds) for scheme in OURS]
        claims.append(_fewer(spread, by_cut))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    caption = "Not in the paper. sfl was trained at cut 1; its bytes at other cuts are counted without training."
    return Drawn(caption, rows, figure, claims)


def _rounds(study: Study) -> int:
    """Half as many if it is to be quick: there are eight trainings for every seed and partition."""
    return study.long_rounds if study.full else study.base.train.rounds // 2


def _at(study: Study, sfl: Runs, cut: int, values: dict[str, Any]) -> Runs:
    """SFL at another cut: the same training but for rounding, with other bytes."""
    if cut == 1:
        return sfl
    scenario = scenario_of(study.config(scheme="sfl", cut=cut, **values), model_of(study.base))
    return [[sent(record, scenario, cut) for record in records] for records in sfl]


def _ours(study: Study, scheme: str, cut: int, values: dict[str, Any]) -> Runs:
    rarely = {} if cut == 1 and scheme == "sfl-gb" else {"eval_every": 50}
    return study.runs(scheme=scheme, cut=cut, rounds=_rounds(study), **values, **rarely)


def _megabytes(records: list[RoundRecord]) -> float:
    return float(sum(r.bytes for r in records)) / 1e6


def _near(spread: str, scheme: str, by_cut: dict[str, list[Runs]], rounds: int) -> Claim:
    gaps = [
        [a - b for a, b in zip(finals(sfl), finals(ours), strict=True)]
        for sfl, ours in zip(by_cut["sfl"], by_cut[scheme], strict=True)
    ]
    who = "ours" if scheme == OURS[0] else scheme
    return Claim(
        f"{who}, {spread}: within 0.5 points of SFL at every cut after {rounds} rounds",
        "behind by " + ", ".join(told(gap, 2) for gap in gaps) + " points at cuts 1..4",
        all_of(larger([0.5] * len(gap), gap) for gap in gaps),
    )


def _fewer(spread: str, by_cut: dict[str, list[Runs]]) -> Claim:
    ratios = {
        cut: [_megabytes(a) / _megabytes(b) for a, b in zip(sfl, ours, strict=True)]
        for cut, sfl, ours in zip(CUTS, by_cut["sfl"], by_cut["sfl-tc"], strict=True)
    }
    wanted = ", ".join(f"{times:g}x at cut {cut}" for cut, times in FEWER.items())
    return Claim(
        f"sfl-tc, {spread}: fewer bytes than SFL in as many rounds, {wanted}",
        ", ".join(f"cut {cut}: {told(ratios[cut], 1)}x" for cut in FEWER),
        all_of(larger(ratios[cut], np.full(len(ratios[cut]), times)) for cut, times in FEWER.items()),
    )
