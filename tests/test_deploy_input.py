"""What a user sees of kits and deployment files when something is wrong, without a running deployment."""

import json
import shutil
import socket
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

from failures import free_port
from splitcast.base.config import to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main
from splitcast.deploy import console
from splitcast.deploy.console import Operator
from splitcast.deploy.settings import load_deployment
from splitcast.run.loop import train
from test_deploy import CONFIG, left_behind, refused, write_deployment


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
