"""What a hostile site, server, operator or neighbour tries against a deployment, and what comes of it."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare")
import psutil
from cryptography import x509

from flare_lab import FLOOD, HUGE, INTRUSION, LURE, NAMES
from splitcast.base.config import Config, to_toml, with_values
from splitcast.base.errors import SplitcastError, imports_allowed
from splitcast.cli.main import main
from splitcast.deploy import job, processes, supervise
from splitcast.deploy.console import Operator
from splitcast.deploy.kits import days_left, make_kits, renew_kits, revoke_site
from splitcast.deploy.local import read_local
from splitcast.deploy.settings import LimitConfig, load_deployment
from splitcast.deploy.sizes import largest_messages, refuse_large_messages
from splitcast.model import build
from splitcast.remote.flare import FlareSite, FlareTransport
from splitcast.remote.site import Site
from splitcast.run.loop import train
from splitcast.run.records import RunFolder
from test_deploy import free_port, handshake, left_behind, refused
from waiting import PATIENCE_S, wait_for

OWN = "flare_lab:small"
CONFIG = with_values(Config(), clients=2, rounds=LURE, batch=8, arch=OWN, scheme="sfl-ga", checkpoint_every=3)
PUBLISHED = ["join", "restore", "adopt", "hand_in", "keep", "begin", "proceed", "move"]


def write_deployment(path, port, sites=("site-1", "site-2"), limits="", imports=("flare_lab",), site="", timeout_s=10):
    """A deployment file whose sites hold parts of the run's data set."""
    allowed = f"imports = {json.dumps(list(imports))}"
    lines = ["# who takes part", "[server]", f"port = {port}", allowed, "[limits]", limits]
    lines += [f"call_timeout_s = {timeout_s}"]
    for n, name in enumerate(sites):
        lines += [f"[sites.{name}]", f'data = "part:{n}"', allowed, site]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A running deployment with two sites and an intruder's classes allowed by name."""
    folder = tmp_path_factory.mktemp("attacked") / "kits"
    extra = ["flare_lab.Attacked", "flare_lab.Intruder"]
    make_kits(write_deployment(folder.parent / "d.toml", free_port(), limits="drop_after = 2"), folder, extra)
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


def arguments(root, **limits):
    known = asdict(LimitConfig(**limits).limits()) | {"call_timeout_s": 60.0}
    return {"config": to_toml(CONFIG), "run": "0" * 16, "folder": str(root), "sites": ["site-1", "site-2"]} | {
        "limits": known,
        "to_start": 2,
        "message_bytes": 2**26,
    }


@pytest.fixture(scope="module")
def attacked(live, tmp_path_factory):
    """What came of a job whose server and whose second site are hostile."""
    root = tmp_path_factory.mktemp("root")
    with Operator(live) as operator:
        operator.submit(arguments(root), server="flare_lab.Attacked", client="flare_lab.Intruder")
    wait_for(lambda: (root / "done.json").is_file())
    return root, json.loads((root / "done.json").read_text())


@pytest.mark.deploy
def test_a_site_cannot_call_another_site(live, attacked):
    told = json.loads((live / "site-2/intrusion.json").read_text())
    assert list(told) and set(told) == set(PUBLISHED)
    for refused_, reason in told.values():
        assert refused_ and "caller: 'site-2' is not the server of this job" in reason
    root, _ = attacked
    records = RunFolder(root / "run").rounds()
    here = train(CONFIG)
    for ours, theirs in zip(records[: FLOOD - 1], here.rounds, strict=False):
        assert ours.failures is None and ours.clients == 2
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert records[INTRUSION - 1].round == INTRUSION


@pytest.mark.deploy
def test_a_site_imports_nothing_that_its_kit_does_not_name(attacked):
    _, found = attacked
    for name in NAMES:
        refused_, reason, said = found[name]
        assert refused_ and said, name
        assert "'cProfile:run' may not be imported here; allowed are flare_lab" in reason


@pytest.mark.deploy
def test_200_megabytes_are_refused_and_never_held(attacked):
    root, found = attacked
    for number in (FLOOD, LURE):
        record = RunFolder(root / "run").rounds()[number - 1]
        assert record.clients == 1 and list(record.failures) == ["site-2"]
        assert found["grown"][str(number)] < HUGE
    assert found["declared"]  # the flood was refused for the size it declares
    assert all(HUGE < size < 1.01 * HUGE for size in found["declared"])
    assert found["crossed"][str(LURE)] < HUGE / 2  # nothing of it was fetched, whatever else was on the interface


