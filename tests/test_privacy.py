"""Attacks, measures, defences and the accountant: known answers, slow references, floors."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from resuming import resumes_exactly
from splitcast import Config, SplitModel, train, with_values
from splitcast.base.codec import FP32
from splitcast.base.errors import SplitcastError
from splitcast.base.formats import codec
from splitcast.cli.main import main
from splitcast.cost.leakage import Leak, read_leakage, ruled_out, strongest
from splitcast.cost.privacy import ORDERS, gaussian_epsilon, run_epsilon
from splitcast.run.parts import load_data, make_simulator
from splitcast.studies.plan import plan
from splitcast.studies.privacy import broadcast, labels, tokens
from splitcast.studies.privacy.attack import attack
from splitcast.studies.privacy.hijack import hijack
from splitcast.studies.privacy.measures import feature_distance, mse, psnr, ssim
from splitcast.studies.privacy.reconstruct import mean_image, network, optimise, pseudo, unsplit
from splitcast.studies.privacy.view import View, of_engine, sent, view
from splitcast.studies.report.attacked import attack_document
from splitcast.training.correlation import distance_correlation
from splitcast.training.defence import Defence
from splitcast.training.task import Classification
from test_reproduce import saved

SMALL = with_values(Config(), arch="cnn-small", rounds=2, batch=4, clients=3, lr=0.05, eval_every=2)


def blobs(count, size=8, seed=0):
    """Images of one bright square each, whose place is its label."""
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.integers(0, 4, count))
    x = torch.zeros(count, 1, size, size)
    for image, label in zip(x, y.tolist(), strict=True):
        top, left = (size // 2) * (label // 2), (size // 2) * (label % 2)
        image[0, top : top + 4, left : left + 4] = torch.from_numpy(rng.random((4, 4)).astype("f")) + 0.5
    return x, y


def seen_by_server(half, *, dtype=torch.float32, defence=None, count=8, size=8):
    """A view of a client half, with a linear server half behind it."""
    x, y = blobs(count, size)
    own, own_y = blobs(200, size, seed=1)
    torch.manual_seed(0)
    leaves = math.prod(half(x[:1]).shape[1:])
    model = SplitModel([half, nn.Sequential(nn.Flatten(), nn.Linear(leaves, 4))], (1, size, size))
    params = {k: v.to(dtype).requires_grad_() for k, v in model.initial().items()}
    learned = torch.optim.Adam([v for k, v in params.items() if k.startswith("1.")], lr=0.05)
    for _ in range(60):  # a server half that knows its task
        learned.zero_grad()
        nn.functional.cross_entropy(model.forward(params, own.to(dtype), 0, 2), own_y).backward()
        learned.step()
    params = {k: v.detach() for k, v in params.items()}
    client = {k: v for k, v in params.items() if k.startswith("0.")}
    server = {k: v for k, v in params.items() if k.startswith("1.")}
    x, own = x.to(dtype), own.to(dtype)

    def features(some):
        return model.forward(client, some, 0, 1)

    with torch.no_grad():
        smashed = sent(features, defence, FP32, x)
    return View(model, Classification(4), 1, client, server, FP32, x, y, smashed, own, own_y, defence)


# measures


def slow_ssim(x, z, span):
    """Window by window, one channel."""
    at = np.arange(11) - 5
    bell = np.exp(-(at**2) / 4.5)
    window = np.outer(bell, bell) / bell.sum() ** 2
    c1, c2, found = (0.01 * span) ** 2, (0.03 * span) ** 2, []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], z[i : i + 11, j : j + 11]
            ma, mb = (window * a).sum(), (window * b).sum()
            va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
            both = (window * (a - ma) * (b - mb)).sum()
            found.append((2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return np.mean(found)


def test_similarity_is_that_of_a_plain_loop_and_one_for_equal_images():
    rng = np.random.default_rng(0)
    x, z = rng.random((2, 14, 13)), rng.random((2, 14, 13))
    pair = (torch.from_numpy(v)[:, None] for v in (x, z))
    expected = [slow_ssim(a, b, 1.0) for a, b in zip(x, z, strict=True)]
    assert ssim(*pair, 1.0).tolist() == pytest.approx(expected, abs=1e-12)
    one = torch.from_numpy(x)[:, None]
    assert ssim(one, one, 1.0).tolist() == pytest.approx([1.0, 1.0])
    assert ssim(one[..., :5, :5], 1 - one[..., :5, :5], 1.0).max() < 0  # a window that fits


def test_errors_by_hand():
    x, z = torch.zeros(1, 1, 2, 2), torch.tensor([[[[0.0, 2.0], [0.0, 0.0]]]])
    assert mse(x, z).item() == 1.0 and psnr(x, z, 10.0).item() == pytest.approx(20.0)
    assert feature_distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]])).item() == pytest.approx(0.8)


def slow_correlation(x, z):
    def centred(v):
        d = np.array([[np.linalg.norm(a - b) for b in v] for a in v])
        return d - d.mean(0) - d.mean(1)[:, None] + d.mean()

    a, b = centred(x), centred(z)
    return np.sqrt((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def test_distance_correlation_is_that_of_a_plain_loop():
    rng = np.random.default_rng(1)
    x, z = rng.normal(size=(12, 3)), rng.normal(size=(12, 5))
    z[:, 0] += x[:, 0]
    found = distance_correlation(torch.from_numpy(x), torch.from_numpy(z))
    assert float(found) == pytest.approx(slow_correlation(x, z), abs=1e-12)
    several = distance_correlation(torch.from_numpy(np.stack([x, z[:, :3]])), torch.from_numpy(np.stack([z, z])))
    assert several.tolist() == pytest.approx([float(found), slow_correlation(z[:, :3], z)])
    apart = rng.normal(size=(400, 2)), rng.normal(size=(400, 2))
    assert float(distance_correlation(*map(torch.from_numpy, apart))) < 0.15


# attacks with known answers


def test_a_linear_half_is_inverted():
    torch.manual_seed(3)
    half = nn.Sequential(nn.Flatten(), nn.Linear(64, 80))
    seen = seen_by_server(half, dtype=torch.float64)
    assert (optimise(seen, [400])[400] - seen.x).abs().max() < 1e-6
    narrow = seen_by_server(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), dtype=torch.float64)
    assert (optimise(narrow, [500])[500] - narrow.x).abs().max() > 0.1  # six numbers do not hold an image


def test_an_identity_half_is_read_off_and_heavy_noise_leaves_the_floor():
    half = nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        half.weight.fill_(1.0)
        half.bias.fill_(0.0)
    open_, floor = seen_by_server(half), seen_by_server(half)
    assert (optimise(open_, [50])[50] - open_.x).abs().max() < 1e-4
    learned = ssim(open_.x, network(open_, [150])[150], 1.5).mean()
    guess = ssim(floor.x, mean_image(floor), 1.5).mean()
    assert learned > 0.9 > guess
    noisy = seen_by_server(half, defence=Defence(noise=100.0))
    torch.manual_seed(0)
    assert ssim(noisy.x, network(noisy, [100])[100], 1.5).mean() < guess + 0.1
    assert mse(noisy.x, optimise(noisy, [50])[50]).mean() > 10 * mse(noisy.x, mean_image(noisy)).mean()


@pytest.mark.long
def test_attackers_who_do_not_know_the_half_beat_the_mean_image():
    torch.manual_seed(1)
    seen = seen_by_server(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()))
    guess = mse(seen.x, mean_image(seen)).mean()
    assert mse(seen.x, pseudo(seen, [500])[500]).mean() < 0.95 * guess
    assert mse(seen.x, hijack(seen, [150]).looks[150]).mean() < 0.5 * guess
    made = unsplit(seen, [400])[400]
    alike = torch.corrcoef(torch.cat([made, seen.x]).flatten(1))[: len(seen.x), len(seen.x) :].abs()
    others = alike[seen.y[:, None] != seen.y]  # scale and shift are anybody's guess: which image it is, is not
    assert alike.diagonal().mean() > others.mean() + 0.1


def test_labels_follow_from_gradients():
    seen = seen_by_server(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()))
    weight = torch.randn(4, 10)
    y = torch.tensor([0, 1, 2, 3, 1])
    logits = torch.randn(5, 4)
    grads = (logits.softmax(1) - torch.eye(4)[y]) @ weight  # dF/d(features) of a linear head
    known = (torch.full((4, 4), 0.25) - torch.eye(4)) @ weight
    assert labels.by_direction(grads, known, torch.arange(4)).tolist() == y.tolist()
    assert labels.by_clusters(grads, known, torch.arange(4)).tolist() == y.tolist()
    bias = nn.Parameter(torch.zeros(4))
    loss = nn.functional.cross_entropy(torch.randn(1, 4) + bias, torch.tensor([2]))
    assert labels.from_update(torch.autograd.grad(loss, bias)[0]) == 2
    assert labels.by_norm(torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1])) == 0.5
    assert broadcast.gradients(seen, seen.x, seen.y).shape == seen.smashed.shape


def test_tokens_are_found_one_after_the_other():
    torch.manual_seed(0)
    embedding, mix = nn.Embedding(20, 6), nn.Linear(6, 6)

    def features(ids):
        return mix(embedding(ids).cumsum(1)).tanh()

    ids = torch.randint(0, 20, (2, 5))
    with torch.no_grad():
        found = tokens.recover(features, features(ids), 20, batch=7)
    assert tokens.accuracy(found, ids) == 1.0
    assert tokens.accuracy(tokens.recover(features, torch.zeros(2, 5, 6), 20), ids) < 0.6


@pytest.mark.long
def test_a_broadcast_of_one_client_is_its_gradient_and_of_many_hides_it():
    seen = seen_by_server(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()))
    grads = torch.randn(3, 5, 4, 2, 2)
    assert torch.equal(broadcast.mean(grads[:1]), grads[0])
    full = broadcast.basis(15)(grads)  # all directions: nothing is lost
    assert torch.allclose(full, grads[0], atol=1e-4)
    alone, among = (broadcast.overhear(seen, n, broadcast.mean, [200])[200] for n in (1, 20))
    assert mse(seen.x, alone).mean() < mse(seen.x, among).mean()


@pytest.mark.parametrize(
    ("scheme", "heard"), [("sfl", ""), pytest.param("sfl-ga", "mean", marks=pytest.mark.long), ("sfl-gb", "basis")]
)
def test_other_clients_hear_what_a_scheme_broadcasts(scheme, heard):
    config = with_values(Config(), scheme=scheme, arch="cnn-small", batch=4)
    data = load_data(config)
    parts = (data.test_x[:4], data.test_y[:4], data.test_x[4:8], data.test_y[4:8])
    seen = of_engine(make_simulator(config, data), *parts)
    names = ["other clients: mean", "other clients: basis"]
    _, *found = attack(seen, names, effort="quick").rows
    assert [row.possible for row in found] == [heard == "mean", heard == "basis"]


@pytest.mark.parametrize(("scheme", "known"), [("sfl", True), ("sl", True), ("cpsl", True), ("psl", False)])
def test_a_server_that_averages_or_hands_on_halves_knows_them(scheme, known, tmp_path):
    config = with_values(SMALL, scheme=scheme)
    data = load_data(config)
    seen = of_engine(make_simulator(config, data), *(part[:4] for part in (data.test_x, data.test_y) * 2))
    found = attack(seen, ["optimise", "unsplit"], effort="quick")
    assert found.averaged is known
    assert {row.attack: row.possible for row in found.rows} == {"floor": True, "optimise": known, "unsplit": True}
    file = tmp_path / "leakage.json"  # what was found where halves are known says something of such schemes only
    file.write_text(json.dumps(findings(1, "fp32", 0.1) | {"averaged": True}))
    if known:
        train(with_values(config, leakage=str(file), rounds=1))
    else:
        with pytest.raises(SplitcastError, match="fp32 was never attacked"):
            train(with_values(config, leakage=str(file), rounds=1))


# defences


def test_what_a_defence_does_to_smashed_data():
    torch.manual_seed(0)
    values = torch.randn(2, 3, 4, 5, 5)
    clipped = Defence(clip=1.0).guard(values)
    assert torch.linalg.vector_norm(clipped.flatten(2), dim=2).max() <= 1 + 1e-6
    assert torch.equal(Defence(clip=1e6).guard(values), values)
    kept = Defence(drop=0.5, seed=3).guard(values)
    zeros = (kept == 0).all(-1).all(-1).all(0).all(0)
    assert zeros.sum() == 2 and torch.equal(kept[:, :, ~zeros], values[:, :, ~zeros])
    noisy = Defence(noise=2.0).guard(torch.zeros(1, 50, 1000))
    assert float(noisy.std()) == pytest.approx(2.0, rel=0.02)


def test_nopeek_is_the_gradient_of_a_loss_with_the_correlation():
    """One client, one step: plain PyTorch on F + alpha dCor."""
    config = with_values(SMALL, clients=1, scheme="sfl", dtype="float64", rounds=1, **{"defence.nopeek": 3.0})
    plain = train(with_values(config, **{"defence.nopeek": 0.0}))
    ours = train(config)
    engine = ours.engine
    model, rows = engine.model, engine.rows(1, 0, np.arange(1))[0]
    params = {k: v.requires_grad_() for k, v in model.initial(torch.float64).items()}
    x, y = engine.x[rows], engine.y[rows]
    smashed = model.forward(params, x, 0, 1)
    loss = nn.functional.cross_entropy(model.forward(params, smashed, 1, model.depth), y)
    loss = loss + 3.0 * distance_correlation(x.flatten(1), smashed.flatten(1))
    grads = torch.autograd.grad(loss, list(params.values()))
    got = engine.state.averaged(engine.weights)
    for (name, start), grad in zip(params.items(), grads, strict=True):
        assert torch.allclose(got[name], (start - 0.05 * grad).detach(), atol=1e-12), name
    other = plain.engine.state.averaged(plain.engine.weights)
    assert not torch.allclose(got["0.0.weight"], other["0.0.weight"], atol=1e-6)


@pytest.mark.parametrize("scheme", ["sfl", "sfl-ga", "sfl-gb", "sl", "local-loss"])
def test_schemes_train_with_defences_and_a_loose_one_changes_nothing(scheme):
    config = with_values(SMALL, scheme=scheme)
    loose = train(with_values(config, **{"defence.clip": 1e9})).rounds
    assert [r.loss for r in loose] == [r.loss for r in train(config).rounds]
    tight = {"defence.clip": 1.0, "defence.noise": 0.5, "defence.drop": 0.5, "defence.nopeek": 0.1}
    hard = train(with_values(config, **tight)).rounds
    assert all(math.isfinite(r.loss) for r in hard) and hard[0].loss != loose[0].loss
    assert [r.kinds.keys() for r in hard] == [r.kinds.keys() for r in loose]


def test_a_defence_needs_smashed_data():
    with pytest.raises(SplitcastError, match="defence: needs a scheme that sends smashed data"):
        train(with_values(SMALL, scheme="fl", **{"defence.noise": 1.0}))


def test_defended_runs_resume_bit_exactly(tmp_path):
    config = with_values(SMALL, scheme="sfl", rounds=4, checkpoint_every=2, **{"defence.noise": 0.3})
    resumes_exactly(config, tmp_path / "half", stop_at=3)


# the accountant


def test_epsilon_is_that_of_opacus_and_grows_as_noise_falls():
    opacus = pytest.importorskip("opacus.accountants.analysis.rdp")
    for clip, noise, releases in ((1.0, 4.0, 1), (1.0, 20.0, 50), (2.0, 3.0, 7)):
        divergence = opacus.compute_rdp(q=1.0, noise_multiplier=noise / (2 * clip), steps=releases, orders=list(ORDERS))
        theirs, _ = opacus.get_privacy_spent(orders=list(ORDERS), rdp=divergence, delta=1e-5)
        assert gaussian_epsilon(clip, noise, releases) == pytest.approx(float(theirs), rel=1e-9)
        assert gaussian_epsilon(clip, noise / 2, releases) > gaussian_epsilon(clip, noise, releases)
    assert gaussian_epsilon(0.0, 1.0, 1) == gaussian_epsilon(1.0, 0.0, 1) == math.inf


def test_epsilon_of_a_run_is_that_of_a_sample_sent_in_every_step(tmp_path):
    """Two rounds of three steps: six releases; the same weights sent once through another wire: one."""
    config = with_values(SMALL, scheme="sfl", local_steps=3, **{"defence.clip": 1.0, "defence.noise": 4.0})
    train(config, tmp_path)
    seen = view(tmp_path, 4, 10)
    assert attack(seen, ["unsplit"], effort="quick").as_json()["epsilon"] == gaussian_epsilon(1.0, 4.0, 6)
    assert seen.at(1, defence=Defence(clip=1.0, noise=2.0)).epsilon == gaussian_epsilon(1.0, 2.0, 1)
    assert seen.at(1).epsilon is None and run_epsilon(SMALL, 2) is None


def test_epsilon_is_no_less_than_the_exact_one():
    """Balle and Wang, ICML 2018: delta(eps) of one Gaussian release, exactly."""

    def exact(mu, delta):
        def phi(t):
            return 0.5 * math.erfc(-t / math.sqrt(2))

        low, high = 0.0, 200.0
        for _ in range(100):
            eps = (low + high) / 2
            spent = phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)
            low, high = (eps, high) if spent > delta else (low, eps)
        return high

    for noise in (2.0, 4.0, 10.0):
        ours, truth = gaussian_epsilon(1.0, noise, 1), exact(2 / noise, 1e-5)
        assert truth <= ours <= 1.25 * truth


# the command


def test_attack_a_run(tmp_path, capsys):
    run = tmp_path / "run"
    train(with_values(SMALL, scheme="sfl", arch="cnn", rounds=1), run)
    few = ["--quick", "--samples", "4", "--auxiliary", "40", "--attacks", "optimise"]
    main(["attack", str(run), *few, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["attack"] for row in found["rows"]] == ["floor", "optimise"]
    by_name = {row["attack"]: row for row in found["rows"]}
    assert by_name["optimise"]["ssim"] > 0.9 > by_name["floor"]["ssim"]  # cut 1 and a known half: all is there
    assert found["labels"]["direction"] >= found["labels"]["guess"]
    assert (run / "attack.png").stat().st_size > 1000 and json.loads((run / "attack.json").read_text()) == found
    main(["verify", str(run)])
    assert "ok" in capsys.readouterr().out
    shown = attack_document(run)
    assert shown["labels"] == [[how, share] for how, share in found["labels"].items()] and len(shown["rows"]) == 2
    text = {"cut": 1, "codec": "fp32", "samples": 4, "correlation": None, "rows": [], "labels": {"tokens": 0.5}}
    (run / "attack.json").write_text(json.dumps(text))
    assert attack_document(run)["labels"] == [["tokens", 0.5]]
    (run / "attack.json").write_text(json.dumps(text | {"labels": {"tokens": 7}}))
    assert attack_document(run) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--attacks", "magic"], "attacks: unknown 'magic'"),
        (["RUN", "--samples", "0"], "samples: 0; choose 2..100000"),
        (["RUN", "--client", "9"], "client: 9; choose 0..2"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words, said):
    run = tmp_path / "run"
    train(with_values(SMALL, rounds=1), run)
    with pytest.raises(SystemExit) as stopped:
        main(["attack", *(str(run) if word == "RUN" else word for word in words)])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and said in err and len(err.strip().splitlines()) == 1
    assert not (run / "attack.json").exists()


def test_a_run_without_smashed_data_is_refused(tmp_path, capsys):
    train(with_values(SMALL, scheme="fl", rounds=1), tmp_path / "fl")
    with pytest.raises(SystemExit):
        main(["attack", str(tmp_path / "fl")])
    assert "fl sends no smashed data" in capsys.readouterr().err


def test_only_known_attacks():
    seen = seen_by_server(nn.Conv2d(1, 2, 3))
    with pytest.raises(SplitcastError, match="attacks: unknown 'x'"):
        attack(replace(seen), ["x"])


# plans under measured privacy


def findings(cut, codec, ssim, possible=True):
    """What `splitcast attack` writes of a run, as far as plans read it."""
    row = {"attack": "optimise", "ssim": ssim, "possible": possible}
    return {"cut": cut, "codec": codec, "rows": [{"attack": "floor", "ssim": 0.9, "possible": True}, row]}


@pytest.mark.long
def test_a_plan_keeps_to_what_attacks_allow(tmp_path, capsys):
    file = tmp_path / "leakage.json"
    file.write_text(json.dumps([findings(1, "fp32", 0.99), findings(2, "fp32", 0.2), findings(4, "fp32", 0.1)]))
    words = ["plan", "--arch", "cnn-small", "--draws", "3", "--out", str(tmp_path), "--leakage", str(file)]
    main([*words, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert [row["allowed"] for row in made["cuts"]] == [False, True, False, True] and made["best_cut"] == 2
    assert made["cuts"][0]["leak"] == "fp32 SSIM 0.990 by optimise is above 0.3"
    assert made["cuts"][2]["leak"] == "fp32 was never attacked" and made["cuts"][1]["leak"] == ""
    main(words)
    assert "ruled out: cut 1, fp32 SSIM 0.990" in capsys.readouterr().out
    main([*words, "--max-ssim", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["best_cut"] == 1
    with pytest.raises(SystemExit):
        main([*words, "--max-ssim", "0.05"])
    assert "leakage: leaves no cut (cut 1: fp32 SSIM 0.990" in capsys.readouterr().err
    config = with_values(SMALL, leakage=str(file))
    with pytest.raises(SplitcastError, match="cut: 1 is ruled out by .*: fp32 SSIM 0.990 by optimise"):
        train(config)
    assert train(with_values(config, cut=2, rounds=1)).rounds[0].cut == 2
    assert {r.cut for r in train(with_values(config, policy="greedy")).rounds} <= {2, 4}


def test_a_plan_takes_the_best_pair_of_cut_and_codec_that_attacks_allow(tmp_path, capsys):
    file = tmp_path / "leakage.json"
    pairs = {(1, "fp32"): 0.9, (1, "int2"): 0.2, (2, "fp32"): 0.2, (2, "int2"): 0.5, (3, "os:getcwd"): 0.0}
    file.write_text(json.dumps([findings(*pair, ssim) for pair, ssim in pairs.items()]))
    config = with_values(SMALL, scheme="sfl", leakage=str(file))
    made = plan(config, draws=3)
    found = {(row.cut, row.codec): row for row in made.pairs}
    assert len(made.pairs) == 2 * 4  # a file names formats, no code
    assert {pair: row.ssim for pair, row in found.items() if row.ssim is not None} == {
        pair: ssim for pair, ssim in pairs.items() if pair[1] != "os:getcwd"
    }
    assert {pair for pair, row in found.items() if row.allowed} == {(1, "int2"), (2, "fp32")}
    assert found[2, "int2"].leak == "int2 SSIM 0.500 by optimise is above 0.3" and found[2, "int2"].attack == "optimise"
    alone = {codec: plan(with_values(SMALL, scheme="sfl", uplink_codec=codec), draws=3) for codec in ("fp32", "int2")}
    costs = {(row.cut, codec): row.objective for codec, each in alone.items() for row in each.cuts}
    assert {pair: row.objective for pair, row in found.items()} == pytest.approx(costs)
    best = min([(1, "int2"), (2, "fp32")], key=costs.__getitem__)
    assert (made.best.cut, made.best.codec) == best == (1, "int2")
    assert [(row.cut, row.codec) for row in made.cuts[:2]] == [(1, "int2"), (2, "fp32")]
    asked = plan(with_values(config, uplink_codec="fp32"), draws=3)
    assert (asked.best.cut, asked.best.codec) == (2, "fp32") and len(asked.pairs) == 4
    words = ["plan", "--arch", "cnn-small", "--scheme", "sfl", "--draws", "1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([*words, "--leakage", str(file), "--max-ssim", "0.1"])
    err = capsys.readouterr().err
    assert "leaves no cut (cut 1: fp32 SSIM 0.900" in err and "cut 2: int2 SSIM 0.500" in err


def test_tokens_that_were_found_count_where_the_half_is_known(tmp_path):
    text = {"cut": 1, "codec": "fp32", "rows": [], "labels": {"tokens guessed": 0.1, "tokens": 0.8}, "averaged": True}
    file = tmp_path / "attack.json"
    file.write_text(json.dumps(text))
    assert read_leakage(file) == [Leak(1, "fp32", 0.8, "tokens", averaged=True)]
    with pytest.raises(SplitcastError, match="cut: 1 is ruled out by .*: fp32 80.0% of the tokens is above 0.3"):
        train(with_values(SMALL, scheme="sfl", leakage=str(file)))
    file.write_text(json.dumps(text | {"averaged": False}))
    assert read_leakage(file) == []  # nobody could mount it
    with pytest.raises(SplitcastError, match="fp32 was never attacked"):
        train(with_values(SMALL, scheme="psl", leakage=str(file)))


@pytest.mark.parametrize("content", ["", "[]", "{}", "[1]", '[{"cut": "1", "codec": "fp32", "rows": []}]', "[" * 5000])
def test_a_damaged_file_of_leaks_is_one_line(tmp_path, content):
    file = tmp_path / "leakage.json"
    file.write_text(content)
    with pytest.raises(SplitcastError, match="leakage: "):
        train(with_values(SMALL, leakage=str(file)))


def test_attacks_that_a_server_cannot_mount_do_not_count(tmp_path):
    file = tmp_path / "leakage.json"
    file.write_text(
        json.dumps(
            [
                findings(1, "fp32", 0.99, possible=False)
                | {
                    "rows": [
                        {"attack": "optimise", "ssim": 0.99, "possible": False},
                        {"attack": "unsplit", "ssim": 0.1, "possible": True},
                    ]
                }
            ]
        )
    )
    assert train(with_values(SMALL, leakage=str(file), rounds=1)).rounds[0].cut == 1


@pytest.mark.long
def test_the_study_attacks_every_training_once(tmp_path, monkeypatch):
    from splitcast.studies.reproduce import privacy
    from splitcast.studies.reproduce.study import Study

    monkeypatch.setattr(privacy, "QUICK", ("sfl", "sfl-ga"))
    monkeypatch.setattr(privacy, "SAMPLES", {False: 4})
    monkeypatch.setattr(privacy, "AUXILIARY", {False: 20})
    monkeypatch.setattr(privacy, "HELD_OUT", {False: 20})
    study = Study(with_values(SMALL, rounds=2, checkpoint_every=2), (0,), tmp_path, full=False)
    first = privacy.draw(study)
    saved(first, tmp_path, "privacy")
    assert {row["variant"] for row in first.rows} == {"sfl", "sfl-ga"} and {row["cut"] for row in first.rows} == {1, 3}
    assert [claim.verdict for claim in first.claims] == [claim.verdict for claim in privacy.draw(study).claims]
    kept = tmp_path / "mnist-mini" / "leakage.json"
    assert len(json.loads(kept.read_text())) == 4
    made = plan(with_values(SMALL, scheme="sfl", leakage=str(kept), max_ssim=1.0), draws=1)
    assert [row.allowed for row in made.cuts] == [True, False, True, False]  # others were never attacked
    folder = tmp_path / "mnist-mini"
    assert (folder / "privacy.md").read_text().count("| sfl") == 2 * 4 and (folder / "privacy-images.png").is_file()


def test_leaks_count_for_their_model_defence_and_knowledge_only():
    leaks = [
        Leak(1, "fp32", 0.9, "optimise", "cnn", "", True),
        Leak(1, "fp32", 0.2, "pseudo", "cnn", "", False),
        Leak(1, "fp32", 0.1, "network", "cnn", "noise 1", True),
        Leak(1, "fp32", 0.8, "network", "resnet8", "", True),
    ]

    def why(**same):
        return ruled_out(strongest(leaks, 1, "fp32", **same), 0.3)

    assert why(arch="cnn", averaged=True) == "SSIM 0.900 by optimise is above 0.3"
    assert why(arch="cnn", averaged=False) == why(arch="cnn", defence="noise 1", averaged=True) == ""
    assert why(arch="resnet8", averaged=True) == "SSIM 0.800 by network is above 0.3"
    assert why(arch="resnet8", averaged=False) == "was never attacked"


# the same weights, seen elsewhere


def test_sfl_learns_the_same_at_every_cut_so_one_training_shows_all(tmp_path):
    """What the server sees at cut 3 of a run trained at cut 3, and of the one trained at cut 1 when cut there."""
    for cut in (1, 3):
        train(with_values(SMALL, scheme="sfl", cut=cut), tmp_path / str(cut))
    first, third = (view(tmp_path / str(cut), 4, 10) for cut in (1, 3))
    moved = first.at(3)
    assert moved.smashed.shape == third.smashed.shape and float(third.smashed.std()) > 0.01
    assert torch.allclose(moved.smashed, third.smashed, atol=1e-5)
    assert moved.accuracy(first.auxiliary, first.auxiliary_y) == third.accuracy(third.auxiliary, third.auxiliary_y)
    coarse, noisy = first.at(1, codec("int2")), first.at(1, defence=Defence(noise=1.0))
    assert torch.equal(coarse.smashed, codec("int2").through(first.smashed[None])[0])
    assert noisy.guard == "noise 1" and float((noisy.smashed - first.smashed).std()) == pytest.approx(1.0, rel=0.1)


def test_budgets_are_looks_at_one_attack():
    seen = seen_by_server(nn.Conv2d(1, 4, 3, padding=1))
    for method in (unsplit, optimise):
        both, alone = method(seen, [4, 8]), method(seen, [4])
        assert list(both) == [4, 8] and torch.equal(both[4], alone[4]) and not torch.equal(both[4], both[8])


def test_unsplit_leaves_its_start_though_the_half_has_no_biases():
    """A half that begins with biases of zero gives zeros, and no gradients, for an image of zeros."""
    half = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
    nn.init.zeros_(half[0].bias)
    looks = unsplit(seen_by_server(half), [1, 100])
    assert (looks[100] - looks[1]).abs().mean() > 0.1
