"""Retention on the durable tier: the removal of what no policy keeps.

The decision is :func:`model.retention.kept`; what it goes by, :class:`Survey` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.aliases import delete
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.engine.durable.removal import REMOVAL, Later, Section, finish_noted
from tiered_checkpoint_io.engine.durable.survey import RemovalAttempt, Survey
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import names_text
from tiered_checkpoint_io.model.retention import Checkpoint, Policy, kept
from tiered_checkpoint_io.stores.base import Store, UploadJournal
from tiered_checkpoint_io.stores.refusals import Refusals


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
        clock: Tells which holds have expired.

    Yields:
        Each that is gone, and each that was refused.

    Raises:
        StoreError: Some are still there. Repeat the call to finish.
    """
    note = Section(journal, REMOVAL)
    finish_noted(store, "retention", note, remove_later)
    there = survey.look(store, clock=clock)
    reasons = kept(there, policies)
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
    """Removes a checkpoint, unless it was saved again since it was judged, or is in use.

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
    except ConfigError as error:
        if error.reason != "held":
            raise
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
