"""Odd values, and good ones spoiled."""

import math

TEXTS = [
    "",
    " ",
    "x",
    "[/x]",
    "[bold]x[/bold]",
    "a\nb",
    "\x00",
    "\x1b[31m",
    "\u2028",
    "\ufeff",
    "\udc80",
    "🏠",
    "%s{0}{x}",
    "../../etc/passwd",
    "math:sqrt",
    "os:system",
    "nowhere:nothing",
    ":",
    "a:b:c",
    "nan",
    "-1",
    "fixed:999",
    "ddqn:absent",
    "x" * 5000,
    "9" * 5000,
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    10**6,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**20,
    10**400,
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    -0.1,
    1e-320,
    5e-324,
    1e308,
    1e100,
    3.5e38,
    math.nan,
    math.inf,
    -math.inf,
]
SMALL_NUMBERS = [n for n in NUMBERS if not abs(n) > 10]


def text(rng):
    """A text that nobody expects."""
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD800)])) for _ in range(rng.randrange(30)))


def nested(rng, depth):
    """Lists or tables within each other."""
    value = []
    for _ in range(depth):
        value = [value] if rng.random() < 0.8 else {"messages": value}
    return value


def odd(rng, depth=0):
    """Any value that a message can carry."""
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return text(rng)
    if kind == 6:
        return rng.choice([None, True, False])
    if kind == 7:
        return rng.randbytes(rng.choice([0, 1, 3, 4, 7, 64, 1000]))
    if kind == 8:
        return nested(rng, rng.choice([1, 3, 50, 3000] if not depth else [1, 3]))
    if depth > 2:
        return None
    if kind < 11:
        return [odd(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 3] if depth else [0, 1, 3, 200]))]
    keys = ["kind", "format", "shape", "data", "messages", "seconds", "loss", "rows", "half", "x", ""]
    return {rng.choice(keys): odd(rng, depth + 1) for _ in range(rng.randrange(5))}


def spoiled_bytes(rng, content):
    """Bytes with a few changes."""
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(made) + 1)
        length = min(rng.choice([1, 1, 2, 8, 100]), len(made) - at)
        what = rng.randrange(8)
        if what == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            made[at : at + length] = rng.randbytes(length)
        elif what == 2:
            del made[at : at + length]
        elif what == 3:
            made[at:at] = rng.randbytes(rng.choice([1, 4, 50]))
        elif what == 4:
            made[at:at] = made[at : at + length]
        elif what == 5:
            del made[at:]
        elif what == 6:
            made[at : at + length] = rng.choice([b"\0", b"\xff"]) * length
        else:
            made += rng.choice([b"\n", b"\0", b"}", rng.randbytes(9)])
    return bytes(made)


def spoiled_lines(rng, content, others=()):
    """Bytes of lines, some of them removed, repeated, swapped, cut, joined, or taken from others."""
    lines = content.splitlines(keepends=True)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not lines:
            break
        at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
        what = rng.randrange(7)
        if what == 0:
            del lines[at]
        elif what == 1:
            lines.insert(to, lines[at])
        elif what == 2:
            lines[at], lines[to] = lines[to], lines[at]
        elif what == 3:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif what == 4:
            lines[at] = lines[at].rstrip(b"\r\n")
        elif what == 5 and others:
            lines[at] = rng.choice(others)
        else:
            lines[at] = spoiled_bytes(rng, lines[at])
    return b"".join(lines)
