"""S3Store: boto3's low-level client with part scheduling of our own.

Uploads go out as slices of the caller's mapped file, ranged GETs land in the caller's buffer. One
request is one attempt of boto3: repeating it is the business of Retry, which counts and bounds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import boto3
import botocore.config
import botocore.exceptions

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    StoreConfigError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.base import Content, Metrics, ObjectInfo, UploadJournal, validate_key
from tiered_checkpoint_io.stores.s3_faults import CLIENT_ERRORS, is_just_busy, translated
from tiered_checkpoint_io.stores.s3_parts import MAX_PARTS, MIB, Body, part_size_for
from tiered_checkpoint_io.stores.s3_uploads import MultipartUploads
from tiered_checkpoint_io.stores.wrappers import Progress, Retry

__all__ = ["MAX_PARTS", "MIB", "S3Store", "part_size_for"]

_RECEIVE_SIZE = 1 * MIB

#: What an operation of boto3 is called in the metrics: ``requests.<name>``.
_REQUEST_NAMES = {
    "AbortMultipartUpload": "abort",
    "CompleteMultipartUpload": "complete",
    "CreateMultipartUpload": "create",
    "DeleteObject": "delete",
    "GetObject": "get",
    "HeadBucket": "head",
    "HeadObject": "head",
    "ListMultipartUploads": "list_uploads",
    "ListObjectsV2": "list",
    "ListParts": "list_parts",
    "PutObject": "put",
    "UploadPart": "part",
}


class S3Store:
    """A durable tier below a prefix of an S3 bucket."""

    def __init__(
        self,
        url: str,
        *,
        part_size: int = 64 * MIB,
        write_concurrency: int = 16,
        read_concurrency: int = 16,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        credentials: Mapping[str, str] | None = None,
        write_options: dict[str, str] | None = None,
        expected_bucket_owner: str | None = None,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """Makes a client; asks nothing of S3.

        Args:
            url: ``s3://bucket/prefix``.
            part_size: Bytes of one part of an upload.
            write_concurrency: Parts in flight at once.
            read_concurrency: Connections that reads may use at once.
            endpoint_url: Of a server other than AWS.
            region: AWS region.
            profile: Profile of the AWS configuration files.
            credentials: ``aws_access_key_id`` and its kin, in place of boto3's ordinary chain.
            write_options: Passed to each request that makes an object, by boto3's names.
            expected_bucket_owner: Passed to every request.
            metrics: Counters; new ones by default.
            clock: With the bounds of requests and of their repetition.
        """
        self._bucket, key = ids.parse_s3_url(url)
        self._prefix = key.strip("/") + "/" if key.strip("/") else ""
        self._url = ids.build_s3_url(self._bucket, key.strip("/"))
        self._part_size = part_size
        self._write_options = dict(write_options or {})
        self._owner = {"ExpectedBucketOwner": expected_bucket_owner} if expected_bucket_owner else {}
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._retry = Retry(self._metrics, clock)
        self._uploads = MultipartUploads(
            self, self._prefix, self._write_options, self._ask, self._once, workers=write_concurrency
        )
        config = botocore.config.Config(
            # Retries are counted and bounded by Retry alone.
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=write_concurrency + read_concurrency + 4,
            connect_timeout=clock.timing.s3_connect_s,
            read_timeout=clock.timing.s3_read_s,
            tcp_keepalive=True,
            # The manifest's hashes are the end-to-end check; some servers answer ranged reads with
            # the checksum of the whole object.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # A SHA-256 of every part, to sign it, costs as much as all the rest of sending it.
            s3={"payload_signing_enabled": False},
        )
        try:
            session = boto3.session.Session(profile_name=profile, region_name=region, **(credentials or {}))
            self._client: Any = session.client(
                "s3",
                endpoint_url=endpoint_url,
                config=config,
                # A server other than AWS has no regions, but a signature names one.
                region_name=session.region_name or ("us-east-1" if endpoint_url else None),
            )
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise StoreConfigError(
                f"no S3 client can be made: {error}",
                operation="connect",
                tier="durable",
                key=self._url,
                hint="check profile, region and endpoint_url",
            ) from error
        if "@" in str(self._client.meta.endpoint_url) or "?" in str(self._client.meta.endpoint_url):
            # Given by the environment or a profile. boto3's errors tell it, and would tell what is in it.
            raise StoreConfigError(
                "the endpoint holds a user name, a password or a query",
                operation="connect",
                tier="durable",
                key=self._url,
                hint="see AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and the profile; credentials go elsewhere",
            )
        # Where requests leave, so that redirects to another region are counted too.
        self._client.meta.events.register("before-send.s3", self._count)

    @classmethod
    def from_config(cls, config: TieredCheckpointConfig, url: str, clock: Clock = SYSTEM) -> S3Store:
        """The store for ``url`` with the options of a configuration."""
        options = {
            "ServerSideEncryption": config.sse,
            "SSEKMSKeyId": config.sse_kms_key_id,
            "ACL": config.acl,
            "StorageClass": config.storage_class,
            "ChecksumAlgorithm": config.checksum_algorithm,
        }
        return cls(
            url,
            part_size=config.chunk_size_MB * MIB,
            write_concurrency=config.write_concurrency(),
            read_concurrency=config.read_concurrency(),
            endpoint_url=config.endpoint_url,
            region=config.region,
            profile=config.profile,
            write_options={key: value for key, value in options.items() if value is not None},
            expected_bucket_owner=config.expected_bucket_owner,
            clock=clock,
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages({"Prefix": self._prefix + prefix}):
            for entry in page.get("Contents", ()):
                key = entry["Key"][len(self._prefix) :]
                # Consoles make empty objects to show folders; a key of ours never ends so.
                if key and not key.endswith("/"):
                    yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp())

    def folders(self, prefix: str) -> Iterator[str]:
        """What lies between ``prefix``, which ends with a slash, and the next slash of any key below it; see Store."""
        for page in self._pages({"Prefix": self._prefix + prefix, "Delimiter": "/"}):
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"][len(self._prefix) + len(prefix) : -1]

    def _pages(self, query: dict[str, str]) -> Iterator[Any]:
        while True:
            page = self._ask("list", "list_objects_v2", None, query)
            yield page
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def get(self, key: str) -> bytes:
        def once() -> bytes:
            body = self._once("get", "get_object", key)["Body"]
            try:
                data: bytes = body.read()
            except CLIENT_ERRORS as error:
                raise translated(error, "get", self._url, key) from error
            finally:
                body.close()
            return data

        data = self._retry(once)
        self._metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._put_whole(key, memoryview(data))

    def size(self, key: str) -> int:
        return int(self._ask("size", "head_object", key)["ContentLength"])

    def delete(self, key: str) -> None:
        try:
            self._ask("delete", "delete_object", key)
        except StoreNotFoundError:
            return

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            self.size(key)
            return
        self._retry(lambda: self._read_once(key, offset, buffer))
        self._metrics.add("bytes.down", len(buffer))

    def _read_once(self, key: str, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        answer = self._once("read", "get_object", key, {"Range": f"bytes={offset}-{end - 1}"})
        body = answer["Body"]
        try:
            start, total = _extent(answer)
            if total < end:
                raise _too_short(key, total, end)
            if start > offset:
                raise _broken_off(key)
            # Some servers answer a range with the whole object.
            for at in range(start, offset, _RECEIVE_SIZE):
                if not body.read(min(_RECEIVE_SIZE, offset - at)):
                    raise _broken_off(key)
            done = 0
            while done < len(buffer):
                # In pieces, because the HTTP client holds each in a buffer of its own on the way.
                with buffer[done : done + _RECEIVE_SIZE] as piece:
                    count = body.readinto(piece)
                if not count:
                    raise _broken_off(key)
                done += count
        except CLIENT_ERRORS as error:
            raise translated(error, "read", self._url, key) from error
        finally:
            body.close()

    def upload(
        self,
        key: str,
        data: Content,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        part_size = part_size_for(len(data), self._part_size)
        if len(data) > part_size:
            self._uploads.send(key, data, part_size, journal, Progress(progress))
            return
        if journal is not None:
            self._uploads.abandon(key, journal)
        with data[0 : len(data)] as whole:
            self._put_whole(key, whole)
        if progress is not None:
            progress(len(data))

    def abandon(self, key: str, journal: UploadJournal) -> None:
        self._uploads.abandon(key, journal)

    def abort_stale_uploads(self, older_than_s: float | None = None) -> int:
        """Aborts uploads below this prefix that began long ago, whose journal is lost.

        Nothing is done where the root is a whole bucket: others may be uploading to it.

        Args:
            older_than_s: Age from which an upload counts as forgotten, by the server's clock; a day by default.

        Returns:
            How many there were.
        """
        age = self._clock.timing.abandoned_s if older_than_s is None else older_than_s
        return self._uploads.abort_stale(age) if self._prefix else 0

    def close(self) -> None:
        self._uploads.close()
        self._client.close()

    def _put_whole(self, key: str, data: memoryview) -> None:
        self._ask("put", "put_object", key, self._write_options, body=data)
        self._metrics.add("bytes.up", len(data))

    # -------------------------------------------------------------------------------------- requests
    def _count(self, event_name: str, **_: Any) -> None:
        operation = event_name.rpartition(".")[2]
        self._metrics.add(f"requests.{_REQUEST_NAMES.get(operation, operation)}")

    def _ask(
        self,
        operation: str,
        method: str,
        key: str | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
        cancelled: threading.Event | None = None,
        doubt: Callable[[], None] | None = None,
    ) -> Any:
        def attempt() -> Any:
            try:
                return self._once(operation, method, key, arguments, body=body)
            except StoreUnavailableError as error:
                if doubt is not None and not is_just_busy(error.__cause__):
                    doubt()
                raise

        return self._retry(attempt, cancelled=cancelled)

    def _once(
        self,
        operation: str,
        method: str,
        key: str | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
    ) -> Any:
        """One request; about the bucket where ``key`` is None, else about an object."""
        request: dict[str, Any] = {"Bucket": self._bucket, **self._owner, **(arguments or {})}
        if key is not None:
            request["Key"] = self._prefix + validate_key(key)
        stream = Body(body) if body is not None else None
        if stream is not None:
            request["Body"] = stream
        try:
            return getattr(self._client, method)(**request)
        except CLIENT_ERRORS as error:
            raise translated(error, operation, self._url, key) from error
        finally:
            if stream is not None:
                stream.close()


def _extent(answer: dict[str, Any]) -> tuple[int, int]:
    """First byte of an answer's body within the object, and the size of the object."""
    content_range = answer.get("ContentRange")
    if content_range is None:
        return 0, int(answer["ContentLength"])
    bounds, _, total = content_range.rpartition(" ")[2].partition("/")
    return int(bounds.partition("-")[0]), int(total)


def _too_short(key: str, total: int, end: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"object ends at byte {total}; {end} were expected", operation="read", tier="durable", key=key
    )


def _broken_off(key: str) -> StoreUnavailableError:
    return StoreUnavailableError("the answer is not the range asked for", operation="read", tier="durable", key=key)
