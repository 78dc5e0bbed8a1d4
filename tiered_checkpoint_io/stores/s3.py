"""S3Store: uploads go out as slices of their content, ranged GETs land in the caller's buffer.

Uploads in parts are begun, resumed, completed, aborted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import OF_ALL_REQUESTS, TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import MAX_OBJECT, MAX_PART, MAX_PARTS
from tiered_checkpoint_io.stores.base import (
    ObjectInfo,
    UploadContent,
    UploadJournal,
    changed,
    check_size,
    delete_each,
    tag_of_put,
)
from tiered_checkpoint_io.stores.retry import Progress
from tiered_checkpoint_io.stores.s3_client import Condition, S3Client, content_of, fill, size_of
from tiered_checkpoint_io.stores.s3_errors import is_final

MIB = 1 << 20
_MIN_PART = 8 * MIB
#: Key of an object's user metadata by which an upload recognises its object. An ETag does not depend on the content if
#: the bucket encrypts by KMS, in directory buckets (S3 Express), and on some servers.
MARK = "tiered-upload"
#: Bytes of one part that the server copies. The server must answer within the time of one request.
_COPY_PART = 256 << 20
_log = logging.getLogger("tiered_checkpoint_io.s3")
#: Up to this size an object is copied by one request (S3 allows 5 GiB), and beyond it in parts.
_COPY_WHOLE = 1024 * MIB
#: Ends of the names of directory buckets (S3 Express), and of their access points.
_DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")
#: Most keys that S3 takes in one request to delete.
_DELETES = 1000


def mark_of(found: Mapping[str, Any]) -> str | None:
    """Returns the mark that an object bears, by the answer to a HEAD of it; None if it bears none."""
    # Some servers, and proxies, write the names of metadata in other cases.
    return next((value for name, value in found.get("Metadata", {}).items() if name.lower() == MARK), None)


def part_size_for(size: int, wanted: int) -> int:
    """Returns the part size for an object of ``size`` bytes: as wanted, raised so that 10,000 parts suffice."""
    if size > MAX_OBJECT:
        raise StoreError(
            f"{size} bytes exceed S3's limit of 48.8 TiB for one object",
            operation="upload",
            hint="save a sharded checkpoint",
        )
    needed = -(-size // MAX_PARTS)
    return min(MAX_PART, max(wanted, -(-needed // MIB) * MIB, _MIN_PART))


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
        state: Any = (journal.read() if journal is not None else None) or {}
        # Another kind of store notes other things.
        with contextlib.suppress(TypeError):
            noted = cls(**state)
            return noted if (noted.url, noted.key) == (url, key) else None
        return None

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

    Requests with ``arguments`` fail if the source's ETag has changed. As some servers ignore the ETag, ``check`` is
    called before the upload is completed.
    """

    arguments: Mapping[str, Any]
    etag: str
    size: int
    check: Callable[[], None]

    def __len__(self) -> int:
        return self.size


