"""Limits of S3, in bytes and parts; other servers may take less, and say so themselves."""

#: Least size of every part of an upload but the last.
MIN_PART = 5 << 20
#: Largest size of every part of an upload.
MAX_PART = 5 << 30
#: Parts of one upload.
MAX_PARTS = 10_000
#: The largest object, 48.8 TiB: S3 allows 50 TB (since December 2025), and no upload has more parts.
MAX_OBJECT = MAX_PARTS * MAX_PART
