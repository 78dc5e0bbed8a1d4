"""Retention on the durable tier: what is there, and the removal of what no policy keeps.

The decision is :func:`model.retention.kept`. Here is what it goes by, asked as little as possible: one list each of the
manifests, the pins and the metrics (where a policy goes by one), and a read of what is new in them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.aliases import delete
from tiered_checkpoint_io.engine.durable.document_cache import DocumentCache
from tiered_checkpoint_io.engine.durable.manifests import contents_of, current, manifest_cache
from tiered_checkpoint_io.engine.durable.metrics import Added, added_metrics, forget, metric_cache
from tiered_checkpoint_io.engine.durable.pins import pin_cache, pins
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Later, Removal, Section
from tiered_checkpoint_io.errors import ManifestError, PinnedError, StoreError
from tiered_checkpoint_io.logs import names_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.launches import are_one
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.model.retention import Best, Checkpoint, Pin, Policy, kept
from tiered_checkpoint_io.stores.base import Store, UploadJournal
from tiered_checkpoint_io.stores.refusals import Refusals


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


class RemovalAttempt(NamedTuple):
    """What became of a checkpoint that is to be removed.

    Attributes:
        checkpoint: It.
        is_gone: Whether it ceased to exist. Else it is as it was: saved again or pinned since, or refused.
        refusal: What the server said where it refused to remove something: of what is gone, some of the files.
    """

    checkpoint: Checkpoint
    is_gone: bool
    refusal: StoreError | None = None


@dataclass(slots=True)
class Survey:
    """What a durable tier holds, as far as retention goes; what was read once is not asked for again.

    Attributes:
        unread: After :meth:`look`, the names whose manifests can't be understood: they stay.
        saves: After it, the saves that manifests name.
        refused: Checkpoints that the server refused to remove, and of which this was not said yet.
    """

    unread: dict[str, ManifestError] = field(default_factory=dict)
    saves: set[str] = field(default_factory=set)
    refused: list[RemovalAttempt] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _left_alone: dict[int | str, float] = field(default_factory=dict)
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

    def leave_alone(self, attempt: RemovalAttempt, clock: Clock) -> None:
        """Remembers a checkpoint that the server refused to remove, so that it is not asked each time."""
        # The others of its step stay with it.
        self._left_alone[attempt.checkpoint.unit] = clock.monotonic() + clock.timing.refused_again_s
        if attempt.checkpoint.save_id not in self._known:
            self._known.add(attempt.checkpoint.save_id)
            self.refused.append(attempt)

    def leaves_alone(self, checkpoint: Checkpoint, clock: Clock) -> bool:
        """Whether a checkpoint, or another of its step, was refused of late."""
        return self._left_alone.get(checkpoint.unit, -math.inf) > clock.monotonic()

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
    remove_later: Later = None,
    needed: Collection[str] = (),
    clock: Clock = SYSTEM,
) -> Iterator[RemovalAttempt]:
    """Removes what no policy keeps, each only while it is as it was judged; may be repeated after a crash.

    One after the other, as they are asked for: a caller that stops leaves the others. What the server refuses to remove
    stays as it is, and does not keep the others.

    Args:
        store: The durable tier.
        policies: Without one, nothing is removed.
        survey: What earlier calls saw; what is refused is noted there.
        journal: Notes what is still to be removed.
        remove_later: See :meth:`Removal.finish`.
        needed: Names that stay whatever the policies say.
        clock: Tells which pins have expired.

    Yields:
        Each that is gone, and each that was refused.

    Raises:
        StoreError: Some are still there. Repeat the call to finish.
    """
    note = Section(journal, REMOVAL)
    Removal.noted("retention", note).finish(store, note, remove_later)
    there = survey.look(store, metrics=any(isinstance(each, Best) for each in policies), clock=clock)
    reasons = kept(there, policies, clock.wall())
    going = [each for each in there if not reasons[each.name] and each.name not in needed]
    for each in in_order(going):
        if survey.leaves_alone(each, clock):
            continue
        attempt = remove(store, each, journal=journal, remove_later=remove_later, clock=clock)
        if attempt.refusal is not None:
            if attempt.is_gone:
                # The journal has room for one.
                raise attempt.refusal
            survey.leave_alone(attempt, clock)
        if attempt.is_gone or attempt.refusal is not None:
            yield attempt


def in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """In the order in which they are removed: the oldest first."""
    return sorted(checkpoints, key=lambda each: each.save_id)


def remove(
    store: Store,
    checkpoint: Checkpoint,
    *,
    journal: UploadJournal | None = None,
    remove_later: Later = None,
    clock: Clock = SYSTEM,
) -> RemovalAttempt:
    """Removes a checkpoint, unless it was saved again, or pinned, since it was judged.

    Of one that is gone, the journal has what could not be removed of it; see ``remove_later`` of
    :meth:`Removal.finish`.

    Raises:
        StoreError: It does not answer. Repeat the call to finish.
    """
    name, save_id, refused = checkpoint.name, checkpoint.save_id, Refusals()
    try:
        with refused.kept():
            is_gone = delete(store, name, before=save_id, journal=journal, remove_later=remove_later, clock=clock)
            return RemovalAttempt(checkpoint, is_gone)
    except PinnedError:
        return RemovalAttempt(checkpoint, is_gone=False)
    # Where it is not this one object that is refused, as with credentials that have expired, this raises too.
    manifest = current(store, name)
    is_there = manifest is not None and manifest.content.save_id == save_id
    if is_there:
        Section(journal, REMOVAL).clear()
    return RemovalAttempt(checkpoint, not is_there, refused[0])


def refused_text(refused: Sequence[RemovalAttempt]) -> str:
    """What is said of checkpoints that the server refuses to remove."""
    names, is_one = names_text([each.checkpoint.name for each in refused]), len(refused) == 1
    stay, them = ("stays", "it") if is_one else ("stay", "them")
    why = f"as the server refuses to delete {them} (a lock or a policy may hold {them})"
    return f"{names} {stay}, {why}: {refused[0].refusal}"
