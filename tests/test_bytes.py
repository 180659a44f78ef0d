"""Bytes to an accuracy: images as messages, transform-coded SFL, and what the study makes of its trainings."""

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.data import load
from splitcast.run.loop import train
from splitcast.run.parts import make_simulator, resolved
from splitcast.schemes.schemes import make_scheme
from splitcast.studies.reproduce import bytes as study_of_bytes
from splitcast.studies.reproduce.bytes import BUDGET, Found, judged, row, search, sized
from splitcast.studies.reproduce.methods import POOL, SEARCH, STEPS, Method, Setting, methods
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


def test_gzip_ends_where_its_images_do(digits):
    payload = images("Gzip").encode(digits)
    for spoiled in (torch.cat([payload, payload[:1]]), payload[:-1]):
        with pytest.raises(SplitcastError):
            images("Gzip").decode(spoiled, digits.shape)


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
    assert (written.split.uplink_codec, written.split.sync_codec, written.sfl_gb.rank) == ("transform:5%", "int4", 16)
    again = make_scheme(with_values(written, scheme="sfl-gb"))
    assert again.uplink.name == "transform:5%" and again.sync.name == "int4" and again.sync_every == 2


class Told(Study):
    """A study whose trainings are made up by their learning rate and momentum."""

    def run(self, **values):
        asked.append(values)
        if values["lr"] < 0.01:
            raise SplitcastError("loss: no longer a number")
        quick = values.get("local_steps", 1) == 4
        return [record(1, 0.5), record(2, 0.99 if quick else 0.91, megabytes=2.0 + values["seed"])]


asked: list[dict] = []


def test_the_best_of_the_search_trains_with_all_seeds(tmp_path):
    asked.clear()
    study = Told(TINY, (0, 1), tmp_path, full=True)
    found = search(study, Method({"scheme": "sfl"}), (0.9, 0.95, 0.98))
    assert found.setting == Setting(0.02, 0.9, 4), "all take as many bytes to 90 %, and this one is the highest"
    assert [values["seed"] for values in asked] == [0] * len(SEARCH) + [0, 1]
    assert {values["stop_at"] for values in asked} == {0.98} and {values["rounds"] for values in asked} == {1}
    assert sorted(values["local_steps"] for values in asked) == [1, 1, 1, 4, 4, 4]
    cells = row(found, (0.9, 0.995))
    assert (cells["MB_to_90"], cells["MB_to_90_least"], cells["MB_to_90_most"]) == (3.5, 3.0, 4.0)
    assert cells["MB_to_99.5"] == "" and cells["best_percent"] == pytest.approx(99) and cells["MB_sent"] == 3.5


def test_who_is_not_at_the_first_target_with_the_first_seed_trains_with_no_other(tmp_path):
    asked.clear()
    study = Told(TINY, (0, 1, 2), tmp_path, full=True)
    found = search(study, Method({"scheme": "sfl"}), (0.995, 0.996, 0.997))
    assert [values["seed"] for values in asked] == [0] * len(SEARCH) + [0]
    assert row(found, (0.995,))["seeds"] == 1 and row(found, (0.995,))["MB_to_99.5"] == ""


ALL = sized(load("mnist-mini")) / 1e6


class Slow(Study):
    """Each of the first 25 rounds sends a tenth of the budget but a little, and learns nothing."""

    def run(self, **values):
        asked.append(values)
        sent = [0.099 * BUDGET * ALL if t <= 25 else 0.0 for t in range(1, values["rounds"] + 1)]
        return [record(t, 0.5, megabytes=one) for t, one in enumerate(sent, 1)]


@pytest.mark.parametrize(("rounds", "alone", "last"), [(100, 0, 20), (8, 0, 8), (100, 3, 13), (300, 0, 300)])
def test_a_training_ends_with_the_part_in_which_its_bytes_are_beyond_the_budget(tmp_path, rounds, alone, last):
    """Ten rounds are not beyond it, eleven are: of 100 in ten parts 20 are trained, of 8 all, of ten after three alone
    13; and who has ceased to send when a part ends goes on."""
    asked.clear()
    study = Slow(with_values(TINY, rounds=rounds), (0,), tmp_path, full=True)
    found = search(study, Method({"scheme": "sfl"}, alone=alone), (0.9, 0.95, 0.98))
    assert len(found.runs[0]) == asked[-1]["rounds"] == last


def test_all_images_gzipped_are_as_many_as_their_mean_says():
    data = load("mnist-mini")
    few = [len(images("Gzip").encode(data.train_x[k : k + 64])) for k in range(0, 1280, 64)]
    assert sized(data) == pytest.approx(sum(few) / 1280 * len(data.train_y), rel=1e-12)


def test_methods_with_a_pool_send_every_sample_once(tmp_path):
    asked.clear()
    search(Told(TINY, (0,), tmp_path, full=False), Method({"scheme": "sfl-replay"}, "sfl-replay"), (0.9, 0.95))
    values = asked[0]
    assert values["sfl-replay.samples"] == len(load("mnist-mini").train_y) // 10
    assert values["sfl-replay.steps"] == 20 and "local_steps" not in values


def test_steps_at_home_are_many_and_one_batch_of_them_goes_up():
    known = methods()
    sage = Setting(0.02, 0.9, 4).values(known["fsl-sage"])
    assert sage["local_steps"] == sage["fsl-sage.every"] == sage["fsl-sage.align_every"] == 20
    assert Setting(0.02, 0.9, 1).values(known["cse-fsl"])["cse-fsl.every"] == 5
    assert Setting(0.02, 0.9, 4).values(known["fl"]) == {"lr": 0.02, "momentum": 0.9, "local_steps": 20}
    assert Setting(0.02, 0.9, 4).values(known["sfl"])["local_steps"] == 4
    assert Setting(0.02, 0.9, 4).values(known["ampere"]) == {"lr": 0.02, "momentum": 0.9, "ampere.steps": 80}


