"""Section III-B: accuracy after equal rounds against the number of clients, and the theory's curve beside it."""

import math
import statistics
from itertools import pairwise

import torch

from splitcast.run.parts import make_parts, make_simulator
from splitcast.studies.curves import COLOURS
from splitcast.studies.reproduce.draw import Claim, Drawn, Row, finals, line, panels
from splitcast.studies.reproduce.study import Study
from splitcast.studies.reproduce.verdicts import all_of, larger, spread
from splitcast.theory import (
    GammaEstimate,
    Scalability,
    estimate_gamma,
    estimate_smoothness,
    estimate_variance,
    largest_lr,
)

CLIENTS = (2, 5, 10, 20, 40)
STEPS = 2


def draw(study: Study) -> Drawn:
    base = study.base
    clients = CLIENTS if study.full else CLIENTS[:-1]
    ends = []
    for n in clients:
        # the paper's η = sqrt(N / (τ T)), scaled so that ten clients have the usual rate
        lr = base.train.lr * math.sqrt(n / 10)
        ends.append(finals(study.runs(scheme="sfl-ga", clients=n, local_steps=STEPS, lr=lr, eval_every=100)))
    gammas = [_gamma(study, seed) for seed in study.seeds]
    theory = _theory(study, gammas[0])
    bound = [theory.at(n).total for n in clients]
    figure, axes = panels(2)
    line(axes[0], 0, clients, [statistics.fmean(end) for end in ends], "measured")
    axes[0].fill_between(clients, [min(end) for end in ends], [max(end) for end in ends], color=COLOURS[0], alpha=0.15)
    axes[0].set_ylabel(f"test accuracy after {base.train.rounds} rounds (%)")
    many = sorted({round(theory.most ** (k / 40)) for k in range(41)})
    for k, term in enumerate(("total", "initialisation", "averaged_noise", "local_steps", "floor")):
        values = [getattr(theory.at(n), term) for n in many]
        line(axes[1], k, many, values, {"total": "bound", "floor": "4 Γ"}.get(term, term.replace("_", " ")), every=8)
    axes[1].set_ylabel(f"bound on mean ‖∇F‖² (T = {theory.rounds:g})")
    axes[1].set_yscale("log")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xlabel("clients N")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_xticks(clients, [str(n) for n in clients])
    axes[0].minorticks_off()
    axes[1].legend(fontsize=9)
    figure.suptitle(f"{base.data.dataset}, SFL-GA, cut 1, τ = {STEPS}, η ∝ √N")
    rows: list[Row] = [
        {"clients": n, "seed": seed, "accuracy_percent": end, "bound": value}
        for n, every, value in zip(clients, ends, bound, strict=True)
        for seed, end in zip(study.seeds, every, strict=True)
    ]
    by_cut = {v: [found.raw[v - 1] for found in gammas] for v in range(1, len(gammas[0].raw) + 1)}
    best = max(ends[1:-1], key=statistics.fmean)
    claims = [
        Claim(
            "convergence improves with N at first, and deteriorates as N grows further (section III-B)",
            ", ".join(f"N={n}: {spread(end)} %" for n, end in zip(clients, ends, strict=True))
            + f"; the bound is least at N = {theory.best()}",
            all_of(larger(best, other) for other in (ends[0], ends[-1])),
        ),
        Claim(
            "a smaller client half means a smaller difference of SFL-GA's gradient from SFL's (Assumption 4)",
            "Γ at the start: " + ", ".join(f"{spread(values)} (v={v})" for v, values in by_cut.items()),
            all_of(larger(deep, shallow) for shallow, deep in pairwise(by_cut.values())),
        ),
    ]
    caption = (
        "The paper argues this from Theorem 1 without a figure. Left: trainings of equal length, each client "
        "with its own b samples per step, mean and range over seeds. Right: the bound with L, σ², Γ and the first "
        "loss measured at the start, for so many rounds T that the theorem admits these N: of use for its shape."
    )
    return Drawn(caption, rows, figure, claims)


def _gamma(study: Study, seed: int) -> GammaEstimate:
    """Γ at the initial weights of a seed."""
    config = study.config(seed=seed)
    sim, parts = make_simulator(config, study.dataset), make_parts(config, study.dataset)
    start = sim.model.initial()
    return estimate_gamma(sim.model, sim.task, start, sim.x, sim.y, parts, config.train.batch, 2, seed)


def _theory(study: Study, gamma: GammaEstimate) -> Scalability:
    config = study.config(seed=study.seeds[0])
    simulator = make_simulator(config, study.dataset)
    parts, start = make_parts(config, study.dataset), simulator.model.initial()
    task = simulator.task
    x, y, batch, seed = simulator.x, simulator.y, config.train.batch, config.train.seed
    smooth = estimate_smoothness(simulator.model, task, start, x[:256], y[:256], seed, tolerance=0.05)
    noise = estimate_variance(simulator.model, task, start, x, y, parts, batch, 2, seed)
    with torch.no_grad():
        logits = simulator.model.forward(start, x[:1000], 0, simulator.model.depth)
        gap = float(task.losses(logits, y[:1000]).mean())
    rounds = study.base.train.rounds
    while STEPS * rounds * largest_lr(smooth, STEPS) ** 2 < max(CLIENTS):
        rounds *= 10
    return Scalability(smooth, noise.per_client, gap, gamma.at(1), STEPS, rounds)
