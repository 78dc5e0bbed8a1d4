"""Versioned JSON documents that end with a digest of all text before it, and the values in them. Pure.

A reader reads one version, and refuses every other one by :class:`CorruptCheckpointError`. Values are hashes, which are
of chunks, each on its own; sizes, which S3 limits; and durable tiers: their location and server, without secrets.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

import xxhash

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError
from tiered_checkpoint_io.version import __version__

#: Largest size of every part of an upload.
MAX_PART = 5 << 30
#: Parts of one upload.
MAX_PARTS = 10_000
#: The largest object, 48.8 TiB: S3 allows 50 TB (since December 2025), and no upload has more parts.
MAX_OBJECT = MAX_PARTS * MAX_PART


#: Bytes hashed as one unit: small enough to be read in ranges by many threads at once, large
#: enough that a manifest stays small.
MIN_CHUNK_SIZE = 16 << 20
_MAX_CHUNKS = 16_384


def chunk_size_for(size: int) -> int:
    """Returns the chunk size for a file of ``size`` bytes: 16 MiB, doubled until 16,384 chunks suffice."""
    chunk_size = MIN_CHUNK_SIZE
    while size > chunk_size * _MAX_CHUNKS:
        chunk_size *= 2
    return chunk_size


def chunk_ranges(size: int, chunk_size: int) -> list[tuple[int, int]]:
    """Returns ``(offset, length)`` of each chunk of a file of ``size`` bytes; one empty chunk for 0 bytes."""
    if size == 0:
        return [(0, 0)]
    return [(offset, min(chunk_size, size - offset)) for offset in range(0, size, chunk_size)]


def new_hash() -> xxhash.xxh3_128:
    """Returns an xxh3-128 that is given its bytes piece by piece; ``hexdigest`` is as :func:`hash_bytes` has it."""
    return xxhash.xxh3_128()


def hash_bytes(data: memoryview | bytes) -> str:
    """Returns xxh3-128 of ``data``, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


FORMAT = "tiered-checkpoint"
#: Format of all documents: manifests, indexes, descriptions of parts.
FORMAT_VERSION = 1
#: Hexadecimal digits of a digest.
DIGEST_LENGTH = 32

#: Bytes of one; one that claims more is damaged or hostile.
MAX_SIZE = 1 << 30

_T = TypeVar("_T")
#: In one list; a document that claims more is damaged or hostile.
_MOST = 1_000_000
_IN_JSON: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}

#: The end of a document, around the digest of all before it.
_DIGEST = "digest"
_SEAL = f',\n "{_DIGEST}": "'.encode()
_END = b'"\n}'


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Puts the key of the document that is being read into errors of its parser."""
    try:
        yield
    except (CorruptCheckpointError, ConfigError) as error:
        if error.key is not None:
            raise
        raise CorruptCheckpointError(f"not a valid manifest: {error.message}", operation="parse", key=where) from error


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, as a document has them."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


def dump(body: dict[str, Any], *, compact: bool = False) -> bytes:
    """Returns a document as it is stored; ``compact``: without spaces and line ends, for large ones."""
    document = {"format": FORMAT, "version": FORMAT_VERSION, **body}
    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 1}
    text = json.dumps(document, ensure_ascii=False, default=fields_of, **layout).encode("utf-8")
    text = text.removesuffix(b"}").removesuffix(b"\n")
    return text + _SEAL + hash_bytes(text).encode() + _END


def load(data: bytes, where: str) -> Mapping[str, Any]:
    """Returns the fields of a stored document; ``where`` is its key or path, for errors.

    Raises CorruptCheckpointError if the data is no document, differs from its digest, or is of an unknown version.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError("not JSON, or cut short", operation="parse", key=where) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CorruptCheckpointError(f"not a {FORMAT} document", operation="parse", key=where)
    version = raw.get("version")
    # Another version may end in another way. Byte by byte: a damaged number may still parse as JSON.
    if version == FORMAT_VERSION or _DIGEST in raw:
        text, seal, end = data.rpartition(_SEAL)
        if not seal or end != hash_bytes(text).encode() + _END:
            raise CorruptCheckpointError("it differs from its digest", operation="parse", key=where)
    if type(version) is not int or version < 1:
        raise CorruptCheckpointError(f"version is {version!r}", operation="parse", key=where)
    if version != FORMAT_VERSION:
        raise _of_another_version(version, raw, where)
    return raw


