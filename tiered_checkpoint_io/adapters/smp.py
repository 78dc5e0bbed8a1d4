"""Local checkpoints and coordinators, as the SageMaker model parallelism library (SMP) has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.adapters.local_state import fill, local_part
from tiered_checkpoint_io.engine.restore.catalog import tiers_of
from tiered_checkpoint_io.engine.restore.local_restore import LocalRestorer
from tiered_checkpoint_io.engine.restore.shard_reading import OpenShards
from tiered_checkpoint_io.engine.save.uncoordinated import LocalSave, Place, save_local
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, RestoreError, UsageError
from tiered_checkpoint_io.formats.image import plan


# ------------------------------------------------------------------------------------------ groups
def rank_in_group(process_group: Any, coordinator_rank: int | None) -> int:
    """The coordinator's rank in its group, as DCP wants it; asks nobody.

    Args:
        process_group: The ranks that save or load together; None for all.
        coordinator_rank: A global rank of the group, as SMP and torch.distributed have it; where it is
            none of them, the rank in the group, as DCP has it. None for the first.

    Raises:
        UsageError: It is neither.
    """
    if coordinator_rank is None or not (dist.is_available() and dist.is_initialized()):
        return 0
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if coordinator_rank in ranks:
        return ranks.index(coordinator_rank)
    if 0 <= coordinator_rank < len(ranks):
        return coordinator_rank
    raise UsageError(
        f"coordinator_rank is {coordinator_rank}, the process group has ranks {ranks}",
        operation="save",
        hint="give the global rank of a member of the group",
    )


def place_of(process_group: Any, replication_group: Any, writer: int | None) -> Place:
    """Which shard this rank has, and whether it saves it; asks nobody.

    Args:
        process_group: The sharding group: ranks that hold one state among them, each another shard. By
            default all ranks, but with a ``replication_group`` those that have this rank's place in theirs.
        replication_group: The ranks that hold the same shard: a process group, or their global ranks.
        writer: The global rank of the one that saves for them; by default the lowest.

    Raises:
        UsageError: The groups do not tell.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Place()
    if replication_group is None:
        if writer is not None:
            raise UsageError(
                "coordinator_rank without replication_group",
                operation="save",
                hint="in a local checkpoint it says which rank of a replication group saves: give that group as"
                " replication_group=, and the sharding group, if any, as process_group=",
            )
        return Place(dist.get_rank(process_group), dist.get_world_size(process_group))
    rank = dist.get_rank()
    ranks = _ranks_of(replication_group)
    saves = min(ranks) if writer is None else writer
    if rank not in ranks or saves not in ranks:
        raise UsageError(
            f"the replication group has ranks {ranks}, not {rank if rank not in ranks else saves}",
            operation="save",
            rank=rank,
            hint="each rank gives the group that it is in, and coordinator_rank as a global rank of it",
        )
    if process_group is not None:
        return Place(dist.get_rank(process_group), dist.get_world_size(process_group), rank == saves)
    shard, degree = _in_regular_layout(ranks)
    return Place(shard, degree, rank == saves)


def _ranks_of(group: Any) -> list[int]:
    if isinstance(group, Sequence) and not isinstance(group, str):
        return sorted(int(rank) for rank in group)
    return sorted(dist.get_process_group_ranks(group))


def _in_regular_layout(ranks: list[int]) -> tuple[int, int]:
    """The shard and the shard degree of a replication group, where all such groups lie as in a mesh."""
    world, size = dist.get_world_size(), len(ranks)
    stride = ranks[1] - ranks[0] if size > 1 else 1
    regular = ranks == list(range(ranks[0], ranks[0] + stride * size, stride))
    outer, inner = divmod(ranks[0], stride * size)
    if not regular or inner >= stride or world % (stride * size):
        raise UsageError(
            f"which shard the replication group {ranks} of {world} ranks has can't be told from it",
            operation="save",
            hint="give the sharding group as process_group=",
        )
    return outer * stride + inner, world // size


# --------------------------------------------------------------------------------------- save, load
def save_local_state(
    state_dict: dict[str, Any],
    writer: TieredStorageWriter,
    place: Place,
    checkpoint_id: str | os.PathLike[str] | None,
    *,
    background: bool = False,
) -> LocalSave:
    """Saves what this rank has of a state, without any collective.

    Args:
        state_dict: The state.
        writer: Which checkpoint, and where to.
        place: Which shard this rank has.
        checkpoint_id: As ``dcp.save`` takes it.
        background: Whether what memory has no room for goes to the durable tier while training goes on.

    Raises:
        UsageError: ``world_size`` was told, and is not the shard degree.
        TieredCheckpointError: As :func:`save_local`.
    """
    writer.reset(checkpoint_id)
    located, settings = writer.located, writer.settings
    if settings.world_size not in (None, place.degree):
        raise UsageError(
            f"world_size is {settings.world_size}, but {place.degree} shards make the state",
            operation="save",
            key=writer.checkpoint_id,
            hint="leave world_size out, or give the shard degree",
        )
    return save_local(
        writer.session,
        plan(local_part(state_dict)),
        place,
        name=located.name,
        step=located.step,
        durable=settings.is_durable(located.step, writer.save_to_s3),
        wait=writer.waits,
        background=background and not writer.waits,
        threads=writer.threads,
    )


def load_local_state(
    state_dict: dict[str, Any],
    reader: TieredStorageReader,
    place: Place,
    checkpoint_id: str | os.PathLike[str] | None,
    *,
    alone: bool = False,
) -> None:
    """Loads this rank's shard, without any collective; the reader's ``opened`` then tells of which checkpoint.

    Args:
        state_dict: What to load into.
        reader: Which checkpoint, and from where.
        place: Which shard this rank has.
        checkpoint_id: As ``dcp.load`` takes it.
        alone: Whether no other rank loads.

    Raises:
        TieredCheckpointError: As :meth:`LocalRestorer.restore`, and :func:`fill`.
    """
    reader.reset(checkpoint_id)
    session, config = reader.session, reader.settings.config
    tier = session.open().tier
    peers = None if alone else session.local_peers()
    with LocalRestorer(tiers_of(session, config), place, peers).restore(reader.selector) as found:
        trust = Trust.of(config)
        try:
            loaded = trust.load(found.path, map_location="cpu", mmap=True)
        except ConfigError:
            raise
        except Exception as error:
            raise RestoreError(
                f"torch.load refused {found.name}, whose bytes are intact: {trust.reason(error)}",
                operation="load",
                tier=found.tier,
                key=found.name,
                rank=place.shard,
                step=found.step,
                hint=trust.hint(found.path),
            ) from error
        fill(state_dict, loaded, where=f"{found.name}, shard {place.shard}")
    content = found.content
    assert content is not None
    session.newest_seen = max(filter(None, (session.newest_seen, found.newest_save_id)), default=None)
    reader.opened = OpenShards(
        name=found.name, content=content, rejected=found.rejected, newest_save_id=found.newest_save_id
    )
    if any(stored.pending for stored in tier.parts()):
        # What an earlier process left; only this node's ranks can see it.
        session.open().drain.start()
