"""Options of S3 requests, by boto3's own names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

from tiered_checkpoint_io.errors import ConfigError, did_you_mean, without_secrets

#: Objects of these classes have to be restored before they can be read, which takes hours.
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
#: Every request takes these; the others go out with each request that makes an object.
_OF_ALL_REQUESTS = ("ExpectedBucketOwner", "RequestPayer")
_EXAMPLE = "a mapping of boto3's names, such as {ServerSideEncryption: AES256}"


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Options:
    """Options that S3 gets with requests, as boto3 takes them; an option of None is not sent.

    Attributes:
        ServerSideEncryption: Server-side encryption of written objects.
        SSEKMSKeyId: The KMS key for it.
        ExpectedBucketOwner: AWS account that must own the bucket.
        RequestPayer: For a bucket whose requester pays; these requests are then on your account.
        ACL: Canned ACL of written objects.
        StorageClass: Storage class of written objects.
        ChecksumAlgorithm: Additional checksum that S3 keeps for written objects.

    Raises:
        ConfigError: A value is not allowed; says the name, the value and what is allowed.
    """

    ServerSideEncryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    SSEKMSKeyId: str | None = None
    ExpectedBucketOwner: str | None = None
    RequestPayer: Literal["requester"] | None = None
    ACL: (
        Literal[
            "private",
            "public-read",
            "public-read-write",
            "authenticated-read",
            "aws-exec-read",
            "bucket-owner-read",
            "bucket-owner-full-control",
        ]
        | None
    ) = None
    StorageClass: str | None = None
    ChecksumAlgorithm: Literal["CRC32", "CRC32C", "SHA1", "SHA256", "CRC64NVME"] | None = None

    def __post_init__(self) -> None:
        for name, allowed in _values().items():
            value = getattr(self, name)
            if value is None:
                continue
            if allowed and value not in allowed:
                _refuse(name, value, "one of " + ", ".join(allowed))
            if not isinstance(value, str) or not value:
                _refuse(name, value, "text, in quotes if it is a number")
        if self.StorageClass in _ARCHIVES:
            _refuse("StorageClass", self.StorageClass, "a class whose objects can be read at once")
        if self.SSEKMSKeyId is not None and not (self.ServerSideEncryption or "").startswith("aws:kms"):
            _refuse("SSEKMSKeyId", self.SSEKMSKeyId, "only with ServerSideEncryption aws:kms or aws:kms:dsse")

    @classmethod
    def of(cls, value: object) -> S3Options:
        """Returns the options that a mapping names; None names none.

        Raises:
            ConfigError: No mapping, or a name (with the nearest known one) or value is not allowed.
        """
        if isinstance(value, S3Options):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ConfigError(f"s3_options is {without_secrets(repr(value))}", hint=f"allowed: {_EXAMPLE}")
        for name in value:
            if name not in _values():
                raise ConfigError(f"unknown name {name!r} in s3_options", hint=did_you_mean(name, _values()))
        return cls(**value)

    def of_all_requests(self) -> dict[str, str]:
        """Returns the options that every request gets."""
        return {name: value for name, value in self._given().items() if name in _OF_ALL_REQUESTS}

    def of_writes(self) -> dict[str, str]:
        """Returns the options that each request gets that makes an object."""
        return {name: value for name, value in self._given().items() if name not in _OF_ALL_REQUESTS}

    def _given(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@functools.cache
def _values() -> dict[str, tuple[str, ...]]:
    """Returns each name with the values that it may have; none for any text."""
    hints = get_type_hints(S3Options)
    literals = {
        each.name: [of for of in get_args(hints[each.name]) if get_origin(of) is Literal] for each in fields(S3Options)
    }
    return {name: get_args(found[0]) if found else () for name, found in literals.items()}


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ConfigError(f"s3_options.{name} is {without_secrets(repr(value))}", hint=f"allowed: {allowed}")
