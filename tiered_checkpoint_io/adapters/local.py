"""Local checkpoints: each rank its own state, as one file, saved without any collective."""

from __future__ import annotations

import os
from typing import Any

from tiered_checkpoint_io.adapters.async_saves import show_failures
from tiered_checkpoint_io.adapters.dcp_reader import TieredStorageReader
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.adapters.groups import Ranks, shard_role_of
from tiered_checkpoint_io.adapters.state import fill, local_part
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks.coordination import ready_together
from tiered_checkpoint_io.engine.restore.catalog import tiers_of
from tiered_checkpoint_io.engine.restore.restore import note_restore, restore_local
from tiered_checkpoint_io.engine.restore.shard_reading import OpenShards
from tiered_checkpoint_io.engine.save.facts import ShardRole, check_attempt, count_save, warn_at_first_save
from tiered_checkpoint_io.engine.save.saver import save_local
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model import ids


def save_local_state(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    writer: TieredStorageWriter,
    ranks: Ranks,
) -> tuple[SaveReport, str | None] | None:
    """Saves this rank's part of a state, with the arguments of ``dcp.save``.

    Returns None if another rank saves the same, if the save failed and ``on_save_error`` is ``warn``, or if it is
    memory-only and there was no room.
    """
    role = shard_role_of(*ranks[:3], alone=ranks.no_dist)
    writer.reset(checkpoint_id)
    session, located, settings = writer.session, writer.located, writer.settings
    # Also if another rank of its replicas saves: that may be this one the next time.
    repeat = count_save(session, located.name, located.step)
    if not ranks.no_dist:
        # The one time that ranks wait for each other, if peers are to keep copies.
        session.meet_peers(ranks.process_group, ids.series_of(located.name, located.step))

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
        return None
    settings.check_world_size(role.degree, writer.checkpoint_id)

    def planned() -> Image:
        image = plan(local_part(state_dict))
        if role.shard == 0:
            # The other shards hold the same objects, besides their tensors.
            warn_at_first_save(session, located.name, image)
        return image

    try:
        return save_local(
            session,
            surface,
            planned,
            role,
            name=located.name,
            step=located.step,
            repeat=repeat,
            durable=settings.is_durable(located.step, writer.save_to_s3),
            wait=writer.waits,
            threads=writer.threads,
        )
    except ConfigError:
        raise
    except Exception as error:
        if error in earlier:
            # This error was logged and counted when it happened.
            raise
        session.failed(located.name, located.step, error)
        return None


def load_local_state(
    state_dict: dict[str, Any],
    reader: TieredStorageReader,
    role: ShardRole,
    checkpoint_id: str | os.PathLike[str] | None,
    ranks: Ranks,
) -> None:
    """Loads this rank's shard; all ranks that load call this. The reader's ``opened`` is then its checkpoint."""
    reader.reset(checkpoint_id)
    session, config = reader.session, reader.settings.config
    began = session.clock.monotonic()
    # Sharding groups with replicas load together: all replicas need the same checkpoint.
    together = ranks.process_group if ranks.replication_group is None else None
    with (
        ready_together(
            lambda: session.open().tier.root, session.clock, alone=ranks.no_dist, process_group=together
        ) as group,
        restore_local(tiers_of(session, config), reader.selector, group, role) as found,
    ):
        loaded = found.load(Trust.of(config), map_location="cpu", rank=role.shard)
        fill(state_dict, loaded, where=f"{found.name}, shard {role.shard}")
    content = found.content
    assert content is not None
    note_restore(session, found, found.tier, began)
    session.save_ids.follow(found.newest_save_id or content.save_id)
    reader.opened = OpenShards(
        name=found.name,
        dirpath=found.dirpath,
        content=content,
        rejected=found.rejected,
        newest_save_id=found.newest_save_id,
    )
    session.take_up()