@pytest.mark.deploy
def test_a_run_does_not_start_with_fewer_sites_than_it_needs(attacked):
    _, found = attacked
    assert found["few"].startswith("sites: 2 of 3 sites joined, 3 needed to start; site-9: absent")


@pytest.mark.deploy
def test_a_job_that_names_anything_else_is_refused(live, tmp_path):
    here = Path(tempfile.gettempdir()) / "splitcast-was-here"
    here.unlink(missing_ok=True)
    named = {"server": "splitcast.deploy.job.write_atomically", "site-1": "flare_lab.touch"}

    def refused_there(kit, path):
        logs = [*(live / kit).rglob("*.log"), *(live / kit).rglob("log.txt")]
        return any(f"Component '{path}'" in file.read_text() for file in logs)

    with Operator(live) as operator:
        made = operator.submit(arguments(tmp_path), server=named["server"], client=named["site-1"])
        try:
            wait_for(lambda: all(refused_there(*each) for each in named.items()))
        finally:
            operator.end(made)
    assert not here.exists()


@pytest.mark.deploy
def test_an_operator_cannot_make_the_server_import_either(live, tmp_path, capsys):
    config = tmp_path / "c.toml"
    config.write_text(to_toml(with_values(CONFIG, arch="cProfile:run")))
    line = refused(capsys, "run", config, "--folder", live, "--out", tmp_path / "run")
    assert "arch: 'cProfile:run' may not be imported here; allowed are flare_lab" in line


