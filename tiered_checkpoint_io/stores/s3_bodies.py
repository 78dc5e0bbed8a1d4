"""Reading the bodies of S3's answers, without the HTTP client's copies."""

from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.response import StreamingBody

from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError
from tiered_checkpoint_io.stores.base import too_short
from tiered_checkpoint_io.stores.s3_errors import NETWORK_HINT

_SKIP_SIZE = 1 << 20


def content_of(answer: Mapping[str, Any]) -> bytes:
    """Returns the whole body."""
    with contextlib.closing(answer["Body"]) as body:
        data: bytes = body.read()
        return data


def size_of(found: Mapping[str, Any], key: str) -> int:
    """Returns the size of an object, by the answer to a HEAD of it.

    Raises:
        StoreError: The answer does not contain the size.
    """
    if "ContentLength" not in found:
        raise StoreError(
            "the answer does not tell the size of the object",
            operation="head",
            key=key,
            hint="S3 sends Content-Length; check endpoint_url, and what lies between, for what removes it",
        )
    return int(found["ContentLength"])


def fill(
    pieces: Sequence[memoryview], filled: Callable[[int], None], answer: Mapping[str, Any], key: str, offset: int
) -> None:
    """Fills buffers from an answer that should hold the object's bytes from ``offset`` on; see `fallbacks.read_pieces`.

    Raises:
        CorruptCheckpointError: The object is too short.
        StoreError: The answer is another range, or breaks off.
    """
    with contextlib.closing(answer["Body"]) as body:
        extent = _Extent.of(answer, key)
        end = offset + sum(len(piece) for piece in pieces)
        if extent.size is not None and extent.size < end:
            raise too_short(key, extent.size, end)
        if extent.start > offset:
            raise _another_range(key)
        at = extent.start
        # Some servers answer a range with the whole object.
        while at < offset:
            skipped = len(body.read(min(_SKIP_SIZE, offset - at)))
            if not skipped:
                raise extent.ended(key, at, end)
            at += skipped
        with _reading(body, key, whole=extent.start == offset) as read:
            for index, piece in enumerate(pieces):
                done = 0
                while done < len(piece):
                    with piece[done:] as rest:
                        count = read(rest)
                    if not count:
                        raise extent.ended(key, at, end)
                    done += count
                    at += count
                filled(index)


@dataclass(frozen=True, slots=True)
class _Extent:
    """Range of an object's bytes, by an answer's headers.

    Attributes:
        start: The first one.
        stop: Behind the last one; None if only the end of the answer shows it.
        size: Size of the object; None if the answer does not contain it.
        is_chunked: True if reading an answer that is cut short fails; else it just ends.
    """

    start: int
    stop: int | None
    size: int | None
    is_chunked: bool

    @classmethod
    def of(cls, answer: Mapping[str, Any], key: str) -> _Extent:
        length = int(answer["ContentLength"]) if "ContentLength" in answer else None
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if "ContentRange" not in answer:
            return cls(0, length, length, is_chunked)
        # The size may be left open by "*".
        match = re.search(r"(\d+)-(\d+)/(?:(\d+)|\*)$", answer["ContentRange"])
        if match is None:
            raise _another_range(key)
        start, last, size = match.groups()
        return cls(int(start), int(last) + 1, None if size is None else int(size), is_chunked)

    def ended(self, key: str, at: int, wanted: int) -> StoreError | CorruptCheckpointError:
        """Returns the error for an answer that ended at byte ``at`` of the object, before byte ``wanted``."""
        if at < self.stop if self.stop is not None else not self.is_chunked:
            return _broken_off(key)
        return _another_range(key) if self.size is not None else too_short(key, at, wanted)


@contextlib.contextmanager
def _reading(body: Any, key: str, *, whole: bool) -> Iterator[Callable[[memoryview], int]]:
    """Yields a reader of the rest of a body into a buffer; for a ``whole`` body, from its connection if possible.

    boto3's body copies through a buffer of its own. Its connection is not part of its interface, so if anything is
    not as expected, the body itself is read.
    """
    raw: Any = getattr(body, "_raw_stream", None)
    connection: Any = getattr(raw, "_fp", None)
    is_plain = type(body) is StreamingBody and isinstance(connection, http.client.HTTPResponse)
    if not whole or not is_plain or getattr(raw, "chunked", True) or not hasattr(raw, "release_conn"):
        yield body.readinto
        return
    try:
        yield connection.readinto
    except (OSError, http.client.HTTPException) as error:
        raise _broken_off(key) from error
    if connection.isclosed():
        # Read to its end: the next request may use the same connection.
        raw.release_conn()


def _another_range(key: str) -> StoreError:
    return StoreError("the answer is not the range asked for", operation="read", key=key, reason="unavailable")


def _broken_off(key: str) -> StoreError:
    return StoreError("the answer broke off", operation="read", key=key, hint=NETWORK_HINT, reason="unavailable")
