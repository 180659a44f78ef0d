"""Bytes to an accuracy, everybody's method beside ours, and beside sending the data itself.

Every method is searched alike on the first seed (`SEARCH`): learning rate, momentum, and how often it steps before the
next averaging, which for those that train on a pool is how many steps the server takes in a round. All settings train
for a tenth of the rounds; the one with the fewest bytes to the first target, of equal ones and of those that are not
there the highest, goes on, and trains with all seeds if the first is at the first target. A training ends at the last
target, after all rounds, or with the tenth in which it has sent `BUDGET` times what all training images take when
gzipped, unless it has ceased to send: whoever is not there by then has lost to sending the images. Who trains on a pool
sends every sample once, so that its rounds are known beforehand: rates fall along a cosine to the end, in the search to
the end of that; weights decay (`DECAY`), since it sees samples many times; and it ends at the last target or after all
rounds. Rounds in which clients learn alone before the first upload (`Method.alone`) come on top. Every test counts as
the better of two (`better_tested`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.data import Dataset
from splitcast.run.records import RoundRecord
from splitcast.studies.compare_figure import log_scale
from splitcast.studies.curves import curves_of
from splitcast.studies.reproduce.basis import PARTITIONS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, costs_to, label_accuracy, line, panels, ranged
from splitcast.studies.reproduce.methods import DECAY, POOL, RAW, SEARCH, STEPS, Method, Setting, methods
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread, verdict
from splitcast.studies.target import to_reach

TARGETS = {
    "mnist": (0.94, 0.965, 0.98),
    "fashion-mnist": (0.82, 0.86, 0.88),
    "cifar10": (0.46, 0.55, 0.65),
    "mnist-mini": (0.85, 0.9, 0.93),
}
PARTS = 10
"""Parts of a training, after each of which it may end."""
BUDGET = 2.0
SHOWN = 0.15
"""How far below the first target the figure goes."""
SAMPLED = 1280
"""Images of which the size of all is estimated."""
OURS = (STEPS, POOL)
MOST = {"mnist": {STEPS: {0.94: 8.0}, POOL: {0.94: 1.6, 0.965: 3.2, 0.98: 5.5}}}
"""MB that ours may take at most."""
LOST = 0.5
"""Points of accuracy that testing through the format of ours may cost."""
SFL_ROUNDS = 200
SFL_HAS = {"mnist": (0.965, 1000.0), "fashion-mnist": (0.82, 500.0), "cifar10": (0.46, 500.0)}
"""What `sfl` has after so many rounds (docs/bytes.md), and how many times fewer bytes ours shall take to it."""


@dataclass(frozen=True)
class Found:
    """A method's trainings with its best setting: one of every seed, or one that is not at the first target."""

    setting: Setting
    runs: Runs


def draw(study: Study) -> Drawn:
    name = study.base.data.dataset
    targets, shared = TARGETS[name], study.base.data.partition
    how = next(how for how, values in PARTITIONS.items() if values["partition"] == shared)
    found = {method: search(study, values, targets) for method, values in known(study).items()}
    found["images, png"] = _as_png(found["images, gzip"], study.dataset)
    rows: list[Row] = [{"partition": how, "method": method} | row(best, targets) for method, best in found.items()]
    figure, (axis,) = panels(1, height=6.4)
    curves(axis, found, f"{name}, {how}")
    lowest = 100 * (targets[0] - SHOWN)
    axis.set_ylim(lowest, 100 * max(_highest(records) for best in found.values() for records in best.runs) + 1)
    whole = sized(study.dataset) / 1e6
    axis.axvline(whole, color="black", linewidth=0.8)
    axis.annotate(" all images, gzip", (whole, 0.96), xycoords=("data", "axes fraction"), fontsize=8)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    settings = SEARCH if study.full else SEARCH[:1]
    caption = (
        "Not in the paper. Accuracy against all bytes on the air, mean and range over seeds up to where the first is "
        f"at the last target. Every method has the best of {len(settings)} setting{'s' if len(settings) > 1 else ''} "
        f"on seed {study.seeds[0]}, ends once it has sent {BUDGET:g} times all images, and is tested with its "
        "format or without, whichever is better. The line is all training images, gzipped. What is below "
        f"{lowest:.0f} % is in the CSV alone."
    )
    return Drawn(caption, rows, figure, judged(how, name, found, whole))


def known(study: Study) -> dict[str, Method]:
    """The methods of a study that are trained."""
    return methods(study.base.data.dataset, small=study.base.model.arch == "cnn-small")


def search(study: Study, method: Method, targets: Sequence[float]) -> Found:
    """The best setting of a method, trained with all seeds; with the first alone if that is not at the first target,
    since there is nothing to compare then."""
    common = {"stop_at": targets[-1], **method.values}
    if method.pooled:
        common[f"{method.pooled}.samples"] = method.samples or len(study.dataset.train_y) // study.base.data.clients
    tried = {}
    settings = SEARCH if study.full else SEARCH[:1]
    for setting in settings if len(settings) > 1 else ():
        try:
            first = _ending(study, method, 1) | {"seed": study.seeds[0]}
            tried[setting] = better_tested(study.run(**first, **common, **setting.values(method)))
        except SplitcastError:  # the loss is no longer a number
            continue
    best = min(tried, key=lambda setting: _worth(tried[setting], targets[0]), default=settings[0])
    own = {**common, **best.values(method)}
    runs: Runs = []
    for seed in study.seeds:
        runs.append(_trained(study, method, targets[-1], seed=seed, **own))
        if not to_reach(runs[0], targets[0]):
            break
    return Found(best, runs)


def _ending(study: Study, method: Method, parts: int) -> dict[str, Any]:
    """So many parts of a training; with a pool, whose end is known, rates fall towards it and weights decay."""
    rounds = method.alone - (-study.base.train.rounds * parts // PARTS)
    falling = {"schedule": "cosine", "weight_decay": DECAY} if method.pooled else {}
    return {"rounds": rounds, **falling}


def _trained(study: Study, method: Method, target: float, **values: Any) -> list[RoundRecord]:
    """One training, part after part until it is at the target, beyond the budget, or no longer a number; with a pool,
    which has an end, in one go."""
    if method.pooled:
        return better_tested(study.run(**_ending(study, method, PARTS), **values))
    records: list[RoundRecord] = []
    budget = BUDGET * sized(study.dataset)
    for parts in range(1, PARTS + 1):
        try:
            records = better_tested(study.run(**_ending(study, method, parts), **values))
        except SplitcastError:
            if not records:
                raise
            break
        if to_reach(records, target) or (records[-1].bytes and sum(r.bytes for r in records) > budget):
            break
    return records


def better_tested(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    """With the accuracy through the uplink's format where a test has both and that is higher: a network that has only
    seen sparse features, say, is to be used with such."""

    def better(record: RoundRecord) -> RoundRecord:
        lost = record.test("accuracy_lost")
        if record.test_accuracy is None or lost is None or lost >= 0:
            return record
        return replace(record, test_accuracy=record.test_accuracy - lost)

    return [better(record) for record in records]


def sized(data: Dataset, kind: str = "Gzip") -> float:
    """Bytes of all training images, in messages of 64."""
    images = data.train_x[:SAMPLED]
    sizes = [len(codec(f"{RAW}:{kind}").encode(images[k : k + 64])) for k in range(0, len(images), 64)]
    return sum(sizes) / len(images) * len(data.train_y)


def _as_png(found: Found, data: Dataset) -> Found:
    """Images as PNG: nothing is lost either, so that it is the training of gzip with messages that much larger."""
    ratio = sized(data, "Png") / sized(data)

    def sent(record: RoundRecord) -> RoundRecord:
        images = record.kinds.get("up.smashed", 0)
        more = round((ratio - 1) * images)
        return replace(record, up_bytes=record.up_bytes + more, kinds=record.kinds | {"up.smashed": images + more})

    return Found(found.setting, [[sent(record) for record in records] for records in found.runs])


def _worth(records: list[RoundRecord], target: float) -> tuple[bool, float, float]:
    """For sorting: bytes to the target, where they are equal or there are none how low it ends."""
    reach = to_reach(records, target)
    return reach is None, reach.megabytes if reach else 0.0, -_highest(records)


def _highest(records: list[RoundRecord]) -> float:
    return max((r.test_accuracy or 0.0) for r in records)


def row(found: Found, targets: Sequence[float]) -> dict[str, object]:
    """MB to every target with their range over seeds, empty where some seed does not get there; best accuracy."""
    setting, runs = found.setting, found.runs
    out: dict[str, object] = {"lr": setting.lr, "momentum": setting.momentum, "often": setting.often}
    out["seeds"] = len(runs)
    for target in targets:
        spent = [reach.megabytes for records in runs if (reach := to_reach(records, target))]
        out |= ranged(f"MB_to_{100 * target:g}", spent if len(spent) == len(runs) else [])
    out["best_percent"] = 100 * float(np.mean([_highest(records) for records in runs]))
    out["MB_sent"] = float(np.mean([sum(r.bytes for r in records) for records in runs])) / 1e6
    return out | ranged("points_lost", points_lost(runs))


def points_lost(runs: Runs) -> list[float]:
    """What testing through the format costs at the end, of every seed; none where nothing is coded."""
    lost = [records[-1].test("accuracy_lost") for records in runs]
    return [100 * each for each in lost if each is not None]


def curves(axis: Axes, found: Mapping[str, Found], title: str) -> None:
    """Accuracy against MB, ours in bold."""
    for k, (name, best) in enumerate(found.items()):
        each = [curves_of(records)["MB"] for records in best.runs]
        least = min(len(x) for x, _ in each)
        x, y = (np.mean([curve[part][:least] for curve in each], axis=0).tolist() for part in (0, 1))
        line(axis, k, x, y, name, every=max(1, least // 6))
        axis.lines[-1].set(linewidth=3.0 if name.startswith("ours") else 1.1, markersize=4)
        seeds = [curve[1][:least] for curve in each]
        colour = axis.lines[-1].get_color()
        axis.fill_between(x, np.min(seeds, axis=0), np.max(seeds, axis=0), color=colour, alpha=0.12, linewidth=0)
    log_scale(axis)
    label_accuracy(axis, "MB")
    axis.set_title(title)


def judged(how: str, dataset: str, found: Mapping[str, Found], whole: float) -> list[Claim]:
    """What is to be shown of a data set, whose images are ``whole`` MB when gzipped."""
    targets = TARGETS[dataset]
    claims = [_fewest(how, found, target) for target in targets]
    claims.append(_at_most(how, found, STEPS, targets[0], whole, "the gzipped training set"))
    claims += [_below_images(how, found, kind) for kind in ("gzip", "png")]
    claims += [claim for name in OURS if (claim := _lost(how, name, found[name]))]
    for method, most in MOST.get(dataset, {}).items():
        claims += [_at_most(how, found, method, target, limit) for target, limit in most.items()]
    if dataset in SFL_HAS:
        target, times = SFL_HAS[dataset]
        plain = found["sfl"]
        a_step = np.mean([r.bytes for records in plain.runs for r in records]) / plain.setting.often
        than = f"sfl sends in {SFL_ROUNDS} rounds of one local step, {times:g} times over"
        limit = SFL_ROUNDS * float(a_step) / 1e6 / times
        claims.append(_at_most(how, found, _better(found, target), target, limit, than))
    return claims


def _spent(found: Found, target: float) -> list[float]:
    return costs_to(found.runs, target, "megabytes")


def _better(found: Mapping[str, Found], target: float) -> str:
    """Which of ours needs fewer bytes."""
    return min(OURS, key=lambda name: float(np.mean(_spent(found[name], target))))


def _fewest(how: str, found: Mapping[str, Found], target: float) -> Claim:
    """Of all methods that get to a target, ours needs the fewest bytes."""
    wanted, ours = f"ours, {how}: fewest bytes of all to {100 * target:g} %", _better(found, target)
    spent = {name: _spent(best, target) for name, best in found.items()}
    seeds = len(spent[ours])
    others = {
        name: each if len(each) == seeds else [float("inf")] * seeds for name, each in spent.items() if name not in OURS
    }
    if not np.isfinite(spent[ours]).all():
        return Claim(wanted, "ours does not get there", verdict(False))
    said = [f"{name} {spread(spent[name], 2)} MB" for name in OURS]
    said += [
        f"{name} {spread(others[name], 2)}"
        for name in sorted(others, key=lambda name: float(np.mean(others[name])))[:3]
    ]
    return Claim(wanted, ", ".join(said), all_of(larger(each, spent[ours]) for each in others.values()))


def _at_most(how: str, found: Mapping[str, Found], name: str, target: float, limit: float, than: str = "") -> Claim:
    """A method needs no more than so many MB to a target."""
    spent = _spent(found[name], target)
    wanted = f"{name}, {how}: to {100 * target:g} % with less than {than or f'{limit:g} MB'}"
    return Claim(wanted, f"{spread(spent, 2)} MB of {limit:.3g}", larger([limit] * len(spent), spent))


def _lost(how: str, name: str, found: Found) -> Claim | None:
    """A method tests as well through its format as without, or nearly."""
    lost = points_lost(found.runs)
    wanted = f"{name}, {how}: testing through the format costs at most {LOST:g} points"
    return Claim(wanted, f"{spread(lost, 2)} points", larger([LOST] * len(lost), lost)) if lost else None


def _below_images(how: str, found: Mapping[str, Found], kind: str) -> Claim:
    """Replay sends less in all, halves and labels too, than the images of the very samples that it sends."""
    ours, theirs = found[POOL].runs, found[f"images, {kind}"].runs
    mine = [sum(r.bytes for r in records) / max(1, _samples(records)) for records in ours]
    images = [sum(r.kinds.get("up.smashed", 0) for r in records) / max(1, _samples(records)) for records in theirs]
    said = f"{spread(mine, 0)} B a sample in all, the image {spread(images, 0)} B"
    return Claim(f"ours by replay, {how}: below the images of the samples sent, {kind}", said, larger(images, mine))


def _samples(records: list[RoundRecord]) -> int:
    """How many went up: their labels take a byte each, up to 256 classes."""
    return sum(r.kinds.get("up.labels", 0) for r in records)
