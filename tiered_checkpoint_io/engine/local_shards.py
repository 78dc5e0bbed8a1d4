"""Saving a local checkpoint: each rank its own state, as one file, without asking any other rank.

A rank's file is a part of kind ``local``, named after its shard: ``<name>/rank-00003-1a2b3c4d.pt``, where
the digits tell the save, so that no save writes to files of another one of the same name. How ids agree
is told in ``local_run``. On the durable tier the checkpoint exists once the parts of all shards are there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.engine.local_run import current_run
from tiered_checkpoint_io.engine.progress import SaveReport
from tiered_checkpoint_io.engine.retention import safest
from tiered_checkpoint_io.engine.saver import versions
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import MemoryFullError, SaveError
from tiered_checkpoint_io.hashing import hash_bytes
from tiered_checkpoint_io.image import Image
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.manifest import Content, FileEntry, Part
from tiered_checkpoint_io.storage.memory import StoredPart


@dataclass(frozen=True, slots=True)
class Place:
    """Which shard of a state a rank has.

    Attributes:
        shard: Its number, from 0 on.
        degree: How many shards make the state.
        writes: Whether this rank saves it: one of those that hold the same.
    """

    shard: int = 0
    degree: int = 1
    writes: bool = True


def save_local(
    session: Session,
    image: Image,
    place: Place,
    *,
    name: str,
    step: int,
    durable: bool,
    wait: bool = False,
    threads: int | None = None,
) -> SaveReport:
    """Puts this rank's shard into memory, and on the way to the durable tier.

    Args:
        session: Both tiers.
        image: The state, planned.
        place: Which shard it is.
        name: The checkpoint's name.
        step: The training step; -1 where it is not known.
        durable: Whether it is to go to the durable tier, where there is room on the way.
        wait: Whether to return only when this rank's part, and of shard 0 all of them, are there.
        threads: How many threads copy.

    Raises:
        MemoryFullError: No room, even after older checkpoints made some.
        SaveError: It did not reach the durable tier while we waited.
        UsageError: The run's id could not be learnt; or another live run writes to the same dirpath and
            namespace.
    """
    started = time.monotonic()
    session.check_lease()
    if durable and place.shard == 0:
        session.claim()
    tier, saver, drain = session.open()
    series = ids.series_of(name)
    held = tier.parts()
    seen = [*(stored.save_id for stored in held), session.newest_seen]
    save_id = current_run().save_id(
        session.config.namespace, series, step, lambda: ids.new_run_id(after=max(filter(None, seen), default=None))
    )
    session.follow(save_id)
    durable = durable and _is_room(session, save_id, held, name, step)
    mine = _Mine(place.shard, save_id, series)
    for stored in surplus(held, mine, session.config.memory_keep_last):
        tier.remove(stored)
    slot, hashes = saver.capture(image, protect=_whole(held, series)[-1:], mine=mine, threads=threads)
    entry = FileEntry(f"{name}/{_file_name(place.shard, save_id)}", image.size, image.chunk_size, hashes)
    content = Content(
        save_id=save_id,
        step=step,
        epoch=-1,
        kind="local",
        created=time.time(),
        world_size=place.degree,
        writer=versions(),
        files=(entry,),
    )
    part = Part(name, place.shard, content, session.dirpath, durable)
    try:
        tier.commit(part, {entry.basename: slot})
    except MemoryFullError:
        # The tier has given up the slot as well.
        raise
    except BaseException:
        tier.give_back(slot)
        raise
    if durable:
        session.known.note(name, exists=True)
        drain.start()
        if wait:
            outcome = drain.wait(op_id(save_id, place), session.config.wait_timeout_s)
            if outcome.state != "committed":
                raise SaveError(
                    f"{name} is in memory, but not on the durable tier: {outcome.error}",
                    operation="save",
                    tier="durable",
                    key=ids.join_url(session.dirpath, name),
                    step=step,
                )
    saver.prepare(image.size)
    stall = time.monotonic() - started
    tiers = frozenset({"memory", "durable"} if durable else {"memory"})
    report = SaveReport(name, step, save_id, image.size, stall, tiers)
    session.counts["saved"] += 1
    session.last_save = report
    session.log.info(
        "Step %d: saved shard %d of %s to %s: %s",
        step,
        place.shard,
        name,
        "+".join(sorted(tiers)),
        rate(image.size, stall),
    )
    return report


def op_id(save_id: str, place: Place) -> str:
    """The operation that brings this rank's part to the durable tier."""
    return ids.part_op_id(save_id, place.shard, commits=place.shard == 0)


