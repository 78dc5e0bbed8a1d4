"""Where the memory of a job lies that never named a namespace: earlier releases had one for all such jobs."""

from __future__ import annotations

import contextlib

from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier, namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def namespace_here(config: TieredCheckpointConfig) -> str:
    """The namespace of this node's memory that a job uses.

    It is the configured one, but for a job that named none and has checkpoints of its dirpath where earlier releases
    put those of all such jobs: it goes on there until they are cleaned away.
    """
    if config.is_named:
        return config.namespace
    tier = MemoryTier(namespace_root(config.memory_dir, ids.UNNAMED))
    tier.use_spill(config.spill_dir)
    held: list[StoredPart] = []
    for each in (tier, tier.replicas):
        # There is none, or it is not ours: opening our own tells what is wrong.
        with contextlib.suppress(OSError):
            held += each.parts()
    return ids.UNNAMED if any(each.part.dirpath == config.dirpath for each in held) else config.namespace
