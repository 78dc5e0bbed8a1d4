"""What a durable tier holds, for people: all checkpoints, and which of them ``tiered:latest`` means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.restore.choice import Candidate, Catalog, Selector, choose
from tiered_checkpoint_io.errors import CheckpointNotFoundError, FormatVersionError, InvalidNameError, ManifestError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores import Store


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint by its name: its manifest, or why that can't be understood; neither where there is none."""

    name: str
    manifest: Manifest | None = None
    error: ManifestError | InvalidNameError | None = None

    @property
    def is_there(self) -> bool:
        return self.manifest is not None or self.error is not None


def read(store: Store, name: str) -> Found:
    """Looks for one checkpoint.

    Raises:
        StoreError: The tier could not be asked.
    """
    try:
        return Found(name, read_manifest(store, name))
    except (ManifestError, InvalidNameError) as error:
        # The others are there all the same.
        return Found(name, error=error)


def read_all(store: Store) -> list[Found]:
    """All checkpoints of a tier; raises as :func:`read`."""
    listed = (ids.name_from_manifest_key(entry.key) for entry in store.list(ids.MANIFEST_PREFIX))
    names = sorted(name for name in listed if name is not None)
    return [each for each in in_parallel(lambda name: read(store, name), names) if each.is_there]


def checkpoints(store: Store) -> list[Found]:
    """All checkpoints of a tier: the latest save first, aliases and copies behind it, what can't be read last.

    Raises:
        CheckpointNotFoundError: The directory does not exist, or there is nothing at all below the URL.
        StoreError: The tier could not be asked.
    """
    found = read_all(store)
    if not found and not _exists(store):
        raise CheckpointNotFoundError(
            "there is nothing at this dirpath", operation="list", tier="durable", key=store.url, hint="check dirpath"
        )
    manifests = {each.name: each.manifest for each in found if each.manifest is not None}

    def order(each: Found) -> tuple[str, bool]:
        if each.manifest is None:
            return "", False
        # An alias follows its target, which may have been overwritten.
        return manifests.get(each.manifest.alias_of or "", each.manifest).content.order

    found.sort(key=lambda each: each.manifest is not None and each.manifest.alias_of is not None)
    return sorted(found, key=order, reverse=True)


def newer(found: Sequence[Found]) -> FormatVersionError | None:
    """Why one of them can't be understood, where a newer release wrote it: it may be the latest."""
    return next((each.error for each in found if isinstance(each.error, FormatVersionError)), None)


def latest(found: Sequence[Found]) -> Candidate | None:
    """What ``tiered:latest`` means of these, by the engine's own choice; None where it means none.

    Raises:
        FormatVersionError: See :func:`newer`; a restart is refused as well.
    """
    error = newer(found)
    if error is not None:
        raise error
    manifests = [each.manifest for each in found if each.manifest is not None]
    return next(iter(choose(Catalog({}, manifests), Selector("latest"))), None)


def _exists(store: Store) -> bool:
    if ids.url_scheme(store.url) is None:
        return os.path.isdir(store.url)
    return next(iter(store.list("")), None) is not None
