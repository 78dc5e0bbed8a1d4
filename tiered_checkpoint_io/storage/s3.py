"""S3Store: boto3's low-level client with part scheduling of our own.

Uploads go out as slices of the caller's mapped file, ranged GETs land in the caller's buffer; no
byte is copied in between. Errors are translated here, by status and error code.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import boto3
import botocore.config
import botocore.exceptions
import urllib3.exceptions

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    StoreAccessError,
    StoreConfigError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.storage.base import Metrics, ObjectInfo, UploadJournal
from tiered_checkpoint_io.storage.wrappers import Retry

MIB = 1 << 20
MAX_PARTS = 10_000
MAX_PART = 5 << 30
MAX_OBJECT = 5 << 40
_READ_SIZE = 1 * MIB
_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60

_ACCESS = {
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "UnauthorizedAccess",
}
_CONFIG = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidBucketName",
    "NoSuchBucket",
    "PermanentRedirect",
}
_RETRY = {
    "InternalError",
    "OperationAborted",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
)
_CONNECTION = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)


def part_size_for(size: int, wanted: int) -> int:
    """The size of one part: as wanted, raised so that 10,000 parts suffice.

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
    return min(MAX_PART, max(wanted, -(-needed // MIB) * MIB, 5 * MIB))


class _Body(io.RawIOBase):
    """A slice of a buffer as a request's body; hands out large pieces and copies nothing."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

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
        # http.client asks for 16 KiB at a time; whatever it gets it sends in one call.
        count = len(self._data) if size is None or size < 0 else max(size, _READ_SIZE)
        piece = self._data[self._position : self._position + count]
        self._position += len(piece)
        return piece


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
        write_options: dict[str, str] | None = None,
        expected_bucket_owner: str | None = None,
        metrics: Metrics | None = None,
        retry: Retry | None = None,
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
            write_options: Passed to each request that makes an object, by boto3's names.
            expected_bucket_owner: Passed to every request.
            metrics: Counters; new ones by default.
            retry: How a request is repeated; by default within two minutes.
        """
        self._bucket, key = ids.parse_s3_url(url)
        self._prefix = key.strip("/") + "/" if key.strip("/") else ""
        self._url = ids.build_s3_url(self._bucket, key.strip("/"))
        self._part_size = part_size
        self._write_options = dict(write_options or {})
        self._owner = {"ExpectedBucketOwner": expected_bucket_owner} if expected_bucket_owner else {}
        self._metrics = metrics or Metrics()
        self._retry = retry or Retry(self._metrics)
        self._write_concurrency = write_concurrency
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        plain = (endpoint_url or "").startswith("http://")
        config = botocore.config.Config(
            # Retries are counted and bounded by Retry alone.
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=write_concurrency + read_concurrency + 4,
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            # The manifest's hashes are the end-to-end check; some servers answer ranged reads with
            # the checksum of the whole object.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False} if plain else None,
        )
        try:
            session = boto3.session.Session(profile_name=profile, region_name=region)
            self._client: Any = session.client(
                "s3",
                endpoint_url=endpoint_url,
                config=config,
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

    @classmethod
    def from_config(cls, config: TieredCheckpointConfig, url: str) -> S3Store:
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
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    # ----------------------------------------------------------------------------- small objects
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: dict[str, str] = {}
        while True:
            page = self._ask("list", "list_objects_v2", prefix, Prefix=self._prefix + prefix, **token)
            for entry in page.get("Contents", ()):
                key = entry["Key"][len(self._prefix) :]
                yield ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def get(self, key: str) -> bytes:
        def once() -> bytes:
            answer = self._once("get", "get_object", key, Key=self._prefix + key)
            try:
                data: bytes = answer["Body"].read()
            except _CONNECTION as error:
                _translate(error, "get", key, self._url)
            return data

        data = self._retry(once)
        self._metrics.add("bytes.down", len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._put_whole(key, memoryview(data))

    def size(self, key: str) -> int:
        return int(self._ask("head", "head_object", key, Key=self._prefix + key)["ContentLength"])

    def delete(self, key: str) -> None:
        try:
            self._ask("delete", "delete_object", key, Key=self._prefix + key)
        except StoreNotFoundError:
            return

    # ----------------------------------------------------------------------------- large objects
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        self._retry(lambda: self._read_once(key, offset, buffer))
        self._metrics.add("bytes.down", len(buffer))

    def _read_once(self, key: str, offset: int, buffer: memoryview) -> None:
        last = offset + len(buffer) - 1
        answer = self._once(
            "get", "get_object", key, missing_range=True, Key=self._prefix + key, Range=f"bytes={offset}-{last}"
        )
        body = answer["Body"]
        try:
            if "ContentRange" in answer:
                total = int(answer["ContentRange"].rpartition("/")[2])
                skip = 0
            else:
                # Some servers answer a range with the whole object.
                total, skip = int(answer["ContentLength"]), offset
            if total < offset + len(buffer):
                raise CorruptCheckpointError(
                    f"object ends at byte {total}; {offset + len(buffer)} were expected",
                    operation="read",
                    tier="durable",
                    key=key,
                )
            while skip:
                skip -= len(body.read(min(skip, _READ_SIZE)) or _short(key))
            raw = body._raw_stream
            done = 0
            while done < len(buffer):
                count = raw.readinto(buffer[done:])
                if not count:
                    _short(key)
                done += count
        except _CONNECTION as error:
            _translate(error, "get", key, self._url)
        finally:
            body.close()

    def upload(
        self,
        key: str,
        data: memoryview,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        size = len(data)
        part_size = part_size_for(size, self._part_size)
        if size <= part_size:
            self._put_whole(key, data)
            if progress is not None:
                progress(size)
            return
        upload_id, done = self._begin(key, size, part_size, journal)
        numbers = range(1, -(-size // part_size) + 1)
        if progress is not None and done:
            progress(sum(min(part_size, size - (number - 1) * part_size) for number in done))

        def send(number: int) -> None:
            piece = data[(number - 1) * part_size : number * part_size]
            answer = self._ask(
                "part",
                "upload_part",
                key,
                body=piece,
                Key=self._prefix + key,
                UploadId=upload_id,
                PartNumber=number,
                **self._checksum(),
            )
            self._metrics.add("bytes.up", len(piece))
            done[number] = _part(number, answer)
            if progress is not None:
                progress(len(piece))

        try:
            self._all([number for number in numbers if number not in done], send)
            self._ask(
                "complete",
                "complete_multipart_upload",
                key,
                Key=self._prefix + key,
                UploadId=upload_id,
                MultipartUpload={"Parts": [done[number] for number in numbers]},
            )
        except BaseException as error:
            # With a journal, what has arrived is taken up by the next attempt.
            resumable = journal is not None and (not isinstance(error, StoreError) or error.retryable)
            if not resumable:
                self._abort(key, upload_id)
                if journal is not None:
                    journal.clear()
            raise
        if journal is not None:
            journal.clear()

    def abandon(self, key: str, journal: UploadJournal) -> None:
        state = journal.read()
        if state is not None and state.get("key") == key and isinstance(state.get("upload_id"), str):
            self._abort(key, str(state["upload_id"]))
        journal.clear()

    def abort_stale_uploads(self, older_than_s: float = 24 * 3600.0) -> int:
        """Aborts uploads below this prefix that began long ago; their journal is lost.

        Returns:
            How many.
        """
        page = self._ask("list_uploads", "list_multipart_uploads", "", Prefix=self._prefix)
        stale = [
            upload for upload in page.get("Uploads", ()) if time.time() - upload["Initiated"].timestamp() > older_than_s
        ]
        for upload in stale:
            self._abort(upload["Key"][len(self._prefix) :], upload["UploadId"])
        return len(stale)

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None
        self._client.close()

    # ---------------------------------------------------------------------------------- inner parts
    def _put_whole(self, key: str, data: memoryview) -> None:
        self._ask("put", "put_object", key, body=data, Key=self._prefix + key, **self._write_options)
        self._metrics.add("bytes.up", len(data))

    def _begin(
        self, key: str, size: int, part_size: int, journal: UploadJournal | None
    ) -> tuple[str, dict[int, dict[str, Any]]]:
        """The upload to write to, and its parts that have arrived already."""
        state = journal.read() if journal is not None else None
        if state is not None and isinstance(state.get("upload_id"), str):
            upload_id = str(state["upload_id"])
            if (state.get("key"), state.get("size"), state.get("part_size")) == (key, size, part_size):
                try:
                    return upload_id, self._arrived(key, upload_id, size, part_size)
                except StoreNotFoundError:
                    # It was completed or aborted meanwhile; a new one is right in both cases.
                    state = None
            else:
                self._abort(str(state.get("key")), upload_id)
        answer = self._ask("create", "create_multipart_upload", key, Key=self._prefix + key, **self._write_options)
        if journal is not None:
            journal.write({"upload_id": answer["UploadId"], "key": key, "size": size, "part_size": part_size})
        return answer["UploadId"], {}

    def _arrived(self, key: str, upload_id: str, size: int, part_size: int) -> dict[int, dict[str, Any]]:
        done: dict[int, dict[str, Any]] = {}
        marker: dict[str, Any] = {}
        while True:
            page = self._ask("list_parts", "list_parts", key, Key=self._prefix + key, UploadId=upload_id, **marker)
            for entry in page.get("Parts", ()):
                number = entry["PartNumber"]
                if entry["Size"] == min(part_size, size - (number - 1) * part_size):
                    done[number] = _part(number, entry)
            if not page.get("IsTruncated"):
                return done
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def _abort(self, key: str, upload_id: str) -> None:
        try:
            self._ask("abort", "abort_multipart_upload", key, Key=self._prefix + key, UploadId=upload_id)
        except StoreNotFoundError:
            return

    def _checksum(self) -> dict[str, str]:
        algorithm = self._write_options.get("ChecksumAlgorithm")
        return {"ChecksumAlgorithm": algorithm} if algorithm else {}

    def _all(self, numbers: list[int], send: Callable[[int], None]) -> None:
        """Runs ``send`` for each number, a bounded few at once; the first error ends all."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._write_concurrency, thread_name_prefix="tiered-s3")
            pool = self._pool
        jobs: set[Future[None]] = {pool.submit(send, number) for number in numbers}
        try:
            finished, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for job in finished:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            # Parts that are on their way read the caller's buffer: they end before we return.
            wait(jobs)
            raise

    def _ask(self, operation: str, method: str, key: str, **arguments: Any) -> Any:
        return self._retry(lambda: self._once(operation, method, key, **arguments))

    def _once(
        self,
        operation: str,
        method: str,
        key: str,
        *,
        body: memoryview | None = None,
        missing_range: bool = False,
        **arguments: Any,
    ) -> Any:
        self._metrics.add(f"requests.{operation}")
        if body is not None:
            arguments["Body"] = _Body(body)
        try:
            return getattr(self._client, method)(Bucket=self._bucket, **self._owner, **arguments)
        except botocore.exceptions.ClientError as error:
            if missing_range and error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416:
                raise CorruptCheckpointError(
                    "object ends before the range that was asked for", operation="read", tier="durable", key=key
                ) from error
            _translate(error, operation, key, self._url)
        except (botocore.exceptions.BotoCoreError, *_CONNECTION) as error:
            _translate(error, operation, key, self._url)


def _part(number: int, answer: dict[str, Any]) -> dict[str, Any]:
    checksums = {
        name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"
    }
    return {"PartNumber": number, "ETag": answer["ETag"], **checksums}


def _short(key: str) -> NoReturn:
    raise StoreUnavailableError("the connection ended early", operation="get", tier="durable", key=key)


def _translate(error: Exception, operation: str, key: str, url: str) -> NoReturn:
    """Raises our error for one of boto3's: by type, HTTP status and error code, never by text."""
    where = f"{url}/{key}" if key else url
    bucket = url.split("/")[2]
    kind: type[StoreError] = StoreError
    hint: str | None = None
    code = type(error).__name__
    if isinstance(error, botocore.exceptions.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code == "NoSuchBucket":
            kind, hint = StoreConfigError, f"bucket {bucket!r} does not exist there: check dirpath and endpoint_url"
        elif code in _CONFIG or status in (301, 307):
            kind, hint = StoreConfigError, f"bucket {bucket!r} lies in another region, or elsewhere: check region"
        elif code in _RETRY or status in (429, 500, 502, 503, 504):
            kind = StoreUnavailableError
        elif code in _ACCESS or status in (401, 403):
            kind, hint = StoreAccessError, "check the credentials, and their rights on this bucket and prefix"
        elif code in ("NoSuchKey", "NoSuchUpload", "404", "NotFound") or status == 404:
            kind = StoreNotFoundError
    elif isinstance(error, _NO_CREDENTIALS):
        kind, hint = StoreAccessError, "give credentials by environment, profile or role, as boto3 takes them"
    elif isinstance(error, botocore.exceptions.NoRegionError):
        kind, hint = StoreConfigError, "set region"
    elif isinstance(error, _CONNECTION):
        kind, hint = StoreUnavailableError, "check endpoint_url and the network"
    raise kind(f"S3 {operation} failed ({code})", operation=operation, tier="durable", key=where, hint=hint) from error
