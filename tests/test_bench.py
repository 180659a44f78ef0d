"""Figures of `splitcast bench models` are measured on what they say, and have the names that they had."""

import torch

from splitcast.bench import models
from splitcast.model import build


def test_names_and_units():
    rows = models._adamw(2, 2, 1, repeats=1) + models._test("cnn-small", (1, 28, 28), 8, repeats=1)
    assert {row.name: row.unit for row in rows} == {
        **{f"models.adamw.n2_b2_tau1.cut{cut}": "x sgd" for cut in (1, 4)},
        "models.test.cnn-small": "x forward of training",
    }
    assert all(row.value > 0 for row in rows)


def test_the_centralised_step_is_a_round(monkeypatch):
    """Both move weights to the same place: the same samples, normalised by the same statistics."""
    monkeypatch.setattr(models, "CLIENTS", 2)
    monkeypatch.setattr(models, "BATCH", 3)
    model, (x, y) = build("resnet18", (1, 8, 8), models.CLASSES, seed=0), models._samples((1, 8, 8), 6)
    step = models._central(model, x, y)
    config = {"scheme": "sfl", "cut": 4, "clients": 2, "batch": 3}
    simulator = models._round(model, x, y, **config).func.__self__
    (module,) = [cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, torch.nn.Module)]
    step()
    simulator.round(1)
    ours = simulator.averaged()
    start = model.initial()
    for name, value in module.named_parameters():
        assert torch.allclose(ours[name], value, atol=1e-5), name
    assert float((ours["0.0.weight"] - start["0.0.weight"]).abs().max()) > 1e-3
