"""What the server can reconstruct: cut by cut, by scheme, codec and defence, beside accuracy and bytes.

With `sfl` and one local step the cut does not change what is learned, so one training of each model and seed is read at
every cut. The variants *on the wire* (codecs, noise, channels that are not sent) take the weights of that training and
change what is sent of them, so that only the wire differs; their accuracy is that of a model that never trained with
it. Other variants are trained. Findings of every cell are kept; a study that was stopped goes on with the next cell.
The strongest attack counts. `leakage.json`, beside the figure, is what `--leakage` of `plan`, `learn` and `train`
takes; `privacy.md` has the tables.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splitcast.base.config import DefenceConfig
from splitcast.base.files import read_bounded, write_atomically
from splitcast.base.formats import codec
from splitcast.cost.leakage import leak_of
from splitcast.run.strict import LINE_BYTES, parsed
from splitcast.studies.privacy.attack import FILE, attack
from splitcast.studies.privacy.figure import SHOWN, save_grid
from splitcast.studies.privacy.reconstruct import Effort
from splitcast.studies.privacy.view import View, view
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, line, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import Verdict, all_of, larger, spread
from splitcast.training.defence import Defence

KNOWN = ("network", "optimise", "optimise, smooth 0.01")
"""What a server mounts that knows the client half."""
UNKNOWN = ("unsplit", "pseudo")
EVERY, TWO = (1, 2, 3, 4), (1, 3)


@dataclass(frozen=True)
class Variant:
    """A column of the study: what is trained, and what of it is sent."""

    values: dict[str, Any]
    cuts: tuple[int, ...] = TWO
    attacks: tuple[str, ...] = KNOWN
    wire: str = ""
    """codec that takes the place of that of the training, which then serves all cuts"""
    defence: DefenceConfig = field(default_factory=DefenceConfig)
    """on the wire, likewise"""
    base: str = "sfl"
    """what it is compared with; itself: cut with cut"""


SFL, RESNET = {"scheme": "sfl"}, {"scheme": "sfl", "arch": "resnet8", "rounds": 50}
VARIANTS: dict[str, Variant] = {
    "sfl": Variant(SFL, EVERY, wire="fp32"),
    "sfl, ResNet-8": Variant(RESNET, EVERY, wire="fp32", base="sfl, ResNet-8"),
    "int2 up": Variant(SFL, wire="int2"),
    "transform:3 up": Variant(SFL, wire="transform:3"),
    "noise": Variant(SFL, wire="fp32", defence=DefenceConfig(clip=10.0, noise=0.5)),
    "noise, trained with": Variant({"scheme": "sfl", "defence.clip": 10.0, "defence.noise": 0.5}),
    "half of the channels": Variant(SFL, wire="fp32", defence=DefenceConfig(drop=0.5)),
    "sfl-ga": Variant({"scheme": "sfl-ga"}, attacks=(*UNKNOWN, "other clients: mean")),
    "sfl-gb": Variant({"scheme": "sfl-gb"}, attacks=(*KNOWN, "other clients: basis")),
    "sfl-replay": Variant({"scheme": "sfl-replay"}),
    "NoPeek": Variant({"scheme": "sfl", "defence.nopeek": 1.0}),
    "hijacked": Variant(SFL, attacks=("hijack",), wire="fp32"),
}
QUICK = ("sfl", "sfl-ga", "int2 up")
TRAINING = {"rounds": 25, "batch": 16, "optimizer": "adam", "lr": 1e-3, "eval_every": 50, "checkpoint_every": 50}
"""Of a full study: smashed data of a model that has begun to learn show what later ones do."""
SAMPLES, AUXILIARY, HELD_OUT = {True: 16, False: 16}, {True: 1000, False: 400}, {True: 1000, False: 200}
EFFORT: dict[bool, Effort] = {True: "some", False: "quick"}


def cell(study: Study, name: str, cut: int, seed: int) -> dict[str, Any]:
    """What attacks got from one variant at one cut: read, or measured and kept."""
    variant = VARIANTS[name]
    values = (TRAINING if study.full else {}) | variant.values | {"seed": seed, "cut": 1 if variant.wire else cut}
    folder = study.out / "attacks" / f"{study.folder(**values).name}-{name.replace(' ', '_')}-cut{cut}"
    new = not (folder / FILE).is_file()
    if new:
        study.run(**values)
        seen = view(study.folder(**values), SAMPLES[study.full], AUXILIARY[study.full], dataset=study.dataset)
        if variant.wire:
            seen = seen.at(cut, codec(variant.wire), Defence.of(variant.defence, seed))
        found = attack(seen, variant.attacks, effort=EFFORT[study.full])
        folder.mkdir(parents=True, exist_ok=True)
        best = {"original": seen.x[:SHOWN], "best": found.pictures[found.worst.attack][:SHOWN]}
        np.save(folder / "best.npy", torch.stack([*best.values()]).numpy(), allow_pickle=False)
        rest = torch.arange(1, len(study.dataset.test_x), 2)[: HELD_OUT[study.full]]
        about = {"variant": name, "seed": seed, "bytes": _bytes(seen)}
        about["accuracy"] = seen.accuracy(study.dataset.test_x[rest], study.dataset.test_y[rest])
        write_atomically(folder / FILE, (json.dumps(found.as_json() | about) + "\n").encode())
    made: dict[str, Any] = parsed(read_bounded(folder / FILE, LINE_BYTES))
    return made | {"folder": folder, "new": new}


def _bytes(seen: View, b: int = 32) -> float:
    """Of a sample's smashed data in a message of b."""
    return seen.codec.nbytes((b, *seen.smashed.shape[1:])) / b


