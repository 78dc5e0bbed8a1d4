"""Versioned JSON documents that end with a digest of all text before it, and the values in them. Pure.

A reader reads one version, and refuses every other one by :class:`CorruptCheckpointError`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.version import __version__

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

    Raises:
        CorruptCheckpointError: The data is no document, differs from its digest, or is of an unknown version.
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


def list_of(raw: Mapping[str, Any], key: str, kind: type[_T], default: list[_T] | None = None) -> list[_T]:
    """Returns a list of values of one kind; raises as :func:`value_of`."""
    values = value_of(raw, key, list, default)
    if len(values) > _MOST or not all(type(each) is kind for each in values):
        raise CorruptCheckpointError(f"{key}: expected a list of at most {_MOST}, each {_IN_JSON[kind]}")
    return values


def int_of(raw: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    """Returns a whole number within bounds, or the default; raises as :func:`value_of`."""
    value = value_of(raw, key, int, default)
    if value != default and not low <= value <= high:
        raise CorruptCheckpointError(f"{key}: expected a whole number from {low} to {high}")
    return value


def digest_of(raw: Mapping[str, Any], key: str) -> str:
    digest = value_of(raw, key, str)
    if len(digest) != DIGEST_LENGTH:
        raise CorruptCheckpointError(f"{key}: expected {DIGEST_LENGTH} hexadecimal digits")
    return digest
