"""Bytes to an accuracy: images as messages, transform-coded SFL, and what the study makes of its trainings."""

import gzip

import numpy as np
import pytest
import torch

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.data import load
from splitcast.run.loop import make_simulator, resolved, train
from splitcast.schemes.schemes import make_scheme
from splitcast.studies.reproduce import bytes as study_of_bytes
from splitcast.studies.reproduce.bytes import POOL, SEARCH, STEPS, Found, Method, Setting, judged, row, search
from splitcast.studies.reproduce.study import Study
from test_federation import IMAGES, Wired, difference, federation
from test_reproduce import TINY, record

RAW = "splitcast.studies.reproduce.raw"


def images(kind):
    return codec(f"{RAW}:{kind}")


@pytest.fixture(scope="module")
def digits():
    return load("mnist-mini").train_x[:32]


@pytest.mark.parametrize("kind", ["Gzip", "Png"])
def test_images_arrive_as_they_were(kind, digits):
    payload = images(kind).encode(digits)
    assert torch.allclose(images(kind).decode(payload, digits.shape), digits, rtol=0, atol=1e-4)
    assert len(payload) <= images(kind).bound(digits.shape)


def test_gzip_is_gzip_of_the_pixels(digits):
    low, step = float(digits.min()), float(digits.unique().diff().min())
    pixels = np.rint((digits.numpy() - low) / step).astype(np.uint8)
    assert pixels.max() == 255
    head, wrapping = 8, 18 - 6  # two fp32; gzip's own head and tail are longer than zlib's
    assert len(images("Gzip").encode(digits)) == len(gzip.compress(pixels.tobytes(), 9)) - wrapping + head


def test_jpeg_takes_less_and_loses_a_little(digits):
    payload = images("Jpeg").encode(digits)
    lost = (images("Jpeg").decode(payload, digits.shape) - digits).square().mean() / digits.var()
    assert 0.001 < float(lost) < 0.05
    assert len(payload) < len(images("Gzip").encode(digits))


def test_colours_keep_their_places():
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (4, 3, 5, 6))).float()
    shifted = pixels * torch.tensor([0.5, 1.0, 2.0]).view(3, 1, 1) - 3
    for kind in ("Gzip", "Png"):
        assert torch.allclose(images(kind).decode(images(kind).encode(shifted), shifted.shape), shifted, atol=1e-4)


@pytest.mark.parametrize("kind", ["Gzip", "Png", "Jpeg"])
@pytest.mark.parametrize("spoil", [lambda p: p[:4], lambda p: p[:40], lambda p: p[:8], lambda p: p.flip(0)])
def test_what_is_no_image_is_refused(kind, spoil, digits):
    payload = images(kind).encode(digits)
    with pytest.raises(SplitcastError):
        images(kind).decode(spoil(payload), digits.shape)


def test_images_of_another_size_are_refused(digits):
    for kind in ("Gzip", "Png", "Jpeg"):
        with pytest.raises(SplitcastError):
            images(kind).decode(images(kind).encode(digits[:16]), digits.shape)


def test_what_are_no_images_are_not_sent():
    with pytest.raises(SplitcastError, match="no images"):
        images("Gzip").encode(torch.rand(2, 1, 4, 4))


def test_sending_images_is_centralised_training_on_them():
    """The server's half is the whole network, and learns from the very pixels."""
    own = {"sfl-replay.samples": 16, "sfl-replay.steps": 2, "sfl-replay.minibatch": 8}
    config = with_values(Config(), scheme="sfl-replay", clients=3, batch=8, arch=f"{RAW}:small", **own)
    by = {name: make_simulator(with_values(config, uplink_codec=name), IMAGES) for name in ("fp32", f"{RAW}:Gzip")}
    losses = {name: [sim.round(t).loss for t in (1, 2, 3)] for name, sim in by.items()}
    assert losses["fp32"] == pytest.approx(losses[f"{RAW}:Gzip"], abs=1e-4)
    assert not by["fp32"].state.client.params


TC = {"clients": 3, "batch": 8, "arch": "cnn-small", "scheme": "sfl-tc"}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_transform_coded_sfl_on_sites_is_that_of_the_simulator(cut):
    config = with_values(Config(), **TC, cut=cut)
    fed, sim = federation(config, Wired(3)), make_simulator(config, IMAGES)
    for t in (1, 2, 3, 4):
        assert fed.round(t).ledger.messages == sim.round(t).ledger.messages
    assert difference(fed, sim) < 1e-6


