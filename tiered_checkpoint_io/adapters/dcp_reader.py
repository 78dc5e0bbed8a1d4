"""The storage reader for torch.distributed.checkpoint (DCP) over both tiers."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tiered_checkpoint_io.adapters.dcp_reading import PlanReader
from tiered_checkpoint_io.adapters.dcp_settings import OverTiers, Shared, close_shared, settings_of, shared_of
from tiered_checkpoint_io.adapters.groups import dcp_arguments
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.engine.restore.catalog import tiers_of
from tiered_checkpoint_io.engine.restore.choice import ONE_FOLDER, Selector, Tier
from tiered_checkpoint_io.engine.restore.loaders import warn_of_left_out
from tiered_checkpoint_io.engine.restore.restore import note_restore
from tiered_checkpoint_io.engine.restore.search import DAMAGE
from tiered_checkpoint_io.engine.restore.shard_exchange import exchange, share_reads
from tiered_checkpoint_io.engine.restore.shard_reading import OpenShards, open_shards
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA


class TieredStorageReader(OverTiers, StorageReader):
    """Loads a sharded checkpoint: of one step, of one path, or the newest that is whole.

    For ``torch.distributed.checkpoint.load``, on the main thread of every rank that loads. Memory is
    read first, then the durable tier; every byte is verified on the way into the tensors. A rank
    fetches only the chunks that its plan needs, and a node each of them once.

    Damage that shows while tensors are read fails the load on all ranks. The same reader, used
    again, takes the next checkpoint; :func:`tiered_checkpoint_io.dcp.load` does so by itself.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        no_dist: bool | None = None,
        process_group: Any = None,
        world_size: int | None = None,
        logger: Logger | None = None,
        checkpoint_config: Any = None,
        _extension_registry: Any = None,
        **options: Any,
    ) -> None:
        """Validates; opens nothing.

        Args:
            config: As :class:`TieredStorageWriter` takes it.
            step: The training step; the newest checkpoint where neither it nor a path is given. Both as ``load`` has
                it: of names in no folder, else of the only folder; of another with a path such as
                ``stage1/tiered:latest``.
            path: Instead of a ``checkpoint_id``. A later ``checkpoint_id`` replaces it, as in ``FileSystemReader``.
            no_dist: Whether this process loads alone; by default as DCP's ``load`` has it.
            process_group: The ranks that load together; by default the group that DCP's ``load``
                was given.
            world_size: As the writer takes it; a checkpoint of any other world size loads.
            logger: Where to log, in place of the package's own logger.
            checkpoint_config: Another name for ``config``.
            _extension_registry: Stream transformations, as ``FileSystemReader`` takes them.
            options: Single keys of the configuration.

        Raises:
            ConfigError: A key or value is not allowed. The step or path is not allowed.
        """
        super().__init__()
        given = config if config is not None else checkpoint_config
        self._base = settings_of(given, {**options, "world_size": world_size, "logger": logger})
        self.settings = self._base
        self.step = step
        self._path = path
        self._began = 0.0
        self._no_dist = no_dist
        self._process_group = process_group
        # Not in torch 2.6, whose files need none.
        known: Any = getattr(filesystem, "_StorageReaderTransforms", None)
        self._transforms = known and known(_extension_registry)
        #: Which checkpoint is meant.
        self.selector = Selector("latest", folder=ONE_FOLDER)
        self._rejected: dict[str, str] = {}
        self._metadata: Metadata | None = None
        self._joined: coordination.Group | None = None
        #: The checkpoint that is, or was last, loaded.
        self.opened: OpenShards | None = None
        #: Where this node had its bytes from.
        self.tier: Tier = "durable"
        #: Why the last load failed on this rank, where it did.
        self.error: TieredCheckpointError | None = None
        #: What went wrong on this rank before the load began, raised on all ranks.
        self.failed: Exception | None = None
        self.reset()

    # ------------------------------------------------------------------------------------ DCP's
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load; see ``StorageReader.reset``."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        path = self._path
        self._began = SYSTEM.monotonic()
        self.settings = self._base
        text = os.fspath(path) if path is not None else ""
        folder, is_latest = text.removesuffix(f"/{ids.LATEST}"), text in ("", ids.LATEST)
        if is_latest or folder != text:
            dirpath = self._base.config.dirpath
            if self.step is not None:
                ids.locate(dirpath, None, self.step)
            self.selector = Selector("latest", step=self.step, folder=ONE_FOLDER)
            if not is_latest:
                self.selector = replace(self.selector, folder=ids.folder_of(f"{ids.name_in(dirpath, folder)}/any"))
            return
        if text.startswith(f"{ids.SENTINELS}:"):
            hint = f"allowed: {ids.LATEST}, a name, a path or a URL"
            raise ConfigError(f"{text!r} stands for no checkpoint", operation="load", hint=hint)
        located = ids.locate(self._base.config.dirpath, path, self.step)
        self.settings = self._base.at(located.dirpath)
        self.selector = Selector("name", located.name)

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's path on the durable tier, or that tier itself while none is chosen."""
        name = self.selector.name or (self.opened.name if self.opened is not None else "")
        dirpath = self.settings.config.dirpath
        return ids.join_url(dirpath, name) if name else dirpath

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Chooses the checkpoint, with all ranks that load, and gives its ``.metadata``.

        Raises:
            CheckpointNotFoundError: There is none.
            RestoreError: There are some, but none is intact, or they are in several folders and none was named.
            StoreError: The durable tier could not be asked.
        """
        del args, options
        self._close()
        self.error = None
        try:
            self._metadata = self._open()
            return self._metadata
        except TieredCheckpointError as error:
            self.error = error
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: it is what :meth:`read_metadata` gave."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Changes nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Changes nothing; called on the coordinator, which sees what all ranks load."""
        if self._metadata is not None and self.opened is not None:
            held = [fqn.split(".") for fqn in self._metadata.state_dict_metadata]
            wanted = [item.storage_index.fqn.split(".") for plan in plans for item in plan.items]
            warn_of_left_out(self.session, self.opened.name, held, wanted)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what this rank's plan asks for.

        Raises:
            CorruptCheckpointError: No intact copy of some byte is within reach.
            StoreError: The durable tier could not be read.
        """
        opened = self.opened
        if opened is None or opened.files is None or self._metadata is None:
            raise RestoreError("read_data without read_metadata", operation="load")
        session, log = self.session, self.session.log.at_step(opened.step)
        # Of what lies in the memory of several nodes, this one may hold nothing.
        self.tier = "memory" if opened.files.held else "peer" if opened.scattered else "durable"
        try:
            if self._joined is None or self._joined.rank == 0:
                self._warn_of_empty(getattr(planner, "original_state_dict", None), opened.name)
            reader = PlanReader(self._metadata, opened.files, self._transforms, Trust.of(self.settings.config), log)
            if opened.scattered:
                assert self._joined is not None
                with self._joined.failing_together():
                    notes = exchange(self._joined, opened.files, reader.spans(plan))
                for note in notes:
                    log.error("%s: skipping this copy, trying the next: %s", opened.name, note)
                opened.rejected.extend(notes)
            elif opened.shared:
                assert self._joined is not None
                with self._joined.failing_together():
                    share_reads(self._joined, opened.files, reader.spans(plan))
            reader.read(plan, planner)
        except TieredCheckpointError as error:
            self.error = error
            if isinstance(error, DAMAGE):
                log.error("%s is damaged: %s", opened.name, error)
            raise
        finally:
            self._leave()
            opened.close()
        note_restore(session, opened, self.tier, self._began)
        session.save_ids.follow(opened.newest_save_id)
        if opened.save_id:
            self._shared.saver.is_complete(opened.name, opened.save_id, opened.step)
        session.take_up()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ------------------------------------------------------------------------------------- ours
    def reject(self) -> None:
        """Leaves the checkpoint that was loaded last out of account from now on."""
        if self.opened is not None and self.opened.save_id:
            # Empty where another rank can't read it, which says why.
            self._rejected[self.opened.save_id] = f"{self.opened.name}: {self.error}" if self.error is not None else ""

    def release(self) -> None:
        """Lets go of the checkpoint that is open, where the load ended before :meth:`read_data`."""
        self._leave()
        if self.opened is not None:
            self.opened.close()

    def close(self) -> None:
        """See :meth:`TieredStorageWriter.close`."""
        self._close()
        close_shared(self.settings)

    def __del__(self) -> None:
        # DCP tells no reader that a load has failed while it was planned.
        with contextlib.suppress(Exception):
            self.release()

    # ----------------------------------------------------------------------------------- inside
    @property
    def _shared(self) -> Shared:
        return shared_of(self.settings)

    def _warn_of_empty(self, state: Any, name: str) -> None:
        """Warns of what is not loaded because there is nothing to load it into: DCP itself says nothing."""
        assert self._metadata is not None
        held = self._metadata.state_dict_metadata
        for path in _empty(state, ()):
            if any(fqn.startswith(f"{path}.") for fqn in held):
                self.session.log.warning(
                    "%s is empty in the state to load into, so what %s holds of it is not loaded; an optimizer that has"
                    " made no step gets its state by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
                    path,
                    name,
                )

    def _leave(self) -> None:
        if self._joined is not None:
            joined, self._joined = self._joined, None
            joined.close()

    def _close(self) -> None:
        self.release()
        if isinstance(self.error, DAMAGE):
            self.reject()
        self.opened = None

    def _open(self) -> Metadata:
        session, config = self.session, self.settings.config
        tier, failed, self.failed = None, self.failed, None
        try:
            tier = session.open().tier
        except Exception as error:
            # The others are on their way to the first exchange: they must hear of it there.
            failed = error
        root = tier.root if tier is not None else Path("/")
        group = self._group(root)
        try:
            with group.failing_together():
                coordination.agree(group, failed)
                assert tier is not None
                opened = self.opened = open_shards(tiers_of(session, config), self.selector, group, self._rejected)
                metadata = self._parse(opened)
                # Of a large job these are hundreds of MB on each rank.
                del opened.small[METADATA]
                opened.expect(_sizes(metadata))
        except BaseException:
            group.close()
            raise
        # Reading may need it once more; every rank that has come so far comes there, or none does.
        self._joined = group
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def _parse(self, opened: OpenShards) -> Metadata:
        if Trust.of(self.settings.config).is_full:
            # Who trusts what is stored may use planners that keep classes of their own in it.
            with contextlib.suppress(Exception):
                trusted: Metadata = pickle.loads(opened.metadata)
                return trusted
        return parse_metadata(opened.metadata, tier="durable", where=str(self.checkpoint_id))

    def _group(self, root: Path) -> coordination.Group:
        alone, process_group = self._no_dist, self._process_group
        if alone is None and process_group is None:
            alone, process_group, _ = dcp_arguments("_load_state_dict") or (None, None, False)
        node = coordination.node_of(root)
        if alone or (process_group is not None and dist.get_world_size(process_group) == 1):
            return coordination.Group(node)
        if process_group is not None:
            return coordination.GivenGroup(node, process_group)
        timeout_s = float(self.settings.config.support.wait_timeout_s)
        return coordination.current_group(root, self.session.clock, timeout_s=timeout_s)


def _empty(state: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Where a state has a dictionary with nothing in it."""
    if isinstance(state, Mapping):
        if path and not state:
            yield ".".join(path)
        for key, value in state.items():
            yield from _empty(value, (*path, str(key)))


def _sizes(metadata: Metadata) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes
