"""Bytes to an accuracy, everybody's method beside ours, and beside sending the data itself.

Every method is searched alike on the first seed (`SEARCH`): learning rate, momentum, and how often it steps before the
next averaging, which for those that train on a pool is how many steps the server takes in a round. The best is the one
with the fewest bytes to the middle target, or else the one that ends highest; it then trains with all seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from splitcast.base.errors import SplitcastError
from splitcast.run.records import RoundRecord
from splitcast.studies.compare_figure import AXES
from splitcast.studies.curves import curves_of
from splitcast.studies.reproduce.basis import PARTITIONS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, line, panels
from splitcast.studies.reproduce.study import Runs, Study
from splitcast.studies.reproduce.verdicts import verdict
from splitcast.studies.target import to_reach

TARGETS = {
    "mnist": (0.94, 0.965, 0.98),
    "fashion-mnist": (0.82, 0.86, 0.88),
    "cifar10": (0.46, 0.55, 0.65),
    "mnist-mini": (0.85, 0.9, 0.93),
}
RAW = "splitcast.studies.reproduce.raw"
CODED = ("fedlite:196,16", "splitfc:0.2/16", "randtopk:1%", "c3sl:4")
"""Smashed data by others' formats at about the rates of their papers; gradients as int8."""
STEPS, POOL = "ours, step by step", "ours, replay"


@dataclass(frozen=True)
class Setting:
    """One point of the search."""

    lr: float
    momentum: float
    often: int

    def values(self, pooled: str) -> dict[str, Any]:
        """As configuration; ``pooled`` is the section of a scheme that trains on a pool."""
        often = {f"{pooled}.steps": 20 * self.often} if pooled else {"local_steps": self.often}
        return {"lr": self.lr, "momentum": self.momentum, **often}


USUAL = Setting(0.02, 0.9, 1)
SEARCH = (USUAL, Setting(0.02, 0.0, 1), Setting(0.05, 0.9, 1), Setting(0.02, 0.9, 4))


@dataclass(frozen=True)
class Method:
    """What is compared."""

    values: Mapping[str, Any]
    pooled: str = ""


def _sfl(codec: str, down: str = "int8") -> Method:
    return Method({"scheme": "sfl", "uplink_codec": codec, "downlink_codec": down})


def _raw(kind: str, small: bool) -> Method:
    arch = f"{RAW}:{'small' if small else 'whole'}"
    return Method({"scheme": "sfl-replay", "arch": arch, "uplink_codec": f"{RAW}:{kind}", "batch": 64}, "sfl-replay")


def methods(small: bool = False) -> dict[str, Method]:
    """By the names in the table; ``small`` is for the narrow network."""
    return {
        "sfl": Method({"scheme": "sfl"}),
        "fl": Method({"scheme": "fl"}),
        "fl, int8": Method({"scheme": "fl", "sync_codec": "int8"}),
        **{f"sfl, {name}": _sfl(name, name) for name in ("int8", "int4", "int2")},
        **{f"sfl, {name.partition(':')[0]}": _sfl(name) for name in CODED},
        "sfl-gb": Method({"scheme": "sfl-gb"}),
        "cse-fsl": Method({"scheme": "cse-fsl"}),
        "fsl-sage": Method({"scheme": "fsl-sage"}),
        "ampere": Method({"scheme": "ampere", "batch": 64, "ampere.device_rounds": 20}, "ampere"),
        STEPS: Method({"scheme": "sfl-tc"}),
        POOL: Method({"scheme": "sfl-replay", "batch": 64}, "sfl-replay"),
        **{f"images, {kind}": _raw(kind.title(), small) for kind in ("gzip", "png", "jpeg")},
    }


@dataclass(frozen=True)
class Found:
    """A method's trainings with its best setting."""

    setting: Setting
    runs: Runs


