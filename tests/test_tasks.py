"""Tasks: losses and measures by hand, sums that add, one client as plain PyTorch, sites as the simulator, refusals."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitcast.base.codec import FP32, IGNORE, Flags, Labels
from splitcast.base.config import Config, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.data import Dataset, from_tensors
from splitcast.model.split import SplitModel
from splitcast.remote.federation import Federation
from splitcast.remote.site import Site
from splitcast.remote.sites import Limits
from splitcast.run.loop import train
from splitcast.run.parts import make_parts, make_simulator
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.run.verify import verify
from splitcast.studies.compare import rows
from splitcast.studies.plan import plan
from splitcast.studies.report.document import document
from splitcast.studies.report.runs import read_runs
from splitcast.training.measure import measure
from splitcast.training.positions import NextToken, Pixel, next_tokens
from splitcast.training.task import Classification, fit_targets, headline_of, make_task, measures_of
from splitcast.training.vectors import MultiLabel, Regression
from test_federation import Wired, difference

TASKS = ["classification", "multi-label", "regression", "pixel", "next-token"]
ROWS, TESTED = 40, 12


def near(expected):
    return pytest.approx(expected, rel=1e-6)


# ---- by hand


def test_multi_label_by_hand():
    """Probabilities 3/4, 1/4 and 1/2 at logits log 3, -log 3 and 0; 0 is not said to hold."""
    task, at = MultiLabel(2), math.log(3)
    output = torch.tensor([[at, -at], [at, at], [0.0, at]])
    target = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    right, wrong, open_ = -math.log(3 / 4), -math.log(1 / 4), math.log(2)
    losses = [right, (wrong + right) / 2, (open_ + right) / 2]
    assert task.losses(output, target).tolist() == near(losses)
    found = measures_of(task, task.metrics(output, target), 3)
    assert found["loss"] == near(sum(losses) / 3)
    assert found["f1"] == near(2 * 3 / (4 + 4))  # said: 2 + 2, true: 2 + 2, both: 1 + 2
    assert found["f1_macro"] == near((2 * 1 / 4 + 2 * 2 / 4) / 2)
    assert found["label_accuracy"] == near(4 / 6)
    assert headline_of(task).text(found["f1"]) == "75.00 %" and not headline_of(task).lower


def test_regression_by_hand():
    task = Regression(2)
    output, target = torch.tensor([[1.0, 2.0], [3.0, 3.0]]), torch.tensor([[1.0, 4.0], [0.0, 3.0]])
    assert task.losses(output, target).tolist() == [2.0, 4.5]
    found = measures_of(task, task.metrics(output, target), 2)
    assert found == near({"loss": 13 / 4, "mae": 5 / 4, "rmse": math.sqrt(13 / 4), "r2": 1 - 13 / 10})
    assert headline_of(task).lower and headline_of(task).name == "mae"


def test_pixels_by_hand():
    """Two images of 1 x 2 pixels, one pixel of them unknown; a class that is nowhere does not count for the IoU."""
    task = Pixel(3)
    right = torch.tensor([[[9.0, 0.0]], [[0.0, 0.0]], [[0.0, 9.0]]], dtype=torch.float64)  # says 0, then 2
    output, target = torch.stack([right, right]), torch.tensor([[[0, 2]], [[2, IGNORE]]])
    yes, no = math.log(1 + 2 * math.exp(-9)), 9 + math.log(1 + 2 * math.exp(-9))
    assert task.losses(output, target).tolist() == near([yes, no])
    found = measures_of(task, task.metrics(output, target), 2)
    assert found == near({"loss": (yes + no) / 2, "accuracy": 2 / 3, "mean_iou": (1 / 2 + 1 / 2) / 2})


def test_tokens_by_hand_padding_changes_nothing():
    """Sample losses are means over their own tokens; perplexity is over all tokens."""
    task = NextToken(4)
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [0.125, 0.125, 0.25, 0.5]])
    output, target = p.log().repeat(3, 1, 1), torch.tensor([[0, 1, 3], [2, IGNORE, IGNORE], [IGNORE] * 3])
    two = math.log(2)
    assert task.losses(output, target).tolist() == near([(1 + 2 + 1) * two / 3, 3 * two, 0.0])
    found = measures_of(task, task.metrics(output, target), 3)
    assert found == near({"loss": (4 / 3 + 3) * two / 3, "perplexity": 2 ** (7 / 4), "accuracy": 2 / 4})
    output[1, 1:] = torch.tensor([7.0, -3.0, 0.0, 0.0])  # what a model says of padding
    assert task.losses(output, target).tolist() == near([4 * two / 3, 3 * two, 0.0])
    assert headline_of(task).lower
    assert measures_of(task, task.metrics(1e6 * torch.eye(4)[None, :3], torch.tensor([[1, 0, 0]])), 1)[
        "perplexity"
    ] == float("inf")


def test_targets_of_tokens_are_the_tokens_after():
    tokens = torch.tensor([[3, 1, 2, 0], [1, 0, 0, 0]])
    assert next_tokens(tokens).tolist() == [[1, 2, 0, IGNORE], [0, 0, 0, IGNORE]]
    assert next_tokens(tokens, padding=0).tolist() == [[1, 2, IGNORE, IGNORE], [IGNORE] * 4]


# ---- data and models of every task


class Shift(nn.Module):
    """Tokens as one-hot vectors with their predecessor."""

    def forward(self, x):
        hot = F.one_hot(x.long(), 5).to(x.dtype)
        return torch.cat([hot, F.pad(hot, (0, 0, 1, 0))[:, :-1]], -1)


def case(task):
    """A dataset and the blocks of a small model."""
    rng = torch.Generator().manual_seed(1)
    n = ROWS + TESTED
    x = torch.randn(n, 1, 4, 4, generator=rng)
    flat = [nn.Sequential(nn.Flatten(), nn.Linear(16, 6)), nn.Tanh()]
    if task == "classification":
        y, classes, blocks = (x.flatten(1).sum(1) > 0).long() + (x[:, 0, 0, 0] > 0).long(), 3, [*flat, nn.Linear(6, 3)]
    elif task == "multi-label":
        y, classes, blocks = (x[:, 0, :, 0] > 0).float(), 4, [*flat, nn.Linear(6, 4)]
    elif task == "regression":
        y, classes, blocks = x[:, 0, 0, :2].sum(1), 1, [*flat, nn.Linear(6, 1)]
    elif task == "pixel":
        y, classes = (x[:, 0] > 0).long(), 2
        y[:, 0, 0] = IGNORE
        blocks = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1)]
    else:
        tokens = torch.randint(1, 5, (n, 7), generator=rng)
        for row, length in enumerate(torch.randint(2, 8, (n,), generator=rng)):
            tokens[row, length:] = 0
        x, y, classes = tokens.float(), next_tokens(tokens, padding=0), 5
        blocks = [nn.Sequential(Shift(), nn.Linear(10, 6)), nn.Tanh(), nn.Linear(6, 5)]
    return Dataset(x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:], classes, task), blocks


def parts(task):
    torch.manual_seed(2)
    dataset, blocks = case(task)
    return dataset, SplitModel(blocks, dataset.train_x.shape[1:])


def settings(task, **values):
    usual = {"task": task, "clients": 3, "sizes": "unequal", "batch": 5, "rounds": 6, "scheme": "sfl", "lr": 0.2}
    return with_values(Config(), **usual | values)


PLAIN = {
    "classification": nn.CrossEntropyLoss(),
    "multi-label": nn.BCEWithLogitsLoss(),
    "regression": lambda output, target: F.mse_loss(output, target[:, None]),
    "pixel": nn.CrossEntropyLoss(ignore_index=IGNORE),  # as many unknown pixels in every image
    "next-token": lambda output, target: sum(F.cross_entropy(o, t) for o, t in zip(output, target, strict=True)) / 5,
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("scheme", ["sfl-ga", "psl", "fl"])
def test_one_client_is_plain_pytorch(task, scheme):
    """Five steps in float64, whatever the scheme."""
    dataset, model = parts(task)
    config = settings(task, scheme=scheme, clients=1, dtype="float64", momentum=0.5)
    sim = make_simulator(config, dataset, model)
    plain = nn.Sequential(*parts(task)[1].blocks).double()
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.5)
    for t in range(1, 6):
        rows = sim.rows(t, 0, np.array([0]))[0]
        y = dataset.train_y[rows]
        loss = PLAIN[task](plain(dataset.train_x[rows].double()), y.double() if y.is_floating_point() else y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        assert sim.round(t).loss == pytest.approx(loss.item(), abs=1e-12)
    ours = sim.state.averaged(sim.weights)
    for name, value in plain.named_parameters():
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-8), name


@pytest.mark.parametrize("task", TASKS)
def test_sums_add_over_batches(task):
    """Measures of a test set in batches of any size are those of all rows at once."""
    dataset, model = parts(task)
    sim = make_simulator(settings(task), dataset, model)
    made = make_task(task, dataset.classes)
    with torch.no_grad():
        output = model.forward(model.initial(), dataset.test_x, 0, model.depth)
    whole = measures_of(made, made.metrics(output, dataset.test_y), TESTED)
    pieces = [made.metrics(o, y) for o, y in zip(output.split(5), dataset.test_y.split(5), strict=True)]
    sums = {name: sum(piece[name] for piece in pieces) for name in pieces[0]}
    assert measures_of(made, sums, TESTED) == pytest.approx(whole, rel=1e-6)
    assert sim.evaluate(dataset.test_x, dataset.test_y) == pytest.approx(whole, rel=1e-5)
    assert headline_of(made).name in whole


@pytest.mark.parametrize("task", TASKS)
def test_trains_and_records(task):
    dataset, model = parts(task)
    result = train(settings(task, rounds=30, eval_every=1), dataset=dataset, model=model)
    first, last = result.rounds[0], result.rounds[-1]
    assert last.test_loss < first.test_loss and last.loss < first.loss
    assert set(result.summary["test"]) >= {"loss", headline_of(result.engine.task).name}


@pytest.mark.parametrize(
    ("task", "bytes_"),
    [("classification", 5), ("multi-label", 3), ("regression", 5 * 4), ("pixel", 5 * 16), ("next-token", 5 * 7)],
)
def test_targets_cost_what_they_measure(task, bytes_):
    dataset, model = parts(task)
    sim = make_simulator(settings(task), dataset, model)
    labels = [m for m in sim.round(1).ledger.messages if m.kind == "labels"]
    assert [m.of(n) for m in labels for n in range(3)] == [bytes_] * 3
    codec, rows = sim.task.target_codec, sim.y[:5]
    packed = codec.encode(rows)
    assert len(packed) == bytes_ == codec.nbytes(rows.shape)
    assert torch.equal(codec.decode(packed, rows.shape), rows)


def test_widths_of_tokens():
    assert [Labels(n, ignore=True).width for n in (255, 256, 65535, 65536)] == [1, 2, 2, 4]
    with pytest.raises(SplitcastError, match="6 is not below 5"):
        Labels(5, ignore=True).decode(torch.tensor([6], dtype=torch.uint8), (1,))


def blocks_of(task, input_shape, classes):
    return case(task)[1]


ARCHS = {task: partial(blocks_of, task) for task in TASKS}
multi_label, regression, pixel, next_token = (ARCHS[task] for task in TASKS[1:])


@pytest.mark.parametrize("task", TASKS[1:])
def test_sites_do_what_the_simulator_does(task):
    dataset, _ = parts(task)
    config = settings(task, local_steps=2, arch=f"{__name__}:{task.replace('-', '_')}")

    def own_rows(config, client):
        part = make_parts(config, dataset)[client]
        return dataset.train_x[part], dataset.train_y[part]

    line, names = Wired(3), [f"site-{n + 1}" for n in range(3)]
    line.sites = [Site(own_rows, lambda run, n=n: line.memories[n]) for n in range(3)]
    sim = make_simulator(config, dataset)
    fed = Federation(config, sim.model, dataset.classes, names, line, Limits())
    fed.start()
    for t in range(1, 5):
        ours, theirs = fed.round(t), sim.round(t)
        assert ours.ledger.messages == theirs.ledger.messages
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert difference(fed, sim) < 1e-6
    tests = [engine.evaluate(dataset.test_x, dataset.test_y) for engine in (fed, sim)]
    assert tests[0] == pytest.approx(tests[1], rel=1e-4)


# ---- what is refused


BAD = [
    ("classification", {"train_y": torch.full((ROWS,), 3)}, "train_y: largest label is 3; allowed are 0 to 2"),
    ("classification", {"test_y": torch.full((TESTED,), -1)}, "test_y: smallest label is -1"),
    ("classification", {"train_y": torch.zeros(ROWS)}, "train_y: type is torch.float32; allowed are integers 0 to 2"),
    (
        "classification",
        {"train_y": torch.zeros(ROWS, 2).long()},
        r"targets are \(2,\) per sample; .* are \(\)",
    ),
    ("multi-label", {"train_y": torch.full((ROWS, 4), 2)}, "train_y: holds something else than 0 and 1"),
    ("multi-label", {"train_y": torch.zeros(ROWS, 3)}, r"train_y: targets are \(3,\) per sample; .* are \(4,\)"),
    ("multi-label", {"classes": 5}, r"model: ends in \(4,\) values, the data has 5 labels"),
    ("regression", {"test_y": torch.full((TESTED,), math.nan)}, "test_y: holds NaN or infinite values"),
    ("regression", {"train_y": torch.zeros(ROWS, 2)}, r"train_y: targets are \(2,\) per sample; .* are \(1,\)"),
    ("regression", {"classes": 3}, r"model: ends in \(1,\) values, a target of the data has 3"),
    ("pixel", {"train_y": torch.full((ROWS, 4, 4), 2)}, "train_y: largest label is 2; .* -100 where nothing counts"),
    ("pixel", {"train_y": torch.zeros(ROWS, 2, 2).long()}, r"train_y: targets are \(2, 2\) per sample"),
    ("pixel", {"classes": 3}, r"model: ends in \(2, 4, 4\); allowed is \(classes, height, width\)"),
    ("next-token", {"train_y": torch.full((ROWS, 7), -1)}, "train_y: smallest label is -1"),
    ("next-token", {"train_y": torch.zeros(ROWS, 6).long()}, r"train_y: targets are \(6,\) per sample; .* are \(7,\)"),
    ("next-token", {"classes": 6}, r"model: ends in \(7, 5\); allowed is \(positions, tokens\)"),
]


@pytest.mark.parametrize(("task", "change", "said"), BAD)
def test_what_does_not_fit_is_refused_in_one_line(task, change, said, tmp_path):
    dataset, model = parts(task)
    with pytest.raises(SplitcastError, match=said) as refusal:
        train(settings(task), tmp_path / "run", dataset=replace(dataset, **change), model=model)
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_label_skew_needs_labels(kind):
    dataset, model = parts("regression")
    with pytest.raises(SplitcastError, match=f"partition: {kind} needs one label per row"):
        make_simulator(settings("regression", partition=kind), dataset, model)


def test_a_site_refuses_targets_that_do_not_fit():
    site = Site(lambda config, client: (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 9])), lambda run: None)
    asked = {"call": 1, "run": "r", "client": 0, "input_shape": [1, 8, 8]}
    config = to_toml(with_values(Config(), arch="cnn-small"))
    with pytest.raises(SplitcastError, match="data: largest label is 9; allowed are 0 to 4"):
        site.join(config=config, classes=5, **asked)
    assert not site.joined


def test_own_data_by_their_targets():
    x = torch.zeros(3, 1, 2, 2)
    made = [
        from_tensors(x, y, x, y)
        for y in (torch.tensor([0, 2, 1]), torch.rand(3), torch.rand(3, 5), torch.zeros(3, 4, dtype=torch.bool))
    ]
    assert [one.classes for one in made] == [3, 1, 5, 4]
    with pytest.raises(SplitcastError, match="train_y: holds NaN"):
        from_tensors(x, torch.tensor([0.0, math.nan, 0.0]), x, torch.zeros(3))


def test_codecs_of_the_tasks():
    codecs = [make_task(name, 10).target_codec for name in TASKS]
    assert [type(codec) for codec in codecs] == [Labels, Flags, type(FP32), Labels, Labels]
    assert fit_targets(Classification(3), torch.tensor([1, 2], dtype=torch.uint8), (3,), "y").dtype == torch.int64


def test_plans_count_targets_of_their_shape():
    labels = {}
    for task in ("classification", "multi-label", "regression"):
        found = plan(with_values(Config(), task=task, scheme="psl", arch="cnn-small"), draws=1)
        labels[task] = found.cuts[0].up_bits / 8 / 10 - 4 * 32 * 4 * 14 * 14
    assert labels == {"classification": 32, "multi-label": 32 * 10 / 8, "regression": 32 * 10 * 4}


# ---- what runs are judged by


def with_tests(values, name="perplexity"):
    """Rounds of 1 MB and a second each, with a test after each."""
    return [
        RoundRecord(
            round=t,
            cut=1,
            clients=1,
            loss=1.0,
            up_bytes=10**6,
            down_bytes=0,
            kinds={},
            drift=0.0,
            latency_s=1.0,
            slowest_client=0,
            slowest_part="uplink",
            metrics={f"test_{name}": value},
        )
        for t, value in enumerate(values, start=1)
    ]


def test_lower_is_better_where_it_is():
    runs = {"a": [with_tests([9.0, 4.0, 2.84, 3.0])], "b": [with_tests([9.0, 2.0, 5.0, 2.5])]}
    target, (a, b) = rows(runs, judged=measure("perplexity"))
    assert target == 2.9  # both reach 2.84
    assert (a.value, a.rounds_to_target, a.megabytes_to_target) == (3.0, 3, 3.0)
    assert (b.value, b.rounds_to_target) == (2.5, 2)
    _, (a, b) = rows(runs, 2.5, measure("perplexity"))
    assert a.rounds_to_target is None and b.rounds_to_target == 2
    higher = {"a": [with_tests([1.0, 31.7, 20.0], "score")], "b": [with_tests([44.0, 2.0, 1.0], "score")]}
    target, (a, b) = rows(higher, judged=measure("score"))
    assert (target, a.rounds_to_target, b.rounds_to_target) == (31.0, 2, 1)
    with pytest.raises(SplitcastError, match="target: 94; give an accuracy between 0 and 1"):
        rows(runs, 94)


def test_the_best_of_a_summary_is_the_lowest_error():
    dataset, model = parts("regression")
    result = train(settings("regression", rounds=12, eval_every=2, lr=0.5), dataset=dataset, model=model)
    values = [r.metrics["test_mae"] for r in result.rounds[1::2]]
    assert result.summary["headline"] == {
        "name": "mae",
        "unit": "",
        "lower": True,
        "value": values[-1],
        "best": min(values),
    }
    assert result.summary["accuracy"] is None and min(values) < values[0]


def token_data():
    dataset, _ = case("next-token")
    return dataset


OWN = ["--dataset", f"{__name__}:token_data", "--arch", f"{__name__}:next_token", "--task", "next-token"]
FEW = ["--clients", "3", "--batch", "4", "--rounds", "8", "--eval-every", "2", "--lr", "0.5"]


def test_commands_follow_the_task(capsys, tmp_path, monkeypatch):
    """Progress, result, table, figure and report of a language model are about perplexity, and less is better."""
    monkeypatch.setattr("splitcast.cli.progress.EVERY_S", 0.0)  # a line for every round
    main(["train", *OWN, *FEW, "--out", str(tmp_path / "run")])
    told = capsys.readouterr()
    perplexity = RunFolder(tmp_path / "run").summary()["test"]["perplexity"]
    assert told.out.startswith(f"sfl-ga: perplexity {perplexity:.4g}, loss ") and "accuracy" in told.out
    assert f"perplexity {perplexity:.4g}" in told.err
    main(["compare", "sfl", "psl", *OWN, *FEW, "--to", "4.9", "--quiet", "--out", str(tmp_path / "two")])
    table = capsys.readouterr().out
    assert "perplexity" in table and "to 4.9" in table
    main(["compare", "sfl", "psl", *OWN, *FEW, "--to", "4.9", "--json", "--out", str(tmp_path / "two")])
    found = json.loads(capsys.readouterr().out)
    for row in found["rows"]:
        records = RunFolder(tmp_path / "two" / row["name"]).rounds()
        there = [r.round for r in records if r.metrics.get("test_perplexity", 99) <= 4.9]
        assert row["rounds_to_target"] == (there[0] if there else None)
        assert row["perplexity"] == records[-1].metrics["test_perplexity"]
    shown = document(read_runs([tmp_path / "two"]))
    assert shown["headline"] == "test_perplexity" and shown["measures"]["test_perplexity"]["lower"]
    assert shown["measures"]["test_accuracy"]["unit"] == "%" and next(iter(shown["measures"])) == "test_perplexity"
    for run in shown["runs"]:
        values = [value for value in run["columns"]["test_perplexity"] if value is not None]
        assert (run["value"], run["best"]) == (values[-1], min(values))


# ---- an end before the last round


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_run_stops_at_the_first_test_that_is_good_enough(task, tmp_path):
    dataset, model = parts(task)
    whole = train(settings(task, rounds=20, eval_every=2), dataset=dataset, model=model).rounds
    judged = headline_of(make_task(task, dataset.classes))
    values = {r.round: r.test(judged.name) for r in whole if r.tests()}
    goal = sorted(values.values(), reverse=judged.lower)[-3]
    end = next(t for t, value in values.items() if judged.reached(value, goal))
    assert end < 20
    config = settings(task, rounds=20, eval_every=2, stop_at=goal, checkpoint_every=3)
    run = train(config, tmp_path / "run", dataset=dataset, model=model)
    assert run.rounds == whole[:end] and run.summary["rounds"] == end
    assert judged.reached(run.summary["headline"]["value"], goal)
    folder = RunFolder(tmp_path / "run")
    assert folder.checkpointed() == end and verify(tmp_path / "run") == []
    before = folder.rounds_file.read_bytes()
    again = train(config, tmp_path / "run", resume=True, dataset=dataset, model=model)
    assert again.rounds == run.rounds and again.summary == folder.summary()
    folder.summary_file.unlink()  # killed between the last checkpoint and the summary
    again = train(config, tmp_path / "run", resume=True, dataset=dataset, model=model)
    assert again.summary["rounds"] == end and folder.rounds_file.read_bytes() == before


def test_a_goal_that_cannot_be_is_refused(tmp_path):
    dataset, model = parts("classification")
    with pytest.raises(SplitcastError, match="stop_at: 94; give an accuracy between 0 and 1"):
        train(settings("classification", stop_at=94), tmp_path / "run", dataset=dataset, model=model)
    assert not (tmp_path / "run").exists()


def test_compare_takes_runs_that_stopped(capsys, tmp_path):
    args = ["compare", "sfl", *OWN, *FEW, "--stop-at", "100", "--json", "--out", str(tmp_path / "c")]
    for _ in range(2):
        main(args)
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["rounds_to_target"] == 2 and len(RunFolder(tmp_path / "c" / "sfl").rounds()) == 2


# ---- clients by themselves


@pytest.mark.parametrize("scheme", ["psl", "sfl"])
def test_clients_are_tested_on_their_own_rows_with_their_own_half(scheme):
    dataset, model = parts("regression")
    config = settings("regression", scheme=scheme, eval_clients=7, rounds=4, eval_every=2)
    result = train(config, dataset=dataset, model=model)
    sim, found = result.engine, []
    for n, rows_ in enumerate(make_parts(config, dataset)):
        client = {k: v[n] if scheme == "psl" else v for k, v in sim.state.client.params.items()}
        with torch.no_grad():
            output = model.forward(client | sim.state.server.params, dataset.train_x[rows_[:7]], 0, model.depth)
        found.append(float((output[:, 0] - dataset.train_y[rows_[:7]]).abs().mean()))
    assert len(set(found)) == 3
    expected = {"mean": np.mean(found), "worst": max(found), "spread": np.std(found)}
    assert result.summary["clients"] == pytest.approx(expected, rel=1e-5)
    tested = [{k for k in r.metrics if k.startswith("clients_")} for r in result.rounds]
    assert tested == [set(), {"clients_mean", "clients_worst", "clients_spread"}] * 2


def test_testing_clients_changes_nothing_else():
    dataset, model = parts("classification")
    with_, without = (
        train(settings("classification", eval_clients=n, rounds=4), dataset=dataset, model=model) for n in (5, 0)
    )
    assert [r.loss for r in with_.rounds] == [r.loss for r in without.rounds]
    assert with_.rounds[-1].tests() == without.rounds[-1].tests()


def test_sites_have_half_a_model():
    with pytest.raises(SplitcastError, match="eval_clients: needs the simulator"):
        Federation(settings("classification", eval_clients=5), None, 3, ["a", "b", "c"], None, Limits())


class Nameless(Classification):
    """Judged by something that it does not measure."""

    headline = "beauty"


def test_a_headline_that_is_not_measured_is_refused():
    dataset, model = parts("classification")
    with pytest.raises(SplitcastError, match="task: its headline 'beauty' is none of its measures, loss, accuracy"):
        train(settings(f"{__name__}:Nameless", rounds=1), dataset=dataset, model=model)
