"""All attacks on one run, beside their floors: `splitcast attack RUN`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitcast.base.errors import SplitcastError, one_of
from splitcast.base.files import write_atomically
from splitcast.cost.leakage import TOKENS
from splitcast.studies.privacy import broadcast, labels, tokens
from splitcast.studies.privacy.hijack import hijack
from splitcast.studies.privacy.measures import feature_distance, mse, psnr, ssim
from splitcast.studies.privacy.networks import Looks, Progress
from splitcast.studies.privacy.reconstruct import METHODS, Budget, Effort, mean_image
from splitcast.studies.privacy.view import View
from splitcast.training.correlation import distance_correlation

FILE, PICTURE = "attack.json", "attack.png"
HIJACK, OVERHEAR = Budget(400, 200, 60), Budget(600, 200, 100)
PEERS = 10
"""Clients whose gradients are in a broadcast."""
NAMES = ("floor", *METHODS, "hijack", "other clients: mean", "other clients: basis", TOKENS)
Told = Callable[[str], Progress | None]
"""Given the name of what begins, somebody who is told how far it is."""


@dataclass(frozen=True)
class Finding:
    """What one attack got at most."""

    attack: str
    steps: int
    """after which it had got furthest"""
    knows_half: bool
    """whether the attacker must know the client half, or be able to ask it"""
    possible: bool
    """whether an attacker of this run can: a half that the server averages is known to it, others are not; and other
    clients hear what is broadcast, nothing else"""
    mse: float
    psnr: float
    """dB"""
    ssim: float
    features: float
    """relative distance in what leaves the last block but one"""
    recognised: float
    """share of reconstructions that the trained model puts into the right class"""

    @property
    def leak(self) -> float:
        """What attacks are ranked by."""
        return self.ssim


def half_known(knows_half: bool, possible: bool) -> str:
    """What an attack has of the client half, in a word."""
    return "unknown" if not knows_half else "known" if possible else "(if known)"


@dataclass
class Findings:
    """One run under attack."""

    cut: int
    codec: str
    samples: int
    correlation: float | None
    """distance correlation of samples and smashed data; None of texts"""
    arch: str = ""
    """the model, by its name"""
    defence: str = ""
    """what clients do to smashed data, "" for nothing"""
    averaged: bool = False
    """whether the server averages client halves or hands them on, and so knows them"""
    epsilon: float | None = None
    """of differential privacy, at most (delta = 1e-5); None where the defence gives none"""
    rows: list[Finding] = field(default_factory=list)
    labels: dict[str, float] = field(default_factory=dict)
    """share of labels found from gradients, were labels at home"""
    pictures: dict[str, Tensor] = field(default_factory=dict)

    @property
    def worst(self) -> Finding:
        """The attack that gets furthest, of those that are possible; there must be one."""
        return max((row for row in self.rows if row.possible and row.attack != "floor"), key=lambda row: row.leak)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        about = {"cut": self.cut, "codec": self.codec, "samples": self.samples, "correlation": self.correlation}
        about |= {"arch": self.arch, "defence": self.defence, "averaged": self.averaged, "epsilon": self.epsilon}
        return about | {"rows": [asdict(row) for row in self.rows], "labels": self.labels}

    def save(self, folder: Path) -> None:
        """Numbers and pictures."""
        from splitcast.studies.privacy.figure import save_grid

        write_atomically(folder / FILE, (json.dumps(self.as_json(), indent=1) + "\n").encode())
        if self.pictures:
            save_grid(self.pictures, folder / PICTURE)


def attack(seen: View, names: Sequence[str] = (), *, effort: Effort = "all", told: Told | None = None) -> Findings:
    """Run attacks (all that apply, or those named); of each, the strongest of several looks counts."""
    for name in names:
        one_of("attacks", name, NAMES)
    told = told or (lambda name: None)
    if not seen.x.is_floating_point():
        return _text(seen, effort == "quick")
    if seen.x.dim() != 4:
        raise SplitcastError(f"run: samples are {tuple(seen.x.shape[1:])}; attacks need images (C, H, W) or tokens")
    wanted = names or NAMES
    correlation = distance_correlation(seen.x.flatten(1)[:256], seen.smashed.flatten(1)[:256])
    found = _about(seen, len(seen.x), float(correlation))
    found.pictures["original"] = seen.x
    found.rows.append(_judged(seen, "floor", 0, False, mean_image(seen)))
    found.pictures["floor"] = mean_image(seen)
    for name, method in METHODS.items():
        if name in wanted:
            made = method.run(seen, method.budget.looks(effort), told(name))
            _add(found, seen, name, method.needs_half, made)
    if "hijack" in wanted:
        _add(found, seen, "hijack", False, hijack(seen, HIJACK.looks(effort), told("hijack")).looks)
    for name, reply in (("mean", broadcast.mean), ("basis", broadcast.basis(8))):
        heard = seen.heard == name
        if (full := f"other clients: {name}") in wanted and (heard or names):
            made = broadcast.overhear(seen, PEERS, reply, OVERHEAR.looks(effort), told(full))
            _add(found, seen, full, False, made, possible=heard)
    found.labels = label_leaks(seen)
    return found


def _about(seen: View, samples: int, correlation: float | None) -> Findings:
    known = (seen.arch, seen.guard, seen.averaged, seen.epsilon)
    return Findings(seen.cut, seen.codec.name, samples, correlation, *known)


def _add(found: Findings, seen: View, name: str, knows_half: bool, made: Looks, *, possible: bool = True) -> None:
    """The strongest of several looks."""
    judged = {steps: _judged(seen, name, steps, knows_half, z, possible=possible) for steps, z in made.items()}
    best = max(judged, key=lambda steps: judged[steps].leak)
    found.rows.append(judged[best])
    found.pictures[name] = made[best]


@torch.no_grad()
def _judged(seen: View, name: str, steps: int, knows_half: bool, z: Tensor, *, possible: bool = True) -> Finding:
    z = torch.nan_to_num(z).clamp(float(seen.auxiliary.min()), float(seen.auxiliary.max()))
    deep = [seen.model.forward(seen.client | seen.server, x, 0, seen.model.depth - 1) for x in (seen.x, z)]
    output = seen.model.forward(seen.client | seen.server, z, 0, seen.model.depth)
    right = output.argmax(1) == seen.y if seen.y.dim() == 1 and output.dim() == 2 else torch.zeros(1)
    return Finding(
        attack=name,
        steps=steps,
        knows_half=knows_half,
        possible=possible and (seen.averaged or not knows_half),
        mse=float(mse(seen.x, z).mean()),
        psnr=float(psnr(seen.x, z, seen.span).mean()),
        ssim=float(ssim(seen.x, z, seen.span).mean()),
        features=float(feature_distance(*deep).mean()),
        recognised=float(right.double().mean()),
    )


def label_leaks(seen: View) -> dict[str, float]:
    """Labels found from the gradients that leave the last block, as if it and the labels were at home. One known
    sample of each class names the others. Empty where labels are no classes."""
    if seen.y.dim() != 1 or seen.y.is_floating_point():
        return {}
    victims = _head_gradients(seen, seen.x, seen.y)
    classes = sorted(set(seen.auxiliary_y.tolist()))
    first = torch.tensor([int((seen.auxiliary_y == c).nonzero()[0]) for c in classes])
    known, known_y = _head_gradients(seen, seen.auxiliary[first], seen.auxiliary_y[first]), seen.auxiliary_y[first]
    common = int(seen.y.mode().values)
    return {
        "guess": float((seen.y == common).double().mean()),
        "direction": float((labels.by_direction(victims, known, known_y) == seen.y).double().mean()),
        "clusters": float((labels.by_clusters(victims, known, known_y) == seen.y).double().mean()),
        "norm, one class against the others (AUC)": labels.by_norm(victims, (seen.y == common).long()),
    }


def _head_gradients(seen: View, x: Tensor, y: Tensor) -> Tensor:
    last, params = seen.model.depth - 1, seen.client | seen.server
    found = []
    for xs, ys in zip(torch.split(x, 50), torch.split(y, 50), strict=True):
        with torch.no_grad():
            features = seen.model.forward(params, xs, 0, last)
        features = features.requires_grad_()
        losses = seen.task.losses(seen.model.forward(params, features, last, last + 1), ys)
        found.append(torch.autograd.grad(losses.sum(), features)[0])
    return torch.cat(found)


def _text(seen: View, quick: bool) -> Findings:
    """Tokens, where the client half is known."""
    rows = seen.smashed[: 1 if quick else 4]
    vocabulary = int(max(seen.auxiliary.max(), seen.x.max())) + 1
    found = tokens.recover(seen.features, rows, vocabulary)
    guess = int(seen.auxiliary.flatten().mode().values)
    findings = _about(seen, len(rows), None)
    findings.labels = {
        "tokens guessed": tokens.accuracy(torch.full_like(seen.x[: len(rows)], guess), seen.x[: len(rows)]),
        TOKENS: tokens.accuracy(found, seen.x[: len(rows)]),
    }
    return findings
