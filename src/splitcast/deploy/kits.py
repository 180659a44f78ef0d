"""Start-up kits: a certificate authority of this deployment's own, and a folder with key and certificate for everybody.

    FOLDER/deployment.toml   the deployment file
    FOLDER/ca/               the authority; whoever has it can make sites: keep it safe, copy it nowhere
    FOLDER/server/           the server's kit
    FOLDER/operator/         the kit of whoever submits runs
    FOLDER/NAME/             the kit of a site, to be brought to that site

Folders are 0700 and files 0600. A kit allows no code but splitcast's own: jobs cannot bring any, nobody has a shell.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from splitcast.base.errors import SplitcastError, shown
from splitcast.base.files import write_atomically
from splitcast.deploy.local import FILE as LOCAL
from splitcast.deploy.local import local_text
from splitcast.deploy.settings import Deployment, load_deployment
from splitcast.deploy.watchdog import ORG

OPERATOR = "operator@splitcast.local"
SETTINGS = "deployment.toml"
RUNTIME = "nvflare.collab.runtime"
SERVER_CLASSES = ("splitcast.deploy.job.Trainer", f"{RUNTIME}.controller.CollabController")
SITE_CLASSES = ("splitcast.deploy.job.Client", f"{RUNTIME}.executor.CollabExecutor")
"""What a job may name on the server and on a site: whole names of classes. FLARE calls whatever it allows, and takes an
entry that ends in a point, or a package, for everything below."""
INTERNAL = {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}
"""How the process of a job talks to the one that started it: on loopback, and only with the kit's certificate."""


def make_kits(file: Path, folder: Path, classes: Sequence[str] = ()) -> list[str]:
    """Create the kits that a deployment file asks for and that are not there yet; returns their names.

    Jobs may name ``classes`` besides splitcast's own.
    """
    deployment = load_deployment(file)
    _refuse_another_server(folder, deployment)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = folder / "ca"
    authority.mkdir(mode=0o700, exist_ok=True)
    made = []
    for source, name in _provisioned(deployment, authority):
        target = folder / name
        if target.exists():
            continue
        _tailor(source, name, deployment, target, classes)
        shutil.move(source, target)
        _lock_up(target)
        made.append(name)
    for leftover in (authority / ORG).glob("prod_*"):
        shutil.rmtree(leftover)
    _settle(folder, file.read_text(encoding="utf-8"))
    _lock_up(authority)
    return made


def renew_kits(folder: Path, classes: Sequence[str] = ()) -> list[str]:
    """A new authority and new certificates for everybody in `deployment.toml`; returns their names.

    What owners have written in `local/splitcast.toml` stays, and the halves. Certificates of the old authority are
    worth nothing from then on: nobody who has a new kit talks to whoever has an old one.
    """
    deployment = deployment_in(folder)
    made = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".renew-") as temporary:
        authority = Path(temporary) / "ca"
        authority.mkdir(mode=0o700)
        for source, name in _provisioned(deployment, authority):
            target = folder / name
            _tailor(source, name, deployment, target, classes)
            if target.exists():
                own = target / LOCAL
                if own.is_file():
                    shutil.copyfile(own, source / LOCAL)
                for part in ("startup", "local"):
                    shutil.rmtree(target / part, ignore_errors=True)
                    if (source / part).is_dir():
                        shutil.move(source / part, target / part)
            else:
                shutil.move(source, target)
            _lock_up(target)
            made.append(name)
        for leftover in (authority / ORG).glob("prod_*"):
            shutil.rmtree(leftover)
        shutil.rmtree(folder / "ca", ignore_errors=True)
        shutil.move(authority, folder / "ca")
    _lock_up(folder / "ca")
    return made


def revoke_site(folder: Path, name: str, classes: Sequence[str] = ()) -> list[str]:
    """Take a site out of the deployment and renew everybody else's certificates; returns their names."""
    deployment = deployment_in(folder)
    if name not in deployment.sites:
        raise SplitcastError(f"revoke: unknown {shown(name)}; choose from {', '.join(deployment.sites)}")
    if len(deployment.sites) == 1:
        raise SplitcastError(f"revoke: {name} is the only site; delete {folder} instead")
    left = _without(folder / SETTINGS, deployment, name)
    _settle(folder, left)
    made = renew_kits(folder, classes)
    shutil.rmtree(folder / name, ignore_errors=True)
    return made


def days_left(kit: Path) -> float | None:
    """Days until a kit's certificate expires; None if there is none here."""
    from cryptography import x509

    for name in ("server.crt", "client.crt"):
        file = kit / "startup" / name
        if file.is_file():
            try:
                until = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
            except ValueError:
                return None
            return (until - datetime.now(UTC)).total_seconds() / 86400
    return None


def deployment_in(folder: Path) -> Deployment:
    """The deployment of a folder that `make_kits` made."""
    if not (folder / SETTINGS).is_file():
        raise SplitcastError(f"folder: {folder} holds no deployment; make one with: splitcast deploy init FILE")
    return load_deployment(folder / SETTINGS)


def kit(folder: Path, name: str) -> Path:
    """The kit of somebody."""
    path = folder / name
    if not (path / "startup").is_dir():
        raise SplitcastError(f"{name}: has no kit in {folder}; make it with: splitcast deploy init {folder / SETTINGS}")
    return path


