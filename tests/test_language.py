"""Fine-tuning of language models, split: what plain PyTorch does with the same tokens, with labels at home or not."""

import contextlib
import copy
import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lengths import now
from splitcast.base.codec import FP32
from splitcast.base.config import Config, LoraConfig, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.seeds import stream
from splitcast.bench.apart import apart
from splitcast.bench.text import LLAMA_8B, crowd, memory, peak_bytes, planning, rounds
from splitcast.cli.main import main
from splitcast.data.batches import draw_batches
from splitcast.data.datasets import from_tensors
from splitcast.engine.simulator import Simulator
from splitcast.model import make_model, prepared
from splitcast.model.lora import LoRA, add_lora
from splitcast.model.split import SplitModel
from splitcast.remote.federation import Federation
from splitcast.remote.site import Site
from splitcast.remote.sites import Limits
from splitcast.run.loop import most_memory, train
from splitcast.run.parts import chosen, resolved
from splitcast.run.records import RunFolder
from splitcast.schemes import schemes
from splitcast.schemes.schemes import make_scheme
from splitcast.studies.plan import plan
from splitcast.training.passes import saved_bytes
from splitcast.training.placement import Placement
from splitcast.training.positions import NextToken, next_tokens
from splitcast.training.weights import FROZEN
from test_federation import Wired
from test_transformer import FAMILIES, TOKENS, hf

LORA = LoraConfig(rank=2, modules=("q_proj", "v_proj"), alpha=4)
LENGTH = 7
AT_HOME = {"labels_at_home": True}


def text(sizes):
    """Random tokens, their targets, and which rows each client has."""
    x = torch.randint(4, TOKENS, (sum(sizes), LENGTH), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [torch.arange(end - size, end).numpy() for size, end in zip(sizes, ends, strict=True)]
    return x, next_tokens(x), parts


def sim_of(model, sizes, **values):
    usual = {"scheme": "sfl", "cut": 2, "batch": 5, "lr": 0.01, "dtype": "float64", "optimizer": "adamw"}
    config = with_values(Config(), **usual | {"clients": len(sizes), "task": "next-token"} | values)
    return Simulator(config, model, NextToken(TOKENS), *text(sizes))


def fine_tuned(module, sizes, client, rounds, tau=1, make=lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0)):
    """Plain PyTorch on the batches of a client, the loss being the mean over tokens."""
    x, y, parts = text(sizes)
    optimiser = make([p for p in module.parameters() if p.requires_grad])
    for t in rounds:
        for i in range(tau):
            rows = parts[client][draw_batches(sizes, 5, stream(0, "batch", t, i))[client]]
            optimiser.zero_grad()
            logits = module(x[rows], use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), y[rows].flatten(), ignore_index=-100).backward()
            optimiser.step()
    return {k: p.detach().clone() for k, p in module.named_parameters() if p.requires_grad}


def adapted(module):
    """The model with the adapters that `from_transformer` gives it."""
    own = copy.deepcopy(module)
    torch.manual_seed(9)
    add_lora(own, LORA.rank, LORA.modules, LORA.alpha)
    return own.double()


def split_of(module, lora=LORA):
    torch.manual_seed(9)
    return SplitModel.from_transformer(module, lora, example=torch.zeros(1, LENGTH, dtype=torch.int64))


def trained(sim):
    ours = sim.averaged()
    return {k.split(".", 1)[1]: ours[k].clone() for k in sim.model.initial()}


def distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[k] - theirs[k].double()).abs().max()) for k in ours)


SCHEMES = [name for name, scheme in schemes.SCHEMES.items() if scheme.u_shape]
EXACT = {"uplink_codec": "fp32", "downlink_codec": "fp32", "sync_codec": "fp32", "sfl-gb.rank": 1000}
EXACT |= {"feature_codec": "fp32", "feature_gradient_codec": "fp32"}


@pytest.mark.parametrize("home", now([False, True], True))
@pytest.mark.parametrize("scheme", now([*SCHEMES, "fl"], *SCHEMES[::2]))
def test_one_client_is_plain_fine_tuning(scheme, home):
    if home and scheme == "fl":
        with pytest.raises(
            SplitcastError, match=f"labels_at_home: fl has no U-shape; choose one of {', '.join(SCHEMES)}"
        ):
            sim_of(split_of(hf("llama")), [20], scheme=scheme, **AT_HOME)
        return
    module = hf("llama", tie_word_embeddings=True)
    sim = sim_of(split_of(module), [20], scheme=scheme, local_steps=2, labels_at_home=home, **EXACT)
    start = trained(sim)
    for t in (1, 2, 3):
        sim.round(t)
    theirs = fine_tuned(adapted(module), [20], 0, (1, 2, 3), tau=2)
    assert distance(trained(sim), theirs) < 1e-5 < distance(start, theirs)


