"""Holds: small objects that keep a checkpoint of the durable tier from being deleted while a program works on it.

A delete looks for holds before it removes the manifest, and again before it removes any file; a hold looks for the
manifest after its own write. So if the two meet, the delete puts the manifest back, or the hold is refused.
"""

from __future__ import annotations

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.refusals import Refusals

#: Age at which a hold no longer counts: its program did not live to release it.
LIFETIME_S = 24 * 3600.0


def hold(store: Store, name: str, save_id: str, *, clock: Clock = SYSTEM) -> str:
    """Keeps a save from being deleted under its name; returns the key that :func:`release` takes.

    Raises:
        CheckpointNotFoundError: The name has no checkpoint, or another save's. No hold was written.
    """
    key = ids.hold_prefix(name) + clock.token(8)
    store.put(key, b"{}")
    manifest = current(store, name)
    if manifest is None or manifest.settled.save_id != save_id:
        store.delete(key)
        text = f"{name} was deleted or overwritten, so nothing is held"
        raise CheckpointNotFoundError(text, operation="hold", tier="durable", key=name)
    return key


def release(store: Store, key: str) -> None:
    """Ends a hold; a checkpoint that had to go without it goes at the next retention or prune."""
    store.delete(key)


def refuse_held(store: Store, name: str, *, clock: Clock = SYSTEM) -> None:
    """Raises ConfigError if a checkpoint is held: one list. Removes expired holds."""
    prefix, now = ids.hold_prefix(name), clock.wall()
    for entry in store.list(prefix):
        if "/" in entry.key.removeprefix(prefix):
            # The hold of a replaced checkpoint.
            continue
        if now - entry.modified < LIFETIME_S:
            raise ConfigError(
                f"{name} is in use by another program",
                operation="delete",
                tier="durable",
                key=entry.key,
                hint="it stays; the next retention or `tiered-ckpt prune` after that removes it",
                reason="held",
            )
        # A hold that can't be removed does not count all the same.
        with Refusals().kept():
            store.delete(entry.key)
