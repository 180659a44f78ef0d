"""Configurations and deployment files."""

import json
import math

from fuzz.core import Subject, attempt, expect
from fuzz.values import NUMBERS, spoiled_bytes, spoiled_lines, text
from splitcast.base.config import SECTIONS, Config, from_toml, leaves, to_toml, with_values
from splitcast.deploy.settings import Deployment, load_deployment

LITERALS = [
    "1979-05-27T07:32:00Z",
    "07:32:00",
    "0xdead",
    "1_000",
    "+inf",
    "-nan",
    "''",
    '"""a\nb"""',
    "{}",
    "{a = 1}",
    "[]",
    "[1, [2]]",
    "[nan]",
    "true",
    "[" * 200 + "]" * 200,
    "1" * 5000,
    '"\\u2028"',
    '"\\U0001F600"',
    '"\\u0000"',
]


def literal(rng, depth=0):
    """A TOML value."""
    kind = rng.randrange(4 if depth < 3 else 3)
    if kind == 0:
        return rng.choice(LITERALS)
    if kind == 1:
        number = rng.choice(NUMBERS)
        finite = isinstance(number, int) or math.isfinite(number)
        return str(number) if finite and abs(number) < 10**30 else rng.choice(["nan", "inf", "-inf", "1e999"])
    if kind == 2:
        return json.dumps(text(rng), ensure_ascii=rng.random() < 0.5)
    parts = [literal(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3, 20]))]
    return f"[{', '.join(parts)}]"


def spoiled_toml(rng, toml, sections, keys):
    """TOML with a few of its lines, values and names changed."""
    lines = toml.split("\n")
    for _ in range(rng.choice([0, 1, 1, 1, 2, 6])):
        at = rng.randrange(len(lines))
        what = rng.randrange(10)
        if what < 5 and "=" in lines[at]:
            lines[at] = f"{lines[at].partition('=')[0]}= {literal(rng)}"
        elif what == 5:
            lines.insert(at, f"{rng.choice([*keys, text(rng)])} = {literal(rng)}")
        elif what == 6:
            name = rng.choice([*sections, *keys, text(rng), "a.b.c", '"x"'])
            lines.insert(at, f"[{name}]" if rng.random() < 0.8 else f"[[{name}]]")
        elif what == 7:
            del lines[at]
            lines = lines or [""]
        elif what == 8:
            lines.insert(at, ".".join("abc"[n % 3] for n in range(rng.choice([3, 150, 2000]))) + " = 1")
        else:
            lines[at], lines[-1] = lines[-1], lines[at]
    toml = "\n".join(lines)
    if rng.random() < 0.2:
        change = rng.choice([spoiled_bytes, spoiled_lines])
        toml = change(rng, toml.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    return toml


class Configurations(Subject):
    """`from_toml` gives a configuration that is the same after `to_toml`, or refuses."""

    name = "config"

    def case(self, rng):
        good = Config()
        for _ in range(rng.randrange(4)):
            key, value = rng.choice(list(leaves(good).items()))
            changed, _ = attempt(with_values, good, **{key: rng.choice([value, rng.choice(NUMBERS), text(rng)])})
            good = changed or good
        keys = [leaf for section in SECTIONS.values() for leaf in section.__dataclass_fields__]
        toml = spoiled_toml(rng, to_toml(good), list(SECTIONS), [*keys, "rank", "drop", "aggregate"])
        made, _ = attempt(from_toml, toml)
        if made is None:
            return "refused"
        expect(isinstance(made, Config), f"from_toml made {type(made)}")
        again, refusal = attempt(lambda: from_toml(to_toml(made)))
        expect(again == made, f"not the same after to_toml: {refusal or 'other values'}")
        return "taken"


DEPLOYMENT = """
[server]
host = "localhost"
port = 8002
test = ""

[sites.site-1]
data = "/data/a.npz"

[sites.site-2]
data = "part:1"

[limits]
call_timeout_s = 60
drop_after = 3
min_sites = 1
"""


class Deployments(Subject):
    """`load_deployment` gives a deployment or refuses."""

    name = "deployment"

    def case(self, rng):
        keys = ["host", "port", "data", "test", "min_sites", "site_bytes", "imports", "max_rows", "average", "outlier"]
        toml = spoiled_toml(rng, DEPLOYMENT, ["server", "sites", "limits", "sites.server", "sites.x"], keys)
        file = self.folder / "deployment.toml"
        content = toml.encode("utf-8", "surrogatepass")
        file.write_bytes(spoiled_bytes(rng, content) if rng.random() < 0.2 else content)
        made, _ = attempt(load_deployment, file)
        if made is None:
            return "refused"
        expect(isinstance(made, Deployment) and bool(made.sites), "a deployment without sites")
        expect(made.to_start >= 1 and made.limits.limits().min_sites >= 1, "no sites needed")
        return "taken"
