"""Checkpointer: save, alias, remove and load over both tiers, for every adapter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.engine.ranks.run import current_rank
from tiered_checkpoint_io.engine.restore.catalog import Tiers, tiers_of
from tiered_checkpoint_io.engine.restore.choice import Found, Selector
from tiered_checkpoint_io.engine.restore.restore import Restored, note_restore, restore
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.engine.save.saver import FullSaver
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, names_text
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import METADATA, Metric
from tiered_checkpoint_io.stores.base import children_of
from tiered_checkpoint_io.stores.retry import answer_within

TIERS = frozenset({"memory", "durable"})
#: A smaller state is saved within hundredths of a second in any case.
_LEAST_PREPARED = 64 << 20
#: End of the names of Lightning's checkpoints.
_ENDING = ".ckpt"


def tiers_for_step(
    global_step: int,
    memory_every_n_train_steps: int | None,
    s3_every_n_train_steps: int | None,
    *,
    since: int | None = None,
) -> frozenset[str]:
    """Returns the tiers that a training step is saved to: a function of only steps, so that all ranks agree.

    ``{"memory", "durable"}`` on multiples of ``s3_every_n_train_steps``, else ``{"memory"}`` on multiples of
    ``memory_every_n_train_steps``, else none. Multiples count that come after ``since``, the step after the previous
    batch, which is by default ``global_step - 1``. Step 0 is never saved.
    """
    before = global_step - 1 if since is None else since
    if passes(s3_every_n_train_steps, before, global_step):
        return TIERS
    if passes(memory_every_n_train_steps, before, global_step):
        return frozenset({"memory"})
    return frozenset()


def passes(every: int | None, before: int, step: int) -> bool:
    """Returns whether a multiple of ``every`` comes after ``before``, up to ``step``; None and 0 have none."""
    return every is not None and every > 0 and step > 0 and step // every > before // every


class NoCheckpoint(dict[str, Any]):
    """Result of loading ``tiered:latest`` if there is no checkpoint yet: falsy, so start from scratch.

    An adapter may put keys into it that its framework looks for.
    """

    def __bool__(self) -> bool:
        return False


def nothing_to_resume(selector: Selector, dirpath: str) -> str:
    """Returns the text for a sentinel that finds nothing; weights-only checkpoints may exist."""
    which = " that is named last" if selector.kind == "last" else ""
    return f"no checkpoint{which} to resume from at {dirpath}"


def plain_checkpoints(entries: Iterable[str]) -> list[str]:
    """Returns the names of Lightning checkpoints: "last" first, then the greatest steps."""

    def order(name: str) -> tuple[bool, int, str]:
        step = ids.step_in_name(name)
        return not ids.is_last(name), -1 if step is None else -step, name

    return sorted((name for name in entries if name.endswith(_ENDING)), key=order)


class Checkpointer:
    """Both tiers of one job, as one process uses them. Opens nothing before it is used."""

    def __init__(
        self, config: TieredCheckpointConfig, *, logger: Logger | None = None, session: Session | None = None
    ) -> None:
        self.config = config
        self.dirpath = config.dirpath
        self.session = session or Session(config, logger=logger)
        self.restored: Found | None = None
        #: Further names that ``tiered:last`` means, besides "last".
        self.also_last: frozenset[str] = frozenset()
        self.saver = FullSaver(self.session)
        #: Names right below each folder that was listed, of objects and, with a slash, of folders.
        self._listed: dict[str, set[str]] = {}

    # ------------------------------------------------------------------------------------- save
    def save(
        self,
        state: Any,
        path: str | os.PathLike[str],
        *,
        tiers: Collection[str] = TIERS,
        wait: bool = True,
        metric: Metric | None = None,
        resumable: bool = True,
    ) -> SaveReport | None:
        """Saves a state.

        When this returns, later changes to the tensors do not affect the checkpoint; with overlapped captures, once the
        trainer has waited for them. Threads may save at once: each waits until the states of the earlier saves are in
        node memory.

        Args:
            state: Anything that ``torch.save`` takes; step and epoch come from a Lightning
                checkpoint's ``global_step`` and ``epoch``, or from the name.
            path: A path below dirpath, or a name relative to it.
            tiers: ``"memory"``, ``"durable"`` or both. A durable save goes through memory.
            wait: True to return only when a durable save is committed there, or the upload makes no progress for
                ``pending_timeout_s``: then the save stays queued.
            metric: The value that a ModelCheckpoint monitored.
            resumable: True if training can resume from it; ``tiered:latest`` and ``tiered:last`` skip all others.

        Returns:
            None if the save failed and ``on_save_error`` is ``warn``, or if a memory-only save was skipped: no room.

        Raises:
            ConfigError: The path is not below dirpath, or not a valid name; or another live run writes to the same
                dirpath; or a signal handler saves while it interrupts a save.
            SaveError: The save, or an earlier one in the background, failed and ``on_save_error`` is ``raise``.
        """
        name = ids.name_in(self.dirpath, path)
        facts = SaveFacts(name, "", -1, 1, "durable" in tiers, payload="full", metric=metric, resumable=resumable)
        return self.saver.save(state, facts, wait=wait)

    def prepare(self, size: int) -> None:
        """Makes room in node memory for a first save of about ``size`` bytes, in the background.

        The first save then takes a fraction of the time. A save that comes earlier does not wait. This removes no
        checkpoint, and never raises.
        """
        if size < _LEAST_PREPARED:
            return
        try:
            self.session.open().capturer.prepare(size, first=True)
        except Exception as error:
            self.session.log.info("nothing is prepared for the first save: %s", error)

    # --------------------------------------------------------------------------- alias and remove
    def alias(self, path: str | os.PathLike[str], target: str | os.PathLike[str], *, copy: bool = False) -> None:
        """Makes ``path`` name the files of ``target``, once that is durable; uploads nothing.

        Args:
            path: A path below dirpath, or a name relative to it.
            target: A checkpoint, by the same.
            copy: True to make an object of its own there, which any program can load: the durable tier copies it by
                itself. A sharded checkpoint gets an alias in any case.
        """
        name, session = ids.validate_new_name(ids.name_in(self.dirpath, path)), self.session
        of = ids.name_in(self.dirpath, target)
        with session.turn.taken(name):
            session.background.after(name, lambda: session.submit("copy" if copy else "alias", name, of), needs=of)
            session.known.note(name, exists=True)

    def remove(self, path: str | os.PathLike[str], *, replaced_by: str = "") -> None:
        """Removes a checkpoint from memory now, and from the durable tier once the replacing save is there.

        Args:
            path: A path below dirpath, or a name relative to it.
            replaced_by: The id of that save, by default the newest: the durable tier keeps the checkpoint until its
                commit, and for good if the save is given up.
        """
        name = ids.name_in(self.dirpath, path)
        with self.session.turn.taken(name):
            self.session.background.after(name, lambda: self._remove(name, replaced_by))

    def _remove(self, name: str, replaced_by: str) -> None:
        here: list[StoredPart] = []
        try:
            tier = self.session.open().tier
            here = [part for part in tier.parts() if (part.part.name, part.part.place) == (name, self.session.place)]
            for stored in here:
                if not stored.pending:
                    tier.remove(stored)
        except OSError as error:
            self.session.not_done("removal", name, error)
        memory_only = here and not any(stored.part.durable for stored in here)
        # Memory may have removed an earlier save of that name that the durable tier has.
        if not memory_only or self.session.known.may_be_durable(name):
            self.session.submit("delete", name, replaced_by)
        self.session.known.note(name, exists=False)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Returns True if a name is taken on or queued for the durable tier; raises as :meth:`DurableNameCache.all`."""
        name = ids.name_in(self.dirpath, path)
        return name in self.session.known.all(self.config.support.durable_timeout_s) or self._has(name)

    def is_unmanaged(self, path: str | os.PathLike[str]) -> bool:
        """Returns True if a name without a manifest is taken: probably by another tool; raises as :meth:`exists`."""
        name = ids.name_in(self.dirpath, path)
        return name not in self.session.known.all(self.config.support.durable_timeout_s) and self._has(name)

    def _has(self, name: str) -> bool:
        """Returns True if a checkpoint has this name, an object or a folder of DCP; raises as :meth:`_below`."""
        prefix = ""
        *folders, last = name.split("/")
        for folder in folders:
            if f"{folder}/" not in self._below(prefix):
                return False
            prefix += f"{folder}/"
        names = self._below(prefix)
        return last in names or (f"{last}/" in names and METADATA in self._below(f"{prefix}{last}/"))

    def _below(self, prefix: str = "") -> set[str]:
        """Returns the names right below a prefix, each listed once; without our own checkpoints, which come and go."""
        if prefix in self._listed:
            return self._listed[prefix]
        clock, bound = self.session.clock, float(self.config.support.durable_timeout_s)
        own = self.session.known.all(bound)
        there = answer_within(bound, lambda: children_of(self.session.durable(), prefix), clock=clock)
        self._listed[prefix] = {each for each in there if prefix + each.rstrip("/") not in own}
        return self._listed[prefix]

    # ------------------------------------------------------------------------------------- load
    def load(
        self,
        path: str | os.PathLike[str],
        *,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Loads a full checkpoint; while torch.distributed is initialised, every rank has to call this.

        Args:
            path: ``tiered:latest``, ``tiered:last``, a name, or a path or URL, also outside dirpath.
            map_location: As ``torch.load`` takes it.
            weights_only: As ``torch.load`` takes it.

        Returns:
            The state; a falsy :class:`NoCheckpoint` if a sentinel finds no checkpoint at all.

        Raises:
            CheckpointNotFoundError: No tier has a checkpoint of that name.
            RestoreError: No copy is intact, or torch can't load the file.
            StoreError: The durable tier could not be read.
        """

        def read(found: Restored) -> Any:
            return found.load(Trust.of(self.config, weights_only), map_location=map_location, rank=current_rank())

        return self.load_by(path, read)

    def load_by(
        self,
        path: str | os.PathLike[str],
        read: Callable[[Restored], Any],
        *,
        rejected: Mapping[str, str] | None = None,
    ) -> Any:
        """Restores as :meth:`load` does, for callers that read the file themselves.

        ``read`` is called on every rank with the restored checkpoint, whose file is intact; its answer is returned.
        ``rejected`` has ids of saves that are not to be taken, and the reasons.
        """
        dirpath, selector, began = self.dirpath, Selector("latest"), self.session.clock.monotonic()

        def ready() -> tuple[Tiers, Selector]:
            nonlocal dirpath, selector
            dirpath, selector = self.select(os.fspath(path))
            there = tiers_of(self.session, self.config, None if dirpath == self.dirpath else dirpath)
            return there, selector

        group = coordination.current_group(self.session.clock)
        found = restore(ready, group, read, rejected)
        if found is None:
            self.session.log.info("%s", nothing_to_resume(selector, dirpath))
            if group.rank == 0:
                self._say_unmanaged(selector)
            return NoCheckpoint()
        restored, state = found
        self.restored = restored
        note_restore(self.session, restored, began)
        self.session.save_ids.follow(restored.newest_save_id)
        self.session.take_up()
        return state

    def _say_unmanaged(self, selector: Selector) -> None:
        """Warns of checkpoints that a sentinel skips, because they have no manifest."""
        names: list[str] = []
        with contextlib.suppress(TieredCheckpointError):
            names = plain_checkpoints(self._below())
        if names:
            self.session.log.warning(
                "%s has checkpoints without a manifest, which %s passes by: %s; to resume from one, give its name, such"
                " as ckpt_path=%r",
                self.dirpath,
                ids.LAST if selector.kind == "last" else ids.LATEST,
                names_text(names),
                ids.join_url(self.dirpath, names[0]),
            )

    def select(self, text: str) -> tuple[str, Selector]:
        """Returns the durable tier and the checkpoint that ``text`` means, a path as :meth:`load` takes it.

        Raises:
            ConfigError: ``text`` names no checkpoint.
        """
        if text == ids.LATEST:
            return self.dirpath, Selector("latest")
        if text in (ids.LAST, ids.LAST_URL):
            return self.dirpath, Selector("last", also=self.also_last)
        if ids.url_scheme(text) == ids.SENTINELS:
            raise ConfigError(f"{text!r} stands for no checkpoint", hint=f"allowed: {ids.LOADABLE}")
        try:
            return self.dirpath, Selector("name", ids.name_in(self.dirpath, text))
        except ConfigError:
            dirpath, _, name = ids.text_of(text).rstrip("/").rpartition("/")
            if not dirpath or ".." in text.split("/") or dirpath.endswith(":/"):
                raise
            return ids.normalize_dirpath(dirpath), Selector("name", ids.validate_name(name))

    def close(self) -> None:
        """See :meth:`Session.close`."""
        try:
            self.saver.show()
        finally:
            self.session.close()
