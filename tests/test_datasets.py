"""Datasets: the embedded one, the user's own, and getting the full ones, without touching the network."""

import dataclasses
import gzip
import hashlib
import io
import json
import struct
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from splitcast.base.errors import SplitcastError
from splitcast.data import fetch, from_datasets, from_tensors, load
from splitcast.data.catalog import (
    CIFAR_BATCHES,
    CIFAR_LABELS,
    IDX,
    IDX_GZ,
    RECIPES,
    cifar_binary,
    cifar_pngs,
    gunzip,
)
from splitcast.data.embed import spread_rows
from splitcast.data.loading import EMBEDDED
from splitcast.data.sources import Source, debian, npm, site


def one_line(caught):
    message = str(caught.value)
    assert "\n" not in message
    return message


# The embedded subset


def test_embedded_subset_is_balanced_standardised_and_small():
    data = load("mnist-mini")
    assert data.train_x.shape == (5000, 1, 28, 28)
    assert data.test_x.shape == (1000, 1, 28, 28)
    assert data.train_x.dtype == torch.float32
    assert data.train_y.dtype == torch.int64
    assert data.train_y.bincount().tolist() == [500] * 10
    assert data.test_y.bincount().tolist() == [100] * 10
    assert data.classes == 10
    assert data.train_x.mean().item() == pytest.approx(0, abs=0.02)
    assert data.train_x.std().item() == pytest.approx(1, abs=0.02)
    assert EMBEDDED.stat().st_size <= 2e6


def test_embedded_subset_holds_digits_that_can_be_told_apart():
    data = load("mnist-mini")
    means = torch.stack([data.train_x[data.train_y == c].mean(0).flatten() for c in range(10)])
    nearest = torch.cdist(data.test_x.flatten(1), means).argmin(1)
    assert (nearest == data.test_y).float().mean() > 0.75  # the known result of nearest means is about 0.82


def test_embedded_subset_has_distinct_images_and_its_attribution():
    images = np.concatenate([np.load(EMBEDDED)[key].reshape(-1, 784) for key in ("train_x", "test_x")])
    assert len(np.unique(images, axis=0)) == 6000
    text = EMBEDDED.with_suffix(".txt").read_text()
    assert all(word in text for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0"))


def test_spread_rows_takes_every_class_alike_from_first_to_last():
    labels = np.array([0, 1, 0, 0, 0, 1, 0, 0, 1, 1], dtype=np.uint8)
    assert spread_rows(labels, 4).tolist() == [0, 1, 4, 8]


# Names and cache


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(SplitcastError) as caught:
        load("imagenet")
    words = "dataset", "'imagenet'", "mnist-mini, mnist, fashion-mnist, cifar10"
    assert all(word in one_line(caught) for word in words)


def test_missing_dataset_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITCAST_DATA", str(tmp_path))
    with pytest.raises(SplitcastError) as caught:
        load("fashion-mnist")
    assert "splitcast data get fashion-mnist" in one_line(caught)
    assert str(tmp_path) in str(caught.value)


# The user's own data


def own(n=6, m=4, **changes):
    arrays = {
        "train_x": torch.rand(n, 3, 5, 5, generator=torch.Generator().manual_seed(0)),
        "train_y": torch.arange(n) % 3,
        "test_x": torch.zeros(m, 3, 5, 5),
        "test_y": torch.arange(m) % 2,
    }
    return arrays | changes


def test_own_tensors_are_kept_as_given():
    arrays = own()
    data = from_tensors(**arrays)
    assert torch.equal(data.train_x, arrays["train_x"])
    assert torch.equal(data.test_y, arrays["test_y"])
    assert data.classes == 3


def test_own_datasets_equal_own_tensors():
    arrays = own()
    train = TensorDataset(arrays["train_x"], arrays["train_y"])
    test = TensorDataset(arrays["test_x"], arrays["test_y"])
    data = from_datasets(train, test)
    assert torch.equal(data.train_x, arrays["train_x"])
    assert torch.equal(data.train_y, arrays["train_y"])
    assert torch.equal(data.test_x, arrays["test_x"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_y": torch.zeros(5, dtype=torch.int64)}, ["train_y", "(5,)", "(6, ...)"]),
        ({"train_x": torch.zeros(6)}, ["train_x", "(6,)", "channels"]),
        ({"test_x": torch.zeros(0, 3, 5, 5)}, ["test_x", "(0, 3, 5, 5)"]),
        ({"test_x": torch.zeros(4, 3, 5, 6)}, ["test_x", "(3, 5, 6)", "(3, 5, 5)"]),
        ({"test_y": torch.tensor([0, 1, -1, 0])}, ["test_y", "-1"]),
        ({"train_y": torch.zeros(6)}, ["test_y", "torch.int64", "torch.float32", "train_y"]),
        ({"train_x": torch.full((6, 3, 5, 5), float("nan"))}, ["train_x", "NaN"]),
        ({"test_x": torch.full((4, 3, 5, 5), float("-inf"))}, ["test_x", "infinite"]),
    ],
)
def test_bad_own_tensors_are_named_in_one_line(changes, words):
    with pytest.raises(SplitcastError) as caught:
        from_tensors(**own(**changes))
    assert all(word in one_line(caught) for word in words)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], ["train", "no items"]),
        ([(torch.zeros(1, 2, 2), 0), (torch.zeros(1, 2, 3), 0)], ["train[1]", "(1, 2, 3)", "(1, 2, 2)"]),
        ([(torch.zeros(1, 2, 2), 0), (torch.zeros(1, 2, 2), 0.5)], ["train[1]", "torch.float32", "torch.int64"]),
        ([("cat.png", 0)], ["train[0]", "sample tensor"]),
        ([torch.zeros(3, 2, 2)], ["train[0]", "sample tensor"]),
    ],
)
def test_bad_own_datasets_are_named_in_one_line(items, words):
    with pytest.raises(SplitcastError) as caught:
        from_datasets(items, items)
    assert all(word in one_line(caught) for word in words)


