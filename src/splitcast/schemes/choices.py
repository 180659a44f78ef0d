"""A scheme in each of the formats of smashed data that a policy chooses from, round by round.

Nothing of a round hangs on the format of another: every message is complete in itself (docs/codecs.md), so that the
scheme of a round is simply the one of its format.
"""

import sys

from splitcast.base.config import Config, with_values
from splitcast.base.errors import SplitcastError, shown
from splitcast.base.formats import codec
from splitcast.schemes.program import Scheme
from splitcast.schemes.schemes import make_scheme


def schemes_by_format(config: Config) -> dict[str, Scheme]:
    """By the name of the format; empty where a configuration leaves no choice.

    >>> made = schemes_by_format(with_values(Config(), uplink_choices="int4,int8"))
    >>> [(name, scheme.uplink.name) for name, scheme in made.items()]
    [('int4', 'int4'), ('int8', 'int8')]
    """
    choices, told = config.policy.uplink_choices, config.split.uplink_codec
    if not choices:
        return {}
    if told != "auto":
        raise SplitcastError(f"uplink_codec: {shown(told)}, but uplink_choices are given; leave one of them out")
    if len(config.split.cuts) > 1:
        raise SplitcastError("uplink_choices: need one cut for all clients")
    for k, name in enumerate(choices):
        if name in choices[:k]:
            raise SplitcastError(f"uplink_choices: {shown(name)} is given twice")
        if name == "auto":
            raise SplitcastError("uplink_choices: 'auto' is no format; name those to choose from")
        codec(name, "uplink_choices")
    scheme = make_scheme(config)
    if scheme.fixed_cut:
        raise SplitcastError(f"uplink_choices: {scheme.name} sends in one format; give uplink_codec instead")
    if len(scheme.place(config.split.cuts[0], sys.maxsize).segments) < 2:
        raise SplitcastError(f"uplink_choices: {scheme.name} sends no smashed data; leave them out")
    return {name: make_scheme(with_values(config, uplink_codec=name, uplink_choices=())) for name in choices}
