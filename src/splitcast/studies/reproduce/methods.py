"""Whose bytes to an accuracy are compared: everybody's methods as configurations, and the search that each gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RAW = "splitcast.studies.reproduce.raw"
CODED = {
    "fedlite:196,16": "int8",
    "splitfc:0.2/16": "splitfc:3.2/1",
    "randtopk:1%": "fp32",
    "c3sl:4": "c3sl:4",
}
"""Smashed data by others' formats at about the rates of their papers, and gradients, of SplitFC and RandTopk those
of what was sent. FedLite sends them in full."""
CORRECTED = {"fedlite:196,16": 1e-3}
"""Those whose clients correct the gradients, and by how much."""
STEPS, POOL = "ours, step by step", "ours, replay"
ALONE = 10
"""Rounds in which client halves learn from a loss of their own, and then no more."""
LEARNED: dict[str, Any] = {"local_steps": 20, "heads.pool": 2, "optimizer_state": "local"}
"""Steps on the clients cost no bytes, and their momentum need not travel."""
REPLAYED = LEARNED | {"sfl-replay.learn": "local", "sfl-replay.start": ALONE, "sfl-replay.until": ALONE}
OURS: dict[str, dict[str, Any]] = {
    "mnist": {"uplink_codec": "transform:80..160B@60"},
    "fashion-mnist": REPLAYED | {"uplink_codec": "transform:80B"},
    "cifar10": REPLAYED | {"uplink_codec": "transform:320B"},
}
"""How ours by replay has its first layer and sends it, by data set: on digits a random one is enough."""
CHANGED = {"cifar10": ("mirror,shift:1", "mirror,shift:2")}
"""How those with a pool change feature maps and images at random, by data set: where they are soon known by heart."""


@dataclass(frozen=True)
class Setting:
    """One point of the search."""

    lr: float
    momentum: float
    often: int

    def values(self, method: "Method") -> dict[str, Any]:
        """As configuration of a method."""
        count = (POOL_STEPS if method.pooled else HOME_STEPS if method.at_home else {}).get(self.often, self.often)
        steps = (f"{method.pooled}.steps",) if method.pooled else method.at_home or ("local_steps",)
        return {"lr": self.lr, "momentum": self.momentum} | dict.fromkeys(steps, count)


POOL_STEPS, HOME_STEPS = {1: 20, 4: 80}, {1: 5, 4: 20}
"""The server's steps on a pool in a round, and the local steps of those that cost no bytes, where others take so many
local steps."""
DECAY = 5e-4
"""Of the weights, for those that train on a pool."""
USUAL = Setting(0.02, 0.9, 1)
SEARCH = (USUAL, Setting(0.02, 0.0, 1), Setting(0.005, 0.9, 1), Setting(0.02, 0.9, 4))


@dataclass(frozen=True)
class Method:
    """What is compared."""

    values: Mapping[str, Any]
    pooled: str = ""
    alone: int = 0
    """rounds before the first upload"""
    samples: int = 0
    """of each client, once; 0: all"""
    at_home: tuple[str, ...] = ()
    """of a method whose local steps send nothing by themselves: `local_steps`, and what is as many"""


def _sfl(up: str, down: str) -> Method:
    corrected = {"gradient_correction": CORRECTED[up]} if up in CORRECTED else {}
    return Method({"scheme": "sfl", "uplink_codec": up, "downlink_codec": down, **corrected})


def _at_home(scheme: str, *as_many: str, **values: Any) -> Method:
    """Clients step by themselves, and once in a round something is sent; their momentum stays with them."""
    return Method({"scheme": scheme, "optimizer_state": "local", **values}, at_home=("local_steps", *as_many))


def _pooled(scheme: str, changed: str, values: Mapping[str, Any], alone: int = 0, samples: int = 0) -> Method:
    common = {"scheme": scheme, "batch": 64, **({f"{scheme}.augment_pool": changed} if changed else {})}
    return Method(common | dict(values), scheme, alone, samples)


def methods(dataset: str = "mnist", *, small: bool = False) -> dict[str, Method]:
    """By the names in the table; ``small`` is for the narrow network. Ampere sends all at once, so that what it sends
    is chosen beforehand: a tenth of the samples."""
    ours, arch = OURS.get(dataset, {}), f"{RAW}:{'small' if small else 'whole'}"
    maps, pixels = CHANGED.get(dataset, ("", ""))
    return {
        "sfl": Method({"scheme": "sfl"}),
        "fl": _at_home("fl"),
        "fl, int8": _at_home("fl", sync_codec="int8"),
        **{f"sfl, {name}": _sfl(name, name) for name in ("int8", "int4", "int2")},
        **{f"sfl, {name.partition(':')[0]}": _sfl(name, down) for name, down in CODED.items()},
        "sfl-gb": Method({"scheme": "sfl-gb"}),
        "cse-fsl": _at_home("cse-fsl", "cse-fsl.every"),
        "fsl-sage": _at_home("fsl-sage", "fsl-sage.every", "fsl-sage.align_every"),
        "ampere": _pooled("ampere", maps, LEARNED | {"ampere.device_rounds": ALONE}, ALONE, 640),
        STEPS: Method({"scheme": "sfl-tc"}),
        POOL: _pooled("sfl-replay", maps, ours, ours.get("sfl-replay.start", 0)),
        **{
            f"images, {kind}": _pooled("sfl-replay", pixels, {"arch": arch, "uplink_codec": f"{RAW}:{kind.title()}"})
            for kind in ("gzip", "jpeg")
        },
    }
