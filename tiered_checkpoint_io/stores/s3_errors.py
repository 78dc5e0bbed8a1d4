"""What an S3 server's refusal means: decided by HTTP status and error code alone, never by text."""

from __future__ import annotations

from tiered_checkpoint_io.errors import (
    StoreAccessError,
    StoreConfigError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
)

CREDENTIALS_HINT = "give credentials by environment, profile or role, as boto3 takes them"
NETWORK_HINT = "check endpoint_url and the network"
_RIGHTS_HINT = "check the credentials, and their rights on this bucket and prefix"

_BAD_KEYS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "NotSignedUp",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_NO_RIGHTS = {"AccessDenied", "AccountProblem", "AllAccessDisabled", "Forbidden", "UnauthorizedAccess"}
_ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
_BUSY = {
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "TooManyRequests",
}
_BUSY_STATUS = {408, 429, 500, 502, 503, 504}
_MISSING = {"NoSuchKey", "NoSuchUpload", "NotFound"}


def refusal(
    operation: str, *, code: str, status: int, url: str, key: str | None, region: str | None = None
) -> StoreError:
    """The error for an answer that is not a success.

    Args:
        operation: What was asked for.
        code: S3's error code; for a HEAD, whose answer has no body, the status as text.
        status: The HTTP status.
        url: The store's root.
        key: Relative to it; None for the bucket.
        region: The bucket's region, where the server told it.
    """
    bucket = url.split("/")[2]
    kind: type[StoreError] = StoreError
    hint: str | None = None
    if code == "NoSuchBucket":
        kind, hint = StoreConfigError, f"bucket {bucket!r} does not exist there; check dirpath and endpoint_url"
    elif code == "InvalidBucketName":
        kind, hint = StoreConfigError, f"{bucket!r} is not a name that this server allows for a bucket"
    elif code in _ELSEWHERE or status in (301, 307):
        where = f"is in region {region!r}" if region else "is in another region, or at another endpoint"
        kind, hint = StoreConfigError, f"bucket {bucket!r} {where}; set region and endpoint_url accordingly"
    elif code in _BUSY or code.startswith("Throttl") or status in _BUSY_STATUS:
        kind = StoreUnavailableError
    elif code == "RequestTimeTooSkewed":
        kind, hint = StoreAccessError, "this machine's clock is wrong by more than the server allows"
    elif code in _BAD_KEYS:
        kind, hint = StoreAccessError, "the credentials are wrong or have expired; " + CREDENTIALS_HINT
    elif code in _NO_RIGHTS or status in (401, 403):
        kind, hint = StoreAccessError, _RIGHTS_HINT
    elif code in _MISSING or status == 404:
        kind = StoreNotFoundError
    elif status == 400 and code in ("400", "Bad Request"):
        hint = "the answer gives no reason; a wrong region or an expired token are the usual ones"
    label = code if code == str(status) else f"{code}, HTTP {status}"
    return kind(
        f"S3 {operation} failed ({label})",
        operation=operation,
        tier="durable",
        key=f"{url}/{key}" if key is not None else url,
        hint=hint,
    )
