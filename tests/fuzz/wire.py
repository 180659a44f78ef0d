"""Sites that lie to the server, and servers that lie to a site.

The sites and the line between them are those of `test_federation`.
"""

import copy
import math
import random

import numpy as np
import torch

from fuzz.core import Finding, Subject, attempt, expect, one_line
from fuzz.settings import spoiled_toml
from fuzz.values import odd
from splitcast.base.config import SECTIONS, with_values
from splitcast.base.errors import SplitcastError, shown
from splitcast.remote import site
from splitcast.remote.wire import Refused
from splitcast.schemes.messages import Ledger
from splitcast.schemes.replay import LEARNING
from test_federation import SCHEMES, Wired, federation, flat, rows, settings

CLIENTS = 3
CODECS = ["auto", "auto", "fp32", "fp16", "int8", "int2", "transform:1", "rotated:4", "lloyd:2+outliers"]
CODECS += ["randtopk:20%", "c3sl:2", "fedlite:49,5", "splitfc:1/2"]
OTHERS = ["local-loss", "cse-fsl", "fsl-sage", "ampere", "splitfed-v2", "sglr"]
"""Schemes that are asked with their usual settings."""
VALID = {
    "seconds": lambda v: type(v) in (int, float) and 0 <= v <= 1e6,
    "loss": lambda v: type(v) in (int, float) and math.isfinite(v) and abs(v) <= 1e30,
    "rows": lambda v: type(v) is int and 1 <= v <= 10**6,
    "found": lambda v: type(v) is bool,
}


def a_config(rng, clients=CLIENTS, **values):
    """A training with any scheme."""
    scheme = rng.choice([*SCHEMES, "sfl-tc", "sfl-replay", "sfl-replay", *OTHERS])
    values |= {"local_steps": rng.choice([1, 1, 2]), "momentum": rng.choice([0.0, 0.5]), "batch": 2}
    if scheme not in ("fl", "sl", "sfl-replay", *OTHERS):
        values |= {"sync_every": rng.choice([-1, 0, 1, 2]), "cut": rng.choice([1, 2])}
    if scheme not in ("fl", *OTHERS) and rng.random() < 0.5:
        values |= {"uplink_codec": rng.choice(CODECS), "downlink_codec": rng.choice(CODECS)}
    if scheme in ("sfl", "sfl-tc", "sfl-replay") and rng.random() < 0.3:
        values |= {"sync_codec": rng.choice(["int8", "int4"])}
    made = settings(scheme, clients=clients, **values)
    if scheme == "sfl-replay":
        own = {"samples": rng.choice([2, 4, 8]), "steps": 2, "minibatch": 4, "learn": rng.choice(LEARNING)}
        own |= {"stale": 0.01, "checks": 2} if rng.random() < 0.5 else {}
        made = with_values(made, **{f"sfl-replay.{name}": value for name, value in own.items()})
    if scheme == "ampere":
        made = with_values(made, **{"ampere.samples": 4, "ampere.steps": 2, "ampere.device_rounds": rng.choice([1, 2])})
    return made


def spoiled_message(rng, message):
    """(another message, whether it must be refused)."""
    made = dict(message)
    what = rng.randrange(9)
    varies = message["format"].startswith(("transform", "splitfc")) or message["format"].endswith("+outliers")
    key = rng.choice(list(made))
    if what == 0:
        del made[key]
    elif what == 1:
        made[rng.choice(["x", "", "dtype"])] = odd(rng)
    elif what == 2:
        made[key] = odd(rng)
        if key == "shape" and isinstance(made[key], list) and made[key] == message[key]:
            return made, False
        return made, made[key] != message[key] or type(made[key]) is not type(message[key])
    elif what == 3:
        made["data"] = made["data"][: rng.randrange(len(made["data"]))] if made["data"] else b"x"
        return made, not varies  # what is left of a stream can be one, of other values
    elif what == 4:
        made["data"] += rng.randbytes(rng.choice([1, 4, 64]))
        return made, not varies
    elif what == 5 and made["format"] == "fp32":
        values = np.frombuffer(made["data"], np.float32).copy()
        values[rng.randrange(len(values))] = rng.choice([np.nan, np.inf, -np.inf])
        made["data"] = values.tobytes()
    elif what == 6 and made["format"] == "fp32":
        values = np.frombuffer(made["data"], np.float32)
        with np.errstate(all="ignore"):
            made["data"] = (values * np.float32(rng.choice([0, -1, 1e-30, 10, 1e3, 1e10, 1e30]))).tobytes()
        return made, False
    elif what == 7:
        made["data"] = rng.randbytes(len(made["data"]))
        return made, False
    else:
        made["shape"] = rng.choice([made["shape"][::-1], [*made["shape"], 1], [-n for n in made["shape"]], "shape", []])
        return made, made["shape"] != message["shape"]
    return made, True


