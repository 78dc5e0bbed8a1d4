"""What lies on the durable tier and belongs to no checkpoint: told to people, and never removed here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Store


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Remains of incomplete saves and uploads that have not changed for a while.

    Attributes:
        incomplete: Ids of saves that no manifest names; a run's next commit removes them.
        objects: How many objects lie outside of ``.tiered/`` that no checkpoint owns; they may be another program's.
        size: Bytes of these.
        uploads: Uploads in parts that were begun and not ended; 0 where the store has none. The next run aborts them.
    """

    incomplete: tuple[str, ...]
    objects: int
    size: int
    uploads: int


def leftovers(store: Store, names: Collection[str], saves: Collection[str], *, older_than_s: float) -> Leftovers:
    """Looks for what is left; lists all objects, 1,000 by each request.

    Args:
        store: The durable tier.
        names: All names that have a manifest, readable or not.
        saves: All saves that a manifest names.
        older_than_s: What has changed since is left out: it may be of a save under way.

    Raises:
        StoreError: The tier could not be asked.
    """
    before, owners = SYSTEM.wall() - older_than_s, set(names)
    changed: defaultdict[str, float] = defaultdict(float)
    count = size = 0
    for entry in store.list(""):
        if entry.key.startswith(ids.SAVES_PREFIX):
            save_id = entry.key.removeprefix(ids.SAVES_PREFIX).partition("/")[0]
            changed[save_id] = max(changed[save_id], entry.modified)
        elif not entry.key.startswith(ids.META_PREFIX) and entry.modified < before and not _owned(entry.key, owners):
            count, size = count + 1, size + entry.size
    incomplete = sorted(save_id for save_id, when in changed.items() if save_id not in saves and when < before)
    stale = getattr(store, "stale_uploads", None)
    return Leftovers(tuple(incomplete), count, size, stale(older_than_s) if stale is not None else 0)


def _owned(key: str, names: set[str]) -> bool:
    """Whether an object is that of a checkpoint, or lies below its name."""
    ends = [at for at, each in enumerate(key) if each == "/"]
    return any(key[:end] in names for end in [*ends, len(key)])
