"""A language model fine-tuned by clients with texts of their own: what each scheme keeps of the gain, what it sends.

The gain of a training is how far the loss on held-out texts falls, L_0 - L; a method loses the share
1 - (L_0 - L) / (L_0 - L_sfl) of it. With --full the model is SmolLM2-135M with adapters of rank 8, else a small
decoder that starts from nothing.

One training stands for all that learn the same, and what the others send is counted without training:

- averaged in every round and sent exactly, `sfl` is federated averaging at every cut, with labels at home or not;
- sent exactly, `sfl-ga` learns the same with labels at home as in two parts, if no head is trained;
- in two parts, where clients have nothing to train, schemes with the same format for smashed data are one.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from splitcast.base.config import Config, with_values
from splitcast.cost.scenario import Scenario
from splitcast.data import Dataset
from splitcast.engine.simulator import Simulator
from splitcast.model.split import block_of
from splitcast.run.parts import load_data, make_simulator, resolved, with_clients
from splitcast.studies.curves import COLOURS, MARKERS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, panels
from splitcast.studies.reproduce.study import Runs, Study, sent
from splitcast.studies.reproduce.verdicts import larger, spread

DATASET = "text-mini"
OURS = "sfl-tc"
METHODS = ("sfl", OURS, "sfl-gb", "sfl-ga")
JUDGED = METHODS[:2]
"""With all seeds; those that are listed beside them with the first."""
USUAL = {"dataset": DATASET, "partition": "by:author", "task": "next-token", "optimizer": "adamw", "text_samples": 0}
LORA = {"lora.rank": 8, "lora.modules": ("q_proj", "v_proj")}
FULL: dict[str, Any] = {"arch": "smollm2", "lr": 1e-3, "batch": 1, "sequence_length": 32, "rounds": 50, **LORA}
TEST_EVERY = 50
"""Rounds between tests in the full study; with more rounds it goes on."""
TESTED = 3
"""One of so many held-out rows is tested in the full study."""
QUICK: dict[str, Any] = {"arch": "gpt-small", "lr": 3e-3, "batch": 4, "sequence_length": 64}
CUTS = {True: (15, 1, 28), False: (2,)}
"""Of the full study and of the quick one; what matters most is trained first."""
LOST, FEWER = 0.03, 15.0
"""Of the gain, at most, and times fewer bytes than `sfl`, at least"""
FEWER_AT_1 = 10.0
"""At cut 1, where `sfl` has no adapters to average"""


def draw(study: Study) -> Drawn:
    return _drawn(study, home=False)


def draw_home(study: Study) -> Drawn:
    return _drawn(study, home=True)


def settings(study: Study) -> Config:
    """What all trainings of the study have."""
    values = USUAL | (FULL if study.full else QUICK | {"rounds": study.base.train.rounds})
    return with_values(Config(), **values, eval_every=TEST_EVERY if study.full else values["rounds"])


class Texts(Study):
    """A study of texts."""

    @cached_property
    def dataset(self) -> Dataset:
        found, step = load_data(self.base), TESTED if self.full else 1
        return replace(found, test_x=found.test_x[::step], test_y=found.test_y[::step])

    @staticmethod
    def like(study: Study) -> "Texts":
        """With the seeds, folders and watch of another study."""
        kept = {part.name: getattr(study, part.name) for part in fields(study)}
        return Texts(**kept | {"base": settings(study)})

    @cached_property
    def start(self) -> Simulator:
        """Before any training."""
        return make_simulator(with_clients(self.config(seed=self.seeds[0]), self.dataset), self.dataset)

    def method(self, name: str, cut: int, home: bool) -> Runs:
        """The trainings of a method, or those that they equal with the bytes that it sends."""
        same = self.twin(name, cut, home)
        seeds = self.seeds if same[0] in JUDGED else self.seeds[:1]
        runs = [self.run(scheme=same[0], cut=same[1], labels_at_home=same[2], seed=seed) for seed in seeds]
        if same == (name, cut, home):
            return runs
        config = with_clients(self.config(scheme=name, cut=cut, labels_at_home=home), self.dataset)
        scenario = Scenario.of(config, self.start.model, self.start.task)
        return [[sent(record, scenario, cut) for record in records] for records in runs]

    def twin(self, name: str, cut: int, home: bool) -> tuple[str, int, bool]:
        """Scheme, cut and shape whose training learns the same to the last digits."""
        model = self.start.model
        learn = {block_of(key) for key in model.initial()}
        if name == "sfl-ga" and model.depth - 1 not in learn:  # exact, and no head of one's own that would go its way
            home = False
        if not home and min(learn) >= cut:  # clients learn nothing: what they are sent does not matter
            up = {each: resolved(self.config(scheme=each, cut=cut)).split.uplink_codec for each in METHODS}
            name = next(each for each in METHODS if up[each] == up[name])
        return (name, CUTS[self.full][0], False) if name == "sfl" else (name, cut, home)


def _drawn(study: Study, *, home: bool) -> Drawn:
    own = Texts.like(study)
    base, tested = own.base, own.dataset
    start = own.start.evaluate(tested.test_x, tested.test_y)["loss"]
    found = {cut: {name: own.method(name, cut, home) for name in METHODS} for cut in CUTS[study.full]}
    found = dict(sorted(found.items()))
    rows = table(start, found)
    model, shape = base.model.arch, "labels at home" if home else "two parts"
    figure, (gains, kinds) = panels(2, height=4.8)
    for k, cut in enumerate(found):
        for row in (row for row in rows if row["cut"] == cut):
            j = METHODS.index(str(row["method"]))
            x, y = (float(str(row[name])) for name in ("MB", "gain_lost_percent"))
            gains.plot(x, y, MARKERS[k], color=COLOURS[j], markersize=9)
    for j, name in enumerate(METHODS):
        gains.plot([], [], "o", color=COLOURS[j], label=name)
    for k, cut in enumerate(found):
        gains.plot([], [], MARKERS[k], color="grey", label=f"cut {cut}")
    gains.axhline(100 * LOST, color="grey", linestyle=":")
    gains.set_xscale("log")
    gains.set_xlabel(f"MB in {base.train.rounds} rounds")
    gains.set_ylabel("gain of sfl that is lost (%)")
    gains.grid(alpha=0.3)
    gains.legend(fontsize=9)
    names, left = [f"{row['method']}, cut {row['cut']}" for row in rows], np.zeros(len(rows))
    for j, kind in enumerate(sorted({key for row in rows for key in row if key.startswith(("up.", "down."))})):
        share = np.array([100 * float(str(row.get(kind, 0.0))) / float(str(row["MB"])) for row in rows])
        kinds.barh(names, share, 0.7, left, color=COLOURS[j % len(COLOURS)], label=kind.removesuffix("_MB"))
        left += share
    kinds.invert_yaxis()
    kinds.set_xlim(0, 100)
    kinds.set_xlabel("share of the bytes (%)")
    kinds.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=9)
    figure.suptitle(f"{model}, {shape}, {base.data.dataset} by author, {len(study.seeds)} seed(s)")
    caption = (
        f"Not in the paper. {model} on texts of four authors, a client each; {shape}; loss on held-out texts "
        f"{start:.4f} before. Mean over seeds; schemes that are not judged have one."
    )
    return Drawn(caption, rows, figure, [judged(start, methods, cut, shape) for cut, methods in found.items()])


def table(start: float, found: Mapping[int, Mapping[str, Runs]]) -> list[Row]:
    """A row for every cut and method: loss, share of sfl's gain that is lost, MB in all and of every kind."""
    rows: list[Row] = []
    for cut, methods in found.items():
        for name, runs in methods.items():
            exact = methods["sfl"][: len(runs)]  # the same seeds
            best, most, loss, took = _loss(exact), _megabytes(exact), _loss(runs), _megabytes(runs)
            rows.append(
                {
                    "cut": cut,
                    "method": name,
                    "seeds": len(runs),
                    "rounds": len(runs[0]),
                    "loss_before": start,
                    "loss": loss,
                    "gain_lost_percent": 100 * (1 - (start - loss) / (start - best)),
                    "MB": took,
                    "times_fewer": most / took,
                    **_kinds(runs),
                }
            )
    return rows


