"""What a FLARE job runs: `Trainer` in the server's process, `Client` in every site's."""

import json
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from splitcast.config import Config, from_toml
from splitcast.deploy.samples import Rows, server_images, site_rows
from splitcast.deploy.store import SiteStore
from splitcast.engine.federation import Federation
from splitcast.engine.flare import FlareLine, FlareSite
from splitcast.engine.roster import Limits, NoSites
from splitcast.errors import SplitcastError
from splitcast.models import build
from splitcast.records import RunFolder, write_atomically
from splitcast.run import first_cut, train
from splitcast.seeds import torch_seed

TROUBLE = "trouble.json"
"""Left in the run folder by a job that could not go on: what happened, and whether trying again can help."""
HALVES = "halves"
"""Where a kit keeps the site's halves."""


class Trainer:
    """Runs the round loop over the job's sites and writes the run folder on the server's machine."""

    def __init__(self, config: str, run: str, folder: str, sites: list[str], limits: dict[str, Any], test: str) -> None:
        self.config, self.run, self.folder = config, run, folder
        self.sites, self.limits, self.test = sites, dict(limits), test
        self.joined = False

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """Go on from the last checkpoint, or start."""
        folder = RunFolder(Path(self.folder))
        try:
            self.train(from_toml(self.config), folder)
        except SplitcastError as error:
            report = {"what": str(error), "again": isinstance(error, NoSites) and self.joined}
            write_atomically(folder.path / TROUBLE, json.dumps(report).encode())

    def train(self, config: Config, folder: RunFolder) -> None:
        """One run, from wherever its folder stands."""
        self.joined = folder.checkpoint_file.exists()
        federation = self.federation(config)
        if not self.joined:
            if federation.roster.failures:  # a run does not start with half of its sites
                raise SplitcastError(federation.roster.why())
            federation.start()
        self.joined = True
        train(config, folder.path, resume=True, images=server_images(self.test, config), engine=federation)

    def federation(self, config: Config) -> Federation:
        """The job's sites, told what is trained."""
        images = server_images(self.test, config)
        arch, seed = config.model.arch, torch_seed(config.train.seed, "model")
        model = build(arch, images.test_x.shape[1:], images.classes, seed)
        proxies = {self.sites.index(site.name): site for site in collab.clients if site.name in self.sites}
        limits = dict(self.limits)
        line = FlareLine(proxies, limits.pop("call_timeout_s"))
        absent = sorted(set(range(len(self.sites))) - set(proxies))
        cut, told = first_cut(config), Limits(**limits)
        return Federation(config, model, images.classes, cut, self.sites, line, told, run=self.run, absent=absent)


class Client(FlareSite):
    """A site; what it may read is in its own kit."""

    def __init__(self) -> None:
        super().__init__(self._read, lambda run: SiteStore(self._kit() / HALVES / Path(run).name))

    def _read(self, config: str, client: int) -> Rows:
        return site_rows(self._kit(), from_toml(config))

    @staticmethod
    def _kit() -> Path:
        return Path(collab.workspace.get_root_dir())
