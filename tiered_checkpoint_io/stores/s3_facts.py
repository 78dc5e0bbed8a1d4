"""What can be measured of an S3 bucket: plain facts, as :mod:`s3_probe` finds them. Imports no client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

#: What a server makes of the condition of a write: judges it, takes no notice of it, refuses it as such, or refuses
#: what it should allow; None where it could not be tried.
Condition = Literal["judged", "ignored", "refused", "misjudged"] | None

#: What requests are called in metrics (``requests.<name>``) and errors where it is not the method's first word.
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
    "copy_part": ("s3:GetObject", "s3:PutObject"),
    "list_uploads": ("s3:ListBucketMultipartUploads",),
    "delete": ("s3:DeleteObject",),
    "delete_many": ("s3:DeleteObject",),
}


def request_of(method: str) -> str:
    """What the request is called that a method of boto3's client sends."""
    return _REQUESTS.get(method, method.partition("_")[0])


class Tried(NamedTuple):
    """One request, and how it ended.

    Attributes:
        request: Its name, as in ``NEEDS``.
        code: "" where it succeeded; else the server's error code, the HTTP status, or the exception's name.
        text: The error in one sentence.
        server_text: What the server itself says, which on AWS names the right that is missing.
        hint: What to do.
        is_denied: Whether a right is missing.
        is_passing: Whether it may succeed later without a change.
    """

    request: str
    code: str = ""
    text: str = ""
    server_text: str = ""
    hint: str = ""
    is_denied: bool = False
    is_passing: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.code)


class Settings(NamedTuple):
    """What the bucket's owner has set.

    Attributes:
        versioning: ``Enabled``, ``Suspended`` or "".
        rules: Of its lifecycle, as boto3 has them.
        locked_days: For how long Object Lock keeps new objects; 0 for not at all.
        unread: The settings that could not be read, by the actions that this needs.
    """

    versioning: str = ""
    rules: tuple[Mapping[str, Any], ...] = ()
    locked_days: int = 0
    unread: tuple[str, ...] = ()


class BucketFacts(NamedTuple):
    """What was measured of the bucket below a prefix.

    Attributes:
        url: ``s3://bucket/prefix``.
        endpoint_url: Where requests went.
        region: For which they were signed.
        bucket_region: Where the server says that the bucket is; "" where it does not.
        path_style: Whether the bucket's name is in the path, and not in the host's name.
        skew_s: By how many seconds this machine's clock is ahead of the server's; None where it tells no time.
        tries: All requests that were tried; where the first was not answered as from a bucket, that one alone.
        conditions: What becomes of the conditions of writes, by request.
        kms_key: The KMS key by which an object was encrypted; "" for none.
        leftovers: How many unfinished uploads below the prefix are older than a day; None where it refuses to tell.
        settings: What the owner has set.
        left_behind: Keys of this probe that could not be removed.
    """

    url: str
    endpoint_url: str
    region: str
    bucket_region: str
    path_style: bool
    skew_s: float | None
    tries: tuple[Tried, ...]
    conditions: Mapping[str, Condition] = {}
    kms_key: str = ""
    leftovers: int | None = None
    settings: Settings = Settings()
    left_behind: tuple[str, ...] = ()

    @property
    def is_reached(self) -> bool:
        """Whether a bucket answered, be it that a right is missing."""
        return not self.tries[0].failed or self.tries[0].is_denied