def test_the_docs_name_all_schemes_whose_labels_may_stay_at_home():
    text = Path(__file__).parent.parent.joinpath("docs", "language-models.md").read_text()
    (listed,) = [line for line in text.splitlines() if line.endswith(" have both.")]
    assert re.findall("`(.*?)`", listed) == SCHEMES
    for scheme in schemes.SCHEMES.keys() - SCHEMES:
        with pytest.raises(SplitcastError, match=f"^labels_at_home: {scheme} has no U-shape"):
            make_scheme(with_values(Config(), scheme=scheme, **AT_HOME))


@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("cut", [1, 3])
def test_sfl_is_the_average_of_the_adapters(home, cut):
    """Three local steps each, from the same start."""
    module, sizes = hf("qwen2"), [12, 20]
    sim = sim_of(split_of(module), sizes, cut=cut, local_steps=3, labels_at_home=home)
    sim.round(1)
    each = [fine_tuned(adapted(module), sizes, n, (1,), tau=3) for n in range(2)]
    mean = {k: (12 * each[0][k] + 20 * each[1][k]) / 32 for k in each[0]}
    assert distance(trained(sim), mean) < 1e-9


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("tau", [1, 2])
def test_a_tied_embedding_is_trained_whole_in_the_u_shape(optimizer, tau):
    """Embedding and head are one tensor on the client: it steps along the sum of both gradients."""
    module = hf("gpt2")
    model = SplitModel.from_transformer(module, example=torch.zeros(1, LENGTH, dtype=torch.int64))
    with pytest.raises(SplitcastError, match="separates 4.lm_head.weight from 0.transformer.wte.weight"):
        sim_of(model, [20])
    sim = sim_of(model, [20], local_steps=tau, optimizer=optimizer, **AT_HOME)
    for t in (1, 2):
        sim.round(t)
    steps = {
        "adamw": lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.0),
        "sgd": lambda params: torch.optim.SGD(params, 0.01),
    }
    theirs = fine_tuned(copy.deepcopy(module).double(), [20], 0, (1, 2), tau, steps[optimizer])
    assert distance(trained(sim), theirs) < 1e-9


@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_never_leave_home(scheme):
    sim = sim_of(split_of(hf("llama")), [12, 20], scheme=scheme, **AT_HOME)
    sent = sim.round(1).ledger.by_kind()
    assert "up.labels" not in sent and {"up.smashed", "down.features", "up.feature gradient"} <= sent.keys()
    assert sim.state.placement == Placement.at_home(2, 5)
    with pytest.raises(SplitcastError, match="cut: 4 is not legal with labels at home; choose 1..3"):
        sim_of(split_of(hf("llama")), [12, 20], scheme=scheme, cut=4, **AT_HOME)


def test_adapters_of_many_clients_run_together():
    """One pass of all clients' rows through the frozen layer, and of each client's through its own adapter."""
    torch.manual_seed(3)
    layer = LoRA(torch.nn.Linear(4, 3), rank=2, alpha=4)
    a, b = torch.randn(5, 2, 4, requires_grad=True), torch.randn(5, 3, 2, requires_grad=True)
    x = torch.randn(5 * 2, 6, 4)
    together = torch.func.functional_call(layer, {"lora_A": a, "lora_B": b}, (x,))
    apart = [
        torch.func.functional_call(layer, {"lora_A": a[n], "lora_B": b[n]}, (x[2 * n : 2 * n + 2],)) for n in range(5)
    ]
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)
    model = split_of(hf("llama"))
    assert model.only_adapters(0, 5)
    assert not SplitModel.from_transformer(hf("llama")).only_adapters(1, 2)


@pytest.mark.parametrize("lora", [LORA, None])
def test_clients_that_recompute_learn_the_same(lora):
    """With less in memory: of adapters, and of whole models that clients have a copy each of."""
    ends, peaks = [], []
    for recompute in (False, True):
        sim = sim_of(split_of(hf("llama"), lora), [12, 20], scheme="psl", cut=4, recompute=recompute, **EXACT)
        sim.round(1)
        peaks.append(peak_bytes(lambda sim=sim: sim.round(2)))
        ends.append(trained(sim))
    assert distance(*ends) < 1e-12
    assert peaks[1] < peaks[0]


