"""NeMo's ``S3Utils`` over this package's own stores."""

# ruff: noqa: N803 - the names of arguments are NeMo's

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

from tiered_checkpoint_io.engine.chunks import Copies, Copy, unverified
from tiered_checkpoint_io.errors import ConfigError, StoreNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.ids import StrPath
from tiered_checkpoint_io.nemo import s3_dirpath_utils
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.s3 import MIB, S3Store

DEFAULT_CHUNK_SIZE_MB = 64
DEFAULT_MAX_READ_CONCURRENCY = 15
DEFAULT_MAX_WRITE_CONCURRENCY = 10

_STEP_PREFIX = re.compile(r"(.*step=\d+-)")
#: NeMo's names of credentials, and boto3's.
_CREDENTIALS = {
    "AccessKeyId": "aws_access_key_id",
    "SecretAccessKey": "aws_secret_access_key",
    "SessionToken": "aws_session_token",
}


class S3Utils:
    """Single objects on S3, by NeMo's static functions.

    Each takes ``endpoint_url``, ``region`` and ``profile`` as further keywords; by default boto3's chain holds.
    ``chunk_size_MB`` is the size of a part of an upload, MiB, ``max_concurrency`` the number of requests in flight.
    Each request is retried for up to two minutes. Errors are of :mod:`tiered_checkpoint_io.errors`.
    """

    @staticmethod
    def s3_path_exists(s3_path: StrPath, match_directory: bool = False, **options: Any) -> bool:
        """Returns True if there is an object of this key, or, with ``match_directory``, one below ``key/``."""
        bucket, key = ids.parse_s3_url(s3_path)
        if not key:
            return False
        with _store(bucket, **options) as store:
            if not key.endswith("/"):
                with contextlib.suppress(StoreNotFoundError):
                    store.size(key)
                    return True
            return match_directory and any(True for _ in store.list(key.rstrip("/") + "/"))

    @staticmethod
    def remove_object(s3_path: StrPath, **options: Any) -> None:
        """Removes an object; succeeds if there is none."""
        with _object(s3_path, **options) as (store, key):
            store.delete(key)

    @staticmethod
    def download_s3_file_to_stream(
        s3_path: StrPath, chunk_size_MB: int | None = None, max_concurrency: int | None = None, **options: Any
    ) -> BytesIO:
        """Returns the content of an object, in a stream at its beginning."""
        with _object(s3_path, chunk_size_MB, max_concurrency, **options) as (store, key):
            data = bytearray(store.size(key))
            with memoryview(data) as view:
                _fetch(store, key, view, max_concurrency)
        return BytesIO(data)

    @staticmethod
    def download_s3_file_to_path(
        s3_path: StrPath,
        file_path: StrPath,
        chunk_size_MB: int | None = None,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> None:
        """Writes an object to a local file, atomically."""
        target = os.path.abspath(file_path)
        with _object(s3_path, chunk_size_MB, max_concurrency, **options) as (store, key):
            size = store.size(key)
            descriptor, name = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".download-")
            try:
                with open(descriptor, "r+b") as file:
                    if size:
                        # Reserved, so that a full disk is an error here, and not a signal in the mapping.
                        os.posix_fallocate(file.fileno(), 0, size)
                        with mmap.mmap(file.fileno(), size) as mapping, memoryview(mapping) as view:
                            _fetch(store, key, view, max_concurrency)
                os.replace(name, target)
            except BaseException:
                os.unlink(name)
                raise

    @staticmethod
    def upload_file_stream_to_s3(
        bytes_buffer: BytesIO,
        s3_path: StrPath,
        chunk_size_MB: int | None = None,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> None:
        """Writes the whole of a stream to an object, atomically."""
        with (
            bytes_buffer.getbuffer() as view,
            _object(s3_path, chunk_size_MB, max_concurrency, **options) as (store, key),
        ):
            store.upload(key, view)

    @staticmethod
    def upload_file(
        file_path: StrPath,
        s3_path: StrPath,
        chunk_size_MB: int | None = None,
        max_concurrency: int | None = None,
        remove_file: bool = False,
        **options: Any,
    ) -> None:
        """Writes a local file to an object, atomically; raises ConfigError for an empty one, as NeMo does."""
        if not os.path.getsize(file_path):
            raise ConfigError(f"{os.fspath(file_path)} is empty", operation="upload", key=str(s3_path))
        with _object(s3_path, chunk_size_MB, max_concurrency, **options) as (store, key):
            upload_file(store, key, file_path)
        if remove_file:
            os.remove(file_path)

    @staticmethod
    def find_files_with_suffix(
        base_path: StrPath,
        suffix: str | None = None,
        return_key_only: bool = True,
        profile: str | None = None,
        creds: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[str]:
        """Lists the objects below a folder whose key ends with ``suffix``: keys in the bucket, or whole URLs.

        ``s3://b/run`` finds no object below ``s3://b/run-2``; a path that ends with ``-``, as from
        :meth:`parse_prefix_with_step`, is a prefix. ``creds`` holds ``AccessKeyId``, ``SecretAccessKey`` and
        ``SessionToken``, instead of a profile.
        """
        if profile is not None and creds is not None:
            raise ConfigError("both profile and creds are given", hint="give one of them, or neither")
        bucket, key = ids.parse_s3_url(base_path)
        prefix = key if not key or key.endswith(("/", "-")) else key + "/"
        with _store(bucket, profile=profile, creds=creds, **options) as store:
            keys = sorted(entry.key for entry in store.list(prefix) if entry.key.endswith(suffix or ""))
        return keys if return_key_only else [ids.build_s3_url(bucket, found) for found in keys]

    @staticmethod
    def parse_s3_url(s3_url: StrPath) -> tuple[str | None, str | None]:
        """Returns ``("b", "x/y")`` for ``s3://b/x/y``; ``(None, None)`` for other paths."""
        try:
            return ids.parse_s3_url(s3_url)
        except ConfigError:
            return None, None

    build_s3_url = staticmethod(s3_dirpath_utils.build_s3_url)
    is_s3_url = staticmethod(s3_dirpath_utils.is_s3_url)

    @staticmethod
    def parse_prefix_with_step(path: str) -> str:
        """Returns a path up to and with ``step=900-``; the whole path if its name has no step."""
        match = _STEP_PREFIX.match(path)
        return match[1] if match else path


def upload_file(store: Store, key: str, path: StrPath) -> None:
    """Writes a local file, which must not be empty, to an object, atomically."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        store.upload(key, view)


def _fetch(store: Store, key: str, view: memoryview, concurrency: int | None) -> None:
    copies = Copies(unverified(key, len(view)), [Copy(lambda: store, key)])
    copies.fetch(view, concurrency=concurrency or DEFAULT_MAX_READ_CONCURRENCY)


@contextlib.contextmanager
def _store(bucket: str, *, creds: Mapping[str, str] | None = None, **options: Any) -> Iterator[S3Store]:
    # A client for each call, as NeMo does it: one that is kept would keep credentials that expire.
    credentials = {_CREDENTIALS[name]: value for name, value in (creds or {}).items() if name in _CREDENTIALS}
    store = S3Store(ids.build_s3_url(bucket), credentials=credentials or None, **options)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _object(
    path: StrPath, chunk_size_mb: int | None = None, concurrency: int | None = None, **options: Any
) -> Iterator[tuple[S3Store, str]]:
    bucket, key = ids.parse_s3_url(path)
    if not key or key.endswith("/"):
        raise ConfigError(f"{os.fspath(path)!r} names no object", hint="it must look like s3://bucket/key")
    options["part_size"] = (chunk_size_mb or DEFAULT_CHUNK_SIZE_MB) * MIB
    options["write_concurrency"] = concurrency or DEFAULT_MAX_WRITE_CONCURRENCY
    options["read_concurrency"] = concurrency or DEFAULT_MAX_READ_CONCURRENCY
    with _store(bucket, **options) as store:
        yield store, key
