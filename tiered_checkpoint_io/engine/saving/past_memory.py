"""A rank's part for which memory has no room: straight to the durable tier, the commit and the clearing up included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.durable import commit_sharded
from tiered_checkpoint_io.engine.durable.direct_shards import DirectFile, DirectSlot, Journal, await_parts, send
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part

_POLL_S = 0.05


def bring(
    session: Session,
    part: Part,
    file: DirectFile | DirectSlot | None,
    small: Mapping[str, bytes],
    *,
    watching: Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]] = lambda: contextlib.nullcontext(
        lambda: False
    ),
) -> None:
    """Takes a part to the durable tier; the one that commits waits for all others, and does.

    Args:
        session: Both tiers.
        part: The whole part.
        file: Its file, whose memory is free once it is there; None where it has small ones alone.
        small: The others, by basename.
        watching: Tells, while that wait lasts, whether some part will not come.

    Raises:
        SaveError: The other parts have not come within ``wait_timeout_s``, or a later save has taken the name.
        DrainError: The drain has not done with earlier saves of the name.
        StoreError, TieredCheckpointError: As :func:`commit_sharded.put_part` and ``commit_parts``.
    """
    end = time.monotonic() + session.config.wait_timeout_s
    store, journal = session.durable(), Journal()
    files = {name: memoryview(content) for name, content in small.items()}
    with file.reading() if file is not None else contextlib.nullcontext() as data:
        large = [entry.basename for entry in part.content.files if entry.basename not in files]
        is_to_commit = send(store, part, files | {name: data for name in large if data is not None}, journal)
    if not is_to_commit:
        return
    with watching() as is_hopeless:
        there = await_parts(store, part, timeout_s=_left_s(end), is_hopeless=is_hopeless)
    _make_way(session, part, end)
    commit_sharded.commit_parts(store, part, files, journal=journal)
    try:
        size = sum(entry.size for entry in part.content.files)
        queue = session.open().drain.queue
        queue.note_past(part.save_id, part.name, part.content.step, size, part.dirpath)
    except OSError as error:
        session.log.warning("deletes that wait for a durable save may wait for the next: %s", error)
    # What waits on this node may still become whole.
    busy = {stored.part.name for stored in session.open().tier.parts() if stored.pending}
    patience_s = float(session.config.wait_timeout_s)
    commit_sharded.clear_up(store, part, there, patience_s=patience_s, busy=busy, log=session.log)


def _make_way(session: Session, part: Part, end: float) -> None:
    """Waits for the drain to have done with earlier saves of this name: two that commit at once might mix.

    One that has failed is given up: all parts of this one are there.

    Raises:
        DrainError: The drain has not done with them by ``end``, by the monotonic clock.
    """
    tier, _, drain = session.open()
    for stored in tier.parts():
        same = (stored.part.name, stored.part.dirpath) == (part.name, part.dirpath)
        if not (stored.pending and same and stored.part.commits and stored.save_id < part.save_id):
            continue
        if drain.wait(stored.op_id, _left_s(end)).state == "failed":
            drain.submit(Request(session.next_id(), "cancel", "cancel", part.dirpath, stored.save_id))
            while stored.op_id in drain.pending():
                if time.monotonic() > end:
                    raise DrainError(
                        "an earlier save of this name could not be given up",
                        operation="save",
                        tier="durable",
                        key=ids.join_url(part.dirpath, part.name),
                        step=part.content.step,
                        hint="see status/drain.log below memory_dir",
                    )
                drain.ensure()
                time.sleep(_POLL_S)
    drain.make_way(part.name, _left_s(end))


def _left_s(end: float) -> float:
    """Seconds until ``end``: one at least, for what would be done at once."""
    return max(1.0, end - time.monotonic())
