"""The deployment file: one server, its sites, and what the server puts up with.

[server]
host = "fl.example.org"       # the name by which sites reach the server; localhost to try it out
port = 8002

[sites.hospital-a]
data = "/data/a.npz"          # read on that site: arrays x and y, or module:function, or part:N

[limits]
call_timeout_s = 60
"""

import tomllib
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from splitcast.config import Count, Positive, section
from splitcast.engine.roster import Limits
from splitcast.errors import SplitcastError


@section
class ServerConfig:
    """Where the server is."""

    host: str = "localhost"
    """Name by which the sites reach it; it is in its certificate."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8002
    """The one port that must be open."""
    test: str = ""
    """Test data on the server: a .npz file with arrays x and y, or module:function. Default: those of the run's data
    set."""


@section
class SiteConfig:
    """A site."""

    data: str
    """Its training data, read there and never sent: a .npz file with arrays x and y, module:function giving (x, y) or a
    torch Dataset, or part:N for part N of the run's data set, counted from 0."""


@section
class LimitConfig:
    """What the server puts up with."""

    call_timeout_s: Positive = 60.0
    """Seconds a site has to answer a call."""
    drop_after: Count = 3
    """Failures in a row after which a site is called no more, until the next submission."""
    min_sites: Annotated[int, Field(ge=0)] = 0
    """Sites without which a run neither starts nor goes on; 0 is all to start and one to go on."""
    message_bytes: Count = 2**30
    """Largest message FLARE accepts at all; what the protocol expects is known to the byte."""
    site_bytes: Annotated[int, Field(ge=0)] = 0
    """Most bytes of messages to and from one site in a job; 0 is no limit."""
    total_bytes: Annotated[int, Field(ge=0)] = 0
    """The same for all sites together."""

    def limits(self) -> Limits:
        """For the engine."""
        return Limits(self.drop_after, max(1, self.min_sites), self.site_bytes, self.total_bytes)


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


def load_deployment(path: Path) -> Deployment:
    """Read and validate; every problem is one line."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SplitcastError(f"deployment: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SplitcastError(f"{path}: not valid TOML: {error}") from None
    for name in raw:
        if name not in ("server", "sites", "limits"):
            raise SplitcastError(f"{path}: unknown section [{name}]; allowed are server, sites, limits")
    sites = raw.get("sites", {})
    if not isinstance(sites, dict) or not sites or not all(isinstance(site, dict) for site in sites.values()):
        raise SplitcastError(f'{path}: has no sites; add [sites.site-1] with data = "..."')
    for name in sites:
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise SplitcastError(f"{path}: site {name!r}: allowed are letters, digits, - and _")
        if name in ("server", "operator", "ca"):
            raise SplitcastError(f"{path}: site {name!r}: the name is taken; choose another")
    return Deployment(
        server=_made(ServerConfig, raw.get("server", {}), f"{path}: [server]"),
        sites={name: _made(SiteConfig, site, f"{path}: [sites.{name}]") for name, site in sites.items()},
        limits=_made(LimitConfig, raw.get("limits", {}), f"{path}: [limits]"),
    )


def _made(kind: Any, values: dict[str, Any], where: str) -> Any:
    allowed = [part.name for part in fields(kind)]
    for key in values:
        if key not in allowed:
            raise SplitcastError(f"{where}: unknown key {key!r}; allowed are {', '.join(allowed)}")
    try:
        return kind(**values)
    except SplitcastError as error:
        raise SplitcastError(f"{where} {error}") from None