# Getting full datasets


def tiny_parts():
    """Twelve images of 2 x 2 and their labels, in the format of MNIST."""
    pixels = bytes(range(48))
    images = b"\0\0\x08\x03" + struct.pack(">3I", 12, 2, 2) + pixels
    labels = b"\0\0\x08\x01" + struct.pack(">I", 12) + bytes(i % 3 for i in range(12))
    return {IDX["train_x"]: images, IDX["train_y"]: labels, IDX["test_x"]: images, IDX["test_y"]: labels}


def tiny_recipe(*sources):
    checksums = {part: "sha256:" + hashlib.sha256(raw).hexdigest() for part, raw in tiny_parts().items()}
    return dataclasses.replace(RECIPES["mnist"], sources=sources, checksums=checksums)


def giving(parts, name="good"):
    return Source(name, lambda folder, report: parts)


def failing(error, name):
    def get(folder, report):
        (folder / "half").write_bytes(b"half a file")
        raise error

    return Source(name, get)


def quiet(what, done, total):
    pass


def test_fetched_content_is_what_load_returns(tmp_path):
    path = fetch("mnist", tmp_path, recipe=tiny_recipe(giving(tiny_parts())), report=quiet)
    assert path == tmp_path / "mnist.npz"
    assert [p.name for p in tmp_path.iterdir()] == ["mnist.npz"]
    data = load("mnist", tmp_path)
    assert data.train_y.tolist() == [0, 1, 2] * 4
    pixels = (data.train_x * 0.3081 + 0.1307) * 255
    torch.testing.assert_close(pixels.flatten(), torch.arange(48.0), atol=1e-3, rtol=0)


def test_a_dataset_in_the_cache_is_not_fetched_again(tmp_path):
    fetch("mnist", tmp_path, recipe=tiny_recipe(giving(tiny_parts())), report=quiet)
    fetch("mnist", tmp_path, recipe=tiny_recipe(failing(AssertionError("asked again"), "no")), report=quiet)


def test_corrupt_content_is_refused_and_leaves_nothing(tmp_path):
    parts = tiny_parts()
    parts[IDX["test_y"]] = parts[IDX["test_y"]][:-1] + b"\7"
    with pytest.raises(SplitcastError) as caught:
        fetch("mnist", tmp_path, recipe=tiny_recipe(giving(parts, "mirror")), report=quiet)
    assert "mirror (t10k-labels-idx1-ubyte has sha256" in one_line(caught)
    assert list(tmp_path.iterdir()) == []


