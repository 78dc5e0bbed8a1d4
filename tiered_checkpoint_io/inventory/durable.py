"""Contents of a durable tier: all checkpoints, and the one that ``tiered:latest`` means."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.files import gone_of
from tiered_checkpoint_io.engine.durable.manifests import DurableView, read_manifest
from tiered_checkpoint_io.engine.restore.choice import Candidate, Catalog, Held, Selector, choose
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    is_other_format,
)
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores import Store

_log = logging.getLogger("tiered_checkpoint_io.inventory")


@dataclass(frozen=True, slots=True)
class DurableCheckpoint:
    """A checkpoint by its name: its manifest, or why that can't be understood; neither if there is none."""

    name: str
    manifest: Manifest | None = None
    error: CorruptCheckpointError | ConfigError | StoreError | None = None

    @property
    def is_there(self) -> bool:
        return self.manifest is not None or self.error is not None


def read(store: Store, name: str) -> DurableCheckpoint:
    """Looks for one checkpoint.

    Raises:
        StoreError: The tier could not be read.
    """
    try:
        return DurableCheckpoint(name, read_manifest(store, name))
    except (CorruptCheckpointError, ConfigError, StoreError) as error:
        if isinstance(error, StoreError) and error.reason != "archived":
            raise
        # Other checkpoints can still be read.
        return DurableCheckpoint(name, error=error)


def read_all(store: Store, view: DurableView | None = None, clock: Clock = SYSTEM) -> list[DurableCheckpoint]:
    """Returns all checkpoints of a tier, by name; raises as :func:`read`. ``view`` is that of an earlier call."""
    named = (view or DurableView()).look(store, clock)
    found = [
        DurableCheckpoint(name, error=value)
        if isinstance(value, CorruptCheckpointError)
        else DurableCheckpoint(name, value)
        for name, value in sorted(named.items())
    ]
    gone = gone_of(store, [each.manifest for each in found if each.manifest is not None])
    error = StoreNotFoundError("its files are gone: deleted, by hand or by a lifecycle rule")
    found = [DurableCheckpoint(each.name, error=error) if each.name in gone else each for each in found]
    targets = {each.name: each.manifest.alias_of for each in found if each.manifest is not None}
    own = {each.name for each in found if each.is_there and not targets.get(each.name)}
    # An alias whose target is gone is no checkpoint.
    return [each for each in found if (targets.get(each.name) or each.name) in own]


def checkpoints(store: Store, view: DurableView | None = None, clock: Clock = SYSTEM) -> list[DurableCheckpoint]:
    """Returns all checkpoints of a tier: the latest save first, its aliases and copies after it, unreadable ones last.

    Raises:
        CheckpointNotFoundError: The directory does not exist, or there is no object at all below the URL.
        StoreError: The tier could not be read.
    """
    found = read_all(store, view, clock)
    if not found and not _exists(store):
        raise CheckpointNotFoundError(
            "there is nothing at this dirpath", operation="list", tier="durable", key=store.url, hint="check dirpath"
        )
    manifests = {each.name: each.manifest for each in found if each.manifest is not None}

    def order(each: DurableCheckpoint) -> tuple[str, bool]:
        if each.manifest is None:
            return "", False
        # An alias follows its target, which may have been overwritten.
        return manifests.get(each.manifest.alias_of or "", each.manifest).content.order

    found.sort(key=lambda each: each.manifest is not None and each.manifest.alias_of is not None)
    return sorted(found, key=order, reverse=True)


def newer(found: Sequence[DurableCheckpoint]) -> CorruptCheckpointError | None:
    """Returns the error of a checkpoint that a newer release wrote: it may be the latest."""
    return next((each.error for each in found if is_other_format(each.error)), None)


def resumable(found: Sequence[DurableCheckpoint], held: Iterable[StoredPart] = ()) -> list[Candidate]:
    """Returns the checkpoints that training can resume from, the latest save first, by the engine's own choice.

    A name that is being overwritten counts as its old checkpoint.

    Args:
        found: All that the durable tier has.
        held: Parts of it in this node's memory.

    Raises:
        CorruptCheckpointError: See :func:`newer`; a restart is refused as well.
    """
    error = newer(found)
    if error is not None:
        raise error
    read = [each.manifest for each in found if each.manifest is not None]
    manifests = [replace(each, content=each.settled, previous=()) for each in read]
    parts = [
        Held(each.part.name, each.part.rank, each.part.content, each.part.commits, not each.is_replica, each.replicated)
        for each in held
    ]
    catalog = Catalog({"here": parts}, manifests, {})
    return choose(catalog, Selector("latest"), None, replicas=True)


def find(store: Store, name: str) -> Manifest:
    """Returns the checkpoint of a name, an alias, or ``tiered:latest``; of the latter, logs skipped checkpoints.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: Its manifest can't be understood; or a newer release may have written the latest.
        StoreError: The tier could not be read.
    """
    text, hint = "there is no checkpoint to resume from", "name another one: see `tiered-ckpt ls`"
    if name == ids.LATEST:
        listed = read_all(store)
        meant = next(iter(resumable(listed)), None)
        for each in listed:
            if each.error is not None:
                _log.warning("skipping this checkpoint: %s", each.error)
        found = next((each.manifest for each in listed if meant is not None and each.name == meant.name), None)
    else:
        text = f"no such checkpoint: {name}"
        hint = "list what is there: tiered-ckpt ls; a checkpoint of another library is loaded by its path"
        found = read_manifest(store, name)
    target = read_manifest(store, found.alias_of) if found is not None and found.alias_of else found
    if target is None or target.alias_of is not None:
        raise CheckpointNotFoundError(text, operation="get", tier="durable", key=store.url, hint=hint)
    return target


def _exists(store: Store) -> bool:
    if ids.url_scheme(store.url) is None:
        return os.path.isdir(store.url)
    return next(iter(store.list("")), None) is not None
