"""Uploads in parts that began long ago: most likely, nobody will finish them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from tiered_checkpoint_io.errors import StoreNotFoundError
from tiered_checkpoint_io.stores.s3_client import S3Client


def stale_uploads(client: S3Client, older_than_s: float) -> Iterator[tuple[str, str]]:
    """Key and id of each upload below the prefix that began longer ago than this, by the server's clock."""
    # That there is nothing is how rclone says that there are none.
    with contextlib.suppress(StoreNotFoundError):
        for page in client.pages("list_multipart_uploads", None, {"Prefix": client.prefix}):
            now = _server_time(page)
            for upload in page.get("Uploads", ()):
                if (now - upload["Initiated"]).total_seconds() > older_than_s:
                    yield upload["Key"][len(client.prefix) :], upload["UploadId"]


def _server_time(answer: Mapping[str, Any]) -> datetime:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