def _file_name(shard: int, save_id: str) -> str:
    return f"{ids.rank_folder(shard)}-{hash_bytes(save_id.encode())[:8]}.pt"


def _is_room(session: Session, save_id: str, held: Iterable[StoredPart], name: str, step: int) -> bool:
    """Whether the save may go on to the durable tier; all ranks of a node go by the first of them."""
    drain = session.open().drain
    drain.start()
    decided = [stored.part.durable for stored in held if stored.save_id == save_id]
    if decided[0] if decided else drain.has_room(session.next_id(), besides=save_id):
        return True
    session.counts["skipped"] += 1
    session.log.warning("Step %d: %s stays in memory: the durable tier is behind", step, name)
    return False


# -------------------------------------------------------------------------------------- retention
@dataclass(frozen=True, slots=True)
class _Mine:
    """Which parts in this node's memory a rank may remove: its own, and those of earlier starts."""

    shard: int
    save_id: str
    series: str

    def __call__(self, stored: StoredPart) -> bool:
        return self.belongs(stored) and (stored.part.rank == self.shard or not self.of_this_run(stored))

    def belongs(self, stored: StoredPart) -> bool:
        return stored.part.content.kind == "local" and ids.series_of(stored.part.name) == self.series

    def of_this_run(self, stored: StoredPart) -> bool:
        return ids.line_of(stored.save_id) == ids.line_of(self.save_id)


def surplus(held: Collection[StoredPart], mine: _Mine, keep_last: int) -> list[StoredPart]:
    """The parts that a rank removes before it captures a save.

    Ranks that train together are never more than one save apart, since each step needs all of them.
    With the new save, memory then holds ``keep_last`` checkpoints; two at least, because the new one may
    fail. Nothing goes before a newer one is whole, as far as one node can tell, and nothing of earlier
    starts before two of this one are; nor what waits for the durable tier.

    Args:
        held: All parts in this node's memory.
        mine: What this rank may remove.
        keep_last: How many checkpoints memory keeps.
    """
    of_run = [stored for stored in held if mine.belongs(stored) and mine.of_this_run(stored)]
    whole = _whole(of_run, mine.series)
    if not whole:
        return []
    keep = max(1, keep_last - 1)
    older = [stored for stored in held if mine(stored) and not stored.pending and stored.save_id < whole[-1]]
    if len(whole) < 2:
        older = [stored for stored in older if mine.of_this_run(stored)]
    kept = whole[-keep:]
    if len(kept) < keep:
        others = sorted({stored.save_id for stored in older} - set(kept))
        kept = [*kept, *others[len(kept) - keep :]]
    # What is safe with peers goes only once a newer save is.
    kept = [*kept, *safest((stored.save_id, stored.replicated) for stored in held if mine.belongs(stored))]
    return [stored for stored in older if stored.save_id not in kept]


def _whole(held: Iterable[StoredPart], series: str) -> list[str]:
    """Ids of the saves that have a part of each rank that has saved on this node in the same run, in order."""
    ranks: dict[str, set[int]] = {}
    of_run: dict[str, set[int]] = {}
    for stored in held:
        part = stored.part
        if part.content.kind == "local" and ids.series_of(part.name) == series:
            ranks.setdefault(part.save_id, set()).add(part.rank)
            of_run.setdefault(ids.line_of(part.save_id), set()).add(part.rank)
    return sorted(save_id for save_id, there in ranks.items() if there == of_run[ids.line_of(save_id)])
