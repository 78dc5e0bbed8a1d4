"""Retention on the durable tier: what is there, and the removal of what no policy keeps.

The decision is :func:`model.retention.kept`. Here is what it goes by, asked as little as possible: one list each of the
manifests, the pins and the metrics (where a policy goes by one), and a read of what is new in them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.aliases import delete
from tiered_checkpoint_io.engine.durable.document_cache import DocumentCache
from tiered_checkpoint_io.engine.durable.manifests import contents_of, manifest_cache
from tiered_checkpoint_io.engine.durable.metrics import Added, added_metrics, forget, metric_cache
from tiered_checkpoint_io.engine.durable.pins import pin_cache, pins
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Removal, Section
from tiered_checkpoint_io.errors import ManifestError, PinnedError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.launches import are_one
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.model.retention import Best, Checkpoint, Pin, Policy, kept
from tiered_checkpoint_io.stores.base import Store, UploadJournal


class LeaseFacts(NamedTuple):
    """What retention needs to know of a lease: whose it is, and whether it is held."""

    owner: str
    held: bool


def _lease(data: bytes, where: str) -> LeaseFacts:
    try:
        raw = json.loads(data)
        return LeaseFacts(str(raw["owner"]), raw["held"] is True)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ManifestError("not a lease", operation="parse", key=where) from error


@dataclass(slots=True)
class Survey:
    """What a durable tier holds, as far as retention goes; what was read once is not asked for again.

    Attributes:
        unread: After :meth:`look`, the names whose manifests can't be understood: they stay.
        saves: After it, the saves that manifests name.
    """

    unread: dict[str, ManifestError] = field(default_factory=dict)
    saves: set[str] = field(default_factory=set)
    _manifests: DocumentCache[Manifest | None] = field(default_factory=manifest_cache)
    _pins: DocumentCache[Pin] = field(default_factory=pin_cache)
    _metrics: DocumentCache[Added] = field(default_factory=metric_cache)
    _leases: DocumentCache[LeaseFacts] = field(default_factory=lambda: DocumentCache(ids.LEASE_PREFIX, _lease))

    def look(self, store: Store, *, metrics: bool, tidies: bool = True, clock: Clock = SYSTEM) -> list[Checkpoint]:
        """All checkpoints and aliases, with their pins, and with their metrics where these are asked for.

        Where it ``tidies``, metrics of saves that are gone, and expired pins, are removed on the way.

        Raises:
            StoreError: The tier could not be asked.
        """
        # Before the manifests: what has a value now, and no manifest then, is gone.
        added = added_metrics(store, self._metrics, clock=clock) if metrics else {}
        pinned = pins(store, self._pins, tidies=tidies, clock=clock)
        read = {
            name: value
            for key, value in self._manifests.read(store, clock).items()
            if (name := ids.name_from_manifest_key(key)) is not None
        }
        self.unread = {name: value for name, value in read.items() if isinstance(value, ManifestError)}
        manifests = [value for value in read.values() if isinstance(value, Manifest)]
        self.saves = {each.save_id for each in contents_of(manifests)}
        if tidies and added and not self.unread:
            forget(store, added.keys() - self.saves - {each.content.copy_of for each in manifests})
        return [Checkpoint.of(each, added, pinned.get(each.name, ())) for each in manifests]

    def other_run(self, store: Store, owner: str, *, clock: Clock = SYSTEM) -> str | None:
        """Another launch than ``owner`` that holds a lease on this tier; None where there is none."""
        for lease in self._leases.read(store, clock).values():
            # What can't be read may be held.
            if isinstance(lease, ManifestError):
                return "a run whose lease can't be read"
            if lease.held and not are_one(owner, lease.owner):
                return f"launch {lease.owner}"
        return None


def removed(
    store: Store,
    policies: Sequence[Policy],
    survey: Survey,
    *,
    journal: UploadJournal | None = None,
    needed: Collection[str] = (),
    clock: Clock = SYSTEM,
) -> Iterator[Checkpoint]:
    """Removes what no policy keeps, each only while it is as it was judged; may be repeated after a crash.

    One after the other, as they are asked for: a caller that stops leaves the others.

    Args:
        store: The durable tier.
        policies: Without one, nothing is removed.
        survey: What earlier calls saw.
        journal: Notes what is still to be removed.
        needed: Names that stay whatever the policies say.
        clock: Tells which pins have expired.

    Yields:
        Each that is gone.

    Raises:
        StoreError: Some are still there. Repeat the call to finish.
    """
    note = Section(journal, REMOVAL)
    Removal.noted("retention", note).finish(store, note)
    there = survey.look(store, metrics=any(isinstance(each, Best) for each in policies), clock=clock)
    reasons = kept(there, policies, clock.wall())
    going = [each for each in there if not reasons[each.name] and each.name not in needed]
    for each in in_order(going):
        if remove(store, each, journal=journal, clock=clock):
            yield each


def in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """In the order in which they are removed: the oldest first."""
    return sorted(checkpoints, key=lambda each: each.save_id)


def remove(
    store: Store, checkpoint: Checkpoint, *, journal: UploadJournal | None = None, clock: Clock = SYSTEM
) -> bool:
    """Removes a checkpoint, unless it was saved again, or pinned, since it was judged; whether it did."""
    try:
        delete(store, checkpoint.name, before=checkpoint.save_id, journal=journal, clock=clock)
    except PinnedError:
        return False
    return True
