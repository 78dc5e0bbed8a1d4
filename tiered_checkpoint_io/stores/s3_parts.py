"""Uploads in parts: their parts, the condition at their end, and their text in a journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model.documents import MAX_OBJECT, MAX_PART, MAX_PARTS
from tiered_checkpoint_io.stores.base import UploadJournal

MIB = 1 << 20
_MIN_PART = 8 * MIB
#: Key of an object's user metadata by which an upload recognises its object. An ETag does not depend on the content if
#: the bucket encrypts by KMS, in directory buckets (S3 Express), and on some servers.
MARK = "tiered-upload"


def mark_of(found: Mapping[str, Any]) -> str | None:
    """Returns the mark that an object bears, by the answer to a HEAD of it; None if it bears none."""
    # Some servers, and proxies, write the names of metadata in other cases.
    return next((value for name, value in found.get("Metadata", {}).items() if name.lower() == MARK), None)


def part_size_for(size: int, wanted: int) -> int:
    """Returns the part size for an object of ``size`` bytes: as wanted, raised so that 10,000 parts suffice.

    Raises:
        StoreError: S3 has no object of this size.
    """
    if size > MAX_OBJECT:
        raise StoreError(
            f"{size} bytes exceed S3's limit of 48.8 TiB for one object",
            operation="upload",
            hint="save a sharded checkpoint",
        )
    needed = -(-size // MAX_PARTS)
    return min(MAX_PART, max(wanted, -(-needed // MIB) * MIB, _MIN_PART))


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition for an object to appear: its tag, and the check by ``look``; see ConditionalStore.upload_if."""

    expected: str | None
    look: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in progress, as its journal has it: parts of ``part_size`` bytes, the last one maybe smaller.

    The object that it makes bears its ``mark``. Of a copy, ``origin`` is the source's ETag; "" if all parts are sent.
    """

    url: str
    key: str
    upload_id: str
    size: int
    part_size: int
    mark: str
    origin: str = ""

    @classmethod
    def journaled(cls, journal: UploadJournal | None, url: str, key: str) -> Upload | None:
        """Returns the upload of ``key`` that a journal notes; None if it notes none, or is another store's."""
        state = (journal.read() if journal is not None else None) or {}
        match state:
            case {
                "url": u,
                "key": k,
                "upload_id": str(upload_id),
                "size": int(size),
                "part_size": int(part_size),
                "mark": str(mark),
                "origin": str(origin),
            } if (u, k) == (url, key) and size >= 0 and part_size >= 1:
                return cls(url, key, upload_id, size, part_size, mark, origin)
        return None

    def to_journal(self) -> dict[str, object]:
        """Returns the upload's fields for a journal."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def numbers(self) -> range:
        """Part numbers, from 1."""
        return range(1, -(-self.size // self.part_size) + 1)

    def range_of(self, number: int) -> slice:
        """Returns the bytes of a part."""
        start = (number - 1) * self.part_size
        return slice(start, min(start + self.part_size, self.size))

    def size_of(self, number: int) -> int:
        return len(range(self.size)[self.range_of(number)])


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes that the server has under another key, for an upload whose parts it copies from there.

    Attributes:
        arguments: Source object, for requests that copy: they fail if its ETag has changed.
        etag: Its ETag.
        size: Its bytes.
        check: Called before the upload is completed: some servers ignore the ETag.
    """

    arguments: Mapping[str, Any]
    etag: str
    size: int
    check: Callable[[], None]

    def __len__(self) -> int:
        return self.size
