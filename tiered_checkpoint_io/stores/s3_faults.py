"""What an exception of boto3 means: decided by its type, and :mod:`s3_errors` for a server's refusal."""

from __future__ import annotations

import ssl
from typing import Any

import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    StoreAccessError,
    StoreConfigError,
    StoreError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.stores.s3_errors import CREDENTIALS_HINT, NETWORK_HINT, refusal

_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.SSOError,
)
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
#: What boto3's client, or reading its answers, raises.
CLIENT_ERRORS = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, *_CONNECTION)


def translated(error: Exception, operation: str, url: str, key: str | None) -> StoreError | CorruptCheckpointError:
    """Our error for one of boto3's.

    Args:
        error: One of ``CLIENT_ERRORS``.
        operation: What was asked for.
        url: The store's root.
        key: Relative to it; None for the bucket.
    """
    if isinstance(error, botocore.exceptions.ClientError):
        answer: Any = error.response
        facts, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
        status = int(meta.get("HTTPStatusCode", 0))
        if operation == "read" and status == 416:
            return CorruptCheckpointError(
                "object ends before the range that was asked for", operation="read", tier="durable", key=key
            )
        region = facts.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region")
        code = str(facts.get("Code") or status)
        return refusal(operation, code=code, status=status, url=url, key=key, region=region)
    kind: type[StoreError] = StoreError
    hint: str | None = None
    if isinstance(error, _NO_CREDENTIALS):
        kind, hint = StoreAccessError, CREDENTIALS_HINT
    elif isinstance(error, botocore.exceptions.NoRegionError | botocore.exceptions.InvalidRegionError):
        kind, hint = StoreConfigError, "set region"
    elif isinstance(error, botocore.exceptions.MissingDependencyException):
        kind, hint = StoreConfigError, "this checksum_algorithm needs awscrt: pip install 'botocore[crt]'"
    elif isinstance(error, botocore.exceptions.SSLError) and _is_bad_certificate(error):
        kind, hint = StoreConfigError, "the server's certificate is not trusted; check endpoint_url and AWS_CA_BUNDLE"
    elif isinstance(error, _CONNECTION):
        kind, hint = StoreUnavailableError, NETWORK_HINT
    return kind(
        f"S3 {operation} failed ({type(error).__name__})",
        operation=operation,
        tier="durable",
        key=f"{url}/{key}" if key is not None else url,
        hint=hint,
    )


def is_just_busy(error: BaseException | None) -> bool:
    """Whether the server did answer, and not with 500, which may mean anything."""
    if not isinstance(error, botocore.exceptions.ClientError):
        return False
    answer: Any = error.response
    return bool(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") != 500)


def _is_bad_certificate(error: BaseException) -> bool:
    seen: BaseException | None = error
    for _ in range(10):
        if isinstance(seen, ssl.SSLCertVerificationError):
            return True
        seen = (seen.__cause__ or seen.__context__) if seen is not None else None
    return False
