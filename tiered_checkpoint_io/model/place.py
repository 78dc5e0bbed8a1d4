"""Durable tiers: their location and server. Pure, and without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model.documents import value_of


@dataclass(frozen=True, slots=True)
class Server:
    """An S3 server. Two are the same if their endpoints are: region and profile only say how to reach it.

    Attributes:
        endpoint_url: Its URL; "" for AWS's own.
        region: AWS region; "" if none is set.
        profile: Profile in the AWS configuration files; "" if none is set.
    """

    endpoint_url: str
    region: str = field(default="", compare=False)
    profile: str = field(default="", compare=False)

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Server:
        """Returns the inverse of :meth:`to_json`; raises CorruptCheckpointError if it can't be understood."""
        return cls(*(value_of(raw, key, str, "") for key in ("endpoint_url", "region", "profile")))


def server_in(raw: Mapping[str, Any]) -> Server | None:
    """Returns the server that a document names; None if its durable tier is no S3 one.

    Raises:
        CorruptCheckpointError: The server can't be understood.
    """
    said = raw.get("server")
    if said is not None and not isinstance(said, dict):
        raise CorruptCheckpointError("server: expected an object")
    return Server.from_json(said) if said is not None else None


def endpoint_text(url: str) -> str:
    """Returns one spelling of an endpoint, without user name, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))


class Place(NamedTuple):
    """A durable tier: checkpoints belong together if dirpath and server are the same.

    Attributes:
        dirpath: The tier's URL or directory.
        server: Its S3 server; None for any other kind.
    """

    dirpath: str
    server: Server | None = None

    @property
    def endpoint(self) -> str:
        """The URL of its server; "" for AWS's own, and if there is none."""
        return self.server.endpoint_url if self.server is not None else ""

    def __str__(self) -> str:
        return f"{self.dirpath} at {self.endpoint}" if self.endpoint else self.dirpath


class SeriesKey(NamedTuple):
    """Saves that the same ranks make one after the other: each replaces the one before it, and comes after it.

    Attributes:
        place: The durable tier.
        series: Common part of the saves, see :attr:`Part.series`.
        coordinator: The rank that commits them, among those that save together; -1 if that is not known.
    """

    place: Place
    series: str
    coordinator: int


class AtPlace:
    """Base of data that belongs to a durable tier, and is stored with ``dirpath`` and ``server`` side by side."""

    __slots__ = ()
    dirpath: str
    server: Server | None

    @property
    def place(self) -> Place:
        """The durable tier."""
        return Place(self.dirpath, self.server)
