"""The storage writer for torch.distributed.checkpoint (DCP) over both tiers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from tiered_checkpoint_io.adapters.calls import DcpArguments, dcp_arguments, show_failures, was_shown
from tiered_checkpoint_io.adapters.dcp_settings import OverTiers, Settings, close_shared, settings_of
from tiered_checkpoint_io.adapters.planner import CheckingSavePlanner, KindsCheck, local_of
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks.coordination import trains_here
from tiered_checkpoint_io.engine.ranks.run import current_rank
from tiered_checkpoint_io.engine.save.facts import SaveFacts, agreed, arrived, expect_facts, vote, warn_at_first_save
from tiered_checkpoint_io.engine.save.overlap import Overlapped
from tiered_checkpoint_io.engine.save.saver import PartSave
from tiered_checkpoint_io.errors import ConfigError, SaveError, TieredCheckpointError, seconds
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.shard_image import Item, Placed, TensorRow, plan_shard
from tiered_checkpoint_io.logs import Logger, of_step
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig, check_positive


class PlannedFile(NamedTuple):
    """A rank's file."""

    image: Image
    indexes: Sequence[MetadataIndex]
    placed: Sequence[Placed]


class FileLayout:
    """The layout of the file of a plan, kept for later saves; none of its tensors."""

    def __init__(self, plan: SavePlan, ordered: Sequence[WriteItem], data: Sequence[Item]) -> None:
        """Takes a plan, and its items in the file's order: objects come first.

        Raises ValueError if later files can't be planned from this one.
        """
        self.plan = plan
        count = sum(item.type == WriteItemType.BYTE_IO for item in ordered)
        self.objects, tensors = ordered[:count], ordered[count:]
        self._keys = [item.index.fqn for item in tensors]
        self._indexes = [item.index for item in ordered]
        self._row = TensorRow([each for each in data[count:] if isinstance(each, torch.Tensor)])

    def file(self, objects: Sequence[bytes], state: Mapping[str, Any]) -> PlannedFile:
        """Returns the file of the same items, with other objects and a flattened state of the same structure."""
        image, placed = self._row.plan(objects, [local_of(state[key]) for key in self._keys])
        return PlannedFile(image, self._indexes, placed)


@dataclasses.dataclass(slots=True, eq=False)
class Save:
    """One save of a writer, and its state."""

    settings: Settings
    #: The checkpoint; None before the first save is named.
    located: ids.Located | None = None
    #: The arguments of DCP's function that saves; None for a function of this package.
    by_dcp: DcpArguments | None = None
    has_begun: bool = False
    rank: int = 0
    coordinates: bool = True
    #: Facts that the coordinator has issued; None on other ranks.
    facts: SaveFacts | None = None


