"""Checkpoints of a job's ranks: ``save``, ``async_save`` and ``load``.

``save`` returns once a durable checkpoint is committed on the durable tier, ``async_save`` once it is
captured. Sharded ones go through torch.distributed.checkpoint (DCP); in local ones each rank saves its own state.
"""

from __future__ import annotations

import copy
import io
import os
from concurrent.futures import Future
from typing import Any, Literal, get_args

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.adapters.calls import (
    AsyncSave,
    Ranks,
    as_save_error,
    first_failure,
    register,
    save_planner,
    show_failures,
    world,
)
from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.engine.ranks.run import current_run
from tiered_checkpoint_io.engine.restore.catalog import tiers_of
from tiered_checkpoint_io.engine.restore.restore import Restored, note_restore, restore_local
from tiered_checkpoint_io.engine.restore.search import DAMAGE
from tiered_checkpoint_io.engine.restore.shards import OpenShards
from tiered_checkpoint_io.engine.save.facts import SaveFacts, check_attempt, warn_at_first_save
from tiered_checkpoint_io.engine.save.saver import LocalSaver
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model import ids


def _save_local(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: TieredStorageWriter,
    ranks: Ranks,
) -> tuple[SaveReport | None, str | None]:
    """Saves this rank's part of a state; returns the report, and the drain's operation that uploads the part, if any.

    There is no report if another rank saves the same, if the save failed and ``on_save_error`` is ``warn``, or if it is
    memory-only and there was no room.
    """
    role = ranks.shard_role()
    writer.reset(checkpoint_id)
    session, located, settings = writer.session, writer.located, writer.settings
    # Also if another rank of its replicas saves: that may be this one the next time.
    name, step = located.name, located.step
    series = ids.series_of(name, step)
    repeat = current_run().count_save(session.config.namespace, series, step)
    if not ranks.no_dist:
        # The one time that ranks wait for each other, if peers are to keep copies.
        session.meet_peers(ranks.process_group, series)

    earlier: list[Exception] = []

    def surface() -> None:
        try:
            show_failures()
            session.surface()
        except Exception as error:
            earlier.append(error)
            raise

    if not role.writes:
        surface()
        check_attempt()
        return None, None
    settings.check_world_size(role.degree, writer.checkpoint_id)

    def planned() -> Image:
        image = plan(_local_part(state_dict))
        if role.shard == 0:
            # The other shards hold the same objects, besides their tensors.
            warn_at_first_save(session, name, image)
        return image

    try:
        durable = settings.is_durable(step, writer.save_to_s3)
        wanted = SaveFacts(name, "", step, role.degree, durable, payload="local", series=series, coordinator=0)
        saver = LocalSaver(session, role.shard, wanted, repeat, writer.waits, writer.threads)
        return saver.save(surface, planned) or (None, None)
    except ConfigError:
        raise
    except Exception as error:
        if error in earlier:
            # This error was logged and counted when it happened.
            raise
        session.failed(name, step, error)
        return None, None


def _load_local(
    state_dict: dict[str, Any],
    reader: TieredStorageReader,
    checkpoint_id: str | os.PathLike[str] | None,
    ranks: Ranks,
) -> None:
    """Loads this rank's shard; all ranks that load call this. The reader's ``opened`` is then its checkpoint."""
    role = ranks.shard_role()
    reader.reset(checkpoint_id)
    session, config = reader.session, reader.settings.config
    began = session.clock.monotonic()
    # Sharding groups with replicas load together: all replicas need the same checkpoint.
    together = ranks.process_group if ranks.replication_group is None else None

    def read(found: Restored) -> None:
        loaded = found.load(Trust.of(config), map_location="cpu", rank=role.shard)
        _fill(state_dict, loaded, where=f"{found.name}, shard {role.shard}")

    group = coordination.current_group(session.clock, alone=ranks.no_dist, process_group=together)
    found = restore_local(lambda: (tiers_of(session, config), reader.selector), group, role, read)
    content = found.content
    assert content is not None
    note_restore(session, found, began)
    session.save_ids.follow(found.newest_save_id or content.save_id)
    reader.opened = OpenShards(
        name=found.name,
        dirpath=found.dirpath,
        content=content,
        rejected=found.rejected,
        newest_save_id=found.newest_save_id,
        tier=found.tier,
    )
    session.take_up()


