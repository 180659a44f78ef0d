"""Wire formats by name: what `--uplink-codec` and its kin accept."""

from collections.abc import Callable

from splitcast.base.codec import FP16, FP32, Codec, Integer
from splitcast.base.comparators.c3 import Bound
from splitcast.base.comparators.fedlite import ProductQuantised
from splitcast.base.comparators.splitfc import SplitFC
from splitcast.base.comparators.topk import TopK
from splitcast.base.errors import SplitcastError, said_by, shown
from splitcast.base.registry import Registry
from splitcast.base.tokens import Rotated, with_exact
from splitcast.base.transform import Transform

FAMILIES: dict[str, Callable[[str, str], Codec]] = {
    "transform": Transform.named,
    "rotated": Rotated.on_grid,
    "lloyd": Rotated.on_levels,
    "topk": TopK.plain,
    "randtopk": TopK.randomised,
    "c3sl": Bound.named,
    "fedlite": ProductQuantised.named,
    "splitfc": SplitFC.named,
}
"""Formats with a rate, NAME:RATE: a function of the rate and the field that errors begin with."""

CODECS: Registry[Codec] = Registry("codec", takes=0, forms=("auto", *(f"{name}:RATE" for name in FAMILIES)))
for _codec in (FP32, FP16, Integer(8), Integer(4), Integer(2)):
    CODECS[_codec.name] = _codec


def codec(name: str, field: str = "codec") -> Codec:
    """Look a codec up; ``module:function`` is a function without arguments, or a class, that gives one.

    >>> codec("fp16").nbytes((32, 10)), codec("int2").nbytes((32, 10)), codec("transform:20B").nbytes((32, 10))
    (640, 144, 640)
    >>> codec("rotated:4+first").nbytes((2, 10, 64))
    1124
    """
    base, plus, which = name.partition("+")
    if plus:
        return with_exact(codec(base, field), which, field)
    if name in CODECS:
        return CODECS[name]
    family, _, rate = name.partition(":")
    if family in FAMILIES:
        return FAMILIES[family](rate, field)
    own = CODECS.find(name, field)
    try:
        made = own()  # type: ignore[operator]
    except (Exception, SystemExit) as error:  # whatever a function of the user's does
        raise SplitcastError(f"{field}: {shown(name)} cannot be made: {said_by(error)}") from error
    if not isinstance(made, Codec):
        raise SplitcastError(f"{field}: {name!r} gives a {type(made).__name__}, not a splitcast.base.codec.Codec")
    return made