class TieredStorageWriter(OverTiers, StorageWriter):
    """Saves a sharded checkpoint to node memory, and from there to the durable tier.

    For ``torch.distributed.checkpoint.save``, which returns, on all ranks, once a durable save is committed on the
    durable tier, and ``async_save``, which returns once the state is staged, and whose future is done once the
    checkpoint is committed in node memory. ``wait`` changes either.

    Any rank's failure reaches all ranks by DCP itself, as an exception of the save (or of its future), for any
    ``on_save_error``; that key is about failures between node memory and the durable tier. With ``warn`` they are
    logged, and the checkpoint stays in node memory, queued; with ``raise`` they are raised, by the save that waits or
    by the next one.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        save_to_s3: bool | None = None,
        s3_every_n_steps: int | None = None,
        world_size: int | None = None,
        thread_count: int | None = None,
        wait: bool | None = None,
        require_step: bool = True,
        logger: Logger | None = None,
        checkpoint_config: Any = None,
        **options: Any,
    ) -> None:
        """Validates; opens nothing.

        Args:
            config: A :class:`TieredCheckpointConfig`, a mapping, dirpath as text, or an object with
                the attributes of ``SageMakerCheckpointConfig``. Besides the keys of TieredCheckpointConfig, ``config``
                may hold ``s3_tier_base_path`` (dirpath is then the folder of the namespace below it), ``world_size``,
                ``save_to_s3``, ``s3_every_n_steps`` and ``logger``. The first save uses an object's values of the
                writer's start; each later save reads the object again.
            step: The training step; wins over the step in a path.
            path: Instead of a ``checkpoint_id``. A later ``checkpoint_id`` replaces it, as in ``FileSystemWriter``.
            save_to_s3: True if these saves go to the durable tier.
            s3_every_n_steps: Steps between saves to the durable tier, without ``save_to_s3``; every save by default.
            world_size: Number of ranks that save together; checked at each save.
            thread_count: Number of threads of a rank that copy; its share of the node's cores by default.
                A rank writes one file in any case.
            wait: True if a durable save returns only when it is committed there, or after 30 s without progress. By
                default only a synchronous save waits. The other ranks wait in a collective of DCP's: give their process
                group a timeout that is longer than an upload takes.
            require_step: True if a checkpoint without a step is refused.
            logger: Logger to use instead of the package's own.
            checkpoint_config: Another name for ``config``.
            options: Single keys of the configuration.

        Raises:
            ConfigError: A key or value is not allowed. The step or path is not allowed.
        """
        super().__init__()
        self._given = config if config is not None else checkpoint_config
        extra = {"s3_every_n_steps": s3_every_n_steps, "world_size": world_size, "logger": logger}
        self._options = {**options, **extra}
        #: The newest save, and that of each thread: DCP's ``async_save`` makes each on a thread of its own.
        self._save, self._of_thread = Save(settings_of(self._given, self._options)), threading.local()
        self.step = step
        self.save_to_s3 = save_to_s3
        #: Further facts of a save: epoch, metric, resumable; see :class:`SaveFacts`.
        self.facts: dict[str, Any] = {}
        #: The name and content of a small file next to the shards.
        self.extra: tuple[str, bytes] | None = None
        #: Error of this rank before the save began, raised in a call whose errors DCP sends to all ranks.
        self.failed: Exception | None = None
        #: True if a save returns once all ranks have captured the state, and hashes and commits it in the background.
        self.seals_in_background = False
        #: The overlapped capture in progress, if any.
        self.overlapped: Overlapped | None = None
        #: True if a durable save returns only when it is committed there; None for the default.
        self.wait_option = wait
        #: Number of threads that copy; None for the default.
        self.threads = thread_count
        self._path = path
        self._require_step = require_step
        check_positive("thread_count", thread_count)
        if step is not None:
            ids.locate(self.settings.config.dirpath, path, step)
        if save_to_s3:
            self.settings.is_durable(0, save_to_s3)

    # ------------------------------------------------------------------------------------ DCP's
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Names the checkpoint that this thread saves next; see ``StorageWriter.reset``."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        # The user's object may have other values for each later save.
        is_first = self._save.located is None
        settings = self._save.settings
        if not is_first:
            settings = settings_of(self._given, self._options).with_support(settings.config.support)
        located = ids.locate(settings.config.dirpath, self._path, self.step)
        if located.step < 0 and self._require_step:
            raise ConfigError(
                f"Invalid step value: {located.name!r} tells none",
                hint="give step=, or a checkpoint_id that holds step_N, such as 'step_42'",
            )
        ids.validate_new_name(located.name)
        by_dcp = dcp_arguments("save", "async_save")
        self._save = self._of_thread.save = Save(settings.at(located.dirpath), located, by_dcp)
        if by_dcp is not None and not by_dcp.alone:
            self.meet_peers(by_dcp.process_group)

    def meet_peers(self, process_group: Any) -> None:
        """Prepares the ranks for replication; all ranks call this on the threads that train, or it is left out."""
        if trains_here():
            located = self.located
            self.session.meet_peers(process_group, ids.series_of(located.name, located.step))

    def storage_meta(self) -> StorageMeta:
        """Begins a save: DCP calls this first, on all ranks, and ``reset`` only if it was given a ``checkpoint_id``.

        Raises:
            Exception: :attr:`failed`.
        """
        save = getattr(self._of_thread, "save", None)
        if save is None or save.has_begun:
            self.reset()
        self._of_thread.save.has_begun = True
        failed, self.failed = self.failed, None
        if failed is not None:
            with self._counting("preparing"):
                self.saver.fail(failed)
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the newest save, or of the first one to come; None without a step or path."""
        located = self._save.located
        with contextlib.suppress(ConfigError):
            located = located or ids.locate(self.settings.config.dirpath, self._path, self.step)
        return ids.join_url(located.dirpath, located.name) if located is not None else None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Takes this rank's role."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False",
                operation="save",
                hint="ranks of a sharded checkpoint have to agree on it; leave use_collectives as it is",
            )
        rank, save = kwargs.get("rank"), self._of_thread.save
        save.rank, save.coordinates = current_rank() if rank is None else int(rank), is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Shows failures of earlier saves, which DCP then carries to all ranks."""
        expect_facts()
        with self._counting("beginning") as save:
            durable = save.settings.is_durable(self.located.step, self.save_to_s3)
        try:
            self.saver.begin()
        except SaveError as error:
            was_shown(error.__cause__)
            raise
        show_failures()
        self.session.surface()
        with self._counting("beginning"):
            voted = vote(self.session, durable=durable and not save.coordinates)
        return plan if voted is None else dataclasses.replace(plan, storage_data=voted)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds the facts of this save to each rank's plan; called on the coordinator."""
        with self._counting("beginning") as save:
            located, settings = self.located, save.settings
            settings.check_world_size(len(plans), self.checkpoint_id)
            durable, dirpath = settings.is_durable(located.step, self.save_to_s3), settings.durable_dirpath
            save.facts = self.saver.issue(
                SaveFacts(
                    *(located.name, "", located.step, len(plans), durable),
                    coordinator=save.rank,
                    dirpath=dirpath,
                    **self.facts,
                )
            )
        return [dataclasses.replace(plan, storage_data=save.facts) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Puts this rank's items into memory."""
        with self._counting("saving") as save:
            results = self._write(save, plan, planner)
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint, once all ranks have written; called on the coordinator."""
        with self._counting("committing") as save:
            facts = save.facts
        assert facts is not None
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        # From each rank's results: the place of each item in the rank's file.
        metadata.storage_data = {each.index: each.storage_data[0] for rank in results for each in rank}
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=facts.save_id)
        try:
            with self._counting("committing"):
                self.saver.finish(
                    facts.save_id,
                    # Later changes of the metadata belong to a later save.
                    functools.partial(pickle.dumps, dataclasses.replace(metadata)),
                    wait=self.waits,
                    extra=self.extra,
                    in_memory=all(each.storage_data[1] for rank in results for each in rank),
                )
        except TieredCheckpointError:
            # Raised from DCP's own save it would end the training; node memory has the checkpoint, queued.
            is_queued = ids.save_id_of_op(self.saver.op_id or "") == facts.save_id
            if save.by_dcp is None or not is_queued or save.settings.config.on_save_error == "raise":
                raise

    # ------------------------------------------------------------------------------------- ours
    @property
    def settings(self) -> Settings:  # type: ignore[override]
        """The settings of the newest save, or of the writer's start."""
        return self._save.settings

    @property
    def waits(self) -> bool:
        """Returns whether a durable save returns only when it is committed there."""
        if self.wait_option is not None:
            return self.wait_option
        by_dcp = self._save.by_dcp
        return not (self.seals_in_background or (by_dcp is not None and by_dcp.in_background))

    @property
    def last_save(self) -> SaveReport | None:
        """The newest save of this process."""
        return self.session.last_save

    @property
    def located(self) -> ids.Located:
        """The checkpoint of the newest save; :meth:`reset` names it."""
        located = self._save.located
        assert located is not None
        return located

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until all that this node has queued is on the durable tier; see :meth:`Session.wait`."""
        if timeout_s is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        # Another process may have saved it: DCP's, for an async_save of its own.
        self.session.open()
        self.session.wait(timeout_s)

    def close(self) -> None:
        """Waits for the durable tier, shows failures once, and frees all that writers of this process share."""
        try:
            # Background seals have to end before their failure can be shown.
            self.session.background.wait()
            show_failures()
        finally:
            close_shared(self.settings)

    def __getstate__(self) -> dict[str, Any]:
        # For async_save in a process of its own, whose session is its own.
        save = dataclasses.replace(self._save, by_dcp=None, has_begun=False, facts=None)
        return {**self.__dict__, "_newest_seen": self.session.save_ids.newest, "_save": save, "_of_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())

    # ----------------------------------------------------------------------------------- inside
    @contextlib.contextmanager
    def _counting(self, what: str) -> Iterator[Save]:
        """Yields this thread's save; counts, notes and logs a failure, which DCP then carries to all ranks."""
        save: Save = self._of_thread.save
        try:
            if save is not self._save:
                # Finished now, it would be the newest checkpoint, with an older state than the later one.
                raise SaveError(
                    "a later save began with the same writer before this one was finished",
                    operation="save",
                    hint="wait for the future of one async_save before the next",
                )
            yield save
        except Exception as error:
            assert save.located is not None
            name, step = save.located.name, save.located.step
            self.session.count_failure(name, step, error)
            self.session.log.error("%s%s %s failed: %s", of_step(step), what, name, error)
            raise

    def _write(self, save: Save, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        settings, rank = save.settings, save.rank
        facts = agreed(save.facts or arrived() or plan.storage_data, self.located, settings.durable_dirpath, rank)
        file = file_of(plan, planner, settings.config, self._warn_of_objects)
        part = PartSave(
            *(self.session, facts, rank, file.image if plan.items else None, self.threads),
            overlapped=self.overlapped,
            is_sealed_later=self.seals_in_background and not self.waits,
        )
        in_memory = self.saver.capture(part)
        # One text for all of them, which is pickled once.
        name = facts.file_name(rank)
        return [
            WriteResult(index, length, (filesystem._StorageInfo(name, offset, length), in_memory))
            for index, (offset, length) in zip(file.indexes, file.placed, strict=True)
        ]

    def _warn_of_objects(self, written: list[Any]) -> None:
        files = [*written, *([self.extra[1]] if self.extra is not None else [])]
        if files:
            name = self.located.name
            warn_at_first_save(self.session, name, files)


def file_of(
    plan: SavePlan,
    planner: SavePlanner,
    config: TieredCheckpointConfig,
    warn: Callable[[list[Any]], None],
) -> PlannedFile:
    """Returns the file of a rank's plan; the planner may keep its layout for the next save."""
    # The layout of another planner is not kept.
    structure = planner.structure if isinstance(planner, CheckingSavePlanner) else None
    layout: FileLayout | None = structure.layout if structure is not None else None
    if layout is not None and layout.plan is plan:
        found: list[Any] = [planner.resolve_data(item) for item in layout.objects]
        objects = [each.getvalue() for each in found]
        warn(objects)
        return layout.file(objects, planner.state_dict)  # type: ignore[attr-defined]
    # The order of FileSystemWriter.
    ordered = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
    kinds = KindsCheck(config)
    items = [_item(item, planner, kinds) for item in ordered]
    warn([data for data in items if not isinstance(data, torch.Tensor)])
    if structure is not None:
        # An item that can't be kept is planned again each time.
        with contextlib.suppress(ValueError):
            structure.layout = FileLayout(plan, ordered, items)
    image, placed = plan_shard(items)
    return PlannedFile(image, [item.index for item in ordered], placed)


def _item(item: WriteItem, planner: SavePlanner, kinds: KindsCheck) -> Item:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        return data.getvalue()
    kinds.check(item.index.fqn, data)
    return data.detach()