def test_the_next_source_is_tried_until_one_is_good(tmp_path):
    corrupt = {part: raw[:-1] for part, raw in tiny_parts().items()}
    sources = (
        failing(OSError("no route"), "a"),
        giving(corrupt, "b"),
        giving({}, "c"),
        giving(tiny_parts(), "d"),
    )
    fetch("mnist", tmp_path, recipe=tiny_recipe(*sources), report=quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["mnist.npz"]
    assert len(load("mnist", tmp_path).test_y) == 12


def test_when_all_sources_fail_each_is_named_with_its_reason(tmp_path):
    sources = failing(TimeoutError("timed out"), "first site"), failing(OSError("two\nlines"), "second site")
    with pytest.raises(SplitcastError) as caught:
        fetch("mnist", tmp_path, recipe=tiny_recipe(*sources, giving({}, "third")), report=quiet)
    message = one_line(caught)
    assert "'mnist'" in message
    assert "first site (timed out); second site (two lines); third (train-images-idx3-ubyte is missing)" in message
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_fetch_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fetch("mnist", tmp_path, recipe=tiny_recipe(failing(KeyboardInterrupt(), "slow")), report=quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_reported_and_replaced(tmp_path):
    recipe = tiny_recipe(giving(tiny_parts()))
    path = fetch("mnist", tmp_path, recipe=recipe, report=quiet)
    raw = bytearray(path.read_bytes())
    raw[180] ^= 0xFF  # a pixel: only the checksum in the file can tell
    path.write_bytes(raw)
    with pytest.raises(SplitcastError) as caught:
        load("mnist", tmp_path)
    assert "splitcast data get mnist" in one_line(caught)
    fetch("mnist", tmp_path, recipe=recipe, report=quiet)
    assert len(load("mnist", tmp_path).train_y) == 12


def test_fetch_refuses_unknown_names_and_unusable_folders(tmp_path):
    with pytest.raises(SplitcastError, match="mnist, fashion-mnist, cifar10"):
        fetch("imagenet", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SplitcastError, match="allowed is a folder to write in"):
        fetch("mnist", tmp_path / "file", recipe=tiny_recipe())


def test_progress_is_shown_on_the_terminal_and_not_on_stdout(tmp_path, capsys):
    def get(folder, report):
        for done in (0, 5, 10):
            report("first.gz", done, 10)
        report("second.gz", 3, None)
        return tiny_parts()

    fetch("mnist", tmp_path, recipe=tiny_recipe(Source("site", get)))
    assert capsys.readouterr().out == ""


# Sources


def tar_gz(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def client(folder, name, script):
    """A stand-in for a package client, first on the PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_site_downloads_each_file_and_reports_bytes(tmp_path):
    for name, raw in tiny_parts().items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(raw))
    seen = []
    source = site(tmp_path.as_uri(), IDX_GZ, gunzip)
    assert source.get(tmp_path, lambda *progress: seen.append(progress)) == tiny_parts()
    what, done, total = seen[0]
    assert what.endswith("train-images-idx3-ubyte.gz")
    assert done == total == (tmp_path / "train-images-idx3-ubyte.gz").stat().st_size


def test_npm_package_gives_its_files_and_nothing_else(tmp_path, monkeypatch):
    files = {f"package/data/{name}": raw for name, raw in tiny_parts().items()}
    packed = tmp_path / "packed"
    packed.write_bytes(tar_gz(files | {"../../escaped": b"x", "package/index.js": b"x"}))
    client(tmp_path, "npm", f'cp {packed} "$PWD/digits-1.0.0.tgz"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    source = npm("digits@1.0.0", "package/data", tuple(IDX.values()), dict)
    assert source.get(work, quiet) == tiny_parts()
    assert [p.name for p in work.iterdir()] == ["digits-1.0.0.tgz"]
    lacking = npm("digits@1.0.0", "package/data", ("absent",), dict)
    with pytest.raises(FileNotFoundError, match="lacks absent"):
        lacking.get(work, quiet)


def test_debian_package_is_unpacked_by_its_client(tmp_path, monkeypatch):
    content = tmp_path / "tree" / "usr" / "share" / "digits"
    content.mkdir(parents=True)
    for name, raw in tiny_parts().items():
        (content / f"{name}.gz").write_bytes(gzip.compress(raw))
    client(tmp_path, "apt-get", 'touch "$PWD/$2_1_all.deb"')
    client(tmp_path, "dpkg-deb", f'test -f "$2" && cp -r {tmp_path}/tree "$3"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    work = tmp_path / "work"
    work.mkdir()
    assert debian("digits", "usr/share/digits", IDX_GZ, gunzip).get(work, quiet) == tiny_parts()


def test_a_failing_or_absent_client_says_why(tmp_path, monkeypatch):
    client(tmp_path, "npm", "echo 'npm warn old' >&2; echo 'npm error 404 Not Found' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SplitcastError) as caught:
        fetch(
            "mnist",
            tmp_path / "cache",
            recipe=tiny_recipe(npm("digits@1", "package", ("a",), dict), debian("digits", "usr", ("a",), dict)),
            report=quiet,
        )
    assert "npm package digits@1 (npm error 404 Not Found)" in one_line(caught)
    assert "Debian package digits (apt-get is not installed)" in one_line(caught)


def test_both_packings_of_cifar10_give_the_same_arrays():
    rng = np.random.default_rng(0)
    images = {batch: rng.integers(0, 256, (4, 3, 1024), dtype=np.uint8) for batch in CIFAR_BATCHES}
    labels = {batch: rng.integers(0, 10, 4, dtype=np.uint8) for batch in CIFAR_BATCHES}

    binary = {}
    pngs = {}
    for batch in CIFAR_BATCHES:
        rows = np.concatenate([labels[batch][:, None], images[batch].reshape(4, -1)], axis=1)
        binary[f"cifar-10-batches-bin/{batch}.bin"] = rows.tobytes()
        png = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(images[batch].transpose(0, 2, 1))).save(png, "png")
        pngs[f"{batch}.png"] = png.getvalue()
    train = np.concatenate([labels[batch] for batch in CIFAR_BATCHES[:5]])
    pngs[CIFAR_LABELS["train_labels"]] = json.dumps(train.tolist()).encode()
    pngs[CIFAR_LABELS["test_labels"]] = json.dumps(labels["test_batch"].tolist()).encode()

    parts = cifar_binary({"archive": tar_gz(binary)})
    assert parts == cifar_pngs(pngs)
    assert parts.keys() == RECIPES["cifar10"].checksums.keys()
    arrays = RECIPES["cifar10"].arrays(parts)
    assert arrays["train_x"].shape == (20, 3, 32, 32)
    assert np.array_equal(arrays["train_x"][4, 2].ravel(), images["data_batch_2"][0, 2])
    assert np.array_equal(arrays["train_y"], train)
