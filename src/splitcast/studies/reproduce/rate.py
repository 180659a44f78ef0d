"""Section III-B: how the mean squared gradient of SFL-GA falls with rounds, clients and local steps.

With η = √(N/(τT)) the paper has mean_t E‖∇F(w_t)‖² = O(1/√(τNT)), as long as what the cut costs, M = 4 · mean Γ, is
bounded (`docs/fidelity.md`, item 16, says what that leaves open). One of T, N and τ changes at a time, each length is a
training of its own, and the slope of log mean ‖∇F‖² by the logarithm of what changes is to be -1/2 or steeper. ∇F is
that of the averaged model on the same training rows in all trainings, before each round.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from splitcast.base.seeds import stream
from splitcast.engine.simulator import Simulator
from splitcast.run.parts import make_simulator
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, line, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread
from splitcast.theory.passes import boundaries, flat_gradient, leaves_of

USUAL = {"rounds": 80, "clients": 10, "local_steps": 1}
AXES: dict[str, tuple[str, Sequence[int]]] = {
    "T": ("rounds", (20, 40, 80, 160, 320)),
    "N": ("clients", (2, 5, 10, 20)),
    "τ": ("local_steps", (1, 2, 4)),
}
ROWS, HIDDEN = 1000, 32
SLOPE = -0.5


def draw(study: Study) -> Drawn:
    chosen = stream(0, "test").permutation(len(study.dataset.train_y))[:ROWS]
    x, y = study.dataset.train_x[chosen], study.dataset.train_y[chosen]
    shared = [mean_square(study, seed, x, y, **USUAL) for seed in study.seeds]
    figure, axes = panels(len(AXES))
    rows: list[Row] = []
    slopes: dict[str, list[float]] = {}
    for panel, (symbol, (field, values)) in zip(axes, AXES.items(), strict=True):
        found = np.array(  # (values, seeds)
            [
                shared
                if value == USUAL[field]
                else [mean_square(study, seed, x, y, **USUAL | {field: value}) for seed in study.seeds]
                for value in values
            ]
        )
        slopes[symbol] = np.polyfit(np.log(values), np.log(found), 1)[0].tolist()
        for value, each in zip(values, found, strict=True):
            rows += [
                {**USUAL, field: value, "axis": symbol, "seed": seed, "mean_squared_gradient": float(one)}
                for seed, one in zip(study.seeds, each, strict=True)
            ]
        line(panel, 0, values, found.mean(1).tolist(), f"measured, slope {spread(slopes[symbol], 2)}")
        steps = np.array(values, dtype=np.float64)
        line(panel, 1, values, (found[0].mean() * (steps / steps[0]) ** SLOPE).tolist(), f"slope {SLOPE:g}")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(values, [str(value) for value in values])
        panel.xaxis.minorticks_off()
        panel.set_xlabel({"T": "rounds T", "N": "clients N", "τ": "local steps τ"}[symbol])
        panel.set_ylabel("mean ‖∇F‖²")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=9)
    figure.suptitle(f"{study.name}, SFL-GA, two layers, η = √(N/(τT))")
    said = ", ".join(f"by {symbol} {spread(each, 2)}" for symbol, each in slopes.items())
    claims = [
        Claim(
            "the mean squared gradient is O(1/√(τNT)) with η = √(N/(τT)) (section III-B)",
            f"slopes of its logarithm {said}; the claim has {SLOPE:g} or steeper in each",
            all_of(larger([SLOPE] * len(each), each) for each in slopes.values()),
        )
    ]
    caption = (
        "The paper argues this from Theorem 1 without a figure. One of T, N and τ changes, the others are "
        f"T = {USUAL['rounds']}, N = {USUAL['clients']}, τ = {USUAL['local_steps']}; batch 8, two layers "
        f"with {HIDDEN} units between them, and the cut there; the gradient is that of {ROWS} training rows at the "
        "averaged model, before every round."
    )
    return Drawn(caption, rows, figure, claims)


def mean_square(study: Study, seed: int, x: Tensor, y: Tensor, **values: int) -> float:
    """mean_t ‖∇F(w_t)‖² of one training, t = 0..T-1."""
    n, tau, rounds = values["clients"], values["local_steps"], values["rounds"]
    lr = math.sqrt(n / (tau * rounds))
    config = study.config(scheme="sfl-ga", cut=1, batch=8, seed=seed, lr=lr, **values)
    simulator, total = make_simulator(config, study.dataset, blocks(study, seed)), 0.0
    for t in range(1, rounds + 1):
        total += squared_gradient(simulator, x, y)
        simulator.round(t)
    return total / rounds


def blocks(study: Study, seed: int) -> list[nn.Module]:
    """A client half with HIDDEN units, tanh, and a server half, Gaussian with variance 1 / inputs."""
    data, rng = study.dataset, stream(seed, "model")
    pixels = math.prod(data.train_x.shape[1:])
    halves = [nn.Linear(*shape, device="meta") for shape in ((pixels, HIDDEN), (HIDDEN, data.classes))]
    for half in halves:
        values = rng.standard_normal(half.weight.shape) / half.in_features**0.5
        half.weight = nn.Parameter(torch.from_numpy(values).float())
        half.bias = nn.Parameter(torch.zeros(half.out_features))
    return [nn.Sequential(nn.Flatten(), halves[0], nn.Tanh()), halves[1]]


def squared_gradient(simulator: Simulator, x: Tensor, y: Tensor) -> float:
    """‖∇F‖² of the averaged model, F the mean loss of these rows."""
    leaves = leaves_of(simulator.averaged())
    with torch.enable_grad():
        loss = simulator.task.losses(boundaries(simulator.model, leaves, x)[-1], y).mean()
        return float(flat_gradient(loss, list(leaves.values())).square().sum())
