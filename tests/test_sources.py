"""The user's own data: folders of images, files, arrays, data sets; natural clients; what tells other data apart."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from splitcast import Config, SplitcastError, train, with_values
from splitcast.base.sections import DataConfig
from splitcast.cli.main import main
from splitcast.data import Dataset, load
from splitcast.data.folder import MOST_PIXELS
from splitcast.run.records import RunFolder

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
