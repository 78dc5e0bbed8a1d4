"""S3Client: boto3's low-level client for one bucket and prefix.

One request is one attempt of boto3: repeating it is the business of Retry, which counts and bounds it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import botocore
import botocore.config

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Metrics, Refusals, changed, validate_key
from tiered_checkpoint_io.stores.retry import Progress, Retry, current_question
from tiered_checkpoint_io.stores.s3_connection import Connection
from tiered_checkpoint_io.stores.s3_errors import (
    CLIENT_ERRORS,
    is_just_busy,
    may_be_credentials,
    may_refuse_conditions,
    may_want_checksum,
    of_s3,
    refusal,
    request_of,
    translated,
)

_SEND_SIZE = 1 << 20


class S3Client:
    """Sends requests about the objects below a prefix."""

    def __init__(
        self,
        url: str,
        *,
        connections: int,
        clock: Clock,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        credentials: Mapping[str, str] | None = None,
        always: Mapping[str, str] | None = None,
    ) -> None:
        """Makes a client; sends no request.

        Args:
            url: ``s3://bucket/prefix``.
            connections: Number of connections that may be open at once.
            clock: With the bounds of requests and of their repetition.
            endpoint_url: URL of a server other than AWS.
            region: AWS region.
            profile: Profile of the AWS configuration files.
            credentials: ``aws_access_key_id`` and so on, instead of boto3's ordinary chain.
            always: Passed to every request that takes it, by boto3's names.
        """
        self._bucket, key = ids.parse_s3_url(url)
        self.url = ids.build_s3_url(self._bucket, key.strip("/"))
        self.prefix = key.strip("/") + "/" if key.strip("/") else ""
        self.metrics = Metrics()
        self._always = dict(always or {})
        self._retry = Retry(self.metrics, clock)
        #: True if bodies need an MD5 sum: those to a bucket with Object Lock do, which is learned from a refusal.
        self._needs_md5 = False
        #: True if it takes many deletes by one request, too.
        self._has_batches = True
        #: True if the server takes conditions of writes, which is learned from a refusal, too.
        self._has_conditions = True
        config = botocore.config.Config(
            # Only Retry counts and bounds retries.
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=connections,
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
        self._connection = Connection(
            self.url,
            clock=clock,
            config=config,
            on_send=self._count,
            endpoint_url=endpoint_url,
            region=region,
            profile=profile,
            credentials=credentials,
        )

    @property
    def boto(self) -> Any:
        """boto3's client."""
        return self._connection.client

    def ask(
        self,
        method: str,
        key: str | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
        cancelled: threading.Event | None = None,
        doubt: Callable[[], None] | None = None,
        receive: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Sends a request, repeated as need be; returns boto3's answer, or the result of ``receive`` on it.

        Args:
            method: Method of boto3's client.
            key: Key of an object; None for a request about the bucket.
            arguments: Arguments of the method, besides bucket and key.
            body: Body to send.
            cancelled: See :class:`Retry`.
            doubt: Called after each attempt that may have been done all the same; its error is final.
            receive: Reads the body of an answer, as a part of the attempt.
        """
        question = current_question()

        def count_sent(count: int) -> None:
            self.metrics.add("bytes.sent", count)
            if question is not None:
                # A large object leaves for longer than a silence may last.
                question.answered()

        sent = Progress(count_sent)
        has_checksum = body is None or "ChecksumAlgorithm" in (arguments or {})

        def once(*, with_md5: bool) -> Any:
            given = {**(arguments or {}), **({"ContentMD5": _md5(body)} if with_md5 and body is not None else {})}
            return self.once(method, key, given, body=body, receive=receive, sent=sent)

        def attempt() -> Any:
            with_md5 = self._needs_md5 and not has_checksum
            try:
                return once(with_md5=with_md5)
            except StoreError as error:
                if error.reason == "unavailable":
                    if doubt is not None and not is_just_busy(error):
                        doubt()
                    raise
                if with_md5 or has_checksum or not may_want_checksum(error):
                    raise
            answer = once(with_md5=True)
            self._needs_md5 = True
            return answer

        return self._retry(attempt, cancelled=cancelled)

    def ask_if(
        self,
        method: str,
        key: str,
        expected: str | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
        doubt: Callable[[], None] | None = None,
    ) -> Any:
        """Sends a write on the condition that the object has the tag ``expected``; None: that it does not exist.

        A server that refuses all conditions, or a request whose condition holds, is asked without one. Some servers
        ignore conditions.

        Raises:
            StoreError: The object is another.
        """
        given = arguments or {}
        # Ceph compares with the bare digest; AWS, MinIO and moto take either.
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected.strip('"')}
        # A server that refuses twice although the tag is as expected can't compare tags.
        for _ in range(2 if self._has_conditions else 0):
            try:
                return self.ask(method, key, {**given, **condition}, body=body, doubt=doubt)
            except StoreNotFoundError as error:
                # Of an upload in parts that is gone as well, which its caller knows.
                if doubt is not None or method == "delete_object":
                    raise
                raise changed(request_of(method), key) from error
            except StoreError as error:
                if error.reason == "changed":
                    if self.tag(key) != expected:
                        raise
                elif may_refuse_conditions(error):
                    break
                else:
                    raise
        answer = self.ask(method, key, given, body=body, doubt=doubt)
        self._has_conditions = False
        return answer

    def tag(self, key: str) -> str | None:
        """Returns the ETag of an object; None if there is none."""
        try:
            return str(self.ask("head_object", key)["ETag"])
        except StoreNotFoundError:
            return None

    def delete_many(self, keys: Sequence[str]) -> list[str]:
        """Removes up to a thousand objects by one request; returns the keys to delete one by one.

        If the whole request is refused, by the server or because rights are missing, no such request is sent again.

        Raises:
            StoreError: The server did not answer, or could not remove some objects.
        """
        if not self._has_batches:
            return list(keys)
        left: list[str] = []
        delete = {"Objects": [{"Key": self.prefix + validate_key(key)} for key in keys], "Quiet": True}

        def check(answer: Mapping[str, Any]) -> None:
            left.clear()
            for failed in answer.get("Errors", ()):
                code, key = str(failed.get("Code")), str(failed.get("Key", "")).removeprefix(self.prefix)
                error = refusal("delete", code=code, status=0, url=self.url, key=key)
                if error.retryable:
                    raise error
                left.append(key)

        refused = Refusals()
        with refused.kept():
            self.ask("delete_objects", None, {"Delete": delete}, receive=check)
        if refused or not set(left) < set(keys):
            self._has_batches = False
            return list(keys)
        return left

    def once(
        self,
        method: str,
        key: str | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
        receive: Callable[[Any], Any] | None = None,
        sent: Progress | None = None,
    ) -> Any:
        """Sends a request once; see :meth:`ask`. If credentials are refused, once more with others, if there are."""
        client, send = self.boto, functools.partial(self._send, method, key, arguments, body, receive, sent)
        try:
            return send(client)
        except StoreError as error:
            if not may_be_credentials(error) or not self._connection.renewed(client):
                raise
        return send(self.boto)

    def _send(
        self,
        method: str,
        key: str | None,
        arguments: Mapping[str, Any] | None,
        body: memoryview | None,
        receive: Callable[[Any], Any] | None,
        sent: Progress | None,
        client: Any,
    ) -> Any:
        taken = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method]).input_shape.members
        always = {name: value for name, value in self._always.items() if name in taken}
        request: dict[str, Any] = {"Bucket": self._bucket, **always, **(arguments or {})}
        if key is not None:
            request["Key"] = self.prefix + validate_key(key)
        stream = None
        if body is not None:
            request["Body"] = stream = Body(body, sent)
        try:
            self._connection.refresh(client)
            answer = of_s3(method, getattr(client, method)(**request))
            return answer if receive is None else receive(answer)
        except CLIENT_ERRORS as error:
            raise translated(error, method, self.url, key) from error
        finally:
            if stream is not None:
                stream.close()

    def pages(self, method: str, key: str | None, query: Mapping[str, Any]) -> Iterator[Any]:
        """Yields all answers to a request that lists something."""
        while True:
            page = self.ask(method, key, query)
            yield page
            if not page.get("IsTruncated"):
                return
            before, query = query, _behind(page, query)
            if query == before:
                raise StoreError(
                    "the server repeats a page of a list, so that the rest can't be listed",
                    operation=request_of(method),
                    key=self.url,
                    hint="this is a defect of the server",
                )

    def copy_source(self, key: str, etag: str | None) -> dict[str, Any]:
        """Returns the arguments of a request that copies an object, as long as that has this ETag, if any is given."""
        source = {"Bucket": self._bucket, "Key": self.prefix + validate_key(key)}
        owner = self._always.get("ExpectedBucketOwner")
        return {
            "CopySource": source,
            **({"CopySourceIfMatch": etag} if etag is not None else {}),
            **({"ExpectedSourceBucketOwner": owner} if owner else {}),
        }

    def close(self) -> None:
        self._connection.close()

    def _count(self, event_name: str, **_: Any) -> None:
        self.metrics.add(f"requests.{request_of(botocore.xform_name(event_name.rpartition('.')[2]))}")


def _behind(page: Mapping[str, Any], query: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the query for the page after this one, which answers ``query``."""
    # "NextKeyMarker" is the "KeyMarker" of the next page, and so on.
    markers = {name[4:]: value for name, value in page.items() if name.startswith("Next")}
    if any(markers.values()):
        return {**query, **markers}
    # Some servers leave them out: the last entry says as much. No key in a folder sorts after the greatest character.
    names = [entry["Key"] for entry in page.get("Contents", ())]
    names += [entry["Prefix"] + chr(sys.maxunicode) for entry in page.get("CommonPrefixes", ())]
    if names:
        # A token would take precedence.
        rest = {name: value for name, value in query.items() if name != "ContinuationToken"}
        return {**rest, "StartAfter": max(names)}
    if page.get("Parts"):
        return {**query, "PartNumberMarker": page["Parts"][-1]["PartNumber"]}
    last = page["Uploads"][-1] if page.get("Uploads") else {}
    return {**query, **{f"{name}Marker": last[name] for name in ("Key", "UploadId") if name in last}}


def _md5(body: memoryview) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


class Body(io.RawIOBase):
    """A slice of a buffer as a request's body; returns large pieces without a copy.

    Closed, it holds no reference to the buffer any more, whatever still holds the body itself
    (an exception's frames do, for as long as it is looked at).
    """

    def __init__(self, data: memoryview, sent: Progress | None = None) -> None:
        super().__init__()
        self._sent = sent
        if sent is not None:
            sent.restart()
        self._data = data[:]
        self._piece = data[:0]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> Any:
        # The HTTP client asks for 16 KiB at a time, and sends in one call all that it gets.
        count = len(self._data) if size is None or size < 0 else max(size, _SEND_SIZE)
        self._piece.release()
        self._piece = self._data[self._position : self._position + count]
        self._position += len(self._piece)
        if self._sent is not None:
            self._sent.add(len(self._piece))
        return self._piece

    def close(self) -> None:
        if not self.closed:
            self._piece.release()
            self._data.release()
        super().close()
