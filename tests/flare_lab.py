"""What runs inside FLARE for `test_deploy.py`: every scheme in one job, a site that lies, and attackers."""

import json
import math
import resource
import tempfile
from pathlib import Path

import torch
from nvflare.collab import collab
from nvflare.fuel.f3.streaming import blob_streamer
from torch import nn

from splitcast.base.config import from_toml, to_toml, with_values
from splitcast.base.errors import SplitcastError
from splitcast.bench.flare_job import loopback_bytes
from splitcast.deploy.job import Client, Trainer
from splitcast.remote.flare import FlareTransport, for_the_server
from splitcast.remote.site import Site
from splitcast.run.records import RunFolder

POOL = {"sfl-replay.samples": 24, "sfl-replay.steps": 2, "sfl-replay.minibatch": 8}
LEAN = {
    "sfl-tc": {"scheme": "sfl-tc"},
    "sfl-replay": {"scheme": "sfl-replay", **POOL},
    "sfl-replay-local": {"scheme": "sfl-replay", **POOL, "sfl-replay.learn": "local", "sfl-replay.until": 3},
    "sfl-int4": {"scheme": "sfl", "sync_codec": "int4"},
}
"""Transform coding, replay (coding alike, and with halves that learn) and client halves as differences, a step in a
round."""
SCHEMES = ["sfl-ga", "sfl", "psl", "epsl-cut", "sfl-gb", "sl", "fl", *LEAN]
DOCUMENTED = {
    "feedback-and-codec": {"scheme": "my_scheme:RowsScheme", "downlink_codec": "my_codec:Sign"},
    "labels-at-home": {"scheme": "my_home:AtHome", "cut": 2},
    "everything": {
        "scheme": "my_scheme:RowsScheme",
        "task": "my_task:Ordinal",
        "optimizer": "my_optimiser:Signum",
        "momentum": 0.9,
        "lr": 0.001,
    },
}
"""Parts of one's own, as they stand in `docs/extend.md`."""
LLAMA = {"model_type": "llama", "vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
LIES = ["NaN", "shape", "dtype", "oversized", "truncated"]
"""What site-2 sends in rounds 1, 2, ... of the run `lies`."""


def comparable(config, name):
    """The scheme with a rhythm under which last bits stay last bits (see `test_federation.py`); all but the first for
    five rounds."""
    if name in LEAN:
        return with_values(config, rounds=5, local_steps=1, **LEAN[name])
    rounds = config.train.rounds if name == SCHEMES[0] else 5
    return with_values(config, rounds=rounds, scheme=name, **({"sync_every": 5} if name == "sfl-gb" else {}))


def documented(config, name):
    """Three plain rounds with parts that a page writes."""
    plain = {"rounds": 3, "local_steps": 1, "momentum": 0.0, "eval_every": 3}
    return with_values(config, **plain | DOCUMENTED[name])


def texts(config, folder, **values):
    """Adapters of a tiny llama, whose description is put into a folder, on rows of text."""
    file = folder / "llama.json"
    file.write_text(json.dumps(LLAMA))
    model = {"arch": f"hf:{file}", "lora.rank": 2, "lora.modules": ("q_proj", "v_proj"), "task": "next-token"}
    model |= {"dataset": "text-mini", "sequence_length": 16, "scheme": "sfl", "cut": 2, "batch": 2}
    return with_values(config, **model | {"optimizer": "adamw", "momentum": 0.0, "lr": 0.001} | values)


class AllSchemes(Trainer):
    """One run folder per scheme, some with texts and with documented parts, then one with lies, over the same sites."""

    @collab.main
    def main(self):
        self.prepare()
        config, root = from_toml(self.config), Path(self.folder)
        runs = {name: comparable(config, name) for name in SCHEMES}
        runs |= {f"texts-{home}": texts(config, root, rounds=5, labels_at_home=home) for home in (False, True)}
        runs |= {name: documented(config, name) for name in DOCUMENTED}
        runs["lies"] = with_values(config, scheme="sfl-ga", rounds=len(LIES) + 1, seed=1)
        for self.run, settings in runs.items():
            folder = RunFolder(root / self.run)
            folder.create(settings)
            self.train(settings, folder)
        (root / "done.json").write_text(json.dumps(list(runs)))


class Liar(Client):
    """Lies about its smashed data if it is site-2 and the run is the one with seed 1."""

    @for_the_server
    def begin(self, call, cut, round_, turn, messages):
        answer = Site.begin(self, call=call, cut=cut, round_=round_, turn=turn, messages=messages)
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


# for test_deploy_attacks.py

HUGE = 200 * 2**20
INTRUSION, FLOOD, LURE = 2, 6, 7
"""Rounds in which site-2 calls its neighbour, sends far too much, and sends a reference to as much."""
NAMES = ["arch", "task", "scheme", "uplink_codec", "optimizer", "dataset"]
"""What of a configuration can be module:function on a site."""


def small(input_shape, classes):
    """A model of the user's own, which kits allow by name."""
    sides = math.prod(input_shape)
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(sides, 16)), nn.ReLU(), nn.Linear(16, classes))


