"""The user's own data: folders of images, files, arrays, data sets; natural clients; what tells other data apart."""

import dataclasses
import json
import sys
from itertools import combinations

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from resuming import resumes_exactly
from splitcast import Config, SplitcastError, train, with_values
from splitcast.base.errors import imports_allowed
from splitcast.base.sections import DataConfig
from splitcast.cli.main import main
from splitcast.data import Dataset, load
from splitcast.data.augment import augmented, find_augment
from splitcast.data.folder import MOST_PIXELS
from splitcast.deploy.samples import server_dataset, site_rows
from splitcast.run.parts import make_parts, make_simulator
from splitcast.run.records import RunFolder
from test_federation import Wired, federation

QUICK = ["--arch", "cnn-small", "--rounds", "2", "--batch", "2", "--clients", "2", "--quiet"]


def pixels(label, k, size=(8, 8), channels=()):
    """An image of a class: bright on one side."""
    image = np.random.default_rng([label, k]).integers(0, 60, (*size, *channels))
    image[:, label * size[1] // 2 : (label + 1) * size[1] // 2] += 180
    return image.astype(np.uint8)


def photos(folder, names=("cat", "dog"), each=5, **how):
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for k in range(each):
            Image.fromarray(pixels(label, k, **how)).save(folder / name / f"{k}.png")
    return folder


def refused(capsys, folder, *args):
    """The one line of a command that is refused; it leaves no run folder behind."""
    with pytest.raises(SystemExit) as stop:
        main([args[0], *args[1:], "--out", str(folder / "run")])
    said = capsys.readouterr()
    assert (stop.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert not (folder / "run").exists()
    return said.err


def small(**changes):
    values = {"arch": "cnn-small", "rounds": 4, "batch": 4, "clients": 2, "checkpoint_every": 2, "eval_every": 4}
    return with_values(Config(), **(values | changes))


# Folders


def test_a_folder_is_its_pixels(tmp_path):
    data = load(str(photos(tmp_path / "photos")))
    assert (data.classes, data.labels) == (2, ("cat", "dog"))
    assert (data.train_x.shape, data.test_x.shape) == ((8, 1, 8, 8), (2, 1, 8, 8))
    assert sorted(data.test_y.tolist()) == [0, 1]
    known = {pixels(label, k).tobytes(): label for label in range(2) for k in range(5)}
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        for image, label in zip(((x + 1) * 127.5).round().byte(), y.tolist(), strict=True):
            assert known.pop(image[0].numpy().tobytes()) == label
    assert not known


def test_train_and_test_folders_are_kept_apart(tmp_path):
    photos(tmp_path / "train")
    photos(tmp_path / "test", each=2)
    data = load(f"{tmp_path}/")
    assert (len(data.train_y), data.test_y.tolist()) == (10, [0, 0, 1, 1])
    data = load(DataConfig(dataset=str(tmp_path), labels=("fish", "dog", "cat")))
    assert (data.test_y.tolist(), data.classes) == ([1, 1, 2, 2], 3)  # sorted by the classes' numbers


def test_one_colour_image_makes_all_of_them_colour_and_sizes_can_be_given(tmp_path):
    folder = photos(tmp_path / "photos")
    Image.fromarray(pixels(0, 9, (20, 30), (3,))).save(folder / "cat" / "large.jpg", quality=100)
    Image.fromarray((np.arange(64).reshape(8, 8) * 1000).astype(np.uint16)).save(folder / "dog" / "deep.png")
    (folder / "cat" / "notes.txt").write_text("not an image")
    (folder / ".cache").mkdir()
    with pytest.raises(SplitcastError, match=r"image_size: .*0.png is 8 x 8, .*large.jpg is 30 x 20; choose a size"):
        load(str(folder))
    data = load(DataConfig(dataset=str(folder), image_size=8))
    assert data.train_x.shape[1:] == (3, 8, 8) and len(data.train_y) + len(data.test_y) == 12
    every = ((torch.cat([data.train_x, data.test_x]) + 1) * 127.5).round()
    deep = (torch.arange(64.0).reshape(8, 8) * 1000 / 257).round()
    assert any(torch.equal(image, deep.expand(3, 8, 8)) for image in every)


def test_an_image_is_turned_as_it_was_meant_to_be_seen(tmp_path):
    folder = photos(tmp_path / "photos", size=(8, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.fromarray(pixels(0, 0, size=(8, 6)).T).save(folder / "cat" / "0.png", exif=exif)
    assert load(str(folder)).train_x.shape[1:] == (1, 8, 6)


def test_training_on_a_folder_is_training_on_its_arrays(tmp_path):
    folder = photos(tmp_path / "photos", each=20)
    by_name = train(small(dataset=str(folder)))
    data = load(str(folder))
    given = Dataset.of((data.train_x, data.train_y), (data.test_x, data.test_y))
    by_hand = train(small(), dataset=given)
    assert [r.loss for r in by_name.rounds] == [r.loss for r in by_hand.rounds]
    assert by_name.summary["accuracy"] == by_hand.summary["accuracy"]
    assert "own" not in by_name.summary


@pytest.mark.long
def test_every_command_takes_a_folder(tmp_path, capsys):
    folder = str(photos(tmp_path / "photos", each=10))
    main(["train", "--dataset", folder, *QUICK, "--out", str(tmp_path / "run")])
    main(["train", "--resume", str(tmp_path / "run"), "--quiet"])
    main(["compare", "sfl", "psl", "--dataset", folder, *QUICK, "--out", str(tmp_path / "compared")])
    plan = ["--dataset", folder, "--arch", "cnn-small", "--out", str(tmp_path / "plan")]
    main(["plan", *plan, "--draws", "2", "--json"])
    main(["learn", *plan, "--rounds", "2", "--episodes", "2", "--held-out", "1", "--gamma-draws", "1", "--quiet"])


def test_bad_folders_are_one_line_and_leave_nothing(tmp_path, capsys):
    def said(folder, *more):
        return refused(capsys, tmp_path, "train", "--dataset", str(folder), *QUICK, *more)

    folder = tmp_path / "photos"
    assert f"cannot read {folder}: No such file" in said(folder)
    folder.mkdir()
    assert "has 0 sub-folder(s); at least 2 are needed" in said(folder)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
    assert "has no images in its sub-folders" in said(folder)
    Image.fromarray(pixels(0, 0)).save(folder / "cat" / "0.png")
    assert "images of one class only" in said(folder)
    Image.fromarray(pixels(1, 0)).save(folder / "dog" / "0.png")
    assert "too few to hold some out" in said(folder)
    Image.fromarray(pixels(1, 1)).save(folder / "dog" / "1.png")
    assert "dog is none of the classes cat, bird" in said(folder, "--labels", "cat", "bird")
    whole = (folder / "cat" / "0.png").read_bytes()
    for bad in (b"", b"no image", whole[:40], whole[:-30]):
        (folder / "cat" / "bad one.jpg").write_bytes(bad)
        assert "bad one.jpg cannot be read as an image" in said(folder)
    wide = Image.new("1", (MOST_PIXELS // 1000 + 1, 1000))
    wide.save(folder / "cat" / "bad one.jpg", "PNG")
    assert "bad one.jpg cannot be read as an image: 67109 x 1000, more than" in said(folder)
    assert "image_size: 8, but mnist-mini is no folder" in said("mnist-mini", "--image-size", "8")


# Arrays


def test_all_kinds_of_arrays_make_the_same_data(tmp_path):
    x, y = np.random.default_rng(0).random((12, 1, 4, 4), np.float32), np.arange(12) % 3
    made = Dataset.of((x, y), (x[:4], y[:4]))
    np.savez(tmp_path / "four.npz", train_x=x, train_y=y, test_x=x[:4], test_y=y[:4])
    np.savez(tmp_path / "two.npz", x=x, y=y)
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for other in (
        Dataset.of(tensors, TensorDataset(*tensors[:4])),
        Dataset.of((torch.from_numpy(x), y.tolist()), (x[:4], y[:4])),
        load(str(tmp_path / "four.npz")),
    ):
        assert other.fingerprint() == made.fingerprint()
    split = Dataset.of((x, y))
    assert load(str(tmp_path / "two.npz")).fingerprint() == split.fingerprint() == Dataset.of(tensors).fingerprint()
    assert (len(split.train_y), sorted(split.test_y.tolist())) == (10, [0, 2])
    together = torch.cat([split.train_x, split.test_x]).flatten(1)
    assert sorted(together.tolist()) == sorted(x.reshape(12, -1).tolist())


def test_bad_arrays_are_one_line_and_leave_nothing(tmp_path, capsys):
    def said(**arrays):
        np.savez(tmp_path / "bad.npz", **arrays)
        return refused(capsys, tmp_path, "train", "--dataset", str(tmp_path / "bad.npz"), *QUICK)

    x, y = np.zeros((9, 1, 8, 8), np.float32), np.arange(9) % 2
    assert "has 0 arrays train_x" in said(a=x, y=y)
    assert "smallest label is -1" in said(x=x, y=y - 1)
    assert "largest label is" in said(x=x, y=y * 10**7)
    assert "holds NaN" in said(x=x * np.nan, y=y)
    assert "train_y: shape is (8,)" in said(x=x, y=y[1:])
    (tmp_path / "bad.npz").unlink()
    assert "is not a file" in refused(capsys, tmp_path, "train", "--dataset", str(tmp_path / "bad.npz"), *QUICK)


# Tables

TABLE = """\
age,height,smokes,city,ward,ill
20,1.5,True,Bern,a,no
30,1.6,False,Chur,a,yes
40,1.7,False,Bern,b,no
50,1.8,True,Basel,b,yes
60,1.9,False,Chur,b,no
70,2.0,False,Bern,c,yes
25,1.5,True,Bern,c,no
35,1.6,True,Chur,c,yes
45,1.7,False,Bern,c,yes
55,1.8,True,Chur,d,no
65,1.9,False,Bern,d,no
75,2.0,False,Bern,d,yes
"""


def table(folder, text=TABLE, name="people.csv"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_table_is_standardised_by_its_training_rows(tmp_path):
    data = load(DataConfig(dataset=table(tmp_path), target="ill", partition="by:ward"))
    assert (data.labels, data.classes) == (("no", "yes"), 2)
    assert (len(data.train_y), len(data.test_y)) == (10, 2)
    assert data.groups["ward"].unique().tolist() == [0, 1, 2, 3]
    x = data.train_x  # age, height, smokes, then the cities that the training rows have
    frame = pandas.read_csv(tmp_path / "people.csv")
    ages = {tuple(sorted(frame["age"].drop(list(out)))): out for out in combinations(range(12), 2)}
    known = [np.array(each) for each in ages]
    mine = np.sort(x[:, 0].numpy())
    match = [a for a in known if np.allclose((a - a.mean()) / a.std(), mine, atol=1e-6)]
    assert len(match) == 1  # mean and deviation are those of exactly the rows that were kept
    kept = frame[frame["age"].isin(match[0].tolist())]
    cities = sorted(set(kept["city"]))
    assert x.shape == (10, 3 + len(cities)) and set(x[:, 2].tolist()) == {0.0, 1.0}
    by_hand = np.stack([kept["city"] == city for city in cities], 1).astype(np.float32)
    assert np.array_equal(x[:, 3:].numpy(), by_hand)
    assert data.train_y.tolist() == (kept["ill"] == "yes").astype(int).tolist()
    assert data.groups["ward"].tolist() == ["abcd".index(ward) for ward in kept["ward"]]


def test_frames_and_files_are_the_same_data(tmp_path):
    frame = pandas.read_csv(table(tmp_path))
    frame.to_parquet(tmp_path / "people.parquet")
    assert set(frame["city"][8:]) <= set(frame["city"][:8])
    of_file = load(DataConfig(dataset=str(tmp_path / "people.csv"), target="ill"))
    of_parquet = load(DataConfig(dataset=str(tmp_path / "people.parquet"), target="ill"))
    of_frame = Dataset.of(frame, target="ill")
    assert of_file.fingerprint() == of_parquet.fingerprint() == of_frame.fingerprint()
    frame = frame.drop(columns="ward")
    apart = Dataset.of(frame[:8], frame[8:], target="ill")
    ages = frame["age"][:8].to_numpy()
    np.testing.assert_allclose(apart.test_x[:, 0], (frame["age"][8:] - ages.mean()) / ages.std(), rtol=1e-6)
    assert not apart.test_x[:, 3:].sum(1).eq(0).any()
    new = Dataset.of(frame[:8], frame[8:].assign(city="Genf"), target="ill")
    assert new.test_x.shape == apart.test_x.shape and new.test_x[:, 3:].sum() == 0  # a city nobody has learned


def test_the_task_decides_whether_whole_numbers_are_classes(tmp_path):
    text = "a,b\n" + "".join(f"{k},{3 * (k % 4)}\n" for k in range(20))
    file = table(tmp_path, text)
    classes, numbers = (
        load(DataConfig(dataset=file, target="b"), task=task) for task in ("classification", "regression")
    )
    assert (classes.labels, classes.classes, set(classes.train_y.tolist())) == (("0", "3", "6", "9"), 4, {0, 1, 2, 3})
    assert (numbers.train_y.dtype, numbers.classes, numbers.labels) == (torch.float32, 1, ())
    assert set(numbers.train_y.tolist()) == {0.0, 3.0, 6.0, 9.0}
    np.savez(tmp_path / "n.npz", x=np.ones((20, 3)), y=3 * (np.arange(20) % 4))
    assert load(str(tmp_path / "n.npz"), task="regression").train_y.dtype == torch.float32
    assert load(str(tmp_path / "n.npz")).classes == 10


def test_tokens_and_masks_pass_through(tmp_path):
    tokens = np.arange(60).reshape(10, 6) % 7
    made = Dataset.of((tokens, tokens))
    assert (made.train_x.dtype, made.train_y.shape[1:], made.classes) == (torch.int64, (6,), 7)
    items = Dataset.of(TensorDataset(torch.from_numpy(tokens), torch.from_numpy(tokens)))
    assert items.fingerprint() == made.fingerprint()
    masks = np.zeros((10, 4, 4), np.uint8)
    made = Dataset.of((np.zeros((10, 1, 4, 4), np.uint8), masks + 2))
    assert (made.train_x.dtype, made.train_y.dtype, made.classes) == (torch.float32, torch.int64, 3)


def test_a_column_tells_the_clients(tmp_path, capsys):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef mlp(shape, n): return [nn.Linear(*shape, 4), nn.ReLU(), nn.Linear(4, n)]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        args = ["--dataset", table(tmp_path), "--target", "ill", "--partition", "by:ward", "--arch", "nets:mlp"]
        quick = [*args, "--batch", "2", "--rounds", "2"]
        main(["train", *quick, "--out", str(tmp_path / "run"), "--json"])
        config = RunFolder(tmp_path / "run").config()
        assert config.data.clients == 4 and RunFolder(tmp_path / "run").rounds()[-1].clients == 4
        main(["train", "--resume", str(tmp_path / "run"), "--quiet"])
        data = load(config.data)
        parts = make_parts(config, data)
        assert [set(data.groups["ward"][rows].tolist()) for rows in parts] == [{0}, {1}, {2}, {3}]
        assert sorted(np.concatenate(parts).tolist()) == list(range(10))
        capsys.readouterr()
        main(["plan", *args, "--draws", "2", "--json", "--out", str(tmp_path / "plan")])
        assert len(json.loads(capsys.readouterr().out)["clients"]) == 4
        said = refused(capsys, tmp_path / "new", "train", *quick, "--clients", "3")
        assert "clients: 3, but column 'ward' has 4" in said
        main(["compare", "sfl", "psl", *quick, "--quiet", "--out", str(tmp_path / "compared")])
    capsys.readouterr()
    with pytest.raises(SplitcastError, match="partition: mnist-mini has no column 'ward' of clients; it has none"):
        train(small(partition="by:ward"))


def test_an_array_tells_the_clients(tmp_path):
    x, writer = np.random.default_rng(0).random((30, 1, 8, 8)), np.repeat([7, 3, 5], 10)
    np.savez(tmp_path / "written.npz", x=x, y=np.arange(30) % 2, writer=writer)
    result = train(small(dataset=str(tmp_path / "written.npz"), partition="by:writer", clients=10))
    assert result.rounds[-1].clients == 3
    by_hand = Dataset.of((x, np.arange(30) % 2), by={"writer": writer})
    again = train(small(partition="by:writer", clients=3), dataset=by_hand)
    assert [r.loss for r in again.rounds] == [r.loss for r in result.rounds]


def test_bad_tables_are_one_line_and_leave_nothing(tmp_path, capsys, monkeypatch):
    def said(text, *more, name="people.csv"):
        file = table(tmp_path, text, name)
        return refused(capsys, tmp_path, "train", "--dataset", file, *QUICK, *more)

    ill = ("--target", "ill")
    assert "target: not given; choose the column to learn out of age, height, smokes, city, ward, ill" in said(TABLE)
    assert "there is no column 'weight'; the columns are age, height" in said(TABLE, "--target", "weight")
    assert "there is no column 'x'; the columns are" in said(TABLE, *ill, "--partition", "by:x")
    assert "row 3, column 'age' is missing or not finite" in said(TABLE.replace("40,", ",", 1), *ill)
    assert "row 3, column 'age' is missing or not finite" in said(TABLE.replace("40,", "inf,", 1), *ill)
    assert "row 2, column 'ill' is missing" in said(TABLE.replace("Chur,a,yes", "Chur,a,", 1), *ill)
    assert "holds 1.5, which is no class; choose --task regression" in said(TABLE, "--target", "height")
    assert "holds no numbers, which the task regression needs" in said(TABLE, *ill, "--task", "regression")
    assert "column 'ill' has one class only" in said(TABLE.replace("yes", "no"), *ill)
    assert "has yes, none of the classes no, perhaps" in said(TABLE, *ill, "--labels", "no", "perhaps")
    many = "name,ill\n" + "".join(f"n{k},{k % 2}\n" for k in range(200))
    assert "'name' has 160 different texts, at most 100" in said(many, *ill)
    assert "features of" in said("ill\n0\n1\n0\n1\n", *ill)
    assert "must be a .csv file, whole" in said("", *ill)
    assert "the table has no rows" in said("a,ill\n", *ill)
    assert "must be a .parquet file, whole" in said(TABLE, *ill, name="people.parquet")
    assert "is no table; leave it out" in refused(capsys, tmp_path, "train", *ill, *QUICK)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert "install what reads it: pip install 'splitcast[tables]'" in said(TABLE, *ill)


# Augmentation

SHIFT = """\
import torch

def shift(x, rng):
    by = torch.randint(-2, 3, (2,), generator=rng).tolist()
    return torch.roll(x, by, dims=(-2, -1)) + 0.1 * torch.randn(x.shape, generator=rng)

def smaller(x, rng):
    return x[:, :, 1:]

def broken(x, rng):
    raise KeyError("nothing here")
"""


@pytest.fixture
def shift(tmp_path, monkeypatch):
    (tmp_path / "my_shift.py").write_text(SHIFT)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_shift:shift"
    sys.modules.pop("my_shift", None)


def test_augmentation_is_reproducible_and_resumes_exactly(shift, tmp_path):
    config = small(augment=shift, scheme="sfl", local_steps=2, rounds=5)
    rounds = resumes_exactly(config, tmp_path / "run", stop_at=3)
    assert [r.loss for r in rounds] != [r.loss for r in train(small(scheme="sfl", local_steps=2, rounds=5)).rounds]
    assert [r.loss for r in rounds] != [r.loss for r in train(with_values(config, seed=1)).rounds]


def test_every_client_draws_its_own_whatever_the_chunks(shift, monkeypatch):
    import my_shift

    config = small(augment=shift, scheme="sfl-ga", clients=3)
    together = train(config)
    monkeypatch.setattr("splitcast.engine.simulator.CHUNK_BYTES", 1)
    monkeypatch.setattr("splitcast.engine.simulator.ACTIVATION_BYTES", 1)
    alone = train(config)
    assert [r.loss for r in alone.rounds] == pytest.approx([r.loss for r in together.rounds], rel=1e-5)
    x = torch.ones(3, 4, 1, 5, 5)
    made = augmented(my_shift.shift, x, 0, 1, 0, [2, 0, 1])
    assert torch.equal(made[1], augmented(my_shift.shift, x[:1], 0, 1, 0, [0])[0])
    assert not torch.equal(made[0], made[1])


def test_sites_draw_what_the_simulator_draws(shift):
    config = small(augment=shift, scheme="sfl", clients=3, uplink_codec="fp32", downlink_codec="fp32")
    data = load("mnist-mini")
    fed, sim = federation(config, Wired(3)), make_simulator(config, data)
    for t in range(1, 4):
        assert fed.round(t).loss == pytest.approx(sim.round(t).loss, rel=1e-5)
    with (
        imports_allowed(["elsewhere"]),
        pytest.raises(SplitcastError, match="'my_shift:shift' may not be imported here"),
    ):
        make_simulator(config, data)


def test_named_augmentations_move_and_mirror_whole_samples():
    x = torch.arange(12.0).view(1, 1, 3, 4).expand(400, 2, 3, 4).clone()
    x[:, 1] += 100  # channels move together
    rng = torch.Generator().manual_seed(0)
    mirrored, moved = find_augment("mirror")(x, rng), find_augment("shift:1")(x, rng)
    left = (mirrored == x).all(3).all(2).all(1)
    assert torch.equal(mirrored[~left], x[~left].flip(-1)) and 150 < int(left.sum()) < 250
    wide = torch.from_numpy(np.pad(x[0].numpy(), ((0, 0), (1, 1), (1, 1)), mode="edge"))
    windows = [wide[:, i : i + 3, j : j + 4] for i in range(3) for j in range(3)]
    seen = [[torch.equal(one, window) for window in windows].index(True) for one in moved]
    assert all(20 < seen.count(k) < 80 for k in range(9))
    both = find_augment("mirror,shift:1")(x, torch.Generator().manual_seed(3))
    again = find_augment("shift:1")(find_augment("mirror")(x, rng.manual_seed(3)), rng)
    assert torch.equal(both, again) and not torch.equal(both, x)


def test_a_pool_is_changed_afresh_in_every_step_and_resumes_exactly(tmp_path):
    values = {"scheme": "sfl-replay", "rounds": 4, "sfl-replay.samples": 8, "sfl-replay.steps": 3}
    plain, changed = small(**values), small(**values, **{"sfl-replay.augment_pool": "mirror,shift:1"})
    rounds = resumes_exactly(changed, tmp_path / "run", stop_at=2)
    assert [r.bytes for r in rounds] == [r.bytes for r in train(plain).rounds]
    assert all(a.loss != b.loss for a, b in zip(rounds, train(plain).rounds, strict=True))


def test_bad_augmentation_is_one_line(shift, tmp_path, capsys):
    def said(name, *more):
        with pytest.raises(SystemExit) as stop:
            main(["train", *QUICK, "--augment", name, *more, "--out", str(tmp_path / f"run {name}")])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    known = "allowed are mirror, shift:1 to shift:999, module:function, or several with commas"
    for name in ("nowhere", "shift:0", "shift:-1", "mirror,", "mirror,shift"):
        assert f"augment: {name.split(',')[-1]!r} is unknown; {known}" in said(name)
    assert "augment: cannot import 'my_shift:absent'" in said("my_shift:absent")
    assert "augment: returned (2, 1, 27, 28); allowed is a tensor of (2, 1, 28, 28)" in said("my_shift:smaller")
    flat = ("--scheme", "sfl-replay", "--sfl-replay.augment-pool", "shift:1", "--cut", "3")
    assert "sfl-replay.augment_pool: shift:1 takes images or feature maps, not samples of (32,)" in said("", *flat)


# Sites


def kit(folder, source):
    (folder / "local").mkdir(parents=True)
    (folder / "local" / "splitcast.toml").write_text(f"data = {json.dumps(str(source))}\n")
    return folder


def test_a_site_reads_a_folder_with_the_classes_of_the_run(tmp_path):
    photos(tmp_path / "site", names=("dog",))
    config = small(labels=("cat", "dog"), image_size=4)
    x, y = site_rows(kit(tmp_path / "kit", tmp_path / "site"), config)
    assert (x.shape, y.tolist()) == ((5, 1, 4, 4), [1] * 5)  # not 0, though it is the first here
    with pytest.raises(SplitcastError, match="labels: not given"):
        site_rows(tmp_path / "kit", small())
    photos(tmp_path / "server")
    test = server_dataset(str(tmp_path / "server"), small())
    assert (test.labels, test.classes, len(test.train_x), len(test.test_x)) == (("cat", "dog"), 2, 0, 10)


def test_a_site_reads_a_table_as_it_is(tmp_path):
    text = "a,b,ill\n1,10,yes\n2,20,no\n"
    mine = kit(tmp_path / "kit", table(tmp_path, text))
    x, y = site_rows(mine, small(target="ill", labels=("yes", "no", "perhaps")))
    assert (x.tolist(), y.tolist()) == ([[1, 10], [2, 20]], [0, 1])
    numbers = kit(tmp_path / "numbers", table(tmp_path, "a,b\n1,10\n3,20\n", "numbers.csv"))
    assert site_rows(numbers, small(target="a"))[1].tolist() == [1, 3]  # class numbers as they are
    x, y = site_rows(numbers, small(target="b", task="regression"))
    assert (x.tolist(), y.tolist(), y.dtype) == ([[1], [3]], [10, 20], torch.float32)
    with pytest.raises(SplitcastError, match="labels: not given, but column 'ill' holds names of classes"):
        site_rows(mine, small(target="ill"))
    with pytest.raises(SplitcastError, match="column 'ill' holds texts"):
        site_rows(mine, small(target="a"))
    with pytest.raises(SplitcastError, match="whose numbers are standardised"):
        site_rows(mine, small(target="ill", dataset="all.csv"))


# Other data


@pytest.mark.parametrize("part", ["train_x", "train_y", "test_x", "test_y", "groups"])
def test_resume_refuses_data_that_differ_anywhere(part, tmp_path):
    x, y = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2
    data = Dataset.of((x, y), (x[:20].clone(), y[:20].clone()), by={"site": np.arange(200) % 4})
    config, out = small(), tmp_path / "run"
    train(config, out, dataset=data)
    more = with_values(config, rounds=6)
    changed = {"site": data.groups["site"].clone()} if part == "groups" else getattr(data, part).clone()
    (changed["site"] if part == "groups" else changed)[-1:] -= 1
    other = dataclasses.replace(data, **{part: changed})
    with pytest.raises(SplitcastError, match="was trained on other data"):
        train(more, out, resume=True, dataset=other)
    assert len(train(more, out, resume=True, dataset=data).rounds) == 6


def test_a_run_with_the_fingerprint_of_earlier_versions_goes_on(tmp_path):
    config, out = small(), tmp_path / "run"
    data = load("mnist-mini")
    whole = train(with_values(config, rounds=6), dataset=data)
    engine = train(config, out, dataset=data).engine
    old = data.fingerprint().partition("-")[0]
    assert old == "8f8ea95809bd93c8"  # what version 0.2.0 says of these data
    folder = RunFolder(out)
    folder.save(*engine.snapshot(4), 4, old)
    assert train(with_values(config, rounds=6), out, resume=True, dataset=data).rounds == whole.rounds
