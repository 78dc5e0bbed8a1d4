"""Checkpointer: save, alias, remove and load over both tiers. What every adapter calls."""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine import commit, coordination
from tiered_checkpoint_io.engine.choice import Selector
from tiered_checkpoint_io.engine.queue import DrainProgress, Outcome, Request
from tiered_checkpoint_io.engine.restore import Restored, Restorer, open_restored
from tiered_checkpoint_io.engine.saver import Facts, HostPins, Saver, part_of
from tiered_checkpoint_io.engine.supervise import DrainHandle
from tiered_checkpoint_io.errors import (
    ConfigError,
    InvalidNameError,
    MemoryFullError,
    RestoreError,
    SaveError,
    UsageError,
)
from tiered_checkpoint_io.image import Image, plan
from tiered_checkpoint_io.logs import Logger, get_logger, rate
from tiered_checkpoint_io.manifest import Metric
from tiered_checkpoint_io.storage import Store, open_store
from tiered_checkpoint_io.storage.memory import MemoryTier, node_budget

TIERS = frozenset({"memory", "durable"})


class NoCheckpoint(dict[str, Any]):
    """What loading ``tiered:latest`` gives where there is nothing yet: falsy, so start from scratch.

    An adapter may put keys into it that its framework looks for.
    """

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        name: The checkpoint's name.
        step: Its training step; -1 where the state does not tell.
        save_id: The save's id.
        size: Bytes.
        stall_s: How long the caller waited, seconds.
        tiers: Where it is, or is on its way to.
    """

    name: str
    step: int
    save_id: str
    size: int
    stall_s: float
    tiers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Progress:
    """A view of background work for progress bars and metrics.

    Attributes:
        pending: Operations that wait for the drain.
        drain: What the drain last said.
        last_save: The newest save of this process.
        counters: ``saved``, ``failed`` and ``skipped`` saves of this process.
    """

    pending: int
    drain: DrainProgress
    last_save: SaveReport | None
    counters: dict[str, int] = field(default_factory=dict)


class Checkpointer:
    """Both tiers of one job, as one process uses them. Opens nothing before it is used."""

    def __init__(self, config: TieredCheckpointConfig, *, logger: Logger | None = None) -> None:
        self.config = config
        self.dirpath = config.dirpath
        self.restored: Restored | None = None
        self._log = get_logger(config.namespace, rank=_rank(), log_dir=config.log_dir, logger=logger)
        self._pins = HostPins()
        self._opened: tuple[MemoryTier, Saver, DrainHandle] | None = None
        self._store: Store | None = None
        self._run_id: str | None = None
        self._counter = 0
        self._known: set[str] | None = None
        self._counts: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._last_save: SaveReport | None = None
        self._outcomes: list[Outcome] = []
        self._warned_small = False

    # ------------------------------------------------------------------------------------- save
    def save(
        self,
        state: Any,
        path: str | os.PathLike[str],
        *,
        tiers: Collection[str] = TIERS,
        wait: bool = True,
        metric: tuple[str, float] | None = None,
    ) -> SaveReport | None:
        """Saves a state.

        When this returns, what training does to the tensors is not in the checkpoint.

        Args:
            state: Anything that ``torch.save`` takes; step and epoch come from a Lightning
                checkpoint's ``global_step`` and ``epoch``, or from the name.
            path: A path below dirpath, or a name relative to it.
            tiers: ``"memory"``, ``"durable"`` or both. What goes to the durable tier goes through
                memory.
            wait: Whether to return only when a durable save is committed there.
            metric: What a ModelCheckpoint monitored, and its value.

        Returns:
            None where the save failed and ``on_save_error`` is ``warn``.

        Raises:
            InvalidNameError: The path is not below dirpath, or not a valid name.
            UsageError: Unknown tiers.
            SaveError: The save, or an earlier one in the background, failed and ``on_save_error``
                is ``raise``.
        """
        wanted = frozenset(tiers)
        if not wanted or wanted - TIERS:
            raise UsageError(
                f"tiers is {sorted(wanted)}", operation="save", hint="allowed: 'memory', 'durable', or both"
            )
        name = ids.name_in(self.dirpath, path)
        started = time.monotonic()
        self._surface()
        step, epoch = _position(state, name)
        try:
            tier, _, _ = self._open()
            facts = Facts(
                name=name,
                save_id=self._next_id(tier),
                step=step,
                epoch=epoch,
                world_size=_world_size(),
                rank=_rank(),
                dirpath=self.dirpath,
                durable="durable" in wanted,
                metric=Metric(*metric) if metric is not None else None,
            )
            size, done = self._save(state, facts, wait=wait)
        except (InvalidNameError, ConfigError, UsageError):
            raise
        except Exception as error:
            self._failed(name, step, error)
            return None
        stall = time.monotonic() - started
        self._counts["saved"] += 1
        self._last_save = SaveReport(name, step, facts.save_id, size, stall, done)
        self._log.info("Step %d: saved %s to %s: %s", step, name, "+".join(sorted(done)), rate(size, stall))
        return self._last_save

    def _save(self, state: Any, facts: Facts, *, wait: bool) -> tuple[int, frozenset[str]]:
        _, saver, drain = self._open()
        if facts.durable:
            drain.start()
            if not drain.has_room(self._next_id(self._open()[0])):
                self._counts["skipped"] += 1
                self._log.warning("Step %d: %s stays in memory: the durable tier is behind", facts.step, facts.name)
                facts = replace(facts, durable=False)
            elif self._known is not None:
                self._known.add(facts.name)
        image = plan(state)
        try:
            saver.save(image, facts)
        except MemoryFullError as error:
            if not facts.durable:
                raise
            self._save_direct(image, facts, error)
            return image.size, frozenset({"durable"})
        if facts.durable and wait:
            outcome = drain.wait(facts.save_id, self.config.wait_timeout_s)
            if outcome.state != "committed":
                raise SaveError(
                    f"{facts.name} is in memory, but not on the durable tier: {outcome.error}",
                    operation="save",
                    tier="durable",
                    key=ids.join_url(self.dirpath, facts.name),
                    step=facts.step,
                )
        return image.size, frozenset({"memory", "durable"} if facts.durable else {"memory"})

    def _save_direct(self, image: Image, facts: Facts, reason: MemoryFullError) -> None:
        """Writes straight to the durable tier, where memory can't hold the checkpoint."""
        if not self._warned_small:
            self._warned_small = True
            warnings.warn(
                f"the memory tier can't hold this checkpoint, so durable saves block training: {reason}", stacklevel=5
            )
        with mmap.mmap(-1, image.size) as buffer, memoryview(buffer) as view:
            hashes = image.fill(view)
            with view.toreadonly() as data:
                commit.commit_full(self._durable(), part_of(image, facts, hashes), data)

    # --------------------------------------------------------------------------- alias and remove
    def alias(self, path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Makes ``path`` name the files of ``target``, once that is durable; uploads nothing."""
        name = ids.name_in(self.dirpath, path)
        self._submit("alias", name, ids.name_in(self.dirpath, target))
        if self._known is not None:
            self._known.add(name)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint from memory now, and from the durable tier behind earlier commits."""
        name = ids.name_in(self.dirpath, path)
        tier, _, _ = self._open()
        memory_only = False
        for stored in tier.parts():
            if stored.part.name == name and stored.part.dirpath == self.dirpath and not stored.pending:
                memory_only = not stored.part.durable
                tier.remove(stored)
        if not memory_only:
            self._submit("delete", name)
        if self._known is not None:
            self._known.discard(name)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a name is taken on the durable tier, or queued for it, as far as this process knows."""
        name = ids.name_in(self.dirpath, path)
        if self._known is None:
            tier, _, _ = self._open()
            listed = (ids.name_from_manifest_key(e.key) for e in self._durable().list(ids.MANIFEST_PREFIX))
            self._remember(tier, {known for known in listed if known is not None})
        return self._known is not None and name in self._known

    def _remember(self, tier: MemoryTier, listed: set[str]) -> None:
        queued = {request.name for request in self._open()[2].queue.requests() if request.action == "alias"}
        pending = {stored.part.name for stored in tier.parts() if stored.pending}
        self._known = listed | queued | pending

    # ------------------------------------------------------------------------------------- load
    def load(self, path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Loads a checkpoint; while torch.distributed is initialised, every rank has to call this.

        Args:
            path: ``tiered:latest``, ``tiered:last``, a name, or a path or URL, also outside dirpath.
            map_location: As ``torch.load`` takes it.
            weights_only: As ``torch.load`` takes it; None for the configuration's.

        Returns:
            The state; a falsy :class:`NoCheckpoint` where a sentinel finds no checkpoint at all.

        Raises:
            CheckpointNotFoundError: There is none of that name.
            RestoreError: None is intact, or torch can't load it.
            StoreError: The durable tier could not be asked.
        """
        tier: MemoryTier | None = None
        error: Exception | None = None
        dirpath, selector = self.dirpath, Selector("latest")
        try:
            tier, _, _ = self._open()
            dirpath, selector = self._select(os.fspath(path))
        except Exception as caught:
            # The others are on their way to the first exchange: they must hear of it there.
            error = caught
        root = tier.root if tier is not None else Path("/")
        group = coordination.current_group(root, timeout_s=float(self.config.wait_timeout_s))
        try:
            coordination.agree(group, error)
            assert tier is not None
            return self._restore(tier, group, dirpath, selector, map_location, weights_only)
        finally:
            group.close()

    def _restore(
        self,
        tier: MemoryTier,
        group: coordination.Group,
        dirpath: str,
        selector: Selector,
        map_location: Any,
        weights_only: bool | None,
    ) -> Any:
        def store() -> Store:
            return self._durable() if dirpath == self.dirpath else self._other(dirpath)

        restorer = Restorer(self.config, tier, store, self._log, dirpath)
        restored = restorer.restore(selector, group)
        if restorer.listed is not None and dirpath == self.dirpath:
            self._remember(tier, restorer.listed)
        if restored is None:
            self._log.info("no checkpoint at %s: starting from scratch", dirpath)
            return NoCheckpoint()
        state: Any = None
        error: Exception | None = None
        with open_restored(tier, restored) as file:
            try:
                state = self._torch_load(file, restored, map_location, weights_only)
            except Exception as caught:
                error = caught
            # Nobody leaves before all have opened the file, and all fail if one does.
            coordination.agree(group, error)
        self.restored = restored
        self._take_up(tier)
        return state

    def _select(self, text: str) -> tuple[str, Selector]:
        if text == ids.LATEST:
            return self.dirpath, Selector("latest")
        if text in (ids.LAST, ids.LAST_URL):
            return self.dirpath, Selector("last")
        try:
            return self.dirpath, Selector("name", ids.name_in(self.dirpath, text))
        except InvalidNameError:
            full = ids.normalize_dirpath(text)
            dirpath, _, name = full.rpartition("/")
            if not dirpath or ".." in text.split("/") or dirpath.endswith(":/"):
                raise
            return ids.normalize_dirpath(dirpath), Selector("name", ids.validate_name(name))

    def _torch_load(self, file: Any, restored: Restored, map_location: Any, weights_only: bool | None) -> Any:
        only = self.config.weights_only if weights_only is None else weights_only
        try:
            # What others wrote may be in torch's old format, which can't be mapped.
            return torch.load(file, map_location=map_location, weights_only=only, mmap=restored.content is not None)
        except Exception as error:
            raise RestoreError(
                f"torch.load refused {restored.name}, whose bytes are intact: {error}",
                operation="load",
                tier=restored.tier,
                key=restored.name,
                rank=_rank(),
                step=restored.step,
                hint="if it holds objects of yours and you trust it, set weights_only to false",
            ) from error

    def _take_up(self, tier: MemoryTier) -> None:
        """Starts the drain for what an earlier process left."""
        _, _, drain = self._open()
        if any(stored.pending for stored in tier.parts()) and _rank() == 0:
            drain.start()

    # ------------------------------------------------------------------------------- background
    def poll(self) -> list[Outcome]:
        """Background operations that ended since the last call, each once."""
        if self._opened is None:
            return []
        fresh = self._outcomes + self._opened[2].new_outcomes()
        self._outcomes = []
        return fresh

    @property
    def asked(self) -> dict[str, int]:
        """Requests and bytes that this process itself asked of the durable tier; the drain's are its own."""
        now = Counter(self._store.metrics.snapshot()) if self._store is not None else Counter()
        return dict(self._asked + now)

    def is_pending(self, name: str) -> bool:
        """Whether a save or alias of this name is still on its way to the durable tier."""
        if self._opened is None:
            return False
        tier, _, drain = self._opened
        if any(request.name == name for request in drain.queue.requests()):
            return True
        return any(stored.pending and stored.part.name == name for stored in tier.parts())

    def progress(self) -> Progress:
        """Where background work stands."""
        if self._opened is None:
            return Progress(0, DrainProgress(), self._last_save, dict(self._counts))
        drain = self._opened[2]
        return Progress(len(drain.pending()), drain.progress(), self._last_save, dict(self._counts))

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until all queued work is on the durable tier.

        Raises:
            DrainError: It is not, after ``timeout_s`` (by default ``wait_timeout_s``) seconds.
        """
        if self._opened is not None:
            self._opened[2].flush(self.config.wait_timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Waits for queued work, shows background errors once, and frees everything."""
        if self._opened is None:
            return
        tier, saver, drain = self._opened
        try:
            if drain.pending():
                try:
                    drain.start()
                    self.wait()
                except Exception as error:
                    self._failed("queued checkpoints", -1, error)
            self._surface()
        finally:
            self._opened = None
            saver.close()
            drain.close(timeout_s=self.config.wait_timeout_s)
            tier.close()
            if self._store is not None:
                self._asked.update(self._store.metrics.snapshot())
                self._store.close()
                self._store = None

    # ----------------------------------------------------------------------------------- inside
    def _open(self) -> tuple[MemoryTier, Saver, DrainHandle]:
        if self._opened is None:
            config = self.config
            budget = None
            if os.path.isdir(config.memory_dir):
                budget = node_budget(config.memory_allocation_percentage, config.memory_dir)
            tier = MemoryTier.open(config.memory_dir, config.namespace, budget_bytes=budget, unmap=self._pins.unpin)
            saver = Saver(tier, keep_last=config.memory_keep_last, pins=self._pins)
            self._opened = (tier, saver, DrainHandle(tier, config, self._log))
        return self._opened

    def _durable(self) -> Store:
        if self._store is None:
            self._store = open_store(self.config)
        return self._store

    def _other(self, dirpath: str) -> Store:
        return open_store(self.config, dirpath)

    def _next_id(self, tier: MemoryTier) -> str:
        if self._run_id is None:
            seen = [stored.save_id for stored in tier.parts()]
            if self.restored is not None and self.restored.newest_save_id is not None:
                seen.append(self.restored.newest_save_id)
            self._run_id = ids.new_run_id(after=max(seen, default=None))
        self._counter += 1
        return ids.save_id(self._run_id, self._counter)

    def _submit(self, action: Any, name: str, target: str = "") -> None:
        tier, _, drain = self._open()
        drain.submit(Request(self._next_id(tier), action, name, self.dirpath, target))

    def _surface(self) -> None:
        """Shows failures of the background, each once."""
        if self._opened is None:
            return
        fresh = self._opened[2].new_outcomes()
        # Whoever polls sees them too.
        self._outcomes += fresh
        bad = [outcome for outcome in fresh if outcome.state == "failed" and outcome.action != "cancel"]
        for outcome in bad:
            error = SaveError(
                f"{outcome.action} of {outcome.name} did not reach the durable tier: {outcome.error}",
                operation=outcome.action,
                tier="durable",
                key=ids.join_url(self.dirpath, outcome.name),
                step=outcome.step if outcome.step >= 0 else None,
                hint="it stays in node memory and is tried again",
            )
            self._failed(outcome.name, outcome.step, error)

    def _failed(self, name: str, step: int, error: Exception) -> None:
        self._counts["failed"] += 1
        self._log.error("Step %d: saving %s failed: %s", step, name, error)
        if self.config.on_save_error == "raise":
            if isinstance(error, SaveError):
                raise error
            raise SaveError(
                f"saving {name} failed: {error}", operation="save", key=ids.join_url(self.dirpath, name), step=step
            ) from error


def _position(state: Any, name: str) -> tuple[int, int]:
    step = state.get("global_step") if isinstance(state, dict) else None
    epoch = state.get("epoch") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        in_name = ids.step_in_name(name)
        step = -1 if in_name is None else in_name
    return step, epoch if isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 0 else -1


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
