"""The deployment for real: mTLS kits, FLARE processes on loopback, and what a user sees when something is wrong."""

import json
import os
import signal
import socket
import ssl
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare")
import psutil

from failures import free_port
from flare_lab import DOCUMENTED, LIES, SCHEMES, comparable, documented, texts
from killing import lines
from splitcast.base.config import Config, to_toml, with_values
from splitcast.cli.main import main
from splitcast.deploy import console, processes, supervise
from splitcast.deploy.console import Operator
from splitcast.deploy.kits import make_kits
from splitcast.deploy.settings import LimitConfig, load_deployment
from splitcast.engine.state import State
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from splitcast.run.verify import verify
from test_docs import fenced
from waiting import PATIENCE_S, wait_for

MODULES = ("my_scheme", "my_home", "my_codec", "my_task", "my_optimiser", "my_model")
"""What `docs/extend.md` writes."""
CONFIG = with_values(Config(), clients=2, rounds=10, batch=8, arch="cnn-small", local_steps=2, momentum=0.5)


def write_deployment(path, port, sites=("site-1", "site-2"), limits=""):
    allowed = f"imports = {json.dumps(['transformers', *MODULES])}"
    lines = ["[server]", f"port = {port}", allowed, "[limits]", "call_timeout_s = 120", limits]
    for n, name in enumerate(sites):
        lines += [f"[sites.{name}]", f'data = "part:{n}"', allowed]
    path.write_text("\n".join(lines) + "\n")
    return path


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["deploy", *map(str, args)])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def left_behind(folder):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(str(folder) in a for a in p.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A running deployment with two sites, which find the documented modules and may import them."""
    folder = tmp_path_factory.mktemp("deployment") / "kits"
    for block in fenced("extend.md", "python"):
        name = block.splitlines()[0].removeprefix("# ")
        if name.removesuffix(".py") in MODULES:
            (folder.parent / name).write_text(block, encoding="utf-8")
    make_kits(write_deployment(folder.parent / "d.toml", free_port(), limits="drop_after = 10"), folder, ["flare_lab."])
    paths = [str(Path(__file__).parent), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(folder.parent))
        try:
            processes.start(folder)
            with Operator(folder) as operator:
                supervise.wait_for_sites(operator, load_deployment(folder / "deployment.toml"), PATIENCE_S, 2)
            yield folder
        finally:
            processes.stop(folder)
            for name in MODULES:
                sys.modules.pop(name, None)
            assert left_behind(folder) == []


@pytest.fixture(scope="module")
def lab(live, tmp_path_factory):
    """Run folders of every scheme, trained for real in one job."""
    root = tmp_path_factory.mktemp("lab")
    limits = asdict(LimitConfig(drop_after=10).limits()) | {"call_timeout_s": 60.0}
    settings = {"config": to_toml(CONFIG), "run": "", "folder": str(root), "sites": ["site-1", "site-2"]}
    settings |= {"limits": limits, "to_start": 2}
    with Operator(live) as operator:
        operator.submit(settings, server="flare_lab.AllSchemes", client="flare_lab.Liar")
    wait_for(lambda: (root / "done.json").is_file())
    return root


def equal(there, here, folder):
    """A run on FLARE, its folder, and one in the simulator, with its own: messages to the byte, weights to rounding."""
    assert there.config() == RunFolder(folder).config() and there.summary()["rounds"] == len(here.rounds)
    for ours, theirs in zip(there.rounds(), here.rounds, strict=True):
        assert (ours.up_bytes, ours.down_bytes, ours.kinds) == (theirs.up_bytes, theirs.down_bytes, theirs.kinds)
        assert ours.latency_s == theirs.latency_s and ours.cut == theirs.cut
        assert set(ours.wall_s) == {"upload", "server", "download", "client"} and min(ours.wall_s.values()) >= 0
        assert ours.failures is None and theirs.wall_s is None
    stored = there.restore()
    assert stored.round == len(here.rounds)
    state = State.from_tensors(stored.tensors, here.engine.state.placement, 0, here.engine.initial())
    weights = here.engine.state.averaged(here.engine.weights)
    return all(
        float((value - weights[key]).abs().max()) < 1e-6
        for key, value in (state.client.params | state.server.params).items()
    )


@pytest.mark.deploy
@pytest.mark.parametrize("name", SCHEMES)
def test_rounds_on_flare_equal_the_simulator(lab, name, tmp_path):
    here = train(comparable(CONFIG, name), tmp_path / "run")
    there = RunFolder(lab / name)
    assert equal(there, here, tmp_path / "run")
    assert there.rounds()[-1].test_accuracy == pytest.approx(here.rounds[-1].test_accuracy, abs=0.002)


@pytest.mark.deploy
@pytest.mark.parametrize("home", [False, True])
def test_adapters_of_a_llama_on_flare_equal_the_simulator(lab, home, tmp_path):
    here = train(texts(CONFIG, lab, rounds=5, labels_at_home=home), tmp_path / "run")
    there = RunFolder(lab / f"texts-{home}")
    assert equal(there, here, tmp_path / "run")
    assert there.rounds()[-1].test_loss == pytest.approx(here.rounds[-1].test_loss, abs=1e-5)
    assert ("up.labels" in here.rounds[0].kinds) is not home


@pytest.mark.deploy
@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_parts_run_on_sites(lab, name):
    there, here = RunFolder(lab / name), train(documented(CONFIG, name))
    assert there.summary()["rounds"] == 3 and verify(there.path) == []
    for ours, theirs in zip(there.rounds(), here.rounds, strict=True):
        assert ours.kinds == theirs.kinds and ours.failures is None
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)


@pytest.mark.deploy
def test_lies_over_the_wire_are_refused_while_the_other_site_trains_on(lab):
    rounds = RunFolder(lab / "lies").rounds()
    words = {"NaN": "NaN", "shape": "shape", "dtype": "'fp64'", "oversized": "bytes, not", "truncated": "100 bytes"}
    for record, kind in zip(rounds, LIES, strict=False):
        assert record.clients == 1 and list(record.failures) == ["site-2"]
        assert words[kind] in record.failures["site-2"]
    assert rounds[-1].clients == 2 and rounds[-1].failures is None
    assert all(torch.isfinite(torch.tensor(record.loss)) for record in rounds)


def handshake(port, authority, kit=None):
    """Whether the server talks to whoever holds this kit: a refusal comes as an alert after the handshake."""
    context = ssl.create_default_context(cafile=str(authority / "startup/rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    if kit:
        context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="localhost") as secure:
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
                return len(secure.recv(9)) > 0
        except (ssl.SSLError, ConnectionError):
            return False


@pytest.mark.deploy
def test_without_a_certificate_of_this_authority_nobody_is_heard(live, tmp_path):
    port = load_deployment(live / "deployment.toml").server.port
    make_kits(write_deployment(tmp_path / "d.toml", port), tmp_path / "other")
    assert handshake(port, live / "site-1", live / "site-1")
    assert not handshake(port, live / "site-1")
    assert not handshake(port, live / "site-1", tmp_path / "other/site-1")
    with pytest.raises(ssl.SSLError):  # and a site does not talk to a server of another authority
        context = ssl.create_default_context(cafile=str(tmp_path / "other/site-1/startup/rootCA.pem"))
        context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=60), server_hostname="localhost")


@pytest.mark.deploy
@pytest.mark.long
def test_a_run_survives_the_death_of_a_clients_job(live, tmp_path, capsys):
    """From the command line, with kill -9 in the middle: adapters of a llama, labels at home, formats for tokens."""
    config, out = tmp_path / "c.toml", tmp_path / "run"
    often = {"rounds": 60, "checkpoint_every": 5, "eval_every": 60, "local_steps": 1}
    config.write_text(to_toml(texts(CONFIG, tmp_path, scheme="sfl-tc", labels_at_home=True, **often)))

    killed = []

    def kill():
        wait_for(lambda: lines(out) >= 12)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any("worker_process" in w for w in words) and any(str(live / "site-2") in w for w in words):
                process.send_signal(signal.SIGKILL)
                killed.append(lines(out))

    killer = threading.Thread(target=kill)
    killer.start()
    main(["deploy", "run", str(config), "--folder", str(live), "--out", str(out), "--json"])
    killer.join()
    assert json.loads(capsys.readouterr().out)["rounds"] == 60
    records = RunFolder(out).rounds()
    assert [record.round for record in records] == list(range(1, 61))
    assert len(killed) == 1 and any(record.clients == 2 for record in records[killed[0] :])  # it is back
    assert RunFolder(out).summary()["command"].startswith(Path(sys.argv[0]).name)


@pytest.mark.deploy
def test_bad_input_to_a_live_deployment_names_the_site_and_the_fix(live, tmp_path, capsys, monkeypatch):
    config = tmp_path / "c.toml"
    config.write_text(to_toml(with_values(CONFIG, clients=3)))
    three = tmp_path / "three"
    three.mkdir()
    (three / "operator").symlink_to(live / "operator")
    port = load_deployment(live / "deployment.toml").server.port
    write_deployment(three / "deployment.toml", port, ("site-1", "site-2", "site-3"))
    monkeypatch.setattr(console, "LOGIN_S", PATIENCE_S)
    with monkeypatch.context() as patch:
        patch.setattr(supervise, "SITES_S", 1.0)
        line = refused(capsys, "run", config, "--folder", three, "--out", tmp_path / "run")
    assert "site-3: not connected" in line and "splitcast deploy start" in line
    assert not (tmp_path / "run").exists()

    config.write_text(to_toml(CONFIG))
    told = live / "site-2/local/splitcast.toml"
    before = told.read_text()
    told.write_text('data = "/nowhere/rows.npz"\n')
    try:
        line = refused(capsys, "run", config, "--folder", live, "--out", tmp_path / "run")
    finally:
        told.write_text(before)
    assert "site-2: data: /nowhere/rows.npz does not exist" in line and "splitcast.toml" in line