Kind = Literal["sharded", "local"]

#: More damaged checkpoints than this in a row are no accident.
_MAX_ATTEMPTS = 64


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: TieredStorageWriter | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    coordinator_rank: int | None = None,
    kind: Kind = "sharded",
    replication_group: Any = None,
    wait: bool | None = None,
    **options: Any,
) -> Metadata | SaveReport | None:
    """Saves a checkpoint of all ranks through both tiers, and returns once it is committed there.

    The wait ends without a commit after 30 s without progress, or after 30 minutes: with ``on_save_error: warn``
    training continues, and the checkpoint stays in node memory, queued for upload.

    ``sharded``: as ``torch.distributed.checkpoint.save`` does; any number of ranks can load it.
    ``local``: each rank's part as one file, without any collective; as many shards have to load it.

    Args:
        state_dict: The state; later changes to it are not in the checkpoint. Tensors of any shape, dtype and device.
            For kind ``local``: anything that can be pickled; of DTensors and ShardedTensors the rank's own part.
        checkpoint_id: Its name, path or URL; the same on all ranks.
        storage_writer: The writer; by default one made from ``options``.
        planner: As DCP takes it, only for ``sharded``; by default one that plans once the parts that stay the same.
        process_group: As DCP takes it. For kind ``local``: the ranks that have one shard each; all by default.
        no_dist: As DCP takes it.
        coordinator_rank: The global rank that coordinates, or of ``replication_group`` saves; the first by default.
        kind: ``sharded`` or ``local``.
        replication_group: For kind ``local``: the ranks that hold the same as this one, as a process group
            or as global ranks. Only one of them saves, the lowest by default; the others do not wait for it.
        wait: False to return once node memory has the checkpoint. By default the writer's ``wait``, or True.
        options: As :class:`TieredStorageWriter` takes them.

    Returns:
        The metadata for kind ``sharded``, this rank's part for kind ``local``. None if the save failed
        and ``on_save_error`` is ``warn``, and if another rank of the replication group saves.

    Raises:
        TieredCheckpointError: The save failed, or an earlier asynchronous one did, and ``on_save_error`` is
            ``raise``: of kind ``sharded`` the lowest failing rank's error, on all ranks; of kind ``local`` only on this
            rank, or, if the checkpoint is not committed on the durable tier, on all ranks that wait.
        CheckpointException: A ``sharded`` save failed in DCP itself or in the user's own code, likewise.
        ConfigError: Arguments that do not go together.
    """
    writer = storage_writer or TieredStorageWriter(**options)
    before, writer.wait_option = writer.wait_option, writer.wait_option if wait is None else wait
    try:
        ranks = Ranks(process_group, replication_group, coordinator_rank, no_dist)
        if not _is_local(kind, planner, replication_group):
            return _save_sharded(state_dict, checkpoint_id, writer, planner, ranks)
        return _save_local(state_dict, checkpoint_id, writer, ranks)[0]
    finally:
        writer.wait_option = before


def _save_sharded(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: TieredStorageWriter,
    planner: Any,
    ranks: Ranks,
) -> Metadata | None:
    alone, coordinator, process_group = ranks.are_alone, ranks.coordinator, ranks.process_group
    if planner is None:
        what = f"{writer.settings.config.namespace}/{coordinator}"
        planner = save_planner(what, process_group, alone=alone)
    writer.reset(checkpoint_id)
    if not alone:
        writer.meet_peers(process_group)
    state, failed = _plain(state_dict)
    writer.failed = as_save_error(failed) if failed is not None else None
    try:
        # DCP's own save has the first rank coordinate.
        metadata: Metadata = state_dict_saver._save_state_dict(
            state,
            writer,
            process_group=process_group,
            coordinator_rank=coordinator,
            no_dist=alone,
            planner=planner,
        )
        return metadata
    except CheckpointException as error:
        _, first = first_failure(error)
        if writer.settings.config.on_save_error == "raise":
            # DCP's exception is not one that `except Exception` handles.
            if isinstance(first, TieredCheckpointError):
                raise first from error
            raise
        writer.session.log.exception("%s was not saved; training continues", checkpoint_id or writer.checkpoint_id)
        return None


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: TieredStorageWriter | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    coordinator_rank: int | None = None,
    kind: Kind = "sharded",
    replication_group: Any = None,
    planner: Any = None,
    **options: Any,
) -> AsyncSave:
    """Saves as :func:`save` does, with all arguments of it, and returns once the state is captured in node memory.

    The tensors are copied once, to the files that the upload reads; for kind ``sharded``, DCP's exchanges between the
    ranks take further time. Each rank then hashes its part in the background, at several gigabytes a second and thread,
    and commits it in memory; if the process is killed before, the previous checkpoint stays the newest.

    A failed upload is shown once: by the future's ``result()``, by :func:`maybe_finalize_async_calls`, or by the next
    save, whichever is first.

    Returns:
        A future with the result of :func:`save`: done once the checkpoint is on the durable tier, or in memory if it is
        memory-only; on ranks other than the coordinator (``local``: shard 0), once this rank's part is. The future has
        the exception of a captured save that failed later, for any ``on_save_error``. None if the capture failed, and
        ``on_save_error`` is ``warn``.

    Raises:
        TieredCheckpointError: The state could not be captured, or an earlier asynchronous save failed, and
            ``on_save_error`` is ``raise``; see :func:`save`.
        ConfigError: Arguments that do not go together.
    """
    writer = storage_writer or TieredStorageWriter(**options)
    ranks = Ranks(process_group, replication_group, coordinator_rank, no_dist)
    sealing: Future[str | None] | None = None
    op_id: str | None = None
    saved: Any = None
    before, writer.seals_in_background = writer.seals_in_background, True
    try:
        if _is_local(kind, planner, replication_group):
            saved, op_id = _save_local(state_dict, checkpoint_id, writer, ranks)
        elif (saved := _save_sharded(state_dict, checkpoint_id, writer, planner, ranks)) is not None:
            writer.saver.seal_in_background()
            sealing, op_id = writer.saver.sealing, writer.saver.op_id
    finally:
        writer.seals_in_background = before
    taking_part = tuple(group for group in (process_group or world(), replication_group) if group is not None)
    future = AsyncSave(writer.session, writer.located.name, writer.located.step, taking_part)
    register(future)
    future.follow(sealing, op_id, saved)
    return future


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: TieredStorageReader | None = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    coordinator_rank: int | None = None,
    kind: Kind = "sharded",
    replication_group: Any = None,
    **options: Any,
) -> TieredStorageReader:
    """Loads a checkpoint of all ranks into ``state_dict``.

    ``sharded``: as ``torch.distributed.checkpoint.load`` does. If a read finds damage, and the checkpoint was not
    requested by its name, all ranks load the next one.
    ``local``: each rank its shard of one checkpoint; with a ``replication_group``, all ranks of the job together.

    Args:
        state_dict: The state to load into, with tensors of the saved shapes. After an error, its content is undefined.
        checkpoint_id: Its name, path or URL; ``tiered:latest`` is the newest complete one of names in no folder, else
            of the only folder. ``stage1/tiered:latest`` is the newest of that folder. By default the reader's last one,
            else the newest.
        storage_reader: The reader; by default one made from ``options``.
        planner: As DCP takes it; only for ``sharded``.
        process_group: As :func:`save` takes it.
        no_dist: As DCP takes it.
        coordinator_rank: As :func:`save` takes it; ignored for ``local``, because all ranks load.
        kind: As it was saved.
        replication_group: As :func:`save` takes it: its ranks load the same file.
        options: As :class:`TieredStorageReader` takes them.

    Returns:
        The reader, whose ``opened`` is the loaded checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        RestoreError: No checkpoint is intact; several folders have some and none was named; or other shards made it.
        CheckpointException: Any other failure of some rank.
    """
    reader = storage_reader or TieredStorageReader(**options)
    ranks = Ranks(process_group, replication_group, coordinator_rank, no_dist)
    if _is_local(kind, planner, replication_group):
        if replication_group is None:
            ranks = ranks._replace(coordinator_rank=None)
        _load_local(state_dict, reader, checkpoint_id, ranks)
        return reader
    for _ in range(_MAX_ATTEMPTS):
        reader.reset(checkpoint_id)
        loaded, reader.failed = _plain(state_dict)
        try:
            # DCP's own load has the first rank coordinate.
            state_dict_loader._load_state_dict(
                loaded,
                reader,
                process_group=process_group,
                coordinator_rank=ranks.coordinator,
                no_dist=ranks.are_alone,
                planner=planner,
            )
        except CheckpointException as error:
            if reader.opened is None and isinstance(reader.error, TieredCheckpointError):
                # No checkpoint was chosen; all ranks know why.
                raise reader.error from None
            # All ranks have the same failures, and so decide alike.
            if not any(isinstance(failure, DAMAGE) for failure, _ in error.failures.values()):
                reader.release()
                raise
            reader.reject()
            continue
        _put(loaded, state_dict)
        return reader
    raise RestoreError(f"{_MAX_ATTEMPTS} checkpoints in a row are damaged", operation="load", key=reader.checkpoint_id)


