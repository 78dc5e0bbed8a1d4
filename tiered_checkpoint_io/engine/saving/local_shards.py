"""Saving a local checkpoint: each rank its own state, as one file, without asking any other rank.

A rank's file is a part of kind ``local``, named after its shard: ``<name>/rank-00003-1a2b3c4d.pt``, where
the digits tell the save, so that no save writes to files of another one of the same name. How ids agree
is told in ``local_run``. On the durable tier the checkpoint exists once the parts of all shards are there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.engine.durable.direct_shards import DirectFile, DirectSlot
from tiered_checkpoint_io.engine.ranks.local_run import Watch, Where, current_run
from tiered_checkpoint_io.engine.saving.past_memory import bring
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.local_retention import Mine, surplus, whole_saves
from tiered_checkpoint_io.engine.staging.saver import versions
from tiered_checkpoint_io.errors import MemoryFullError, SaveError, UsageError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part

_POLL_S = 0.05


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


@dataclass(frozen=True, slots=True)
class LocalSave:
    """What a local save did.

    Attributes:
        report: Where the part is, or is on its way to.
        ending: How its way straight to the durable tier ends, where that goes on behind the save.
    """

    report: SaveReport
    ending: Future[None] | None = None


def save_local(
    session: Session,
    image: Image,
    place: Place,
    *,
    name: str,
    step: int,
    durable: bool,
    wait: bool = False,
    behind: bool = False,
    threads: int | None = None,
) -> LocalSave:
    """Puts this rank's shard into memory, and on the way to the durable tier.

    Where memory has no room for a durable save, the part goes straight to the durable tier, with one warning. The
    call then returns once it is there, and of shard 0 once the checkpoint is, for which the parts of all others are
    waited for, up to ``wait_timeout_s`` in all; or, with ``behind``, once it is captured, and the next one waits.

    Args:
        session: Both tiers.
        image: The state, planned.
        place: Which shard it is.
        name: The checkpoint's name.
        step: The training step; -1 where it is not known.
        durable: Whether it is to go to the durable tier, where there is room on the way.
        wait: Whether to return only when this rank's part, and of shard 0 all of them, are there.
        behind: Whether what goes past memory does so while training goes on.
        threads: How many threads copy.

    Raises:
        MemoryFullError: No room, even after older checkpoints made some; and the save is of memory alone, or the
            node has no memory left at all.
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
    save_id = current_run().save_id(session.config.namespace, series, step, lambda: session.new_run_id(seen))
    session.follow(save_id)
    words = _Words(session, save_id, place.shard, step)
    direct: DirectFile | DirectSlot | None = None
    wanted = durable
    try:
        slot: Slot | None = None
        try:
            durable = durable and _is_room(session, save_id, held, name, step)
            slot, hashes = _capture(session, image, Mine(place.shard, save_id, series), held, words, threads)
        except MemoryFullError as full:
            if not durable:
                raise
            session.warn_small(full)
            direct = DirectFile(image, threads=threads)
            hashes = direct.hashes
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
        if slot is not None:
            direct = _commit(session, part, slot)
    except Exception:
        if direct is not None:
            direct.close()
        words.leave("memory")
        if wanted:
            words.leave("durable")
        raise
    if wanted and not durable:
        words.leave("durable")
    ending: Future[None] | None = None
    if durable:
        session.known.note(name, exists=True)
    if direct is not None:
        words.leave("memory")
        file = direct
        if behind:
            ending = session.run_behind(name, lambda: _bring(session, part, file, words))
        else:
            _bring(session, part, file, words)
    elif durable:
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
    if direct is None:
        saver.prepare(image.size)
    stall = time.monotonic() - started
    tiers = frozenset(({"durable"} if durable else set()) | ({"memory"} if direct is None else set()))
    # What went past memory is there, unless that goes on in the background.
    queued = durable and (ending is not None or (direct is None and not wait))
    report = SaveReport(name, step, save_id, image.size, stall, tiers, queued)
    session.counts["saved"] += 1
    session.last_save = report
    session.log.at_step(step).info(report.line(session.dirpath, f"shard {place.shard} of {name}"))
    return LocalSave(report, ending)


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


