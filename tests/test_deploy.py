"""The deployment for real: mTLS kits, FLARE processes on loopback, and what a user sees when something is wrong."""

import json
import os
import shutil
import signal
import socket
import ssl
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("nvflare")
import psutil

from failures import free_port
from flare_lab import LIES, SCHEMES, comparable, texts
from splitcast.base.config import Config, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.deploy import console, processes, supervise
from splitcast.deploy.console import Operator
from splitcast.deploy.kits import make_kits
from splitcast.deploy.settings import LimitConfig, load_deployment
from splitcast.engine.state import State
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from waiting import PATIENCE_S, wait_for

CONFIG = with_values(Config(), clients=2, rounds=10, batch=8, arch="cnn-small", local_steps=2, momentum=0.5)


def write_deployment(path, port, sites=("site-1", "site-2"), limits=""):
    allowed = 'imports = ["transformers"]'
    lines = ["[server]", f"port = {port}", allowed, "[limits]", "call_timeout_s = 40", limits]
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
    """A running deployment with two sites."""
    folder = tmp_path_factory.mktemp("deployment") / "kits"
    make_kits(write_deployment(folder.parent / "d.toml", free_port(), limits="drop_after = 10"), folder, ["flare_lab."])
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            processes.start(folder)
            with Operator(folder) as operator:
                supervise.wait_for_sites(operator, load_deployment(folder / "deployment.toml"), PATIENCE_S, 2)
            yield folder
        finally:
            processes.stop(folder)
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
def test_a_run_survives_the_death_of_a_clients_job(live, tmp_path, capsys):
    """From the command line, with kill -9 in the middle: adapters of a llama, labels at home, formats for tokens."""
    config, out = tmp_path / "c.toml", tmp_path / "run"
    often = {"rounds": 60, "checkpoint_every": 5, "eval_every": 60, "local_steps": 1}
    config.write_text(to_toml(texts(CONFIG, tmp_path, scheme="sfl-tc", labels_at_home=True, **often)))

    killed = []

    def kill():
        wait_for(lambda: out.is_dir() and len(RunFolder(out).rounds()) >= 12)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any("worker_process" in w for w in words) and any(str(live / "site-2") in w for w in words):
                process.send_signal(signal.SIGKILL)
                killed.append(len(RunFolder(out).rounds()))

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


class Session:
    """Of a server that has these states of a job to tell, one after the other, the last for ever."""

    def __init__(self, *states, there=True):
        self.states, self.there, self.aborted = [*states], there, 0

    def get_job_status(self, job):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def get_system_info(self):
        return SimpleNamespace(server_info=SimpleNamespace(start_time=1.0))

    def abort_job(self, job):
        self.aborted += 1
        if not self.there:
            raise RuntimeError(f"failed to abort job: internal_error, Job {job} is not running.")

    def close(self):
        raise AssertionError("the session is still good")


@pytest.mark.parametrize(
    ("session", "aborted"),
    [
        (Session("RUNNING", "RUNNING", "FINISHED:ABORTED"), 1),  # once, and waited for
        (Session("RUNNING", there=False), 1),  # of a server before this one: nothing to wait for
        (Session("FINISHED:COMPLETED"), 0),
    ],
)
def test_a_job_is_ended_once_and_not_waited_for_if_its_server_is_gone(tmp_path, monkeypatch, session, aborted):
    (tmp_path / "operator/startup").mkdir(parents=True)
    operator = Operator(tmp_path)
    operator.session = session
    naps = []
    monkeypatch.setattr(console.time, "sleep", naps.append)
    operator.end("it")
    assert session.aborted == aborted and len(naps) == (2 if session.there and aborted else 0)
    assert len(session.states) == 1