@pytest.mark.long
def test_a_plan_knows_what_recomputing_costs(described, tmp_path):
    """One more forward pass; what enters each block is kept, and the activations of one."""
    where = ("--out", str(tmp_path), "--input-shape", "9", "--scheme", "sfl", "--labels-at-home")
    usual, again = (planned(described, *where, *more)["cuts"] for more in ((), ("--recompute",)))
    config = with_values(Config(), arch=described, task="next-token")
    model = make_model(config, (9,), TOKENS, torch.int64, shapes_only=True)
    for cut, (before, after) in enumerate(zip(usual, again, strict=True), 1):
        forward = model.flops(0, cut)[0] + model.flops(4, 5)[0]
        assert after["client_flops"] == pytest.approx(before["client_flops"] + 3 * forward)
        assert after["memory"]["weights"] == before["memory"]["weights"]
    inputs = 4 * (9 + 9 * 16 + 9 * 16 + 9 * 16)  # tokens, two layers and the head, at cut 3
    most = max(saved_bytes(model, k, k + 1) for k in (0, 1, 2, 4))
    leaving = 4 * (9 * 16 + 9 * TOKENS)
    assert again[2]["memory"]["activations"] == 3 * (inputs + most + leaving)
    assert again[2]["memory"]["activations"] < usual[2]["memory"]["activations"]


def test_a_client_holds_its_part_alone():
    """Of the memory of the whole model: its weights, and what it allocates in a step."""
    module = hf("llama", vocab_size=2000, num_hidden_layers=8, hidden_size=32, tie_word_embeddings=True)
    model = SplitModel.from_transformer(module, LORA, example=torch.zeros(1, 16, dtype=torch.int64))
    found = {row.name.removeprefix("text.memory."): row.value for row in memory(model)}
    weights = sum(p.numel() for p in module.parameters()) * 4 / 1e6
    logits = 16 * 2000 * 4 / 1e6
    assert weights + logits < found["whole"] < 1.2 * weights + 5 * logits
    assert found["client"] < 2000 * 32 * 4 / 1e6 + 0.2 < found["client_at_home"] < found["whole"]
    assert found["client_share"] == pytest.approx(100 * found["client"] / found["whole"])


def test_a_round_is_timed_in_centralised_steps():
    rows = {row.name: row for row in rounds(split_of(hf("llama")), 1)}
    assert set(rows) == {"text.central", "text.sfl", "text.sfl-tc"}
    assert all(row.value > 0 for row in rows.values()) and rows["text.sfl"].unit == "centralised steps"


@pytest.mark.long
def test_a_process_of_its_own_tells_what_it_cost(tmp_path):
    """Its own memory, whatever this process has."""
    held, sizes = torch.ones(2**28), {k: v for k, v in FAMILIES["llama"].items() if k in LLAMA_8B}  # 1 GiB, resident
    sizes |= {"max_position_embeddings": 600}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    crowd(arch=f"hf:{tmp_path}/config.json", clients=3)
    told = apart(planning, sizes=sizes)
    assert 0.1 < told["gib"] < 1 and told["seconds"] > 0.1 and len(held)


@pytest.mark.long
def test_eight_billion_parameters_are_planned_in_two_gib():
    assert apart(planning, sizes=LLAMA_8B)["gib"] < 2


def test_memory_is_what_was_allocated_at_once():
    def step():
        first = torch.ones(1000)
        del first
        return torch.ones(500), torch.ones(300)

    assert 4000 <= peak_bytes(step) < 4400


# sides and precision

ENDS = {"lora.rank": 2, "lora.modules": ("q_proj", "lm_head"), "lora.alpha": 4}
"""Adapters in the three layers and in the head."""


def one_sided(side, sizes=(20,), **values):
    """A simulator whose adapters are on one side, and the module with the adapters of both."""
    module, lora = hf("llama"), LoraConfig(rank=2, modules=ENDS["lora.modules"], alpha=4)
    values = {"local_steps": 2, "dtype": "float64"} | EXACT | ENDS | {"lora.side": side} | values
    config = with_values(Config(), cut=values.get("cut", 2), labels_at_home=values.get("labels_at_home", False), **ENDS)
    model = prepared(split_of(module, lora), with_values(config, **{"lora.side": side}))
    own = copy.deepcopy(module)
    torch.manual_seed(9)
    add_lora(own, lora.rank, lora.modules, lora.alpha)
    return sim_of(model, list(sizes), **values), own.double()


