"""What the server can reconstruct: cut by cut, by scheme, codec and defence, beside the accuracy that is left.

Every training is attacked once, with what its server can know; findings are kept in its folder. The strongest attack of
all counts. `leakage.json`, beside the figure, is what `--leakage` of `plan`, `learn` and `train` takes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from splitcast.base.files import read_bounded
from splitcast.cost.leakage import leak_of
from splitcast.run.records import write_atomically
from splitcast.run.strict import LINE_BYTES, parsed
from splitcast.studies.privacy.attack import FILE, attack
from splitcast.studies.privacy.view import view
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, line, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import Verdict

VARIANTS: dict[str, dict[str, Any]] = {
    "sfl": {"scheme": "sfl"},
    "sfl-ga": {"scheme": "sfl-ga"},
    "sfl, ResNet-8": {"scheme": "sfl", "arch": "resnet8"},
    "sfl, int2 up": {"scheme": "sfl", "uplink_codec": "int2"},
    "sfl, transform up": {"scheme": "sfl", "uplink_codec": "transform:3"},
    "sfl-gb": {"scheme": "sfl-gb"},
    "sfl-replay": {"scheme": "sfl-replay"},
    "sfl, noise": {"scheme": "sfl", "defence.clip": 10.0, "defence.noise": 0.5},
    "sfl, NoPeek": {"scheme": "sfl", "defence.nopeek": 1.0},
    "sfl, half of the channels": {"scheme": "sfl", "defence.drop": 0.5},
}
QUICK = ("sfl", "sfl-ga", "sfl, int2 up")
EVERY_CUT = ("sfl", "sfl-ga", "sfl, ResNet-8")
"""The others are trained at cuts 1 and 3."""
EVERY_ATTACK = ("sfl", "sfl-ga")
"""The others are read by those attacks that get furthest with a known client half."""
READING = ("network", "optimise", "optimise, smooth 0.01")
ROUNDS = 50
"""Of a full training: what smashed data show hardly changes later."""
SAMPLES, AUXILIARY = {True: 64, False: 16}, {True: 2000, False: 400}


def findings(study: Study, attacks: Sequence[str], **values: Any) -> dict[str, Any]:
    """What attacks got from one training: read, or measured and kept in its folder."""
    values |= {"rounds": ROUNDS} if study.full else {}
    records = study.run(**values)
    folder = study.folder(**values)
    file = folder / FILE
    if not file.is_file():
        seen = view(folder, SAMPLES[study.full], AUXILIARY[study.full])
        attack(seen, attacks, quick=not study.full).save(folder)
    found: dict[str, Any] = parsed(read_bounded(file, LINE_BYTES))
    return found | {"accuracy": records[-1].test_accuracy or 0.0, "bytes": sum(r.bytes for r in records)}


def draw(study: Study) -> Drawn:
    names = list(VARIANTS) if study.full else list(QUICK)
    seeds = study.seeds if study.full else study.seeds[:1]
    figure, (leaks, accuracies) = panels(2)
    rows: list[Row] = []
    ssim: Measured = {}
    kept = []
    for k, name in enumerate(names):
        cuts = (1, 2, 3, 4) if study.full and name in EVERY_CUT else (1, 3)
        attacks = ("network", "optimise", "pseudo") if not study.full else () if name in EVERY_ATTACK else READING
        ssim[name], accuracy = {}, []
        for cut in cuts:
            each = [findings(study, attacks, cut=cut, seed=seed, **VARIANTS[name]) for seed in seeds]
            kept += each
            ssim[name][cut] = [leak_of(found).ssim for found in each]
            accuracy.append(100 * float(np.mean([found["accuracy"] for found in each])))
            for seed, found in zip(seeds, each, strict=True):
                about = {"variant": name, "cut": cut, "seed": seed, "accuracy_percent": 100 * found["accuracy"]}
                about |= {"MB": found["bytes"] / 1e6, "correlation": found["correlation"]}
                rows += [about | row for row in found["rows"]]
        means, low, high = ([float(f(found)) for found in ssim[name].values()] for f in (np.mean, min, max))
        line(leaks, k, cuts, means, name)
        leaks.fill_between(cuts, low, high, alpha=0.12, color=f"C{k}", linewidth=0)
        line(accuracies, k, cuts, accuracy, name)
    floor = float(np.mean([row["ssim"] for found in kept for row in found["rows"] if row["attack"] == "floor"]))
    leaks.axhline(floor, color="0.4", linestyle=":", label="mean image (floor)")
    leaks.set_ylabel("SSIM of the strongest reconstruction")
    accuracies.set_ylabel("test accuracy (%)")
    for axis in (leaks, accuracies):
        axis.set_xlabel("cut")
        axis.set_xticks(sorted({cut for found in ssim.values() for cut in found}))
        axis.grid(alpha=0.3)
    figure.legend(*leaks.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    _keep(study.out / study.base.data.dataset / "leakage.json", kept)
    caption = (
        f"Not in the paper. {SAMPLES[study.full]} samples of client 0 in every training, {len(seeds)} seed(s); the "
        "attack with the greatest structural similarity counts, of those that the server of the scheme can mount."
    )
    return Drawn(caption, rows, figure, _claims(ssim))


Measured = dict[str, dict[int, list[float]]]
"""SSIM of every seed, by variant and cut."""


MARGIN = 0.02
"""Of SSIM: differences below it are none, also with one seed."""


def lower(mine: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Verdict:
    """Whether SSIM of some trainings, a list of seeds for every cut, lies below that of others at every cut, beyond the
    spread of the seeds; a tie where it lies above nowhere.

    >>> lower([[0.1, 0.2]], [[0.5, 0.6]]), lower([[0.1, 0.55]], [[0.5, 0.6]]), lower([[0.9]], [[0.5]])
    ('holds', 'ties', 'does not hold')
    """
    pairs = list(zip(mine, base, strict=True))
    if all(max(here) < min(there) - MARGIN for here, there in pairs):
        return "holds"
    return "does not hold" if any(min(here) > max(there) + MARGIN for here, there in pairs) else "ties"


def _claims(ssim: Measured) -> list[Claim]:
    claims = []
    for name in ("sfl", "sfl, ResNet-8"):
        if plain := ssim.get(name):
            each = list(plain.values())
            said = ", ".join(f"{np.mean(seeds):.2f}" for seeds in each)
            claims.append(
                Claim(
                    f"a larger client-side model gives more privacy (section II); {name}",
                    f"SSIM {said} at cuts {', '.join(map(str, plain))}",
                    lower(each[1:], each[:-1]),
                )
            )
    for name, found in ssim.items():
        if name in ("sfl", "sfl, ResNet-8"):
            continue
        base = [ssim["sfl"][cut] for cut in found]
        each_ = (f"{np.mean(a):.2f} against {np.mean(b):.2f}" for a, b in zip(found.values(), base, strict=True))
        at = ", ".join(map(str, found))
        claims.append(
            Claim(
                f"ours: {name} leaks less than SFL",
                f"SSIM {', '.join(each_)} at cuts {at}",
                lower([*found.values()], base),
            )
        )
    return claims


def _keep(file: Path, kept: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(list(kept)) + "\n").encode())
