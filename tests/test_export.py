"""The model back: the trained module with its buffers, in plain PyTorch."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.data import Dataset, load
from splitcast.model.cnn import small_cnn
from splitcast.model.resnet import resnet18
from splitcast.model.whole import Chain
from splitcast.run.export import export, trained_model
from splitcast.run.loop import train

IMAGES = load("mnist-mini")
FEW = with_values(Config(), rounds=3, clients=3, batch=8, cut=1, partition="dirichlet", sizes="unequal", lr=0.05)


class Net(nn.Module):
    """With running statistics, a frozen layer, a matrix that is used twice, and a layer that nothing passes."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4)
        self.a, self.b, self.head = nn.Linear(144, 144), nn.Linear(144, 144), nn.Linear(144, 10)
        self.b.weight = self.a.weight
        self.fixed = nn.Linear(144, 144).requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu().flatten(1)
        return self.head(self.b(self.fixed(self.a(x).relu())).relu())


def loss_of(module):
    """The loss of the test set in plain PyTorch."""
    with torch.no_grad():
        logits = module.eval()(IMAGES.test_x.to(next(module.parameters()).dtype))
        return float(nn.functional.cross_entropy(logits, IMAGES.test_y))


@pytest.mark.parametrize("scheme", ["sfl", "psl", "fl", "sl"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_module_is_the_one_that_was_tested(scheme, dtype):
    torch.manual_seed(0)
    given = Net()
    before = {k: v.clone() for k, v in given.state_dict().items()}
    result = train(with_values(FEW, scheme=scheme, dtype=dtype), model=given)
    made = result.model()
    assert isinstance(made, Net) and made.training and made.b.weight is made.a.weight
    assert next(made.parameters()).dtype == getattr(torch, dtype)
    assert loss_of(made) == pytest.approx(result.rounds[-1].test_loss, rel=1e-5)
    assert int(made.norm.num_batches_tracked) > 0 and not torch.equal(made.stem.weight, before["stem.weight"])
    assert torch.equal(made.fixed.weight.float(), before["fixed.weight"])
    assert torch.equal(made.unused.weight.float(), before["unused.weight"])
    assert all(torch.equal(v, before[k]) for k, v in given.state_dict().items()), "what was given stays"
    with torch.no_grad():
        made.head.weight.zero_()
    assert loss_of(result.model()) == pytest.approx(result.rounds[-1].test_loss, rel=1e-5), "nothing is shared"


@pytest.mark.parametrize("scheme", ["sfl-ga", "sfl", "local-loss"])
def test_an_exported_run_loads_into_plain_pytorch(scheme, tmp_path, capsys):
    run, file = tmp_path / "run", tmp_path / "model.safetensors"
    result = train(with_values(FEW, scheme=scheme, arch="cnn-small"), run)
    main(["export", str(run), str(file)])
    plain = nn.Sequential(*small_cnn((1, 28, 28), 10))
    plain.load_state_dict(load_file(file))
    assert loss_of(plain) == pytest.approx(result.rounds[-1].test_loss, rel=1e-5)
    assert f"{sum(p.numel() for p in plain.parameters()):,} values" in capsys.readouterr().out


def test_export_needs_neither_the_data_nor_the_end_of_the_run(tmp_path, monkeypatch):
    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    (tmp_path / "own_net.py").write_text(
        "from tests_net import Net\n\n\ndef make(shape, classes):\n    return Net()\n\n\ndef data():\n    return DATA\n"
    )
    (tmp_path / "tests_net.py").write_text(f"import sys\nNet = sys.modules[{__name__!r}].Net\n")
    monkeypatch.syspath_prepend(tmp_path)
    run, file = tmp_path / "run", tmp_path / "model.safetensors"
    config = with_values(FEW, arch="own_net:make", checkpoint_every=1, scheme="psl")
    with pytest.raises(KeyboardInterrupt):
        train(config, run, on_round=stop, dataset=IMAGES)
    again = train(with_values(FEW, rounds=2, scheme="psl", arch="own_net:make"), dataset=IMAGES)
    export(run, file)
    plain = Net()
    plain.load_state_dict(load_file(file))  # tied weights under both names
    assert loss_of(plain) == loss_of(again.model())
    for name in ("own_net", "tests_net"):
        sys.modules.pop(name)


def test_adapters_are_merged(tmp_path, monkeypatch):
    (tmp_path / "adapted.py").write_text(
        f"import sys\n\n\ndef make(s, c):\n    return sys.modules[{__name__!r}].Net()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"lora.rank": 2, "lora.modules": ("fixed", "head"), "lora.alpha": 3.0, "arch": "adapted:make", "lr": 0.5}
    settings |= {"dtype": "float64"}
    result = train(with_values(FEW, **settings), tmp_path / "run")
    plain, made = Net().double(), result.model().eval()
    export(tmp_path / "run", tmp_path / "m.safetensors")
    plain.load_state_dict(load_file(tmp_path / "m.safetensors"))
    x = IMAGES.test_x[:64].double()
    assert made.head.lora_B.abs().max() > 0
    assert torch.allclose(plain.eval()(x), made(x), atol=1e-10)
    train(with_values(FEW, **settings | {"lora.modules": ("a",), "rounds": 1}), tmp_path / "tied")
    with pytest.raises(SplitcastError, match="a shares its matrix with another layer"):
        export(tmp_path / "tied", tmp_path / "tied.safetensors")
    sys.modules.pop("adapted")


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    run, file = tmp_path / "run", tmp_path / "model.safetensors"
    train(with_values(FEW, rounds=1), run, model=nn.Sequential(*small_cnn((1, 28, 28), 10)))

    def refused(*args):
        with pytest.raises(SystemExit) as stop:
            main(["export", *map(str, args)])
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2
        assert not file.exists()
        return line

    assert "was given as a Python object" in refused(run, file)
    assert "not a run folder" in refused(tmp_path, file)
    assert "must end in .safetensors" in refused(run, tmp_path / "model.pt")
    assert "is no folder" in refused(run, tmp_path / "absent" / "model.safetensors")
    (tmp_path / "there.safetensors").touch()
    assert "exists" in refused(run, tmp_path / "there.safetensors")
    (run / "checkpoint.safetensors").unlink()
    with pytest.raises(SplitcastError, match="no checkpoint yet"):
        trained_model(run)


def test_a_cut_for_every_client_is_one_model_again(tmp_path):
    result = train(with_values(FEW, scheme="psl", cut=(1, 2, 3), arch="cnn-small"), tmp_path / "run")
    assert loss_of(trained_model(tmp_path / "run")) == pytest.approx(result.rounds[-1].test_loss, rel=1e-5)


@pytest.mark.parametrize(("kind", "task"), [("gpt2", "next-token"), ("bert", "classification")])
def test_models_of_transformers_come_back_as_they_were(kind, task):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 16, "num_labels": 3, "bos_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes, eos_token_id=1, tie_word_embeddings=False)
    head = "CausalLM" if task == "next-token" else "SequenceClassification"
    torch.manual_seed(0)
    given = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    x = torch.randint(1, 12, (60, 6))
    y = torch.randint(0, 12, (60, 6)) if task == "next-token" else x[:, 0] % 3
    data = Dataset(x[:40], y[:40], x[40:], y[40:], 12 if task == "next-token" else 3, "text")
    result = train(with_values(FEW, task=task, partition="iid", sizes="equal", scheme="psl"), dataset=data, model=given)
    made = result.model()
    assert type(made) is type(given) and made.state_dict().keys() == given.state_dict().keys()
    with torch.no_grad():
        logits = made.eval()(x[40:]).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, -2), y[40:].flatten())
    assert float(expected) == pytest.approx(result.rounds[-1].test_loss, rel=1e-4)
    assert not torch.equal(*(next(iter(each.parameters())) for each in (made, given)))


def test_from_a_folder_of_images_to_a_model_in_plain_pytorch(tmp_path, capsys):
    """The quick start of one's own data: train, report, export."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(10):
            pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{k}.png")
    run, file = tmp_path / "run", tmp_path / "model.safetensors"
    few = ["--clients", "2", "--batch", "2", "--rounds", "1", "--cut", "2", "--quiet", "--json"]
    main(["train", "--dataset", str(tmp_path / "photos"), "--arch", "resnet18", *few, "--out", str(run)])
    told = json.loads(capsys.readouterr().out)
    main(["report", str(run)])
    main(["export", str(run), str(file)])
    assert (run / "report.html").stat().st_size > 10_000
    plain = Chain(resnet18((3, 8, 8), 2))
    plain.load_state_dict(load_file(file))
    photos = load(str(tmp_path / "photos"))
    with torch.no_grad():
        found = plain.eval()(photos.test_x).argmax(1)
    assert float((found == photos.test_y).double().mean()) == told["accuracy"]