def judged(start: float, methods: Mapping[str, Runs], cut: int, shape: str) -> Claim:
    """Ours at a cut: little of the gain lost, seed by seed, for a fraction of the bytes."""
    ends = zip(methods["sfl"], methods[OURS], strict=True)
    lost = [100 * (1 - (start - _loss([ours])) / (start - _loss([sfl]))) for sfl, ours in ends]
    fewer, wanted = _megabytes(methods["sfl"]) / _megabytes(methods[OURS]), FEWER_AT_1 if cut == 1 else FEWER
    claim = f"ours, cut {cut}, {shape}: at most {100 * LOST:g} % of sfl's gain lost, at least {wanted:g}x fewer bytes"
    said = f"{spread(lost)} % lost, {fewer:.1f}x fewer bytes"
    return Claim(claim, said, larger([100 * LOST] * len(lost), lost, size=fewer >= wanted))


def _loss(runs: Runs) -> float:
    return float(np.mean([records[-1].test_loss for records in runs]))


def _megabytes(runs: Runs) -> float:
    return float(np.mean([sum(r.bytes for r in records) for records in runs])) / 1e6


def _kinds(runs: Runs) -> dict[str, float]:
    """MB of every direction and kind in all rounds, mean over seeds."""
    kinds = sorted({kind for records in runs for r in records for kind in r.kinds})
    return {
        f"{kind}_MB": float(np.mean([sum(r.kinds.get(kind, 0) for r in records) for records in runs])) / 1e6
        for kind in kinds
    }
