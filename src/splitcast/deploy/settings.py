"""The deployment file: one server, its sites, and what the server puts up with.

[server]
host = "fl.example.org"       # the name by which sites reach the server; localhost to try it out
port = 8002

[sites.hospital-a]
data = "/data/a.npz"          # read on that site: a folder, a .npz, .csv or .parquet file, module:function, or part:N
imports = ["our_models"]      # what a configuration from the server may import there; nothing by default

[limits]
call_timeout_s = 60
"""

import re
from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from splitcast.base.config import MAX_BYTES, tables
from splitcast.base.errors import SplitcastError, imports_allowed, one_of, shown
from splitcast.base.sections import Count, NonNegative, Positive, section
from splitcast.remote.guard import AVERAGES
from splitcast.remote.sites import ROWS, Limits

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""What a site may be called: a label of a host name, in small letters."""
TAKEN = ("server", "operator", "ca")
"""Names that mean somebody else: in FLARE, in certificates, or as a folder of kits."""
Names = Annotated[tuple[str, ...], Field(max_length=100)]


@section
class ServerConfig:
    """Where the server is."""

    host: str = "localhost"
    """Name by which the sites reach it; it is in its certificate."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8002
    """The one port that must be open."""
    test: str = ""
    """Test data on the server: a folder, .npz, .csv or .parquet file as sites have them, or module:function. Default:
    those of the run's data set."""
    imports: Names = ()
    """Modules, or module:function, that a run's configuration may name on the server."""


@section
class SiteConfig:
    """A site."""

    data: str
    """Its training data, read there and never sent: a folder of images with a sub-folder per class, a .npz file with
    arrays x and y, a table of numbers (.csv, .parquet), module:function giving (x, y) or a torch Dataset, or part:N for
    part N of the run's data set, counted from 0."""
    imports: Names = ()
    """Modules, or module:function, that a configuration from the server may name there."""
    max_rows: Count = ROWS
    """Most rows that it may say it has; its weight in the average follows from them."""
    scrutiny: bool = False
    """Whether it stops when the gradients that it is sent do not depend on its labels: a sign of a server that trains
    the client half for a purpose of its own. For schemes that send each site its own gradients."""


@section
class LimitConfig:
    """What the server puts up with."""

    call_timeout_s: Positive = 60.0
    """Seconds a site has to answer a call."""
    drop_after: Count = 3
    """Failures in a row after which a site is left alone for some rounds, twice as many each time."""
    min_sites: Annotated[int, Field(ge=0)] = 0
    """Sites without which a run neither starts nor goes on; 0 is all to start and one to go on."""
    message_bytes: Count = 2**26
    """Largest message FLARE accepts at all; what the protocol expects is known to the byte."""
    site_bytes: Annotated[int, Field(ge=0)] = 0
    """Most bytes of messages to and from one site in a job; 0 is no limit."""
    total_bytes: Annotated[int, Field(ge=0)] = 0
    """The same for all sites together."""

    outlier: NonNegative = 100.0
    """How many times larger than usual what a site sends may be before it is refused; 0 lets everything pass."""
    average: str = "mean"
    """How client halves are averaged: mean, clipped, median, trimmed, or module:function."""

    def __post_init__(self) -> None:
        if ":" not in self.average:
            one_of("average", self.average, AVERAGES)

    def limits(self, max_rows: Sequence[int] = ()) -> Limits:
        """For the engine; ``max_rows`` of every site, in their order."""
        return Limits(
            drop_after=self.drop_after,
            min_sites=max(1, self.min_sites),
            site_bytes=self.site_bytes,
            total_bytes=self.total_bytes,
            max_rows=tuple(max_rows),
            outlier=self.outlier,
            average=self.average,
        )


@section
class Deployment:
    """Everything in a deployment file."""

    server: ServerConfig = field(default_factory=ServerConfig)
    sites: dict[str, SiteConfig]
    limits: LimitConfig = field(default_factory=LimitConfig)

    @property
    def to_start(self) -> int:
        """Sites that must be there when a run starts."""
        return self.limits.min_sites or len(self.sites)

    def engine_limits(self) -> Limits:
        """What the engine puts up with, from each site."""
        return self.limits.limits([site.max_rows for site in self.sites.values()])


def load_deployment(path: Path) -> Deployment:
    """Read and validate; every problem is one line."""
    try:
        with path.open("rb") as file:
            raw = tables(file.read(MAX_BYTES + 1).decode("utf-8"), str(path))
    except OSError as error:
        raise SplitcastError(f"deployment: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SplitcastError(f"{path}: not valid TOML: not a text in UTF-8") from None
    for name in raw:
        if name not in ("server", "sites", "limits"):
            raise SplitcastError(f"{path}: unknown section [{shown(name)[1:-1]}]; allowed are server, sites, limits")
    sites = raw.get("sites", {})
    if not isinstance(sites, dict) or not sites or not all(isinstance(site, dict) for site in sites.values()):
        raise SplitcastError(f'{path}: has no sites; add [sites.site-1] with data = "..."')
    made = Deployment(
        server=_made(ServerConfig, raw.get("server", {}), f"{path}: [server]"),
        sites={name: _made(SiteConfig, site, f"{path}: [sites.{name}]") for name, site in sites.items()},
        limits=_made(LimitConfig, raw.get("limits", {}), f"{path}: [limits]"),
    )
    for name in sites:
        if name.lower() in (*TAKEN, made.server.host.lower()):
            raise SplitcastError(f"{path}: site {name!r}: the name is taken; choose another")
        if not NAME.fullmatch(name):
            raise SplitcastError(f"{path}: site {name!r}: allowed are small letters, digits and -, at most 63")
    if made.limits.min_sites > len(sites):
        raise SplitcastError(f"{path}: [limits] min_sites: {made.limits.min_sites}, but there are {len(sites)} sites")
    return made


def _made(kind: Any, values: dict[str, Any], where: str) -> Any:
    allowed = [part.name for part in fields(kind)]
    if not isinstance(values, dict):
        raise SplitcastError(f"{where}: is {shown(values)}; write a section, with its keys below it")
    for key in values:
        if key not in allowed:
            raise SplitcastError(f"{where}: unknown key {shown(key)}; allowed are {', '.join(allowed)}")
    try:
        made = kind(**values)
        with imports_allowed(getattr(made, "imports", ())):  # looks at the entries
            return made
    except SplitcastError as error:
        raise SplitcastError(f"{where} {error}") from None
