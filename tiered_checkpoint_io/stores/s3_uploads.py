"""Multipart uploads: begun, resumed, completed, aborted."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import (
    InvalidNameError,
    StoreChangedError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.stores.base import Content, UploadJournal, changed
from tiered_checkpoint_io.stores.retry import Progress
from tiered_checkpoint_io.stores.s3_client import S3Client

MIB = 1 << 20
MAX_PARTS = 10_000
_MIN_PART = 8 * MIB
_MAX_PART = 5 << 30
_MAX_OBJECT = 5 << 40
#: The user metadata of an object by which an upload knows it again. An ETag tells nothing of the content where the
#: bucket encrypts by KMS, in directory buckets (S3 Express), and on some servers.
MARK = "tiered-upload"
_log = logging.getLogger("tiered_checkpoint_io.s3")


def part_size_for(size: int, wanted: int) -> int:
    """Bytes of one part of an object of ``size`` bytes: as wanted, raised so that 10,000 parts suffice.

    Raises:
        StoreError: S3 has no object of this size.
    """
    if size > _MAX_OBJECT:
        raise StoreError(
            f"{size} bytes exceed S3's limit of 5 TiB for one object",
            operation="upload",
            hint="save a sharded checkpoint",
        )
    needed = -(-size // MAX_PARTS)
    return min(_MAX_PART, max(wanted, -(-needed // MIB) * MIB, _MIN_PART))


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold when an object appears: its tag, and what ``look`` looks at; see ConditionalStore.upload_if."""

    expected: str | None
    look: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in progress, as its journal has it: parts of ``part_size`` bytes, the last one maybe smaller.

    The object that it makes bears its ``mark``; "" where an earlier release began it. Of a copy, ``origin`` is the
    source's ETag.
    """

    url: str
    key: str
    upload_id: str
    size: int
    part_size: int
    mark: str = ""
    origin: str = ""

    @classmethod
    def journaled(cls, journal: UploadJournal | None, url: str, key: str) -> Upload | None:
        """The upload of ``key`` that a journal tells of; None where it tells of none, or is another store's."""
        state = (journal.read() if journal is not None else None) or {}
        match state:
            case {"url": u, "key": k, "upload_id": str(upload_id), "size": int(size), "part_size": int(part_size)} if (
                (u, k) == (url, key) and size >= 0 and part_size >= 1
            ):
                return cls(
                    url, key, upload_id, size, part_size, str(state.get("mark", "")), str(state.get("origin", ""))
                )
        return None

    @property
    def numbers(self) -> range:
        """Part numbers, from 1."""
        return range(1, -(-self.size // self.part_size) + 1)

    def range_of(self, number: int) -> slice:
        """The bytes of a part."""
        start = (number - 1) * self.part_size
        return slice(start, min(start + self.part_size, self.size))

    def size_of(self, number: int) -> int:
        return len(range(self.size)[self.range_of(number)])


@dataclass(frozen=True, slots=True)
class Copied:
    """Bytes that the server has under another key, for an upload whose parts it copies from there.

    Attributes:
        arguments: Which object, for requests that copy: they fail where its ETag has changed.
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


class MultipartUploads:
    """The multipart uploads of one store, with the threads that send parts: one bounded set for all uploads."""

    def __init__(self, client: S3Client, write_options: Mapping[str, str], *, workers: int, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._write_options = write_options
        self._checksum = write_options.get("ChecksumAlgorithm")
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tiered-s3")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def send(
        self,
        key: str,
        data: Content | Copied,
        part_size: int,
        journal: UploadJournal | None,
        report: Progress,
        condition: Condition | None = None,
    ) -> None:
        """Uploads ``data``, or has it copied; see :meth:`Store.upload`.

        The condition, if any, is looked at before the end.
        """
        for _ in range(2):
            report.restart()
            if self._send(key, data, part_size, journal, report, condition):
                if journal is not None:
                    journal.clear()
                return
        raise StoreUnavailableError(
            "others aborted the upload, twice", operation="upload", key=f"{self._client.url}/{key}"
        )

    def abandon(self, key: str, journal: UploadJournal) -> None:
        """Ends the upload that a journal describes."""
        upload = Upload.journaled(journal, self._client.url, key)
        if upload is not None:
            self._abort(key, upload.upload_id)
        journal.clear()

    def begin_and_abort(self, key: str) -> None:
        """Begins an upload and aborts it."""
        answer = self._client.ask("create_multipart_upload", key, self._write_options)
        self._abort(key, answer["UploadId"])

    def stale(self, older_than_s: float, *, aborts: bool) -> int:
        """The number of uploads below the prefix that are older than this; ``aborts`` them, or counts alone."""
        count = 0
        prefix = self._client.prefix
        # That there is nothing is how rclone says that there are none; what is no key of ours is not ours to abort.
        with contextlib.suppress(StoreNotFoundError):
            for page in self._client.pages("list_multipart_uploads", None, {"Prefix": prefix}):
                now = _server_time(page)
                for upload in page.get("Uploads", ()):
                    if (now - upload["Initiated"]).total_seconds() > older_than_s:
                        with contextlib.suppress(InvalidNameError):
                            if aborts:
                                self._abort(upload["Key"][len(prefix) :], upload["UploadId"])
                            count += 1
        return count

    def _send(
        self,
        key: str,
        data: Content | Copied,
        part_size: int,
        journal: UploadJournal | None,
        report: Progress,
        condition: Condition | None,
    ) -> bool:
        """Whether the object is complete; False where the upload vanished (a lifecycle rule, for one)."""
        origin = data.etag if isinstance(data, Copied) else ""
        upload, arrived = self._begin(key, len(data), part_size, journal, origin)
        upload_id = {"UploadId": upload.upload_id}
        checksum = {"ChecksumAlgorithm": self._checksum} if self._checksum else {}
        report.add(sum(upload.size_of(number) for number in arrived))

        def is_gone() -> None:
            # Of an upload that others aborted, some servers say so when asked for its parts, but hang up on a
            # new part, and take the last request for one that is in progress already.
            with contextlib.suppress(StoreUnavailableError):
                self._client.once("list_parts", key, {**upload_id, "MaxParts": 1})

        def copy_part(number: int, cancelled: threading.Event) -> None:
            assert isinstance(data, Copied)
            span = upload.range_of(number)
            given = {**data.arguments, "CopySourceRange": f"bytes={span.start}-{span.stop - 1}"}
            part = {**upload_id, "PartNumber": number, **given}
            answer = self._client.ask("upload_part_copy", key, part, cancelled=cancelled, doubt=is_gone)
            if not answer.get("CopyPartResult", {}).get("ETag"):
                # Such a server has taken it for the upload of an empty part.
                raise StoreError("the server does not copy parts", operation="copy", key=key)
            arrived[number] = self._part(number, answer["CopyPartResult"])
            report.add(upload.size_of(number))

        def send_part(number: int, cancelled: threading.Event) -> None:
            assert not isinstance(data, Copied)
            with data[upload.range_of(number)] as piece:
                part = {**upload_id, "PartNumber": number, **checksum}
                answer = self._client.ask("upload_part", key, part, body=piece, cancelled=cancelled, doubt=is_gone)
            self._client.metrics.add("bytes.up", upload.size_of(number))
            arrived[number] = self._part(number, answer)
            report.add(upload.size_of(number))

        try:
            missing = [number for number in upload.numbers if number not in arrived]
            self._run(missing, copy_part if isinstance(data, Copied) else send_part)
            if isinstance(data, Copied):
                data.check()
                if len(self._arrived(upload) or ()) != len(upload.numbers):
                    raise StoreError("the server did not copy the parts as asked", operation="copy", key=key)
            whole = {"MultipartUpload": {"Parts": [arrived[number] for number in upload.numbers]}}
            self._complete(key, {**upload_id, **whole}, condition, is_gone)
        except StoreChangedError as error:
            # So it is as well where the answer to the first of two such requests was lost.
            if self._made(upload):
                return True
            if journal is None:
                self._abort_after(error, key, upload.upload_id)
            raise
        except StoreNotFoundError:
            # Completed, and just the answer was lost? Then the object bears the upload's mark.
            return len(arrived) == len(upload.numbers) and self._made(upload)
        except BaseException as error:
            # With a journal, what has arrived is taken up by the next attempt.
            if journal is None or (isinstance(error, StoreError) and not error.retryable):
                self._abort_after(error, key, upload.upload_id)
                if journal is not None:
                    journal.clear()
            raise
        return True

    def _complete(
        self, key: str, given: Mapping[str, Any], condition: Condition | None, doubt: Callable[[], None]
    ) -> None:
        if condition is None:
            self._client.ask("complete_multipart_upload", key, given, doubt=doubt)
            return
        # Ceph takes no notice of the condition here: this leaves a moment, in place of the time of the upload.
        with contextlib.suppress(StoreNotFoundError):
            found = None
            found = str(self._client.ask("head_object", key)["ETag"])
        if found != condition.expected:
            raise changed("complete", key)
        if condition.look is not None:
            condition.look()
        self._client.ask_if("complete_multipart_upload", key, condition.expected, given, doubt=doubt)

    def _begin(
        self, key: str, size: int, part_size: int, journal: UploadJournal | None, origin: str
    ) -> tuple[Upload, dict[int, dict[str, Any]]]:
        """The upload to write to, and its parts that have arrived already."""
        upload = Upload.journaled(journal, self._client.url, key)
        if upload is not None:
            is_same = (upload.size, upload.origin) == (size, origin)
            arrived = self._arrived(upload) if is_same else None
            if arrived is not None:
                return upload, arrived
            self._abort(key, upload.upload_id)
        mark = self._clock.token(8)
        answer = self._client.ask("create_multipart_upload", key, {**self._write_options, "Metadata": {MARK: mark}})
        upload = Upload(self._client.url, key, answer["UploadId"], size, part_size, mark, origin)
        if journal is not None:
            journal.write(asdict(upload))
        return upload, {}

    def _arrived(self, upload: Upload) -> dict[int, dict[str, Any]] | None:
        """The parts that the server holds; None where the upload is gone, or is not what we sent."""
        arrived: dict[int, dict[str, Any]] = {}
        try:
            for page in self._client.pages("list_parts", upload.key, {"UploadId": upload.upload_id}):
                for entry in page.get("Parts", ()):
                    number = entry["PartNumber"]
                    if number not in upload.numbers or entry["Size"] != upload.size_of(number):
                        # Not every server takes a part twice, so the upload is begun anew.
                        return None
                    arrived[number] = self._part(number, entry)
        except StoreNotFoundError:
            return None
        return arrived

    def _run(self, numbers: Iterable[int], send: Callable[[int, threading.Event], None]) -> None:
        """Runs ``send`` for each number of a part, a bounded few at once; the first error cancels the others."""
        cancelled = threading.Event()
        failures: list[BaseException] = []

        def job(number: int) -> None:
            try:
                if not cancelled.is_set():
                    send(number, cancelled)
            except BaseException as error:
                failures.append(error)
                cancelled.set()

        jobs = [self._pool.submit(job, number) for number in numbers]
        try:
            wait(jobs)
            if failures:
                raise failures[0]
        finally:
            cancelled.set()
            # Parts that are on their way read the caller's content: they end before we return.
            wait(jobs)
            # An error holds the frames that hold this list.
            failures.clear()

    def _part(self, number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        field = f"Checksum{self._checksum}"
        return {**part, field: answer[field]} if self._checksum and field in answer else part

    def _made(self, upload: Upload) -> bool:
        """Whether the object that is there is this upload's."""
        try:
            found = self._client.ask("head_object", upload.key)
        except StoreNotFoundError:
            return False
        is_marked = upload.mark and found.get("Metadata", {}).get(MARK) == upload.mark
        return bool(is_marked and found["ContentLength"] == upload.size)

    def _abort(self, key: str, upload_id: str, cancelled: threading.Event | None = None) -> None:
        with contextlib.suppress(StoreNotFoundError):
            self._client.ask("abort_multipart_upload", key, {"UploadId": upload_id}, cancelled=cancelled)

    def _abort_after(self, failure: BaseException, key: str, upload_id: str) -> None:
        # Asked once only: the server may be what failed, and the next look for stale uploads finds it.
        once = threading.Event()
        once.set()
        try:
            self._abort(key, upload_id, once)
        except StoreError as error:
            _log.warning("parts of an upload stay on the server (%s) after: %s", error, failure)


def _server_time(answer: Mapping[str, Any]) -> datetime:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