Cells = dict[str, dict[int, list[dict[str, Any]]]]
"""By variant and cut, one for each seed."""


def _measured(study: Study, cuts: Mapping[str, Sequence[int]], seeds: Sequence[int]) -> Cells:
    """All cells, one after the other; of each that is new a line says what came of it, and how long the rest takes."""
    cells: Cells = {name: {cut: [] for cut in some} for name, some in cuts.items()}
    total, fresh, began = len(seeds) * sum(map(len, cuts.values())), 0, time.monotonic()
    for done, (name, cut, seed) in enumerate(((n, c, s) for n in cuts for c in cuts[n] for s in seeds), 1):
        started = time.monotonic()
        one = cell(study, name, cut, seed)
        cells[name][cut].append(one)
        if one.pop("new") and study.watch is not Study.watch:
            fresh, now = fresh + 1, time.monotonic()
            leak, left = leak_of(one), (total - done) * (now - began) / fresh / 60
            what = f"{name}, cut {cut}, seed {seed}: SSIM {leak.ssim:.3f} by {leak.attack}"
            print(f"{done} of {total}: {what} ({now - started:.0f} s; about {left:.0f} min left)", file=sys.stderr)
    return cells


def draw(study: Study) -> Drawn:
    names = list(VARIANTS) if study.full else list(QUICK)
    seeds = study.seeds if study.full else study.seeds[:1]
    cuts = {name: VARIANTS[name].cuts if study.full else TWO for name in names}
    cells = _measured(study, cuts, seeds)
    figure, (leaks, accuracies) = panels(2, 5.0)
    rows: list[Row] = []
    for k, (name, found) in enumerate(cells.items()):
        ssim = [_leaks(each) for each in found.values()]
        line(leaks, k, cuts[name], [float(np.mean(each)) for each in ssim], name)
        colour = leaks.lines[-1].get_color()
        leaks.fill_between(cuts[name], [*map(min, ssim)], [*map(max, ssim)], alpha=0.12, color=colour, linewidth=0)
        line(accuracies, k, cuts[name], [100 * _mean(each, "accuracy") for each in found.values()], name)
        for cut, each in found.items():
            for one in each:
                about = {"variant": name, "arch": one["arch"], "cut": cut, "seed": one["seed"], "codec": one["codec"]}
                about |= {"defence": one["defence"], "accuracy_percent": 100 * one["accuracy"]}
                about |= {"bytes_per_sample": one["bytes"], "correlation": one["correlation"]}
                rows += [about | row for row in one["rows"]]
    everything = [one for found in cells.values() for each in found.values() for one in each]
    floor = float(np.mean([_floor(one) for one in everything]))
    leaks.axhline(floor, color="0.4", linestyle=":", label="mean image (floor)")
    leaks.set_ylabel("SSIM of the strongest reconstruction")
    accuracies.set_ylabel("test accuracy (%)")
    for axis in (leaks, accuracies):
        axis.set_xlabel("cut")
        axis.set_xticks(sorted({cut for some in cuts.values() for cut in some}))
        axis.grid(alpha=0.3)
    figure.legend(*leaks.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    folder = study.out / study.base.data.dataset
    folder.mkdir(parents=True, exist_ok=True)
    kept = [{key: value for key, value in one.items() if key != "folder"} for one in everything]
    write_atomically(folder / "leakage.json", (json.dumps(kept) + "\n").encode())
    write_atomically(folder / "privacy.md", table(cells).encode())
    _pictures(cells, folder / "privacy-images.png")
    caption = (
        f"Not in the paper. {SAMPLES[study.full]} samples of client 0, {len(seeds)} seed(s); of the attacks that were "
        "mounted the one with the greatest structural similarity counts. Accuracy of client 0's model through the wire "
        f"on {HELD_OUT[study.full]} test samples that the attacker does not have."
    )
    return Drawn(caption, rows, figure, _claims(cells))


def _leaks(each: Sequence[dict[str, Any]]) -> list[float]:
    return [leak_of(one).ssim for one in each]


def _mean(each: Sequence[dict[str, Any]], what: str) -> float:
    return float(np.mean([one[what] for one in each]))


def _floor(one: dict[str, Any]) -> float:
    return float(_row(one, "floor")["ssim"])


def table(cells: Cells) -> str:
    """Accuracy, bytes and leakage of every variant and cut, then leakage by attack, as Markdown: means over seeds, ±
    half a 95 % interval."""
    every = [(name, cut, each) for name, found in cells.items() for cut, each in found.items()]
    mounted = list(dict.fromkeys(row["attack"] for *_, each in every for one in each for row in one["rows"]))
    attacks = [name for name in mounted if name != "floor"]
    heads = ("variant", "cut", "format", "accuracy %", "bytes per sample", "SSIM", "PSNR dB", "strongest attack")
    lines: list[Sequence[str]] = [(*heads, "floor", "labels %", "guessed %", "ε")]
    lines += [(name, str(cut), *_summary(each)) for name, cut, each in every]
    by_attack: list[Sequence[str]] = [("variant", "cut", *attacks)]
    by_attack += [(name, str(cut), *(_by(each, attack) for attack in attacks)) for name, cut, each in every]
    return (
        f"{_markdown(lines)}\nSSIM by attack; in brackets where the server cannot mount it:\n\n{_markdown(by_attack)}"
    )


def _summary(each: Sequence[dict[str, Any]]) -> list[str]:
    worst = [leak_of(one) for one in each]
    psnr = [_row(one, leak.attack)["psnr"] for one, leak in zip(each, worst, strict=True)]
    labels = [max(one["labels"].get("direction", 0.0), one["labels"].get("clusters", 0.0)) for one in each]
    spent = each[0]["epsilon"]
    return [
        each[0]["codec"],
        spread([100 * one["accuracy"] for one in each]),
        f"{_mean(each, 'bytes'):,.0f}",
        spread([leak.ssim for leak in worst], 2),
        spread(psnr),
        " / ".join(dict.fromkeys(leak.attack for leak in worst)),
        f"{np.mean([_floor(one) for one in each]):.2f}",
        spread([100 * share for share in labels], 0),
        f"{100 * np.mean([one['labels'].get('guess', 0.0) for one in each]):.0f}",
        "" if spent is None else f"{spent:.3g}",
    ]


def _by(each: Sequence[dict[str, Any]], attack: str) -> str:
    """SSIM of one attack, "" where it was not mounted."""
    rows = [row for one in each for row in one["rows"] if row["attack"] == attack]
    said = spread([row["ssim"] for row in rows], 2) if rows else ""
    return said if all(row["possible"] for row in rows) else f"({said})"


def _row(one: dict[str, Any], attack: str) -> dict[str, Any]:
    return next(row for row in one["rows"] if row["attack"] == attack)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(line) + " |\n" for line in lines)
    return "".join([head, "|---" * len(lines[0]) + "|\n", *rest])