def _refuse_another_server(folder: Path, deployment: Deployment) -> None:
    if (folder / SETTINGS).is_file():
        old = load_deployment(folder / SETTINGS).server
        if (old.host, old.port) != (deployment.server.host, deployment.server.port):
            raise SplitcastError(f"folder: {folder} has kits for {old.host}:{old.port}; choose another folder")
    elif folder.exists() and any(folder.iterdir()):
        raise SplitcastError(f"folder: {folder} is not empty and holds no deployment; choose another folder")


def _settle(folder: Path, text: str) -> None:
    """Write the deployment file of a folder."""
    write_atomically(folder / SETTINGS, text.encode())
    (folder / SETTINGS).chmod(0o600)


def _without(file: Path, deployment: Deployment, name: str) -> str:
    """The text of a deployment file without a site: its section goes, all else stays as it was written."""
    kept, inside = [], False
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("["):
            inside = "".join(line.split("#")[0].split()).replace('"', "").replace("'", "") == f"[sites.{name}]"
        if not inside:
            kept.append(line)
    text = "\n".join([*kept, ""])
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / SETTINGS
        new.write_text(text, encoding="utf-8")
        left = {site: about for site, about in deployment.sites.items() if site != name}
        try:
            if load_deployment(new) == replace(deployment, sites=left):
                return text
        except SplitcastError as error:
            raise SplitcastError(str(error).replace(str(new), f"{file} without {name}")) from None
    raise SplitcastError(f"revoke: cannot take {name} out of {file}; do it by hand, then: splitcast deploy renew")


def _provisioned(deployment: Deployment, authority: Path) -> list[tuple[Path, str]]:
    """Let FLARE issue all certificates; returns each kit with the name it gets here."""
    from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
    from nvflare.lighter.provisioner import Provisioner

    host = deployment.server.host
    people = [
        {"name": host, "type": "server", "org": ORG, "fed_learn_port": deployment.server.port},
        {"name": OPERATOR, "type": "admin", "org": ORG, "role": "project_admin"},
        *({"name": name, "type": "client", "org": ORG} for name in deployment.sites),
    ]
    builders: list[dict[str, Any]] = [
        {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {
            "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
            "args": {"config_folder": "config", "scheme": "grpc"},
        },
        {"path": "nvflare.lighter.impl.cert.CertBuilder", "args": {}},
        {"path": "nvflare.lighter.impl.signature.SignatureBuilder", "args": {}},
    ]
    project = {"api_version": 3, "name": ORG, "description": "", "participants": people, "builders": builders}
    logging.getLogger("nvflare").setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            prepared = prepare_project(project)
            Provisioner(str(authority), prepare_builders(project), prepare_packager(project)).provision(prepared)
    except (ValueError, RuntimeError, OSError) as error:
        raise SplitcastError(f"init: FLARE could not make the kits: {' '.join(str(error).split())}") from None
    newest = max((authority / ORG).glob("prod_*"))
    names = {host: "server", OPERATOR: "operator"} | {name: name for name in deployment.sites}
    return [(newest / theirs, ours) for theirs, ours in names.items()]


def _tailor(path: Path, name: str, deployment: Deployment, home: Path, classes: Sequence[str]) -> None:
    """Keep FLARE's stores inside the kit, allow no code but splitcast's, send no logs, say where a site's data are."""
    local = path / "local"
    if name == "operator":
        return
    resources = (local / "resources.json.default").read_text(encoding="utf-8")
    settings: dict[str, Any] = json.loads(resources.replace("/tmp/nvflare", str(home.resolve() / "store")))
    logs = "nvflare.app_common.logging."
    settings["components"] = [part for part in settings["components"] if not part["path"].startswith(logs)]
    settings["class_allow_list"] = [*(SERVER_CLASSES if name == "server" else SITE_CLASSES), *classes]
    if "allow_log_streaming" in settings:
        settings["allow_log_streaming"] = False
    (local / "resources.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    allowed = {"submit_job": "any", "manage_job": "any", "download_job": "any", "view": "any", "operate": "any"}
    denied = {"clone_job": "none", "shell_commands": "none", "byoc": "none"}
    policy = {"format_version": "1.0", "permissions": {"project_admin": allowed | denied}}
    (local / "authorization.json").write_text(json.dumps(policy, indent=2), encoding="utf-8")
    most = deployment.limits.message_bytes
    line = {"streaming_max_blob_size": most, "allow_adhoc_conns": False, "internal": INTERNAL}
    (local / "comm_config.json").write_text(json.dumps(line, indent=2), encoding="utf-8")
    (path / "transfer").mkdir(exist_ok=True)
    if name == "server":
        text = local_text("test", deployment.server.test, deployment.server.imports)
    else:
        site = deployment.sites[name]
        text = local_text("data", site.data, site.imports, scrutiny=site.scrutiny)
    (path / LOCAL).write_text(text, encoding="utf-8")


def _lock_up(path: Path) -> None:
    """Nobody else may read this."""
    for part in [path, *path.rglob("*")]:
        part.chmod(0o700 if part.is_dir() or part.suffix == ".sh" else 0o600)