@pytest.mark.deploy
def test_every_port_wants_a_certificate(live):
    ports = set()
    for process in psutil.process_iter(["cmdline"]):
        if any(str(live) in word for word in process.info["cmdline"] or []):
            with suppress(psutil.NoSuchProcess):  # of an earlier job
                ports |= {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert len(ports) == 4  # the server's, and one inside for the jobs of the server and of either site
    own = load_deployment(live / "deployment.toml").server.port
    assert all(address.ip.removeprefix("::ffff:") == "127.0.0.1" for address in ports if address.port != own)
    for address in ports:
        context = ssl.create_default_context(cafile=str(live / "site-1/startup/rootCA.pem"))
        context.check_hostname = False
        raw = socket.create_connection(("127.0.0.1", address.port), timeout=60)
        with context.wrap_socket(raw) as secure:  # it is TLS, of this authority
            assert secure.version() == "TLSv1.3"
            assert not answers(secure)  # and without a certificate of this authority nothing is said


def answers(secure):
    """Whether somebody talks to us: a refusal comes as an alert after the handshake."""
    try:
        for _ in range(3):
            secure.sendall(bytes(64))
            if not secure.recv(9):
                return False
    except (ssl.SSLError, ConnectionError):
        return False
    return True


def workers(kit):
    """Processes of jobs of a kit."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any("worker_process" in word for word in words) and str(kit) in words:
            found.append(process)
    return found


def left_alone(run):
    """Rounds in which the second site was."""
    return [r.round for r in run.rounds() if "left alone" in (r.failures or {}).get("site-2", "")]


@pytest.mark.deploy
@pytest.mark.long
def test_a_stopped_site_comes_back_and_sigterm_ends_the_job_and_says_how_to_go_on(live, tmp_path, capsys):
    config, out = tmp_path / "c.toml", tmp_path / "run"
    config.write_text(to_toml(with_values(CONFIG, rounds=200, checkpoint_every=5, eval_every=200)))
    command = [sys.executable, "-m", "splitcast", "deploy", "run", config, "--folder", live, "--out", out]
    running = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = RunFolder(out)
    try:
        wait_for(lambda: run.config_file.exists() and len(run.rounds()) > 4)
        (frozen,) = workers(live / "site-2")
        frozen.send_signal(signal.SIGSTOP)
        try:
            wait_for(lambda: left_alone(run))
        finally:
            frozen.send_signal(signal.SIGCONT)
        alone = left_alone(run)[0]
        wait_for(lambda: any(record.clients == 2 for record in run.rounds()[alone:]))
        running.terminate()
        _, said = running.communicate(timeout=PATIENCE_S)
    finally:
        running.kill()
    assert running.returncode == 130
    last = said.strip().splitlines()[-1]
    assert last == f"splitcast: interrupted; go on with: splitcast deploy run --resume {out} --folder {live}"
    records = run.rounds()
    done = len(records)
    assert done < 200 and records[alone - 1].clients == 1
    with run.lock():  # nobody writes any more
        time.sleep(0.5)
        assert len(run.rounds()) == done
    main(["deploy", "run", "--resume", str(out), "--folder", str(live), "--json"])
    assert json.loads(capsys.readouterr().out)["rounds"] == 200
    records = run.rounds()
    assert [record.round for record in records] == list(range(1, 201))
    assert any(record.clients == 2 for record in records[done:])


@pytest.mark.deploy
@pytest.mark.long
def test_a_revoked_site_is_not_heard_and_renewed_ones_train(live, tmp_path):
    """The last of the tests that need both sites: it leaves a deployment of one."""
    port, stolen = load_deployment(live / "deployment.toml").server.port, tmp_path / "site-2"
    assert handshake(port, live / "site-1", live / "site-2")
    processes.stop(live)
    shutil.copytree(live / "site-2", stolen)
    main(["deploy", "revoke", "site-2", "--folder", str(live)])
    knocking = subprocess.Popen([sys.executable, "-P", str(processes.WATCHDOG), str(stolen)], start_new_session=True)
    try:
        processes.start(live)
        assert handshake(port, live / "site-1", live / "site-1")
        assert not handshake(port, live / "site-1", stolen)  # it is alone with the root it has, too
        config = with_values(CONFIG, clients=1, rounds=2, arch="cnn-small")
        assert supervise.supervise(live, config, tmp_path / "run")["rounds"] == 2
        with Operator(live) as operator:
            assert operator.connected() == ["site-1"]
        assert knocking.poll() is None  # and has tried all the time
    finally:
        knocking.terminate()
        knocking.wait(30)


# without a running deployment


def test_every_published_method_asks_who_calls(monkeypatch):
    """And there is no other published method."""
    from nvflare.collab.api.decorators import is_publish

    caller = "site-2"
    monkeypatch.setattr("splitcast.remote.flare.collab", type("Faked", (), {"caller": caller}))
    site = FlareSite(lambda config, n: None, lambda run: None)
    published = [name for name in dir(site) if is_publish(getattr(site, name))]
    assert sorted(published) == sorted(PUBLISHED)
    for name in published:
        count = Site.__dict__[name].__wrapped__.__code__.co_argcount - 1
        with pytest.raises(SplitcastError, match="is not the server of this job"):
            getattr(site, name)(*[None] * count)


def test_kits_allow_exactly_the_classes_of_a_job(tmp_path):
    from nvflare.apis.fl_exception import UnsafeComponentError
    from nvflare.apis.workspace import Workspace
    from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

    make_kits(write_deployment(tmp_path / "d.toml", free_port()), tmp_path / "kits")
    names = [f"splitcast.deploy.job.{name}" for name in dir(job) if not name.startswith("__")]
    names += [f"nvflare.collab.runtime.{path}" for path in ("controller.CollabController", "executor.CollabExecutor")]
    names += ["nvflare.collab.runtime.dispatch.make_participant_map", "nvflare.app_common.widgets.convert_to_event"]
    allowed = {"server": [], "site-1": []}
    for kit, found in allowed.items():
        workspace = Workspace(str(tmp_path / "kits" / kit), kit)
        for name in names:
            try:
                ComponentPathAuthorizer().authorize_component_config({"path": name}, workspace=workspace)
                found.append(name.rpartition(".")[2])
            except UnsafeComponentError:
                pass
    assert allowed == {"server": ["Trainer", "CollabController"], "site-1": ["Client", "CollabExecutor"]}


@pytest.mark.parametrize("name", ["server", "Server", "OPERATOR", "ca", "localhost", "Site-1", "a_b", "-a", "a" * 64])
def test_a_site_cannot_have_a_name_that_means_somebody_else(tmp_path, name):
    with pytest.raises(SplitcastError, match="the name is taken|allowed are small letters"):
        load_deployment(write_deployment(tmp_path / "d.toml", 8002, [name]))


def test_settings_of_sites_reach_the_kits_and_the_engine(tmp_path):
    file = write_deployment(tmp_path / "d.toml", 8002, limits='outlier = 7\naverage = "median"', site="max_rows = 500")
    limits = load_deployment(file).engine_limits()
    assert limits.max_rows == (500, 500) and limits.outlier == 7 and limits.average == "median"
    assert LimitConfig().message_bytes == 2**26 and LimitConfig().limits().outlier == 100
    make_kits(file, tmp_path / "kits")
    assert read_local(tmp_path / "kits/site-2").source == "part:1"
    assert read_local(tmp_path / "kits/server").imports == ("flare_lab",)
    line = json.loads((tmp_path / "kits/site-1/local/comm_config.json").read_text())
    assert line["streaming_max_blob_size"] == 2**26 and not line["allow_adhoc_conns"]


def test_the_sites_own_reader_is_allowed_and_nothing_beside_it(tmp_path):
    kit = tmp_path / "kit"
    (kit / "local").mkdir(parents=True)
    (kit / "local/splitcast.toml").write_text('data = "flare_lab:small"\n')
    with imports_allowed(read_local(kit).allowed()):
        assert build(OWN, (1, 4, 4), 2, seed=0).depth == 3
        with pytest.raises(SplitcastError, match="allowed are flare_lab:small"):
            build("flare_lab:comparable", (1, 4, 4), 2, seed=0)
    for text, words in [
        ('data = "/x.npz"\nimports = "os"', "not a list of modules"),
        ("imports = []", "must say where the data are"),
        ('data = "part:0"\nimport = ["os"]', "unknown key 'import'"),
        ('data = "part:0', "must say where the data are"),
    ]:
        (kit / "local/splitcast.toml").write_text(text)
        with pytest.raises(SplitcastError, match=words):
            read_local(kit)


def test_a_run_whose_messages_are_too_large_is_refused():
    config = with_values(Config(), arch="cnn", batch=16, scheme="sfl", cut=2)
    model = build("cnn", (1, 28, 28), 10, seed=0)
    half, step = largest_messages(config, model, 10)
    placed = [name for name in model.shapes() if int(name.split(".")[0]) < 2]
    assert half == 4 * sum(model.shapes()[name].numel() for name in placed)
    assert step >= 4 * 16 * int(np.prod(model.smashed_shape(2)))
    refuse_large_messages(config, model, 10, max(half, step) + 10_000)
    with pytest.raises(SplitcastError, match=r"message_bytes: 1000, but .* bytes; raise it in \[limits\]"):
        refuse_large_messages(config, model, 10, 1000)


def verifies(kit, authority):
    """Whether a kit's certificate was signed by the root of another kit."""
    names = [name for name in ("server.crt", "client.crt") if (kit / "startup" / name).is_file()]
    mine = x509.load_pem_x509_certificate((kit / "startup" / names[0]).read_bytes())
    root = x509.load_pem_x509_certificate((authority / "startup/rootCA.pem").read_bytes())
    try:
        mine.verify_directly_issued_by(root)
    except Exception:  # InvalidSignature, ValueError, TypeError
        return False
    return True


def test_old_certificates_are_worth_nothing_after_renewal(tmp_path, capsys, monkeypatch):
    folder, old = tmp_path / "kits", tmp_path / "old"
    make_kits(write_deployment(tmp_path / "d.toml", free_port(), ["a", "b", "c"]), folder)
    (folder / "a/local/splitcast.toml").write_text('data = "/mine.npz"\nimports = ["ours"]\n')
    (folder / "a/halves").mkdir()
    (folder / "a/halves/kept").touch()
    shutil.copytree(folder, old)
    assert 300 < days_left(folder / "a") < 400 and verifies(old / "a", folder / "b")
    made = renew_kits(folder)
    assert made == ["server", "operator", "a", "b", "c"]
    for name in made:
        assert verifies(folder / name, folder / "a") and not verifies(old / name, folder / "a")
    assert read_local(folder / "a").imports == ("ours",) and read_local(folder / "b").source == "part:1"
    assert (folder / "a/halves/kept").is_file()
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    assert sorted(path.name for path in folder.iterdir()) == [
        "a",
        "b",
        "c",
        "ca",
        "deployment.toml",
        "operator",
        "server",
    ]

    shutil.rmtree(old)
    shutil.copytree(folder, old)
    main(["deploy", "revoke", "b", "--folder", str(folder)])
    assert "server, operator, a, c" in capsys.readouterr().out
    assert not (folder / "b").exists() and list(load_deployment(folder / "deployment.toml").sites) == ["a", "c"]
    assert "# who takes part" in (folder / "deployment.toml").read_text()
    assert not verifies(old / "b", folder / "a") and verifies(folder / "c", folder / "a")
    assert "unknown 'b'; choose from a, c" in refused(capsys, "revoke", "b", "--folder", folder)
    assert "needs the name of a site" in refused(capsys, "revoke", "--folder", folder)
    revoke_site(folder, "c")
    assert "a is the only site" in refused(capsys, "revoke", "a", "--folder", folder)
    monkeypatch.setattr(processes, "running", lambda kit: 1 if kit.name == "server" else None)
    for action in (["renew"], ["revoke", "a"]):
        assert "server: running on this machine; stop first" in refused(capsys, *action, "--folder", folder)


def test_damaged_files_of_a_run_are_one_line(tmp_path, capsys):
    folder = tmp_path / "kits"
    make_kits(write_deployment(tmp_path / "d.toml", free_port()), folder)
    run = RunFolder(tmp_path / "run")
    run.create(CONFIG)
    name = run.path / "deployment.json"
    for damage in ["", "[]", '{"run": "../../etc", "job": ""}', '{"run": "0123456789abcdef"}', "x" * 2_000_000]:
        name.write_text(damage)
        line = refused(capsys, "run", "--resume", run.path, "--folder", folder)
        assert "deployment.json is damaged" in line
    trouble = run.path / job.TROUBLE
    for damage in ["{", "[]", '{"what": 3, "again": true}', '{"what": "", "again": 1}']:
        trouble.write_text(damage)
        with pytest.raises(SplitcastError, match="trouble.json is damaged; delete it"):
            supervise._trouble(run)
    trouble.write_text('{"what": "two\\nlines", "again": true}')
    assert supervise._trouble(run) == {"what": "two lines", "again": True}


def test_a_run_that_was_killed_before_it_had_a_name_can_be_resumed(tmp_path, capsys, monkeypatch):
    """It gets as far as asking for the server, which is not there."""
    folder = tmp_path / "kits"
    make_kits(write_deployment(tmp_path / "d.toml", free_port()), folder)
    monkeypatch.setattr(supervise, "SITES_S", 0.0)
    run = RunFolder(tmp_path / "run")
    run.create(CONFIG)
    assert "nobody answers" in refused(capsys, "run", "--resume", run.path, "--folder", folder)
    supervise._begin(run, None)
    assert supervise._has_begun(run) and len(supervise._known(run)["run"]) == 16
    with run.lock(), pytest.raises(SplitcastError, match="is being written by process"):
        supervise._begin(RunFolder(tmp_path / "run"), None)
    with pytest.raises(SplitcastError, match="is not empty"):
        supervise._begin(run, CONFIG)


def test_a_call_that_was_lost_is_told_from_one_that_was_refused():
    from nvflare.collab.api.exceptions import CollabCallError

    class Proxy:
        def __init__(self, *cause):
            self.cause = cause

        def __call__(self, timeout):
            return self

        def keep(self, **_):
            raise CollabCallError("site-1", "keep", *self.cause)

    kinds = {0: ("Refused: round: 3", "Refused"), 1: (TimeoutError("late"),), 2: ("remote call returned rc='x'",)}
    kinds[3] = ("\x1b[2J\n[/red]" + "a" * 10**6, "OSError")
    calls = FlareTransport({n: Proxy(*cause) for n, cause in kinds.items()}, 1.0)
    replies = calls.call("keep", {n: {} for n in kinds})
    assert [replies[n].said for n in kinds] == [True, False, False, True] and replies[0].reason == "round: 3"
    assert replies[3].reason.startswith("?[2J [/red]a") and len(replies[3].reason) == 300


def test_what_a_site_says_is_shown_as_it_is(tmp_path, capsys, monkeypatch):
    config = tmp_path / "c.toml"
    config.write_text(to_toml(CONFIG))

    def supervised(*_, on_round, note, **__):
        note("[/red] \x1b[2J site-2 said this")
        raise SplitcastError("enough")

    monkeypatch.setattr(supervise, "supervise", supervised)
    with pytest.raises(SystemExit):
        main(["deploy", "run", str(config), "--folder", str(tmp_path), "--out", str(tmp_path / "run")])
    told = capsys.readouterr()
    assert "[/red] ?[2J site-2 said this" in told.out + told.err


def test_a_site_that_claims_more_rows_than_it_may_does_not_join():
    from test_federation import Wired, federation, settings

    config = settings("sfl-ga")
    honest = federation(config, Wired(3)).halves.sizes
    most = (int(honest[0]), int(honest[1]) - 1, 10**6)
    made = federation(config, Wired(3), max_rows=most, min_sites=2)
    assert made.sites.present == {0, 2} and made.halves.sizes.tolist() == [honest[0], 0, honest[2]]
    assert f"rows: {honest[1]} is not a whole number from 1 to {most[1]}" in made.sites.failures[1]
    assert float(made.halves.rho([0, 2]).sum()) == pytest.approx(1)


def test_a_run_has_a_name_that_is_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(job.Client, "_kit", lambda self: tmp_path)
    site = job.Client()
    assert site._make_store("0a-b_C").folder == tmp_path / "halves/0a-b_C"
    for name in ("..", ".", "", "a/b", "a\n", "-a", "a" * 65, "/etc"):
        with pytest.raises(SplitcastError, match="is no name"):
            site._make_store(name)