def _plain(state_dict: dict[str, Any]) -> tuple[dict[str, Any], Exception | None]:
    """Returns the values of stateful objects, or an error: the other ranks would wait for a rank that raised it."""
    try:
        # In the same order on all ranks, which may meet in it.
        values = {key: state_dict[key] for key in sorted(state_dict)}
        return {key: each.state_dict() if _is_stateful(each) else each for key, each in values.items()}, None
    except Exception as error:
        return {}, error


def _put(loaded: dict[str, Any], state_dict: dict[str, Any]) -> None:
    for key in sorted(state_dict):
        if _is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]


def _is_stateful(value: Any) -> bool:
    # A check of a tensor against the protocol takes longer than to plan its load.
    return type(value) not in (torch.Tensor, torch.nn.Parameter) and isinstance(value, Stateful)


def _is_local(kind: str, planner: Any, replication_group: Any) -> bool:
    if kind not in get_args(Kind):
        raise ConfigError(f"kind is {kind!r}", operation="call", hint="allowed: 'sharded', 'local'")
    if kind == "local" and planner is not None:
        raise ConfigError("a planner for a local checkpoint", operation="call", hint="planners are for kind='sharded'")
    if kind == "sharded" and replication_group is not None:
        raise ConfigError(
            "replication_group for a sharded checkpoint",
            operation="call",
            hint="give one replica's sharding group as process_group, and save on its ranks alone",
        )
    return kind == "local"


# ---------------------------------------------------------------- a rank's own part of a state
#: Containers that are looked into, besides dictionaries; others are pickled whole.
_LISTS = (list, tuple)


def _local_part(state: Any) -> Any:
    """Copies the containers of a state, with this rank's own tensor for each DTensor, a list for each ShardedTensor."""
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, ShardedTensor):
        return [shard.tensor for shard in state.local_shards()]
    if isinstance(state, dict):
        # Of its own type, and with its attributes: modules keep versions in those.
        copied = copy.copy(state)
        for key, each in state.items():
            copied[key] = _local_part(each)
        return copied
    if type(state) in _LISTS:
        return type(state)(_local_part(each) for each in state)
    if isinstance(state, Stateful) and not isinstance(state, torch.Tensor):
        return _local_part(state.state_dict())
    return state


