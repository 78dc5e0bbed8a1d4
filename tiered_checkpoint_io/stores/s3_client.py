"""S3Client: boto3's low-level client for one bucket and prefix, its credentials, and the bodies it sends and reads.

One request is one attempt of boto3: repeating it is the business of Retry, which counts and bounds it.

boto3 looks for credentials when a client is made, and renews only credentials with a known time of expiry. A file, a
profile or a program with new credentials is read again only here, and only once credentials were refused: to read them
before each request would take megabytes of memory a time, and a process that gives credentials may be slow.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import io
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import boto3
import botocore
import botocore.config
import botocore.configprovider
import botocore.exceptions
import botocore.loaders
import botocore.session
from botocore.response import StreamingBody

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Metrics, Refusals, changed, too_short, validate_key
from tiered_checkpoint_io.stores.retry import Progress, Retry, current_question
from tiered_checkpoint_io.stores.s3_errors import (
    CLIENT_ERRORS,
    NETWORK_HINT,
    is_just_busy,
    may_be_credentials,
    may_refuse_conditions,
    may_want_checksum,
    of_s3,
    refusal,
    request_of,
    translated,
)

_SEND_SIZE, _SKIP_SIZE = 1 << 20, 1 << 20
#: AWS's service models that botocore has read, by its search path: a client that finds one is ten times as fast.
_models: dict[str | None, botocore.loaders.Loader] = {}


def configured_endpoint(profile: str | None) -> str | None:
    """Returns the endpoint that the environment or profile names for S3, as boto3 finds it; None for AWS's own."""
    session = botocore.session.Session(profile=profile)
    try:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None
        found = botocore.configprovider.ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
        ).provide()
    except botocore.exceptions.BotoCoreError:
        # For example, the profile is missing: opening the store raises this error. Until then, saves are for the server
        # that the environment names.
        found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return str(found) if found else None


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition for an object to appear: its tag, and the check by ``look``; see ConditionalStore.upload_if."""

    expected: str | None
    look: Callable[[], None] | None = None


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
        """Makes a client; sends no request. Raises StoreError if there can be none with these.

        Up to ``connections`` may be open at once. ``credentials``, by boto3's names, take the place of its ordinary
        chain, and are never looked for again. ``always`` is passed to every request that takes it, by boto3's names.
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
        self._config = botocore.config.Config(
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
        self._clock = clock
        self._endpoint_url, self._region, self._profile = endpoint_url, region, profile
        self._given = dict(credentials or {})
        self._renewing = threading.Lock()
        self._looked_at = -clock.timing.credentials_again_s + clock.monotonic()
        #: boto3's client. A replaced one may still be used, with the credentials that it has.
        self.boto = self._first_client()

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

        ``method`` is of boto3's client, with ``arguments`` besides bucket and key; without a key, it is about the
        bucket. ``doubt`` is called after each attempt that may have been done all the same; its error is final.
        ``receive`` reads the body of an answer, as a part of the attempt.
        """
        question = current_question()

        def count_sent(count: int) -> None:
            self.metrics.add("bytes.sent", count)
            if question is not None:
                # A large object leaves for longer than a silence may last.
                question.answered()

        sent = Progress(count_sent)

        def attempt() -> Any:
            try:
                return self.once(method, key, arguments, body=body, receive=receive, sent=sent)
            except StoreError as error:
                if doubt is not None and error.reason == "unavailable" and not is_just_busy(error):
                    doubt()
                raise

        return self._retry(attempt, cancelled=cancelled)

    def ask_if(
        self,
        method: str,
        key: str,
        condition: Condition | None,
        arguments: Mapping[str, Any] | None = None,
        *,
        body: memoryview | None = None,
        doubt: Callable[[], None] | None = None,
    ) -> Any:
        """Sends a write, on a condition if one is given, after its look; raises StoreError if the object is another.

        A server that refuses all conditions, or a request whose condition holds, is asked without one. Some servers
        ignore conditions.
        """
        if condition is None:
            return self.ask(method, key, arguments, body=body, doubt=doubt)
        if condition.look is not None:
            condition.look()
        given, expected = arguments or {}, condition.expected
        # Ceph compares with the bare digest; AWS, MinIO and moto take either.
        header = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected.strip('"')}
        # A server that refuses twice although the tag is as expected can't compare tags.
        for _ in range(2 if self._has_conditions else 0):
            try:
                return self.ask(method, key, {**given, **header}, body=body, doubt=doubt)
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
        """Sends a request once; see :meth:`ask`.

        Once more with other credentials, if there are, or with a checksum if the server may have refused these.
        """
        client, had_md5 = self.boto, self._needs_md5
        api = client.meta
        taken = api.service_model.operation_model(api.method_to_api_mapping[method]).input_shape.members
        always = {name: value for name, value in self._always.items() if name in taken}
        request: dict[str, Any] = {"Bucket": self._bucket, **always, **(arguments or {})}
        if key is not None:
            request["Key"] = self.prefix + validate_key(key)
        may_add_md5 = body is not None and "ChecksumAlgorithm" not in request

        def send(client: Any, *, with_md5: bool) -> Any:
            md5 = {"ContentMD5": _md5(body)} if with_md5 and may_add_md5 and body is not None else {}
            with contextlib.nullcontext() if body is None else contextlib.closing(Body(body, sent)) as stream:
                given = request if stream is None else {**request, **md5, "Body": stream}
                try:
                    self._refresh(client)
                    answer = of_s3(method, getattr(client, method)(**given))
                    return answer if receive is None else receive(answer)
                except CLIENT_ERRORS as error:
                    raise translated(error, method, self.url, key) from error

        try:
            return send(client, with_md5=had_md5)
        except StoreError as error:
            wants_md5 = may_add_md5 and not had_md5 and may_want_checksum(error)
            if not wants_md5 and not (may_be_credentials(error) and self._renewed(client)):
                raise
        answer = send(self.boto, with_md5=had_md5 or wants_md5)
        self._needs_md5 |= wants_md5
        return answer

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
        self.boto.close()

    def _refresh(self, client: Any) -> None:
        """Gets new credentials for a client if its present ones are about to expire."""
        try:
            _keys(client)
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            raise
        except Exception as error:
            # A program whose output has expired, or is no JSON; a file with a token that is not there: botocore passes
            # on all its errors.
            raise StoreError(
                f"credentials could not be renewed: {error}",
                operation="connect",
                key=self.url,
                hint="see the program or file that gives them; they are asked for again at the next request",
                reason="access",
            ) from error

    def _renewed(self, refused: Any) -> bool:
        """Returns True if ``boto`` now has other credentials than ``refused``, a client that the server refused.

        New ones are looked for at most every ``credentials_again_s``; without any, all stays as it is. Thread-safe.
        """
        with self._renewing:
            if self.boto is not refused:
                return True
            now = self._clock.monotonic()
            if self._given or now - self._looked_at < self._clock.timing.credentials_again_s:
                return False
            self._looked_at = now
            try:
                session = self._session()
                found, before = _keys(session), None
                # Those of the refused client may be such as can't be renewed.
                with contextlib.suppress(Exception):
                    before = _keys(refused)
                if found is None or found == before:
                    return False
                client = self._client_of(session)
            except Exception:
                # Half written, or not to be had just now: the refusal counts.
                return False
            self.boto = client
        # Requests of other threads that are under way end all the same.
        refused.close()
        return True

    def _first_client(self) -> Any:
        no_client = "no S3 client can be made"
        try:
            # Checked first: boto3's errors quote the endpoint, with all that is in it.
            endpoint = self._endpoint_url or configured_endpoint(self._profile) or ""
            if "@" in endpoint or "?" in endpoint:
                raise ValueError("the endpoint holds a user name, a password or a query; credentials go elsewhere")
            return self._client_of(self._session())
        except botocore.exceptions.CredentialRetrievalError as error:
            # The error quotes a program's output, which may be credentials: so no traceback shows the error, either.
            raise StoreError(
                f"{no_client}: {type(error).__name__} from {error.kwargs.get('provider')}",
                operation="connect",
                key=self.url,
                hint="see what gives the credentials, such as credential_process of the profile",
                reason="config",
            ) from None
        # OSError: the program that gives credentials can't be run, for one.
        except (botocore.exceptions.BotoCoreError, ValueError, OSError) as error:
            raise StoreError(
                f"{no_client}: {error}",
                operation="connect",
                key=self.url,
                hint="check profile, region and endpoint_url, AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL",
                reason="config",
            ) from error

    def _session(self) -> boto3.session.Session:
        core = botocore.session.Session()
        session = boto3.session.Session(
            botocore_session=core, profile_name=self._profile, region_name=self._region, **self._given
        )
        path = core.get_config_variable("data_path")
        core.register_component("data_loader", _models.setdefault(path, botocore.loaders.create_loader(path)))
        return session

    def _client_of(self, session: boto3.session.Session) -> Any:
        # A server other than AWS has no regions, but a signature names one.
        region = session.region_name or ("us-east-1" if self._endpoint_url else None)
        client = session.client("s3", endpoint_url=self._endpoint_url, config=self._config, region_name=region)
        # Counted when they are sent, so that redirects to another region are counted too.
        client.meta.events.register("before-send.s3", self._count)
        _be_patient(client, self._config.read_timeout)
        return client

    def _count(self, event_name: str, **_: Any) -> None:
        self.metrics.add(f"requests.{request_of(botocore.xform_name(event_name.rpartition('.')[2]))}")


def _be_patient(client: Any, read_s: float) -> None:
    """Bounds a client's waits for a server that stops reading as those for one that stops sending.

    urllib3 sends with the timeout for connecting, on a new socket and on one that is used again, and boto3 has no
    setting for it. With a release of boto3 that lacks these attributes it stays so.
    """
    pools = getattr(getattr(getattr(client, "_endpoint", None), "http_session", None), "_pool_classes_by_scheme", {})
    for scheme, pool in pools.items():

        class Patient(pool.ConnectionCls):  # type: ignore[misc, name-defined]
            def connect(self) -> None:
                super().connect()
                self.sock.settimeout(read_s)

            def request(self, *args: Any, **options: Any) -> None:
                if self.sock is not None:
                    # urllib3 puts this on the socket, and sets it again before it connects or waits for an answer.
                    self.timeout = read_s
                super().request(*args, **options)

        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": Patient})


def _keys(source: Any) -> Any:
    """Returns the keys of a session, or of a client, which may renew them; None without, or if botocore hides them."""
    ask = getattr(source, "get_credentials", None) or getattr(source, "_get_credentials", None)
    credentials = None if ask is None else ask()
    return None if credentials is None else credentials.get_frozen_credentials()


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


def content_of(answer: Mapping[str, Any]) -> bytes:
    """Returns the whole body."""
    with contextlib.closing(answer["Body"]) as body:
        data: bytes = body.read()
        return data


def size_of(found: Mapping[str, Any], key: str) -> int:
    """Returns the size of an object, by the answer to a HEAD of it."""
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
    """Fills buffers from an answer that should hold the object's bytes from ``offset`` on; see `read_pieces`."""
    with contextlib.closing(answer["Body"]) as body:
        start, stop, size = _extent_of(answer, key)
        end = offset + sum(len(piece) for piece in pieces)
        if size is not None and size < end:
            raise too_short(key, size, end)
        if start > offset:
            raise _broken_off(key)

        def ended(at: int) -> StoreError | CorruptCheckpointError:
            return _broken_off(key) if at < stop or size is not None else too_short(key, at, end)

        at = start
        # Some servers answer a range with the whole object.
        while at < offset:
            skipped = len(body.read(min(_SKIP_SIZE, offset - at)))
            if not skipped:
                raise ended(at)
            at += skipped
        with _reading(body, key, whole=start == offset) as read:
            for index, piece in enumerate(pieces):
                done = 0
                while done < len(piece):
                    with piece[done:] as rest:
                        count = read(rest)
                    if not count:
                        raise ended(at)
                    done += count
                    at += count
                filled(index)


def _extent_of(answer: Mapping[str, Any], key: str) -> tuple[int, float, int | None]:
    """Returns the first byte of an object in an answer, the end of these bytes, and the object's size if it is known.

    If only the end of the answer shows where its bytes end, that is 0, or infinity if an answer that is cut short
    ends in the same way.
    """
    length = int(answer["ContentLength"]) if "ContentLength" in answer else None
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if "ContentRange" not in answer:
        is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        return 0, length if length is not None else 0 if is_chunked else math.inf, length
    # The size may be left open by "*".
    match = re.search(r"(\d+)-(\d+)/(?:(\d+)|\*)$", answer["ContentRange"])
    if match is None:
        raise _broken_off(key)
    start, last, size = match.groups()
    return int(start), int(last) + 1, None if size is None else int(size)


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


def _broken_off(key: str) -> StoreError:
    text = "the answer broke off, or is not the range asked for"
    return StoreError(text, operation="read", key=key, hint=NETWORK_HINT, reason="unavailable")