# ---------------------------------------------------------------------------------------- memory
class _Words:
    """What this rank tells the others of a save that is not as they expect it, and hears from them of earlier ones."""

    def __init__(self, session: Session, save_id: str, shard: int, step: int) -> None:
        self._session = session
        self._save_id = save_id
        self._shard = shard
        self._step = step
        self.run = current_run()

    def leave(self, where: Where) -> None:
        """Says that this rank's part is not in memory, or will not come to the durable tier."""
        try:
            self.run.tell_missing(self._save_id, where)
        except UsageError as error:
            # The save goes on, or has failed already of what matters more.
            self._session.log.warning(
                "Step %d: the other ranks don't know that the part of shard %d is missing: %s",
                self._step,
                self._shard,
                error,
            )

    def lacking(self, save_ids: Iterable[str]) -> set[str] | None:
        """Those of which some node's memory has no part; None where that can't be known."""
        try:
            return self.run.lacking(sorted(set(save_ids)))
        except UsageError as error:
            self._session.log.warning("Step %d: memory lets nothing go: %s", self._step, error)
            return None

    def watch(self) -> Watch:
        """See :class:`Watch`."""
        return Watch(self.run, self._save_id, self._session.log, self._session.clock)


def _capture(
    session: Session, image: Image, mine: Mine, held: Collection[StoredPart], words: _Words, threads: int | None
) -> tuple[Slot, tuple[str, ...]]:
    """Fills a slot, for which what memory need not keep any more makes room.

    Raises:
        MemoryFullError: There is no room; older parts are as they were.
    """
    tier, saver, _ = session.open()
    lacking = words.lacking(stored.save_id for stored in held if mine.belongs(stored) and mine.of_this_run(stored))
    if lacking is None:
        protect = [stored.save_id for stored in held]
    else:
        protect = whole_saves(held, mine.series, lacking)[-1:]
        going = surplus(held, mine, session.config.memory_keep_last, lacking)
        freed = sum(stored.part.content.size for stored in going)
        # Nothing goes for a save that does not fit all the same.
        if going and (freed >= image.size or freed + tier.room() >= image.size):
            for stored in going:
                tier.remove(stored)
    return saver.capture(image, protect=protect, mine=mine, threads=threads)


def _commit(session: Session, part: Part, slot: Slot) -> DirectSlot | None:
    """Makes a captured part exist in memory; where there is no room for its description, what is to go past memory.

    Raises:
        MemoryFullError: There is none, and the save is of memory alone.
    """
    tier = session.open().tier
    (entry,) = part.content.files
    try:
        tier.commit(part, {entry.basename: slot}, keep_slots=part.durable)
    except MemoryFullError as full:
        if not part.durable:
            # The tier has given up the slot as well.
            raise
        try:
            session.warn_small(full)
        except BaseException:
            tier.give_back(slot)
            raise
        return DirectSlot(tier, slot, entry.size)
    except BaseException:
        tier.give_back(slot)
        raise
    return None


# --------------------------------------------------------------------------------- past memory
def _bring(session: Session, part: Part, file: DirectFile | DirectSlot, words: _Words) -> None:
    """Takes a part to the durable tier, and of shard 0 commits the checkpoint once all parts are there.

    Raises:
        SaveError: It did not get there.
    """
    try:
        bring(session, part, file, {}, watching=lambda: contextlib.closing(words.watch()))
    except Exception as error:
        words.leave("durable")
        if isinstance(error, SaveError):
            raise
        raise SaveError(
            f"shard {part.rank} of {part.name} did not reach the durable tier, and memory has no room for it: {error}",
            operation="save",
            tier="durable",
            key=ids.join_url(session.dirpath, part.name),
            rank=part.rank,
            step=part.content.step,
            hint="it is lost, and what was saved before is as it was; give memory_dir more space",
        ) from error