def draw(study: Study) -> Drawn:
    targets = TARGETS[study.base.data.dataset]
    spreads = PARTITIONS if study.full else {"IID": PARTITIONS["IID"]}
    figure, axes = panels(len(spreads), height=6.4)
    rows: list[Row] = []
    claims: list[Claim] = []
    for axis, (spread, values) in zip(axes, spreads.items(), strict=True):
        found = {name: search(study, method, targets, values) for name, method in known(study).items()}
        for name, best in found.items():
            rows.append({"partition": spread, "method": name} | row(best, targets))
        curves(axis, found, f"{study.base.data.dataset}, {spread}")
        whole = len(study.dataset.train_y) * per_sample(found["images, gzip"].runs[0], "up.smashed")
        axis.axvline(whole / 1e6, color="black", linewidth=0.8)
        axis.annotate(" all images, gzip", (whole / 1e6, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
        claims += judged(spread, found, targets)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    settings = SEARCH if study.full else SEARCH[:1]
    caption = (
        "Not in the paper. Accuracy against all bytes on the air, mean over seeds up to where the first is at the last "
        f"target. Every method has the best of {len(settings)} setting{'s' if len(settings) > 1 else ''} on seed "
        f"{study.seeds[0]}. The line is all training images, gzipped."
    )
    return Drawn(caption, rows, figure, claims)


def known(study: Study) -> dict[str, Method]:
    """The methods of a study."""
    return methods(study.base.model.arch == "cnn-small")


def search(study: Study, method: Method, targets: Sequence[float], values: Mapping[str, Any]) -> Found:
    """The best setting of a method, trained with all seeds."""
    common = {"rounds": study.long_rounds, "stop_at": targets[-1], **method.values, **values}
    if method.pooled:  # every sample once
        common[f"{method.pooled}.samples"] = len(study.dataset.train_y) // study.base.data.clients
    settings = SEARCH if study.full else SEARCH[:1]
    tried = {}
    for setting in settings:
        try:
            tried[setting] = study.run(seed=study.seeds[0], **common, **setting.values(method.pooled))
        except SplitcastError:  # the loss is no longer a number
            continue
    best = min(tried, key=lambda setting: _worth(tried[setting], targets[1]))
    seeds = study.seeds[1:]
    return Found(best, [tried[best], *(study.run(seed=s, **common, **best.values(method.pooled)) for s in seeds)])


def _worth(records: list[RoundRecord], target: float) -> tuple[bool, float]:
    """For sorting: bytes to the target, or where there is none, how low it ends."""
    reach = to_reach(records, target)
    return (False, reach.megabytes) if reach else (True, -_highest(records))


def _highest(records: list[RoundRecord]) -> float:
    return max((r.test_accuracy or 0.0) for r in records)


def row(found: Found, targets: Sequence[float]) -> dict[str, object]:
    """MB to every target with their range over seeds, empty where some seed does not get there; best accuracy."""
    setting, runs = found.setting, found.runs
    out: dict[str, object] = {"lr": setting.lr, "momentum": setting.momentum, "often": setting.often}
    out["seeds"] = len(runs)
    for target in targets:
        spent = [reach.megabytes for records in runs if (reach := to_reach(records, target))]
        name, there = f"MB_to_{100 * target:g}", len(spent) == len(runs)
        numbers = (float(np.mean(spent)), min(spent), max(spent)) if there else ("", "", "")
        out |= dict(zip((name, f"{name}_least", f"{name}_most"), numbers, strict=True))
    out["best_percent"] = 100 * float(np.mean([_highest(records) for records in runs]))
    out["MB_sent"] = float(np.mean([sum(r.bytes for r in records) for records in runs])) / 1e6
    return out


def curves(axis: Axes, found: Mapping[str, Found], title: str) -> None:
    """Accuracy against MB, ours in bold."""
    for k, (name, best) in enumerate(found.items()):
        each = [curves_of(records)["MB"] for records in best.runs]
        least = min(len(x) for x, _ in each)
        x, y = (np.mean([curve[part][:least] for curve in each], axis=0).tolist() for part in (0, 1))
        line(axis, k, x, y, name, every=max(1, least // 6))
        axis.lines[-1].set(linewidth=3.0 if name.startswith("ours") else 1.1, markersize=4)
    axis.set_xscale("log")
    axis.set_xlabel(AXES["MB"])
    axis.set_ylabel("test accuracy (%)")
    axis.set_title(title)
    axis.grid(alpha=0.3)


def per_sample(records: list[RoundRecord], kind: str) -> float:
    """Bytes of a kind per label that went up: for every sample one byte, up to 256 classes."""
    return sum(r.kinds.get(kind, 0) for r in records) / max(1, sum(r.kinds.get("up.labels", 0) for r in records))


def judged(spread: str, found: Mapping[str, Found], targets: Sequence[float]) -> list[Claim]:
    """What is to be shown of a partition."""
    return [_fewest(spread, found, target) for target in targets] + [_below_images(spread, found, targets[0])]


def _megabytes(found: Found, target: float) -> float | None:
    spent = [reach.megabytes for records in found.runs if (reach := to_reach(records, target))]
    return float(np.mean(spent)) if len(spent) == len(found.runs) else None


def _fewest(spread: str, found: Mapping[str, Found], target: float) -> Claim:
    """Of all methods that get to a target, ours needs the fewest bytes."""
    wanted = f"ours, {spread}: fewest bytes of all to {100 * target:g} %"
    spent = {name: mb for name, best in found.items() if (mb := _megabytes(best, target)) is not None}
    ours = min((spent[name] for name in (STEPS, POOL) if name in spent), default=None)
    if ours is None:
        return Claim(wanted, "ours does not get there", verdict(False))
    others = sorted((mb, name) for name, mb in spent.items() if name not in (STEPS, POOL))
    said = [f"{name} {spent[name]:.3g} MB" for name in (STEPS, POOL) if name in spent]
    said += [f"{name} {mb:.3g}" for mb, name in others[:3]]
    if "sfl" in spent:
        said.append(f"{spent['sfl'] / ours:.0f}x below sfl's {spent['sfl']:.4g}")
    return Claim(wanted, ", ".join(said), verdict(not others or ours < others[0][0]))


def _below_images(spread: str, found: Mapping[str, Found], target: float) -> Claim:
    """Replay sends less than the images of the very samples it sends, gzipped."""
    wanted = f"ours by replay, {spread}: below the gzipped images of the very samples sent"
    ours, images = (per_sample(found[name].runs[0], "up.smashed") for name in (POOL, "images, gzip"))
    return Claim(wanted, f"{ours:.0f} B a sample against {images:.0f} B", verdict(ours < images))