@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("side", ["client", "server", "both"])
def test_adapters_of_one_side(side, home):
    """Cut 2: the first layer is a client's, and with labels at home the head; the other side never changes."""
    sim, module = one_sided(side, labels_at_home=home)
    before = {k: v.clone() for k, v in sim.averaged().items()}
    on_client = {"0": True, "1": False, "2": False, "head": home}
    for name, p in module.named_parameters():
        if p.requires_grad and side != "both":
            place = "head" if "lm_head" in name else name.split(".")[2]
            p.requires_grad_(on_client[place] == (side == "client"))
    kinds = [sim.round(t).ledger.by_kind() for t in (1, 2, 3)]
    theirs = fine_tuned(module, [20], 0, (1, 2, 3), tau=2)
    assert len(theirs) == 2 * {"client": 1 + home, "server": 3 - home, "both": 4}[side]
    assert distance(trained(sim), theirs) < 1e-5
    after = sim.averaged()
    changed = {k.split(".", 1)[1] for k, v in after.items() if not torch.equal(v, before[k])}
    assert changed == theirs.keys()
    if side == "server":
        assert not sim.state.client.params and not any("model" in kind for step in kinds for kind in step)
    if side == "client":
        assert not sim.state.server.params and "up.model" in kinds[0]


def test_adapters_of_one_side_where_clients_have_cuts_of_their_own():
    """In blocks that are on that side for every client: with cuts 2 and 3 the second layer is on both sides."""
    for side, layers in (("client", {"1"}), ("server", {"3", "4"})):
        sim, _ = one_sided(side, sizes=(12, 20), cut=(2, 3))
        assert {name.split(".")[0] for name in sim.model.initial()} == layers
        before = {k: v.clone() for k, v in sim.averaged().items()}
        sim.round(1)
        changed = {k.split(".")[0] for k, v in sim.averaged().items() if not torch.equal(v, before[k])}
        assert changed == layers


