"""Stores of the durable tier. ``open_store`` picks the store for a URL, also among those of other packages."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place, Server, endpoint_text
from tiered_checkpoint_io.stores.base import Store as Store


def open_store(config: TieredCheckpointConfig, dirpath: str | None = None, *, clock: Clock = SYSTEM) -> Store:
    """Returns the durable store of a configuration, or of another root with its options; sends no request.

    ``s3://`` and directories are this package's; for another URL, the store of another installed package comes
    before fsspec.

    Raises:
        ConfigError: The client library for this kind of URL is missing; says what to install. Or the store that is
            installed for it can't be used.
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
        made = installed_store(scheme, root, config)
        if made is not None:
            return made
        from tiered_checkpoint_io.stores.remote import RemoteStore

        return RemoteStore(root, clock=clock)
    except ImportError as error:
        package = {"s3": "boto3"}.get(scheme or "", f"fsspec's package for {scheme}://")
        raise ConfigError(f"{root} needs {package}: {error}", hint=f"install {package}") from error


def place_of(config: TieredCheckpointConfig, dirpath: str | None = None) -> Place:
    """Returns the durable tier that :func:`open_store` opens, with the S3 server of this process' requests."""
    root = ids.normalize_dirpath(dirpath) if dirpath is not None else config.dirpath
    if not ids.is_s3_url(root):
        return Place(root)
    endpoint_url = config.endpoint_url
    if endpoint_url is None:
        try:
            from tiered_checkpoint_io.stores.s3_client import configured_endpoint

            endpoint_url = configured_endpoint(config.profile)
        except ImportError:
            # Without boto3 no server is asked; opening a store raises an error then.
            endpoint_url = None
    region = config.region or os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or ""
    profile = config.profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or ""
    return Place(root, Server(endpoint_text(endpoint_url or ""), region, profile))


def config_at(config: TieredCheckpointConfig, place: Place) -> TieredCheckpointConfig:
    """Returns the configuration for another place than its own: that place's server, else its own options."""
    server = place.server
    if server is None or server == place_of(config, place.dirpath).server:
        return replace(config, dirpath=place.dirpath) if ids.is_s3_url(place.dirpath) else config
    region = server.region
    aws = f"https://s3.{region or 'us-east-1'}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    return replace(
        config,
        dirpath=place.dirpath,
        # Named, for the environment may name another one by now.
        endpoint_url=server.endpoint_url or aws,
        region=server.region or None,
        profile=server.profile or None,
    )


#: An entry point of this group is called as the scheme of its URLs, and names ``factory(url, config) -> Store``.
GROUP = "tiered_checkpoint_io.stores"


def installed_store(scheme: str, url: str, config: TieredCheckpointConfig) -> Store | None:
    """Returns the store of another package for a URL; None if no package has one for its scheme."""
    found = _entry_points(scheme)
    if not found:
        return None
    names = ", ".join(sorted(f"{each.value} of {_package(each)}" for each in found))
    if len(found) > 1:
        raise ConfigError(f"{scheme}:// has several stores: {names}", key=url, hint="uninstall all but one")
    try:
        factory = found[0].load()
    except (ImportError, AttributeError) as error:
        text = f"the store for {scheme}://, {names}, can't be imported: {error}"
        raise ConfigError(text, key=url, hint="repair or uninstall that package") from error
    store = factory(url, config)
    if not isinstance(store, Store):
        raise ConfigError(
            f"{names} gave a {type(store).__name__} for {scheme}://, which is no Store",
            key=url,
            hint="a Store passes StoreContract of tests/support/store_contract.py",
        )
    return store


@functools.cache
def _entry_points(scheme: str) -> tuple[EntryPoint, ...]:
    # Installed packages do not change while a process runs; a path may name the same package twice.
    found = entry_points(group=GROUP, name=scheme)
    return tuple({(_package(each), each.value): each for each in found}.values())


def _package(each: EntryPoint) -> str:
    return each.dist.name if each.dist is not None else "an unknown package"
