"""What splitting costs a language model: a round against a centralised step, the memory of a client against that of the
whole model, and that of a process which simulates sixteen clients. SmolLM2-135M with adapters of rank 8, four clients,
rows of 128 tokens. And what a plan of a model of eight billion parameters costs.

A centralised step is plain PyTorch: the model of transformers with the same adapters, AdamW, all clients' rows in one
batch. A round of `sfl` runs the same tokens. Memory is what is held, weights and state of the optimiser, and the most
that a step has allocated at any time beside it, as torch's profiler tells; of a process, the most pages that it had.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from splitcast.base.config import Config, with_values
from splitcast.bench.apart import apart
from splitcast.bench.rows import Row, interleaved_medians
from splitcast.cost.memory import DEVICES, client_memory
from splitcast.engine.simulator import Simulator
from splitcast.model import make_model
from splitcast.model.hub import PLANNED_LENGTH
from splitcast.model.split import SplitModel
from splitcast.studies.plan import plan
from splitcast.training.optimiser import make_optimiser
from splitcast.training.passes import Pass
from splitcast.training.placement import Placement, Segment
from splitcast.training.positions import NextToken, next_tokens
from splitcast.training.runtime import Runtime
from splitcast.training.weights import Weights

CLIENTS, LENGTH, CUT = 4, 128, 15
CONFIG = with_values(
    Config(),
    arch="smollm2",
    task="next-token",
    scheme="sfl",
    optimizer="adamw",
    lr=1e-3,
    clients=CLIENTS,
    cut=CUT,
    **{"lora.rank": 8, "lora.modules": ("q_proj", "v_proj")},
)
LLAMA_8B = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}


def text(repeats: int) -> list[Row]:
    """Every figure of `splitcast bench text`."""
    model = make_model(CONFIG, (LENGTH,), 2, torch.int64)
    made = [*rounds(model, repeats), *memory(model)]
    del model
    many, plans = apart(crowd, arch=CONFIG.model.arch, clients=16), apart(planning, sizes=LLAMA_8B)
    return [
        *made,
        Row("text.memory.16_clients", many["gib"], "GiB"),
        Row("text.plan_8b", plans["seconds"], "s of a core"),
        Row("text.plan_8b.memory", plans["gib"], "GiB"),
    ]


def rounds(model: SplitModel, repeats: int) -> list[Row]:
    """Rounds with one row of tokens of each client, in units of a centralised step on the same tokens."""
    classes, whole = model.smashed_shape(model.depth)[-1], model.source
    assert whole is not None
    x = torch.randint(0, classes, (CLIENTS, *model.input_shape), generator=torch.Generator().manual_seed(0))
    y, parts = next_tokens(x), np.split(np.arange(CLIENTS), CLIENTS)
    trained = [p for p in whole.parameters() if p.requires_grad]
    steps = torch.optim.AdamW(trained, CONFIG.train.lr, weight_decay=0.0)
    turns: dict[str, Callable[[], object]] = {"central": partial(_central, whole, steps, x, y)}
    for scheme in ("sfl", "sfl-tc"):
        config = with_values(CONFIG, scheme=scheme, batch=1, cut=min(CUT, model.depth - 1))
        turns[scheme] = partial(Simulator(config, model, NextToken(classes), x, y, parts).round, 1)
    seconds = interleaved_medians(turns, repeats, "rounds")
    central = seconds.pop("central")
    ratios = [Row(f"text.{scheme}", each / central, "centralised steps") for scheme, each in seconds.items()]
    return [Row("text.central", 1e3 * central, "ms"), *ratios]


def _central(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimiser.zero_grad()
    loss: Any = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), ignore_index=-100)
    loss.backward()
    optimiser.step()


def memory(model: SplitModel, cut: int = 2) -> list[Row]:
    """Of a client at a cut, in two parts and with labels at home, recomputing, and of all in one place."""
    depth = model.depth
    peaks = {
        "whole": held_bytes(model, Placement.whole(depth), recompute=False),
        "client": held_bytes(model, Placement.split(cut, depth), recompute=True),
        "client_at_home": held_bytes(model, Placement.at_home(cut, depth), recompute=True),
    }
    rows = [Row(f"text.memory.{name}", peak / 1e6, "MB") for name, peak in peaks.items()]
    shares = {name: 100 * peak / peaks["whole"] for name, peak in peaks.items() if name != "whole"}
    return rows + [Row(f"text.memory.{name}_share", value, "% of the whole") for name, value in shares.items()]


def held_bytes(model: SplitModel, placement: Placement, *, recompute: bool) -> int:
    """The most bytes that the client of a placement holds while it trains on one sample."""
    optimiser, runtime = make_optimiser(CONFIG.train), Runtime(recompute=recompute)
    weights = Weights.start(model.initial(), optimiser, model.buffers(), model.frozen()).only(placement.on_client)
    need = client_memory(model, placement, optimiser, 1)
    trained = sum(4 * v.numel() for v in weights.params.values())  # of which a step allocates the gradients

    def step() -> None:
        sent: Any = None
        for segment in (segment for segment in placement.segments if segment.side == "client"):
            x = _entering(model, segment)
            run = Pass(model, segment, weights, slice(None), x, runtime)
            if segment.stop < model.depth:
                sent = run
                continue
            output = run.output.detach().requires_grad_()
            y = torch.zeros(output.shape[:-1], dtype=torch.int64)
            loss = NextToken(output.shape[-1]).losses(output.flatten(0, 1), y.flatten(0, 1)).mean()
            run.backward(torch.autograd.grad(loss, output)[0], optimiser)
        if sent is not None:
            sent.backward(torch.ones_like(sent.output), optimiser)
        weights.step(optimiser)

    step()
    return need.weights + need.optimiser - trained + peak_bytes(step)


def _entering(model: SplitModel, segment: Segment) -> Tensor:
    shape = (1, 1, *model.entering(segment.start))
    if segment.start == 0:
        return torch.ones(shape, dtype=model.input_dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def peak_bytes(step: Callable[[], object]) -> int:
    """The most memory that a call has allocated at any time and not yet given back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events: Any = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(np.cumsum([size for _, size in changes]).max(initial=0))


def crowd(arch: str, clients: int) -> None:
    """Two rounds of so many clients with a row each."""
    config = with_values(CONFIG, arch=arch, clients=clients, batch=1)
    model = make_model(config, (LENGTH,), 2, torch.int64)
    classes = model.smashed_shape(model.depth)[-1]
    x = torch.randint(0, classes, (clients, LENGTH), generator=torch.Generator().manual_seed(0))
    config = with_values(config, cut=min(CUT, model.depth - 1))
    simulator = Simulator(config, model, NextToken(classes), x, next_tokens(x), np.split(np.arange(clients), clients))
    for t in (1, 2):
        simulator.round(t)


def planning(sizes: Mapping[str, int]) -> None:
    """All cuts of a Llama of these sizes, for four laptops."""
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(about))
        laptop = {"client_memory_gb": DEVICES["laptop"].memory_gb, "client_flops_per_s": DEVICES["laptop"].flops_per_s}
        config = with_values(CONFIG, arch=f"hf:{file}", batch=1, cut=1, **laptop)
        model = make_model(config, (PLANNED_LENGTH,), 2, torch.int64, shapes_only=True)
        plan(config, 20, model, classes=sizes["vocab_size"])