def touch():
    """What no job may call: it leaves a file behind."""
    (Path(tempfile.gettempdir()) / "splitcast-was-here").touch()


def peak_bytes():
    """The most memory that this process ever had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def watch_refusals():
    """Sizes of streams that FLARE refuses in this process for what they declare, before it makes a buffer."""
    sizes, refuse = [], blob_streamer._make_blob_size_error

    def noted(size, limit):
        sizes.append(size)
        return refuse(size, limit)

    blob_streamer._make_blob_size_error = noted
    return sizes


class Attacked(Trainer):
    """A server that first asks for what sites must refuse, then trains, with an intruder among the sites."""

    @collab.main
    def main(self):
        self.prepare()
        config, root, found = from_toml(self.config), Path(self.folder), {}
        self.crossed, self.grown, declared = {}, {}, watch_refusals()
        calls = FlareTransport({site.name: site for site in collab.clients}, 60.0)
        about = {"run": "hostile", "client": 0, "input_shape": [1, 28, 28], "classes": 10}
        for name in NAMES:
            hostile = to_toml(with_values(config, **{name: "cProfile:run"}))
            reply = calls.call("join", {"site-1": about | {"config": hostile, "call": 10**9}})["site-1"]
            found[name] = [reply.answer is None, reply.reason, reply.said]
        everyone = self.sites
        try:  # one more site than there is
            self.sites, self.to_start = [*everyone, "site-9"], len(everyone) + 1
            self.train(with_values(config, clients=len(everyone) + 1), RunFolder(root / "few"))
        except SplitcastError as error:
            found["few"] = str(error)
        self.sites, self.to_start = everyone, len(everyone)
        folder = RunFolder(root / "run")
        folder.create(config)
        self.train(config, folder)
        found |= {"crossed": self.crossed, "grown": self.grown, "declared": declared}
        (root / "done.json").write_text(json.dumps(found))

    def federation(self, config, dataset):
        made = super().federation(config, dataset)
        call = made.sites.transport.call

        def counted(method, requests):
            made.sites.transport.timeout_s = 10.0 if made.sites.round in (FLOOD, LURE) else 60.0
            before, peak = loopback_bytes(), peak_bytes()
            replies = call(method, requests)
            if method == "begin":
                self.crossed[str(made.sites.round)] = loopback_bytes() - before
                self.grown[str(made.sites.round)] = peak_bytes() - peak
            return replies

        made.sites.transport.call = counted
        return made


class Intruder(Client):
    """Calls the other site as if it were the server, and later sends 200 MB in two ways, if it is site-2."""

    @for_the_server
    def begin(self, call, cut, round_, turn, messages):
        answer = Site.begin(self, call=call, cut=cut, round_=round_, turn=turn, messages=messages)
        if self.client == 1 and round_ == INTRUSION:
            self.intrude(cut)
        if self.client == 1 and round_ == FLOOD:
            smashed, *others = answer["messages"]
            return answer | {"messages": [smashed | {"data": bytes(HUGE)}, *others]}
        if self.client == 1 and round_ == LURE:
            return answer | {"messages": [torch.zeros(HUGE // 4)]}  # FLARE's receiver fetches it in parts
        return answer

    def prepare(self):
        if collab.site_name != "site-2":  # an attacker keeps to nothing
            super().prepare()

    def intrude(self, cut):
        about = {"config": to_toml(self.config), "run": "mine", "client": 0, "input_shape": [1, 28, 28], "classes": 10}
        calls = {
            "join": about,
            "hand_in": {},
            "begin": {"cut": cut, "round_": 99, "turn": 0, "messages": []},
            "restore": {"cut": cut, "round_": 0},
            "keep": {"round_": 7},
            "adopt": {"cut": cut, "half": {}},
            "proceed": {"round_": 2, "turn": 1, "messages": []},
            "move": {"cut": cut, "new_cut": 1, "blocks": None, "upload": True},
        }
        line = FlareTransport(dict(enumerate(collab.other_clients)), 30.0)
        replies = {method: line.call(method, {0: request | {"call": 10**9}})[0] for method, request in calls.items()}
        found = {method: [reply.answer is None, reply.reason] for method, reply in replies.items()}
        (self._kit() / "intrusion.json").write_text(json.dumps(found))
