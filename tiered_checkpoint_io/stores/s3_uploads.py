"""Multipart uploads: begun, resumed, completed, aborted. ``ask`` makes the requests of boto3."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from tiered_checkpoint_io.errors import InvalidNameError, StoreError, StoreNotFoundError, StoreUnavailableError
from tiered_checkpoint_io.stores.base import Content, Store, UploadJournal
from tiered_checkpoint_io.stores.s3_parts import Cut, Journaled, PartPool, composite_etag
from tiered_checkpoint_io.stores.wrappers import Progress

_log = logging.getLogger("tiered_checkpoint_io.s3")


class Ask(Protocol):
    """Sends a request, repeated as need be, and gives boto3's answer.

    ``doubt`` is called after each attempt that got no answer, or an internal error; what it raises is final.
    """

    def __call__(
        self,
        operation: str,
        method: str,
        key: str | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
        cancelled: threading.Event | None = None,
        doubt: Callable[[], None] | None = None,
    ) -> Any: ...


class AskOnce(Protocol):
    """Sends a request once, and gives boto3's answer."""

    def __call__(
        self, operation: str, method: str, key: str | None, arguments: Mapping[str, Any] | None = None
    ) -> Any: ...


class MultipartUploads:
    """The multipart uploads of one store."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        write_options: Mapping[str, str],
        ask: Ask,
        ask_once: AskOnce,
        *,
        workers: int,
    ) -> None:
        """Takes what it works with.

        Args:
            store: Whose uploads these are.
            prefix: Its prefix within the bucket.
            write_options: For the request that begins an upload.
            ask: Sends a request, repeatedly if need be.
            ask_once: Sends one once.
            workers: Parts in flight at once.
        """
        self._url = store.url
        self._metrics = store.metrics
        self._prefix = prefix
        self._write_options = write_options
        self._checksum = write_options.get("ChecksumAlgorithm")
        self._ask = ask
        self._ask_once = ask_once
        self._parts = PartPool(workers)

    def close(self) -> None:
        self._parts.close()

    def send(self, key: str, data: Content, part_size: int, journal: UploadJournal | None, report: Progress) -> None:
        """Uploads ``data``; see :meth:`Store.upload`."""
        for _ in range(2):
            report.restart()
            if self._send(key, data, part_size, journal, report):
                return
        raise StoreUnavailableError(
            "others aborted the upload, twice", operation="upload", tier="durable", key=f"{self._url}/{key}"
        )

    def abandon(self, key: str, journal: UploadJournal) -> None:
        """Ends the upload that a journal describes."""
        upload = Journaled.from_json(journal.read())
        if upload is not None and (upload.url, upload.key) == (self._url, key):
            self._abort(key, upload.upload_id)
        journal.clear()

    def abort_stale(self, older_than_s: float) -> int:
        """Aborts uploads below the prefix that are older than this; gives their number."""
        count = 0
        query = {"Prefix": self._prefix}
        while True:
            try:
                page = self._ask("list_uploads", "list_multipart_uploads", None, query)
            except StoreNotFoundError:
                # How rclone says that there are none.
                return count
            now = _server_time(page)
            for upload in page.get("Uploads", ()):
                if (now - upload["Initiated"]).total_seconds() > older_than_s:
                    # What is no key of ours is not ours to abort.
                    with contextlib.suppress(InvalidNameError):
                        self._abort(upload["Key"][len(self._prefix) :], upload["UploadId"])
                        count += 1
            if not page.get("IsTruncated"):
                return count
            query |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _send(self, key: str, data: Content, part_size: int, journal: UploadJournal | None, report: Progress) -> bool:
        """Whether the object is complete; False where the upload vanished (a lifecycle rule, for one)."""
        upload, arrived = self._begin(key, len(data), part_size, journal)
        cut = upload.cut
        upload_id = {"UploadId": upload.upload_id}
        checksum = {"ChecksumAlgorithm": self._checksum} if self._checksum else {}
        report.add(sum(cut.size_of(number) for number in arrived))

        def is_gone() -> None:
            # Of an upload that others aborted, some servers say so when asked for its parts, but hang up on a
            # new part, and take the last request for one that is in progress already.
            with contextlib.suppress(StoreUnavailableError):
                self._ask_once("list_parts", "list_parts", key, {**upload_id, "MaxParts": 1})

        def send_part(number: int, cancelled: threading.Event) -> None:
            start, end = cut.bounds(number)
            with data[start:end] as piece:
                part = {**upload_id, "PartNumber": number, **checksum}
                answer = self._ask("part", "upload_part", key, part, body=piece, cancelled=cancelled, doubt=is_gone)
            self._metrics.add("bytes.up", end - start)
            arrived[number] = self._part(number, answer)
            report.add(end - start)

        try:
            self._parts.run([number for number in cut.numbers if number not in arrived], send_part)
            whole = {**upload_id, "MultipartUpload": {"Parts": [arrived[number] for number in cut.numbers]}}
            self._ask("complete", "complete_multipart_upload", key, whole, doubt=is_gone)
        except StoreNotFoundError:
            if journal is not None:
                journal.clear()
            # Completed, and just the answer was lost? Then the object bears these parts' ETag.
            return len(arrived) == len(cut.numbers) and self._consists_of(key, arrived)
        except BaseException as error:
            # With a journal, what has arrived is taken up by the next attempt.
            if journal is None or (isinstance(error, StoreError) and not error.retryable):
                self._abort_after(error, key, upload.upload_id)
                if journal is not None:
                    journal.clear()
            raise
        if journal is not None:
            journal.clear()
        return True

    def _begin(
        self, key: str, size: int, part_size: int, journal: UploadJournal | None
    ) -> tuple[Journaled, dict[int, dict[str, Any]]]:
        """The upload to write to, and its parts that have arrived already."""
        upload = Journaled.from_json(journal.read()) if journal is not None else None
        if upload is not None and (upload.url, upload.key) == (self._url, key):
            arrived = self._arrived(upload) if upload.cut.size == size else None
            if arrived is not None:
                return upload, arrived
            self._abort(key, upload.upload_id)
        answer = self._ask("create", "create_multipart_upload", key, self._write_options)
        upload = Journaled(self._url, key, answer["UploadId"], Cut(size, part_size))
        if journal is not None:
            journal.write(upload.to_json())
        return upload, {}

    def _arrived(self, upload: Journaled) -> dict[int, dict[str, Any]] | None:
        """The parts that the server holds; None where the upload is gone, or is not what we sent."""
        arrived: dict[int, dict[str, Any]] = {}
        query: dict[str, Any] = {"UploadId": upload.upload_id}
        while True:
            try:
                page = self._ask("list_parts", "list_parts", upload.key, query)
            except StoreNotFoundError:
                return None
            for entry in page.get("Parts", ()):
                number = entry["PartNumber"]
                if not upload.cut.fits(number, entry["Size"]):
                    # Not every server takes a part twice, so the upload is begun anew.
                    return None
                arrived[number] = self._part(number, entry)
            if not page.get("IsTruncated"):
                return arrived
            query["PartNumberMarker"] = page["NextPartNumberMarker"]

    def _part(self, number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        field = f"Checksum{self._checksum}"
        return {**part, field: answer[field]} if self._checksum and field in answer else part

    def _consists_of(self, key: str, parts: Mapping[int, Mapping[str, Any]]) -> bool:
        try:
            found: str = self._ask("size", "head_object", key)["ETag"]
            return found.strip('"') == composite_etag(parts[number]["ETag"] for number in sorted(parts))
        except (StoreNotFoundError, ValueError):
            # ValueError: ETags that are no MD5 sums, which encryption and some servers bring with them.
            return False

    def _abort(self, key: str, upload_id: str, cancelled: threading.Event | None = None) -> None:
        try:
            self._ask("abort", "abort_multipart_upload", key, {"UploadId": upload_id}, cancelled=cancelled)
        except StoreNotFoundError:
            return

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