def _fill(state: dict[str, Any], loaded: Any, *, where: str) -> None:
    """Puts a loaded state, which is copied, into a state: tensors in place, all else replaced.

    As with DCP, values without a key in the state are left out. An empty dictionary, such as the state of an optimizer
    that has made no step yet, takes all.
    """
    _Filling(where).dictionary(state, loaded, "")


class _Filling:
    def __init__(self, where: str) -> None:
        self._where = where
        #: Copies of values that stay in the state after the load; a shared tensor stays shared.
        self._copied: dict[int, Any] = {}

    def dictionary(self, state: dict[Any, Any], loaded: Any, path: str) -> None:
        if not isinstance(loaded, dict):
            raise self._other(path, "a dictionary", loaded)
        if not state:
            state.update(copy.deepcopy(loaded, self._copied))
            return
        for key in list(state):
            here = f"{path}.{key}" if path else str(key)
            if key not in loaded:
                raise RestoreError(
                    f"the checkpoint has no {here!r}",
                    operation="load",
                    key=self._where,
                    hint="leave it out of the state, or load another checkpoint",
                )
            state[key] = self.value(state[key], loaded[key], here)

    def value(self, state: Any, loaded: Any, path: str) -> Any:
        if isinstance(state, DTensor):
            self._copy(state.to_local(), loaded, path)
        elif isinstance(state, ShardedTensor):
            shards = state.local_shards()
            if not isinstance(loaded, list) or len(loaded) != len(shards):
                raise self._other(path, f"{len(shards)} shards", loaded)
            for shard, source in zip(shards, loaded, strict=True):
                self._copy(shard.tensor, source, path)
        elif isinstance(state, torch.Tensor):
            if _has_parts(state) and isinstance(loaded, torch.Tensor):
                # Made of several tensors, whose sizes may be others.
                return _apart(loaded)
            self._copy(state, loaded, path)
        elif isinstance(state, dict):
            self.dictionary(state, loaded, path)
        elif isinstance(state, Stateful):
            own = state.state_dict()
            self.dictionary(own, loaded, path)
            state.load_state_dict(own)
        elif type(state) in _LISTS and type(loaded) is type(state) and len(loaded) == len(state):
            pairs = enumerate(zip(state, loaded, strict=True))
            values = [self.value(mine, theirs, f"{path}[{index}]") for index, (mine, theirs) in pairs]
            if not isinstance(state, list):
                return type(state)(values)
            state[:] = values
        else:
            return copy.deepcopy(loaded, self._copied)
        return state

    def _copy(self, target: torch.Tensor, source: Any, path: str) -> None:
        if not isinstance(source, torch.Tensor):
            raise self._other(path, "a tensor", source)
        if target.shape != source.shape:
            raise RestoreError(
                f"{path!r} has shape {tuple(target.shape)} on this rank, {tuple(source.shape)} in the checkpoint",
                operation="load",
                key=self._where,
                hint="local checkpoints are loaded by ranks that shard as those did that saved them",
            )
        with torch.no_grad():
            # Of a quantized one, a detached alias would take the scales for itself.
            (target if target.is_quantized else target.detach()).copy_(source)

    def _other(self, path: str, wanted: str, found: Any) -> RestoreError:
        return RestoreError(
            f"{path or 'the state'!r} is {wanted} on this rank, and a {type(found).__name__} in the checkpoint",
            operation="load",
            key=self._where,
        )


def _has_parts(tensor: torch.Tensor) -> bool:
    return tensor.is_nested or tensor.layout != torch.strided


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    copied: torch.Tensor = torch.load(file, weights_only=False)
    return copied
