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
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from splitcast.deploy.keeper import ORG
from splitcast.deploy.settings import Deployment, load_deployment
from splitcast.errors import SplitcastError

OPERATOR = "operator@splitcast.local"
SETTINGS = "deployment.toml"
SITE_FILE = Path("local/splitcast.toml")
CLASSES = ["splitcast.deploy.job.", "nvflare.collab.runtime."]
"""Prefixes of the classes a job may name."""


def make_kits(file: Path, folder: Path, classes: Sequence[str] = ()) -> list[str]:
    """Create the kits that a deployment file asks for and that are not there yet; returns their names.

    Jobs may name classes that begin with one of ``classes`` besides splitcast's own.
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
        _tailor(source, name, deployment, target, [*CLASSES, *classes])
        shutil.move(source, target)
        _lock_up(target)
        made.append(name)
    for leftover in (authority / ORG).glob("prod_*"):
        shutil.rmtree(leftover)
    (folder / SETTINGS).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / SETTINGS).chmod(0o600)
    _lock_up(authority)
    return made


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
    settings["class_allow_list"] = [*classes, *(part["path"] for part in settings["components"])]
    if "allow_log_streaming" in settings:
        settings["allow_log_streaming"] = False
    (local / "resources.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    allowed = {"submit_job": "any", "manage_job": "any", "download_job": "any", "view": "any", "operate": "any"}
    denied = {"clone_job": "none", "shell_commands": "none", "byoc": "none"}
    policy = {"format_version": "1.0", "permissions": {"project_admin": allowed | denied}}
    (local / "authorization.json").write_text(json.dumps(policy, indent=2), encoding="utf-8")
    limit = {"streaming_max_blob_size": deployment.limits.message_bytes}
    (local / "comm_config.json").write_text(json.dumps(limit), encoding="utf-8")
    (path / "transfer").mkdir(exist_ok=True)
    if name in deployment.sites:
        data = json.dumps(deployment.sites[name].data)
        (path / SITE_FILE).write_text(f"# read by this site only\ndata = {data}\n", encoding="utf-8")


def _lock_up(path: Path) -> None:
    """Nobody else may read this."""
    for part in [path, *path.rglob("*")]:
        part.chmod(0o700 if part.is_dir() or part.suffix == ".sh" else 0o600)
