"""What a FLARE job runs: `Trainer` in the server's process, `Client` in every site's.

A job can come from whoever has the operator's kit, and a site's calls from whoever is the server. Both are believed in
what they train, not in what may run here: before anything is read from a configuration, `limit_imports` has shut this
process to all modules that its own kit does not name.
"""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from splitcast.base.config import Config, from_toml, with_values
from splitcast.base.errors import SplitcastError, limit_imports
from splitcast.base.files import write_atomically
from splitcast.data import Dataset
from splitcast.deploy.local import read_local
from splitcast.deploy.samples import Rows, server_dataset, site_rows
from splitcast.deploy.sizes import refuse_large_messages
from splitcast.deploy.store import SiteStore
from splitcast.model import make_model
from splitcast.remote.federation import Federation
from splitcast.remote.flare import FlareSite, FlareTransport, speak_plainly
from splitcast.remote.scrutiny import Scrutiny
from splitcast.remote.sites import Limits, NoSites
from splitcast.remote.wire import Refused, shown
from splitcast.run.loop import train
from splitcast.run.parts import first_placement
from splitcast.run.records import RunFolder

TROUBLE = "trouble.json"
"""Left in the run folder by a job that could not go on: what happened, and whether trying again can help."""
TROUBLE_TEXT = 900
HALVES = "halves"
"""Where a kit keeps the site's halves."""
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LOCK_S = 60.0
"""How long an earlier job of the run may take to let go of its folder."""


class Trainer:
    """Runs the round loop over the job's sites and writes the run folder on the server's machine."""

    def __init__(
        self,
        config: str,
        run: str,
        folder: str,
        sites: list[str],
        limits: dict[str, Any],
        to_start: int = 1,
        message_bytes: int = 0,
    ) -> None:
        """``limits`` are those of `remote.sites.Limits` and ``call_timeout_s``."""
        self.config, self.run, self.folder = config, run, folder
        self.sites, self.limits = sites, dict(limits)
        self.to_start, self.message_bytes = to_start, message_bytes
        self.test = ""
        self.joined = False

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """Go on from the last checkpoint, or start."""
        folder = RunFolder(Path(self.folder))
        if not folder.config_file.is_file():  # an operator's word is not enough to write anywhere
            raise SplitcastError(f"folder: {folder.path} is not a run folder")
        try:
            self.prepare()
            _wait_for(folder)
            self.train(from_toml(self.config), folder)
        except SplitcastError as error:
            said = " ".join(str(error).split())[:TROUBLE_TEXT]
            report = {"what": said, "again": isinstance(error, NoSites) and self.joined}
            write_atomically(folder.path / TROUBLE, json.dumps(report).encode())

    def prepare(self) -> None:
        """Read the server's own word: what it tests with, and what may be imported."""
        local = read_local(Path(collab.workspace.get_root_dir()))
        limit_imports(local.allowed())
        speak_plainly()
        self.test = local.source

    def train(self, config: Config, folder: RunFolder) -> None:
        """One run, from wherever its folder stands."""
        self.joined = folder.checkpoint_file.exists()
        dataset = server_dataset(self.test, config)
        federation = self.federation(config, dataset)
        if not self.joined:
            there, everyone = len(federation.sites.present), len(self.sites)
            if there < self.to_start:
                needed = f"{there} of {everyone} sites joined, {self.to_start} needed to start"
                raise SplitcastError(f"sites: {needed}; {federation.sites.why()}")
            federation.start()
        self.joined = True
        train(config, folder.path, resume=True, dataset=dataset, engine=federation)

    def federation(self, config: Config, dataset: Dataset) -> Federation:
        """The job's sites, told what is trained."""
        model = make_model(config, dataset.test_x.shape[1:], dataset.classes, dataset.test_x.dtype)
        if self.message_bytes:
            refuse_large_messages(config, model, dataset.classes, self.message_bytes)
        proxies = {self.sites.index(site.name): site for site in collab.clients if site.name in self.sites}
        limits = dict(self.limits)
        transport = FlareTransport(proxies, limits.pop("call_timeout_s"))
        absent = sorted(set(range(len(self.sites))) - set(proxies))
        return Federation(
            with_values(config, labels=dataset.labels),  # sites number their classes alike
            model,
            dataset.classes,
            self.sites,
            transport,
            Limits(**limits),
            placement=first_placement(config, model),
            run=self.run,
            absent=absent,
        )


def _wait_for(folder: RunFolder) -> None:
    """Wait until an earlier job of the run, which is ending, has let go of its folder."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            with folder.lock():
                return
        except SplitcastError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def run_name(run: str) -> str:
    """The name of a run, which is that of a folder here too.

    >>> run_name("..")
    Traceback (most recent call last):
    splitcast.remote.wire.Refused: run: '..' is no name; letters, digits, - and _ are, at most 64
    """
    if not RUN.fullmatch(run):
        raise Refused(f"run: {shown(run)} is no name; letters, digits, - and _ are, at most 64")
    return run


class Client(FlareSite):
    """A site; what it may read and import is in its own kit."""

    def __init__(self) -> None:
        super().__init__(self._read, lambda run: SiteStore(self._kit() / HALVES / run_name(run)))
        self._limited = False
        self._limiting = threading.Lock()

    def prepare(self) -> None:
        """Shut this process to modules that the kit does not name, once: before the first call does anything."""
        with self._limiting:
            if not self._limited:
                local = read_local(self._kit())
                limit_imports(local.allowed())
                self.scrutiny = Scrutiny() if local.scrutiny else None
                speak_plainly()
                self._limited = True

    def _read(self, config: Config, client: int) -> Rows:
        return site_rows(self._kit(), config)

    @staticmethod
    def _kit() -> Path:
        return Path(collab.workspace.get_root_dir())