def _of_another_version(version: int, raw: Mapping[str, Any], where: str) -> CorruptCheckpointError:
    writer = raw.get("writer")
    wrote = writer.get("tiered_checkpoint_io") if isinstance(writer, dict) else None
    return CorruptCheckpointError(
        f"format version {version} is not {FORMAT_VERSION}, which tiered-checkpoint-io {__version__} reads",
        operation="parse",
        key=where,
        hint=f"upgrade tiered-checkpoint-io to {wrote or 'the version that wrote it'}",
        reason="format",
    )


def value_of(raw: Mapping[str, Any], key: str, kind: type[_T], default: _T | None = None) -> _T:
    """Returns a value; raises CorruptCheckpointError if it is of another kind, or missing without a default."""
    value = raw.get(key, default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise CorruptCheckpointError(f"{key}: expected {_IN_JSON[kind]}")
    return value


def list_of(raw: Mapping[str, Any], key: str, kind: type[_T]) -> list[_T]:
    """Returns a list of values of one kind; raises as :func:`value_of`."""
    values = value_of(raw, key, list)
    if len(values) > _MOST or not all(type(each) is kind for each in values):
        raise CorruptCheckpointError(f"{key}: expected a list of at most {_MOST}, each {_IN_JSON[kind]}")
    return values


def int_of(raw: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Returns a whole number within bounds; raises as :func:`value_of`."""
    value = value_of(raw, key, int)
    if not low <= value <= high:
        raise CorruptCheckpointError(f"{key}: expected a whole number from {low} to {high}")
    return value


def digest_of(raw: Mapping[str, Any], key: str) -> str:
    digest = value_of(raw, key, str)
    if len(digest) != DIGEST_LENGTH:
        raise CorruptCheckpointError(f"{key}: expected {DIGEST_LENGTH} hexadecimal digits")
    return digest


@dataclass(frozen=True, slots=True)
class Server:
    """An S3 server. Two are the same if their endpoints are ("": AWS's): region and profile say how to reach it."""

    endpoint_url: str
    region: str = field(default="", compare=False)
    profile: str = field(default="", compare=False)


def server_in(raw: Mapping[str, Any]) -> Server | None:
    """Returns the server that a document names; None if its durable tier is no S3 one. Raises as :func:`value_of`."""
    if raw.get("server") is None:
        return None
    said = value_of(raw, "server", dict)
    return Server(*(value_of(said, each.name, str, "") for each in fields(Server)))


def endpoint_text(url: str) -> str:
    """Returns one spelling of an endpoint, without user name, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return urlunsplit((parts.scheme.lower(), host, parts.path.rstrip("/"), "", ""))


class Place(NamedTuple):
    """A durable tier: checkpoints belong together if dirpath and server (None if it is not S3) are the same."""

    dirpath: str
    server: Server | None = None

    @property
    def endpoint(self) -> str:
        """The URL of its server; "" for AWS's own, and if there is none."""
        return self.server.endpoint_url if self.server is not None else ""

    def __str__(self) -> str:
        return f"{self.dirpath} at {self.endpoint}" if self.endpoint else self.dirpath


class AtPlace:
    """Base of data that belongs to a durable tier, and is stored with ``dirpath`` and ``server`` side by side."""

    __slots__ = ()
    dirpath: str
    server: Server | None

    @property
    def place(self) -> Place:
        """The durable tier."""
        return Place(self.dirpath, self.server)
