"""What runs inside FLARE for `test_deploy.py`: every scheme in one job, and a site that lies."""

import json
from pathlib import Path

from nvflare.collab import collab

from splitcast.base.config import from_toml, with_values
from splitcast.deploy.job import Client, Trainer
from splitcast.remote.flare import for_the_server
from splitcast.remote.site import Site
from splitcast.run.records import RunFolder

SCHEMES = ["sfl-ga", "sfl", "psl", "epsl", "sfl-gb", "sl", "fl"]
LIES = ["NaN", "shape", "dtype", "oversized", "truncated"]
"""What site-2 sends in rounds 1, 2, ... of the run `lies`."""


def comparable(config, name):
    """The scheme with a rhythm under which last bits stay last bits (see `test_federation.py`)."""
    return with_values(config, scheme=name, **({"sync_every": 5} if name == "sfl-gb" else {}))


class AllSchemes(Trainer):
    """One run folder per scheme, then one with lies, one after another over the same sites."""

    @collab.main
    def main(self):
        self.prepare()
        config, root = from_toml(self.config), Path(self.folder)
        runs = {name: comparable(config, name) for name in SCHEMES}
        runs["lies"] = with_values(config, scheme="sfl-ga", rounds=len(LIES) + 1, seed=1)
        for self.run, settings in runs.items():
            folder = RunFolder(root / self.run)
            folder.create(settings)
            self.train(settings, folder)
        (root / "done.json").write_text(json.dumps(list(runs)))


class Liar(Client):
    """Lies about its smashed data if it is site-2 and the run is the one with seed 1."""

    @for_the_server
    def begin(self, cut, round_, turn, messages):
        answer = Site.begin(self, cut, round_, turn, messages)
        if self.config.train.seed != 1 or self.client != 1 or round_ > len(LIES):
            return answer
        smashed, *others = answer["messages"]
        message = dict(smashed)
        match LIES[round_ - 1]:
            case "NaN":
                message["data"] = b"\xff" * len(message["data"])
            case "shape":
                message["shape"] = [1, *message["shape"]]
            case "dtype":
                message["format"] = "fp64"
            case "oversized":
                message["data"] += bytes(2**20)
            case "truncated":
                message["data"] = message["data"][:100]
        return answer | {"messages": [message, *others]}
