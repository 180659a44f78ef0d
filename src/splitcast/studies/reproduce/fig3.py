"""Fig. 3: test accuracy over rounds for every cut of SFL-GA, with SFL as the benchmark."""

from itertools import pairwise

from splitcast.studies.reproduce.draw import Claim, Drawn, accuracy, accuracy_rows, finals, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread

CUTS = (1, 2, 3, 4)


def draw(study: Study) -> Drawn:
    series = {"SFL": study.runs(scheme="sfl")}
    series |= {f"SFL-GA, v={cut}": study.runs(scheme="sfl-ga", cut=cut) for cut in CUTS}
    figure, (axis,) = panels(1)
    accuracy(axis, series, "rounds")
    axis.set_title(f"{study.name}: accuracy for every cut")

    rounds = study.base.train.rounds
    sfl, *by_cut = (finals(runs) for runs in series.values())
    listed = ", ".join(spread(values) for values in by_cut)
    claims = [
        Claim(
            "SFL outperforms SFL-GA in rounds",
            f"SFL {spread(sfl)} %, SFL-GA {listed} % (v=1..4) after {rounds} rounds",
            all_of(larger(sfl, values) for values in by_cut),
        ),
        Claim(
            "SFL-GA deteriorates with an increasing cut",
            f"{listed} % for v=1..4",
            all_of(larger(a, b) for a, b in pairwise(by_cut)),
        ),
    ]
    if study.of_digits:
        off = [abs(a - there) for every, there in ((by_cut[0], 95), (by_cut[-1], 82)) for a in every]
        claims.append(
            Claim(
                "about 95 % at v=1, about 82 % at v=4 after 100 rounds (MNIST)",
                f"{spread(by_cut[0])} % and {spread(by_cut[-1])} % after {rounds} rounds; about is within 2 points, "
                "with every seed",
                larger(by_cut[0], by_cut[-1], size=max(off) <= 2),
            )
        )
    caption = (
        "The paper draws test accuracy over 100 rounds for SFL and for SFL-GA at each cut: SFL on top, SFL-GA lower "
        "the deeper the cut. Here: the same, mean and range over seeds."
    )
    return Drawn(caption, accuracy_rows(series, study.seeds), figure, claims)