@pytest.mark.parametrize("dataset", study_of_bytes.TARGETS)
def test_all_methods_can_be_trained_and_first_layers_learn_where_they_must(dataset):
    for method in methods(dataset).values():
        scheme = make_scheme(with_values(Config(), **method.values, **Setting(0.02, 0.9, 4).values(method)))
        assert not method.alone or (not scheme.fresh(method.alone) and scheme.fresh(method.alone + 1))
    values = methods(dataset)[POOL].values
    assert (values.get("sfl-replay.learn") == "local") == (not dataset.startswith("mnist"))


def test_png_is_the_training_of_gzip_with_its_own_bytes():
    data, gzip_ = load("mnist-mini"), [record(1, 0.5, 2.0), record(2, 0.9, 0.0)]
    (png,) = study_of_bytes._as_png(Found(Setting(0.02, 0.0, 1), [gzip_]), data).runs
    each = [len(images(kind).encode(data.train_x[:64])) for kind in ("Gzip", "Png")]
    assert png[0].bytes == png[0].kinds["up.smashed"] == pytest.approx(2e6 * each[1] / each[0], rel=0.02)
    assert png[1] == gzip_[1]


def found_with(megabytes, samples, accuracy=0.95):
    """Trainings of one round, of so many MB with each seed."""
    records = [record(1, accuracy, each) for each in megabytes]
    for one in records:
        one.kinds["up.labels"] = samples
    return Found(Setting(0.02, 0.0, 1), [[one] for one in records])


def test_claims_are_judged_by_seeds():
    """MB of three seeds; in all 1 MB for 10,000 samples is 100 B each, of images 900 B."""
    all_ = {
        STEPS: found_with((3.0, 3.1, 3.2), 10_000),
        POOL: found_with((1.0, 1.1, 0.9), 10_000),
        "sfl": found_with((800.0, 810.0, 805.0), 10_000),
        "images, gzip": found_with((9.0, 9.0, 9.1), 10_000),
        "images, png": found_with((1.0, 0.9, 1.1), 10_000),
    }

    def verdicts(found):
        return {claim.paper: claim for claim in judged("IID", "mnist", found, 9.7)}

    by = verdicts({**all_, "images, png": found_with((9.5, 9.6, 9.5), 10_000)})
    assert by["ours, IID: fewest bytes of all to 94 %"].verdict == "holds"
    assert "images, gzip 9.03 ± 0.14" in by["ours, IID: fewest bytes of all to 94 %"].measured
    assert by["ours, IID: fewest bytes of all to 96.5 %"].measured == "ours does not get there"
    assert by["ours, step by step, IID: to 94 % with less than the gzipped training set"].verdict == "holds"
    assert by["ours, replay, IID: to 94 % with less than 1.6 MB"].verdict == "holds"
    assert by["ours, replay, IID: to 98 % with less than 5.5 MB"].verdict == "does not hold"  # nobody is there
    below = by["ours by replay, IID: below the images of the samples sent, gzip"]
    assert below.verdict == "holds" and below.measured.startswith("100 ± 25 B a sample in all, the image 903")
    close = verdicts(all_)
    assert close["ours, IID: fewest bytes of all to 94 %"].verdict == "ties"
    assert close["ours by replay, IID: below the images of the samples sent, png"].verdict == "ties"
    lost = {**all_, "images, png": found_with((9.5, 9.6, 9.5), 10_000), "ampere": found_with((0.1,), 10_000, 0.93)}
    assert verdicts(lost)["ours, IID: fewest bytes of all to 94 %"].verdict == "holds", "it never got there"
    beaten = verdicts({**all_, "ampere": found_with((0.5, 0.5, 0.51), 10_000)})
    assert beaten["ours, IID: fewest bytes of all to 94 %"].verdict == "does not hold"
    four = {"sfl": replace(found_with((800.0, 810.0, 805.0), 10_000), setting=Setting(0.02, 0.9, 4))}
    than = verdicts({**all_, **four, POOL: found_with((40.2, 40.3, 40.2), 10_000, 0.97)})
    ours = next(claim for name, claim in than.items() if "200 rounds of one local step, 1000 times" in name)
    assert ours.measured.endswith(f"of {805 / 4 * 200 / 1000:.3g}") and ours.verdict == "ties"


def test_points_lost_are_those_of_the_last_test_of_every_seed():
    def run(*lost):
        return [replace(record(t, 0.97), metrics={"test_accuracy_lost": each}) for t, each in enumerate(lost, 1)]

    found = Found(Setting(0.02, 0.0, 1), [run(0.2, 0.003), run(0.2, 0.001), run(0.2, 0.002)])
    cells = row(found, (0.9,))
    assert [cells[f"points_lost{part}"] for part in ("", "_least", "_most")] == pytest.approx([0.2, 0.1, 0.3])
    assert row(found_with((1.0,), 10), (0.9,))["points_lost"] == ""
    rest = {name: found_with((9.0, 9.0, 9.0), 10) for name in ("images, gzip", "images, png", "sfl", STEPS)}
    by = {claim.paper: claim for claim in judged("IID", "mnist", {**rest, POOL: found}, 9.7)}
    claim = by[f"{POOL}, IID: testing through the format costs at most 0.5 points"]
    assert claim.verdict == "holds" and claim.measured == "0.20 ± 0.25 points"


def test_every_data_set_has_three_targets():
    assert all(len(targets) == 3 and list(targets) == sorted(targets) for targets in study_of_bytes.TARGETS.values())
