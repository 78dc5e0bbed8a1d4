"""Stores of other packages: found by the scheme of a URL among the entry points that are installed."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.base import Store

#: An entry point of this group is called as the scheme of its URLs, and names ``factory(url, config) -> Store``.
GROUP = "tiered_checkpoint_io.stores"


def installed_store(scheme: str, url: str, config: TieredCheckpointConfig) -> Store | None:
    """Returns the store of another package for a URL; None if no package has one for its scheme.

    Raises:
        ConfigError: Two packages have one, or its object can't be imported or is no Store.
    """
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
