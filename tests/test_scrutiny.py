"""A site's check of the gradients it is sent: silent with an honest server, and it stops with one that hijacks."""

import pytest
import torch
from torch import nn

from lengths import now
from splitcast.base.codec import FP32
from splitcast.remote.scrutiny import MARGIN, WINDOW, Scrutiny, label_separation
from splitcast.remote.wire import Refused, pack, unpack
from splitcast.run.parts import make_simulator
from splitcast.studies.privacy.hijack import hijack
from splitcast.studies.privacy.view import of_engine
from test_federation import IMAGES, Wired, federation, settings


class Hijacking(Wired):
    """A server that answers smashed data with gradients of a critic of its own, and sends each its own."""

    def __init__(self, count):
        super().__init__(count)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.critic = nn.Sequential(nn.Flatten(), nn.LazyLinear(64), nn.Tanh(), nn.Linear(64, 1))
        self.smashed = {}

    def call(self, method, requests):
        for n, request in requests.items():
            request["messages"] = [self.lie(n, message) for message in request.get("messages", ())]
            if method not in ("begin", "proceed"):
                request.pop("messages")
        replies = super().call(method, requests)
        for n, reply in replies.items():
            for message in (reply.answer or {}).get("messages", ()):
                if message["kind"] == "smashed":
                    self.smashed[n] = unpack(message, "smashed", FP32, message["shape"])
        return replies

    def lie(self, n, message):
        if message["kind"] != "gradient":
            return message
        leaf = self.smashed[n].requires_grad_()
        return pack("gradient", torch.autograd.grad(-self.critic(leaf).mean(), leaf)[0], FP32)


def watched(line, rounds, **values):
    fed = federation(settings("sfl", batch=16, lr=0.05, **values), line)
    for site in line.sites:
        site.scrutiny = Scrutiny()
    return fed, [fed.round(t).measured.failures for t in range(1, rounds + 1)]


@pytest.mark.parametrize("values", now([{}, {"cut": 3}, {"downlink_codec": "int2"}], {}))
def test_an_honest_server_is_believed(values):
    line = Wired(3)
    _, failures = watched(line, 2 * WINDOW, **values)
    assert not any(failures)
    assert all(len(site.scrutiny.seen) == WINDOW and sum(site.scrutiny.seen) / WINDOW > MARGIN for site in line.sites)


def test_a_hijacking_server_is_left_when_the_window_is_full():
    line = Hijacking(3)
    fed = federation(settings("sfl", batch=16, lr=0.05), line)
    for site in line.sites[:2]:  # the third does not look
        site.scrutiny = Scrutiny()
    failures = [fed.round(t).measured.failures for t in range(1, WINDOW + 2)]
    assert not any(failures[: WINDOW - 1])
    assert set(failures[WINDOW - 1]) == {"site-1", "site-2"}
    assert "gradients: tell no more of the labels than the smashed data do" in failures[WINDOW - 1]["site-1"]


def test_half_of_the_pairs_is_no_relation_and_few_labels_are_not_judged():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (400,), generator=generator)
    assert label_separation(torch.randn(400, 50, generator=generator), labels) == pytest.approx(0.5, abs=0.02)
    quiet = Scrutiny()
    for _ in range(2 * WINDOW):
        values = torch.randn(8, 5, generator=generator)
        quiet.look(values, values, torch.zeros(8, dtype=torch.int64))
        quiet.look(values, values, torch.rand(8))
        quiet.look(values[:1], values, torch.arange(8))
    assert not quiet.seen
    with pytest.raises(Refused, match=r"smashed data do \(\+0\.00 in 20 steps\)"):
        for _ in range(WINDOW):
            quiet.look(values, values, torch.arange(8) // 2)


@pytest.mark.long
def test_a_real_hijack_is_seen():
    """Feature-space hijacking as it is in `splitcast attack`: none of its last gradients tells more than features."""
    sim = make_simulator(settings("sfl", batch=16), IMAGES)
    rows = IMAGES.train_x[:64], IMAGES.train_y[:64], IMAGES.test_x[:200], IMAGES.test_y[:200]
    seen = of_engine(sim, *rows)
    for steps in (20, 40):
        got = hijack(seen, [steps])
        told = label_separation(got.gradients, got.labels)
        assert told < label_separation(got.smashed, got.labels) + MARGIN
