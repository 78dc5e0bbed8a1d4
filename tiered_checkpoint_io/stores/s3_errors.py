"""Errors of boto3 and their meaning: by type, HTTP status and S3's error code, never by text."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import botocore
import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from tiered_checkpoint_io.errors import CorruptCheckpointError, Reason, StoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import store_error

#: Names of requests in metrics (``requests.<name>``) and errors if that is not the method's first word.
_REQUESTS = {
    "create_session": "session",
    "list_multipart_uploads": "list_uploads",
    "list_parts": "list_parts",
    "upload_part": "part",
    "upload_part_copy": "copy",
}

#: The actions that AWS asks for at each request that the store sends.
NEEDS: dict[str, tuple[str, ...]] = {
    "list": ("s3:ListBucket",),
    # Of what is not there, AWS says so only to who may list the bucket.
    "absent": ("s3:GetObject", "s3:ListBucket"),
    "put": ("s3:PutObject",),
    "get": ("s3:GetObject",),
    "head": ("s3:GetObject",),
    "create": ("s3:PutObject",),
    "part": ("s3:PutObject",),
    "complete": ("s3:PutObject",),
    "list_parts": ("s3:ListMultipartUploadParts",),
    "abort": ("s3:AbortMultipartUpload",),
    "copy": ("s3:GetObject", "s3:PutObject"),
    "list_uploads": ("s3:ListBucketMultipartUploads",),
    "delete": ("s3:DeleteObject",),
}


def request_of(method: str) -> str:
    """Returns the name of the request that a method of boto3's client sends."""
    return _REQUESTS.get(method, method.partition("_")[0])


_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.SSOError,
)


class ForeignAnswerError(Exception):
    """An answer of which S3 would have said more: a proxy, or another server, has answered in its place."""


_CONNECTION = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    # An answer cut short is not XML any more.
    botocore.parsers.ResponseParserError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)
#: Errors that boto3's client, or reading its answers, raises.
CLIENT_ERRORS = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    ForeignAnswerError,
    *_CONNECTION,
)

