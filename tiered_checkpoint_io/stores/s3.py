"""S3Store: uploads go out as slices of their content, ranged GETs land in the caller's buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import OF_ALL_REQUESTS, TieredCheckpointConfig
from tiered_checkpoint_io.stores.base import (
    ObjectInfo,
    UploadContent,
    UploadJournal,
    check_size,
    delete_each,
    tag_of_put,
)
from tiered_checkpoint_io.stores.retry import Progress
from tiered_checkpoint_io.stores.s3_client import Condition, S3Client, content_of, fill, size_of
from tiered_checkpoint_io.stores.s3_errors import is_changed
from tiered_checkpoint_io.stores.s3_uploads import (
    COPY_PART,
    MARK,
    MIB,
    Copied,
    MultipartUploads,
    mark_of,
    part_size_for,
)

__all__ = ["MIB", "S3Store"]

#: Up to this size an object is copied by one request (S3 allows 5 GiB), and beyond it in parts.
_COPY_WHOLE = 1024 * MIB
#: Ends of the names of directory buckets (S3 Express), and of their access points.
_DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")
#: Most keys that S3 takes in one request to delete.
_DELETES = 1000


class S3Store(MultipartUploads):
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

        Args:
            url: ``s3://bucket/prefix``.
            part_size: Bytes of one part of an upload.
            write_concurrency: Parts in flight at once.
            read_concurrency: Connections that reads may use at once.
            write_options: Passed to each request that makes an object, by boto3's names.
            clock: With the bounds of requests and of their repetition.
            connection: ``endpoint_url``, ``region`` and further options of :class:`S3Client`.
        """
        connections = write_concurrency + read_concurrency + 4
        client = S3Client(url, connections=connections, clock=clock, **connection)
        super().__init__(client, dict(write_options or {}), workers=write_concurrency, clock=clock)
        self.url, self.metrics = self._client.url, self._client.metrics
        self._lists_folders_alone = ids.parse_s3_url(url)[0].endswith(_DIRECTORY_BUCKETS)
        self._part_size = part_size
        self._copy_whole, self._copy_part = _COPY_WHOLE, COPY_PART

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
            self.send(key, data, part_size, journal, Progress(progress), condition)
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
        with _as_changed(source):
            found = self._client.ask("head_object", source)
            check_size(source, size_of(found, source), size)
            check()
            copied = Copied(self._client.copy_source(source, found["ETag"]), found["ETag"], size, check)
            if size > self._copy_whole:
                part_size = part_size_for(size, self._copy_part)
                self.send(target, copied, part_size, journal, Progress(progress))
            else:
                self._copy_at_once(target, copied, journal)
                if progress is not None:
                    progress(size)
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


@contextlib.contextmanager
def _as_changed(key: str) -> Iterator[None]:
    """Copies an object, whose change meanwhile is a reason to begin again."""
    try:
        yield
    except StoreError as error:
        if not is_changed(error):
            raise
        raise StoreError(
            "it was replaced while it was copied", operation="copy", key=key, reason="unavailable"
        ) from error
