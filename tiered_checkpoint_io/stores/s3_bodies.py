"""Reading the bodies of S3's answers, without the copies that the HTTP client makes on the way."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from botocore.response import StreamingBody

from tiered_checkpoint_io.errors import StoreUnavailableError
from tiered_checkpoint_io.stores.base import too_short

_SKIP_SIZE = 1 << 20


def content_of(answer: Mapping[str, Any]) -> bytes:
    """The whole body."""
    with contextlib.closing(answer["Body"]) as body:
        data: bytes = body.read()
        return data


def fill(
    pieces: Sequence[memoryview], filled: Callable[[int], None], answer: Mapping[str, Any], key: str, offset: int
) -> None:
    """Fills buffers from an answer that should hold the object's bytes from ``offset`` on; see Store.read_pieces.

    Raises:
        CorruptCheckpointError: The object is too short.
        StoreUnavailableError: The answer is another range, or breaks off.
    """
    end = offset + sum(len(piece) for piece in pieces)
    start, total = 0, int(answer["ContentLength"])
    if "ContentRange" in answer:
        bounds, _, size = answer["ContentRange"].rpartition(" ")[2].partition("/")
        start, total = int(bounds.partition("-")[0]), int(size)
    with contextlib.closing(answer["Body"]) as body:
        if total < end:
            raise too_short(key, total, end)
        if start > offset:
            raise broken_off(key)
        # Some servers answer a range with the whole object.
        for at in range(start, offset, _SKIP_SIZE):
            if not body.read(min(_SKIP_SIZE, offset - at)):
                raise broken_off(key)
        with _reading(body, key, whole=start == offset) as read:
            for index, piece in enumerate(pieces):
                done = 0
                while done < len(piece):
                    with piece[done:] as rest:
                        count = read(rest)
                    if not count:
                        raise broken_off(key)
                    done += count
                filled(index)


@contextlib.contextmanager
def _reading(body: Any, key: str, *, whole: bool) -> Iterator[Callable[[memoryview], int]]:
    """What reads the rest of a body into a buffer; of a ``whole`` one, from its connection where that is possible.

    boto3's body copies through a buffer of its own. Its connection is not part of its interface, so where anything is
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
        raise broken_off(key) from error
    if connection.isclosed():
        # Read to its end: the next request may use the same connection.
        raw.release_conn()


def broken_off(key: str) -> StoreUnavailableError:
    """The error for an answer that does not hold what it should."""
    return StoreUnavailableError("the answer is not the range asked for", operation="read", key=key)
