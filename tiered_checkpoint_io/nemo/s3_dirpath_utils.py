"""NeMo's ``s3_dirpath_utils``: S3 URLs as text, with no dependencies."""

from __future__ import annotations

import os

from tiered_checkpoint_io.model import ids

S3_PATH_PREFIX = "s3://"


def build_s3_url(bucket: str, key: str) -> str:
    """Returns ``"s3://b/x/y"`` for ``("b", "x/y")``.

    Raises:
        ConfigError: The bucket's name is not one that S3 allows.
    """
    return ids.build_s3_url(bucket, key)


def is_s3_url(path: str | os.PathLike[str] | None) -> bool:
    """Returns True for an S3 URL; also for a ``Path``, which has lost a slash."""
    return path is not None and ids.is_s3_url(path.strip() if isinstance(path, str) else path)
