"""What the attacker has: smashed data of a victim as the server decodes them, and what it may know beside them.

The victim is one client of a run as it stood at its last checkpoint; the samples are its own. The attacker may have
auxiliary samples of the same kind (here: every second one of the test set), the server half, and, where client halves
pass through the server's hands, the client half too. What it never has are the victim's samples; they only judge what
it made.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from splitcast.base.codec import FP32, Codec
from splitcast.base.errors import SplitcastError
from splitcast.cost.leakage import knows_halves
from splitcast.cost.privacy import gaussian_epsilon, run_epsilon
from splitcast.data import Dataset
from splitcast.engine.simulator import Simulator
from splitcast.model.split import Params, SplitModel
from splitcast.run.parts import fitted, load_data, make_parts, make_simulator, resolved, with_clients
from splitcast.run.records import RunFolder
from splitcast.schemes.feedback import Basis, Mean, Partial
from splitcast.schemes.program import Scheme
from splitcast.training.defence import Defence
from splitcast.training.task import Task


@dataclass(frozen=True)
class View:
    """One victim, seen from the server."""

    model: SplitModel
    task: Task
    cut: int
    client: Params
    """the victim's half"""
    server: Params
    codec: Codec
    """of the smashed data"""
    x: Tensor
    """the victim's samples (M, *shape), for judging only"""
    y: Tensor
    smashed: Tensor
    """what the server decoded of them (M, *d)"""
    auxiliary: Tensor
    """samples of the attacker's own (A, *shape)"""
    auxiliary_y: Tensor
    defence: Defence | None = None
    averaged: bool = False
    """whether the server averages client halves or hands them on, and so knows them"""
    arch: str = ""
    """the model, by its name"""
    heard: str = ""
    """of all gradients, what every client hears: their mean, a basis, or nothing"""
    epsilon: float | None = None
    """of differential privacy, at most, of a sample as often as it was sent; None where the defence gives none"""

    @property
    def span(self) -> float:
        """Range of pixels in the attacker's samples."""
        return float(self.auxiliary.max() - self.auxiliary.min()) or 1.0

    @property
    def guard(self) -> str:
        """The defence in words, "" for none."""
        return "" if self.defence is None else self.defence.name

    def features(self, x: Tensor) -> Tensor:
        """The victim's half on samples, without what it does to them before it sends; differentiable."""
        return self.model.forward(self.client, x, 0, self.cut)

    @torch.no_grad()
    def at(self, cut: int, codec: Codec = FP32, defence: Defence | None = None) -> "View":
        """The same weights cut elsewhere, sent once in another format or behind another defence: what a client shows
        that changes these without training anew. Another cut is one of the same model only where all halves are equal.
        """
        whole = self.client | self.server
        here = {k: v for k, v in whole.items() if int(k.split(".", 1)[0]) < cut}
        other = {k: v for k, v in whole.items() if k not in here}
        spent = gaussian_epsilon(defence.clip, defence.noise, releases=1) if defence else math.inf
        made = replace(self, cut=cut, client=here, server=other, codec=codec, defence=defence)
        made = replace(made, epsilon=spent if math.isfinite(spent) else None)
        return replace(made, smashed=made.send(self.x))

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Share of samples that the model, with the victim's half, puts into their class through this wire."""
        output = self.model.forward(self.server, self.send(x), self.cut, self.model.depth)
        return float((output.argmax(1) == y).double().mean())

    @torch.no_grad()
    def send(self, x: Tensor) -> Tensor:
        """Samples as the server would decode them, through defence and codec."""
        return sent(self.features, self.defence, self.codec, x)


def sent(features: Callable[[Tensor], Tensor], defence: Defence | None, codec: Codec, x: Tensor, b: int = 50) -> Tensor:
    """Decoded smashed data of x (M, *shape), in messages of b samples."""
    parts = []
    for some in torch.split(x, b):
        values = features(some)[None]
        parts.append(codec.through(defence.guard(values) if defence else values)[0])
    return torch.cat(parts)


@torch.no_grad()
def view(run: Path, samples: int, auxiliary: int, client: int = 0, dataset: Dataset | None = None) -> View:
    """What a finished or stopped run shows of one of its clients; ``dataset``: that of the run, if it was read."""
    folder = RunFolder(run)
    config = resolved(folder.config())
    if not folder.checkpoint_file.is_file():
        raise SplitcastError(f"run: {run} has no checkpoint yet; train it first")
    dataset = dataset or load_data(config)
    config = with_clients(config, dataset)
    engine = make_simulator(config, dataset)
    stored = folder.restore(dataset.fingerprint())
    engine.resume(stored.tensors, stored.about, stored.round)
    if stored.round and (uplink := folder.rounds(stored.round)[-1].uplink):
        engine.send_as(uplink)
    dataset = fitted(dataset, engine.task, engine.model)
    parts = make_parts(config, dataset)
    if not 0 <= client < len(parts):
        raise SplitcastError(f"client: {client}; choose 0..{len(parts) - 1}")
    rows = torch.from_numpy(parts[client][:samples])
    half = torch.arange(0, len(dataset.test_x), 2)[:auxiliary]
    made = of_engine(
        engine,
        dataset.train_x[rows],
        dataset.train_y[rows],
        dataset.test_x[half],
        dataset.test_y[half],
        client,
        stored.round,
    )
    return replace(made, arch=config.model.arch, epsilon=run_epsilon(config, stored.round))


@torch.no_grad()
def of_engine(
    engine: Simulator, x: Tensor, y: Tensor, auxiliary: Tensor, auxiliary_y: Tensor, client: int = 0, t: int = 1
) -> View:
    """What the server of a simulation sees of samples of one client's after round ``t``."""
    state, scheme, model = engine.state.of(client), engine.scheme, engine.model
    guard = engine.kit.guard(engine.state.placement)
    cut = state.placement.segments[0].stop
    if cut >= model.depth:
        raise SplitcastError(f"run: {scheme.name} sends no smashed data; there is nothing to attack")
    mine = (state.client.one(0) if state.client.stacked else state.client).everything()
    server = state.server.everything() | {k: v for k, v in mine.items() if int(k.split(".", 1)[0]) >= cut}
    codec, defence = scheme.uplink.at(t), guard[1] if guard else None

    def features(some: Tensor) -> Tensor:
        return model.forward(mine, some, 0, cut)

    return View(
        model=model,
        task=engine.task,
        cut=cut,
        client=mine,
        server=server,
        codec=codec,
        x=x,
        y=y,
        smashed=sent(features, defence, codec, x),
        auxiliary=auxiliary,
        auxiliary_y=auxiliary_y,
        defence=defence,
        averaged=knows_halves(scheme),
        heard=_heard(scheme.at(state.placement)),
    )


def _heard(scheme: Scheme) -> str:
    feedback = getattr(scheme, "feedback", None)
    return "mean" if isinstance(feedback, Mean | Partial) else "basis" if isinstance(feedback, Basis) else ""
