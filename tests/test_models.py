"""Any module: where it can be cut, that its blocks are the module, and that it is trained as plain PyTorch does."""

import copy
import importlib.util
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lengths import now
from splitcast.base.config import Config, ModelConfig, with_values
from splitcast.base.errors import SplitcastError, imports_allowed
from splitcast.base.seeds import stream
from splitcast.data.batches import draw_batches
from splitcast.engine.simulator import Simulator
from splitcast.model import build, split
from splitcast.model.split import SplitModel
from splitcast.run.loop import train
from splitcast.studies.plan import plan
from splitcast.training.placement import Placement
from splitcast.training.task import Classification
from test_engine import CLASSES, SIZES, data


class Residual(nn.Module):
    def __init__(self, width, norm=nn.BatchNorm2d):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        self.norm = norm(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.second(F.relu(self.first(x)))), inplace=True)


class ResNet(nn.Module):
    """What people write: no Sequential, sizes taken from the batch, in-place activations, dropout by flag."""

    def __init__(self, norm=nn.BatchNorm2d, drop=0.0):
        super().__init__()
        self.stem, self.norm, self.drop = nn.Conv2d(1, 3, 3, padding=1, bias=False), norm(3), drop
        self.layers = nn.ModuleList([Residual(3, norm), Residual(3, norm)])
        self.head = nn.Linear(27, CLASSES)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        for layer in self.layers:
            x = layer(x)
        x = F.max_pool2d(x, 2)
        x = F.dropout(x.view(x.size(0), -1), self.drop, self.training)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        out, _ = self.rnn(x[:, 0])
        return self.head(out[:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.into, self.place = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.stack, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.stack(self.into(x[:, 0]) + self.place).mean(1))


class Tied(nn.Module):
    """The first and the last layer but one share their matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(36, 36, bias=False), nn.Linear(36, 36)
        self.last, self.head = nn.Linear(36, 36), nn.Linear(36, CLASSES)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.head(self.last(self.middle(self.first(x.flatten(1)).tanh()).tanh()).tanh())


def made(kind, *args, **kwargs):
    torch.manual_seed(5)
    return kind(*args, **kwargs)


def samples(rows=7):
    return torch.randn(rows, 1, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ResNet, ("stem", "layers.0", "layers.1", "head")),
        (Recurrent, ("rnn", "head")),
        (
            Attending,
            (
                "into",
                "stack.layers.0.self_attn",
                "stack.layers.0",
                "stack.layers.1.self_attn",
                "stack.layers.1",
                "head",
            ),
        ),
        (Tied, ("first", "middle", "last", "head")),
    ],
)
def test_blocks_together_are_the_module(kind, names):
    module = made(kind).double()
    before = copy.deepcopy(module.state_dict())
    model = SplitModel.of(module, samples().double())
    assert model.names == names
    params = {k: p.requires_grad_() for k, p in model.initial(torch.float64).items()} | model.buffers(torch.float64)
    x = samples().double()
    for rows in (2, 5, 7):
        torch.manual_seed(3)
        theirs = copy.deepcopy(module)
        expected = theirs(x[:rows])
        expected.square().sum().backward()
        torch.manual_seed(3)
        ours = x[:rows]
        for block in range(model.depth):
            ours = model.forward(params, ours, block, block + 1)
        leaves = {k: v for k, v in params.items() if v.requires_grad}
        grads = torch.autograd.grad(ours.square().sum(), list(leaves.values()))
        assert torch.allclose(ours, expected, atol=1e-12)
        wanted = {name: p.grad for name, p in theirs.named_parameters()}
        for name, grad in zip(leaves, grads, strict=True):
            assert torch.allclose(grad, wanted[name.split(".", 1)[1]], atol=1e-12)
        params |= model.buffers(torch.float64)
    module.eval()
    with model.evaluating():
        assert torch.allclose(model.forward(model.initial(torch.float64), x, 0, model.depth), module(x), atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", [ResNet, Recurrent, Attending])
def test_flops_of_blocks_are_those_that_torch_counts_of_the_module(kind):
    module, x = made(kind).eval(), samples(1)
    model = SplitModel.of(module, x)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        out = module(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert model.flops(0, model.depth) == (forward.get_total_flops(), backward.get_total_flops())


def test_a_module_keeps_its_mode():
    module = made(ResNet, drop=0.5)
    module.layers[0].norm.eval()
    modes = [part.training for part in module.modules()]
    model = SplitModel.of(module, samples())
    assert [part.training for part in module.modules()] == modes
    assert list(model.buffers()) == [f"{b}.{n}" for b, n in zip([0] * 3 + [2] * 3, buffer_names(), strict=True)]
    frozen = [f"1.layers.0.norm.{name}" for name in ("running_mean", "running_var")]
    assert [name for name in model.frozen() if "0.norm" in name] == frozen
    module.eval()
    still = SplitModel.of(module, samples())
    x, params = samples(), still.initial()
    assert torch.equal(still.forward(params, x, 0, 4), still.forward(params, x, 0, 4)), "no dropout"
    assert not still.mixes(0, 4) and model.mixes(0, 1) and not model.mixes(1, 2) and model.mixes(2, 3)


def buffer_names():
    names = ("running_mean", "running_var", "num_batches_tracked")
    return [f"norm.{name}" for name in names] + [f"layers.1.norm.{name}" for name in names]


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(36, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.a(x.flatten(1))
        return self.b(h if h.sum() > 0 else -h)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(36, 8), nn.Linear(8, CLASSES), nn.Linear(36, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return self.b(self.a(x)) + self.c(x)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Deciding(), "model: Deciding cannot be cut: behind a it decides by the values of samples"),
        (Dense(), "model: Dense cannot be cut: at b 2 tensors are alive"),
        (nn.Sequential(nn.Linear(6, 2)), "cannot be cut: it has 1 layer with a weight matrix"),
        (nn.Conv1d(3, 4, 3), "model: Conv1d cannot be cut: it does not take samples of \\(1, 6, 6\\)"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(module, why):
    with pytest.raises(SplitcastError, match=why) as caught:
        SplitModel.of(module, samples())
    assert "\n" not in str(caught.value)


# training


def sim_of(model, scheme="sfl", cut=1, tau=1, sizes=SIZES, **values):
    x, y, parts = data(sizes)
    usual = {"scheme": scheme, "cut": cut, "local_steps": tau, "batch": 6, "lr": 0.1, "dtype": "float64"}
    config = with_values(Config(), **usual | {"clients": len(sizes)} | values)
    return Simulator(config, model, Classification(CLASSES), x, y, parts)


def plain(module, tau, rounds, optimiser):
    """Plain PyTorch on the batches of the only client."""
    x, y, parts = data([40])
    module = copy.deepcopy(module).double()
    steps = optimiser([p for p in module.parameters() if p.requires_grad])
    for t in range(1, rounds + 1):
        for i in range(tau):
            rows = parts[0][draw_batches([40], 6, stream(0, "batch", t, i))[0]]
            steps.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows]).backward()
            steps.step()
    return module.state_dict()


OPTIMISERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "adamw": lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.0),
}


def weights_of(sim):
    return {k.split(".", 1)[1]: v for k, v in sim.state.averaged(sim.weights).items()}


def distance(ours, theirs):
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


KINDS = {"norm": ResNet, "lstm": Recurrent, "tied": Tied}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMISERS)
@pytest.mark.parametrize("tau", now([1, 3], 3))
def test_one_client_is_plain_pytorch(kind, optimizer, tau):
    module = made(KINDS[kind])
    cut = 3 if kind == "tied" else 1
    for scheme in ("sfl", "sfl-ga", "fl"):
        sim = sim_of(SplitModel.of(module, samples()), scheme, cut, tau, [40], optimizer=optimizer)
        for t in (1, 2, 3):
            sim.round(t)
        assert distance(weights_of(sim), plain(module, tau, 3, OPTIMISERS[optimizer])) < 1e-8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tau", [1, 3])
def test_split_is_federated(kind, tau):
    model = SplitModel.of(made(KINDS[kind]), samples())
    split, whole = (sim_of(model, scheme, 3 if kind == "tied" else 1, tau) for scheme in ("sfl", "fl"))
    for t in (1, 2, 3):
        split.round(t)
        whole.round(t)
    assert distance(weights_of(split), weights_of(whole)) < 1e-8


def test_tied_parameters_are_one_and_are_not_separated():
    model = SplitModel.of(made(Tied), samples())
    assert model.tied == {"2.first.weight": "0.first.weight"} and model.size == 2 * 36 * 36 + 2 * 36 + 37 * CLASSES
    for cut in (1, 2):
        with pytest.raises(
            SplitcastError, match=f"cut: {cut} separates 2.first.weight from 0.first.weight.*of \\[3\\]"
        ):
            sim_of(model, "sfl", cut)
    assert [Placement.split(cut, 4).keeps_ties(model) for cut in (1, 2, 3)] == [False, False, True]
    config = with_values(Config(), dataset="mnist-mini", cut=3)
    assert [row.allowed for row in plan(config, 3, model, CLASSES).cuts] == [False, False, True]
    sent = sim_of(model, "sfl", 3).round(1).ledger.by_kind()["up.model"]
    assert sent == len(SIZES) * 4 * (2 * 36 * 36 + 2 * 36), "once"


def test_ties_of_frozen_parameters_hold_no_cut():
    module = made(Tied)
    module.first.weight.requires_grad_(False)
    sim = sim_of(SplitModel.of(module, samples()), "sfl", 1, sizes=[40])
    sim.round(1)
    assert distance(weights_of(sim), plain(module, 1, 1, OPTIMISERS["sgd"]) | {}) < 1e-8


# records


def digits(**values):
    usual = {"rounds": 2, "clients": 2, "batch": 4, "eval_every": 2, "checkpoint_every": 1}
    return with_values(Config(), **usual | values)


class Digits(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = nn.Linear(784, width), nn.Linear(width, 10)

    def forward(self, x):
        return self.b(self.a(x.flatten(1)).relu())


def test_a_run_says_which_model_it_trained(tmp_path):
    result = train(digits(), tmp_path / "run", model=made(Digits))
    text = (tmp_path / "run" / "config.toml").read_text()
    assert 'arch = "object:Digits"' in text and math.isfinite(result.rounds[-1].loss)
    with pytest.raises(SplitcastError, match="arch: 'object:Digits' was given as a Python object"):
        train(digits(arch="object:Digits", rounds=3), tmp_path / "run", resume=True)
    with pytest.raises(SplitcastError, match="arch: 'object:Digits' was given as a Python object"):
        plan(digits(arch="object:Digits"))
    with pytest.raises(SplitcastError, match="trained another model"):
        train(digits(rounds=3), tmp_path / "run", resume=True, model=made(Digits, 9))
    longer = train(digits(rounds=3), tmp_path / "run", resume=True, model=made(Digits))
    assert len(longer.rounds) == 3
    assert build("cnn-small", (1, 28, 28), 10, seed=0).arch == "cnn-small"


# BatchNorm, adapters, models of others


def adapted(module, batch_norm="local", rank=0, modules=(), alpha=0.0):
    options = with_values(
        Config(), **{"batch_norm": batch_norm, "lora.rank": rank, "lora.modules": modules, "lora.alpha": alpha}
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return split(module, samples(), options.model, options.lora)


def lora_by_hand():
    """The network with adapters on its head and the first of two linear layers, written out."""

    class ByHand(nn.Module):
        def __init__(self, net, model):
            super().__init__()
            self.net = net
            weights = model.initial()
            self.names = {k.replace(".", "_"): k for k in weights}
            for new, name in self.names.items():
                self.register_parameter(new, nn.Parameter(weights[name]))

        def low_rank(self, x, layer):
            a, b = (next(getattr(self, k) for k in self.names if f"{layer}_lora_{ab}" in k) for ab in "AB")
            return getattr(self.net, layer)(x) + 2.0 * (x @ a.T) @ b.T

        def forward(self, x):
            h = self.low_rank(x.flatten(1), "first").tanh()
            return self.low_rank(self.net.last(self.net.middle(h).tanh()).tanh(), "head")

    return ByHand


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("scheme", ["sfl", "fl", "sfl-ga"])
def test_adapters_are_what_one_writes_by_hand(scheme, tau):
    net = made(Tied)
    model = adapted(net, rank=3, modules=("first", "head"), alpha=6.0)
    names = ["0.first.lora_A", "0.first.lora_B", "3.head.lora_A", "3.head.lora_B"]
    assert list(model.initial()) == names and model.initial()["0.first.lora_A"].shape == (3, 36)
    assert not model.initial()["3.head.lora_B"].any() and model.initial()["3.head.lora_A"].any()
    hand = lora_by_hand()(copy.deepcopy(net).requires_grad_(False), model)
    sim = sim_of(model, scheme, 1, tau, [40])
    ledger = [sim.round(t).ledger for t in (1, 2, 3)][-1]
    theirs = plain(hand, tau, 3, OPTIMISERS["sgd"])
    ours = sim.state.averaged(sim.weights)
    assert max(float((ours[k] - theirs[k.replace(".", "_")]).abs().max()) for k in names) < 1e-8
    assert ours["3.head.lora_B"].any()
    if scheme == "sfl":
        assert ledger.by_kind()["up.model"] == 4 * 2 * 3 * 36, "only adapters travel"


@pytest.mark.parametrize(("modules", "why"), [((), "none given"), (("q_proj",), "no linear layer is called 'q_proj'")])
def test_adapters_of_nothing_are_refused(modules, why):
    with pytest.raises(SplitcastError, match=f"lora.modules: {why}.*first, middle, last, head"):
        adapted(made(Tied), rank=2, modules=modules)


def reference(module, mode):
    """What a mode of BatchNorm means, in plain PyTorch."""
    module = copy.deepcopy(module)
    if mode == "frozen":
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
    if mode == "group":
        for part in (module, *module.layers):
            part.norm = nn.GroupNorm(1, 3)  # gcd(32, 3)
    return module


@pytest.mark.parametrize("mode", ["local", "frozen", "group"])
@pytest.mark.parametrize("tau", [1, 3])
def test_modes_of_batch_norm_are_plain_pytorch(mode, tau):
    module = made(ResNet)
    module.layers[0].norm.running_mean += 0.3
    model = adapted(module, mode)
    assert module.training and model.mixes(0, 4) == (mode == "local")
    theirs = plain(reference(module, mode), tau, 3, OPTIMISERS["adamw"])
    for scheme in ("sfl", "fl"):
        sim = sim_of(model, scheme, 2, tau, [40], optimizer="adamw")
        for t in (1, 2, 3):
            sent = sim.round(t).ledger.by_kind()
        assert distance(weights_of(sim), theirs) < 1e-8
        if scheme == "sfl":
            state = 3 * sum(v.numel() for k, v in model.initial().items() if k[0] in "01") + 8  # steps of Adam
            running = 2 * (3 + 3 + 1) if mode == "local" else 0
            assert sent["up.model"] == 4 * (state + running)
    many = [sim_of(model, scheme, 2, tau) for scheme in ("sfl", "fl")]
    for t in (1, 2):
        for sim in many:
            sim.round(t)
    assert distance(weights_of(many[0]), weights_of(many[1])) < 1e-8


def test_resnet18_is_cut_at_its_residual_blocks():
    model = build("resnet18", (3, 32, 32), 10, seed=0)
    layers = [f"layer{k}.{i}" for k in (1, 2, 3, 4) for i in (0, 1)]
    assert model.names == ("stem", *layers, "head") and model.size == 11_173_962
    assert model.smashed_shape(1) == (64, 32, 32) and model.smashed_shape(9) == (512, 4, 4)
    assert build("resnet18", (1, 28, 28), 10, seed=0).smashed_shape(10) == (10,)
    with pytest.raises(SplitcastError, match="input_shape: \\(7,\\); a ResNet takes channels"):
        build("resnet18", (7,), 10, seed=0)


VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
GPT = {"model_type": "gpt2", "vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}


def written(tmp_path, **values):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    return f"hf:{file}"


def test_configurations_of_transformers(tmp_path):
    arch = written(tmp_path, **VIT, patch_size=7, num_channels=3, auto_map={"AutoConfig": "evil.Config"})
    model = build(arch, (1, 28, 28), 10, seed=1)
    assert model.arch == arch and model.names[1] == "vit.layers.0.attention" and model.smashed_shape(1) == (17, 8)
    same, other = (build(arch, (1, 28, 28), 10, seed=seed).initial() for seed in (1, 2))
    assert all(torch.equal(same[k], v) for k, v in model.initial().items())
    assert not torch.equal(next(iter(other.values())), next(iter(same.values())))
    tokens = written(tmp_path, **GPT)
    text = build(tokens, (6,), 20, seed=0, options=ModelConfig(task="next-token"))
    assert text.input_dtype == torch.int64 and text.smashed_shape(text.depth) == (6, 20) and text.tied


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model_type": "nonsense"}, "makes no ImageClassification model: .*nonsense"),
        ({"model_type": "gpt2"}, "makes no ImageClassification model"),
        ({"hidden_size": 3}, "has no model_type"),
        ({**VIT, "patch_size": "x"}, "makes no ImageClassification model"),
        ({**VIT, "hidden_size": 2**20, "num_attention_heads": 2}, "at most 2,147,483,648 are allowed"),
    ],
)
def test_configurations_that_make_no_model_are_refused(values, why, tmp_path):
    with pytest.raises(SplitcastError, match=why) as caught:
        build(written(tmp_path, **values), (1, 28, 28), 10, seed=0)
    assert "\n" not in str(caught.value)


def test_what_is_not_installed_or_not_there_is_said(monkeypatch, tmp_path):
    with pytest.raises(SplitcastError, match="arch: hf:nowhere.json: nowhere.json is not a file"):
        build("hf:nowhere.json", (1, 28, 28), 10, seed=0)
    (tmp_path / "x.json").write_text("[1, 2")
    with pytest.raises(SplitcastError, match="x.json is not JSON"):
        build(f"hf:{tmp_path}/x.json", (1, 28, 28), 10, seed=0)
    with imports_allowed(["my_models"]), pytest.raises(SplitcastError, match="may not be imported here"):
        build(f"hf:{tmp_path}/x.json", (1, 28, 28), 10, seed=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SplitcastError, match="needs transformers, which is not installed; pip install 'splitcast"):
        build(written(tmp_path, **VIT), (1, 28, 28), 10, seed=0)
    with pytest.raises(SplitcastError, match="arch: timm: needs timm, which is not installed"):
        build("timm:resnet18", (3, 32, 32), 10, seed=0)


def test_models_of_peft_work_as_they_come():
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(made(Tied), peft.LoraConfig(r=2, target_modules=["middle", "head"]))
    model = SplitModel.of(net, samples())
    assert [name.rsplit(".", 3)[1] for name in model.initial()] == ["lora_A", "lora_B"] * 2
    sim = sim_of(model, "sfl", 1)
    start = sim.initial().params
    sim.round(1)
    assert any(not torch.equal(start[k], v) for k, v in sim.state.server.params.items())
