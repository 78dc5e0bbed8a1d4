"""How an object is cut into the parts of a multipart upload, and how they are sent. No boto3 here."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from tiered_checkpoint_io.errors import StoreError

MIB = 1 << 20
MAX_PARTS = 10_000
MIN_PART = 8 * MIB
MAX_PART = 5 << 30
MAX_OBJECT = 5 << 40
_SEND_SIZE = 1 * MIB


def part_size_for(size: int, wanted: int) -> int:
    """The size of one part: as wanted, raised so that 10,000 parts suffice.

    Args:
        size: Bytes of the whole object.
        wanted: Bytes of a part, as configured.

    Raises:
        StoreError: S3 has no object of this size.
    """
    if size > MAX_OBJECT:
        raise StoreError(
            f"{size} bytes exceed S3's limit of 5 TiB for one object",
            operation="upload",
            tier="durable",
            hint="save a sharded checkpoint",
        )
    needed = -(-size // MAX_PARTS)
    return min(MAX_PART, max(wanted, -(-needed // MIB) * MIB, MIN_PART))


@dataclass(frozen=True, slots=True)
class Cut:
    """An object of ``size`` bytes in parts of ``part_size`` bytes, the last one maybe smaller."""

    size: int
    part_size: int

    @property
    def numbers(self) -> range:
        """Part numbers, from 1."""
        return range(1, -(-self.size // self.part_size) + 1)

    def bounds(self, number: int) -> tuple[int, int]:
        """First byte of a part, and the one behind its last."""
        start = (number - 1) * self.part_size
        return start, min(start + self.part_size, self.size)

    def size_of(self, number: int) -> int:
        start, end = self.bounds(number)
        return end - start

    def fits(self, number: int, size: int) -> bool:
        """Whether a part with this number and size is one of ours."""
        return number in self.numbers and size == self.size_of(number)


@dataclass(frozen=True, slots=True)
class Journaled:
    """An upload in progress, as its journal describes it."""

    url: str
    key: str
    upload_id: str
    cut: Cut

    def to_json(self) -> dict[str, object]:
        return {
            "url": self.url,
            "key": self.key,
            "upload_id": self.upload_id,
            "size": self.cut.size,
            "part_size": self.cut.part_size,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, object] | None) -> Journaled | None:
        """The upload; None for what is no note of one, such as another store's."""
        if raw is None:
            return None
        url, key, upload_id = raw.get("url"), raw.get("key"), raw.get("upload_id")
        size, part_size = raw.get("size"), raw.get("part_size")
        if not (isinstance(url, str) and isinstance(key, str) and isinstance(upload_id, str)):
            return None
        if not (isinstance(size, int) and isinstance(part_size, int)) or size < 0 or part_size < 1:
            return None
        return cls(url, key, upload_id, Cut(size, part_size))


def composite_etag(etags: Iterable[str]) -> str:
    """The ETag that S3 gives to an object made of parts with these ETags."""
    digests = [bytes.fromhex(etag.strip('"')) for etag in etags]
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(digests)}"


class Body(io.RawIOBase):
    """A slice of a buffer as a request's body; hands out large pieces and copies nothing.

    Closed, it holds no reference to the buffer any more, whatever still holds the body itself
    (an exception's frames do, for as long as it is looked at).
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data[:]
        self._piece = data[:0]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        # The HTTP client asks for 16 KiB at a time; whatever it gets it sends in one call.
        count = len(self._data) if size is None or size < 0 else max(size, _SEND_SIZE)
        self._piece.release()
        self._piece = self._data[self._position : self._position + count]
        self._position += len(self._piece)
        return self._piece

    def close(self) -> None:
        if not self.closed:
            self._piece.release()
            self._data.release()
        super().close()


class PartPool:
    """The threads that send parts: one bounded set for all uploads of a store."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, numbers: Iterable[int], send: Callable[[int, threading.Event], None]) -> None:
        """Runs ``send`` for each number, a bounded few at once; the first error ends all.

        Args:
            numbers: Of the parts.
            send: Called with a part's number, and the event that is set once another has failed.
        """
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="tiered-s3")
            pool = self._pool
        cancelled = threading.Event()

        def job(number: int) -> None:
            if cancelled.is_set():
                return
            try:
                send(number, cancelled)
            except BaseException:
                # Here, and not where the jobs are waited for, which is later than the next job begins.
                cancelled.set()
                raise

        jobs: set[Future[None]] = set()
        try:
            jobs.update(pool.submit(job, number) for number in numbers)
            finished, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for done in finished:
                done.result()
        except BaseException:
            cancelled.set()
            for waiting in jobs:
                waiting.cancel()
            # Parts that are on their way read the caller's buffer: they end before we return.
            wait(jobs)
            raise
        finally:
            jobs.clear()

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