def test_kits_are_locked_up_and_bring_no_shell(tmp_path, capsys):
    file, folder = write_deployment(tmp_path / "d.toml", free_port()), tmp_path / "kits"
    main(["deploy", "init", str(file), "--folder", str(folder)])
    said = capsys.readouterr()
    assert said.out == f"kits in {folder}: server, operator, site-1, site-2\n" and said.err == ""
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    policy = json.loads((folder / "site-1/local/authorization.json").read_text())["permissions"]["project_admin"]
    assert policy["byoc"] == policy["shell_commands"] == "none"
    keys = [path.read_bytes() for path in folder.glob("*/startup/*.key")]
    assert len(keys) == len(set(keys)) == 4
    main(
        [
            "deploy",
            "init",
            str(write_deployment(file, load_deployment(file).server.port, "abc")),
            "--folder",
            str(folder),
        ]
    )
    assert "a, b, c" in capsys.readouterr().out and (folder / "site-1/startup/client.key").read_bytes() in keys
    assert "choose another folder" in refused(capsys, "init", write_deployment(file, 1234), "--folder", folder)


def test_bad_input_is_one_line_and_leaves_no_process(tmp_path, capsys):
    folder = tmp_path / "kits"
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        file = write_deployment(tmp_path / "d.toml", busy.getsockname()[1])
        main(["deploy", "init", str(file), "--folder", str(folder)])
        capsys.readouterr()
        line = refused(capsys, "start", "--folder", folder)
        assert f"port {busy.getsockname()[1]} is in use" in line and "change port" in line
    shutil.rmtree(folder / "site-2")
    line = refused(capsys, "start", "--folder", folder)
    assert "site-2: has no kit" in line and "splitcast deploy init" in line
    assert "unknown 'site-9'" in refused(capsys, "start", "--folder", folder, "--only", "site-9")
    assert "splitcast deploy init" in refused(capsys, "start", "--folder", tmp_path / "none")
    assert "choose one of init, start" in refused(capsys, "begin")
    assert "needs a deployment file" in refused(capsys, "init")
    assert "needs a configuration" in refused(capsys, "run", "--folder", folder)
    config = tmp_path / "c.toml"
    config.write_text(to_toml(with_values(CONFIG, clients=5)))
    assert "5, but the deployment has 2 sites" in refused(capsys, "run", config, "--folder", folder)
    train(with_values(CONFIG, rounds=1), tmp_path / "simulated")
    (tmp_path / "simulated/summary.json").unlink()
    line = refused(capsys, "run", "--resume", tmp_path / "simulated", "--folder", folder)
    assert "was not run on sites" in line and "splitcast train --resume" in line
    assert left_behind(folder) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nport = 8002\n", "has no sites"),
        ('[sites.a]\ndata = "x"\n[server]\nport = 99999\n', "[server] port"),
        ('[sites.a]\npath = "x"\n', "unknown key 'path'"),
        ("[server]\nport = 8002\n[sites.a]\n", "[sites.a] data: must be given"),
        ('[sites."a b"]\ndata = "x"\n', "letters, digits"),
        ('[sites.server]\ndata = "x"\n', "the name is taken"),
        ('[site.a]\ndata = "x"\n', "unknown section [site]"),
        ("sites = [", "not valid TOML"),
    ],
)
def test_a_bad_deployment_file_is_one_line(tmp_path, text, words):
    file = tmp_path / "d.toml"
    file.write_text(text)
    with pytest.raises(SplitcastError) as error:
        load_deployment(file)
    assert words in str(error.value) and "\n" not in str(error.value) and "ArgsKwargs" not in str(error.value)


def test_a_site_reads_its_own_rows(tmp_path):
    import numpy as np

    from splitcast.deploy.samples import read_rows, site_rows

    np.savez(tmp_path / "rows.npz", x=np.zeros((5, 1, 28, 28), np.float32), y=np.arange(5))
    x, y, _ = read_rows(str(tmp_path / "rows.npz"), "here", CONFIG)
    assert x.shape == (5, 1, 28, 28) and y.tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "own_rows.py").write_text(
        "import torch\ndef mine():\n    return torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        assert read_rows("own_rows:mine", "here", CONFIG)[0].shape == (2, 1, 4, 4)
    finally:
        sys.path.remove(str(tmp_path))
    for source, words in [
        ("/no.npz", "does not exist"),
        ("own_rows:other", "cannot call"),
        (__file__, "must be a .npz"),
    ]:
        with pytest.raises(SplitcastError, match=words):
            read_rows(source, "here", CONFIG)
    with pytest.raises(SplitcastError, match="must say where"):
        site_rows(tmp_path, CONFIG)
