"""Sends an S3 bucket each kind of request that the store sends, once, and tells what became of it.

All objects that it makes lie in a folder of its own below the prefix, and are removed at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import ClientError

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import StoreChangedError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.s3_options import S3Options
from tiered_checkpoint_io.redaction import without_secrets
from tiered_checkpoint_io.stores.s3_client import S3Client
from tiered_checkpoint_io.stores.s3_errors import answer_of, is_just_denied, may_refuse_conditions, translated
from tiered_checkpoint_io.stores.s3_facts import BucketFacts, Condition, Settings, Tried
from tiered_checkpoint_io.stores.s3_parts import MARK
from tiered_checkpoint_io.stores.s3_stale import stale_uploads

#: What a probe left that was killed is removed by the next one after so many seconds.
_ABANDONED_S = 3600.0
_BODY = b"tiered-ckpt doctor"
_NO_TAG = "0" * 32


def probe_bucket(config: TieredCheckpointConfig, folder: str) -> BucketFacts:
    """Probes the bucket and prefix of a configuration's dirpath; each request is sent once.

    Args:
        config: With the bound of a request, ``durable_timeout_s``.
        folder: Below the prefix, where this probe writes; see :func:`ids.doctor_prefix`.

    Raises:
        StoreConfigError: There can be no client: a profile is missing, for one.
    """
    options = S3Options.of(config.s3_options)
    bound = float(config.support.durable_timeout_s)
    timing = SYSTEM.timing
    once = replace(
        timing,
        s3_connect_s=min(bound, timing.s3_connect_s),
        s3_read_s=min(bound, timing.s3_read_s),
        # Over before the first attempt is.
        retry_deadline_s=-1.0,
    )
    client = S3Client(
        config.dirpath,
        connections=2,
        clock=Clock(once, SYSTEM.rng),
        endpoint_url=config.endpoint_url,
        region=config.region,
        profile=config.profile,
        always=options.of_all_requests(),
    )
    try:
        return _Probe(client, folder, options.of_writes()).run()
    finally:
        client.close()


class _Probe:
    """One visit."""

    def __init__(self, client: S3Client, folder: str, write_options: Mapping[str, str]) -> None:
        self._client, self._write_options = client, write_options
        self._folder = folder
        self._object, self._copy, self._parts = (self._folder + name for name in ("object", "copy", "parts"))
        self._tries: list[Tried] = []
        self._headers: Mapping[str, str] = {}
        self._skew_s: float | None = None
        #: For which region the last request was signed: boto3 follows a server that names another one.
        self._signed_for = ""
        self._is_path_style = False
        client.boto.meta.events.register("before-send.s3", self._look_at)

    def run(self) -> BucketFacts:
        self._try("list", lambda: self._ask("list_objects_v2", None, {"Prefix": self._below(""), "MaxKeys": 1}))
        meta = self._client.boto.meta
        facts = BucketFacts(
            url=self._client.url,
            endpoint_url=str(meta.endpoint_url),
            region=str(meta.region_name or ""),
            bucket_region="",
            path_style=self._is_path_style,
            skew_s=self._skew_s,
            tries=tuple(self._tries),
        )
        if facts.is_reached:
            redirected = self._signed_for if self._signed_for != facts.region else ""
            region = self._headers.get("x-amz-bucket-region", redirected)
            with contextlib.suppress(StoreError):
                region = region or self._ask("head_bucket", None).get("BucketRegion", "")
            conditions, key = self._try_writes()
            leftovers, settings = self._leftovers(), self._settings()
            left = self._clear()
            facts = facts._replace(
                bucket_region=region,
                tries=tuple(self._tries),
                conditions=conditions,
                kms_key=key,
                leftovers=leftovers,
                settings=settings,
                left_behind=left,
            )
        return facts

    # ------------------------------------------------------------------------------------ requests
    def _ask(self, method: str, key: str | None, arguments: Mapping[str, Any] | None = None, **options: Any) -> Any:
        before = SYSTEM.wall()
        try:
            answer = self._client.ask(method, key, arguments, **options)
        except StoreError as error:
            self._read_clock(answer_of(error), before)
            raise
        if isinstance(answer, Mapping):
            self._read_clock(answer, before)
        return answer

    def _look_at(self, request: Any, **_: Any) -> None:
        """Looks at a request as it is sent."""
        bucket = ids.parse_s3_url(self._client.url)[0]
        self._is_path_style = f"/{bucket}?" in str(request.url) or f"/{bucket}/" in str(request.url)
        found = request.headers.get("Authorization", b"")
        text = found.decode() if isinstance(found, bytes) else str(found)
        scope = text.partition("Credential=")[2].split("/")
        self._signed_for = scope[2] if len(scope) > 2 else ""

    def _read_clock(self, answer: Mapping[str, Any], before: float) -> None:
        self._headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if self._skew_s is None and "date" in self._headers:
            with contextlib.suppress(ValueError):
                # In whole seconds, at some moment of the request.
                there = parsedate_to_datetime(self._headers["date"]).timestamp() + 0.5
                self._skew_s = (before + SYSTEM.wall()) / 2 - there

    def _try(self, request: str, send: Callable[[], Any]) -> Any:
        """What the request gives, which is kept as tried; None where it failed."""
        try:
            answer = send()
        except StoreNotFoundError:
            # Only a client with the right learns that the upload does not exist.
            self._tries.append(Tried(request))
            return None
        except StoreError as error:
            self._tries.append(_tried(request, error))
            return None
        self._tries.append(Tried(request))
        return answer

    def _put(self, arguments: Mapping[str, Any] | None = None) -> Any:
        with memoryview(_BODY) as body:
            return self._ask("put_object", self._object, {**self._write_options, **(arguments or {})}, body=body)

    def _below(self, key: str) -> str:
        return self._client.prefix + key

    # ------------------------------------------------------------------------------------ writes
    def _try_writes(self) -> tuple[dict[str, Condition], str]:
        """Tries all that writes and reads an object; gives what becomes of conditions, and the KMS key."""
        self._try("absent", lambda: self._ask("get_object", self._folder + "absent", receive=_read))
        put = self._try("put", self._put)
        self._try("get", lambda: self._ask("get_object", self._object, {"Range": "bytes=0-3"}, receive=_read))
        head = self._try("head", lambda: self._ask("head_object", self._object)) or {}
        conditions: dict[str, Condition] = {}
        if put is not None:
            tag = str(put["ETag"]).strip('"')
            conditions["put If-None-Match"] = self._condition(lambda: self._put({"IfNoneMatch": "*"}))
            conditions["put If-Match"] = self._condition(
                lambda: self._put({"IfMatch": _NO_TAG}), lambda: self._put({"IfMatch": tag})
            )
        self._try_parts()
        self._try("copy", lambda: self._ask("copy_object", self._copy, {**self._write_options, **self._copy_of()}))
        self._try("list_uploads", lambda: self._ask("list_multipart_uploads", None, {"Prefix": self._below("")}))
        if put is not None:
            # Where no notice is taken of it, the object is gone: hence last.
            conditions["delete If-Match"] = self._condition(
                lambda: self._ask("delete_object", self._object, {"IfMatch": _NO_TAG})
            )
        self._try("delete", lambda: self._ask("delete_object", self._object))
        self._try("delete_many", lambda: self._delete_many([self._copy, self._parts]))
        return conditions, str(head.get("SSEKMSKeyId", ""))

    def _try_parts(self) -> None:
        made = self._try("create", lambda: self._ask("create_multipart_upload", self._parts, self._marked()))
        # Of an upload that there is not, a server says so only to who may ask for it.
        upload = {"UploadId": made["UploadId"] if made is not None else "none"}
        sent = None
        if made is not None:
            part = {**upload, "PartNumber": 1, **self._checksum()}
            with memoryview(_BODY) as body:
                sent = self._try("part", lambda: self._ask("upload_part", self._parts, part, body=body))
        self._try("list_parts", lambda: self._ask("list_parts", self._parts, upload))
        if made is not None and sent is not None:
            whole = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": sent["ETag"], **_sum_of(sent)}]}}
            self._try("complete", lambda: self._ask("complete_multipart_upload", self._parts, {**upload, **whole}))
            again = self._try("create", lambda: self._ask("create_multipart_upload", self._parts, self._marked()))
            upload = {"UploadId": again["UploadId"]} if again is not None else upload
            part = {**upload, "PartNumber": 1, **self._copy_of(), "CopySourceRange": f"bytes=0-{len(_BODY) - 1}"}
            for name in ("Metadata", "MetadataDirective", "TaggingDirective"):
                part.pop(name)
            self._try("copy_part", lambda: self._ask("upload_part_copy", self._parts, part, receive=_copied))
        self._try("abort", lambda: self._ask("abort_multipart_upload", self._parts, upload))

    def _marked(self) -> dict[str, Any]:
        return {**self._write_options, "Metadata": {MARK: "doctor"}}

    def _checksum(self) -> dict[str, Any]:
        name = self._write_options.get("ChecksumAlgorithm")
        return {"ChecksumAlgorithm": name} if name else {}

    def _copy_of(self) -> dict[str, Any]:
        source = self._client.copy_source(self._object, _NO_TAG)
        # The tag of an object that may not be read is not known, so it is copied as it is.
        source.pop("CopySourceIfMatch")
        return {**source, "MetadataDirective": "REPLACE", "Metadata": {MARK: "doctor"}, "TaggingDirective": "REPLACE"}

    def _condition(self, unmet: Callable[[], Any], met: Callable[[], Any] | None = None) -> Condition:
        """What becomes of a write whose condition is not met, and of one whose condition is."""
        for send, is_met in ((unmet, False), (met, True)):
            if send is None:
                continue
            try:
                send()
            except (StoreChangedError, StoreNotFoundError):
                if is_met:
                    return "misjudged"
            except StoreError as error:
                return "refused" if may_refuse_conditions(error) else None
            else:
                if not is_met:
                    return "ignored"
        return "judged"

    def _delete_many(self, keys: list[str]) -> None:
        objects = {"Objects": [{"Key": self._below(key)} for key in keys], "Quiet": True}
        answer = self._ask("delete_objects", None, {"Delete": objects})
        for failed in answer.get("Errors", ()):
            status = 403 if failed.get("Code") == "AccessDenied" else 0
            error = ClientError({"Error": failed, "ResponseMetadata": {"HTTPStatusCode": status}}, "DeleteObjects")
            raise translated(error, "delete_objects", self._client.url, keys[0]) from error

    def _clear(self) -> tuple[str, ...]:
        """Removes what is left of this probe, and of earlier ones that were killed; gives what of this one stays."""
        found: list[Any] = []
        mine = {self._below(key) for key in (self._object, self._copy, self._parts)}
        try:
            query = {"Prefix": self._below(ids.DOCTOR_PREFIX)}
            for page in self._client.pages("list_objects_v2", None, query):
                found += page.get("Contents", ())
        except StoreError:
            found = [{"Key": key} for key in mine]
        left = []
        for entry in found:
            age = SYSTEM.wall() - (self._skew_s or 0) - entry.get("LastModified", _LONG_AGO).timestamp()
            if entry["Key"] not in mine and age < _ABANDONED_S:
                # Another probe is at work.
                continue
            try:
                self._ask("delete_object", entry["Key"][len(self._client.prefix) :])
            except StoreError:
                left.append(entry["Key"])
        if any(each.request == "abort" and each.failed for each in self._tries):
            left.append(self._below(self._parts))
        return tuple(sorted({key for key in left if key in mine}))

    # ---------------------------------------------------------------------- what others left and set
    def _leftovers(self) -> int | None:
        try:
            return sum(1 for _ in stale_uploads(self._client, SYSTEM.timing.abandoned_s))
        except StoreError:
            return None

    def _settings(self) -> Settings:
        unread: list[str] = []

        def read(method: str, action: str) -> Mapping[str, Any]:
            try:
                answer: Mapping[str, Any] = self._ask(method, None)
            except StoreNotFoundError:
                # None is set.
                return {}
            except StoreError:
                unread.append(action)
                return {}
            return answer

        versioning = read("get_bucket_versioning", "s3:GetBucketVersioning")
        lifecycle = read("get_bucket_lifecycle_configuration", "s3:GetLifecycleConfiguration")
        lock = read("get_object_lock_configuration", "s3:GetBucketObjectLockConfiguration")
        kept = lock.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
        days = int(kept.get("Days", 0)) + 365 * int(kept.get("Years", 0))
        rules = tuple(rule for rule in lifecycle.get("Rules", ()) if rule.get("Status") == "Enabled")
        return Settings(str(versioning.get("Status", "")), rules, days, tuple(unread))


_LONG_AGO = datetime.fromtimestamp(0)  # noqa: DTZ006 - compared by its timestamp alone


def _tried(request: str, error: StoreError) -> Tried:
    facts = answer_of(error).get("Error", {})
    return Tried(
        request,
        code=str(facts.get("Code") or type(error.__cause__ or error).__name__),
        text=error.message,
        server_text=without_secrets(str(facts.get("Message") or "")),
        hint=error.hint or "",
        is_denied=is_just_denied(error),
        is_passing=error.retryable,
    )


def _read(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    with contextlib.closing(answer["Body"]) as body:
        body.read()
    return answer


def _copied(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if not answer.get("CopyPartResult", {}).get("ETag"):
        # Such a server has taken it for the upload of an empty part.
        raise StoreError("the server does not copy parts", operation="copy")
    return answer


def _sum_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