@pytest.mark.long
def test_a_plan_of_one_side(described, tmp_path):
    """What clients train and send: all adapters that they hold, or nothing."""
    lora = ("--lora.rank", "2", "--lora.modules", "q_proj", "--optimizer", "adamw", "--scheme", "sfl")
    where = ("--out", str(tmp_path), "--input-shape", "9", *lora, "--lora.side")
    both, client, server = (planned(described, *where, side)["cuts"] for side in ("both", "client", "server"))
    assert client == both
    for cut in server:
        assert cut["memory"]["optimiser"] == 0 and cut["up_bits"] == 8 * 2 * 3 * 9 * (16 * 4 + 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora.side": "left"}, "lora.side: unknown 'left'; choose one of client, server, both"),
        ({"lora.rank": 0}, "lora.side: 'client', but with lora.rank 0; it needs adapters"),
        (
            {"policy": "random"},
            "lora.side: 'client', but with policy 'random'; it needs adapters, and blocks that stay",
        ),
        ({"cut": 1}, "lora.side: 'client' has no layer of lora.modules with cut = 1"),
    ],
)
def test_sides_without_adapters_are_refused(values, said):
    with pytest.raises(SplitcastError, match=said):
        prepared(split_of(hf("llama")), with_values(Config(), **{"lora.side": "client", "cut": 2} | ENDS | values))
    with pytest.raises(SplitcastError, match="lora.side: 'client' needs a cut; give it in the configuration"):
        SplitModel.from_transformer(hf("llama"), LoraConfig(rank=2, modules=("q_proj",), side="client"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", now([False, True], True))
def test_frozen_matrices_are_halved(kind, recompute):
    """Kept as bf16: half the memory for almost the same training; adapters and their optimiser stay as they are."""
    x, y, _ = text([12, 20])
    modules = ("q_proj", "v_proj") if kind == "llama" else ("c_attn",)
    data, runs = from_tensors(x, y, x[:8], y[:8], name="noise"), {}
    for precision in ("fp32", "bf16"):
        values = {"lora.rank": 2, "lora.modules": modules, "task": "next-token", "scheme": "psl", "cut": 2}
        values |= {"clients": 2, "batch": 8, "optimizer": "adamw", "lr": 0.01, "rounds": 6, "recompute": recompute}
        runs[precision] = train(with_values(Config(), **values, precision=precision), dataset=data, model=hf(kind))
    exact, coarse = (run.engine.state for run in runs.values())
    for side in ("client", "server"):
        whole, half = (getattr(state, side).slots[FROZEN] for state in (exact, coarse))
        matrices = {k for k, v in whole.items() if v.dim() > 1}
        assert {k for k, v in half.items() if v.dtype == torch.bfloat16} == matrices
        assert sum(v.nbytes for v in half.values()) < 0.55 * sum(v.nbytes for v in whole.values())  # with vectors
        moving = [v for slot, values in getattr(coarse, side).slots.items() if slot != FROZEN for v in values.values()]
        assert moving and all(v.dtype == torch.float32 for v in moving)
    for a, b in zip(*(run.rounds for run in runs.values()), strict=True):
        assert b.loss == pytest.approx(a.loss, rel=0.01) and b.kinds == a.kinds
    assert runs["bf16"].rounds[-1].test_loss == pytest.approx(runs["fp32"].rounds[-1].test_loss, rel=0.01)
    assert all(p.dtype == torch.float32 for p in runs["bf16"].model().parameters())
    needs = [most_memory(with_values(Config(), batch=8), run.engine) for run in runs.values()]
    assert needs[1] < needs[0]


@pytest.mark.long
def test_a_plan_counts_halved_matrices(described, tmp_path):
    where = ("--out", str(tmp_path), "--input-shape", "9", "--lora.rank", "2", "--lora.modules", "q_proj")
    exact, coarse = (planned(described, *where, "--precision", p)["cuts"] for p in ("fp32", "bf16"))
    layer = 16 * (16 + 8 + 8 + 16 + 3 * 24)
    for k, (a, b) in enumerate(zip(exact, coarse, strict=True)):
        assert a["memory"]["weights"] - b["memory"]["weights"] == 2 * (TOKENS * 16 + k * layer)
        assert a["memory"]["optimiser"] == b["memory"]["optimiser"]


def test_sites_have_halved_matrices_too(described):
    fed, sim = text_sites(described, [12, 20], scheme="sfl", precision="bf16")
    for t in (1, 2):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-2)


def test_clients_share_what_is_frozen():
    """Sixteen clients hold sixteen adapters and one base: the model's own tensors."""
    module = hf("llama")
    sim = sim_of(split_of(module), [6] * 16, scheme="psl", dtype="float32")
    sim.round(1)
    base = {p.data_ptr() for p in module.parameters()}
    assert sim.state.client.copies == 16
    assert all(v.data_ptr() in base for v in sim.state.client.slots[FROZEN].values())
    assert all(len(v) == 16 for v in sim.state.client.params.values())


def test_rows_of_a_basis_are_tokens():
    """Of rank d it is exact: d x d values to all, and d coefficients for every token."""
    sims = [sim_of(split_of(hf("llama")), [12, 20], scheme=scheme, **EXACT) for scheme in ("sfl-gb", "sfl")]
    sent, _ = (sim.round(1).ledger.by_kind() for sim in sims)
    assert sent["down.basis"] == 4 * 16 * 16 and sent["down.coefficients"] == 2 * 4 * 5 * LENGTH * 16
    assert distance(trained(sims[0]), trained(sims[1])) < 1e-9


# formats


def test_schemes_of_ours_take_formats_for_tokens():
    """What is named stays; baselines and images are as they were."""
    text = with_values(Config(), task="next-token")

    def formats(config, scheme, **values):
        made = resolved(with_values(config, scheme=scheme, **values)).split
        return made.uplink_codec, made.downlink_codec, made.sync_codec, made.sync_every

    assert formats(text, "sfl-tc") == ("lloyd:4", "lloyd:2", "int8", 5)
    assert formats(text, "sfl-tc", **{"lora.rank": 2}) == ("lloyd:4", "lloyd:1", "int8", 5)
    assert formats(text, "sfl-tc", cut=9, **{"lora.rank": 2}) == formats(text, "sfl-tc", cut=9)
    assert formats(text, "sfl-tc", cut=9) == ("lloyd:4+first", "lloyd:4", "int4", 3)
    assert formats(text, "sfl-tc", labels_at_home=True) == formats(text, "sfl-tc")
    assert formats(text, "sfl-tc", uplink_codec="fp16", sync_every=2) == ("fp16", "lloyd:2", "int8", 2)
    assert formats(text, "sfl-gb") == ("lloyd:4", "int8", "int8", 5)
    assert formats(text, "sfl-gb", cut=2) == ("lloyd:4+first", "int8", "int8", 5)
    assert formats(Config(), "sfl-tc")[0] == "transform:150B"
    for source in ("spam-assassin", "text-mini", "mail/all.jsonl"):  # texts that are classified have tokens, too
        assert formats(with_values(Config(), dataset=source), "sfl-tc", cut=2) == formats(text, "sfl-tc", cut=2)
    assert formats(with_values(Config(), dataset="scans.npz"), "sfl-gb") == formats(Config(), "sfl-gb")
    for scheme in ("sfl", "sfl-ga", "psl", "epsl", "sl"):
        assert formats(text, scheme) == ("auto", "auto", "auto", -1)
        assert {make_scheme(with_values(text, scheme=scheme)).uplink, make_scheme(text).downlink} == {FP32}
    assert chosen(with_values(text, scheme="sfl")) == {}
    assert chosen(with_values(text, scheme="sfl-tc", sync_codec="fp32")).keys() == {
        "uplink_codec",
        "downlink_codec",
        "sync_every",
    }


def test_what_travels_only_with_labels_at_home_has_formats_of_its_own():
    """Chosen by sfl-tc on texts, by the cut; else those of the uplink and the downlink; what is named is taken."""
    home = with_values(Config(), task="next-token", scheme="sfl-tc", labels_at_home=True)

    def formats(**values):
        split, made = resolved(with_values(home, **values)).split, make_scheme(with_values(home, **values))
        assert split.feature_codec in ("auto", made.features.name)
        assert split.feature_gradient_codec in ("auto", made.feature_gradient.name)
        return made.features.name, made.feature_gradient.name, split.feature_codec

    assert formats() == formats(uplink_codec="fp16", downlink_codec="fp16") == ("lloyd:4", "lloyd:3", "lloyd:4")
    assert formats(cut=2) == ("lloyd:4", "lloyd:4", "lloyd:4")
    assert formats(feature_codec="int8", feature_gradient_codec="fp16") == ("int8", "fp16", "int8")
    assert formats(scheme="sfl-gb") == ("lloyd:4", "int8", "auto")
    assert formats(scheme="sfl") == ("fp32", "fp32", "auto")
    assert formats(scheme="psl", uplink_codec="int4", feature_gradient_codec="int8") == ("int4", "int8", "auto")
    assert "feature_codec" not in chosen(with_values(home, labels_at_home=False))
    with pytest.raises(SplitcastError, match="^feature_codec: unknown 'int3'"):
        make_scheme(with_values(home, feature_codec="int3"))


@pytest.mark.parametrize("home", [False, True])
@pytest.mark.parametrize("cut", [1, 2])
def test_bytes_of_tokens_are_those_of_their_formats(home, cut):
    """Of 5 rows of 7 tokens in 16 features: a token is a head of 2 bytes and 16 numbers of 4 bits. At cut 1 gradients
    have 2 bits, and those of features 3. Beyond it the first of each row goes up as fp32, and adapters,
    2 (16 + 16) + 2 (16 + 8) values, are a row of half bytes, in every third round."""
    sim = sim_of(split_of(hf("llama")), [12, 20], scheme="sfl-tc", cut=cut, labels_at_home=home, dtype="float32")
    smashed = 5 * (64 + 6 * (2 + 8)) if cut > 1 else 5 * 7 * (2 + 8)
    features, back = 5 * 7 * (2 + 8), 5 * 7 * (2 + (8 if cut > 1 else 6))
    adapters = 2 + 112 // 2 if cut > 1 else 0
    step = {"up.smashed": 2 * smashed, "down.gradient": 2 * 5 * 7 * (2 + (8 if cut > 1 else 4))}
    step |= {"down.features": 2 * features, "up.feature gradient": 2 * back} if home else {"up.labels": 2 * 35}
    for t in range(1, 11):
        sync = {"up.model": 2 * adapters, "down.model": adapters} if t % 3 == 0 and adapters else {}
        assert sim.round(t).ledger.by_kind() == step | sync
    assert all(bool(v.isfinite().all()) for v in sim.averaged().values())


@pytest.mark.long
def test_formats_for_tokens_cost_little_of_what_is_learned():
    """Adapters and head of a model learn to repeat a token; exact and with our formats, of the same batches."""
    x = torch.randint(4, TOKENS, (64, 1), generator=torch.Generator().manual_seed(2)).expand(64, LENGTH).contiguous()
    parts = [torch.arange(32 * n, 32 * n + 32).numpy() for n in range(2)]
    lost = {}
    for scheme in ("sfl", "sfl-tc"):
        usual = {"scheme": scheme, "clients": 2, "task": "next-token", "cut": 2, "batch": 8, "lr": 0.01}
        config = with_values(Config(), **usual, optimizer="adamw")
        model = SplitModel.from_transformer(hf("llama"), example=x[:1])
        sim = Simulator(config, model, NextToken(TOKENS), x, next_tokens(x), parts)
        start = sim.evaluate(x, next_tokens(x))["loss"]
        for t in range(1, 31):
            sim.round(t)
        lost[scheme] = start - sim.evaluate(x, next_tokens(x))["loss"]
    assert lost["sfl"] > 1 and lost["sfl-tc"] > 0.9 * lost["sfl"]


# planning


@pytest.fixture
def described(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FAMILIES["llama"] | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return f"hf:{file}"


def planned(arch, *options):
    """`splitcast plan --json`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(["plan", "--arch", arch, "--json", "--draws", "2", "--clients", "2", "--batch", "3", *options])
    return json.loads(said.getvalue())


def test_a_plan_needs_no_weights(described, tmp_path):
    """What crosses a cut, what a client holds and computes, worked out by hand and on the model itself."""
    where = ("--out", str(tmp_path), "--input-shape", "9")
    lora = ("--lora.rank", "2", "--lora.modules", "q_proj,v_proj", "--optimizer", "adamw", "--scheme", "sfl")
    cuts = planned(described, *where, *lora)["cuts"]
    model = split_of(hf("llama", architectures=["LlamaForCausalLM"]), LoraConfig(rank=2, modules=LORA.modules))
    layer = 16 * (16 + 8 + 8 + 16 + 3 * 24) + 2 * 16 + 2 * (16 + 16 + 16 + 8)
    adapters = 2 * (16 + 16 + 16 + 8)
    for k, cut in enumerate(cuts):
        assert cut["memory"]["weights"] == 4 * (TOKENS * 16 + k * layer)
        steps = 2 * k  # AdamW counts the steps of every tensor
        assert cut["memory"]["optimiser"] == pytest.approx(4 * k * adapters * 3, abs=4 * (2 * steps + 16))
        sync = 4 * k * adapters * 3
        smashed = 2 * 3 * 9 * (16 * 4 + 1)
        assert cut["up_bits"] == pytest.approx(8 * (smashed + 2 * sync), abs=8 * 2 * 4 * (2 * steps + 16))
    assert [cut["cut"] for cut in cuts] == list(model.cuts)
    at_home = planned(described, *where, *lora, "--labels-at-home")["cuts"]
    assert [cut["cut"] for cut in at_home] == [1, 2, 3]
    assert at_home[0]["memory"]["weights"] == cuts[0]["memory"]["weights"] + 4 * 16 * (TOKENS + 1)


def test_shapes_alone_cost_what_the_model_does(described):
    config = with_values(Config(), arch=described, task="next-token")
    empty, whole = (make_model(config, (9,), TOKENS, torch.int64, shapes_only=only) for only in (True, False))
    assert empty.size == whole.size and empty.names == whole.names
    for mine, theirs in zip(empty.profile(), whole.profile(), strict=True):
        assert mine == theirs
    assert saved_bytes(whole) <= saved_bytes(empty) <= 2 * saved_bytes(whole)


@pytest.mark.long
def test_a_device_that_is_too_small_is_refused_with_the_number(described, tmp_path, capsys):
    where = ("--out", str(tmp_path), "--input-shape", "9")
    cuts = planned(described, *where)["cuts"]
    needs = [sum(cut["memory"].values()) / 1e9 for cut in cuts]
    assert needs == sorted(needs) and all(cut["allowed"] for cut in cuts)
    limited = planned(described, *where, "--client-memory-gb", str(needs[1]))
    assert [cut["allowed"] for cut in limited["cuts"]] == [True, True, False, False]
    assert all(cut["allowed"] for cut in planned(described, *where, "--client-device", "phone")["cuts"])
    with pytest.raises(SystemExit):
        main(["plan", "--arch", described, *where, "--batch", "3", "--client-memory-gb", "1e-6"])
    said = capsys.readouterr().err
    assert f"client_memory_gb: 1e-06 is too little for any cut; at cut 1 a client needs {needs[0]:.3g} GB" in said


def test_a_training_that_does_not_fit_is_refused_with_the_number(tmp_path, capsys):
    quick = with_values(Config(), arch="cnn-small", clients=3, batch=4, rounds=1, cut=2)
    needs = [row.memory.total / 1e9 for row in plan(quick, draws=1).cuts]
    enough = with_values(quick, client_memory_gb=[needs[1]] * 3)
    assert train(enough).summary["client_memory_mb"] == round(1000 * needs[1], 3)
    said = f"^client_memory_gb: client 2 has 1e-06, but at cut 2 it needs {needs[1]:.3g} GB$"
    with pytest.raises(SplitcastError, match=said):
        train(with_values(quick, client_memory_gb=[1, 1, 1e-6]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    moving = with_values(enough, policy="random", rounds=12)
    assert {record.cut for record in train(moving).rounds} == {1, 2}, (
        "a policy keeps to the cuts that all have room for"
    )
    assert {record.cut for record in train(with_values(moving, client_memory_gb=[0, needs[0], 1])).rounds} == {1}
    with pytest.raises(SplitcastError, match="too little for any cut"):
        train(with_values(moving, client_memory_gb=[1, 1, 1e-6]))
    with pytest.raises(SystemExit) as stop:
        main(["train", "--arch", "cnn-small", "--client-memory-gb", "1e-6", "--out", str(tmp_path / "run"), "--quiet"])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and "client_memory_gb: client 0 has 1e-06" in lines[0]


# sites


class TextSites(Wired):
    """Sites in this process, each with its rows of random tokens; some have another base than the server."""

    def __init__(self, sizes, others=()):
        super().__init__(len(sizes))
        x, y, parts = text(sizes)

        def rows(n, config, client):
            return x[parts[n]], y[parts[n]]

        self.sites = [Site(partial(rows, n), lambda run, n=n: self.memories[n]) for n in range(len(sizes))]
        for n in others:
            join = self.sites[n].join
            self.sites[n].join = lambda config, join=join, **asked: join(
                config=config.replace("seed = 0", "seed = 1"), **asked
            )


def text_sites(described, sizes, others=(), **values):
    """A federation and the simulator of the same training."""
    usual = {"arch": described, "task": "next-token", "clients": len(sizes), "batch": 5, "cut": 2, "lr": 0.001}
    usual |= {"optimizer": "adamw", "local_steps": 2, "lora.rank": 2, "lora.modules": LORA.modules}
    config = with_values(Config(), **usual | values)
    model = make_model(config, (LENGTH,), TOKENS, torch.int64)
    names = [f"site-{n}" for n in range(len(sizes))]
    fed = Federation(config, model, TOKENS, names, TextSites(sizes, others), Limits())
    fed.start()
    return fed, Simulator(config, model, NextToken(TOKENS), *text(sizes))


@pytest.mark.parametrize("home", now([False, True], True))
@pytest.mark.parametrize("scheme", now(["sfl", "sfl-ga", "sfl-tc"], "sfl-tc"))
def test_sites_fine_tune_as_the_simulator_does(described, scheme, home):
    fed, sim = text_sites(described, [12, 20], scheme=scheme, labels_at_home=home)
    for t in range(1, 8):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-3 if scheme == "sfl-tc" else 1e-5)
    if scheme != "sfl-tc":  # where a last bit may move a value to the next level
        assert distance(trained(fed), trained(sim)) < 1e-6


def test_a_site_with_another_base_is_refused(described):
    """Frozen weights never travel: what a site has must be what the server has."""
    fed, _ = text_sites(described, [12, 20], others=[1], scheme="sfl")
    assert fed.sites.present == {0}
    assert "is another model here than on the server, or has other frozen weights" in fed.sites.why()


@pytest.mark.parametrize("home", [False, True])
def test_a_run_and_its_other_half(home, tmp_path):
    """From the model object to a finished run, and on from its checkpoint, as a run in one go."""
    x, y, _ = text([24])
    data = from_tensors(x[:18], y[:18], x[18:], y[18:], name="noise")
    usual = {
        "task": "next-token",
        "scheme": "sfl",
        "cut": 2,
        "clients": 2,
        "batch": 4,
        "optimizer": "adamw",
        "lr": 0.01,
    }
    config = with_values(Config(), **usual, rounds=4, checkpoint_every=2, labels_at_home=home)
    whole = train(config, dataset=data, model=split_of(hf("llama")))
    train(with_values(config, rounds=2), tmp_path / "run", dataset=data, model=split_of(hf("llama")))
    again = train(config, tmp_path / "run", resume=True, dataset=data, model=split_of(hf("llama")))
    assert [r.loss for r in again.rounds] == [r.loss for r in whole.rounds]
    after, at_once = (each.engine.averaged() for each in (again, whole))
    assert all(torch.equal(after[name], value) for name, value in at_once.items())


def test_what_is_frozen_is_not_in_a_checkpoint(tmp_path):
    """The adapters of both sides with their state; whoever resumes must have the same base."""
    x, y, _ = text([24])
    data = from_tensors(x[:18], y[:18], x[18:], y[18:], name="noise")
    usual = {"task": "next-token", "scheme": "sfl", "cut": 2, "clients": 2, "batch": 4, "optimizer": "adamw"}
    config = with_values(Config(), **usual, rounds=2)
    train(config, tmp_path / "run", dataset=data, model=split_of(hf("llama")))
    stored = RunFolder(tmp_path / "run").restore().tensors
    assert {name.split(".")[-1] for name in stored if name != "shares"} == {"lora_A", "lora_B"}
    longer = with_values(config, rounds=3)
    with pytest.raises(SplitcastError, match="trained another model"):
        train(longer, tmp_path / "run", resume=True, dataset=data, model=split_of(hf("llama", seed=6)))
    assert train(longer, tmp_path / "run", resume=True, dataset=data, model=split_of(hf("llama"))).rounds[2].round == 3