def spoiled_answer(rng, answer):
    """(another answer, whether it must be refused)."""
    made = dict(answer)
    key = rng.choice(list(made))
    what = rng.randrange(10)
    packed = [name for name in ("half", "blocks") if isinstance(made.get(name), dict)]
    if what == 0:
        del made[key]
        return made, True
    if what == 1:
        made[rng.choice(["x", "", "more"])] = odd(rng)
        return made, False
    if what in (2, 3):
        made[key] = odd(rng)
        if key in VALID:
            return made, not VALID[key](made[key])
        return made, made[key] != answer[key]
    if made.get("messages"):
        messages = list(made["messages"])
        made["messages"] = messages
        at = rng.randrange(len(messages))
        if what == 4:
            del messages[at]
        elif what == 5:
            messages.insert(at, rng.choice([copy.copy(messages[at]), odd(rng)]))
        elif what == 6:
            messages[at] = odd(rng)
        else:
            messages[at], must = spoiled_message(rng, messages[at])
            return made, must
        return made, True
    if packed:
        made[packed[0]], must = spoiled_message(rng, made[packed[0]])
        return made, must
    return {name: odd(rng) for name in made}, False


class Servers(Subject):
    """One site of three answers anything: training goes on with the others, and only that site is blamed."""

    name = "server"

    def case(self, rng):
        config, liar = a_config(rng), rng.randrange(CLIENTS)
        honest = set(range(CLIENTS)) - {liar}
        share, lies = rng.choice([0.2, 0.5, 1.0]), []
        methods = rng.choice([None, ("begin", "proceed"), ("adopt", "hand_in", "move"), ("join", "restore")])

        def spoil(method, n, request, answer):
            if n != liar or (methods and method not in methods) or rng.random() > share:
                return answer
            if rng.random() < 0.05:
                return None
            made, must = spoiled_answer(rng, answer)
            lies.append((method, must))
            return made

        fed = federation(config, Wired(CLIENTS, spoil))
        self._check(fed, honest, liar, lies, fed.sites.named_failures())
        for t in range(1, rng.choice([3, 4])):
            ledger = Ledger()
            if rng.random() < 0.4 and not fed.scheme.fixed_cut and config.split.scheme in SCHEMES:
                move(fed, rng.choice([1, 2, 3]), ledger, t)
            report = fed.round(t, ledger)
            self._check(fed, honest, liar, lies, report.measured.failures)
            lies.clear()
            missing = honest - set(report.clients)
            expect(not missing, f"round {t} of {config.split.scheme} went on without honest sites {missing}")
            expect(math.isfinite(report.loss), f"loss {report.loss}")
        fed.snapshot(t)
        self._check(fed, honest, liar, [], fed.sites.named_failures())
        expect(bool(flat(fed, fed.halves.average().params | fed.state.server.params).isfinite().all()), "weights")
        return config.split.scheme

    @staticmethod
    def _check(fed, honest, liar, lies, failures):
        names = fed.sites.names
        for name, reason in failures.items():
            one_line(reason or "lost")
            expect(len(reason) < 600, f"a reason of {len(reason)} letters")
            expect(name == names[liar], f"{name} is blamed ({reason}), but {names[liar]} lied: {lies}")
        expect(honest <= fed.sites.present, f"honest sites were dropped: {honest - fed.sites.present}")
        must = [method for method, must in lies if must]
        expect(not must or names[liar] in failures, f"nobody is blamed for a bad answer to {must}")


def move(fed, cut, ledger, t):
    """Another cut, as the round loop asks for it."""
    target = fed.scheme.place(cut, fed.model.depth)
    try:
        fed.place(target, ledger, charge=t > 1)
    except (AttributeError, TypeError):  # an engine that takes the number
        fed.place(cut, ledger, charge=t > 1)