def test_transform_coded_sfl_is_basis_broadcast_with_other_formats():
    plain = {"uplink_codec": "fp32", "downlink_codec": "fp32", "sync_codec": "fp32", "sync_every": 1, "sfl-gb.rank": 4}
    found = [
        train(with_values(Config(), **{**TC, "scheme": s}, rounds=3, **plain)).rounds for s in ("sfl-tc", "sfl-gb")
    ]
    assert [r.loss for r in found[0]] == [r.loss for r in found[1]]
    assert [r.kinds for r in found[0]] == [r.kinds for r in found[1]]


def test_a_record_of_transform_coded_sfl_says_what_it_took():
    written = resolved(with_values(Config(), scheme="sfl-tc", cut=2))
    assert (written.split.uplink_codec, written.split.sync_codec, written.sfl_gb.rank) == ("transform:10%", "int4", 8)
    again = make_scheme(with_values(written, scheme="sfl-gb"))
    assert again.uplink.name == "transform:10%" and again.sync.name == "int4" and again.sync_every == 2


class Told(Study):
    """A study whose trainings are made up by their learning rate and momentum."""

    def run(self, **values):
        asked.append(values)
        if values["lr"] > 0.04:
            raise SplitcastError("loss: no longer a number")
        quick = values["momentum"] > 0 and values.get("local_steps", 1) == 1
        return [record(1, 0.5), record(2, 0.99 if quick else 0.91, megabytes=2.0 + values["seed"])]


asked: list[dict] = []


def test_the_best_of_the_search_trains_with_all_seeds(tmp_path):
    asked.clear()
    study = Told(TINY, (0, 1), tmp_path, full=True)
    found = search(study, Method({"scheme": "sfl"}), (0.9, 0.95, 0.98), {"partition": "iid"})
    assert found.setting == Setting(0.02, 0.9, 1)
    assert [values["seed"] for values in asked] == [0] * len(SEARCH) + [1]
    assert {values["stop_at"] for values in asked} == {0.98} and {values["rounds"] for values in asked} == {8}
    assert sorted(values["local_steps"] for values in asked) == [1, 1, 1, 1, 4]
    cells = row(found, (0.9, 0.995))
    assert (cells["MB_to_90"], cells["MB_to_90_least"], cells["MB_to_90_most"]) == (3.5, 3.0, 4.0)
    assert cells["MB_to_99.5"] == "" and cells["best_percent"] == pytest.approx(99) and cells["MB_sent"] == 3.5


def test_methods_with_a_pool_send_every_sample_once(tmp_path):
    asked.clear()
    search(Told(TINY, (0,), tmp_path, full=False), Method({"scheme": "sfl-replay"}, "sfl-replay"), (0.9, 0.95), {})
    (values,) = asked
    assert values["sfl-replay.samples"] == len(load("mnist-mini").train_y) // 10
    assert values["sfl-replay.steps"] == 20 and "local_steps" not in values


def test_claims_say_who_needs_fewest():
    setting, sent = Setting(0.02, 0.0, 1), {"up.smashed": 100, "up.labels": 2}

    def found(megabytes, accuracy=0.95):
        record_ = record(1, accuracy, megabytes)
        record_.kinds.update(sent)
        return Found(setting, [[record_]])

    all_ = {STEPS: found(3.0), POOL: found(1.0), "sfl": found(800.0), "images, gzip": found(9.0)}
    fewest, _, below = judged("IID", all_, (0.94, 0.96))
    assert fewest.verdict == "holds" and "800x below sfl" in fewest.measured
    assert below.verdict == "does not hold" and "50 B a sample against 50 B" in below.measured
    beaten, never, _ = judged("IID", {**all_, "ampere": found(0.5)}, (0.94, 0.96))
    assert beaten.verdict == "does not hold" and "ampere 0.5" in beaten.measured
    assert never.verdict == "does not hold" and "does not get there" in never.measured


def test_every_data_set_has_three_targets():
    assert all(len(targets) == 3 and list(targets) == sorted(targets) for targets in study_of_bytes.TARGETS.values())
