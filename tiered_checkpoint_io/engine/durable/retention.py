"""Retention on the durable tier: the state of the tier, and the removal of checkpoints that no policy keeps.

The decision is :func:`model.retention.kept`.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.manifests import current
from tiered_checkpoint_io.engine.durable.sweep import RemovalAttempt, Survey, delete
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.logs import names_text
from tiered_checkpoint_io.model.retention import Checkpoint, Policy, kept
from tiered_checkpoint_io.stores.base import Refusals, Store


def removed(
    store: Store,
    policies: Sequence[Policy],
    survey: Survey,
    *,
    needed: Collection[str] = (),
    clock: Clock = SYSTEM,
) -> Iterator[RemovalAttempt]:
    """Removes checkpoints that no policy keeps, each only if it is unchanged since then; repeatable after a StoreError.

    Each is removed when the caller asks for the next result. If the server refuses to remove a checkpoint, it stays
    complete, the survey notes it, and the others are still removed. Yields the removed and the refused ones. The names
    that are ``needed`` stay.
    """
    there = survey.look(store, clock=clock)
    reasons = kept(there, policies)
    going = [each for each in there if not reasons[each.name] and each.name not in needed]
    for each in in_order(going):
        if survey.left_alone.get(each.unit, -math.inf) > clock.monotonic():
            continue
        attempt = remove(store, each, clock=clock)
        if attempt.refusal is not None and not attempt.is_gone:
            # Each step is reported once. Its other checkpoints stay with it, and the server is not asked each time.
            survey.refused += [attempt] if each.unit not in survey.left_alone else []
            survey.left_alone[each.unit] = clock.monotonic() + clock.timing.refused_again_s
        if attempt.is_gone or attempt.refusal is not None:
            yield attempt


def in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Returns checkpoints in the order in which they are removed: the oldest first."""
    return sorted(checkpoints, key=lambda each: each.save_id)


def remove(store: Store, checkpoint: Checkpoint, *, clock: Clock = SYSTEM) -> RemovalAttempt:
    """Removes a checkpoint, unless it was saved again since it was judged, or is in use; may be repeated."""
    refused = Refusals()
    try:
        with refused.kept():
            return RemovalAttempt(checkpoint, *delete(store, checkpoint.name, before=checkpoint.save_id, clock=clock))
    except ConfigError as error:
        if error.reason != "held":
            raise
        return RemovalAttempt(checkpoint, is_gone=False)
    # If the server refuses all requests, as with expired credentials, this raises too.
    manifest = current(store, checkpoint.name)
    is_there = manifest is not None and manifest.content.save_id == checkpoint.save_id
    return RemovalAttempt(checkpoint, not is_there, refused[0])


def remove_all(store: Store, going: Iterable[Checkpoint], stop: threading.Event) -> list[RemovalAttempt]:
    """Removes checkpoints, the oldest first, until ``stop`` is set; if one is refused, the others of its step stay."""
    units: defaultdict[int | str, list[Checkpoint]] = defaultdict(list)
    for each in in_order(going):
        units[each.unit].append(each)
    attempts: list[RemovalAttempt] = []

    def remove_unit(unit: Iterable[Checkpoint]) -> None:
        for each in unit:
            if stop.is_set():
                return
            attempt = remove(store, each)
            attempts.append(attempt)
            if attempt.refusal is not None and not attempt.is_gone:
                return

    in_parallel(remove_unit, units.values())
    return attempts


def refused_text(refused: Sequence[RemovalAttempt]) -> str:
    """Returns the message about checkpoints that the server refuses to remove."""
    names, is_one = names_text([each.checkpoint.name for each in refused]), len(refused) == 1
    stay, them = ("stays", "it") if is_one else ("stay", "them")
    why = f"as the server refuses to delete {them} (a lock or a policy may hold {them})"
    return f"{names} {stay}, {why}: {refused[0].refusal}"