def own_rows(config, client):
    """Those of the site, whatever the server says."""
    if client >= config.data.clients:
        raise Refused("client: there are no such rows here")
    return rows(config, client)


class Recorder(Wired):
    """Sites whose requests are kept, to be spoiled later."""

    def __init__(self, count):
        super().__init__(count)
        self.sites = [site.Site(own_rows, lambda run, n=n: self.memories[n]) for n in range(count)]
        self.requests = []
        self.before = lambda method: None

    def call(self, method, requests):
        for n, request in requests.items():
            if n == 1:
                self.requests.append((method, request))
                self.before(method)
        return super().call(method, requests)


class Sites(Subject):
    """A site that is asked anything refuses or answers, and goes on with an honest server as if nothing had been."""

    name = "site"

    def __init__(self, folder):
        super().__init__(folder)
        self.known = {}

    def case(self, rng):
        which = rng.randrange(40)
        config = a_config(random.Random(which), clients=2)
        losses = self._losses(which, config)
        line = Recorder(2)
        fed = federation(config, line)
        fed.round(1)
        touched = self._pester(rng, line)
        if rng.random() < 0.3:
            line.before = lambda method: self._pester(rng, line) if method == "proceed" else None
            report = fed.round(2)
            line.before = lambda method: None
            expect(set(report.measured.failures) <= {"site-2"}, f"{report.measured.failures} in the disturbed round")
            touched = True
        elif not touched:
            report = fed.round(2)
            expect(not report.measured.failures, f"refused everything, then failed: {report.measured.failures}")
            expect(report.loss == losses[1], f"refused everything, then had loss {report.loss}, not {losses[1]}")
        fresh = federation(config, line)
        found = []
        for t in (1, 2):
            report = fresh.round(t)
            expect(not report.measured.failures, f"cannot go on with an honest server: {report.measured.failures}")
            found.append(report.loss)
        expect(found == losses, f"with an honest server, losses are {found}, not {losses}")
        return f"{config.split.scheme} {'touched' if touched else 'as before'}"

    def _losses(self, key, config):
        if key not in self.known:
            fed = federation(config, Wired(2))
            self.known[key] = [fed.round(t).loss for t in (1, 2)]
        return self.known[key]

    def _pester(self, rng, line):
        """A few bad requests; returns whether one of them was answered."""
        asked, touched = line.sites[1], False
        kept = list(line.requests)
        for _ in range(rng.randrange(1, 5)):
            method, request = rng.choice(kept)
            request = self._spoiled(rng, {**request, "call": asked.last_call})
            if rng.random() < 0.1:
                method = rng.choice(["join", "restore", "adopt", "begin", "proceed", "move", "hand_in", "keep"])
            try:
                answer, _ = attempt(getattr(asked, method), **request)
            except SplitcastError:
                raise
            except Exception as error:
                told = ", ".join(f"{name}={shown(value)}" for name, value in request.items())
                raise Finding(f"{method}({told}): {type(error).__name__}: {error}"[:1500]) from error
            if answer is not None:
                touched = True
                expect(isinstance(answer, dict) and "seconds" in answer, f"{method} answered {type(answer)}")
        return touched

    @staticmethod
    def _spoiled(rng, request):
        what = rng.randrange(8)
        key = rng.choice(list(request)) if request else "x"
        if what == 0:
            request.pop(key, None)
        elif what == 1:
            request[rng.choice(["x", "more"])] = odd(rng)
        elif key == "config" and what < 6:
            lines = request["config"].splitlines()
            heavy = ("batch", "local_steps", "clients", "dataset")
            kept = [line for line in lines if line.partition(" ")[0] not in heavy]
            made = spoiled_toml(rng, "\n".join(kept), list(SECTIONS), ["lr", "momentum", "cut", "scheme", "arch"])
            request["config"] = made
        elif isinstance(request.get(key), dict):
            request[key], _ = spoiled_message(rng, request[key])
        elif key == "messages" and request.get(key):
            messages = list(request[key])
            messages[rng.randrange(len(messages))], _ = spoiled_message(rng, rng.choice(messages))
            request[key] = messages
        else:
            request[key] = odd(rng)
        return request


torch.set_num_threads(1)
