"""SFL-GB at every cut: accuracy after the same rounds as SFL, whose accuracy does not depend on the cut."""

from typing import Any

from splitcast.studies.curves import COLOURS, MARKERS
from splitcast.studies.reproduce.basis import PARTITIONS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, final_accuracy, finals, panels
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import all_of, larger
from splitcast.studies.reproduce.verdicts import spread as told

CUTS = (1, 2, 3, 4)


def draw(study: Study) -> Drawn:
    rounds = study.long_rounds
    figure, axes = panels(len(PARTITIONS))
    rows: list[Row] = []
    claims = []
    for axis, (spread, values) in zip(axes, PARTITIONS.items(), strict=True):
        by_cut: dict[str, list[Runs]] = {
            # the same training at any cut, but for rounding
            "sfl": [study.runs(scheme="sfl", rounds=rounds, **values)] * len(CUTS),
            "sfl-gb": [
                study.runs(
                    scheme="sfl-gb", cut=cut, rounds=rounds, **values, **({} if cut == 1 else {"eval_every": 50})
                )
                for cut in CUTS
            ],
        }
        ends = {scheme: [final_accuracy(runs) for runs in every] for scheme, every in by_cut.items()}
        for k, (scheme, every) in enumerate(by_cut.items()):
            of_seeds = [[final_accuracy([records]) for records in runs] for runs in every]
            below = [end - min(seeds) for end, seeds in zip(ends[scheme], of_seeds, strict=True)]
            above = [max(seeds) - end for end, seeds in zip(ends[scheme], of_seeds, strict=True)]
            at = [cut - 0.06 + 0.12 * k for cut in CUTS]
            look: dict[str, Any] = {"color": COLOURS[k], "marker": MARKERS[k], "linestyle": "none", "capsize": 4}
            axis.errorbar(at, ends[scheme], (below, above), label=f"{scheme}, mean and range of seeds", **look)
            for cut, runs, found in zip(CUTS, every, of_seeds, strict=True):
                for seed, records, end in zip(study.seeds, runs, found, strict=True):
                    here = scheme == "sfl-gb" or cut == 1  # sfl was trained at cut 1, where it sends less
                    megabytes = sum(r.bytes for r in records) / 1e6 if here else ""
                    row = {"partition": spread, "scheme": scheme, "cut": cut, "seed": seed, "rounds": rounds}
                    rows.append(row | {"accuracy_percent": end, "MB": megabytes})
        axis.axhline(ends["sfl"][0] - 0.5, color="0.4", linestyle=":", label="mean of sfl, less 0.5 points")
        axis.set_xticks(CUTS)
        axis.set_xlabel("cut")
        axis.set_ylabel(f"test accuracy after {rounds} rounds (%)")
        axis.set_title(f"{study.base.data.dataset}, {spread}")
        axis.grid(alpha=0.3)
        gaps = [
            [a - b for a, b in zip(finals(sfl), finals(gb), strict=True)]
            for sfl, gb in zip(*by_cut.values(), strict=True)
        ]
        claims.append(
            Claim(
                f"ours, {spread}: within 0.5 points of SFL at every cut after {rounds} rounds",
                "behind by " + ", ".join(told(gap, 2) for gap in gaps) + " points at cuts 1..4",
                all_of(larger([0.5] * len(gap), gap) for gap in gaps),
            )
        )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    caption = "Not in the paper. The MB column of sfl is that of cut 1."
    return Drawn(caption, rows, figure, claims)
