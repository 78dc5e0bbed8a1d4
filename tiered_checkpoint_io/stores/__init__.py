"""Tiers: where bytes lie. ``open_store`` picks the durable store for a URL."""

from __future__ import annotations

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.base import Content, Metrics, ObjectInfo, Store, UploadJournal

__all__ = ["Content", "Metrics", "ObjectInfo", "Store", "UploadJournal", "open_store"]


def open_store(config: TieredCheckpointConfig, dirpath: str | None = None, *, clock: Clock = SYSTEM) -> Store:
    """The durable store of a configuration, or of another root with its options; nothing is asked of it yet.

    Raises:
        ConfigError: The client library for this kind of URL is missing; says what to install.
    """
    root = ids.normalize_dirpath(dirpath) if dirpath is not None else config.dirpath
    scheme = ids.url_scheme(root)
    try:
        if scheme == "s3":
            from tiered_checkpoint_io.stores.s3 import S3Store

            return S3Store.from_config(config, root, clock)
        if scheme is None:
            from tiered_checkpoint_io.stores.directory import DirectoryStore

            return DirectoryStore(root, clock=clock)
        from tiered_checkpoint_io.stores.remote import RemoteStore

        return RemoteStore(root, clock=clock)
    except ImportError as error:
        package = {"s3": "boto3"}.get(scheme or "", f"fsspec's package for {scheme}://")
        raise ConfigError(f"{root} needs {package}: {error}", hint=f"install {package}") from error