class S3Store:
    """A durable tier below a prefix of an S3 bucket."""

    def __init__(
        self,
        url: str,
        *,
        part_size: int = 64 * MIB,
        write_concurrency: int = 16,
        read_concurrency: int = 16,
        write_options: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM,
        **connection: Any,
    ) -> None:
        """Makes a client; sends no request.

        ``write_options``, by boto3's names, are passed to each request that makes an object; ``connection`` are
        further options of :class:`S3Client`.
        """
        connections = write_concurrency + read_concurrency + 4
        self._client, self._clock = S3Client(url, connections=connections, clock=clock, **connection), clock
        self.url, self.metrics = self._client.url, self._client.metrics
        self._lists_folders_alone = ids.parse_s3_url(url)[0].endswith(_DIRECTORY_BUCKETS)
        self._part_size = part_size
        self._write_options = dict(write_options or {})
        self._checksum = self._write_options.get("ChecksumAlgorithm")
        #: One bound of the parts in flight for all uploads.
        self._workers, self._turns = write_concurrency, threading.BoundedSemaphore(write_concurrency)
        self._copy_whole, self._copy_part = _COPY_WHOLE, _COPY_PART

    @classmethod
    def from_config(cls, config: TieredCheckpointConfig, url: str, clock: Clock = SYSTEM) -> S3Store:
        """Returns the store for ``url`` with the options of a configuration."""
        options = config.s3_options or {}
        return cls(
            url,
            part_size=config.chunk_size_MB * MIB,
            write_concurrency=config.write_concurrency(),
            read_concurrency=config.read_concurrency(),
            endpoint_url=config.endpoint_url,
            region=config.region,
            profile=config.profile,
            write_options={name: value for name, value in options.items() if name not in OF_ALL_REQUESTS},
            always={name: value for name, value in options.items() if name in OF_ALL_REQUESTS},
            clock=clock,
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        root = self._client.prefix
        start = root + prefix
        if self._lists_folders_alone:
            # This server refuses any other prefix, so the rest of the prefix is compared below.
            start = start[: start.rfind("/") + 1]
        for page in self._client.pages("list_objects_v2", None, {"Prefix": start}):
            for entry in page.get("Contents", ()):
                key = entry["Key"][len(root) :]
                # Consoles make empty objects to show folders; a key of ours never ends so.
                if key and key.startswith(prefix) and not key.endswith("/"):
                    yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp())

    def children(self, prefix: str) -> Iterator[str]:
        """Yields the names right below ``prefix``; see :func:`children_of`."""
        start = self._client.prefix + prefix
        for page in self._client.pages("list_objects_v2", None, {"Prefix": start, "Delimiter": "/"}):
            found = [each["Prefix"] for each in page.get("CommonPrefixes", ())]
            found += [each["Key"] for each in page.get("Contents", ())]
            yield from (each[len(start) :] for each in found if each != start)

    def get(self, key: str) -> bytes:
        data: bytes = self._client.ask("get_object", key, receive=content_of)
        self.metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._put(key, memoryview(data), None)

    def size(self, key: str) -> int:
        return size_of(self._client.ask("head_object", key), key)

    def delete(self, key: str) -> None:
        with contextlib.suppress(StoreNotFoundError):
            self._client.ask("delete_object", key)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Removes many objects, a thousand a request; one by one if that is refused. Raises as :func:`delete_each`."""
        left: list[str] = []
        for start in range(0, len(keys), _DELETES):
            batch = keys[start : start + _DELETES]
            left += self._client.delete_many(batch) if len(batch) > 1 else batch
        delete_each(self.delete, left)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            self.size(key)
            return
        self.read_pieces(key, offset, [buffer], lambda _: None)

    def read_pieces(self, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fills several buffers by one request; see :func:`read_pieces`."""
        length = sum(len(piece) for piece in pieces)
        wanted = {"Range": f"bytes={offset}-{offset + length - 1}"}
        self._client.ask("get_object", key, wanted, receive=lambda answer: fill(pieces, filled, answer, key, offset))
        self.metrics.add("bytes.down", length)

    # ------------------------------------------------------------------------- conditional writes
    def tag(self, key: str) -> str | None:
        return self._client.tag(key)

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        data, tag = self._client.ask(
            "get_object", key, receive=lambda answer: (content_of(answer), str(answer["ETag"]))
        )
        self.metrics.add("bytes.down", len(data))
        return data, tag

    def put_if(self, key: str, data: bytes, expected: str | None) -> str:
        return self._put(key, memoryview(data), Condition(expected))

    def upload_if(
        self,
        key: str,
        data: UploadContent,
        expected: str | None,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        self._upload(key, data, Condition(expected, look), journal, progress)

    def delete_if(self, key: str, expected: str) -> None:
        with contextlib.suppress(StoreNotFoundError):
            self._client.ask_if("delete_object", key, Condition(expected))

    def _put(self, key: str, data: memoryview, condition: Condition | None) -> str:
        def put() -> str:
            answer = self._client.ask_if("put_object", key, condition, self._write_options, body=data)
            self.metrics.add("bytes.up", len(data))
            return str(answer["ETag"])

        return tag_of_put(self, key, data, put)

    def upload(
        self,
        key: str,
        data: UploadContent,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._upload(key, data, None, journal, progress)

    def _upload(
        self,
        key: str,
        data: UploadContent,
        condition: Condition | None,
        journal: UploadJournal | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        part_size = part_size_for(len(data), self._part_size)
        if len(data) > part_size:
            self._send(key, data, part_size, journal, Progress(progress), condition)
            return
        if journal is not None:
            self.abandon(key, journal)
        with data[0 : len(data)] as whole:
            self._put(key, whole, condition)
        if progress is not None:
            progress(len(data))

    def copy(
        self,
        source: str,
        target: str,
        size: int,
        *,
        check: Callable[[], None],
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Copies an object of ``size`` bytes on the server; see :func:`copy_to`.

        A server answers once it has copied, so that large objects are copied in parts: in parallel, and with no answer
        that takes longer than a request may.
        """
        try:
            found = self._client.ask("head_object", source)
            check_size(source, size_of(found, source), size)
            check()
            copied = Copied(self._client.copy_source(source, found["ETag"]), found["ETag"], size, check)
            if size > self._copy_whole:
                part_size = part_size_for(size, self._copy_part)
                self._send(target, copied, part_size, journal, Progress(progress))
            else:
                self._copy_at_once(target, copied, journal)
                if progress is not None:
                    progress(size)
        except StoreError as error:
            if error.reason != "changed":
                raise
            text = "it was replaced while it was copied"
            raise StoreError(text, operation="copy", key=source, reason="unavailable") from error
        self.metrics.add("bytes.copied", size)

    def _copy_at_once(self, target: str, copied: Copied, journal: UploadJournal | None) -> None:
        if journal is not None:
            self.abandon(target, journal)
        mark = self._clock.token(8)
        # Its own metadata and no tags: to read the source's needs a right that is not needed otherwise.
        ours = {"MetadataDirective": "REPLACE", "Metadata": {MARK: mark}, "TaggingDirective": "REPLACE"}
        self._client.ask("copy_object", target, {**self._write_options, **copied.arguments, **ours})
        made = self._client.ask("head_object", target)
        if size_of(made, target) != copied.size or mark_of(made) not in (None, mark):
            raise StoreError(
                "the copy that the server reported is not there", operation="copy", key=target, reason="unavailable"
            )
        copied.check()

    def close(self) -> None:
        self._client.close()

    # ------------------------------------------------------------------------------ uploads in parts
    def _send(
        self,
        key: str,
        data: UploadContent | Copied,
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
            upload, arrived = self._begin(key, data, part_size, journal)
            try:
                self._send_parts(upload, arrived, data, report, condition)
                is_done = True
            except StoreNotFoundError:
                # It vanished, for example by a lifecycle rule. Or it is completed, and just the answer was lost: then
                # the object bears the upload's mark.
                is_done = len(arrived) == len(upload.numbers) and self._made(upload)
            except BaseException as error:
                # So it is as well if the answer to the first of two such requests was lost.
                is_done = isinstance(error, StoreError) and error.reason == "changed" and self._made(upload)
                # With a journal, the next attempt continues after the arrived parts, maybe with other credentials.
                # Without any, it could not be removed either.
                if not is_done and (journal is None or is_final(error)):
                    # Asked once only: the server may have failed, and the next look for stale uploads finds it.
                    self._let_go(key, upload.upload_id, once=True)
                    if journal is not None:
                        journal.clear()
                if not is_done:
                    raise
            if is_done:
                if journal is not None:
                    journal.clear()
                return
        raise StoreError(
            "others aborted the upload, twice",
            operation="upload",
            key=f"{self._client.url}/{key}",
            reason="unavailable",
        )

    def abandon(self, key: str, journal: UploadJournal) -> None:
        """Ends the upload that a journal describes."""
        upload = Upload.journaled(journal, self._client.url, key)
        if upload is not None:
            self._let_go(key, upload.upload_id)
        journal.clear()

    def try_multipart(self, key: str) -> None:
        """Tries to begin an upload in parts, and aborts it. Only large objects need such uploads."""
        answer = self._client.ask("create_multipart_upload", key, self._write_options)
        self._abort(key, answer["UploadId"])

    def abort_stale_uploads(self, older_than_s: float | None = None) -> int:
        """Aborts uploads below this prefix that began long ago, whose journal is lost.

        Does nothing if the root is a whole bucket: others may be uploading to it. Returns the number of aborted
        uploads; the age, in seconds, a day by default, is by the server's clock.
        """
        count, prefix = 0, self._client.prefix
        age = self._clock.timing.abandoned_s if older_than_s is None else older_than_s
        # rclone answers "not found" if there are no uploads.
        with contextlib.suppress(StoreNotFoundError):
            pages = self._client.pages("list_multipart_uploads", None, {"Prefix": prefix}) if prefix else ()
            for page in pages:
                date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
                now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
                for upload in page.get("Uploads", ()):
                    # A key that is not ours is not ours to abort.
                    with contextlib.suppress(ConfigError):
                        if (now - upload["Initiated"]).total_seconds() > age:
                            self._abort(upload["Key"].removeprefix(prefix), upload["UploadId"])
                            count += 1
        return count

    def _send_parts(
        self,
        upload: Upload,
        arrived: dict[int, dict[str, Any]],
        data: UploadContent | Copied,
        report: Progress,
        condition: Condition | None,
    ) -> None:
        """Sends what is missing of an upload, and completes it; raises StoreNotFoundError if the upload is gone."""
        key, upload_id = upload.key, {"UploadId": upload.upload_id}
        checksum = {"ChecksumAlgorithm": self._checksum} if self._checksum else {}
        report.add(sum(upload.size_of(number) for number in arrived))

        def is_gone() -> None:
            # Of an upload that others aborted, some servers say so when asked for its parts, but hang up on a
            # new part, and take the last request for one that is in progress already.
            try:
                self._client.once("list_parts", key, {**upload_id, "MaxParts": 1})
            except StoreError as error:
                # Other errors say nothing about the upload, such as a missing right to ask.
                if isinstance(error, StoreNotFoundError):
                    raise

        def send_part(number: int, cancelled: threading.Event) -> None:
            part, span = {**upload_id, "PartNumber": number}, upload.range_of(number)
            if isinstance(data, Copied):
                part |= {**data.arguments, "CopySourceRange": f"bytes={span.start}-{span.stop - 1}"}
                copied = self._client.ask("upload_part_copy", key, part, cancelled=cancelled, doubt=is_gone)
                answer = copied.get("CopyPartResult", {})
                if not answer.get("ETag"):
                    # The server has taken this request for the upload of an empty part.
                    raise StoreError("the server does not copy parts", operation="copy", key=key)
            else:
                with data[span] as piece:
                    part |= checksum
                    answer = self._client.ask("upload_part", key, part, body=piece, cancelled=cancelled, doubt=is_gone)
                self._client.metrics.add("bytes.up", upload.size_of(number))
            arrived[number] = self._part(number, answer)
            report.add(upload.size_of(number))

        self._run([number for number in upload.numbers if number not in arrived], send_part)
        if isinstance(data, Copied):
            data.check()
            if len(self._arrived(upload) or ()) != len(upload.numbers):
                raise StoreError("the server did not copy the parts as asked", operation="copy", key=key)
        whole = {"MultipartUpload": {"Parts": [arrived[number] for number in upload.numbers]}}
        # Ceph ignores the condition here: this check leaves a gap of a moment, not of the whole upload.
        if condition is not None and self._client.tag(key) != condition.expected:
            raise changed("complete", key)
        self._client.ask_if("complete_multipart_upload", key, condition, {**upload_id, **whole}, doubt=is_gone)

    def _begin(
        self, key: str, data: UploadContent | Copied, part_size: int, journal: UploadJournal | None
    ) -> tuple[Upload, dict[int, dict[str, Any]]]:
        """Returns the upload to write to, and its parts that have arrived already."""
        size, origin = len(data), data.etag if isinstance(data, Copied) else ""
        upload = Upload.journaled(journal, self._client.url, key)
        if upload is not None:
            is_same = (upload.size, upload.origin) == (size, origin)
            try:
                arrived = self._arrived(upload) if is_same else None
                if arrived is not None:
                    return upload, arrived
            except StoreError as error:
                # Without the right to ask for its parts, the upload would never end.
                if not is_final(error):
                    raise
                _log.warning("what has arrived of %s is sent again: %s", key, error)
            self._let_go(key, upload.upload_id)
        mark = self._clock.token(8)
        answer = self._client.ask("create_multipart_upload", key, {**self._write_options, "Metadata": {MARK: mark}})
        upload = Upload(self._client.url, key, answer["UploadId"], size, part_size, mark, origin)
        if journal is not None:
            journal.write(asdict(upload))
        return upload, {}

    def _arrived(self, upload: Upload) -> dict[int, dict[str, Any]] | None:
        """Returns the parts that the server holds; None if the upload is gone, or is not ours."""
        arrived: dict[int, dict[str, Any]] = {}
        try:
            for page in self._client.pages("list_parts", upload.key, {"UploadId": upload.upload_id}):
                for entry in page.get("Parts", ()):
                    number = entry["PartNumber"]
                    if number not in upload.numbers or entry["Size"] != upload.size_of(number):
                        # Not every server takes a part twice, so the upload begins again.
                        return None
                    arrived[number] = self._part(number, entry)
        except StoreNotFoundError:
            return None
        return arrived

    def _run(self, numbers: Iterable[int], send: Callable[[int, threading.Event], None]) -> None:
        """Runs ``send`` for each number of a part, a bounded few at once; the first error cancels the others."""
        cancelled = threading.Event()

        def job(number: int) -> None:
            try:
                with self._turns:
                    if not cancelled.is_set():
                        send(number, cancelled)
            except BaseException:
                cancelled.set()
                raise

        in_parallel(job, numbers, self._workers)

    def _part(self, number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        field = f"Checksum{self._checksum}"
        return {**part, field: answer[field]} if self._checksum and field in answer else part

    def _made(self, upload: Upload) -> bool:
        """Returns True if this upload made the object that is there."""
        try:
            found = self._client.ask("head_object", upload.key)
        except StoreNotFoundError:
            return False
        is_marked = mark_of(found) == upload.mark
        return bool(is_marked and size_of(found, upload.key) == upload.size)

    def _abort(self, key: str, upload_id: str, cancelled: threading.Event | None = None) -> None:
        with contextlib.suppress(StoreNotFoundError):
            self._client.ask("abort_multipart_upload", key, {"UploadId": upload_id}, cancelled=cancelled)

    def _let_go(self, key: str, upload_id: str, *, once: bool = False) -> None:
        """Aborts an upload that is of no use; if that is not allowed, or fails at ``once``, it stays on the server."""
        cancelled = threading.Event()
        if once:
            cancelled.set()
        try:
            self._abort(key, upload_id, cancelled)
        except StoreError as error:
            if not once and not is_final(error):
                raise
            _log.warning("parts of an upload stay on the server: %s", error)