def _pictures(cells: Cells, file: Path) -> None:
    """Originals beside what the strongest attack made of them, for the first seed."""
    shown: dict[str, torch.Tensor] = {}
    for name, found in cells.items():
        for cut, (one, *_) in found.items():
            original, best = torch.from_numpy(np.load(one["folder"] / "best.npy", allow_pickle=False))
            shown.setdefault("original", original)
            shown[f"{name}: cut {cut}"] = best
    save_grid(shown, file)


MARGIN = 0.02
"""Of SSIM: differences below it are none, whatever their spread."""


def lower(mine: Sequence[float], base: Sequence[float]) -> Verdict:
    """Whether SSIM is lower here than there, seed by seed (`verdicts.larger`), and by more than `MARGIN`.

    >>> lower([0.10, 0.11], [0.50, 0.52]), lower([0.9, 0.9], [0.5, 0.5]), lower([0.50, 0.51], [0.51, 0.52])
    ('holds', 'does not hold', 'ties')
    """
    return "ties" if abs(np.mean(base) - np.mean(mine)) < MARGIN else larger(base, mine)


def _claims(cells: Cells) -> list[Claim]:
    """Cut against the cut before it, for a variant that is its own base; else against the base at the same cut."""
    claims = []
    for name, found in cells.items():
        mine, base = {cut: _leaks(each) for cut, each in found.items()}, VARIANTS[name].base
        if base == name:
            pairs = [(f"cut {b} against {a}", mine[b], mine[a]) for a, b in pairwise(mine)]
            said = f"a larger client-side model gives more privacy (section II); {name}"
        else:
            pairs = [(f"cut {cut}", mine[cut], _leaks(cells[base][cut])) for cut in mine]
            said = f"ours: {name} leaks less than {base}"
        verdicts = [lower(a, b) for _, a, b in pairs]
        told = [
            f"{where}: {spread(a, 2)} against {spread(b, 2)} ({WORDS.get(v, v)})"
            for (where, a, b), v in zip(pairs, verdicts, strict=True)
        ]
        claims.append(Claim(said, "SSIM at " + "; ".join(told), all_of(verdicts)))
    return claims


WORDS = {"holds": "lower", "does not hold": "higher", "ties": "tie"}