NETWORK_HINT = "check endpoint_url and the network"
_CREDENTIALS_HINT = "give credentials by environment, profile or role, as boto3 takes them"
_ARCHIVED_HINT = "it was archived, by a lifecycle rule for one: have S3 restore it (aws s3api restore-object)"
_FULL_HINT = "no room: free some (tiered-ckpt prune), or raise the quota; what was saved before is intact"
_FOREIGN_HINT = "no S3 server answers so; check endpoint_url, and the proxies in HTTPS_PROXY"
_PROXY_HINT = "the proxy did not pass it on; check HTTPS_PROXY, HTTP_PROXY and NO_PROXY, and its user and password"
#: Error codes whose HTTP status, mostly 400, does not show their meaning.
_BAD_KEYS = {
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidIdentityToken",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
#: The time of a request is too far from the server's: 15 minutes on AWS.
_CLOCK = "RequestTimeTooSkewed"
#: Code of an object in Glacier: it must be restored there before a read, which takes hours.
_ARCHIVED = "InvalidObjectState"
#: MinIO's code if its disks are full, and parts of the codes for a used-up quota. Ceph and versitygw send that with
#: HTTP 403, though no right is missing.
_FULL, _QUOTA = "XMinioStorageFull", "QuotaExceeded"
_NO_REASON = {"400", "Bad Request"}
_ELSEWHERE = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
#: AWS says ConditionalRequestConflict if another write on a condition is under way: only later it is known which of
#: them holds. BadDigest, similar codes and IncompleteBody are for a body that was damaged or cut short in transfer.
_BUSY = {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "ConditionalRequestConflict",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
#: Codes with which servers refuse a body without a checksum. AWS says the first of many other things as well.
_NO_CHECKSUM = {"InvalidRequest", "MissingContentMD5"}
#: Code with which servers say that a condition of a write is not met.
_CHANGED = {"PreconditionFailed"}
#: Codes of servers that know no conditions of writes. AWS says some of these of many other things as well.
_NO_CONDITIONS = {"InvalidArgument", "InvalidRequest", "NotImplemented", "UnsupportedHeader"}
#: Failures of a server, or a gateway (52x is Cloudflare's), that a repetition will not solve: what it does not
#: implement, a version of HTTP that it does not speak, and no space left.
_LASTING = {501, 505, 507}
_BUSY_STATUS = {408, 429, *range(500, 600)} - _LASTING
#: Types of pages that no S3 server sends as an error, except for some requests: S3 errors are XML.
_PAGES = {"text/html", "text/plain"}
#: Requests of which S3 servers say so in plain text: rclone of a copy, that there is nothing to copy.
_PLAIN = {"head", "copy"}
#: Meaning of such a page. By 404 S3 would say that there is no such object, a gateway that it has lost its way there.
_FOREIGN: dict[int, Reason] = {401: "access", 403: "access", 404: "unavailable"}
#: Keys of a success of S3, by boto3's methods: one at least must be there. Without any, a list would be an empty one.
_SAID = {
    "list_objects_v2": {"Name", "IsTruncated", "KeyCount", "MaxKeys", "Contents", "CommonPrefixes"},
    "get_object": {"ETag", "LastModified"},
    "head_object": {"ETag"},
    "put_object": {"ETag"},
    "create_multipart_upload": {"UploadId"},
    "upload_part": {"ETag"},
    "list_parts": {"UploadId", "IsTruncated", "MaxParts", "Parts"},
    "complete_multipart_upload": {"ETag", "Key", "Location"},
}


#: The reason of a failure, and a hint.
_Meaning = tuple[Reason | None, str | None]


def of_s3(method: str, answer: Any) -> Any:
    """Returns boto3's answer; raises ForeignAnswerError if it has none of S3's own fields."""
    if method in _SAID and not _SAID[method] & answer.keys():
        if "Body" in answer:
            answer["Body"].close()
        raise ForeignAnswerError(method)
    return answer


def translated(error: Exception, method: str, url: str, key: str | None) -> StoreError | CorruptCheckpointError:
    """Returns our error for one of ``CLIENT_ERRORS``, about an object, or the bucket if ``key`` is None."""
    request = request_of(method)
    if isinstance(error, botocore.exceptions.ClientError):
        answer: Any = error.response
        facts, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode", 0))
        if status == 416:
            return CorruptCheckpointError(
                "object ends before the range that was asked for", operation="read", tier="durable", key=key
            )
        region = facts.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region")
        code = str(facts.get("Code") or status)
        if botocore.xform_name(error.operation_name) != method:
            return _no_credentials(error.operation_name, code, status, url)
        kind = str(meta.get("HTTPHeaders", {}).get("content-type", "")).partition(";")[0]
        if status in _FOREIGN and code == str(status) and request not in _PLAIN and kind in _PAGES:
            return _error((_FOREIGN[status], _FOREIGN_HINT), request, f"a page, HTTP {status}", url, key)
        return refusal(request, code=code, status=status, url=url, key=key, region=region)
    return _error(_failure(error), request, type(error).__name__, url, key)


def refusal(
    request: str, *, code: str, status: int, url: str, key: str | None, region: str | None = None
) -> StoreError:
    """Returns the error for an answer that is no success; without a body (HEAD), its code is the status as text."""
    meaning = _meaning(request, code, status, ids.parse_s3_url(url)[0], region)
    return _error(meaning, request, _label(code, status), url, key)


def _no_credentials(operation: str, code: str, status: int, url: str) -> StoreError:
    """Returns the error if another service, or S3 itself, did not return the keys to sign a request.

    Its operation is the one that failed, as botocore has it, which is no name of a request.
    """
    reason, hint = _meaning(operation, code, status, ids.parse_s3_url(url)[0], None)
    if reason not in ("unavailable", "config"):
        reason = "credentials"
        hint = f"check the role, or its token or keys, and whether they may call {operation}"
    text = f"credentials could not be had: {operation} failed ({_label(code, status)})"
    return store_error(reason, text, operation=operation, key=url, hint=hint)


def _label(code: str, status: int) -> str:
    return code if code == str(status) else f"{code}, HTTP {status}"


def _error(meaning: _Meaning, request: str, label: str, url: str, key: str | None) -> StoreError:
    reason, hint = meaning
    where = f"{url}/{key}" if key is not None else url
    return store_error(reason, f"S3 {request} failed ({label})", operation=request, key=where, hint=hint)


def answer_of(error: StoreError) -> Mapping[str, Any]:
    """Returns the server's answer behind one of our errors, as boto3 has it; empty if there was none."""
    cause = error.__cause__
    return cause.response if isinstance(cause, botocore.exceptions.ClientError) else {}


def _code_of(error: StoreError) -> str:
    return str(answer_of(error).get("Error", {}).get("Code"))


def _status_of(error: StoreError) -> int | None:
    status: int | None = answer_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def is_just_busy(error: StoreError) -> bool:
    """Returns True if the server answered, and did not carry out the request.

    By 500 it may mean anything. By most other statuses from there on a gateway says that it lost the server's answer.
    """
    status = _status_of(error)
    return status is not None and (status < 500 or status == 503)


def is_final(error: BaseException) -> bool:
    """Returns True if the server refused for good: neither a retry nor other credentials would help."""
    if not isinstance(error, StoreError) or error.retryable:
        return False
    if error.is_denied:
        # Credentials that are good may lack a right.
        return error.reason != "credentials" and _status_of(error) in (401, 403)
    # The answer to a HEAD has no body that could say so of the credentials.
    return error.operation != "head" or _code_of(error) not in _NO_REASON


def may_be_credentials(error: StoreError) -> bool:
    """Returns True if one of our errors may be for credentials that were replaced since."""
    # So is a HEAD with a token that has expired.
    return error.is_denied or _code_of(error) in _NO_REASON


def may_want_checksum(error: StoreError) -> bool:
    """Returns True if the server may have refused a body without a checksum: buckets with Object Lock do."""
    return _code_of(error) in _NO_CHECKSUM


def may_refuse_conditions(error: StoreError) -> bool:
    """Returns True if the server may have refused a write because it does not support conditions."""
    return _code_of(error) in _NO_CONDITIONS or _status_of(error) == 501


def _meaning(request: str, code: str, status: int, bucket: str, region: str | None) -> _Meaning:
    if code == "NoSuchBucket":
        return "config", f"bucket {bucket!r} does not exist there; check dirpath and endpoint_url"
    if code == "InvalidBucketName":
        return "config", f"{bucket!r} is not a name that this server allows for a bucket"
    if code in _ELSEWHERE or status in (301, 307):
        where = f"is in region {region!r}" if region else "is in another region, or at another endpoint"
        return "config", f"bucket {bucket!r} {where}; set region and endpoint_url accordingly"
    if code in _CHANGED or status == 412:
        return "changed", "another run, or another node, works on the same name; it is read again"
    if code in _BUSY or code.startswith("Throttl") or status in _BUSY_STATUS:
        return "unavailable", None
    if code == _CLOCK:
        return "credentials", "this machine's clock is wrong by more than the server allows"
    if code == _ARCHIVED:
        return "archived", _ARCHIVED_HINT
    if code == _FULL or _QUOTA in code or status == 507:
        return "full", _FULL_HINT
    if code in _BAD_KEYS or code.startswith("ExpiredToken"):
        return "credentials", "the credentials are wrong or have expired; " + _CREDENTIALS_HINT
    if status == 407:
        return "config", _PROXY_HINT
    if status in (401, 403):
        # Of what is not there, AWS says so only to who may list the bucket.
        actions = NEEDS["absent" if request in ("get", "head") else request] if request in NEEDS else ()
        needed = f": this needs {' and '.join(actions)}" if actions else ""
        return "access", f"check the credentials, and their rights on this bucket and prefix{needed}"
    if status == 404:
        return "missing", None
    if status == 400 and code in _NO_REASON:
        return None, "the answer gives no reason; a wrong region or an expired token are the usual ones"
    return None, None


def _failure(error: Exception) -> _Meaning:
    if isinstance(error, _NO_CREDENTIALS):
        return "credentials", _CREDENTIALS_HINT
    if isinstance(error, botocore.exceptions.NoRegionError | botocore.exceptions.InvalidRegionError):
        return "config", "set region"
    if isinstance(error, botocore.exceptions.MissingDependencyException):
        return "config", "this ChecksumAlgorithm, or access point, needs awscrt: pip install 'botocore[crt]'"
    if isinstance(error, botocore.exceptions.UnsupportedS3AccesspointConfigurationError):
        return "config", "set region to that of the access point"
    if isinstance(error, botocore.exceptions.SSLError) and _is_bad_certificate(error):
        return "config", "the server's certificate is not trusted; check endpoint_url and AWS_CA_BUNDLE"
    if isinstance(error, ForeignAnswerError):
        return "unavailable", _FOREIGN_HINT
    if isinstance(error, botocore.exceptions.ProxyConnectionError):
        return "unavailable", _PROXY_HINT
    if isinstance(error, _CONNECTION):
        return "unavailable", NETWORK_HINT
    return None, None


def _is_bad_certificate(error: BaseException | None) -> bool:
    if error is None or isinstance(error, ssl.SSLCertVerificationError):
        return error is not None
    return _is_bad_certificate(error.__cause__ or error.__context__)
